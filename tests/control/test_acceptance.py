"""Chances of draft tokens: calibration, forgetting, and a request that is not like the others."""

from __future__ import annotations

import numpy as np
import pytest

from outpace.control.acceptance import MAX_POSITIONS, Correction, DrafterAcceptance


def verify(
    acceptance: DrafterAcceptance,
    own: Correction,
    chances: list[float],
    rng: np.random.Generator,
    confidence: list[float] | None = None,
) -> int:
    accepted = next((i for i, chance in enumerate(chances) if rng.random() >= chance), len(chances))
    acceptance.observe([(len(chances), accepted, confidence, own, ())])
    return accepted


def test_chances_by_position_are_found() -> None:
    acceptance, rng = DrafterAcceptance(), np.random.default_rng(0)
    true = [0.9, 0.7, 0.5, 0.3]
    for request in range(40):
        own = acceptance.correction()
        for _ in range(20):
            verify(acceptance, own, true, rng)
        del request
    own = acceptance.correction()
    found = [acceptance.chance(position, None, own) for position in range(4)]
    assert found == pytest.approx(true, abs=0.13)
    survival = acceptance.survival(4, None, own)
    assert survival == pytest.approx(list(np.cumprod(found)))
    assert acceptance.average_survival(4, own) == pytest.approx(list(np.cumprod(true)), abs=0.12)


def test_what_a_drafter_says_is_calibrated() -> None:
    """It says 0.3, 0.7 and 0.93 of tokens that are kept half as often, and half of the rest."""
    acceptance, rng = DrafterAcceptance(), np.random.default_rng(1)
    own = acceptance.correction()
    for _ in range(600):
        said = float(rng.choice([0.35, 0.75, 0.93]))
        verify(acceptance, own, [said / 2], rng, [said])
    for said in (0.35, 0.75, 0.93):
        assert acceptance.chance(0, said, own) == pytest.approx(said / 2, abs=0.12)
    low, high = acceptance.survival(1, [0.35], own), acceptance.survival(1, [0.93], own)
    assert low[0] < acceptance.average_survival(1, own)[0] < high[0]


def test_tokens_behind_the_first_rejected_one_say_nothing() -> None:
    one, two = DrafterAcceptance(), DrafterAcceptance()
    for _ in range(10):
        one.observe([(5, 0, None, one.correction(), ())])
        two.observe([(1, 0, None, two.correction(), ())])
    assert one.chance(0, None, Correction(1.0)) == two.chance(0, None, Correction(1.0))
    assert one.state() == two.state()


def test_a_request_that_cannot_be_guessed_is_found_out_in_a_few_drafts_and_again_when_it_changes() -> None:
    acceptance, rng = DrafterAcceptance(), np.random.default_rng(2)
    for _ in range(30):
        own = acceptance.correction()
        for _ in range(10):
            verify(acceptance, own, [0.8] * 3, rng)
    own = acceptance.correction()
    assert acceptance.chance(0, None, own) > 0.65
    for _ in range(6):
        acceptance.observe([(3, 0, None, own, ())])
    assert acceptance.chance(0, None, own) < 0.4
    for _ in range(14):
        acceptance.observe([(3, 0, None, own, ())])
    assert acceptance.chance(0, None, own) < 0.12
    for _ in range(6):
        acceptance.observe([(3, 3, None, own, ())])
    assert acceptance.chance(0, None, own) > 0.4


def test_requests_begin_as_the_ones_before_them_began() -> None:
    """Good ones are drafted for much and fill the shared counts; but most are not good, and a new one is like most."""
    acceptance, rng = DrafterAcceptance(), np.random.default_rng(3)
    for request in range(30):
        own = acceptance.correction()
        good = request % 5 == 0
        for _ in range(60 if good else 3):
            verify(acceptance, own, [0.9 if good else 0.05], rng)
    assert acceptance.chance(0, None, Correction(1.0)) > 0.6  # what the tokens say
    assert acceptance.chance(0, None, acceptance.correction()) < 0.5  # what the beginnings say


def test_old_outcomes_fade_also_where_nothing_new_comes() -> None:
    acceptance = DrafterAcceptance()
    for _ in range(100):
        acceptance.observe([(4, 0, None, acceptance.correction(), ())])
        acceptance.observe([(4, 4, None, acceptance.correction(), ())])
    for _ in range(300):
        acceptance.observe([(1, 1, None, acceptance.correction(), ())])
    own = Correction(1.0)
    assert acceptance.chance(0, None, own) > 0.9
    assert acceptance.chance(3, None, own) > 0.9  # forgotten, so like the others


def test_a_drafter_that_changes_is_seen_by_requests_that_are_new_to_it() -> None:
    acceptance = DrafterAcceptance()
    for kept in (0, 1):
        for _ in range(60):
            own = acceptance.correction()
            for _ in range(3):
                acceptance.observe([(1, kept, None, own, ())])
        chance = acceptance.chance(0, None, acceptance.correction())
        assert chance > 0.7 if kept else chance < 0.1


def test_cut_tokens_are_part_of_the_average() -> None:
    plain, fair = DrafterAcceptance(), DrafterAcceptance()
    for acceptance in (plain, fair):
        own = acceptance.correction()
        for _ in range(50):  # tokens it is sure of are kept, others are rejected
            acceptance.observe([(1, 1, [0.95], own, ()), (1, 0, [0.15], own, ())])
        for _ in range(100):  # and by now nobody verifies those
            acceptance.observe([(1, 1, [0.95], own, ())])
            if acceptance is fair:
                acceptance.suppose(0, [0.15], own)
    assert fair.average_survival(1, Correction(1.0))[0] < plain.average_survival(1, Correction(1.0))[0] - 0.2


def test_longer_drafts_than_positions_are_counted_with_the_last() -> None:
    acceptance = DrafterAcceptance()
    count = MAX_POSITIONS + 5
    for _ in range(50):
        acceptance.observe([(count, count, None, acceptance.correction(), ())])
    assert len(acceptance.survival(count, None, Correction(1.0))) == count
    assert acceptance.chance(count, None, Correction(1.0)) == acceptance.chance(MAX_POSITIONS, None, Correction(1.0))


def test_hope_is_above_the_likely_and_falls_with_what_is_known() -> None:
    acceptance, own = DrafterAcceptance(), Correction(1.0)
    for _ in range(2):
        acceptance.observe([(1, 0, None, own, ())])
    early = acceptance.hopeful_chance(own) / acceptance.average_survival(1, own)[0]
    for _ in range(40):
        acceptance.observe([(1, 0, None, own, ())])
    assert early > 1.2
    assert acceptance.hopeful_chance(own) < 0.2
    assert acceptance.best_chance(own) < 0.1


def test_what_a_drafter_says_is_still_calibrated_after_a_restart() -> None:
    """Sure tokens are kept, unsure ones are not: 400 of each are recalled as few, but not as all the same."""
    acceptance = DrafterAcceptance()
    own = acceptance.correction()
    for _ in range(400):
        acceptance.observe([(1, 1, [0.99], own, ())])
        acceptance.observe([(1, 0, [0.05], own, ())])
    recalled = DrafterAcceptance()
    recalled.recall(acceptance.state())
    fresh = recalled.correction()
    assert recalled.chance(0, 0.99, fresh) > 0.85
    assert recalled.chance(0, 0.05, fresh) < 0.15
    assert recalled.average_survival(1, fresh)[0] == pytest.approx(0.5, abs=0.05)
