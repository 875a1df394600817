"""Speculation with a head on the target's states (EAGLE-3, MTP) off = on over real layers, caches and kernels."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from outpace.engine.engine import Engine
from outpace.engine.outputs import RequestOutput
from outpace.kv.cache import KvCache
from outpace.models.decoder import Decoder
from outpace.params import SamplingParams
from outpace.types import ForwardResult, Pack
from tests.engine.chaos import ChaosController
from tests.engine.harness import GREEDY, HOT, WARM, Job, run

from . import tiny
from .test_tiny_models import NATIVE, TOKENS, TORCH, WAYS, jobs_for
from .tiny_head import NUDGED_FROM

make_engine = functools.partial(tiny.make_engine, nudged_from=NUDGED_FROM)
HEADS = ("eagle3", "eagle3_tree", "mtp", "mtp_tree")


@functools.cache
def _plain(prompt: tuple[int, ...], params: SamplingParams, quantization: str, number: int) -> list[int]:
    (result,) = run(make_engine((), quantization), [Job(list(prompt), params, number=number)])
    return result.outputs[0].token_ids


def plain(job: Job, quantization: str = "none") -> list[int]:
    return _plain(tuple(job.prompt), job.params, quantization, job.number)


def same_as_plain(engine: Engine, jobs: list[Job], quantization: str = "none") -> list[RequestOutput]:
    results = run(engine, jobs)
    for job, result in zip(jobs, results, strict=True):
        assert result.outputs[0].token_ids == plain(job, quantization)
    return results


def counts(results: list[RequestOutput]) -> tuple[int, int]:
    """Draft tokens, and those that were accepted."""
    return sum(r.stats.draft_tokens for r in results), sum(r.stats.accepted_tokens for r in results)


def limits(way: str, jobs: list[Job]) -> dict[str, Any]:
    longest = max(len(job.prompt) for job in jobs) + TOKENS
    return {"rows": 61 if way == "chunks" else 512, "max_rows": longest + 60 if way == "preempting" else 3200}


@pytest.mark.parametrize("quantization", NATIVE + TORCH)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("k", [1, 2, 4, 8])
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.thinned(20)
def test_same_tokens(name: str, k: int, batch: int, way: str, quantization: str) -> None:
    jobs = jobs_for(batch)
    results = same_as_plain(make_engine((name,), quantization, k=k, **limits(way, jobs)), jobs, quantization)
    if way == "preempting" and batch == 8:
        assert sum(r.stats.preemptions for r in results) > 0
    if batch > 1:
        drafted, accepted = counts(results)
        assert drafted * 0.06 < accepted < drafted, "drafts that are all right or all wrong prove nothing"


@pytest.mark.parametrize("quantization", ["none", "int8", "torch int8"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", HEADS)
def test_drafters_that_take_turns_and_drafts_that_are_cut_change_no_token(
    name: str, way: str, quantization: str
) -> None:
    """A head that is not asked for some steps falls behind, and catches up from the states it was told of."""
    jobs = jobs_for(8)
    engine = make_engine(
        ("suffix_tree", "early_exit", name), quantization, k=6, controller=ChaosController(8), **limits(way, jobs)
    )
    results = same_as_plain(engine, jobs, quantization)
    assert {source for result in results for source in result.stats.by_drafter} == {"suffix_tree", "early_exit", name}
    assert (
        sum(result.stats.by_drafter[name].accepted_tokens for result in results if name in result.stats.by_drafter) > 0
    )


def seen_packs(monkeypatch: pytest.MonkeyPatch) -> list[Pack]:
    """What the target computes from here on."""
    model = tiny.target("none", NUDGED_FROM)
    packs: list[Pack] = []

    def forward(pack: Pack, cache: KvCache) -> ForwardResult:
        packs.append(pack)
        return Decoder.forward(model, pack, cache)

    monkeypatch.setattr(model, "forward", forward)
    return packs


def test_states_below_an_exit_are_those_of_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row with a state kept at the exit has not passed the layers below, where the head reads: it is not used."""
    packs = seen_packs(monkeypatch)
    results = same_as_plain(make_engine(("early_exit", "eagle3"), "none", controller=ChaosController(1)), jobs_for(3))
    assert any("early_exit" in result.stats.by_drafter for result in results)
    assert {pack.aux_layers for pack in packs} >= {(1, 2, 3)}
    assert all(pack.resume_rows is None for pack in packs)


