"""Every sampling parameter gives the same under speculation: every drafter, every draft length, alone and side by side.

Ids, text, ends and log probabilities are compared with the oracle. Not every combination is run: every parameter meets
every drafter and every draft length, alone and side by side.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from .fakes import TokenCache
from .harness import make_engine, run
from .parameter_cases import DRAFTERS, EOS, MODEL, NAMES, Case, case, drafter_for

LENGTHS = (1, 2, 4, 8)
CHUNKED = (
    "greedy penalties",
    "prompt logprobs 2",
    "grammar, penalties",
    "everything",
    "truncated prompt",
    "two processors",
    "prompt logprobs all",
    "penalties among few",
)


def names_for(drafter: str, k: int) -> list[str]:
    """A quarter of all cases; the quarters go round, so that each drafter and each length meets every case."""
    names = sorted(NAMES)
    random.Random(1).shuffle(names)
    return names[(LENGTHS.index(k) + DRAFTERS.index(drafter)) % 4 :: 4]


def check(cases: Sequence[Case], drafter: str | None, k: int, *, rows: int = 512, max_rows: int = 4096) -> int:
    """Runs the cases side by side. Returns how often one was preempted."""
    drafters = {} if drafter is None else {drafter: drafter_for(drafter, cases)}
    cache = TokenCache(max_rows=max_rows)
    results = run(make_engine(MODEL, cache, drafters, k=k, eos=sorted(EOS), rows=rows), [each.job for each in cases])
    for each, result in zip(cases, results, strict=True):
        try:
            each.expected.check(result)
        except AssertionError as error:
            raise AssertionError(f"{each.name}: {error}") from error
    return sum(result.stats.preemptions for result in results)


def test_every_parameter_meets_every_drafter_and_length() -> None:
    for drafter in DRAFTERS:
        assert {name for k in LENGTHS for name in names_for(drafter, k)} == set(NAMES)
    for k in LENGTHS:
        assert {name for drafter in DRAFTERS for name in names_for(drafter, k)} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_without_speculation(name: str) -> None:
    check([case(name)], None, 4)


@pytest.mark.parametrize("k", LENGTHS)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.thinned(3)
def test_side_by_side(drafter: str, k: int) -> None:
    """Half of the cases, eight at a time, in other company for every drafter and length."""
    names = [name for length in LENGTHS[LENGTHS.index(k) % 2 :: 2] for name in names_for(drafter, length)]
    random.Random(f"{drafter} {k}").shuffle(names)
    for first in range(0, len(names), 8):
        check([case(name) for name in names[first : first + 8]], drafter, k)


@pytest.mark.parametrize("k", LENGTHS)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.thinned(3)
def test_alone(drafter: str, k: int) -> None:
    for name in names_for(drafter, k):
        check([case(name)], drafter, k)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_in_chunks(drafter: str) -> None:
    check([case(name) for name in CHUNKED], drafter, 4, rows=13)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_preempted(drafter: str) -> None:
    """Hardly more rows than the longest text takes alone."""
    cases = [case(name) for name in CHUNKED]
    longest = max(len(each.expected.prompt) + (each.job.params.max_tokens or 0) for each in cases)
    assert check(cases, drafter, 4, rows=13, max_rows=longest + 1) > 0
