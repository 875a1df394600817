"""When a head is called better: gains that are large enough, and that the texts agree about."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outpace.train.acceptance import Acceptance, Chains
from outpace.train.comparing import Judged, compare, judge
from outpace.train.data.packing import Windows


def judged(*scores: float, rows: tuple[int, ...] = ()) -> Judged:
    mean = sum(scores) / len(scores)
    return Judged(Acceptance(5, 100, (), (), mean / 2, mean / 2, 0.5), scores, rows or (10,) * len(scores))


@pytest.mark.parametrize(
    ("old", "new", "better"),
    [
        ((4.0, 5.0, 3.0, 4.0), (4.2, 5.2, 3.2, 4.21), True),  # texts differ, but agree about the gain
        ((4.0, 5.0, 3.0, 4.0), (4.9, 4.6, 3.4, 4.1), False),  # more on average, by one window
        ((4.0, 5.0, 3.0, 4.0), (4.01, 5.01, 3.01, 4.01), False),  # sure, and too little
        ((4.0, 5.0, 3.0, 4.0), (4.0, 5.0, 3.0, 4.0), False),
        ((4.0, 5.0, 3.0, 4.0), (3.0, 4.0, 2.0, 3.0), False),
        ((4.0, 5.0, 3.0), (8.0, 9.0, 7.0), False),  # too few texts to know
    ],
)
def test_better(old: tuple[float, ...], new: tuple[float, ...], better: bool) -> None:
    assert compare(judged(*old), judged(*new)).is_better is better


def test_numbers() -> None:
    """Differences 0, 1, 1, 2: mean 1, standard deviation sqrt(2/3), of which four texts leave half."""
    found = compare(judged(2, 3, 4, 5), judged(2, 4, 5, 7))
    assert (found.gain, found.texts) == (1.0, 4)
    assert found.doubt == pytest.approx(math.sqrt(2 / 3) / 2)
    assert "the same 4 held-out texts (together +1.000 +- 0.408)" in found.describe()
    assert "2.250 at temperature 0 and 2.250 at 1; the head it began as had 1.750 and 1.750" in found.describe()
    assert "3 held-out texts (too few to tell, 4 are needed: " in compare(judged(2, 3, 4), judged(3, 4, 5)).describe()


def test_longer_texts_count_for_more() -> None:
    rows = (100, 100, 1, 1)
    found = compare(judged(2, 2, 2, 2, rows=rows), judged(3, 3, 9, 1, rows=rows))
    assert found.gain == pytest.approx((100 + 100 + 7 - 1) / 202)
    assert found.is_better
    assert not compare(judged(2, 2, 2, 2, rows=rows), judged(2, 2, 9, 9, rows=rows)).is_better


def test_nothing_held_out_says_nothing() -> None:
    nothing = Judged(Acceptance(5, 0, (), (), 1.0, 1.0, 0.0), (), ())
    assert not compare(nothing, nothing).is_better


def test_a_kind_is_judged_text_by_text() -> None:
    """Two windows, of two texts and of one: what each says of itself, and all of them together. Others do not count."""

    def chains(agrees: list[list[bool]], follows: list[bool]) -> Chains:
        kept = torch.tensor(agrees)
        return Chains(kept, kept.float(), torch.ones_like(kept), torch.tensor(follows))

    per_window = [
        chains([[True, True], [True, False], [False, False]], [False, True, False]),
        chains([[True, True], [True, True]], [False, True]),
    ]

    class Kind:
        def chains(self, batch: Any) -> dict[str, Chains]:
            return {"it": per_window[int(batch.windows.ids[0, 0])]}

    windows = Windows(torch.tensor([[7], [0], [1]]), torch.zeros(3, 1).long(), torch.ones(3, 1).bool())
    target: Any = SimpleNamespace(states=lambda *_: {}, said=lambda *_: None)
    seen: list[tuple[int, int]] = []
    kind: Any = Kind()
    found = judge(kind, target, windows, target, torch.tensor([1, 2]), 2, lambda *done: seen.append(done))
    assert found.rows == (2, 1, 2)
    assert found.scores == (3.0 + 1 + (2 + 1) / 2, 1.0 + 1, 3.0 + 1 + 2)
    assert found.acceptance.rows == 5
    assert seen == [(1, 2), (2, 2)]
