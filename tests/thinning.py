"""`@pytest.mark.thinned(n)`: of a test's many cases the ordinary suite runs about one in n, the slow suite all others.

Which ones is decided by their names, so it is the same everywhere and follows no pattern of the parameters.
"""

from __future__ import annotations

import zlib
from collections import defaultdict

import pytest

__all__ = ["thin_out"]


def thin_out(items: list[pytest.Item]) -> None:
    """Marks the cases that are left to the slow suite; the first of a test in the order of this throw always stays."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("thinned") is not None:
            cases[item.nodeid.partition("[")[0]].append(item)
    for group in cases.values():
        marker = group[0].get_closest_marker("thinned")
        assert marker is not None
        drawn = sorted(group, key=lambda item: zlib.crc32(item.nodeid.encode()))
        for item in drawn[max(1, len(group) // marker.args[0]) :]:
            item.add_marker(pytest.mark.slow)
