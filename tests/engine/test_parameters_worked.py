"""What parameters do, worked out by hand: penalties on constant logits, seeds, greedy decoding, ids without a token."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from outpace.drafters.draft_model import DraftModelDrafter
from outpace.params import SamplingDefaults, SamplingParams, SpeculationParams
from outpace.protocols import Drafter

from .fakes import ConstantModel, HistoryModel, TokenCache, oracle_drafter
from .harness import Job, make_engine, run
from .oracle import Oracle
from .parameter_cases import DRAFTERS, drafter_for

V = 24
MODEL = HistoryModel(V)
GREEDY = SamplingParams(temperature=0.0, max_tokens=16).resolved(SamplingDefaults())
WARM = SamplingParams(temperature=1.0, seed=3, max_tokens=24).resolved(SamplingDefaults())


def texts(
    jobs: Sequence[Job],
    drafter: str | None = None,
    *,
    k: int = 4,
    model: HistoryModel = MODEL,
    missing: Sequence[int] = (),
    **limits: int,
) -> list[list[int]]:
    """The ids of each job; `drafter` by its name in `DRAFTERS`, whose oracle knows the plain text."""
    drafters: dict[str, Drafter] = {}
    if drafter in ("right", "oracle"):
        plain = [job.prompt + text for job, text in zip(jobs, texts(jobs, model=model, missing=missing), strict=True)]
        drafters["oracle"] = oracle_drafter(
            lambda tokens: next((text for text in plain if text[: len(tokens)] == list(tokens)), [])
        )
    elif drafter is not None:
        drafters[drafter] = drafter_for(drafter, (), model)
    engine = make_engine(model, TokenCache(num_lanes=32), drafters, k=k, missing=missing, **limits)
    return [result.outputs[0].token_ids for result in run(engine, jobs)]


@pytest.mark.parametrize("k", [1, 2, 4, 8])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"presence_penalty": 0.2}, [0, 1] + [0] * 14),
        ({"frequency_penalty": 0.2}, [0, 1] * 8),
        ({"repetition_penalty": 1.1}, [0, 1] + [0] * 14),
        ({"repetition_penalty": 1.1, "frequency_penalty": 0.2}, [0, 1] * 8),
        ({"presence_penalty": -0.2}, [0] * 16),
        ({}, [0] * 16),
    ],
)
@pytest.mark.thinned(3)
def test_penalties_on_constant_logits(drafter: str, k: int, changes: dict[str, Any], expected: list[int]) -> None:
    """2 and 1.9: a penalty of 0.2 makes the second best, once (presence, repetition) or every time (frequency)."""
    model = ConstantModel([2, 1.9, 0, 0])
    jobs = [Job([2, 3], replace(GREEDY, **changes)), Job([3], replace(GREEDY, **changes))]
    assert texts(jobs, drafter, k=k, model=model) == [expected, expected]


def test_a_repetition_penalty_counts_the_prompt_and_the_others_do_not() -> None:
    model = ConstantModel([2, 1.9, 0, 0])
    assert texts([Job([0], replace(GREEDY, repetition_penalty=1.1))], "random", model=model) == [[1] + [0] * 15]
    assert texts([Job([0], replace(GREEDY, presence_penalty=0.2))], "random", model=model) == [[0, 1] + [0] * 14]


@pytest.mark.parametrize("seed", [-2, 2**64 - 1])
def test_a_seed_gives_the_same_text_in_any_company(seed: int) -> None:
    jobs = [Job([7, 7], replace(WARM, seed=seed, presence_penalty=0.5), number=number) for number in range(4)]
    alone = [texts([job])[0] for job in jobs]
    assert len(set(map(tuple, alone))) == 4
    source = random.Random(seed)
    for drafter in DRAFTERS:
        company = [Job([7, 7], replace(WARM, seed=None)), Job([7, 7], replace(WARM, seed=seed + 1 if seed < 9 else 0))]
        crowd = [*jobs, *company, Job([1] * 40, GREEDY)]
        order = source.sample(range(len(crowd)), len(crowd))
        crowd = [replace(crowd[index], arrives=source.randrange(6)) for index in order]
        got = texts(crowd, drafter, k=source.choice([1, 2, 4, 8]), seqs=5, rows=source.choice([9, 40, 512]))
        assert [got[order.index(index)] for index in range(4)] == alone


def test_without_a_seed_every_request_has_its_own() -> None:
    got = texts([Job([7, 7], replace(WARM, seed=None)) for _ in range(8)], "ngram")
    assert len(set(map(tuple, got))) == 8


@pytest.mark.parametrize("drafter", [None, *DRAFTERS])
def test_temperature_0_is_greedy_whatever_else_is_set(drafter: str | None) -> None:
    jobs = [Job([i, 2], replace(GREEDY, seed=i, top_k=5, top_p=0.3, min_p=0.5)) for i in range(8)]
    for job, text in zip(jobs, texts(jobs, drafter), strict=True):
        history = list(job.prompt)
        while len(history) < len(job.prompt) + 16:
            history.append(int(np.argmax(MODEL.logits(history))))
        assert text == history[2:]


@pytest.mark.parametrize("drafter", [None, *DRAFTERS])
@pytest.mark.parametrize(
    "changes", [{}, {"frequency_penalty": 0.9}, {"logit_bias": {4: 2.0}, "repetition_penalty": 1.3}]
)
@pytest.mark.thinned(3)
def test_settings_that_leave_one_token_are_greedy(drafter: str | None, changes: dict[str, Any]) -> None:
    greedy = texts([Job([i, 2], replace(GREEDY, **changes)) for i in range(4)])
    for same in ({"top_k": 1}, {"top_p": 1e-12}, {"min_p": 1.0}, {"temperature": 1e-6}, {"temperature": 5e-324}):
        params = replace(WARM, max_tokens=16, **{**changes, **same})
        assert texts([Job([i, 2], params) for i in range(4)], drafter) == greedy


def test_filters_that_leave_everything_are_off() -> None:
    plain = texts([Job([i, 2], WARM) for i in range(4)])
    for same in ({"top_k": V}, {"top_k": V + 1}, {"top_k": 10**6}, {"top_k": -1}, {"top_p": 1.0}, {"min_p": 1e-300}):
        assert texts([Job([i, 2], replace(WARM, **same)) for i in range(4)], "wrong") == plain


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("temperature", [1e-6, 1e-300, 1e6])
def test_extreme_temperatures_have_finite_logprobs(temperature: float, mode: str) -> None:
    params = replace(WARM, temperature=temperature, logprobs=3, logprobs_mode=mode)
    engine = make_engine(MODEL, TokenCache(), {"ngram": drafter_for("ngram", (), MODEL)})
    (result,) = run(engine, [Job([1, 2], params)])
    completion = result.outputs[0]
    assert completion.logprobs is not None
    for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        assert -100 < entry[token].logprob <= 0
        assert all(found.logprob <= 0 for found in entry.values())


class Tempting(HistoryModel):
    """Wants ids that no token has most of all."""

    def logits(self, history: Sequence[int]) -> np.ndarray:
        values = super().logits(history).copy()
        values[[5, 23]] += 50
        return values


@pytest.mark.parametrize("drafter", [None, *DRAFTERS, "own model"])
def test_ids_without_a_token_never_come(drafter: str | None) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"top_k": 2, "logprobs": 2, "logprobs_mode": "processed_logprobs"},
        {"logit_bias": {5: 100.0}, "frequency_penalty": 0.3},
        {"allowed_token_ids": (5, 6, 7)},
    ]
    jobs = [Job([index, 5, 23], replace(WARM, **more)) for index, more in enumerate(changes)]
    model = Tempting(V)
    if drafter == "own model":
        own = DraftModelDrafter(Tempting(V), TokenCache(), max_model_len=512)
        engine = make_engine(model, TokenCache(), {"own": own}, missing=(5, 23))
        results = run(engine, jobs)
        got = [result.outputs[0].token_ids for result in results]
        assert all(result.stats.acceptance_rate == 1.0 for result in results)
    else:
        got = texts(jobs, drafter, model=model, missing=(5, 23))
    oracle = Oracle(model, missing=frozenset({5, 23}))
    assert got == [oracle.decode(job).token_ids for job in jobs]
    assert not {5, 23} & {token for text in got for token in text}


def test_speculation_that_is_off_for_a_request_changes_nothing() -> None:
    params = replace(WARM, presence_penalty=0.4)
    settings = [SpeculationParams(enabled=False), SpeculationParams(num_speculative_tokens=0), SpeculationParams()]
    jobs = [Job([1, 2], params, setting) for setting in settings]
    first, *others = texts(jobs, "ngram")
    assert others == [first, first]
