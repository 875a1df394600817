"""`accelerate`: the same greedy tokens as transformers' own `generate`, whatever is asked for."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

import outpace
from tests.accelerating import (
    KINDS,
    PAD,
    VOCAB,
    accelerated,
    both,
    noisy_model,
    padded_batch,
    plain_token,
    tiny_model,
    tokenizer,
)

pytestmark = pytest.mark.filterwarnings("ignore:Using the model-agnostic default `max_length`")

GREEDY: dict[str, dict[str, Any]] = {
    "nothing": {},
    "max_new_tokens": {"max_new_tokens": 40},
    "max_length": {"max_length": 31},
    "repetition_penalty": {"max_new_tokens": 40, "repetition_penalty": 1.4},
    "no_repeat_ngram_size": {"max_new_tokens": 40, "no_repeat_ngram_size": 2},
    "suppress_tokens": {"max_new_tokens": 20, "suppress_tokens": list(range(50, 150))},
    "begin_suppress_tokens": {"max_new_tokens": 20, "begin_suppress_tokens": list(range(100, 250))},
    "sequence_bias": {"max_new_tokens": 30, "sequence_bias": [[[7], 9.0], [[7, 8], 9.0]]},
    "forced_eos_token_id": {"max_new_tokens": 8, "forced_eos_token_id": 17},
    "encoder_repetition_penalty": {"max_new_tokens": 30, "encoder_repetition_penalty": 1.5},
    "encoder_no_repeat_ngram_size": {"max_new_tokens": 30, "encoder_no_repeat_ngram_size": 2},
    "remove_invalid_values": {"max_new_tokens": 20, "remove_invalid_values": True},
    "renormalize_logits": {"max_new_tokens": 20, "renormalize_logits": True},
    "sampling values without do_sample": {"max_new_tokens": 20, "temperature": 0.3, "top_k": 3, "top_p": 0.1},
    "everything off": {"max_new_tokens": 9, "num_beams": 1, "typical_p": 1.0, "guidance_scale": None, "min_length": 0},
}


@pytest.mark.parametrize("name", GREEDY)
def test_greedy_text_is_that_of_transformers(name: str) -> None:
    expected, found = both("llama", "ngram", padded_batch(), **GREEDY[name])
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("kind", "drafter"),
    [
        *((kind, drafter) for kind in KINDS for drafter in ("ngram", "suffix")),
        ("llama", "none"),
        ("llama", "draft"),
        ("gpt2", "draft"),
    ],
)
@pytest.mark.thinned(2)
def test_every_kind_of_model(kind: str, drafter: str) -> None:
    eos = plain_token(1, 15, kind)
    expected, found = both(kind, drafter, padded_batch(), max_new_tokens=60, eos_token_id=eos)
    assert torch.equal(found, expected)
    assert (expected[1, -1] == PAD).item(), "row 1 was to end before the others"


def test_speculation_was_at_work() -> None:
    for drafter, least in (("ngram", 3), ("suffix", 0), ("draft", 20)):
        fast = accelerated("llama", drafter)
        fast.generate(**padded_batch(), max_new_tokens=60)
        accepted = sum(stats.accepted_tokens for stats in fast.last_stats)
        assert accepted > least, f"{drafter}: {accepted} draft tokens accepted"


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"min_new_tokens": 25},
        {"min_length": 40},
        {"pad_token_id": 3},
        {"bad_words_ids": [[5], [7, 8], [9, 10, 11]]},
        {"exponential_decay_length_penalty": (5, 1.3)},
        {"max_length": 20},
    ],
    ids=lambda extra: next(iter(extra), "alone"),
)
def test_rows_end_at_their_own_eos(extra: dict[str, Any]) -> None:
    ends = [plain_token(0, 4), plain_token(1, 9), plain_token(2, 2)]
    expected, found = both("llama", "ngram", padded_batch(), **{"max_new_tokens": 40, "eos_token_id": ends, **extra})
    assert torch.equal(found, expected)


def test_a_bad_word_is_not_said_and_the_text_stays_the_same() -> None:
    said = plain_token(0, 3)
    expected, found = both("llama", "ngram", padded_batch(), max_new_tokens=20, bad_words_ids=[[said]])
    assert torch.equal(found, expected)
    assert said not in found[0, 12:]


class _Ban(LogitsProcessor):  # type: ignore[misc]
    """Forbids the token after the last one in the order of ids, as an example of a caller's own."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        scores = scores.clone()
        scores[torch.arange(scores.shape[0]), (input_ids[:, -1] + 1) % VOCAB] = -float("inf")
        scores[:, : VOCAB // 2] -= 2.0
        return scores


def test_callers_own_processors_and_prefix_functions() -> None:
    expected, found = both(
        "llama", "draft", padded_batch(), max_new_tokens=30, logits_processor=LogitsProcessorList([_Ban()])
    )
    assert torch.equal(found, expected)

    def allowed(batch: int, ids: torch.Tensor) -> list[int]:
        return [token for token in range(VOCAB) if token % 3 == (batch + len(ids)) % 3]

    expected, found = both("llama", "draft", padded_batch(), max_new_tokens=30, prefix_allowed_tokens_fn=allowed)
    assert torch.equal(found, expected)


def test_watermarks_are_the_same() -> None:
    marking = transformers.WatermarkingConfig(bias=3.0)
    expected, found = both("llama", "ngram", padded_batch(), max_new_tokens=20, watermarking_config=marking)
    assert torch.equal(found, expected)


class _SumAbove(StoppingCriteria):  # type: ignore[misc]
    """Ends a sequence once the sum of its last two ids is large."""

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -2:].sum(dim=1) > 420


