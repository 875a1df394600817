"""benchmarks/suffix.py: replays against arithmetic by hand."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from outpace.drafters.suffix import SuffixDrafter
from outpace.types import Ask, Draft

PROMPT, OUTPUT = [1, 2], [3, 4, 5, 6, 7, 8, 9]


@pytest.fixture
def suffix(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("suffix")


class Scripted(SuffixDrafter):
    """Drafts what it was told, by the number of tokens there are."""

    def __init__(self, drafts: dict[int, list[int]]) -> None:
        super().__init__()
        self._drafts = drafts
        self.asked: list[int] = []

    def propose(self, asks: Sequence[Ask], row_budget: int) -> list[Draft]:
        self.asked += [len(ask.token_ids) for ask in asks]
        drafts = (self._drafts.get(len(ask.token_ids), [])[: ask.num_draft_tokens] for ask in asks)
        return [Draft.chain(ids, "output") if ids else Draft() for ids in drafts]


def test_a_replay_goes_through_an_answer_as_an_engine_would(suffix: ModuleType) -> None:
    # Of the first draft two are right and a third follows by the model; nothing is drafted; one of one is wrong; and of
    # the last draft only what an answer of this length has room for counts.
    drafter = Scripted({2: [3, 4, 0, 6], 5: [], 6: [0], 7: [8, 9, 9, 9]})
    score = suffix.replay(drafter, 0, PROMPT, OUTPUT, 3)
    assert drafter.asked == [2, 5, 6, 7]
    assert (score.steps, score.tokens) == (4, 7)
    assert (score.drafts, score.drafted, score.accepted) == (3, 3 + 1 + 1, 2 + 0 + 1)
    assert str(score) == "3/5 | 0.60 | 2.00 | 1.75"


def test_scores_are_added_by_task(suffix: ModuleType) -> None:
    answers = [{"task": task, "prompt": PROMPT, "output": OUTPUT} for task in ("chat", "json", "chat")]
    scores = suffix.replay_all(Scripted({2: [3, 4]}), answers, 1)
    assert {task: (score.steps, score.tokens, score.accepted) for task, score in scores.items()} == {
        "chat": (12, 14, 2),
        "json": (6, 7, 1),
        "all": (18, 21, 3),
    }


def test_successors_are_asked_where_the_text_itself_has_no_draft(suffix: ModuleType) -> None:
    answers = [{"task": "chat", "prompt": PROMPT, "output": OUTPUT}] * 3
    alone = suffix.replay_all(SuffixDrafter(), answers, 2)["all"]
    assert (alone.steps, alone.drafted) == (21, 0)
    # After the first answer every token followed its last one once of once, a chance of 1/2, and after the second twice
    # of twice, 2/3: in the second answer one token can be drafted, in the third two, 2/3 * 2/3 being 0.44.
    both = suffix.replay_all(suffix.SuffixThenSuccessors((1,), 0.4), answers, 2)["all"]
    assert (both.steps, both.drafted, both.accepted) == (7 + 4 + 3, 3 + 4, 3 + 4)
