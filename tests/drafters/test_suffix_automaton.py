"""The automaton against a search through the text that anybody can check, and what it costs on texts made to be bad."""

from __future__ import annotations

import random
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.drafters.suffix_automaton import MAX_HOPS, ROOT, SuffixAutomaton


class Found(NamedTuple):
    length: int
    token: int
    agreeing: int
    total: int
    position: int


def search(text: Sequence[int], piece: Sequence[int]) -> Found | None:
    """The longest end of a piece that is followed by something in a text, and what follows it most often, then last."""
    for length in range(len(piece), 0, -1):
        wanted = list(piece[len(piece) - length :])
        ends = [end for end in range(length, len(text)) if list(text[end - length : end]) == wanted]
        if ends:
            places = {token: [end for end in ends if text[end] == token] for token in {text[end] for end in ends}}
            token = max(places, key=lambda token: (len(places[token]), places[token][-1]))
            return Found(length, token, len(places[token]), len(ends), places[token][-1])
    return None


def check_every_prefix(text: Sequence[int], steps: int) -> None:
    """Follows the match at every length of the text, and compares each token with the search."""
    automaton = SuffixAutomaton(max_hops=len(text) + 1)
    for size in range(1, len(text) + 1):
        automaton.extend(text[size - 1 : size])
        prefix, state = list(text[:size]), automaton.match
        length = automaton.length(state)
        expected = search(prefix, prefix)
        assert length == (expected.length if expected else 0)
        piece = list(prefix)
        for _ in range(steps if expected else 0):
            follower = automaton.follower(state)
            if follower is None:  # the text ends here: it goes on as its match did
                state = automaton.match
                length = automaton.length(state)
                follower = automaton.follower(state)
            assert follower is not None
            assert search(prefix, piece[len(piece) - length :]) == (
                length,
                follower.token,
                follower.agreeing,
                follower.total,
                follower.position,
            )
            piece.append(follower.token)
            state, length = follower.state, length + 1


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(-1, 2), max_size=30))
def test_matches_and_followers_are_those_of_a_search(text: list[int]) -> None:
    check_every_prefix(text, 5)


@pytest.mark.parametrize("period", [1, 2, 5, 70])
def test_matches_may_be_of_any_length_and_overlap(period: int) -> None:
    check_every_prefix([place % period for place in range(150)], 3)


def test_random_text_of_some_length() -> None:
    draw = random.Random(5)
    check_every_prefix([draw.choice((0, 0, 0, 1, 2, 9)) for _ in range(220)], 2)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 2), max_size=40), st.lists(st.integers(0, 3), max_size=5))
def test_steps_spell_the_pieces_of_the_text_and_nothing_else(text: list[int], piece: list[int]) -> None:
    automaton = SuffixAutomaton(max_hops=len(text) + 1)
    automaton.extend(text)
    state: int | None = ROOT
    for token in piece:
        state = None if state is None else automaton.step(state, token)
    ends = [end for end in range(len(piece), len(text) + 1) if text[end - len(piece) : end] == piece]
    assert (state is not None) == bool(ends)
    if state is not None and piece:
        assert automaton.count(state) == len(ends)
        assert automaton.length(automaton.link(state)) < len(piece) <= automaton.length(state)


def test_beyond_the_hops_counts_are_too_low_and_matches_exact() -> None:
    size = 10 * MAX_HOPS
    automaton = SuffixAutomaton()
    automaton.extend([7] * size)
    assert automaton.length(automaton.match) == size - 1
    for length in range(1, size):
        state = automaton.step(ROOT, 7)
        for _ in range(length - 1):
            assert state is not None
            state = automaton.step(state, 7)
        assert state is not None and automaton.count(state) == min(MAX_HOPS + 1, size - length + 1)


def fibonacci(size: int) -> list[int]:
    before, now = [1], [0]
    while len(now) < size:
        before, now = now, now + before
    return now[:size]


def runs(size: int) -> list[int]:
    text: list[int] = []
    while len(text) < size:
        text += [0] * (len(text) // 2 + 1) + [len(text) + 1]
    return text[:size]


def fresh_after_same(size: int) -> list[int]:
    """The same two tokens, and then something that never came before: a state with thousands of followers."""
    return [token for number in range(size // 3) for token in (0, 1, number + 2)]


TEXTS: dict[str, Callable[[int], list[int]]] = {
    "one token": lambda size: [3] * size,
    "Fibonacci": fibonacci,
    "runs": runs,
    "fresh after same": fresh_after_same,
    "random, 2 ids": lambda size: random.Random(1).choices(range(2), k=size),
    "random, 300 ids": lambda size: random.Random(1).choices(range(300), k=size),
    "random, 50000 ids": lambda size: random.Random(1).choices(range(50_000), k=size),
}


def lines_run(work: Callable[[], object]) -> int:
    """Lines of Python that ran: work that no machine measures differently."""
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("name", TEXTS)
def test_a_token_costs_the_same_at_any_length(name: str) -> None:
    small, large = TEXTS[name](2_000), TEXTS[name](8_000)
    costs = []
    for text in (small, large):
        automaton = SuffixAutomaton()
        costs.append(lines_run(lambda: automaton.extend(text)) / len(text))  # noqa: B023
        assert lines_run(lambda: automaton.follower(automaton.match)) < 20  # noqa: B023
    assert max(costs) < 400
    assert costs[1] < 1.5 * costs[0]


@pytest.mark.parametrize("name", TEXTS)
def test_memory_is_what_is_reported(name: str) -> None:
    text = TEXTS[name](10_000)
    tracemalloc.start()
    try:
        automaton = SuffixAutomaton()
        automaton.extend(text)
        measured, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.7 < automaton.memory_bytes / measured < 1.4
