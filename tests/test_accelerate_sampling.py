"""Sampled text of an accelerated model: transformers' distribution, and the same text with and without speculation."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

import outpace
from tests.accelerating import accelerated, noisy_model, padded_batch, plain_token, tiny_model
from tests.sampling.chi_square import ALPHA, chi_square_p

pytestmark = pytest.mark.slow

SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "temperature": {"temperature": 0.6, "top_k": 0},
    "top_p": {"temperature": 1.4, "top_k": 0, "top_p": 0.8},
    "top_k and top_p": {"temperature": 1.7, "top_k": 9, "top_p": 0.9},
    "min_p": {"temperature": 2.0, "top_k": 0, "min_p": 0.05},
    "min_p behind top_p": {"temperature": 2.0, "top_k": 30, "top_p": 0.9, "min_p": 0.1},
    "top_p of 0": {"temperature": 2.0, "top_k": 0, "top_p": 0.0},
    "typical_p": {"temperature": 1.5, "top_k": 0, "typical_p": 0.7},
    "epsilon_cutoff": {"temperature": 1.5, "top_k": 0, "epsilon_cutoff": 0.01},
    "eta_cutoff": {"temperature": 1.5, "top_k": 0, "eta_cutoff": 0.01},
    "top_h": {"temperature": 1.5, "top_k": 0, "top_h": 0.5},
    "repetition_penalty": {"temperature": 1.5, "repetition_penalty": 1.5},
    "renormalize_logits": {"temperature": 1.5, "top_p": 0.9, "renormalize_logits": True},
}
SAMPLES = 600


def _first_token_law(prompt: torch.Tensor, arguments: dict[str, Any]) -> list[float]:
    """Probabilities transformers itself draws the next token from, by the scores it gives out."""
    output = tiny_model().generate(
        prompt, max_new_tokens=1, do_sample=True, return_dict_in_generate=True, output_scores=True, **arguments
    )
    law: list[float] = output.scores[0][0].double().softmax(dim=0).tolist()
    return law


@pytest.mark.parametrize("name", SETTINGS)
def test_law_of_a_token_is_that_of_transformers(name: str) -> None:
    prompt = padded_batch()["input_ids"][:1]
    law = _first_token_law(prompt, SETTINGS[name])
    assert max(law) < 0.95 or name == "top_p of 0", "a law without doubt tests nothing"
    found = accelerated().generate(
        prompt, max_new_tokens=1, do_sample=True, num_return_sequences=SAMPLES, seed=5, **SETTINGS[name]
    )
    counts = Counter(found[:, -1].tolist())
    assert chi_square_p([counts[token] for token in range(len(law))], law) > ALPHA


def test_law_of_three_tokens_with_a_draft_model() -> None:
    """All continuations of a small top_k, against transformers' probabilities of each step, multiplied."""
    prompt = padded_batch()["input_ids"][:1]
    arguments = {"do_sample": True, "temperature": 3.0, "top_k": 4}
    law = {(): 1.0}
    for _ in range(3):
        grown = {}
        for path, chance in law.items():
            history = torch.cat([prompt, torch.tensor([path], dtype=torch.int64)], dim=1)
            for token, share in enumerate(_first_token_law(history, {"temperature": 3.0, "top_k": 4})):
                if share:
                    grown[(*path, token)] = chance * share
        law = grown
    assert len(law) == 64 and math.isclose(sum(law.values()), 1.0)
    # Eight at a time: where prompts of many wait, drafts of the others are left out.
    options: dict[str, Any] = {"max_num_seqs": 8, "speculative_control": "fixed"}
    fast = outpace.accelerate(tiny_model(), assistant_model=noisy_model(), **options)
    found = fast.generate(prompt, max_new_tokens=3, num_return_sequences=2 * SAMPLES, seed=6, **arguments)
    assert sum(stats.accepted_tokens for stats in fast.last_stats) > SAMPLES // 2
    counts = Counter(map(tuple, found[:, -3:].tolist()))
    assert set(counts) <= set(law)
    assert chi_square_p([counts[path] for path in law], list(law.values())) > ALPHA


