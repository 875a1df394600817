"""A drafter that is asked and finds nothing costs its call: less is promised of it the next time."""

from __future__ import annotations

import pytest

from outpace.control import AdaptiveController, ControlSettings
from outpace.control.silence import Silence
from outpace.decisions import Allotment, DraftCall, Offer, StepFacts, VerifiedOffer, Wish
from tests.control.simulator import NATIVE, Simulation, TrueDrafter, table

SECONDS = table(NATIVE)


def taught() -> AdaptiveController:
    """A controller that knows a good drafter."""
    controller = AdaptiveController(ControlSettings(relative_costs={"model": 0.15}))
    drafter = TrueDrafter(lambda *_: 0.85, lambda many: 0.15 * SECONDS(many), 0.0002)
    Simulation(controller, {"model": drafter}, SECONDS, stalls=0.0, noise=0.02).run([1000], 60)
    return controller


def ask(controller: AdaptiveController, request: int, *, found: bool, behind: int = 0, caught_up: int = 0) -> bool:
    """One step of one request. Whether the drafter was asked, and told so by what it finds."""
    wish = Wish(request, 5, None, {"model": behind}, 500)
    controller.ceilings([wish], 0)
    (allotment,) = controller.allot([wish], [None], 0)
    if allotment.drafter is None:
        controller.observe(StepFacts(2, 0, [request], [], [], SECONDS(1)))
        return False
    offers = [Offer(request, "model", allotment.num_tokens)] if found else []
    kept = controller.keep(offers, 1 - len(offers), 1 - len(offers))
    drafts = [VerifiedOffer(Offer(request, "model", count), count) for count in kept if isinstance(count, int)]
    call = DraftCall("model", 1, allotment.num_tokens if found else 0, caught_up, 0.15 * SECONDS(1))
    tokens = sum(seen.offer.num_tokens for seen in drafts)
    controller.observe(StepFacts(2, 0, [request], drafts, [call], SECONDS(1 + tokens)))
    return True


def test_the_share_by_hand() -> None:
    """Two asks count as made in advance, as the guess says."""
    silence = Silence()
    assert silence.share(0.25) == 0.25
    silence.add(False)
    assert silence.share() == pytest.approx(1 / 3)
    assert silence.share(0.5) == pytest.approx(2 / 3)
    for _ in range(500):
        silence.add(True)
    assert silence.share() < 1e-6
    assert Silence(found=10).asked == 10
    assert Silence(found=10_000).asked == pytest.approx(32)


def test_who_finds_nothing_is_soon_asked_only_now_and_then() -> None:
    controller = taught()
    asked = [ask(controller, 1, found=False) for _ in range(100)]
    assert 1 <= sum(asked[:10]) <= 8
    assert sum(asked[20:]) <= 12


def test_it_is_asked_again_when_it_has_found_something() -> None:
    controller = taught()
    for _ in range(30):
        ask(controller, 1, found=False)
    assert controller.knowledge.speaks(1, "model") < 0.5
    for _ in range(200):
        ask(controller, 1, found=True)
    assert controller.knowledge.speaks(1, "model") > 0.9
    assert sum(ask(controller, 1, found=True) for _ in range(20)) >= 18


def test_one_silent_request_says_little_of_others() -> None:
    controller = taught()
    for _ in range(6):
        ask(controller, 1, found=False)
    assert controller.knowledge.speaks(1, "model") < 0.4
    assert controller.knowledge.speaks(1000, "model") > 0.8
    assert ask(controller, 2, found=True)


def test_catching_up_is_no_silence() -> None:
    """Of 300 rows it computes 128 in a step, and so says nothing."""
    controller = taught()
    assert ask(controller, 1, found=False, behind=60, caught_up=50)
    assert controller.knowledge.speaks(1, "model") == 1.0
    assert ask(controller, 1, found=False, behind=10, caught_up=10)
    assert controller.knowledge.speaks(1, "model") < 1.0


def test_a_draft_of_which_nothing_is_verified_was_found() -> None:
    controller = taught()
    wish = Wish(1, 5, None, {"model": 0}, 500)
    (allotment,) = controller.allot([wish], [None], 0)
    assert allotment.drafter == "model"
    controller.keep([Offer(1, "model", 2, (0.0, 0.0))], 0)
    controller.observe(StepFacts(2, 0, [1], [], [DraftCall("model", 1, 2, 0, 0.003)], SECONDS(1)))
    assert controller.knowledge.speaks(1, "model") == 1.0


def test_what_was_silent_is_forgotten_with_the_drafter_and_the_request() -> None:
    controller = taught()
    ask(controller, 1, found=False)
    assert controller.knowledge.requests[1].silences
    controller.forget("model")
    assert controller.knowledge.speaks(1, "model") == 1.0
    assert not controller.knowledge.requests[1].silences
    assert controller.allot([Wish(1, 5, None, {}, 500)], [None], 0) == [Allotment()]
