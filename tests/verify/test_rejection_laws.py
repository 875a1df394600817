"""The standard and the block rule leave the target's law as it is: exactly, by enumeration of drafts and decisions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from types import ModuleType

import numpy as np
import pytest
import torch

from outpace.sampling.choose import NO_TOKEN
from outpace.types import Draft, Verdict
from outpace.verify import block, rejection, standard
from outpace.verify.rejection_reference import block_outcomes, standard_outcomes

from .branching import Rule, outcomes
from .toy import (
    Case,
    Table,
    as_point_mass,
    cases,
    chain,
    constant,
    distance,
    num_accepted,
    plain,
    steps,
    table,
    text_law,
    text_of,
)

RULES: dict[str, tuple[Rule, Callable[..., Mapping[Verdict, Fraction]]]] = {
    "standard": (standard.verify, standard_outcomes),
    "block": (block.verify, block_outcomes),
}
FULL = (1, 2, 3, 5, 9)
HOLES = (0, 0, 1, 2, 7)
GREEDY = (0, 0, 0, 1)
TREES = [(-1, -1), (-1, -1, -1), (-1, -1, 0, 0), (-1, 0, -1, 1), (-1, 0, 0, -1), (-1, -1, 1, 1)]


def running(name: str) -> Callable[[Case], dict[Verdict, float]]:
    return lambda case: outcomes(RULES[name][0], *case.given)


def reference(name: str) -> Callable[[Case], Mapping[Verdict, Fraction]]:
    return lambda case: RULES[name][1](case.draft, case.proposals, case.laws)


def changing(shape: tuple[int, ...]) -> Callable[[tuple[int, ...]], tuple[int, ...]]:
    """This shape first; what follows a step is drafted with one token less."""
    return lambda history: shape if not history else shape[:-1]


@pytest.mark.parametrize("weights", [FULL, HOLES], ids=["full", "holes"])
@pytest.mark.parametrize("change", [lambda case: case, as_point_mass], ids=["sampled", "point mass"])
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("name", RULES)
def test_chains_leave_the_law_as_it_is(
    name: str, k: int, change: Callable[[Case], Case], weights: tuple[int, ...]
) -> None:
    """First token, two tokens and three, over steps whose later drafts follow acceptances and rejections."""
    target, drafter = table(3, 1, weights), table(3, 2, weights)
    exact = text_law(steps(reference(name), changing(chain(k)), target, drafter, change), 3)
    assert {text: chance for text, chance in exact.items() if chance} == {
        text: chance for text, chance in text_law(plain(target), 3).items() if chance
    }
    ran = steps(running(name), changing(chain(k)), target, drafter, change)
    for length in (1, 2, 3):
        assert distance(text_law(ran, length), text_law(plain(target), length)) < 1e-12


@pytest.mark.parametrize("change", [lambda case: case, as_point_mass], ids=["sampled", "point mass"])
@pytest.mark.parametrize("shape", TREES)
def test_trees_leave_the_law_as_it_is(shape: tuple[int, ...], change: Callable[[Case], Case]) -> None:
    target, drafter = table(3, 3), table(3, 4)
    exact = steps(reference("standard"), changing(shape), target, drafter, change)
    assert text_law(exact, 2) == text_law(plain(target), 2)
    ran = steps(running("standard"), changing(shape), target, drafter, change)
    for length in (1, 2):
        assert distance(text_law(ran, length), text_law(plain(target), length)) < 1e-12


@pytest.mark.parametrize("weights", [FULL, HOLES, GREEDY], ids=["full", "holes", "greedy"])
@pytest.mark.parametrize("change", [lambda case: case, as_point_mass], ids=["sampled", "point mass"])
@pytest.mark.parametrize("name", RULES)
def test_every_verdict_is_as_likely_as_the_reference_says(
    name: str, change: Callable[[Case], Case], weights: tuple[int, ...]
) -> None:
    shapes = [chain(k) for k in range(4)] + (TREES if name == "standard" else [])
    for shape in shapes:
        size = 3 if shape in TREES else 4
        for seed in range(2):
            for case, _ in cases((seed,), shape, table(size, 5, weights), table(size, 6, weights)):
                expected = reference(name)(change(case))
                found = running(name)(change(case))
                assert sum(expected.values()) == 1
                for verdict in {*expected, *found}:
                    assert found.get(verdict, 0) == pytest.approx(float(expected.get(verdict, 0)), abs=1e-12)


@pytest.mark.parametrize("name", RULES)
def test_one_draft_token_is_accepted_as_often_as_the_two_laws_overlap(name: str) -> None:
    target, drafter = constant("0.5", "0.3", "0.2"), constant("0.2", "0.3", "0.5")
    accepted = sum(chance * num_accepted(running(name), case) for case, chance in cases((), (-1,), target, drafter))
    assert accepted == pytest.approx(0.70, abs=1e-12)
    assert text_law(steps(reference(name), lambda past: (-1,), target, drafter), 1) == {
        (token,): chance for token, chance in enumerate(target(()))
    }


def expected_accepted(name: str, k: int, target: Table, drafter: Table) -> Fraction:
    return sum(
        (
            chance * Fraction(num_accepted(reference(name), case))
            for case, chance in cases((), chain(k), target, drafter)
        ),
        Fraction(0),
    )


def test_an_example_worked_out_by_hand() -> None:
    """Two tokens, p = (1/3, 2/3), q = (2/3, 1/3), k = 2: 10/9 tokens are accepted one by one, 11/9 as a block."""
    target, drafter = constant("1/3", "2/3"), constant("2/3", "1/3")
    assert expected_accepted("standard", 2, target, drafter) == Fraction(10, 9)
    assert expected_accepted("block", 2, target, drafter) == Fraction(11, 9)


def test_block_accepts_at_least_as_many() -> None:
    gains = []
    for seed in range(20):
        target, drafter = table(3, 100 + seed, (0, 1, 2, 9)), table(3, 200 + seed)
        for k in (1, 2, 3):
            gain = expected_accepted("block", k, target, drafter) - expected_accepted("standard", k, target, drafter)
            assert gain >= 0 if k > 1 else gain == 0
            gains.append(gain)
    assert max(gains) > Fraction(1, 20)


def test_point_masses_are_accepted_as_often_by_both() -> None:
    target = table(3, 7, HOLES)
    for case, _ in cases((), chain(3), target, table(3, 8)):
        lengths = [
            [
                sum(c for verdict, c in reference(name)(as_point_mass(case)).items() if len(verdict.accepted) == n)
                for n in range(4)
            ]
            for name in RULES
        ]
        assert lengths[0] == lengths[1]


@pytest.mark.parametrize("name", RULES)
def test_the_target_as_its_own_drafter_is_always_accepted(name: str) -> None:
    for weights in (FULL, HOLES, GREEDY):
        target = table(4, 9, weights)
        for case, _ in cases((), chain(3), target, target):
            assert num_accepted(running(name), case) == pytest.approx(3, abs=1e-12)


def test_equal_siblings_are_harmless() -> None:
    """Nobody draws one token twice without replacement, but point masses may come twice."""
    target = table(3, 10)
    laws = np.array([[float(p) for p in target(past)] for past in ((), (1,), (1,), (2,))])
    found = outcomes(standard.verify, Draft((1, 1, 2), (-1, -1, -1), ("x",) * 3), laws)
    first = [sum(c for v, c in found.items() if (*v.accepted, -1)[0] == node) for node in range(3)]
    assert first == pytest.approx([laws[0, 1], 0, laws[0, 2]], abs=1e-12)


BAD_ROWS = {
    "nan": [float("nan"), 0.5, 0.5],
    "negative": [-0.5, 1.0, 0.5],
    "too much": [0.9, 0.9, 0.9],
    "nothing": [0.0, 0.0, 0.0],
    "infinite": [float("inf"), 0.0, 1.0],
}


@pytest.mark.parametrize("row", BAD_ROWS.values(), ids=BAD_ROWS)
@pytest.mark.parametrize("name", RULES)
def test_rows_that_are_no_law_count_as_point_masses(name: str, row: list[float]) -> None:
    for case, _ in cases((), chain(2), table(3, 11), table(3, 12)):
        draft, laws = as_point_mass(case).given
        bad = Draft(draft.ids, draft.parents, draft.sources, torch.tensor([row, row]))
        assert outcomes(RULES[name][0], bad, laws) == outcomes(RULES[name][0], draft, laws)


@pytest.mark.parametrize("name", RULES)
def test_low_precision_rows_are_laws(name: str) -> None:
    """The law that float32 or bfloat16 rows state, not one close to it, and not a point mass."""
    row = torch.tensor([0.2, 0.3, 0.5], dtype=torch.bfloat16)
    stated = (row.double() / row.double().sum()).tolist()
    law = np.array([[0.5, 0.3, 0.2]] * 2)
    accepted = 0.0
    for token, chance in enumerate(stated):
        draft = Draft.chain([token], "x", probabilities=row[None])
        found = outcomes(RULES[name][0], draft, law)
        accepted += chance * sum(c for verdict, c in found.items() if verdict.accepted)
    assert accepted == pytest.approx(np.minimum(law[0], stated).sum(), abs=1e-12)


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("name", RULES)
def test_a_row_without_a_law_ends_only_walks_that_get_there(name: str, k: int) -> None:
    """Plain decoding would fail right after token 1: so does speculation, with the same chance."""

    def broken(history: tuple[int, ...]) -> list[Fraction]:
        return [Fraction(0)] * 3 if history[-1:] == (1,) else table(3, 13)(history)

    def plain_step(history: tuple[int, ...]) -> dict[tuple[int, ...], Fraction]:
        return {(NO_TOKEN,): Fraction(1)} if not any(broken(history)) else dict(plain(broken)(history))

    def stop(step: Callable[[tuple[int, ...]], Mapping]) -> Callable[[tuple[int, ...]], Mapping]:
        return lambda past: {(NO_TOKEN,): Fraction(1)} if NO_TOKEN in past else step(past)

    ran = stop(steps(running(name), lambda past: chain(k), broken, table(3, 14)))
    assert distance(text_law(ran, 3), text_law(stop(plain_step), 3)) < 1e-12


def test_shapes_that_do_not_fit_are_errors() -> None:
    laws = np.full((2, 3), 1 / 3)
    for rule, _ in RULES.values():
        with pytest.raises(ValueError, match="draft of 2"):
            outcomes(rule, Draft.chain([0, 1], "x"), laws)
        with pytest.raises(ValueError, match="laws over 3"):
            outcomes(rule, Draft.chain([0], "x", probabilities=torch.ones(1, 4) / 4), laws)
    with pytest.raises(ValueError, match="takes chains"):
        outcomes(block.verify, Draft((0, 1), (-1, -1), ("x",) * 2), np.full((3, 3), 1 / 3))


# Rules that are wrong in the ways that happen.


def error_of(name: str, shape: tuple[int, ...], change: Callable[[Case], Case] = lambda case: case) -> float:
    """How far the law of three tokens is off. The laws differ much, so that nothing hides."""
    target, drafter = table(4, 15, (1, 4, 20)), table(4, 16, (1, 4, 20))
    found = text_law(steps(running(name), lambda past: shape, target, drafter, change), 3)
    return distance(found, text_law(plain(target), 3))


def test_the_error_of_the_right_rules_is_none() -> None:
    assert error_of("standard", chain(2)) < 1e-12
    assert error_of("block", chain(2)) < 1e-12
    assert error_of("standard", (-1, -1)) < 1e-12


@pytest.mark.parametrize("name", RULES)
def test_argmax_drafts_with_soft_probabilities_are_caught(name: str) -> None:
    """The classic bug: the draft is the best token, its probabilities say that it was drawn."""
    target, drafter = table(3, 15), table(3, 16)

    def step(history: tuple[int, ...]) -> dict[tuple[int, ...], float]:
        best = max(range(3), key=lambda token: drafter(history)[token])
        case = next(case for case, _ in cases(history, (-1,), target, drafter) if case.draft.ids == (best,))
        return {text_of(case, verdict): chance for verdict, chance in running(name)(case).items()}

    assert distance(text_law(step, 2), text_law(plain(target), 2)) > 0.01


def whole_law(law: np.ndarray, token: int, proposal: np.ndarray | None) -> np.ndarray:
    return law.copy()


@pytest.mark.parametrize(("name", "module"), [("standard", standard), ("block", block)])
def test_a_residual_that_is_the_whole_law_is_caught(
    name: str, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "excess", whole_law)
    assert error_of(name, chain(2)) > 0.01
    assert error_of(name, chain(2), as_point_mass) > 0.01


def test_siblings_that_are_not_taken_out_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standard, "proposal_of", lambda draft, node, tried: rejection.proposal_of(draft, node))
    assert error_of("standard", (-1, -1)) > 0.01


def test_siblings_judged_by_the_law_of_the_first_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standard, "normalised", lambda weights, otherwise: otherwise)
    assert error_of("standard", (-1, -1)) > 0.01


def test_block_with_the_residual_of_standard_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """(p - q)+ in place of (P p - q)+."""

    def unclipped(law: np.ndarray, token: int, proposal: np.ndarray | None) -> np.ndarray:
        return rejection.excess(law / law.sum(), token, proposal)

    monkeypatch.setattr(block, "excess", unclipped)
    assert error_of("block", chain(2)) > 0.01


def test_block_that_stops_at_the_first_failure_is_caught() -> None:
    """Asks from the front, as the standard rule does, with the chances of block verification."""

    def from_the_front(case: Case) -> dict[Verdict, Fraction]:
        right = block_outcomes(case.draft, case.proposals, case.laws)
        lengths = [sum((c for v, c in right.items() if len(v.accepted) == n), Fraction(0)) for n in range(3)]
        above = lengths[2]  # h_2
        qualifies = [Fraction(1), lengths[1] / (1 - above) if above < 1 else Fraction(1), above]  # h_i
        wrong = [1 - qualifies[1], qualifies[1] * (1 - above), qualifies[1] * above]
        return {v: c / lengths[len(v.accepted)] * wrong[len(v.accepted)] for v, c in right.items()}

    target, drafter = table(3, 15, (1, 4, 20)), table(3, 16, (1, 4, 20))
    found = text_law(steps(from_the_front, lambda past: chain(2), target, drafter), 3)
    assert distance(found, text_law(plain(target), 3)) > 0.01
