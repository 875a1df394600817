"""Allocation against brute force: every count of every request is tried."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.control.allocation import Plan, allocate
from outpace.control.computed import Candidate, choose_computed
from outpace.control.prospects import of_lookups
from outpace.control.report import Prospect
from outpace.decisions import Offer

chains = st.lists(st.floats(0.01, 1.0), max_size=4).map(
    lambda chances: list(itertools.accumulate(chances, float.__mul__))
)
steps = st.lists(st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.0]), min_size=30, max_size=30)


def rising(increments: list[float]) -> list[float]:
    return list(itertools.accumulate(increments, initial=1.0))


def brute_force(survivals: list[list[float]], seconds: list[float], decoding: int, at_least: list[int]) -> float:
    best = 0.0
    for counts in itertools.product(*(range(low, len(s) + 1) for low, s in zip(at_least, survivals, strict=True))):
        tokens = decoding + sum(sum(s[:count]) for s, count in zip(survivals, counts, strict=True))
        best = max(best, tokens / seconds[sum(counts)])
    return best


@given(st.lists(chains, min_size=1, max_size=4), steps, st.integers(0, 3), st.data())
@settings(max_examples=200, deadline=None)
def test_no_choice_is_better(
    survivals: list[list[float]], increments: list[float], more: int, data: st.DataObject
) -> None:
    seconds, decoding = rising(increments), len(survivals) + more
    at_least = [data.draw(st.integers(0, len(s))) for s in survivals]
    plan = allocate(survivals, seconds, decoding=decoding, at_least=at_least)
    assert all(low <= count <= len(s) for low, count, s in zip(at_least, plan.counts, survivals, strict=True))
    tokens = decoding + sum(sum(s[:count]) for s, count in zip(survivals, plan.counts, strict=True))
    assert plan.tokens == pytest.approx(tokens)
    assert plan.seconds == seconds[sum(plan.counts)]
    assert plan.rate == pytest.approx(brute_force(survivals, seconds, decoding, at_least))


def test_what_does_not_pay_for_one_row_may_pay_for_four() -> None:
    """A step of 2 to 5 rows costs the same: the first token alone would not pay."""
    plan = allocate([[0.6, 0.5, 0.4, 0.3]], [1.0, 1.7, 1.7, 1.7, 1.7], decoding=1)
    assert plan.counts == [4]


def test_plain_decoding_has_to_be_beaten_by_the_margin() -> None:
    assert allocate([[0.205]], [1.0, 1.2], decoding=1).counts == [1]
    refused = allocate([[0.205]], [1.0, 1.2], decoding=1, margin=0.01)
    assert refused.counts == [0]
    assert refused.second_best == Plan([1], pytest.approx(1.205), 1.2)
    assert allocate([[0.215]], [1.0, 1.2], decoding=1, margin=0.01).counts == [1]


def test_what_was_left_out_is_told_by_drafter_and_in_tokens() -> None:
    """Whatever they count: the first request has had few tokens, so one of its counts more, and the second less."""
    survivals, offers = [[0.5], [0.3, 0.2], []], [Offer(1, "a", 1), Offer(2, "b", 2), None]
    plan = allocate(survivals, [1.0, 1.4, 1.4, 1.8], decoding=3, values=[1.6, 0.8, 0.6])
    assert plan.counts == [0, 0, 0]
    found = of_lookups(plan, offers, survivals)
    ratio = (3 + 1.6 * 0.5 + 0.8 * 0.3) / 1.4 / 3
    assert found == {
        "a": Prospect(1, 0.5, pytest.approx(0.2), 0.0, pytest.approx(ratio)),
        "b": Prospect(1, 0.3, pytest.approx(0.2), 0.0, pytest.approx(ratio)),
    }
    sentence = "a: 0.5 of 1 draft token expected to be kept for 200.0 ms of verifying, 0.96x the speed without"
    assert found["a"].sentence("a") == sentence
    assert of_lookups(allocate([[0.9]], [1.0, 1.1], decoding=1), [Offer(1, "a", 1)], [[0.9]]) == {}


alike = st.integers(1, 4).flatmap(
    lambda most: st.lists(
        st.lists(st.floats(0.01, 1.0), min_size=most, max_size=most).map(
            lambda chances: list(itertools.accumulate(chances, float.__mul__))
        ),
        min_size=1,
        max_size=3,
    )
)


@given(alike, st.floats(0.0, 0.3), st.floats(0.01, 0.5), steps, st.integers(0, 2))
@settings(max_examples=150, deadline=None)
def test_no_length_and_no_set_of_requests_is_better(
    survivals: list[list[float]], price: float, one_round: float, increments: list[float], others: int
) -> None:
    """For requests that may be drafted for alike; where they differ, their order is a guess."""
    candidates = [Candidate(index, survival, (0, 0.0), price) for index, survival in enumerate(survivals)]
    rounds = [one_round * (1.0 + 0.1 * many) for many in range(len(candidates))]
    seconds, tokens = rising(increments), float(len(candidates) + others)
    share, none = choose_computed(candidates, rounds, seconds, tokens=tokens)
    assert none is None
    assert share is not None
    best = 0.0
    for length in range(1, 1 + len(survivals[0])):
        for many in range(1, len(candidates) + 1):
            for members in itertools.combinations(survivals, many):
                total = seconds[many * length] + length * rounds[many - 1] + many * price
                best = max(best, (tokens + sum(sum(one[:length]) for one in members)) / total)
    assert share.rate == pytest.approx(best)
    assert share.tokens / share.seconds == pytest.approx(share.rate)
    call = share.num_tokens * rounds[len(share.members) - 1] + len(share.members) * price
    assert share.drafting == pytest.approx(call)


def test_a_computed_draft_has_to_bring_more_than_the_one_it_replaces() -> None:
    seconds = [1.0, 1.0, 1.0, 1.0, 1.0]
    good = Candidate(0, [0.9, 0.8], (2, 1.5))
    bad = Candidate(1, [0.9, 0.8], (0, 0.0))
    share, _ = choose_computed([good, bad], [0.1, 0.1], seconds, tokens=3.5, num_drafted=2)
    assert share is not None
    assert share.members[0] == 1
    alone, _ = choose_computed([good], [0.1], seconds, tokens=2.5, num_drafted=2)
    assert alone is not None
    assert alone.tokens == pytest.approx(2.5 - 1.5 + 1.7)


def test_without_candidates_there_is_no_share() -> None:
    assert choose_computed([], [], [1.0], tokens=1.0) == (None, None)
