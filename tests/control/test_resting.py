"""Lookups that bring less than their own time rest, and come back when they bring more."""

from __future__ import annotations

from outpace.control.controller import AdaptiveController
from outpace.control.resting import Resting
from outpace.decisions import DraftCall, Offer, StepFacts, VerifiedOffer, Wish


def rests(resting: Resting, decoding: int) -> int:
    """Steps until lookups are asked again."""
    count = 0
    while resting.rests(decoding):
        count += 1
    return count


def test_rests_grow_longer_while_nothing_is_gained() -> None:
    resting = Resting()
    found = []
    for _ in range(14):
        resting.observe(16, 0.0, 1e-3, 0.01)
        found.append(rests(resting, 16))
    assert found == [0, 0, 0, 0, 0, 0, 0, 1, 2, 4, 8, 8, 8, 8]


def test_one_good_try_ends_the_rest() -> None:
    resting = Resting()
    for _ in range(12):
        resting.observe(16, 0.0, 1e-3, 0.01)
        rests(resting, 16)
    resting.observe(16, 1.5e-3, 1e-3, 0.01)  # a gain, but on average still none
    assert rests(resting, 16) == 1
    resting.observe(16, 20e-3, 1e-3, 0.01)
    assert rests(resting, 16) == 0
    resting.observe(16, 0.0, 1e-3, 0.01)
    assert rests(resting, 16) == 0


def test_nobody_rests_for_less_than_a_percent() -> None:
    """Of a plain step of 10 ms, 0.09 ms are nothing, and 0.25 ms are with two rests between."""
    for price, longest in ((0.09e-3, 0), (0.25e-3, 2), (0.45e-3, 4), (5e-3, 8)):
        resting, found = Resting(), []
        for _ in range(16):
            resting.observe(1, 0.0, price, 0.01)
            found.append(rests(resting, 1))
        assert max(found) == found[-1] == longest


def test_it_says_why() -> None:
    resting = Resting()
    for _ in range(8):
        assert resting.reason() is None
        resting.observe(16, 0.0, 1.2e-3, 0.01)
    assert resting.reason() == "rests, since a step won 0.0 ms by it lately, and looking up took 1.2 ms"
    resting.rests(2)
    assert resting.reason() is None


def test_drafts_that_lose_rest_too() -> None:
    resting = Resting()
    for _ in range(8):
        resting.observe(16, -5e-3, 2e-4, 0.01)
    assert rests(resting, 16) == 1


def test_sizes_of_batches_are_apart() -> None:
    resting = Resting()
    for _ in range(12):
        resting.observe(16, 0.0, 1e-3, 0.01)
        resting.observe(2, 5e-3, 1e-3, 0.01)
    assert resting.rests(16)
    assert not resting.rests(2)
    assert not resting.rests(1)


def asked(controller: AdaptiveController, steps: int, accepted: int, *, computing: bool = False) -> int:
    """In how many steps of four requests lookups are asked for, of which the first one's is kept so far."""
    count = 0
    for _ in range(steps):
        wishes = [Wish(request, 4, "suffix", {"model": 0} if computing else {}, 1000) for request in range(4)]
        if not any(controller.ceilings(wishes, 0)):
            controller.observe(StepFacts(2, 0, range(4), [], [], 0.010))
            continue
        count += 1
        offers = [Offer(0, "suffix", 2, (0.9, 0.9)), None, None, None]
        controller.allot(wishes, offers, 0)
        drafts = [VerifiedOffer(Offer(0, "suffix", 2, (0.9, 0.9)), accepted)] if accepted else []
        controller.observe(StepFacts(2, 0, range(4), drafts, [], 0.010 + 0.001 * len(drafts), 0.001))
    return count


def test_the_controller_asks_seldom_while_nothing_comes_and_always_while_much_does() -> None:
    controller = AdaptiveController()
    assert 15 <= asked(controller, 120, 0) <= 30
    off = controller.report().drafters["suffix"].off
    assert off is not None
    assert off.startswith("suffix: rests, since a step won ")
    assert asked(controller, 60, 2) > 45
    report = controller.report()
    assert 0.04 < report.drafters["suffix"].drafting_seconds < 0.10
    assert report.drafters["suffix"].off is None


def test_where_a_drafter_that_computes_may_pay_lookups_do_not_rest() -> None:
    assert asked(AdaptiveController(), 60, 0, computing=True) == 60


def test_beside_one_that_is_known_to_be_of_no_use_they_do() -> None:
    controller = AdaptiveController()
    for _ in range(40):
        wishes = [Wish(request, 4, None, {"model": 0}, 1000) for request in range(4)]
        controller.ceilings(wishes, 0)
        controller.allot(wishes, [None] * 4, 0)
        drafts = [VerifiedOffer(Offer(request, "model", 1), 0) for request in range(4)]
        calls = [DraftCall("model", 4, 1, 0, 0.008)]
        controller.observe(StepFacts(2, 0, range(4), drafts, calls, 0.014))
    assert asked(controller, 120, 0, computing=True) <= 40
