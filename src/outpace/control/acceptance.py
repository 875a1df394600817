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
from collections.abc import Mapping, Sequence

from outpace.control.odds import LEAST, MOST, odds_ratio, times_odds
from outpace.control.ranks import RankAcceptance

__all__ = ["BUCKET_EDGES", "MAX_POSITIONS", "Correction", "DrafterAcceptance"]

BUCKET_EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.96)
"""Confidences between two of these are alike."""

MAX_POSITIONS = 8
"""Positions in a draft that are told apart; the ones behind are like the last."""

_GUESS_WEIGHT = 3.0  # tokens that a first guess counts as
_MEMORY = 80.0  # drafts after which counts have faded to a third, whether or not they were added to
_FADE = [math.exp(-age / _MEMORY) for age in range(1000)]
_KEEP_OWN = 1.0 - 1.0 / 32.0
_OWN_WEIGHT = 2.0  # tokens of each kind that a request's start counts as
_ALONE_WEIGHT = 1.0  # as many more, as far as nothing is known but this request
_FIRST_TOKENS = 6  # of a request, from which others learn how to start
_KEEP_FIRST = 1.0 - 1.0 / 40.0
_FIRST_WEIGHT = 3.0
_RECALLED_TOKENS = 6.0  # as many as a node counts at most when it was learnt another day
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
        if now == self.at:
            self.kept += kept
            self.seen += seen
        else:
            fade = self._fade(now)
            self.kept, self.seen, self.at = self.kept * fade + kept, self.seen * fade + seen, now

    def now(self, now: int) -> tuple[float, float]:
        """(kept, seen) at this draft."""
        if now == self.at:
            return self.kept, self.seen
        fade = self._fade(now)
        return self.kept * fade, self.seen * fade

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

    def add(self, expected: float, kept: float, seen: int, alone: float) -> None:
        """The outcomes of a draft's tokens are known.

        Args:
            expected: sum of their chances without this correction.
            kept: of them.
            seen: number of them.
            alone: share of all that is known of the drafter that comes from this request, 0 to 1: then it is in what
                is expected already.
        """
        fade = _KEEP_OWN**seen
        self.expected = self.expected * fade + expected
        self.seen = self.seen * fade + seen
        self.kept = self.kept * fade + kept
        self.num_tokens += seen
        weight = _OWN_WEIGHT + _ALONE_WEIGHT * alone
        self.factor = odds_ratio(self.expected, self.kept, self.seen, weight, self.start)


Outcome = tuple[int, int, "Sequence[float] | None", Correction, Sequence[int]]
"""Of a draft: its tokens, how many were kept, its confidences, the request's correction, and of a draft with branches,
whose first candidates these are, the positions where another one was right."""


