"""Speculation off = on, token for token: every drafter, length, batch, chunking and preemption, greedy and seeded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from outpace.drafters.draft_model import DraftModelDrafter
from outpace.drafters.ngram import NgramDrafter
from outpace.params import SamplingParams, SpeculationParams
from outpace.protocols import Drafter
from outpace.types import Draft

from .fakes import (
    HistoryModel,
    ScriptedDrafter,
    TokenCache,
    bush_drafter,
    illegal_drafter,
    oracle_drafter,
    random_drafter,
)
from .harness import GREEDY, HOT, WARM, Job, make_engine, mixed_jobs, plain, run

V = 24
DRAFTERS = (
    "none",
    "ngram",
    "random",
    "illegal",
    "empty",
    "draft_model",
    "draft_model_bad",
    "oracle",
    "bush",
    "tree",
    "tree_bad",
)


def build_drafter(name: str, model: HistoryModel, jobs: list[Job]) -> Drafter:
    if name == "ngram":
        return NgramDrafter(1, 4)
    if name == "random":
        return random_drafter(V)
    if name == "illegal":
        return illegal_drafter(V)
    if name == "empty":
        return ScriptedDrafter("empty", lambda ask: Draft())
    if name.startswith("draft_model"):
        draft = HistoryModel(V, order=model.order, errors=0.9 if name.endswith("bad") else 0.2)
        return DraftModelDrafter(draft, TokenCache(), max_model_len=512)
    if name.startswith("tree"):
        draft = HistoryModel(V, order=model.order, errors=0.7 if name.endswith("bad") else 0.2)
        return DraftModelDrafter(draft, TokenCache(), max_model_len=512, tree_width=3)
    texts = [job.prompt + plain(model, job) for job in jobs]

    def script_of(tokens: Sequence[int]) -> list[int]:
        return next(t for t in texts if t[: len(tokens)] == list(tokens))

    return bush_drafter(V, script_of) if name == "bush" else oracle_drafter(script_of)


@pytest.mark.parametrize("preempt", [False, True], ids=["roomy", "preempting"])
@pytest.mark.parametrize("rows", [512, 13], ids=["one pass", "chunks"])
@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("k", [1, 2, 4, 8])
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.thinned(8)
def test_same_tokens(name: str, k: int, batch: int, rows: int, preempt: bool) -> None:
    model = HistoryModel(V)
    jobs = mixed_jobs(batch, V, seed=batch)
    longest = max(len(job.prompt) for job in jobs) + 40
    cache = TokenCache(max_rows=longest + 30 if preempt else 4096)
    drafters = {} if name == "none" else {name: build_drafter(name, model, jobs)}
    engine = make_engine(model, cache, drafters, k=k, rows=rows)
    results = run(engine, jobs)
    for job, result in zip(jobs, results, strict=True):
        assert result.outputs[0].token_ids == plain(model, job)
    if preempt and batch == 8:
        assert sum(r.stats.preemptions for r in results) > 0
    if name == "draft_model" and k > 1 and rows == 512:
        drafted, accepted = (sum(getattr(r.stats, f) for r in results) for f in ("draft_tokens", "accepted_tokens"))
        assert drafted * 0.2 < accepted < drafted, "a test in which drafts are all right or all wrong proves nothing"


def test_mixed_drafters_in_one_pack() -> None:
    """A long prefill, an n-gram request, a draft-model one, a plain one and a wrong one, side by side."""
    model = HistoryModel(V)
    drafters = {
        "ngram": NgramDrafter(1, 4),
        "draft_model": DraftModelDrafter(HistoryModel(V, errors=0.4), TokenCache(), max_model_len=512),
        "random": random_drafter(V),
    }
    methods = ["ngram", "draft_model", None, "random"]
    jobs = mixed_jobs(4, V, seed=5)
    jobs.append(Job([i % V for i in range(200)], WARM, arrives=3))
    for job, method in zip(jobs, [*methods, "ngram"], strict=True):
        job.speculation = SpeculationParams(enabled=method is not None, method=method)
    results = run(make_engine(model, TokenCache(), drafters, rows=40), jobs)
    for job, result in zip(jobs, results, strict=True):
        assert result.outputs[0].token_ids == plain(model, job)
    assert results[2].stats.drafts == 0
    assert results[1].stats.accepted_tokens > 0


@pytest.mark.parametrize("k", [1, 3, 7])
@pytest.mark.parametrize("n", [1, 2, 16, 33])
def test_oracle_takes_the_fewest_passes(k: int, n: int) -> None:
    model = HistoryModel(V)
    job = Job([1, 2, 3], replace(GREEDY, max_tokens=n))
    engine = make_engine(model, TokenCache(), {"oracle": build_drafter("oracle", model, [job])}, k=k)
    (result,) = run(engine, [job])
    assert len(model.rows_per_call) == -(-n // (k + 1))
    assert result.stats.steps == len(model.rows_per_call)
    assert result.stats.draft_tokens == result.stats.accepted_tokens == n - len(model.rows_per_call)


def test_a_batch_takes_one_pass_a_step() -> None:
    model = HistoryModel(V)
    jobs = [Job([i], GREEDY) for i in range(8)]
    engine = make_engine(model, TokenCache(), {"oracle": build_drafter("oracle", model, jobs)}, k=3)
    run(engine, jobs)
    assert model.rows_per_call == [8 * 4] * 10


@pytest.mark.parametrize("params", [GREEDY, WARM, HOT], ids=["greedy", "warm", "hot"])
@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.thinned(3)
def test_target_as_its_own_draft_is_always_accepted(params: SamplingParams, k: int) -> None:
    model = HistoryModel(V)
    jobs = [Job([i, 3], replace(params, max_tokens=300)) for i in range(8)]
    drafter = DraftModelDrafter(HistoryModel(V), TokenCache(), max_model_len=512)
    for result in run(make_engine(model, TokenCache(), {"draft_model": drafter}, k=k), jobs):
        assert result.stats.acceptance_rate == 1.0
        assert len(result.outputs[0].token_ids) == 300
