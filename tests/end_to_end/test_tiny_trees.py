"""Speculation with trees off = on over real layers, caches and kernels, and nobody's rows get lost on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from outpace.kv.cache import KvCache
from tests.engine.chaos import ChaosController
from tests.engine.harness import run

from .test_tiny_models import NATIVE, TOKENS, TORCH, WAYS, jobs_for, plain
from .tiny import make_engine

DRAFTERS = ("tree", "suffix_tree")


@pytest.mark.thinned(8)
@pytest.mark.parametrize("quantization", NATIVE + TORCH)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("k", [2, 5, 16])
@pytest.mark.parametrize("name", DRAFTERS)
def test_same_tokens(name: str, k: int, batch: int, way: str, quantization: str) -> None:
    jobs = jobs_for(batch)
    longest = max(len(job.prompt) for job in jobs) + TOKENS
    engine = make_engine(
        (name,),
        quantization,
        k=k,
        rows=61 if way == "chunks" else 512,
        max_rows=longest + 60 if way == "preempting" else 3200,
    )
    results = run(engine, jobs)
    for job, result in zip(jobs, results, strict=True):
        assert result.outputs[0].token_ids == plain(job, quantization)
    if name == "tree" and batch > 1:
        drafted = sum(r.stats.draft_tokens for r in results)
        accepted = sum(r.stats.accepted_tokens for r in results)
        assert drafted * 0.1 < accepted < drafted, "drafts that are all right or all wrong prove nothing"


@pytest.mark.parametrize("quantization", ["none", "int8", "int4", "torch int8"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.thinned(2)
def test_trees_beside_chains_that_take_turns_and_are_cut(
    way: str, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trees of a draft model and of the text, chains of an early exit with kept states, in one pack and one request."""
    jobs = jobs_for(8)
    longest = max(len(job.prompt) for job in jobs) + TOKENS
    controller = ChaosController(3)  # of its kind, one that verifies trees whose kept path lies scattered
    engine = make_engine(
        ("suffix_tree", "tree", "adapter"),
        quantization,
        k=9,
        rows=61 if way == "chunks" else 512,
        max_rows=longest + 60 if way == "preempting" else 3200,
        controller=controller,
    )
    moved: list[tuple[int, ...]] = []
    compact = KvCache.compact

    def counted(self: KvCache, lane: int, first: int, slots: Sequence[int]) -> None:
        if self is engine.cache and list(slots) != list(range(first, first + len(slots))):
            moved.append(tuple(slots))
        compact(self, lane, first, slots)

    monkeypatch.setattr(KvCache, "compact", counted)
    for job, result in zip(jobs, run(engine, jobs), strict=True):
        assert result.outputs[0].token_ids == plain(job, quantization)
    assert moved or way != "roomy", "no path had to move to the front"


@pytest.mark.parametrize("shift", [-1, 1])
def test_compaction_off_by_one_is_noticed(shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = KvCache.compact

    def shifted(self: KvCache, lane: int, first: int, slots: Sequence[int]) -> None:
        last = self.reserved(lane) - 1
        real(self, lane, first, sorted({min(max(slot + shift, first + at), last) for at, slot in enumerate(slots)}))

    monkeypatch.setattr(KvCache, "compact", shifted)
    jobs = [replace(job, params=replace(job.params, max_tokens=60)) for job in jobs_for(3)]
    results = run(make_engine(("tree",), "none", k=9), jobs)
    assert any(result.outputs[0].token_ids != plain(job, "none") for job, result in zip(jobs, results, strict=True))