@pytest.mark.parametrize("eos", [None, 1], ids=["without eos", "with eos"])
def test_stopping_criteria_end_each_sequence(eos: int | None) -> None:
    """Without an end of sequence token, transformers lets ended sequences run on until all have ended."""
    criteria = StoppingCriteriaList([_SumAbove()])
    prompts = padded_batch()
    expected, found = both("llama", "ngram", prompts, max_new_tokens=60, stopping_criteria=criteria, eos_token_id=eos)
    assert torch.equal(found, expected)
    assert found.shape[1] < prompts["input_ids"].shape[1] + 60, "the criterion was never met"


def test_stop_strings() -> None:
    letter = next(
        c for c in (tokenizer().decode([plain_token(1, n)]) for n in range(5, 40)) if c.isascii() and c.strip()
    )
    prompts = {key: value[1:2] for key, value in padded_batch().items()}
    reference = tiny_model().generate(**prompts, max_new_tokens=40, stop_strings=letter, tokenizer=tokenizer())
    found = accelerated().generate(**prompts, max_new_tokens=40, stop_strings=letter)
    assert torch.equal(found, reference)
    assert found.shape[1] < prompts["input_ids"].shape[1] + 40
    assert torch.equal(accelerated().generate(**prompts, max_new_tokens=40, stop_strings=[letter]), reference)


def test_max_time_ends_after_the_pass_it_runs_out_in() -> None:
    expected, found = both("llama", "ngram", padded_batch(), max_new_tokens=30, max_time=1e-9, eos_token_id=1)
    assert torch.equal(found, expected) and found.shape[1] == 13


def test_a_draft_model_from_files(tmp_path: Path) -> None:
    noisy_model().save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    prompts = padded_batch()
    expected = tiny_model().generate(**prompts, max_new_tokens=40)
    for given in ({"speculative_config": str(tmp_path)}, {"assistant_model": tmp_path}):
        fast = outpace.accelerate(tiny_model(), tokenizer(), speculative_control="fixed", **given)
        assert torch.equal(fast.generate(**prompts, max_new_tokens=40), expected)
        assert sum(stats.accepted_tokens for stats in fast.last_stats) > 10
    with pytest.raises(outpace.InvalidParameter, match="tokenizer"):
        outpace.accelerate(tiny_model(), speculative_config=str(tmp_path))


def test_call_beats_given_config_beats_model() -> None:
    prompts = padded_batch()
    model = tiny_model()
    own = model.generation_config
    given = GenerationConfig(max_new_tokens=7, repetition_penalty=1.5, pad_token_id=9)
    model.generation_config = GenerationConfig(max_new_tokens=11, no_repeat_ngram_size=2, pad_token_id=PAD)
    try:
        for arguments in ({}, {"generation_config": given}, {"generation_config": given, "max_new_tokens": 5}):
            expected, found = both("llama", "ngram", prompts, **arguments)
            assert torch.equal(found, expected)
    finally:
        model.generation_config = own


def test_none_switches_a_setting_of_the_model_off() -> None:
    model = copy.deepcopy(tiny_model())
    model.generation_config.eos_token_id = plain_token(0, 3)
    model.generation_config.repetition_penalty = 1.8
    fast, prompts = outpace.accelerate(model), padded_batch()
    for off in ({}, {"eos_token_id": None}, {"repetition_penalty": None}):
        found = fast.generate(**prompts, max_new_tokens=20, **off)
        assert torch.equal(found, model.generate(**prompts, max_new_tokens=20, **off)), off


@pytest.mark.slow
def test_threads_may_change_between_calls() -> None:
    fast, prompts, threads = accelerated(), padded_batch(), torch.get_num_threads()
    expected = fast.generate(**prompts, max_new_tokens=20)
    try:
        torch.set_num_threads(threads + 1)
        assert torch.equal(fast.generate(**prompts, max_new_tokens=20), expected)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(fast.generate(**prompts, max_new_tokens=20), expected)


