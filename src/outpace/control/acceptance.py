"""The chance that a draft token is kept if those before it are.

Shared counts say what a drafter is worth: drafter -> confidence -> position, each a Beta whose prior is the one above,
with forgetting. A request's own correction multiplies the odds: from the acceptances that were expected for it and
those that came, so that text that cannot be guessed is found out in a few steps. What a request starts with is learnt
from the first drafts of the requests before it. Only tokens whose outcome is known count: the accepted ones and the
first rejected one.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

__all__ = ["BUCKET_EDGES", "MAX_POSITIONS", "Correction", "DrafterAcceptance"]

BUCKET_EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.96)
"""Confidences between two of these are alike."""

MAX_POSITIONS = 8
"""Positions in a draft that are told apart; the ones behind are like the last."""

_PRIOR_WEIGHT = 4.0  # tokens that the first guess counts as
_PARENT_WEIGHT = 8.0  # tokens that the node above counts as
_MEMORY = 80.0  # drafts after which counts have faded to a third, whether or not they were added to
_FADE = [math.exp(-age / _MEMORY) for age in range(1000)]
_KEEP_OWN = 1.0 - 1.0 / 32.0
_OWN_WEIGHT = 2.5  # tokens of each kind that a request's start counts as
_FIRST_TOKENS = 6  # of a request, from which others learn how to start
_KEEP_FIRST = 1.0 - 1.0 / 40.0
_FIRST_WEIGHT = 3.0
_LEAST, _MOST = 0.005, 0.995
_NO_BUCKET = len(BUCKET_EDGES) + 1  # for tokens without confidence
_AVERAGE = _NO_BUCKET + 1  # over all confidences


class Node:
    """Tokens kept and seen, both fading with every draft of their drafter, so that what is not seen is forgotten too.

    Args:
        kept: tokens.
        seen: tokens.
        at: drafts of the drafter when this was last brought up to date.
    """

    __slots__ = ("at", "kept", "seen")

    def __init__(self, kept: float = 0.0, seen: float = 0.0) -> None:
        self.kept, self.seen, self.at = kept, seen, 0

    def add(self, kept: float, seen: float, now: int) -> None:
        fade = self._fade(now)
        self.kept, self.seen, self.at = self.kept * fade + kept, self.seen * fade + seen, now

    def blend(self, parent: float, now: int) -> float:
        """The share kept, if `parent` is the first guess."""
        fade = self._fade(now) if now != self.at else 1.0
        return (self.kept * fade + _PARENT_WEIGHT * parent) / (self.seen * fade + _PARENT_WEIGHT)

    def _fade(self, now: int) -> float:
        age = now - self.at
        return _FADE[age] if age < len(_FADE) else 0.0


class Correction:
    """How one request differs from what its drafter is worth otherwise.

    Args:
        start: factor on the odds it begins with.
    """

    __slots__ = ("expected", "factor", "kept", "num_tokens", "seen", "start")

    def __init__(self, start: float) -> None:
        self.start = start
        self.expected = self.kept = self.seen = 0.0
        self.num_tokens = 0
        self.factor = start

    def add(self, expected: float, kept: float) -> None:
        """The outcome of a token is known; `expected` is its chance without this correction."""
        self.expected = self.expected * _KEEP_OWN + expected
        self.seen = self.seen * _KEEP_OWN + 1.0
        self.kept = self.kept * _KEEP_OWN + kept
        self.num_tokens += 1
        self.factor = _odds_ratio(self.expected, self.kept, self.seen, _OWN_WEIGHT, self.start)


class DrafterAcceptance:
    """What is known of one drafter.

    Args:
        first_guess: chance of a token, before any was seen.
    """

    def __init__(self, first_guess: float = 0.5) -> None:
        self.first_guess = first_guess
        self.root = Node()
        self.buckets = [Node() for _ in range(_AVERAGE + 1)]
        self.leaves = [[Node() for _ in range(MAX_POSITIONS)] for _ in range(_AVERAGE + 1)]
        self.first = [0.0, 0.0, 0.0]
        """Expected, kept and seen among the first tokens of requests."""
        self.num_drafts = 0

    def correction(self) -> Correction:
        """For a request that is new to this drafter."""
        expected, kept, seen = self.first
        return Correction(_odds_ratio(expected, kept, seen, _FIRST_WEIGHT))

    def chance(self, position: int, confidence: float | None, own: Correction) -> float:
        """That the token at `position` (from 0) is kept if those before it are."""
        return _times_odds(self._shared(_bucket(confidence), position), own.factor)

    def survival(self, count: int, confidence: Sequence[float] | None, own: Correction) -> list[float]:
        """[count] chances that the token at each position and all before it are kept, from their confidences."""
        if confidence is None:
            return self._survival([_NO_BUCKET] * count, own)
        return self._survival([bisect_right(BUCKET_EDGES, sure) for sure in confidence[:count]], own)

    def average_survival(self, count: int, own: Correction) -> list[float]:
        """[count] the same before drafting, when no confidence is known."""
        return self._survival([_AVERAGE] * count, own)

    def _survival(self, buckets: Sequence[int], own: Correction) -> list[float]:
        now, factor = self.num_drafts, own.factor
        root = self._root()
        alive, chances = 1.0, []
        for position, bucket in enumerate(buckets):
            node = self.buckets[bucket].blend(root, now)
            leaf = self.leaves[bucket][position if position < MAX_POSITIONS else MAX_POSITIONS - 1]
            alive *= _times_odds(leaf.blend(node, now), factor)
            chances.append(alive)
        return chances

    def best_chance(self, own: Correction) -> float:
        """Of a token of the most confident draft that can be hoped for."""
        root, now = self._root(), self.num_drafts
        seen = (node for node in self.buckets if node.seen >= 1.0)
        return _times_odds(max((node.blend(root, now) for node in seen), default=root), own.factor)

    def observe(self, count: int, accepted: int, confidence: Sequence[float] | None, own: Correction) -> None:
        """A draft of `count` tokens was verified and `accepted` of them were kept."""
        self.num_drafts += 1
        now = self.num_drafts
        for position in range(min(accepted + 1, count)):
            kept = float(position < accepted)
            bucket = _bucket(None if confidence is None else confidence[position])
            place = min(position, MAX_POSITIONS - 1)
            self.root.add(kept, 1.0, now)
            for which in (bucket, _AVERAGE):
                self.buckets[which].add(kept, 1.0, now)
                self.leaves[which][place].add(kept, 1.0, now)
            # Expected by what is known now: what surprises about a new drafter is not put down to its first request.
            expected = self._shared(bucket, position)
            if own.num_tokens < _FIRST_TOKENS:
                for index, value in enumerate((expected, kept, 1.0)):
                    self.first[index] = self.first[index] * _KEEP_FIRST + value
            own.add(expected, kept)

    def suppose(self, begin: int, confidence: Sequence[float], own: Correction) -> None:
        """Tokens from `begin` on were drafted and not verified: the average over all drafts takes their chances.

        Else it would be one of confident tokens only, and too many would be asked for.
        """
        survival = self.survival(len(confidence), confidence, own)
        for position in range(begin, len(confidence)):
            reached = survival[position - 1] if position else 1.0
            shared = self._shared(_bucket(confidence[position]), position)
            leaf = self.leaves[_AVERAGE][min(position, MAX_POSITIONS - 1)]
            leaf.add(reached * shared, reached, self.num_drafts)
            self.buckets[_AVERAGE].add(reached * shared, reached, self.num_drafts)

    def _root(self) -> float:
        root = self.root
        fade = _FADE[min(self.num_drafts - root.at, len(_FADE) - 1)]
        return (root.kept * fade + _PRIOR_WEIGHT * self.first_guess) / (root.seen * fade + _PRIOR_WEIGHT)

    def _shared(self, bucket: int, position: int) -> float:
        """Before any request's own correction."""
        leaf = self.leaves[bucket][position if position < MAX_POSITIONS else MAX_POSITIONS - 1]
        return leaf.blend(self.buckets[bucket].blend(self._root(), self.num_drafts), self.num_drafts)


def _bucket(confidence: float | None) -> int:
    return _NO_BUCKET if confidence is None else bisect_right(BUCKET_EDGES, confidence)


def _odds_ratio(expected: float, kept: float, seen: float, weight: float, start: float = 1.0) -> float:
    """Odds that came over odds that were expected, both with `weight` tokens of each kind more; `start` without any."""
    lean = math.sqrt(start)
    rejected, unexpected = seen - kept, seen - expected
    return (kept + weight * lean) * (unexpected + weight) / ((rejected + weight / lean) * (expected + weight))


def _times_odds(chance: float, factor: float) -> float:
    scaled = chance * factor
    corrected = scaled / (scaled + 1.0 - chance)
    return _LEAST if corrected < _LEAST else _MOST if corrected > _MOST else corrected
