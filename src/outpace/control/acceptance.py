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

from outpace.control.counts import FadingCounts
from outpace.control.odds import LEAST, MOST, odds_ratio, times_odds
from outpace.control.ranks import RankAcceptance

__all__ = ["BUCKET_EDGES", "FIRST_GUESS", "MAX_POSITIONS", "Correction", "DrafterAcceptance"]

BUCKET_EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.96)
"""Confidences between two of these are alike."""

MAX_POSITIONS = 8
"""Positions in a draft that are told apart; the ones behind are like the last."""

FIRST_GUESS = 0.6
"""Chance of a token of which nothing is known."""

_GUESS_WEIGHT = 3.0  # tokens that a first guess counts as
_MEMORY = 80.0  # drafts after which counts have faded to a third, whether or not they were added to
_KEEP_OWN = 1.0 - 1.0 / 32.0
_OWN_WEIGHT = 2.0  # tokens of each kind that a request's start counts as
_ALONE_WEIGHT = 1.0  # as many more, as far as nothing is known but this request
_FIRST_TOKENS = 6  # of a request, from which others learn how to start
_KEEP_FIRST = 1.0 - 1.0 / 40.0
_FIRST_WEIGHT = 3.0
_RECALLED_TOKENS = 40.0  # as many as all counts together count at most when they were learnt another day
_LOST = 0.005  # a draft is not looked at behind a token that is kept with less than this chance
_YOUNG = 64  # drafts, up to which everything changes with every one
_STALE, _STALE_STEPS = 4, 2  # drafts, and steps with drafts, after which chances are worked out anew
_NO_BUCKET = len(BUCKET_EDGES) + 1  # for tokens without confidence
_AVERAGE = _NO_BUCKET + 1  # over all confidences
_NUM_BUCKETS = _AVERAGE + 1
_ROOT, _BUCKETS, _LEAVES = 0, 1, 1 + _NUM_BUCKETS  # places of the counts


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

    def __init__(self, first_guess: float = FIRST_GUESS) -> None:
        self.first_guess = first_guess
        self.ranks = RankAcceptance()
        # The root, the buckets of confidence, and the leaves: positions within them.
        self._counts = FadingCounts(_LEAVES + _NUM_BUCKETS * MAX_POSITIONS, _MEMORY)
        self._met = [False] * _NUM_BUCKETS
        self._memo: dict[int, float] = {}
        self._best: float | None = None
        self.first = [0.0, 0.0, 0.0]
        """Expected, kept and seen among the first tokens of requests."""
        self.num_drafts = 0
        self._fresh = self._steps_behind = 0

    def correction(self) -> Correction:
        """For a request that is new to this drafter."""
        expected, kept, seen = self.first
        return Correction(odds_ratio(expected, kept, seen, _FIRST_WEIGHT))

    def chance(self, position: int, confidence: float | None, own: Correction) -> float:
        """That the token at `position` (from 0) is kept if those before it are."""
        bucket = _NO_BUCKET if confidence is None else bisect_right(BUCKET_EDGES, confidence)
        key = bucket * MAX_POSITIONS + (position if position < MAX_POSITIONS else MAX_POSITIONS - 1)
        return times_odds(self._memo.get(key) or self._shared(key), own.factor)

    def survival(self, count: int, confidence: Sequence[float] | None, own: Correction) -> list[float]:
        """Chances that the token at each position and all before it are kept, from their confidences.

        At most `count` of them: what follows one that is as good as lost is left out.
        """
        return self._survival(_keys(count, confidence), own.factor, _LOST)

    def average_survival(self, count: int, own: Correction) -> list[float]:
        """[count] the same before drafting, when no confidence is known."""
        return self._survival(_positions(_AVERAGE, count), own.factor)

    def _survival(self, keys: Sequence[int], factor: float, least: float = 0.0) -> list[float]:
        alive, chances = 1.0, []
        memo = self._memo
        for key in keys:
            chance = memo.get(key) or self._shared(key)
            scaled = factor * chance
            corrected = scaled / (scaled + 1.0 - chance)
            alive *= LEAST if corrected < LEAST else MOST if corrected > MOST else corrected
            chances.append(alive)
            if alive < least:
                break
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
            met = [bucket for bucket, is_met in enumerate(self._met) if is_met]
            self._best = max((self._shared(bucket * MAX_POSITIONS) for bucket in met), default=self.first_guess)
        return times_odds(self._best, own.factor)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """The drafts of a step were verified."""
        self.num_drafts += len(outcomes)
        self._counts.fade(len(outcomes))
        self.ranks.fade()
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
        root_seen = self._counts.now(_ROOT)[1]
        for keys, accepted, own in known:
            expected = sum([self._shared(key) for key in keys])
            if own.num_tokens < _FIRST_TOKENS:
                for index, value in enumerate((expected, accepted, len(keys))):
                    self.first[index] = self.first[index] * _KEEP_FIRST + value
            own.add(expected, accepted, len(keys), min(1.0, own.seen / root_seen))

    def _learn(self, counts: Mapping[int, Sequence[float]]) -> None:
        """Adds what came at each place, (kept, seen)."""
        add = self._counts.add
        all_kept = all_seen = 0.0
        for key, (kept, seen) in counts.items():
            add(_LEAVES + key, kept, seen)
            add(_LEAVES + _AVERAGE * MAX_POSITIONS + key % MAX_POSITIONS, kept, seen)
            self._add_to_bucket(key // MAX_POSITIONS, kept, seen)
            all_kept += kept
            all_seen += seen
        add(_ROOT, all_kept, all_seen)
        self._add_to_bucket(_AVERAGE, all_kept, all_seen)
        self._steps_behind += 1
        stale = self.num_drafts - self._fresh >= _STALE and self._steps_behind >= _STALE_STEPS
        if stale or self.num_drafts <= _YOUNG:
            self._forget_memo()

    def _add_to_bucket(self, bucket: int, kept: float, seen: float) -> None:
        self._counts.add(_BUCKETS + bucket, kept, seen)
        self._met[bucket] = self._met[bucket] or self._counts.now(_BUCKETS + bucket)[1] >= 1.0

    def _forget_memo(self) -> None:
        self._memo.clear()
        self._best = None
        self._fresh, self._steps_behind = self.num_drafts, 0

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
            self._counts.add(_LEAVES + _AVERAGE * MAX_POSITIONS + place, kept, seen)
            self._add_to_bucket(_AVERAGE, kept, seen)

    def state(self) -> list[tuple[float, float]]:
        """(kept, seen) of every count, for `recall`."""
        return [self._counts.now(index) for index in range(len(self._counts.kept))]

    def recall(self, state: Sequence[tuple[float, float]]) -> None:
        """Starts from what was learnt before, as if few tokens had been seen, so that it is soon unlearnt if wrong.

        Raises:
            ValueError: not as many counts as there are, or numbers that no counts can have.
        """
        counts = FadingCounts(len(self._counts.kept), _MEMORY)
        if len(state) != len(counts.kept) or not all(0.0 <= kept <= seen < math.inf for kept, seen in state):
            raise ValueError(f"{len(state)} counts of tokens: give {len(counts.kept)} pairs with 0 <= kept <= seen")
        # One share for all, since each level is looked at without what it has in common with the one below.
        share, average = (
            min(1.0, _RECALLED_TOKENS / max(1.0, state[root][1])) for root in (_ROOT, _BUCKETS + _AVERAGE)
        )
        own = {
            _BUCKETS + _AVERAGE,
            *range(_LEAVES + _AVERAGE * MAX_POSITIONS, _LEAVES + (_AVERAGE + 1) * MAX_POSITIONS),
        }
        for index, (kept, seen) in enumerate(state):
            used = average if index in own else share
            counts.add(index, kept * used, seen * used)
        self._counts = counts
        self._met = [seen >= 1.0 for seen in counts.seen[_BUCKETS:_LEAVES]]
        self._forget_memo()

    def _shared(self, key: int) -> float:
        """Before any request's own correction.

        Each level is the first guess of the one below it without what the two have in common, so that nothing counts
        twice.
        """
        found = self._memo.get(key)
        if found is not None:
            return found
        all_kept, all_seen, guess_weight = self._counts.kept, self._counts.seen, _GUESS_WEIGHT * self._counts.one
        bucket = key // MAX_POSITIONS
        leaf_kept, leaf_seen = all_kept[_LEAVES + key], all_seen[_LEAVES + key]
        kept, seen = all_kept[_BUCKETS + bucket], all_seen[_BUCKETS + bucket]
        chance = self.first_guess
        if bucket != _AVERAGE:  # that one is its own root
            chance = (all_kept[_ROOT] - kept + guess_weight * chance) / (all_seen[_ROOT] - seen + guess_weight)
        chance = (kept - leaf_kept + guess_weight * chance) / (seen - leaf_seen + guess_weight)
        chance = self._memo[key] = (leaf_kept + guess_weight * chance) / (leaf_seen + guess_weight)
        return chance


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
