"""Faults planted on purpose: the identity and acceptance checks must notice each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import outpace.engine.engine as engine_module
import outpace.engine.pack as pack_module
import outpace.engine.verifying as verifying_module
from outpace.drafters.draft_model import DraftModelDrafter
from outpace.sampling.choose import Chosen
from outpace.types import Ask, Choice, Draft, Observation, Segment, Verdict

from .fakes import HistoryModel, TokenCache, random_drafter
from .harness import WARM, Job, make_engine, mixed_jobs, plain, run

V = 24


def identical() -> bool:
    """A small identity run with random drafts: whether it finds speculation harmless."""
    model = HistoryModel(V)
    jobs = mixed_jobs(4, V, seed=2)
    try:
        results = run(make_engine(model, TokenCache(), {"random": random_drafter(V)}, k=4), jobs)
    except AssertionError:
        return False
    return all(result.outputs[0].token_ids == plain(model, job) for job, result in zip(jobs, results, strict=True))


def own_draft_acceptance(k: int = 4) -> float:
    """Acceptance of the target as its own draft, which must be exactly 1."""
    jobs = [Job([i, 3], replace(WARM, max_tokens=80)) for i in range(3)]
    drafter = DraftModelDrafter(HistoryModel(V), TokenCache(), max_model_len=512)
    results = run(make_engine(HistoryModel(V), TokenCache(), {"draft_model": drafter}, k=k), jobs)
    return min(result.stats.acceptance_rate or 0.0 for result in results)


def test_without_a_fault_both_checks_pass() -> None:
    assert identical()
    assert own_draft_acceptance() == 1.0


def accept_all(draft: Draft, chosen: Sequence[int]) -> Verdict:
    return Verdict(tuple(range(len(draft))), chosen[len(draft)])


def drop_bonus_history(draft: Draft, chosen: Sequence[int]) -> Verdict:
    """Takes the bonus from one row too early whenever something was accepted."""
    verdict = engine_verify(draft, chosen)
    return Verdict(verdict.accepted, chosen[max(0, len(verdict.accepted) - 1)])


engine_verify = verifying_module.coupled.verify


@pytest.mark.parametrize("fault", [accept_all, drop_bonus_history])
def test_wrong_walks_are_noticed(fault: Callable[..., Verdict], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying_module.coupled, "verify", fault)
    assert not identical()


@pytest.mark.parametrize("shift", [-1, 1])
def test_rollback_off_by_one_is_noticed(shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = TokenCache.truncate

    def truncate(self: TokenCache, lane: int, rows: int) -> None:
        real(self, lane, max(0, min(rows + shift, self._reserved[lane])) if rows else 0)

    if shift == -1:
        monkeypatch.setattr(TokenCache, "truncate", truncate)
        assert not identical()
    else:
        # One row too many stays: harmless to the text, since it is overwritten, so the request's own count must lie.
        append = engine_module._append

        def lying(block: pack_module.Block, *rest: Any) -> tuple[int, ...]:
            kept = append(block, *rest)
            return (*kept, len(kept)) if block.draft else kept

        monkeypatch.setattr(engine_module, "_append", lying)
        assert not identical()


def test_noise_without_the_position_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = verifying_module.choose_each

    def choose(logits: torch.Tensor, choices: Sequence[Choice]) -> Chosen:
        return real(logits, [replace(c, position=0) for c in choices])

    monkeypatch.setattr(verifying_module, "choose_each", choose)
    assert not identical()


def test_a_shifted_noise_position_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Position counted inside the block instead of from the start of the text."""
    real = verifying_module.choices_of

    def choices(block: pack_module.Block) -> list[Choice]:
        return [replace(c, position=i) for i, c in enumerate(real(block))]

    monkeypatch.setattr(verifying_module, "choices_of", choices)
    assert not identical()


def missing_row(self: DraftModelDrafter, observations: Sequence[Observation]) -> None:
    """Forgets that the last draft token was never fed, so nothing catches up after full acceptance."""
    for seen in observations:
        state = self._states[seen.request_id]
        assert state is not None
        state.num_rows = len(seen.token_ids) - 1
        state.fed.clear()


def test_a_stale_draft_cache_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftModelDrafter, "observe", missing_row)
    with pytest.raises(AssertionError, match="never computed"):
        own_draft_acceptance()


def test_a_draft_from_the_wrong_history_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text stays right, acceptance must show it."""
    real = DraftModelDrafter._begin

    def begin(self: DraftModelDrafter, ask: Ask) -> object:
        growth = real(self, ask)
        assert growth is not None
        growth.rows = [0] * len(growth.rows)
        return growth

    monkeypatch.setattr(DraftModelDrafter, "_begin", begin)
    assert own_draft_acceptance() < 1.0


def test_a_pack_with_shifted_slots_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(lane: int, begin: int, end: int, first_slot: int) -> Segment:  # drafts here are chains
        return Segment(lane, begin, end, max(0, first_slot - 1))

    monkeypatch.setattr(pack_module, "Segment", shifted)
    assert not identical()
