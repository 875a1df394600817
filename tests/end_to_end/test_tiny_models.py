"""Speculation off = on over real layers, caches and kernels: every drafter, length, batch, chunking, preemption."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from outpace.kv.cache import KvCache
from outpace.models.decoder import Decoder
from outpace.params import SamplingParams, SpeculationParams
from outpace.types import ForwardResult, Pack, Segment
from tests.engine.chaos import ChaosController
from tests.engine.harness import GREEDY, HOT, WARM, Job, mixed_jobs, run

from .tiny import LAYERS, VOCAB, make_engine, target

TOKENS = 24
DRAFTERS = ("ngram", "draft_model", "early_exit", "adapter", "early_exit_tree", "adapter_tree")
NATIVE, TORCH = ("none", "int8", "int4"), ("torch none", "torch int8")


@functools.cache
def _plain(prompt: tuple[int, ...], params: SamplingParams, quantization: str) -> list[int]:
    (result,) = run(make_engine((), quantization), [Job(list(prompt), params)])
    return result.outputs[0].token_ids


def plain(job: Job, quantization: str) -> list[int]:
    """Alone, in one pass and then row by row, without drafts."""
    return _plain(tuple(job.prompt), job.params, quantization)


def jobs_for(batch: int) -> list[Job]:
    """Mixed lengths; some prompts cross the edge of a key block (256), some repeat themselves."""
    jobs = mixed_jobs(batch, VOCAB, seed=batch + 1)
    for index, job in enumerate(jobs):
        job.params = replace(job.params, max_tokens=TOKENS)
        if index % 4 == 1:
            job.prompt = (job.prompt * 260)[:250]
    return jobs


WAYS = ("roomy", "chunks", "preempting")


@pytest.mark.parametrize("quantization", NATIVE)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("k", [1, 2, 4, 8])
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.thinned(8)
def test_same_tokens(name: str, k: int, batch: int, way: str, quantization: str) -> None:
    assert_same_tokens(name, k, batch, way, quantization)


@pytest.mark.parametrize("quantization", TORCH)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("k", "batch"), [(2, 8), (4, 3)])
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.thinned(6)
def test_same_tokens_on_torch(name: str, k: int, batch: int, way: str, quantization: str) -> None:
    assert_same_tokens(name, k, batch, way, quantization)


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("names", [("ngram", "draft_model", "adapter"), ("ngram", "early_exit_tree", "adapter_tree")])
@pytest.mark.thinned(3)
def test_drafters_that_take_turns_and_drafts_that_are_cut_change_no_token(
    names: tuple[str, ...], batch: int, way: str, quantization: str
) -> None:
    """States at an exit that are kept or thrown away, draft caches that fall behind and catch up."""
    jobs = jobs_for(batch)
    longest = max(len(job.prompt) for job in jobs) + TOKENS
    controller = ChaosController(batch)
    engine = make_engine(
        names,
        quantization,
        k=6,
        rows=61 if way == "chunks" else 512,
        max_rows=longest + 30 if way == "preempting" else 3200,
        controller=controller,
    )
    results = run(engine, jobs)
    for job, result in zip(jobs, results, strict=True):
        assert result.outputs[0].token_ids == plain(job, quantization)
    if batch == 8:
        used = {name for result in results for name in result.stats.by_drafter}
        assert used == set(names)


def assert_same_tokens(name: str, k: int, batch: int, way: str, quantization: str) -> None:
    jobs = jobs_for(batch)
    longest = max(len(job.prompt) for job in jobs) + TOKENS
    engine = make_engine(
        (name,),
        quantization,
        k=k,
        rows=61 if way == "chunks" else 512,
        max_rows=longest + 30 if way == "preempting" else 3200,
    )
    results = run(engine, jobs)
    for job, result in zip(jobs, results, strict=True):
        assert result.outputs[0].token_ids == plain(job, quantization)
    if way == "preempting" and batch == 8:
        assert sum(r.stats.preemptions for r in results) > 0
    if name != "ngram" and batch > 1:
        drafted = sum(r.stats.draft_tokens for r in results)
        accepted = sum(r.stats.accepted_tokens for r in results)
        # one token of the adapter at a time may always be right in a short text
        assert drafted * 0.2 < accepted < drafted + (k == 1), "drafts that are all right or all wrong prove nothing"


@pytest.mark.parametrize("quantization", NATIVE + TORCH)
@pytest.mark.parametrize("rows", [512, 40])
@pytest.mark.thinned(2)
def test_mixed_pack(rows: int, quantization: str) -> None:
    """Prefill chunk, n-gram, early exit with and without adapter, draft model and plain request, side by side."""
    names = ("ngram", "early_exit", "adapter", "draft_model")
    jobs = [Job([7, 8, 9] * 5, p) for p in (GREEDY, WARM, HOT, WARM, GREEDY)]
    jobs.append(Job([i * 7 % VOCAB for i in range(300)], WARM, arrives=4))
    for job, method in zip(jobs, [*names, None, "early_exit"], strict=True):
        job.params = replace(job.params, max_tokens=TOKENS)
        job.speculation = SpeculationParams(enabled=method is not None, method=method)
    results = run(make_engine(names, quantization, rows=rows), jobs)
    for job, result in zip(jobs, results, strict=True):
        assert result.outputs[0].token_ids == plain(job, quantization)
    assert [result.stats.drafts > 0 for result in results] == [True, True, True, True, False, True]


@pytest.mark.parametrize("quantization", NATIVE + TORCH)
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("max_rows", [3200, 500], ids=["roomy", "preempting"])
@pytest.mark.thinned(5)
def test_reused_rows(max_rows: int, name: str, quantization: str) -> None:
    """Turns of two conversations, a branch and repeated prompts, some side by side, across the edge of a key block."""
    params = [replace(each, max_tokens=TOKENS) for each in (GREEDY, WARM, HOT)]
    system = [i * 5 % VOCAB for i in range(120)]
    first = [*system, 1, 2, 3]
    first += [*plain(Job(first, params[0]), quantization), 4, 5]
    second = [*first, *plain(Job(first, params[1]), quantization), 6]
    prompts = [
        (first[:123], 0),
        (first, 1),
        (second, 2),
        ([*system, 9, 9], 0),
        (first, 2),
        ([7, *system], 0),
        (second, 2),
    ]
    arrivals = [0, 30, 60, 62, 63, 64, 120]
    jobs = [Job(prompt, params[at], arrives=when) for (prompt, at), when in zip(prompts, arrivals, strict=True)]
    engine = make_engine((name,), quantization, max_rows=max_rows)
    results = run(engine, jobs)
    for job, result in zip(jobs, results, strict=True):
        assert result.outputs[0].token_ids == plain(job, quantization)
    cached = [result.num_cached_tokens for result in results]
    if name.startswith("adapter"):
        assert cached == [0] * 7
    elif max_rows == 3200:
        assert cached == [0, 123 + TOKENS - 1, len(first) + TOKENS - 1, 120, len(first) - 1, 0, len(second) - 1]
    else:
        assert sum(cached) > 300
    engine.clear_prefixes()
    assert engine.cache.free_rows == max_rows


@pytest.mark.parametrize("quantization", NATIVE + TORCH)
@pytest.mark.parametrize("params", [GREEDY, replace(WARM, temperature=0.7), HOT], ids=["T=0", "T=0.7", "T=1.5"])
@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.thinned(3)
def test_the_target_as_its_own_draft_is_always_accepted(k: int, params: SamplingParams, quantization: str) -> None:
    jobs = [Job([i, 3, 5], replace(params, max_tokens=60)) for i in range(8)]
    for result in run(make_engine(("own_draft",), quantization, k=k), jobs):
        assert result.stats.acceptance_rate == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("params", [GREEDY, replace(WARM, temperature=0.7), HOT], ids=["T=0", "T=0.7", "T=1.5"])
@pytest.mark.parametrize("k", range(1, 9))
def test_the_target_as_its_own_draft_for_long(k: int, params: SamplingParams) -> None:
    jobs = [Job([i, 3, 5], replace(params, max_tokens=300)) for i in range(8)]
    for result in run(make_engine(("own_draft",), "int8", k=k), jobs):
        assert result.stats.acceptance_rate == 1.0


@pytest.mark.parametrize("quantization", [*NATIVE, "torch int8"])
def test_threads_and_neighbours_do_not_change_a_token(quantization: str) -> None:
    jobs = jobs_for(8)
    torch.set_num_threads(2)
    results = run(make_engine(("early_exit",), quantization), jobs)
    torch.set_num_threads(1)
    for job, result in zip(jobs, results, strict=True):
        assert result.outputs[0].token_ids == plain(job, quantization)


@pytest.mark.parametrize("quantization", ["none", "torch none"])
@pytest.mark.parametrize("name", ["early_exit", "adapter"])
@pytest.mark.parametrize("k", [1, 4])
def test_early_exit_runs_every_layer_once_per_row(
    name: str, k: int, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a draft of n tokens the lower layers run n rows while drafting and one in verification, the upper n + 1."""
    model = target(quantization)
    run_honestly = model.layers.run
    rows_of_layer = [0] * LAYERS
    packs: list[Pack] = []

    def run_counted(
        hidden: torch.Tensor, rope: torch.Tensor, segments: Sequence[Segment], begin: int, end: int, *rest: Any
    ) -> torch.Tensor:
        for layer in range(begin, end):
            rows_of_layer[layer] += len(hidden)
        return run_honestly(hidden, rope, segments, begin, end, *rest)

    def forward(pack: Pack, cache: KvCache) -> ForwardResult:
        packs.append(pack)
        return Decoder.forward(model, pack, cache)

    monkeypatch.setattr(model.layers, "run", run_counted)
    monkeypatch.setattr(model, "forward", forward)
    (result,) = run(make_engine((name,), quantization, k=k), [Job([3, 4, 5], replace(GREEDY, max_tokens=40))])
    computed = sum(pack.num_rows for pack in packs)
    kept = sum(0 if pack.resume_rows is None else len(pack.resume_rows) for pack in packs)
    assert kept == result.stats.draft_tokens > 0
    # Kept rows ran below the exit in the draft, so every layer computes every row exactly once.
    assert rows_of_layer == [computed] * LAYERS
    assert len(packs) == result.stats.steps