def test_lookup_is_the_default_and_remembers_outputs_if_told_to() -> None:
    assert outpace.accelerate(tiny_model())._parts.methods == ("suffix",)
    pool = {"suffix_decoding_max_cached_requests": 9, "num_speculative_tokens": 4}
    fast = outpace.accelerate(tiny_model(), speculative_config=pool, speculative_control="fixed")
    prompts = {key: value[:1] for key, value in padded_batch(seed=4).items()}
    accepted = []
    for _ in range(2):
        fast.generate(**prompts, max_new_tokens=40)
        accepted.append(fast.last_stats[0].accepted_tokens)
    assert accepted[1] > accepted[0] + 10, accepted


def test_prompts_in_every_form() -> None:
    fast, model, prompts = accelerated(), tiny_model(), padded_batch()
    assert torch.equal(fast.generate(prompts["input_ids"][:1]), model.generate(prompts["input_ids"][:1]))
    # The pad id in the prompts tells the mask, as no end of sequence token has the same id.
    inferred = model.generate(prompts["input_ids"], max_new_tokens=9)
    assert torch.equal(inferred, model.generate(**prompts, max_new_tokens=9))
    assert torch.equal(fast.generate(inputs=prompts["input_ids"], max_new_tokens=9), inferred)
    assert torch.equal(fast.generate(max_new_tokens=9), model.generate(max_new_tokens=9))


def test_more_sequences_than_are_computed_side_by_side() -> None:
    prompts = padded_batch(7, 14, seed=3)
    fast = outpace.accelerate(tiny_model(), max_num_seqs=2, max_num_batched_tokens=5, cache_tokens=64)
    found = fast.generate(**prompts, max_new_tokens=25)
    assert torch.equal(found, tiny_model().generate(**prompts, max_new_tokens=25))


def test_return_dict_with_scores_and_logits() -> None:
    prompts = padded_batch()
    eos = plain_token(1, 6)
    expected, found = both(
        "llama",
        "draft",
        prompts,
        max_new_tokens=16,
        eos_token_id=eos,
        repetition_penalty=1.3,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
    )
    assert isinstance(found, transformers.generation.GenerateDecoderOnlyOutput)
    assert torch.equal(found.sequences, expected.sequences)
    assert len(found.scores) == len(found.logits) == len(expected.scores)
    start = prompts["input_ids"].shape[1]
    for row in range(3):
        ended = (expected.sequences[row, start:] == eos).nonzero()
        length = int(ended[0]) + 1 if len(ended) else len(expected.scores)
        for at in range(len(expected.scores)):
            for ours, theirs in ((found.scores, expected.scores), (found.logits, expected.logits)):
                wanted = theirs[at][row] if at < length else torch.zeros(VOCAB)
                torch.testing.assert_close(ours[at][row], wanted, rtol=1e-4, atol=1e-3)
    bare = accelerated().generate(**prompts, max_new_tokens=4, return_dict_in_generate=True)
    assert bare.scores is None and bare.logits is None and bare.sequences.shape == (3, start + 4)


class _Listener:
    def __init__(self) -> None:
        self.heard: list[list[int]] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.heard.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


def test_a_streamer_hears_the_same() -> None:
    prompts = {key: value[1:2] for key, value in padded_batch().items()}
    eos = plain_token(1, 12)
    listeners = _Listener(), _Listener()
    for model, listener in zip((tiny_model(), accelerated("llama", "draft")), listeners, strict=True):
        model.generate(**prompts, max_new_tokens=30, eos_token_id=eos, streamer=listener)
    assert listeners[0].heard == listeners[1].heard
    assert len(listeners[1].heard) > 5 and listeners[1].ended == 1


@pytest.mark.parametrize("drafter", ["ngram", "suffix"])
def test_prompt_lookup_by_its_name_in_transformers(drafter: str) -> None:
    prompts = {key: value[:1] for key, value in padded_batch().items()}
    fast = accelerated("llama", drafter)
    expected = tiny_model().generate(**prompts, max_new_tokens=50)
    assert torch.equal(fast.generate(**prompts, max_new_tokens=50, prompt_lookup_num_tokens=2), expected)
    assert len(fast.last_stats[0].accepted_at) == 2


def test_the_model_stays_as_it_was() -> None:
    model, prompts = tiny_model(), padded_batch()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attributes = set(vars(model))
    expected = model.generate(**prompts, max_new_tokens=20)
    fast = outpace.accelerate(model, assistant_model=noisy_model(), speculative_config={"num_speculative_tokens": 3})
    fast.generate(**prompts, max_new_tokens=20)
    assert torch.equal(model.generate(**prompts, max_new_tokens=20), expected)
    assert set(vars(model)) == attributes
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_attributes_are_the_models_own() -> None:
    fast, model = accelerated(), tiny_model()
    assert fast.config is model.config and fast.device == model.device and fast.model is model.model
    assert fast.generation_config is model.generation_config
    logits = fast(input_ids=torch.tensor([[5, 6]])).logits
    assert torch.equal(logits, model(input_ids=torch.tensor([[5, 6]])).logits)
    with pytest.raises(AttributeError, match="wrapped_model"):
        fast.generation_config = GenerationConfig()
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = fast.nonsense
