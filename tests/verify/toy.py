"""A target and a drafter that are tables of fractions, every draft they can make, and the law of the text of both."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from outpace.types import Draft, Verdict

History = tuple[int, ...]
Table = Callable[[History], list[Fraction]]
Step = Callable[[History], Mapping[History, Fraction | float]]
"""From a history, the chance of every piece of text that one step may add."""


def table(size: int, seed: int, weights: tuple[int, ...] = (1, 2, 3, 5, 9)) -> Table:
    """A law over `size` tokens for every history, random but always the same; a weight of 0 makes tokens impossible."""

    @cache
    def law(history: History) -> list[Fraction]:
        source = random.Random(f"{seed}:{history}")
        drawn = [source.choice(weights) for _ in range(size)]
        if not any(drawn):
            drawn[source.randrange(size)] = 1
        return [Fraction(weight, sum(drawn)) for weight in drawn]

    return law


def constant(*law: str) -> Table:
    """The same law whatever came before."""
    return lambda history: [Fraction(chance) for chance in law]


@dataclass(frozen=True)
class Case:
    """One draft, and the laws that go with it."""

    draft: Draft
    proposals: list[list[Fraction]] | None
    laws: list[list[Fraction]]

    @cached_property
    def given(self) -> tuple[Draft, NDArray[np.float64]]:
        """As a rule takes them."""
        rows = None if not self.proposals else torch.tensor(floats(self.proposals), dtype=torch.float64)
        draft = Draft(self.draft.ids, self.draft.parents, self.draft.sources, rows)
        return draft, np.array(floats(self.laws))


def floats(rows: list[list[Fraction]]) -> list[list[float]]:
    return [[float(chance) for chance in row] for row in rows]


def chain(length: int) -> tuple[int, ...]:
    return tuple(range(-1, length - 1))


def cases(history: History, parents: tuple[int, ...], target: Table, drafter: Table) -> Iterator[tuple[Case, Fraction]]:
    """Every draft of this shape with the chance that the drafter makes it, siblings drawn without replacement."""

    def grow(ids: History, histories: list[History], rows: list[list[Fraction]], chance: Fraction) -> Iterator:
        node = len(ids)
        if node == len(parents):
            draft = Draft(ids, parents, ("toy",) * node)
            yield Case(draft, rows, [target(past) for past in histories]), chance
            return
        past = histories[1 + parents[node]]
        row = drafter(past)
        tried = {ids[i] for i in range(node) if parents[i] == parents[node]}
        left = sum(q for token, q in enumerate(row) if token not in tried)
        for token, q in enumerate(row):
            if q and token not in tried:
                grown = [*histories, (*past, token)]
                yield from grow((*ids, token), grown, [*rows, row], chance * q / left)

    yield from grow((), [history], [], Fraction(1))


def as_point_mass(case: Case) -> Case:
    return Case(case.draft, None, case.laws)


def text_of(case: Case, verdict: Verdict) -> History:
    return (*(case.draft.ids[node] for node in verdict.accepted), verdict.bonus)


def text_law(step: Step, length: int, history: History = ()) -> dict[History, Fraction | float]:
    """The law of the next `length` tokens when steps follow each other, each with its own draft."""
    if length <= 0:
        return {(): Fraction(1)}
    found: defaultdict[History, Fraction | float] = defaultdict(Fraction)
    for text, chance in step(history).items():
        if chance:
            for rest, more in text_law(step, length - len(text), (*history, *text)).items():
                found[(text + rest)[:length]] += chance * more
    return dict(found)


def plain(target: Table) -> Step:
    """A step of plain decoding."""
    return lambda history: {(token,): chance for token, chance in enumerate(target(history))}


def steps(
    of_case: Callable[[Case], Mapping[Verdict, Fraction | float]],
    shape: Callable[[History], tuple[int, ...]],
    target: Table,
    drafter: Table,
    change: Callable[[Case], Case] = lambda case: case,
) -> Step:
    """A step of speculation: what a rule makes of every draft, as likely as the draft is."""

    @cache
    def step(history: History) -> Mapping[History, Fraction | float]:
        found: defaultdict[History, Fraction | float] = defaultdict(Fraction)
        for case, chance in cases(history, shape(history), target, drafter):
            for verdict, more in of_case(change(case)).items():
                found[text_of(case, verdict)] += chance * more
        return dict(found)

    return step


def distance(one: Mapping[History, Fraction | float], other: Mapping[History, Fraction | float]) -> float:
    """The largest difference of two laws at any text."""
    return max(abs(float(one.get(text, 0) - other.get(text, 0))) for text in {*one, *other})


def num_accepted(of_case: Callable[[Case], Mapping[Verdict, Fraction | float]], case: Case) -> Fraction | float:
    """Expected accepted tokens of one draft."""
    return sum((len(verdict.accepted) * chance for verdict, chance in of_case(case).items()), Fraction(0))
