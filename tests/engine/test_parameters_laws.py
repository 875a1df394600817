"""Rejection sampling in the engine: the law of the text is the target's, whatever drafts; ends and greedy are exact.

The first three tokens of many seeds are compared with their exact joint law; the second and third are drafted by every
drafter, and what follows a rejection is among them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from outpace.drafters.draft_model import DraftModelDrafter
from outpace.engine.outputs import RequestOutput
from outpace.params import SamplingDefaults, SamplingParams
from outpace.protocols import Drafter
from outpace.sampling.reference import filtered_law

from ..sampling.chi_square import ALPHA, chi_square_p
from .fakes import HistoryModel, TokenCache
from .harness import Job, make_engine, run
from .oracle import Oracle
from .parameter_cases import DRAFTERS, EOS, MODEL, NAMES, case, drafter_for

pytestmark = pytest.mark.slow

METHODS = ("standard", "block")
PROMPT = [1, 2, 1, 2, 1]
WARM = SamplingParams(temperature=1.3, seed=3, max_tokens=5).resolved(SamplingDefaults())
SEEDS = 500
SETTINGS: dict[str, dict[str, Any]] = {
    "penalties and top_p": {"presence_penalty": 0.6, "repetition_penalty": 1.3, "frequency_penalty": 0.3, "top_p": 0.9},
    "bias and bad words": {"logit_bias": {0: 0.8}, "bad_words": ("aa", "bc", "d"), "min_p": 0.02, "temperature": 2.0},
}
DRAFTING = ("wrong", "ngram", "random")


class Gentle(HistoryModel):
    """Five tokens of which none is nearly certain."""

    def __init__(self, errors: float = 0.0) -> None:
        super().__init__(vocab_size=5, order=2, errors=errors)

    def logits(self, history: Sequence[int]) -> np.ndarray:
        return super().logits(history) / np.float32(3)


def joint_law(params: SamplingParams) -> dict[tuple[int, ...], float]:
    """The chance of every three tokens, from the definition."""
    oracle = Oracle(Gentle())
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer = {}
        for text, chance in law.items():
            raw = oracle.model.logits([*PROMPT, *text])
            row = filtered_law(oracle.processed(raw, params, PROMPT, text), params)
            longer.update({(*text, token): chance * each for token, each in row.items()})
        law = longer
    return law


def sampled(drafter: str, method: str, k: int, params: SamplingParams, seeds: Sequence[int]) -> list[RequestOutput]:
    model = Gentle()
    cache, own_cache = (TokenCache(num_lanes=64, capacity=32) for _ in range(2))
    if drafter == "wrong":
        own: Drafter = DraftModelDrafter(Gentle(errors=0.7), own_cache, max_model_len=32)
    else:
        own = drafter_for(drafter, (), model)
    engine = make_engine(model, cache, {drafter: own}, k=k, verification=method, seqs=64)
    return run(engine, [Job(PROMPT, replace(params, seed=seed)) for seed in seeds])


def likelihood(results: Sequence[RequestOutput], params: SamplingParams) -> float:
    """The p-value of the first three tokens."""
    law = joint_law(params)
    counts = Counter(tuple(result.outputs[0].token_ids[:3]) for result in results)
    texts = list(itertools.product(range(5), repeat=3))
    return chi_square_p([counts[text] for text in texts], [law.get(text, 0.0) for text in texts])


@pytest.mark.parametrize(
    ("k", "setting"), [(1, "penalties and top_p"), (3, "penalties and top_p"), (3, "bias and bad words")]
)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("drafter", DRAFTING)
def test_the_text_has_the_law_of_plain_decoding(drafter: str, method: str, k: int, setting: str) -> None:
    params = replace(WARM, **SETTINGS[setting])
    results = sampled(drafter, method, k, params, range(SEEDS))
    assert likelihood(results, params) > ALPHA
    drafted, accepted = (sum(getattr(r.stats, name) for r in results) for name in ("draft_tokens", "accepted_tokens"))
    assert 0.02 * drafted < accepted < 0.9 * drafted, "drafts that are all right or all wrong prove nothing"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("drafter", DRAFTING[:3])
def test_the_same_seed_gives_the_same_text(drafter: str, method: str) -> None:
    """Alone and in a batch, where what is drafted depends on the text alone."""
    seeds = range(12)
    texts = [result.outputs[0].token_ids for result in sampled(drafter, method, 3, WARM, seeds)]
    assert texts == [result.outputs[0].token_ids for result in sampled(drafter, method, 3, WARM, seeds)]
    assert len(set(map(tuple, texts))) > 8
    if drafter != "random":  # its guesses depend on who else is there
        assert texts == [sampled(drafter, method, 3, WARM, [seed])[0].outputs[0].token_ids for seed in seeds]


GREEDY_NAMES = tuple(
    name for name in NAMES if case(name).job.params.temperature == 0 or name in ("top k 1", "tiny top p")
)


@pytest.mark.parametrize("k", [4])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_is_exact(drafter: str, method: str, k: int) -> None:
    cases = [case(name) for name in GREEDY_NAMES]
    assert len(cases) > 8
    drafters = {drafter: drafter_for(drafter, cases)}
    engine = make_engine(MODEL, TokenCache(num_lanes=16), drafters, k=k, eos=sorted(EOS), verification=method, seqs=16)
    for each, result in zip(cases, run(engine, [each.job for each in cases]), strict=True):
        each.expected.check(result)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_parameter_holds_for_what_is_sampled(drafter: str, method: str) -> None:
    """The text is not the oracle's, so the oracle is asked about this very text: ends and log probabilities."""
    names = NAMES[(DRAFTERS.index(drafter) + METHODS.index(method)) % 2 :: 2]  # either half with half of the drafters
    cases = [case(name) for name in names]
    drafters = {drafter: drafter_for(drafter, cases)}
    engine = make_engine(MODEL, TokenCache(num_lanes=16), drafters, k=4, eos=sorted(EOS), verification=method, seqs=16)
    oracle = Oracle(MODEL, EOS)
    for each, result in zip(cases, run(engine, [each.job for each in cases]), strict=True):
        try:
            oracle.decode(each.job, forced=result.outputs[0].token_ids).check(result)
        except AssertionError as error:
            raise AssertionError(f"{each.name}: {error}") from error
