"""How often a drafter's second, third, ... candidate is right where the ones before it are wrong."""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import mean

import pytest

from outpace.control.ranks import RankAcceptance


def taught(
    ranks: RankAcceptance, said: Sequence[float] | None, chances: Sequence[float], places: int, seed: int = 1
) -> None:
    """The first candidate is wrong in every step's place; of the others each is right with its chance."""
    source = random.Random(seed)
    for _ in range(places):
        ranks.fade()
        right = next((rank for rank, chance in enumerate(chances, 1) if source.random() < chance), None)
        ranks.observe(said, 1 + len(chances), right)


def test_what_was_never_seen_is_a_guess_that_falls_with_the_rank() -> None:
    ranks = RankAcceptance()
    averages = [ranks.average(rank) for rank in range(1, 6)]
    assert averages[:3] == sorted(averages[:3], reverse=True) and averages[2:] == [averages[2]] * 3
    assert ranks.chance(1, 0.5, 0.4) == pytest.approx(0.4)


@pytest.mark.parametrize("chances", [(0.6, 0.3), (0.05, 0.4), (0.3, 0.02)])
def test_each_rank_is_learnt_whatever_the_drafter_says(chances: Sequence[float]) -> None:
    several = [RankAcceptance() for _ in range(10)]
    for seed, ranks in enumerate(several):
        taught(ranks, (0.5, 0.2, 0.12), chances, 200, seed)
    for rank, chance in enumerate(chances, 1):
        share = (0.2 / 0.5, 0.12 / 0.3)[rank - 1]
        assert mean(ranks.chance(rank, 0.5, share) for ranks in several) == pytest.approx(chance, abs=0.06)


def test_without_confidence_the_average_is_learnt() -> None:
    ranks = RankAcceptance()
    taught(ranks, None, (0.5, 0.1), 300)
    assert ranks.average(1) == pytest.approx(0.5, abs=0.12)
    assert ranks.average(2) == pytest.approx(0.1, abs=0.1)


def test_a_second_candidate_behind_a_sure_first_one_is_another_matter() -> None:
    ranks = RankAcceptance()
    for _ in range(100):
        taught(ranks, (0.9, 0.05), (0.02,), 1)
        ranks.observe((0.25, 0.2), 2, 1)
    assert ranks.chance(1, 0.25, 0.3) > 0.5 > 0.2 > ranks.chance(1, 0.9, 0.5)


def test_a_larger_share_is_a_better_chance() -> None:
    ranks = RankAcceptance()
    taught(ranks, (0.5, 0.2), (0.3,), 100)
    found = [ranks.chance(1, 0.5, share) for share in (0.05, 0.2, 0.5, 0.9)]
    assert found == sorted(found) and found[0] < 0.1 < 0.7 < found[-1]


def test_a_third_candidate_nobody_saw_is_supposed_to_be_like_the_second() -> None:
    good, bad = RankAcceptance(), RankAcceptance()
    taught(good, (0.4, 0.2), (0.8,), 60)
    taught(bad, (0.4, 0.2), (0.02,), 60)
    assert good.chance(2, 0.4, 0.3) > 0.4 > 0.1 > bad.chance(2, 0.4, 0.3)


def test_what_was_is_forgotten() -> None:
    ranks = RankAcceptance()
    taught(ranks, (0.5, 0.25), (0.7,), 200)
    taught(ranks, (0.5, 0.25), (0.03,), 150)
    assert ranks.chance(1, 0.5, 0.5) < 0.2


def test_what_was_learnt_long_ago_does_not_outweigh_the_few_that_come_now() -> None:
    """Siblings were never right, so few drafts have some. Of these few they are right from now on."""
    ranks = RankAcceptance()
    taught(ranks, (0.5, 0.25), (0.0,), 200)
    assert ranks.chance(1, 0.5, 0.5) < 0.05
    for step in range(60):
        ranks.fade()
        if step % 8 == 7:
            ranks.observe((0.5, 0.25), 2, 1)
    assert ranks.chance(1, 0.5, 0.5) > 0.3


def test_nothing_is_learnt_where_the_first_one_is_right() -> None:
    ranks = RankAcceptance()
    for _ in range(50):
        ranks.observe((0.5, 0.25), 2, 0)
    assert ranks.chance(1, 0.5, 0.5) == pytest.approx(0.5)
    assert ranks.average(1) == RankAcceptance().average(1)
