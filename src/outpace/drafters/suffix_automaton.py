"""Every repeated piece of a growing text, and what followed it how often: a suffix automaton that counts.

Blumer et al. (1985), "The smallest automaton recognizing the subwords of a text"; used for drafts by Hu et al.
"SAM-Decoding" 2411.10666. A state stands for all pieces of the text that end at the same places.

    link[s]             the state of the longest suffix of its pieces that ends at more places
    link[newest]        so this is the longest end of the text that has occurred before: the match, exact at any length
    count[s]            places where its pieces end
    best[s]             the state one token on that has the most of them, the newest of several: what follows

A prefix of the text that did not occur again is a state with one transition, to the next prefix. That one is implied by
the text, so only states of repeated pieces hold a dictionary.

Appending a token costs O(1) amortised. Counts go up along the links of the newest state, which in text that repeats
itself closely (a thousand equal tokens) are as many as there are tokens: MAX_HOPS of them, the longest pieces first,
are followed, so counts of short pieces are too low in such text and exact in any other.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["MAX_HOPS", "ROOT", "Follower", "SuffixAutomaton"]

MAX_HOPS = 16
"""Links followed to count one token."""

ROOT = 0
"""The state of the empty piece."""

_NONE = -1
# Measured with tracemalloc over texts of many kinds, spare capacity and integers in dictionaries included.
_TOKEN_BYTES = 9
_STATE_BYTES = 36
_DICTIONARY_BYTES = 120
_EDGE_BYTES = 66


class Follower(NamedTuple):
    """The most frequent token after a piece.

    Args:
        token: its id.
        state: of the piece with this token at its end.
        agreeing: how often this token followed.
        total: how often any token followed.
        position: index of the token in the text where this happened last.
    """

    token: int
    state: int
    agreeing: int
    total: int
    position: int


class SuffixAutomaton:
    """Grows with a text; the text itself is kept too (4 bytes a token).

    Args:
        max_hops: links followed to count one token, at least 1.
    """

    def __init__(self, max_hops: int = MAX_HOPS) -> None:
        assert max_hops >= 1, max_hops
        self.tokens = array("i")
        self._max_hops = max_hops
        self._newest = ROOT
        self._prefix_states = array("i", [ROOT])  # of the first i tokens
        # By state. `first_end` and `last_end` are numbers of tokens up to the end of an occurrence.
        self._length = array("i", [0])  # of its longest piece
        self._link = array("i", [_NONE])
        self._first_end = array("i", [0])
        self._last_end = array("i", [0])
        self._count = array("i", [1])
        self._best = array("i", [_NONE])
        self._next: list[dict[int, int] | None] = [{}]
        self._num_dictionaries = 1
        self._num_edges = 0

    def __len__(self) -> int:
        """Tokens in the text."""
        return len(self.tokens)

    @property
    def memory_bytes(self) -> int:
        """From the numbers of tokens, states, dictionaries and transitions, each with a measured size."""
        return (
            len(self.tokens) * _TOKEN_BYTES
            + len(self._length) * _STATE_BYTES
            + self._num_dictionaries * _DICTIONARY_BYTES
            + self._num_edges * _EDGE_BYTES
        )

    def extend(self, tokens: Iterable[int]) -> None:
        """Appends tokens, O(1) amortised each. Ids fit into 32 bits; negative ones are as good as any."""
        for token in tokens:
            self._append(token)

    @property
    def match(self) -> int:
        """State of the longest end of the text that occurred before (and may overlap); ROOT if there is none."""
        return max(self._link[self._newest], ROOT)

    def length(self, state: int) -> int:
        """Tokens in the state's longest piece."""
        return self._length[state]

    def link(self, state: int) -> int:
        """The state of the longest suffix that ends elsewhere too. Not for ROOT."""
        return self._link[state]

    def count(self, state: int) -> int:
        """Places where the state's pieces end."""
        return self._count[state]

    def step(self, state: int, token: int) -> int | None:
        """The state of the piece with a token appended, or None if the text has no such piece."""
        following = self._next[state]
        if following is not None:
            return following.get(token)
        end = self._first_end[state]
        return self._prefix_states[end + 1] if end < len(self.tokens) and self.tokens[end] == token else None

    def follower(self, state: int) -> Follower | None:
        """What follows the state's pieces most often, of equals the newest. None for the whole text, and for ROOT."""
        best = self._best[state]
        if best == _NONE:
            end = self._first_end[state]
            if end == len(self.tokens):
                return None
            best = self._prefix_states[end + 1]
        if state == ROOT:
            return None
        agreeing = self._count[best]
        # Where a piece ends the text nothing follows it yet.
        total = self._count[state] - (self._last_end[state] == len(self.tokens))
        position = self._last_end[best] - 1
        return Follower(self.tokens[position], best, agreeing, max(agreeing, total), position)

    def followers(self, state: int, most: int) -> list[Follower]:
        """The `most` tokens that follow the state's pieces most often, of equals the newest first; see `follower`."""
        first, known = self.follower(state), self._next[state]
        if first is None:
            return []
        if most == 1 or known is None or len(known) == 1:
            return [first]

        def rank(edge: tuple[int, int]) -> tuple[bool, int, int]:
            return edge[1] == first.state, self._count[edge[1]], self._last_end[edge[1]]

        return [
            Follower(token, target, self._count[target], first.total, self._last_end[target] - 1)
            for token, target in heapq.nlargest(most, known.items(), key=rank)
        ]

    def _append(self, token: int) -> None:
        last = self._newest
        self.tokens.append(token)
        end = len(self.tokens)
        newest = self._newest = self._new_state(end, end)
        self._prefix_states.append(newest)
        following, links = self._next, self._link
        if last == ROOT:
            self._next[ROOT] = {token: newest}
        # The ends of the old text, from the longest: those that this token never followed get it as a transition.
        state = links[last]
        while state != _NONE:
            known = following[state]
            if known is not None:
                target = known.get(token)
                if target is not None:
                    break
                known[token] = newest
            else:
                target = self.step(state, token)
                if target is not None:
                    break
                self._write_out(state)[token] = newest
            self._num_edges += 1
            state = links[state]
        if state == _NONE:
            links[newest] = ROOT
        else:
            assert target is not None
            exact = self._length[target] == self._length[state] + 1
            links[newest] = target if exact else self._split(state, target, token)
        self._count_along(links[last], token, newest, end)

    def _new_state(self, length: int, end: int) -> int:
        """A state without link and transitions, whose pieces end at `end` only."""
        self._length.append(length)
        self._link.append(ROOT)
        self._first_end.append(end)
        self._last_end.append(end)
        self._count.append(1)
        self._best.append(_NONE)
        self._next.append(None)
        return len(self._next) - 1

    def _write_out(self, state: int) -> dict[int, int]:
        """Gives a state a dictionary that holds its implied transition."""
        end = self._first_end[state]
        target = self._prefix_states[end + 1]
        known = self._next[state] = {self.tokens[end]: target}
        self._best[state] = target
        self._num_dictionaries += 1
        self._num_edges += 1
        return known

    def _split(self, state: int, target: int, token: int) -> int:
        """Gives the pieces of `target` that are ends of the text a state of their own, and returns it.

        Args:
            state: of the longest end of the old text that this token followed before.
            target: where that led to; its longer pieces do not end here.
            token: appended now.
        """
        links = self._link
        short = self._new_state(self._length[state] + 1, self._first_end[target])
        self._last_end[short] = self._last_end[target]
        self._count[short] = self._count[target]
        links[short] = links[target]
        links[target] = short
        known = self._next[target]
        if known is None:
            self._write_out(short)
        else:
            self._next[short] = known.copy()
            self._best[short] = self._best[target]
            self._num_dictionaries += 1
            self._num_edges += len(known)
        while state != _NONE:
            # Without a dictionary the one transition leads to a whole prefix, which is the longest piece of its state.
            before = self._next[state]
            if before is None or before.get(token) != target:
                break
            before[token] = short
            if self._best[state] == target:
                self._best[state] = short
            state = links[state]
        return short

    def _count_along(self, state: int, token: int, newest: int, end: int) -> None:
        """Counts the token behind every end of the old text, from the longest (`state`), and so every end of the new.

        Several ends of the old text may lead to the same state; it is counted once.
        """
        links, following, counts, best = self._link, self._next, self._count, self._best
        counted = newest
        for _ in range(self._max_hops):
            if state == _NONE:
                break
            known = following[state]
            target = self._prefix_states[self._first_end[state] + 1] if known is None else known[token]
            if target != counted:
                counts[target] += 1
                self._last_end[target] = end
                counted = target
            if known is not None and (best[state] == _NONE or counts[target] >= counts[best[state]]):
                best[state] = target
            state = links[state]
