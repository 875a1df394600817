"""`@pytest.mark.thinned(n)`: of a test's many cases the ordinary suite runs about one in n, the slow suite all others.

Which ones is decided by their names, so it is the same everywhere and follows no pattern of the parameters. No value of
a parameter is left out: each is in a case that stays, unless there are more values than cases that stay.
"""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict

import pytest

__all__ = ["thin_out"]


def thin_out(items: list[pytest.Item]) -> None:
    """Marks the cases that are left to the slow suite."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("thinned") is not None:
            cases[item.nodeid.partition("[")[0]].append(item)
    for group in cases.values():
        marker = group[0].get_closest_marker("thinned")
        assert marker is not None
        for item in _left_out(group, max(1, len(group) // marker.args[0])):
            item.add_marker(pytest.mark.slow)


def _left_out(group: list[pytest.Item], count: int) -> list[pytest.Item]:
    """All but about `count` cases of a test, which have every value of the parameters that have no more of them."""
    drawn = sorted(group, key=lambda item: zlib.crc32(item.nodeid.encode()))
    values = {id(item): _values(item) for item in drawn}
    of_name = Counter(name for name, _ in {value for found in values.values() for value in found})
    missing = {value for found in values.values() for value in found if of_name[value[0]] <= count}
    stay: set[int] = set()
    while missing:  # of equal ones, the first in the order of the throw
        best = max(drawn, key=lambda other: len(values[id(other)] & missing))
        stay.add(id(best))
        missing -= values[id(best)]
    for item in drawn:
        if len(stay) < count:
            stay.add(id(item))
    return [item for item in drawn if id(item) not in stay]


def _values(item: pytest.Item) -> frozenset[tuple[str, str]]:
    """(parameter, value) of a case."""
    call = getattr(item, "callspec", None)
    return frozenset() if call is None else frozenset((name, repr(value)) for name, value in call.params.items())
