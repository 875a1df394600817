"""Drafts of a network with a cache of its own: what is fed to it, row by row, until a chain or a tree is done.

    cache rows   [0, num_rows)    of committed text
    a proposal   first the committed rows that are missing, the last of which says what comes next; then the draft
                 tokens, each for the one behind it, but for the last of a chain and the leaves of a tree

What a row is made of is the network's affair: `Feeder` computes rows, this says which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from outpace.drafters.fed_rows import FedRows
from outpace.drafters.growth import Growth, extend
from outpace.drafters.tree_growth import TreeGrowth
from outpace.types import Ask, Segment

__all__ = ["Fed", "Feeder", "Growing", "OwnRows", "Rows", "Tree", "begin", "committed_rows", "draft_rows", "grow_all"]

_BREADTH = 3
"""Most nodes of a tree computed in one pass: so many rows cost the native kernels little more than one."""
_ROWS_A_NODE = 2
"""Rows a tree may compute for every node that is kept in the end."""


@dataclass(slots=True)
class OwnRows:
    """What has been computed for one request.

    Args:
        lane: in the network's cache.
        num_rows: rows [0, num_rows) hold committed tokens.
        fed: rows behind them, of draft tokens of the last proposal.
    """

    lane: int
    num_rows: int = 0
    fed: FedRows = field(default_factory=FedRows)

    @property
    def end(self) -> int:
        """Position behind the last committed row."""
        return self.num_rows

    def book(self, count: int) -> Sequence[int]:
        """Counts the next rows of committed text as computed. Returns their positions."""
        self.num_rows += count
        return range(self.num_rows - count, self.num_rows)


@dataclass(slots=True, kw_only=True)
class Chain(Growth):
    """One draft while it grows, to at most `limit` tokens. `rows` are the committed tokens to feed first."""

    state: OwnRows
    limit: int
    rows: Sequence[int]

    def draft_tokens(self) -> list[tuple[int, int]]:
        """(token, row before it) of the draft tokens to feed next; none when it is done."""
        fed = len(self.state.fed)
        return [(self.ids[-1], fed - 1)] if fed < len(self.ids) < self.limit and self.is_worth_more else []


@dataclass(slots=True, kw_only=True)
class Tree(TreeGrowth):
    """The same for a draft with branches; `asked` are the nodes of the rows that were fed last."""

    state: OwnRows
    rows: Sequence[int]
    max_fed: int
    row_of: dict[int, int] = field(default_factory=lambda: {-1: -1})
    asked: list[int] = field(default_factory=lambda: [-1])

    def take(self, logits: torch.Tensor) -> None:
        """[len(asked), V] logits behind the nodes that were fed."""
        for node, row in zip(self.asked, logits, strict=True):
            self.expand(node, row)

    def draft_tokens(self) -> list[tuple[int, int]]:
        """See `Chain.draft_tokens`."""
        fed = len(self.state.fed)
        self.asked = self.to_expand(min(_BREADTH, self.max_fed - fed))
        self.row_of.update((node, fed + place) for place, node in enumerate(self.asked))
        return [(self.ids[node], self.row_of[self.parents[node]]) for node in self.asked]


Growing = Chain | Tree
"""A draft under way."""
Fed = tuple[Growing, list[tuple[int, int]]]
"""A draft, and (token, row before it) of the draft tokens that are fed."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows to compute, flat.

    Args:
        ids: [R] int64 tokens.
        positions: [R] int64.
        segments: where they belong, covering [0, R).
    """

    ids: torch.Tensor
    positions: torch.Tensor
    segments: tuple[Segment, ...]


class Feeder(Protocol):
    """Computes rows of its network. Rows are booked by `committed_rows` and `draft_rows`, which it calls."""

    def feed_committed(self, growths: Sequence[Growing], *, wanted: bool) -> torch.Tensor:
        """Computes the `rows` of each draft. Returns the logits [len(growths), V] of the last of each, if wanted."""
        ...

    def feed_drafts(self, fed: Sequence[Fed]) -> torch.Tensor:
        """Computes draft tokens. Returns their logits [R, V]."""
        ...


def begin(
    ask: Ask, state: OwnRows, rows: Sequence[int], reserve: Callable[[int, int], bool], max_rows: int, width: int
) -> Growing | None:
    """Reserves the rows of a draft; None if there is no room.

    Args:
        ask: what is wanted.
        state: of the request; draft tokens of the last proposal are forgotten.
        rows: committed tokens to feed first, at least one.
        reserve: (lane, rows) -> whether there is room for so many; as `Cache.reserve`.
        max_rows: rows of a lane that it can compute.
        width: most children of a node, as far as the ask allows them; drafts for rejection sampling are chains all the
            same.
    """
    size = state.num_rows + len(rows)
    limit = min(ask.num_draft_tokens, max_rows - size + 1)
    if limit < 1:
        return None
    state.fed.clear()
    width = width if ask.width is None else min(width, ask.width)
    if width > 1 and ask.coupled:
        most = min(_ROWS_A_NODE * (limit - 1), max_rows - size)
        if reserve(state.lane, size + most):
            return Tree(ask=ask, limit=limit, width=width, state=state, rows=rows, max_fed=most)
    if not reserve(state.lane, size + limit - 1):
        return None
    return Chain(ask=ask, state=state, limit=limit, rows=rows)


def grow_all(growths: Sequence[Growing], row_budget: int, feeder: Feeder) -> None:
    """Grows drafts to their ends, one pass of the network for all at a time.

    Args:
        growths: as from `begin`. Those that are too far behind only get some of what they are missing.
        row_budget: committed rows that may be computed beside the last of each.
        feeder: the network.
    """
    ready, behind = _within_budget(growths, row_budget)
    if behind:
        feeder.feed_committed(behind, wanted=False)
    logits = feeder.feed_committed(ready, wanted=True)
    while ready:
        _grow(ready, logits)
        fed = [(growth, tokens) for growth in ready if (tokens := growth.draft_tokens())]
        ready, logits = [growth for growth, _ in fed], feeder.feed_drafts(fed)


def committed_rows(growths: Sequence[Growing]) -> Rows:
    """The committed rows of each draft, which count as computed from here on."""
    ids: list[int] = []
    positions: list[int] = []
    segments: list[Segment] = []
    for growth in growths:
        state, start = growth.state, len(ids)
        ids += growth.rows
        segments.append(Segment(state.lane, start, len(ids), state.num_rows))
        positions += state.book(len(growth.rows))
    return _rows(ids, positions, segments)


def draft_rows(fed: Sequence[Fed]) -> Rows:
    """The rows of draft tokens, which count as fed from here on."""
    ids: list[int] = []
    positions: list[int] = []
    segments: list[Segment] = []
    for growth, tokens in fed:
        state, start = growth.state, len(ids)
        fork, first = state.num_rows, len(state.fed)
        rows = [state.fed.add(token, before) for token, before in tokens]
        paths = [tuple(fork + row for row in state.fed.path(row)) for row in rows]
        ids += [token for token, _ in tokens]
        positions += [state.end + len(path) - 1 for path in paths]
        straight = int(len(paths[0]) == first + 1)  # the first may follow all that was fed before, as in a chain
        own = tuple(paths[straight:])
        segments.append(Segment(state.lane, start, len(ids), fork + first, fork if own else 0, own))
    return _rows(ids, positions, segments)


def _rows(ids: list[int], positions: list[int], segments: list[Segment]) -> Rows:
    return Rows(
        torch.tensor(ids, dtype=torch.int64, device="cpu"),
        torch.tensor(positions, dtype=torch.int64, device="cpu"),
        tuple(segments),
    )


def _within_budget(growths: Sequence[Growing], row_budget: int) -> tuple[list[Growing], list[Growing]]:
    """Those that can draft now, and those that compute a part of what they are missing."""
    ready: list[Growing] = []
    behind: list[Growing] = []
    for growth in growths:
        missing = len(growth.rows) - 1
        if missing <= row_budget:
            row_budget -= missing
            ready.append(growth)
        elif row_budget:
            growth.rows = growth.rows[:row_budget]
            row_budget = 0
            behind.append(growth)
    return ready, behind


def _grow(growths: Sequence[Growing], logits: torch.Tensor) -> None:
    """Draws draft tokens behind the rows that were just computed, one of a chain and several of a tree."""
    chains: list[Chain] = []
    rows: list[int] = []
    start = 0
    for growth in growths:
        if isinstance(growth, Chain):
            chains.append(growth)
            rows.append(start)
            start += 1
        else:
            growth.take(logits[start : start + len(growth.asked)])
            start += len(growth.asked)
    if chains:
        extend(chains, logits if len(rows) == len(logits) else logits[rows])
