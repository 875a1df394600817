"""The two rules of rejection sampling once more, as they would be explained: the chance of every verdict on a draft.

No noise and no arrays: numbers may be floats or fractions, and with fractions the laws come out exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import TypeAlias

from outpace.types import Draft, Verdict

__all__ = ["Law", "Outcomes", "block_outcomes", "standard_outcomes"]

Number: TypeAlias = Fraction | float
Law: TypeAlias = Sequence[Number]
Outcomes: TypeAlias = dict[Verdict, Number]


def standard_outcomes(draft: Draft, proposals: Sequence[Law] | None, laws: Sequence[Law]) -> Outcomes:
    """The chance of every verdict of the standard rule that can happen.

    Args:
        draft: chain or tree; its own probabilities are not looked at.
        proposals: [n, V] the law each token was drawn from, siblings without replacement; None for point masses.
        laws: [1 + n, V] the target's.
    """
    return _sum_up(_walk(draft, proposals, laws, -1, ()))


def _walk(
    draft: Draft, proposals: Sequence[Law] | None, laws: Sequence[Law], node: int, path: tuple[int, ...]
) -> Iterator[tuple[Verdict, Number]]:
    reached: Number = 1
    law = laws[1 + node]
    tried: list[int] = []
    for child in range(len(draft)):
        if draft.parents[child] != node:
            continue
        token = draft.ids[child]
        proposal = _proposal(draft, proposals, child, tried, len(law))
        accepted = min(1, law[token] / proposal[token])
        for verdict, chance in _walk(draft, proposals, laws, child, (*path, child)):
            yield verdict, reached * accepted * chance
        reached = reached * (1 - accepted)
        law = _normalised([max(p - q, 0) for p, q in zip(law, proposal, strict=True)]) or law
        tried.append(token)
    for token, chance in enumerate(law):
        yield Verdict(path, token), reached * chance


def block_outcomes(draft: Draft, proposals: Sequence[Law] | None, laws: Sequence[Law]) -> Outcomes:
    """The chance of every verdict of block verification that can happen; the draft is a chain."""
    return _sum_up(_block(draft, proposals, laws))


def _block(draft: Draft, proposals: Sequence[Law] | None, laws: Sequence[Law]) -> Iterator[tuple[Verdict, Number]]:
    k = len(draft)
    rows = [_proposal(draft, proposals, node, (), len(laws[0])) for node in range(k)]
    clipped: list[Number] = [1]
    for i, token in enumerate(draft.ids):
        clipped.append(min(1, clipped[i] * laws[i][token] / rows[i][token]))
    residuals = [[max(clipped[i] * p - q, 0) for p, q in zip(laws[i], row, strict=True)] for i, row in enumerate(rows)]
    reached: Number = 1
    for i in range(k, -1, -1):
        area = sum(residuals[i]) if i < k else 0
        below = area + 1 - clipped[i]
        qualifies = 1 if i == 0 or below == 0 else clipped[k] if i == k else area / below
        law = laws[k] if i == k else _normalised(residuals[i]) or laws[i]
        for token, chance in enumerate(law):
            yield Verdict(tuple(range(i)), token), reached * qualifies * chance
        reached = reached * (1 - qualifies)


def _proposal(draft: Draft, proposals: Sequence[Law] | None, node: int, tried: Sequence[int], size: int) -> Law:
    """A point mass is the law that has nothing but its token."""
    if proposals is None:
        return [int(token == draft.ids[node]) for token in range(size)]
    return _normalised([0 if token in tried else q for token, q in enumerate(proposals[node])])


def _normalised(weights: Law) -> list[Number]:
    """Empty if nothing is left."""
    total = sum(weights)
    return [weight / total for weight in weights] if total else []


def _sum_up(chances: Iterator[tuple[Verdict, Number]]) -> Outcomes:
    found: Outcomes = {}
    for verdict, chance in chances:
        found[verdict] = found.get(verdict, 0) + chance
    return {verdict: chance for verdict, chance in found.items() if chance}
