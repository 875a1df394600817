"""Seconds by rows: what is learnt, what is guessed, and what a stall may do."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from outpace.control.costs import DraftCosts, TargetCosts
from outpace.control.row_costs import KNOTS, NATIVE_SHAPE, RowCosts
from outpace.decisions import DraftCall


def learn(costs: RowCosts, true: dict[int, float], steps: int, seed: int = 0, noise: float = 0.07) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        rows = int(rng.choice(list(true)))
        costs.observe(rows, true[rows] * math.exp(noise * rng.normal()))


@given(st.lists(st.tuples(st.integers(1, 700), st.floats(1e-6, 1e3)), max_size=40))
@example([(431, 1.0625), (1, 1.0), (222, 2.0), (191, 2.0), (46, 0.25), (459, 2.0), (173, 2.0), *[(1, 1.0)] * 4])
@settings(max_examples=60, deadline=None)
def test_seconds_never_fall_with_rows_whatever_is_seen(seen: list[tuple[int, float]]) -> None:
    costs = RowCosts()
    for rows, seconds in seen:
        costs.observe(rows, seconds)
    table = costs.table(1, 700)
    assert all(after >= before > 0.0 for before, after in pairwise(table))


@given(st.integers(1, 600), st.integers(0, 90))
def test_a_table_is_the_seconds_of_its_rows(first: int, count: int) -> None:
    costs = RowCosts()
    learn(costs, {1: 0.01, 5: 0.02, 40: 0.1}, 30)
    assert costs.table(first, count) == pytest.approx([costs.seconds(rows) for rows in range(first, first + count)])


def test_the_first_pass_sets_the_scale_and_the_guess_gives_the_rest() -> None:
    costs = RowCosts()
    costs.observe(1, 0.02)
    for rows, relative in NATIVE_SHAPE:
        assert costs.seconds(rows) == pytest.approx(0.02 * relative, rel=0.01)
    slope = (70.0 - 4.7) / (512 - 32)
    assert costs.seconds(1024) == pytest.approx(0.02 * (70.0 + slope * 512), rel=0.05)  # straight on


def test_the_shape_is_learnt_where_the_guess_is_wrong() -> None:
    true = {1: 0.010, 2: 0.019, 5: 0.034}
    costs = RowCosts()
    learn(costs, true, 120)
    for rows, seconds in true.items():
        assert costs.seconds(rows) == pytest.approx(seconds, rel=0.1)
    assert costs.seconds(3) > 1.5 * 0.010 * 1.175  # never seen: it follows its neighbours, not the guess


def test_a_busy_core_is_noticed_within_a_few_steps_and_changes_no_shape() -> None:
    costs = RowCosts()
    learn(costs, {1: 0.010, 5: 0.019}, 150)
    before = costs.seconds(5) / costs.seconds(1)
    learn(costs, {5: 0.038}, 20, seed=1)
    assert costs.seconds(5) == pytest.approx(0.038, rel=0.15)
    assert costs.seconds(5) / costs.seconds(1) == pytest.approx(before, rel=0.05)


@pytest.mark.parametrize("rows", [1, 5])
def test_one_stall_moves_little(rows: int) -> None:
    costs = RowCosts()
    learn(costs, {1: 0.010, 5: 0.0135}, 100)
    before = costs.table(1, 8)
    costs.observe(rows, 100 * before[rows - 1])
    assert max(after / was for after, was in zip(costs.table(1, 8), before, strict=True)) < 1.05


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_what_is_no_time_is_ignored(seconds: float) -> None:
    costs = RowCosts()
    learn(costs, {1: 0.01}, 3)
    before = costs.table(1, 32)
    costs.observe(1, seconds)
    assert costs.table(1, 32) == before


def test_doubt_falls_where_rows_were_seen_and_comes_back() -> None:
    costs = RowCosts()
    costs.observe(5, 0.0135)
    fresh = costs.doubt(1, 5)
    learn(costs, {1: 0.01, 5: 0.0135}, 60)
    known = costs.doubt(1, 5)
    learn(costs, {5: 0.0135}, 400)
    assert fresh > 0.15 > 0.06 > known
    assert costs.doubt(1, 5) > 1.3 * known
    assert costs.doubt(5, 1) == 0.0  # the one that was not seen is in doubt


@pytest.mark.parametrize("shape", [(), ((1, 1.0), (1, 2.0)), ((2, 1.0), (1, 2.0)), ((1, 0.0), (2, 1.0))])
def test_a_shape_that_is_none_is_refused(shape: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ValueError, match="rising rows"):
        RowCosts(shape)


def test_threads_have_tables_of_their_own() -> None:
    costs = TargetCosts()
    for _ in range(30):
        costs.observe(2, 1, 0, 0.010)
    for _ in range(30):
        costs.observe(1, 1, 0, 0.016)
    assert costs.now.seconds(1) == pytest.approx(0.016, rel=0.05)
    costs.observe(2, 1, 0, 0.010)
    assert costs.now.seconds(1) == pytest.approx(0.010, rel=0.05)


def test_prompts_say_less_about_other_rows_than_decoding_does() -> None:
    moved = []
    for prompt_rows in (0, 64):
        costs = TargetCosts()
        for _ in range(50):
            costs.observe(2, 1, 0, 0.010)
        costs.observe(2, 64, prompt_rows, 2 * costs.now.seconds(64))
        moved.append(costs.now.seconds(1))
    assert abs(moved[1] - 0.010) < abs(moved[0] - 0.010)


def call_of(requests: int, rounds: int, rows: int, seconds: float) -> DraftCall:
    return DraftCall("d", requests, rounds, rows, seconds)


def test_rounds_and_rows_of_a_drafter_are_told_apart() -> None:
    costs, rng = DraftCosts(), np.random.default_rng(3)
    for _ in range(80):
        rounds, rows = int(rng.integers(1, 6)), int(rng.choice([0, 1, 60]))
        costs.observe(call_of(1, rounds, rows, 0.01 * (0.4 * rounds + 0.02 * rows)), 0.01)
    assert costs.call(1, 5, 0) == pytest.approx(2.0, rel=0.15)
    assert costs.call(1, 0, 60) == pytest.approx(1.2, rel=0.25)


def test_the_first_call_of_a_slow_drafter_says_so() -> None:
    costs = DraftCosts()
    costs.observe(call_of(1, 1, 40, 0.01 * (10 + 56)), 0.01)
    assert costs.call(1, 1, 0) > 5.0
    assert costs.call(1, 1, 40) > 40.0


def test_the_guess_of_a_drafter_is_its_share_of_the_target() -> None:
    assert DraftCosts(0.3).call(1, 4, 0) == pytest.approx(1.2)
    assert DraftCosts(0.3).call(1, 0, 63) == pytest.approx(0.3 * (RowCosts(seconds=1.0).seconds(64) - 1.0))


def test_knots_are_what_the_tables_say() -> None:
    costs = RowCosts()
    costs.observe(1, 1.0)
    assert [costs.seconds(rows) for rows in KNOTS] == pytest.approx(costs.state())


def test_what_was_learnt_on_another_day_is_a_guess() -> None:
    known = RowCosts()
    learn(known, {1: 0.01, 5: 0.03}, 100)
    costs = RowCosts.recalled(known.state())
    assert costs.table(1, 32) == pytest.approx(known.table(1, 32))
    for _ in range(9):
        costs.observe(1, 3 * known.seconds(1))
    assert costs.seconds(1) == pytest.approx(3 * known.seconds(1), rel=0.2)
    assert costs.doubt(5, 1) > 2 * known.doubt(5, 1)