class DrafterAcceptance:
    """What is known of one drafter.

    Args:
        first_guess: chance of a token, before any was seen.
    """

    def __init__(self, first_guess: float = 0.6) -> None:
        self.first_guess = first_guess
        self.ranks = RankAcceptance()
        self.root = Node()
        self.buckets = [Node() for _ in range(_AVERAGE + 1)]
        self.leaves = [Node() for _ in range((_AVERAGE + 1) * MAX_POSITIONS)]
        self._memo: dict[int, float] = {}
        self._best: float | None = None
        self.first = [0.0, 0.0, 0.0]
        """Expected, kept and seen among the first tokens of requests."""
        self.num_drafts = 0

    def correction(self) -> Correction:
        """For a request that is new to this drafter."""
        expected, kept, seen = self.first
        return Correction(odds_ratio(expected, kept, seen, _FIRST_WEIGHT))

    def chance(self, position: int, confidence: float | None, own: Correction) -> float:
        """That the token at `position` (from 0) is kept if those before it are."""
        place = min(position, MAX_POSITIONS - 1)
        bucket = _NO_BUCKET if confidence is None else bisect_right(BUCKET_EDGES, confidence)
        return times_odds(self._shared(bucket * MAX_POSITIONS + place), own.factor)

    def survival(self, count: int, confidence: Sequence[float] | None, own: Correction) -> list[float]:
        """[count] chances that the token at each position and all before it are kept, from their confidences."""
        return self._survival(_keys(count, confidence), own.factor)

    def average_survival(self, count: int, own: Correction) -> list[float]:
        """[count] the same before drafting, when no confidence is known."""
        return self._survival(_positions(_AVERAGE, count), own.factor)

    def _survival(self, keys: Sequence[int], factor: float) -> list[float]:
        alive, chances = 1.0, []
        memo = self._memo
        for key in keys:
            chance = memo.get(key)
            scaled = factor * (self._shared(key) if chance is None else chance)
            corrected = scaled / (scaled + 1.0 - memo[key])
            alive *= LEAST if corrected < LEAST else MOST if corrected > MOST else corrected
            chances.append(alive)
        return chances

    def average_chance(self, position: int, own: Correction) -> float:
        """Of the token at a position, if those before it are kept, when nothing is said of it."""
        return times_odds(self._shared(_AVERAGE * MAX_POSITIONS + position), own.factor)

    def hopeful_chance(self, own: Correction) -> float:
        """Of the first token, one standard deviation above what is known of this request."""
        chance = times_odds(self._shared(_AVERAGE * MAX_POSITIONS), own.factor)
        seen = own.seen + _GUESS_WEIGHT
        return times_odds(chance, math.exp(1.0 / math.sqrt(seen * chance * (1.0 - chance))))

    def best_chance(self, own: Correction) -> float:
        """Of a token of the most confident draft that can be hoped for."""
        if self._best is None:
            seen = [bucket for bucket, node in enumerate(self.buckets) if node.seen >= 1.0]
            self._best = max((self._shared(bucket * MAX_POSITIONS) for bucket in seen), default=self.first_guess)
        return times_odds(self._best, own.factor)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """The drafts of a step were verified."""
        self.num_drafts += len(outcomes)
        known: list[tuple[list[int], int, Correction]] = []
        counts: dict[int, list[float]] = {}
        for count, accepted, confidence, own, missed in outcomes:
            keys = _keys(min(accepted + 1, count), confidence)
            for position, key in enumerate(keys):
                entry = counts.get(key)
                if entry is None:
                    entry = counts[key] = [0.0, 0.0]
                entry[0] += position < accepted and position not in missed
                entry[1] += 1.0
            known.append((keys, min(accepted, count) - len(missed), own))
        self._learn(counts)
        # Expected by what is known now: what surprises about a new drafter is not put down to its first requests.
        for keys, accepted, own in known:
            expected = sum([self._shared(key) for key in keys])
            if own.num_tokens < _FIRST_TOKENS:
                for index, value in enumerate((expected, accepted, len(keys))):
                    self.first[index] = self.first[index] * _KEEP_FIRST + value
            own.add(expected, accepted, len(keys), min(1.0, own.seen / self.root.seen))

    def _learn(self, counts: Mapping[int, Sequence[float]]) -> None:
        """Adds what came at each place, (kept, seen)."""
        now, leaves = self.num_drafts, self.leaves
        all_kept = all_seen = 0.0
        for key, (kept, seen) in counts.items():
            leaves[key].add(kept, seen, now)
            leaves[_AVERAGE * MAX_POSITIONS + key % MAX_POSITIONS].add(kept, seen, now)
            self.buckets[key // MAX_POSITIONS].add(kept, seen, now)
            all_kept += kept
            all_seen += seen
        self.root.add(all_kept, all_seen, now)
        self.buckets[_AVERAGE].add(all_kept, all_seen, now)
        self._forget_memo()

    def _forget_memo(self) -> None:
        self._memo.clear()
        self._best = None

    def suppose(self, begin: int, confidence: Sequence[float], own: Correction) -> None:
        """Tokens from `begin` on were drafted and not verified: the average over all drafts takes their chances.

        Else it would be one of confident tokens only, and too many would be asked for.
        """
        keys = _keys(len(confidence), confidence)
        reached = 1.0
        supposed = []
        for position, key in enumerate(keys):
            shared = self._shared(key)
            if position >= begin:
                supposed.append((key % MAX_POSITIONS, reached * shared, reached))
            reached *= times_odds(shared, own.factor)
        for place, kept, seen in supposed:
            self.leaves[_AVERAGE * MAX_POSITIONS + place].add(kept, seen, self.num_drafts)
            self.buckets[_AVERAGE].add(kept, seen, self.num_drafts)
        self._forget_memo()

    def state(self) -> list[tuple[float, float]]:
        """(kept, seen) of every node, for `recall`."""
        return [node.now(self.num_drafts) for node in self._nodes()]

    def recall(self, state: Sequence[tuple[float, float]]) -> None:
        """Starts from what was learnt before, as if few tokens had been seen, so that it is soon unlearnt if wrong.

        Raises:
            ValueError: not as many nodes as there are, or numbers that no counts can have.
        """
        nodes = self._nodes()
        if len(state) != len(nodes) or not all(0.0 <= kept <= seen < math.inf for kept, seen in state):
            raise ValueError(f"{len(state)} counts of tokens: give {len(nodes)} pairs with 0 <= kept <= seen")
        for node, (kept, seen) in zip(nodes, state, strict=True):
            share = min(1.0, _RECALLED_TOKENS / seen) if seen else 0.0
            node.kept, node.seen, node.at = kept * share, seen * share, self.num_drafts
        self._forget_memo()

    def _nodes(self) -> list[Node]:
        return [self.root, *self.buckets, *self.leaves]

    def _shared(self, key: int) -> float:
        """Before any request's own correction.

        Each level is the first guess of the one below it without what the two have in common, so that nothing counts
        twice.
        """
        found = self._memo.get(key)
        if found is not None:
            return found
        now = self.num_drafts
        bucket = key // MAX_POSITIONS
        leaf_kept, leaf_seen = self.leaves[key].now(now)
        kept, seen = self.buckets[bucket].now(now)
        chance = self.first_guess
        if bucket != _AVERAGE:  # that one is its own root
            root_kept, root_seen = self.root.now(now)
            chance = _mean(root_kept - kept, root_seen - seen, chance)
        chance = _mean(kept - leaf_kept, seen - leaf_seen, chance)
        chance = self._memo[key] = _mean(leaf_kept, leaf_seen, chance)
        return chance


def _mean(kept: float, seen: float, guess: float) -> float:
    return (kept + _GUESS_WEIGHT * guess) / (seen + _GUESS_WEIGHT)


def _keys(count: int, confidence: Sequence[float] | None) -> list[int]:
    """Places of the first tokens of a draft: confidences, then positions."""
    if confidence is None:
        return _positions(_NO_BUCKET, count)
    last = MAX_POSITIONS - 1
    return [
        bisect_right(BUCKET_EDGES, sure) * MAX_POSITIONS + (position if position < last else last)
        for position, sure in enumerate(confidence[:count])
    ]


def _positions(bucket: int, count: int) -> list[int]:
    begin = bucket * MAX_POSITIONS
    if count <= MAX_POSITIONS:
        return list(range(begin, begin + count))
    return [begin + min(position, MAX_POSITIONS - 1) for position in range(count)]
