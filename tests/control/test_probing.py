"""The budget of probes, and how often one thing is tried."""

from __future__ import annotations

from itertools import pairwise

import pytest

from outpace.control.probing import SHARE, Pace, ProbingBudget


def test_probes_never_take_more_than_their_share_of_the_time() -> None:
    budget, passed = ProbingBudget(), 0.0
    for _ in range(500):
        passed += 1.0
        budget.earn(1.0, 1.0)
        if budget.affords(0.3):
            budget.charge(0.3)
        assert budget.spent <= SHARE * passed + 1e-9
    assert budget.spent == pytest.approx(SHARE * passed, abs=0.3)


def test_savings_are_limited() -> None:
    budget = ProbingBudget()
    for _ in range(10_000):
        budget.earn(1.0, 1.0)
    assert not budget.affords(25.0)
    assert budget.affords(19.0)


def test_what_drafts_lost_is_paid_back_before_anything_is_tried() -> None:
    budget = ProbingBudget()
    for _ in range(100):
        budget.earn(1.0, 1.0)
    budget.lose(3.0, 1.0)
    assert not budget.affords(0.1)
    for _ in range(200):
        budget.earn(1.0, 1.0)
        if not budget.debt:
            break
        assert budget.seconds < 101 * SHARE  # all of it pays the debt
    assert budget.affords(0.1)
    budget.lose(0.5, 1.0)
    budget.lose(-5.0, 1.0)  # gains pay back, and no more than that
    assert budget.debt == 0.0
    assert not budget.affords(3.0)


def test_failures_make_it_rarer_and_a_success_makes_it_soon() -> None:
    pace, now, waits = Pace(2.0, 0), 0.0, []
    for _ in range(30):
        waits.append(pace.due - now)
        now = pace.due
        pace.tried(int(now), success=False)
        now = float(int(now))
    assert waits[0] == 2.0
    assert all(after >= before - 1.0 for before, after in pairwise(waits))
    assert 30.0 <= waits[-1] <= 33.0
    assert sum(waits[:10]) < 75.0  # tried about ten times in the first hundred steps
    pace.tried(100, success=True)
    assert pace.due == 101
    pace.tried(101, success=False)
    assert pace.due < 105
    pace.restart(200)
    assert pace.due == 202