def test_states_behind_the_last_layer_leave_an_exit_what_it_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    packs = seen_packs(monkeypatch)
    results = same_as_plain(make_engine(("early_exit", "mtp"), "none", controller=ChaosController(1)), jobs_for(3))
    assert {source for result in results for source in result.stats.by_drafter} == {"early_exit", "mtp"}
    assert {pack.aux_layers for pack in packs} >= {(tiny.LAYERS,)}
    assert any(pack.resume_rows is not None for pack in packs)


@pytest.mark.parametrize("quantization", ["none", "int8", "torch none"])
@pytest.mark.parametrize("max_rows", [3200, 500], ids=["roomy", "preempting"])
@pytest.mark.parametrize("name", ["eagle3", "mtp"])
def test_reused_rows(name: str, max_rows: int, quantization: str) -> None:
    """Rows of the target that were computed for another request have no states: the head begins behind them."""
    params = [replace(each, max_tokens=TOKENS) for each in (GREEDY, WARM, HOT)]
    system = [i * 5 % tiny.VOCAB for i in range(120)]
    first = [*system, 1, 2, 3]
    second = [*first, *plain(Job(first, params[0]), quantization), 6]
    prompts = [(first, 0), (second, 1), ([*system, 9, 9], 0), (second, 2), (first, 2)]
    jobs = [Job(prompt, params[at], arrives=30 * when) for when, (prompt, at) in enumerate(prompts)]
    engine = make_engine((name,), quantization, max_rows=max_rows)
    results = same_as_plain(engine, jobs, quantization)
    assert [result.num_cached_tokens > 100 for result in results] == [False, True, True, True, True]
    assert all(result.stats.accepted_tokens > 0 for result in results)
    engine.clear_prefixes()
    assert engine.cache.free_rows == max_rows


@pytest.mark.parametrize("quantization", ["none", "torch none"])
@pytest.mark.parametrize("name", ["eagle3", "mtp"])
def test_choices_of_one_prompt(name: str, quantization: str) -> None:
    """They share the rows of the prompt, which are computed once."""
    prompt = [i * 7 % tiny.VOCAB for i in range(90)]
    jobs = [Job(prompt, replace(WARM, max_tokens=TOKENS), number=number) for number in range(5)]
    results = same_as_plain(make_engine((name,), quantization, k=3), jobs, quantization)
    assert [result.num_cached_tokens for result in results] == [0, *[len(prompt) - 1] * 4]
    assert all(result.stats.accepted_tokens > 0 for result in results)


@pytest.mark.parametrize("verification", ["standard", "block"])
@pytest.mark.parametrize("quantization", ["none", "int8", "torch none"])
@pytest.mark.parametrize("name", ["eagle3", "mtp"])
def test_rejection_sampling_of_greedy_text(name: str, verification: str, quantization: str) -> None:
    jobs = [replace(job, params=replace(GREEDY, max_tokens=TOKENS)) for job in jobs_for(8)]
    results = same_as_plain(make_engine((name,), quantization, verification=verification), jobs, quantization)
    drafted, accepted = counts(results)
    assert 0.1 * drafted < accepted < drafted


@pytest.mark.parametrize("verification", ["standard", "block"])
@pytest.mark.parametrize("name", ["eagle3", "mtp"])
def test_rejection_sampling_of_drawn_text_accepts_more_than_chance(name: str, verification: str) -> None:
    jobs = [replace(job, params=replace(HOT, max_tokens=TOKENS, seed=n)) for n, job in enumerate(jobs_for(8))]
    results = run(make_engine((name,), "none", verification=verification), jobs)
    drafted, accepted = counts(results)
    assert 0.15 * drafted < accepted < drafted
    assert [len(result.outputs[0].token_ids) for result in results] == [TOKENS] * 8


@pytest.mark.parametrize("name", ["eagle3", "mtp"])
def test_a_prompt_of_one_token_and_a_text_at_the_end_of_its_lane(name: str) -> None:
    """The head has one row less than there are tokens: none of a prompt's first, and no room is asked for it."""
    jobs = [Job([5], replace(GREEDY, max_tokens=tiny.CAPACITY - 1)), Job([7] * 390, replace(HOT, max_tokens=10))]
    same_as_plain(make_engine((name,), "none", k=8), jobs)
