"""What the controller promises the engine, decision by decision."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest

from outpace.control import AdaptiveController, ControlSettings, FixedController
from outpace.control.branches import size
from outpace.control.requests import Requests
from outpace.decisions import Allotment, DraftCall, Offer, StepFacts, VerifiedOffer, Wish
from outpace.protocols import Controller
from tests.control.simulator import NATIVE, Simulation, TrueDrafter, best_rate, share_lost, table

CONTROLLERS: list[Controller] = [AdaptiveController(), FixedController()]


def wish(
    request: int, most: int = 5, free: str | None = "free", behind: int | None = None, remaining: int = 500
) -> Wish:
    return Wish(request, most, free, {} if behind is None else {"model": behind}, remaining)


def taught(
    chance: float, *, computing: bool = False, steps: int = 60, settings: ControlSettings | None = None, batch: int = 1
) -> AdaptiveController:
    """A controller after some steps of requests with this chance."""
    controller = AdaptiveController(settings or ControlSettings(relative_costs={"model": 0.15}))
    seconds = table(NATIVE)
    drafter = TrueDrafter(lambda request, position: chance)
    if computing:
        drafter = TrueDrafter(lambda request, position: chance, lambda many: 0.15 * seconds(many), 0.0002)
    world = Simulation(controller, {"model" if computing else "free": drafter}, seconds, stalls=0.0, noise=0.03)
    world.run(range(1000, 1000 + batch), steps)
    return controller


def test_torch_is_not_imported() -> None:
    code = "import sys, outpace.control, outpace.control.memory; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_nothing_to_decide_is_no_error(controller: Controller) -> None:
    assert list(controller.ceilings([], 4, 4)) == []
    assert list(controller.allot([], [], 4, 4)) == []
    assert list(controller.keep([], 4, 4)) == []
    controller.observe(StepFacts(2, 0, [], []))
    controller.observe(StepFacts(2, 30, [], [], [], 0.3))
    controller.release(12345)
    assert controller.report().steps == 0


def test_a_draft_that_never_came_is_not_in_what_was_expected() -> None:
    """The drafter is asked and gives nothing: one token in the time of a plain step and of its call is expected."""
    controller = taught(0.9, computing=True)
    before = controller.report()
    asked = wish(1, free=None, behind=0)
    controller.ceilings([asked], 0)
    (allotment,) = controller.allot([asked], [None], 0)
    assert allotment.drafter == "model" and allotment.num_tokens > 1
    assert controller.keep([], 1, 1) == []
    plain = table(NATIVE)(1)
    controller.observe(StepFacts(2, 0, [1], [], [DraftCall("model", 1, 0, 0, 0.0)], plain))
    now = controller.report()
    assert now.expected_tokens - before.expected_tokens == pytest.approx(1)
    assert now.expected_seconds - before.expected_seconds < (1.05 + 0.15 * allotment.num_tokens) * plain


def test_steps_may_be_observed_that_nobody_was_asked_about() -> None:
    controller = AdaptiveController()
    controller.observe(StepFacts(1, 0, [7], [VerifiedOffer(Offer(7, "new", 3), 2)], [], 0.02))
    controller.observe(StepFacts(1, 0, [7], [VerifiedOffer(Offer(7, "new", 0), 0)], [], 0.02))
    controller.observe(StepFacts(1, 0, [7], [], [DraftCall("other", 0, 0, 0, 0.0)], 0.02))
    report = controller.report().drafters["new"]
    assert (report.drafts, report.tokens, report.accepted) == (1, 3, 2)


def test_good_drafts_are_verified_and_bad_ones_are_not() -> None:
    good, bad = taught(0.9), taught(0.02)
    for controller, wanted in ((good, 5), (bad, 0)):
        controller.ceilings([wish(1)], 0)
        offer = Offer(1, "free", 5)
        assert controller.allot([wish(1)], [offer], 0) == [Allotment(keep=wanted)]
    assert good.ceilings([wish(1)], 0) == [5]
    assert bad.ceilings([wish(1)], 0)[0] <= 1  # a probe at most


def test_a_crowd_costs_more_so_less_is_drafted() -> None:
    controller = taught(0.7)
    alone = controller.ceilings([wish(1)], 0)[0]
    crowd = controller.ceilings([wish(request) for request in range(64)], 0)
    assert alone >= 4
    assert max(crowd) <= 1


def test_requests_without_drafters_count_as_tokens_and_prompts_do_not() -> None:
    """31 others that decode would be slowed by five rows for one request; 31 prompt rows are computed anyway."""
    controller = taught(0.6)
    offer = Offer(1, "free", 5)
    assert controller.allot([wish(1)], [offer], 31, 31)[0].keep == 0
    assert controller.allot([wish(1)], [offer], 31, 0)[0].keep > 0


def test_nobody_computes_a_draft_while_somebody_waits_for_a_first_token() -> None:
    controller = taught(0.9, computing=True)
    asked = wish(1, free=None, behind=1)
    assert controller.allot([asked], [None], 0)[0].drafter == "model"
    for _ in range(50):
        assert controller.ceilings([asked], 100, 0) == [0]
        assert controller.allot([asked], [None], 100, 0) == [Allotment()]


def test_nothing_is_tried_while_somebody_waits_for_a_first_token() -> None:
    bad, offer = taught(0.02, steps=100), Offer(1, "free", 5)
    for _ in range(60):
        assert bad.allot([wish(1)], [offer], 100, 0) == [Allotment()]
        bad.observe(StepFacts(2, 100, [1], [], [], 0.15))
    assert max(bad.ceilings([wish(1)], 0)) == 1  # but it was due
    good = taught(0.9)
    good.observe(StepFacts(1, 40, [], [], [], 0.08))  # one thread: the costs of other rows are guesses
    assert good.allot([wish(1)], [offer], 3, 0) == [Allotment(keep=5)]
    assert good.allot([wish(1)], [offer], 3, 3) == [Allotment()]


def test_a_new_drafter_is_asked_for_one_token_of_one_request() -> None:
    controller = AdaptiveController()
    controller.observe(StepFacts(2, 40, [], [], [], 0.1))
    wishes = [wish(request, free=None, behind=rows) for request, rows in enumerate((30, 5, 60, 30))]
    for _ in range(2):  # the first step of a batch like this may be a plain one
        allotments = controller.allot(wishes, [None] * 4, 0)
        controller.observe(StepFacts(2, 0, range(4), [], [], 0.02))
    assert [allotment.num_tokens for allotment in allotments] == [0, 1, 0, 0]


def test_no_more_is_expected_of_a_new_drafter_than_it_is_asked_for() -> None:
    """A pass and a row more, not the eight passes that would be best if the hopes in it came true."""
    controller = AdaptiveController(ControlSettings(relative_costs={"model": 0.1}))
    controller.observe(StepFacts(2, 1, [], [], [], 0.01))
    asked = wish(1, most=8, free=None, behind=0)
    (allotment,) = controller.allot([asked], [None], 0)
    assert allotment.num_tokens == 1
    step, target = controller._step, controller.knowledge.target.now
    assert step.drafting == pytest.approx(0.1 * target.seconds(1))
    assert step.total == pytest.approx(target.seconds(2) + step.drafting)


@pytest.mark.parametrize("batch", [1, 3])
def test_what_is_tried_is_part_of_the_plan_and_what_it_replaces_is_not(batch: int) -> None:
    seen: list[tuple[bool, bool]] = []

    class Watched(AdaptiveController):
        def allot(
            self, wishes: Sequence[Wish], offers: Sequence[Offer | None], other_rows: int, other_decoding: int = 0
        ) -> list[Allotment]:
            allotments = super().allot(wishes, offers, other_rows, other_decoding)
            step, target = self._step, self.knowledge.target.now
            asked = {a.drafter for a in allotments if a.drafter is not None}
            if step.total is not None:
                assert step.drafting == pytest.approx(0.0) or asked
                assert asked == set(step.calls) or step.probes, "calls are those that are made"
                assert step.total == pytest.approx(target.seconds(batch + step.num_drafted) + step.drafting)
                if not asked:
                    assert step.num_drafted == sum(size(a.keep) for a in allotments)
                seen.append((bool(asked), bool(step.probes)))
            return allotments

    seconds = table(NATIVE)
    drafters = {
        "free": TrueDrafter(lambda request, position: 0.1),
        "model": TrueDrafter(lambda request, position: 0.8, lambda many: 0.15 * seconds(many), 0.0002),
    }
    controller = Watched(ControlSettings(relative_costs={"model": 0.15}))
    Simulation(controller, drafters, seconds, stalls=0.0).run(range(batch), 200)
    assert (True, True) in seen[100:] or (False, True) in seen[100:]
    assert (True, False) in seen[100:], "the model drafts, and lookups are tried in its place"


@pytest.mark.parametrize("most", [1, 3, 8])
def test_a_drafter_is_asked_for_no_more_than_it_may_give(most: int) -> None:
    """Sixteen tokens may be looked up, fewer computed: that is all that is planned, and rows are set aside for."""
    controller = taught(0.95, computing=True)
    asked = replace(wish(1000, most=16, free=None, behind=1), limits={"model": most} if most < 16 else {})
    assert controller.ceilings([asked], 0) == [most]
    (allotment,) = controller.allot([asked], [None], 0)
    assert 1 <= allotment.num_tokens <= most
    step, target = controller._step, controller.knowledge.target.now
    assert step.num_drafted <= most
    assert step.total == pytest.approx(target.seconds(1 + step.num_drafted) + step.drafting)


def test_a_drafter_that_stops_is_tried_with_few_tokens_like_any_other() -> None:
    """It was timed another day, and what it says may mean nothing."""
    controller = AdaptiveController(ControlSettings(relative_costs={"model": 0.1}))
    controller.observe(StepFacts(2, 1, [], [], [], 0.01))
    costs = controller.knowledge.costs("model")
    costs.stops, costs.num_calls = True, 1
    for drafts, most in ((0, 1), (1, 2), (2, 3)):
        controller.knowledge.acceptance("model").num_drafts = drafts
        (allotment,) = controller.allot([wish(1, most=8, free=None, behind=0)], [None], 0)
        assert 1 <= allotment.num_tokens <= most


def test_a_drafter_that_must_be_slower_than_the_target_is_not_tried_for_it() -> None:
    controller = AdaptiveController(ControlSettings(relative_costs={"model": 1.5}))
    for _ in range(30):
        assert controller.allot([wish(1, free=None, behind=20)], [None], 0) == [Allotment()]
        controller.observe(StepFacts(2, 0, [1], [], [], 0.01))


def test_catching_up_has_to_pay_within_what_is_left() -> None:
    controller = taught(0.8, computing=True)
    cheap, dear = wish(1, free=None, behind=100), wish(2, free=None, behind=100, remaining=3)
    assert controller.allot([cheap], [None], 0)[0].drafter == "model"
    assert controller.allot([dear], [None], 0)[0].drafter is None
    assert controller.allot([wish(3, free=None, behind=5000)], [None], 0)[0].drafter is None


def test_a_long_text_is_worth_more_catching_up_than_one_that_has_just_begun() -> None:
    controller = taught(0.8, computing=True)
    behind = wish(5, free=None, behind=2500, remaining=1000)
    assert controller.allot([behind], [None], 0)[0].drafter is None
    for _ in range(400):
        controller.observe(StepFacts(2, 0, [5], [], [], 0.01))
    assert controller.allot([behind], [None], 0)[0].drafter == "model"


def test_of_a_free_and_a_computing_drafter_the_better_one_is_taken() -> None:
    seconds = table(NATIVE)
    for chance, wanted in ((0.9, "free"), (0.1, "model")):
        controller = AdaptiveController(ControlSettings(relative_costs={"model": 0.15}))
        drafters = {
            "free": TrueDrafter(lambda request, position, chance=chance: chance),
            "model": TrueDrafter(lambda request, position: 0.8, lambda many: 0.15 * seconds(many), 0.0002),
        }
        world = Simulation(controller, drafters, seconds, stalls=0.0, noise=0.03)
        world.run([1], 100)
        used = controller.report().drafters
        assert max(used, key=lambda name: used[name].tokens) == wanted


def test_confident_tokens_are_kept_and_others_cut() -> None:
    controller = AdaptiveController(ControlSettings(relative_costs={"model": 0.15}))
    seconds = table(NATIVE)
    drafter = TrueDrafter(lambda request, position: 0.6, lambda many: 0.15 * seconds(many), 0.0002, informative=True)
    world = Simulation(controller, {"model": drafter}, seconds, stalls=0.0)
    world.run([1], 300)
    sure = Offer(1, "model", 4, (0.99, 0.99, 0.99, 0.99))
    unsure = Offer(1, "model", 4, (0.99, 0.02, 0.99, 0.99))
    assert controller.keep([sure], 0) == [4]
    assert controller.keep([unsure], 0)[0] <= 2
    assert controller.calibrated(1, "model", 0, 0.99) > 0.85
    assert controller.calibrated(1, "model", 0, 0.02) < 0.2
    asked = controller.allot([wish(1, free=None, behind=1)], [None], 0)[0]
    assert 0.05 < asked.stop_below < 0.6


def test_a_draft_that_was_drawn_is_never_cut() -> None:
    controller = taught(0.02)
    drawn = Offer(1, "free", 5, (0.01,) * 5, fixed=True)
    assert controller.keep([drawn, Offer(2, "free", 5)], 0) == [5, 0]
    for _ in range(60):
        assert controller.allot([wish(1)], [drawn], 0) == [Allotment(keep=5)]
    new = AdaptiveController()
    assert new.allot([wish(1)], [drawn], 0) == [Allotment(keep=5)]


def test_no_plain_step_is_paid_for_where_a_draft_must_be_verified() -> None:
    spent = []
    for fixed in (False, True):
        controller = taught(0.9)
        controller.observe(StepFacts(1, 40, [], [], [], 0.08))  # one thread: what drafts add is a guess
        before = controller._budget.spent
        (allotment,) = controller.allot([wish(1)], [Offer(1, "free", 5, fixed=fixed)], 3, 3)
        assert allotment.keep == (5 if fixed else 0)
        spent.append(controller._budget.spent - before)
    assert spent[0] > 0.0 == spent[1]


def test_what_was_tried_in_a_step_that_failed_did_not_fail() -> None:
    """The next step is one in which nobody may draft, so nothing is decided in it."""
    intervals = []
    for fails in (False, True):
        controller = taught(0.8, computing=True)
        asked = wish(1000, free=None, behind=0)
        controller._step.probes.add(1000)
        controller._step.asked[1000] = Allotment(drafter="model", num_tokens=1)
        before = controller._trying.pace(1000, "model").interval
        if fails:
            controller.abandon()
        controller.observe(StepFacts(2, 5, [1000], [], [], 0.02))
        intervals.append(controller._trying.pace(1000, "model").interval / before)
        assert controller.ceilings([asked], 0) == [5]
    assert intervals[0] > 1.0 == intervals[1]


def test_a_drafter_is_not_off_while_one_request_is_drafted_for() -> None:
    controller = taught(0.9)
    for _ in range(40):
        controller.observe(StepFacts(2, 0, [1], [VerifiedOffer(Offer(1, "free", 3), 0)], [], 0.012))
    nothing, some = controller.ceilings([wish(1), wish(1000)], 0)
    assert nothing <= 1 < some, "a probe at most"
    assert controller.report().drafters["free"].off is None
    assert controller.ceilings([wish(1)], 6, 6)[0] <= 1
    assert controller.report().drafters["free"].off is not None
    controller.ceilings([wish(1000), wish(1)], 0)
    assert controller.report().drafters["free"].off is None


def test_what_a_drawn_token_is_does_not_change_what_is_decided_about_it() -> None:
    controller = AdaptiveController(ControlSettings(relative_costs={"model": 0.15}))
    seconds = table(NATIVE)
    drafter = TrueDrafter(lambda request, position: 0.6, lambda many: 0.15 * seconds(many), 0.0002, informative=True)
    Simulation(controller, {"model": drafter}, seconds, stalls=0.0).run([1], 200)
    low, high = (Offer(1, "model", 3, (sure,) * 3, fixed=True) for sure in (0.01, 0.99))
    assert controller.calibrated(1, "model", 0, 0.01) < controller.calibrated(1, "model", 0, 0.99) - 0.3
    assert controller.knowledge.survival(low, 3) == controller.knowledge.survival(high, 3)
    others = [Offer(2, "model", 3)]
    assert controller.keep([low, *others], 0) == controller.keep([high, *others], 0)


def test_a_released_request_is_forgotten_and_states_are_bounded() -> None:
    controller = taught(0.9)
    assert len(controller.knowledge.requests) == 1
    controller.release(1000)
    assert len(controller.knowledge.requests) == 0
    requests = Requests()
    for request in range(10_000):
        _ = requests[request]
    assert len(requests) < 5_000


def test_a_request_that_cannot_be_guessed_is_left_alone_while_others_are_drafted_for() -> None:
    controller = AdaptiveController(ControlSettings(floor=0.0))
    drafter = TrueDrafter(lambda request, position: 0.02 if request == 1 else 0.9)
    world = Simulation(controller, {"free": drafter}, table(NATIVE), stalls=0.0)
    world.run(range(4), 60)
    offers = [Offer(request, "free", 5) for request in range(4)]
    kept = controller.keep(offers, 0)
    assert kept[1] == 0
    assert min(kept[0], kept[2], kept[3]) >= 2


def test_it_says_why_a_drafter_is_off() -> None:
    controller = taught(0.02, steps=40)
    sentence = controller.report().drafters["free"].off
    assert sentence is not None
    assert sentence.startswith("free: 0.")
    assert "ms of verifying, 0.9" in sentence
    assert taught(0.9).report().drafters["free"].off is None


def test_a_reason_is_one_as_long_as_somebody_could_ask() -> None:
    """Of a drafter that had nothing at hand, or was nobody's, for many steps nothing is said."""
    controller = taught(0.02, steps=40)
    said = controller.report().drafters["free"].off
    assert said is not None
    assert said.startswith("free: ")
    for _ in range(30):
        controller.observe(StepFacts(2, 0, [1], [], [], 0.01))
    assert controller.report().drafters["free"].off == said
    for _ in range(10):
        controller.observe(StepFacts(2, 0, [1], [], [], 0.01))
    assert controller.report().drafters["free"].off is None
    controller.allot([wish(1000)], [Offer(1000, "free", 5)], 0)
    again = controller.report().drafters["free"].off
    assert again is not None
    assert " of 1 draft token expected to be kept for " in again


