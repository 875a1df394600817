"""No drafts beside more running requests than disable_by_batch_size allows; the text is the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from outpace.config import SpeculativeConfig
from outpace.engine.engine import Engine
from outpace.errors import InvalidParameter
from outpace.types import Ask, Draft
from tests.engine.fakes import HistoryModel, IdVocabulary, ScriptedDrafter, TokenCache
from tests.engine.harness import WARM, Job, plain, run

V = 24


def run_batch(jobs: Sequence[Job], limit: dict[str, int]) -> tuple[list[tuple[int, int]], list[int]]:
    """Runs requests side by side, with drafts that are always right.

    Returns:
        (requests running, drafts asked for) of every step in which the drafter was asked, and the number of draft
        tokens of every request.
    """
    model = HistoryModel(V, order=3)
    texts = {tuple(job.prompt): [*job.prompt, *plain(model, job)] for job in jobs}
    asked: list[tuple[int, int]] = []

    def script(ask: Ask) -> Draft:
        text = texts[tuple(ask.token_ids[:2])]
        return Draft.chain(text[len(ask.token_ids) :][: ask.num_draft_tokens], "oracle")

    class Spy(ScriptedDrafter):
        def propose(self, asks: Sequence[Ask], row_budget: int) -> list[Draft]:
            asked.append((len(engine._scheduler.running), len(asks)))
            return super().propose(asks, row_budget)

    engine = Engine(
        model,
        TokenCache(),
        {"oracle": Spy("oracle", script)},
        vocabulary=IdVocabulary(V),
        eos_ids=(),
        max_model_len=100,
        num_speculative_tokens={"oracle": 4},
        disable_by_batch_size=limit,
    )
    results = run(engine, jobs)
    for job, result in zip(jobs, results, strict=True):
        assert result.outputs[0].token_ids == plain(model, job)
    return asked, [result.stats.draft_tokens for result in results]


def jobs_of(*lengths: int) -> list[Job]:
    return [Job([1, 2 + index], replace(WARM, max_tokens=length)) for index, length in enumerate(lengths)]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_drafts_stop_above_the_limit(count: int) -> None:
    asked, drafted = run_batch(jobs_of(*[40] * count), {"oracle": 2})
    if count <= 2:
        assert all(drafted)
        assert {running for running, _ in asked} == {count}
    else:
        # All requests are as long as each other, so they run side by side to the end.
        assert asked == []
        assert drafted == [0] * count


def test_the_limit_of_another_drafter_does_not_matter() -> None:
    assert all(run_batch(jobs_of(*[40] * 5), {"ngram": 1})[1])
    assert all(run_batch(jobs_of(*[40] * 5), {})[1])


def test_drafts_begin_again_when_few_are_left() -> None:
    asked, drafted = run_batch(jobs_of(5, 40, 6), {"oracle": 1})
    assert {running for running, _ in asked} == {1}
    assert drafted[0] == drafted[2] == 0
    assert drafted[1] >= 20


@pytest.mark.parametrize("value", [0, -1, "many", 1.5, True])
def test_the_limit_is_a_count(value: object) -> None:
    with pytest.raises(InvalidParameter, match="disable_by_batch_size"):
        SpeculativeConfig(disable_by_batch_size=value)  # type: ignore[arg-type]