@pytest.mark.parametrize("name", SETTINGS)
def test_sampled_text_is_the_same_with_and_without_speculation(name: str) -> None:
    prompts = padded_batch()
    arguments = {"max_new_tokens": 25, "do_sample": True, "eos_token_id": plain_token(0, 5), **SETTINGS[name]}
    texts = [
        accelerated("llama", drafter).generate(**prompts, seed=9, **arguments) for drafter in ("none", "ngram", "draft")
    ]
    assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2])


def test_text_follows_torchs_seed() -> None:
    fast, prompts = accelerated(), padded_batch()
    torch.manual_seed(1)
    first = [fast.generate(**prompts, max_new_tokens=20, do_sample=True) for _ in range(2)]
    torch.manual_seed(1)
    again = [fast.generate(**prompts, max_new_tokens=20, do_sample=True) for _ in range(2)]
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    assert not torch.equal(first[0], first[1])
    torch.manual_seed(2)
    assert not torch.equal(fast.generate(**prompts, max_new_tokens=20, do_sample=True), first[0])


def test_a_seed_of_the_call_stands_alone() -> None:
    fast, prompts = accelerated(), padded_batch()
    torch.manual_seed(1)
    first = fast.generate(**prompts, max_new_tokens=20, do_sample=True, seed=4)
    assert torch.equal(fast.generate(**prompts, max_new_tokens=20, do_sample=True, seed=4), first)
    assert not torch.equal(fast.generate(**prompts, max_new_tokens=20, do_sample=True, seed=5), first)


def test_sequences_of_one_prompt_differ() -> None:
    fast, prompts = accelerated(), padded_batch()
    found = fast.generate(**prompts, max_new_tokens=20, do_sample=True, num_return_sequences=3, seed=1)
    assert found.shape[0] == 9
    assert len({tuple(row) for row in found.tolist()}) == 9
    for row in range(9):
        assert torch.equal(found[row, :12], prompts["input_ids"][row // 3])


def test_prefix_functions_are_told_the_prompt_a_sequence_belongs_to() -> None:
    def allowed(batch: int, ids: torch.Tensor) -> list[int]:
        return list(range(10 + 50 * batch, 40 + 50 * batch))

    found = accelerated().generate(
        **padded_batch(), max_new_tokens=6, do_sample=True, num_return_sequences=2, prefix_allowed_tokens_fn=allowed
    )
    for row in range(6):
        assert all(token in allowed(row // 2, found[row]) for token in found[row, 12:].tolist())


def test_scores_are_those_that_were_drawn_from() -> None:
    prompts = {key: value[:1] for key, value in padded_batch().items()}
    arguments = {"max_new_tokens": 6, "do_sample": True, "temperature": 1.5, "top_k": 20, "top_p": 0.9}
    asked = {"return_dict_in_generate": True, "output_scores": True}
    found = accelerated("llama", "draft").generate(**prompts, seed=3, **arguments, **asked)
    for at, scores in enumerate(found.scores):
        history = found.sequences[:, : 12 + at]
        reference = tiny_model().generate(history, **{**arguments, "max_new_tokens": 1}, **asked)
        torch.testing.assert_close(scores, reference.scores[0], rtol=1e-4, atol=1e-3)
        assert math.isfinite(scores[0, found.sequences[0, 12 + at]])


def test_rejection_sampling_has_the_same_law() -> None:
    prompt = padded_batch()["input_ids"][:1]
    config = {"method": "ngram", "prompt_lookup_min": 1, "rejection_sample_method": "standard"}
    fast = outpace.accelerate(tiny_model(), speculative_config=config, max_num_seqs=64)
    law = _first_token_law(prompt, SETTINGS["top_p"])
    found = fast.generate(
        prompt, max_new_tokens=2, do_sample=True, num_return_sequences=SAMPLES, seed=8, **SETTINGS["top_p"]
    )
    counts = Counter(found[:, -2].tolist())
    assert chi_square_p([counts[token] for token in range(len(law))], law) > ALPHA