def test_it_says_that_a_computing_drafter_would_slow_somebody_down() -> None:
    controller = taught(0.9, computing=True, settings=ControlSettings(floor=1.0, relative_costs={"model": 0.15}))
    for _ in range(300):
        controller.observe(StepFacts(2, 0, [7, -1], [], [], table(NATIVE)(2)))
    assert controller.allot([wish(7, free=None, behind=0)], [None], 1, 1)[0].num_tokens <= 1
    sentence = controller.report().drafters["model"].off
    assert sentence is not None
    assert sentence.endswith("but a request that gains nothing would become slower")


def test_counts_are_those_of_the_steps() -> None:
    controller = AdaptiveController()
    seconds = table(NATIVE)
    drafter = TrueDrafter(lambda request, position: 0.7, lambda many: 0.1 * seconds(many), 0.0002)
    world = Simulation(controller, {"model": drafter}, seconds, noise=0.02, stalls=0.0)
    world.run(range(2), 300)
    report = controller.report()
    counts = report.drafters["model"]
    assert report.steps == 300
    assert report.seconds == pytest.approx(sum(step.seconds for step in world.history))
    assert counts.accepted == sum(step.tokens - step.requests for step in world.history)
    assert counts.tokens == sum(step.drafted for step in world.history)
    assert counts.expected_accepted == pytest.approx(counts.accepted, rel=0.15)
    rate = sum(s.tokens for s in world.history) / sum(s.exact for s in world.history)
    assert counts.gain == pytest.approx(rate / (2 / seconds(2)), rel=0.1)
    assert counts.expected_gain == pytest.approx(counts.gain, rel=0.15)
    best = best_rate(seconds, range(2), world.drafters)
    assert any(step.probe for step in world.history) and report.probing_seconds > 0.0
    assert share_lost([step for step in world.history if step.probe], world.history, best) < 0.02


def test_the_fixed_controller_takes_all_there_is() -> None:
    controller = FixedController()
    wishes = [wish(1, behind=3), wish(2, behind=3), wish(3)]
    assert controller.ceilings(wishes, 0) == [5, 5, 5]
    allotments = controller.allot(wishes, [Offer(1, "free", 4), None, None], 0)
    assert allotments == [Allotment(keep=4), Allotment(drafter="model", num_tokens=5), Allotment()]
    assert controller.keep([Offer(1, "free", 4, (0.0,) * 4)], 0) == [4]
    assert controller.calibrated(1, "free", 0, 0.3) == 0.3
    facts = StepFacts(1, 0, [1, 2], [VerifiedOffer(Offer(1, "free", 4), 2)], [DraftCall("model", 1, 5, 0, 0.5)], 1.0)
    controller.observe(facts)
    report = controller.report()
    assert (report.steps, report.seconds) == (1, 1.5)
    assert (report.drafters["free"].tokens, report.drafters["free"].accepted) == (4, 2)
    assert report.drafters["model"].drafting_seconds == 0.5
    assert report.drafters["free"].gain is None
