"""Breadth and depth of drafts in the simulated world, whose best fixed tree is known by trying every one."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import pytest

from outpace.control import AdaptiveController, ControlSettings
from outpace.decisions import Offer, StepFacts, Wish
from tests.control.simulator import NATIVE, Simulation, TrueDrafter, best_rate, share_lost, table

SECONDS = table(NATIVE)
PRIOR = ControlSettings(relative_costs={"model": 0.2})
LOOKED_UP, COMPUTED = 16, 8
"""Most nodes."""


class World:
    """One drafter with rank acceptances that may change.

    Args:
        kind: "free" or "model".
        first: chance of its first candidate.
        ranks: chances of the second, the third, ... where those before it are wrong.
    """

    def __init__(self, kind: str, first: float, ranks: Sequence[float], *, informative: bool = False) -> None:
        self.first, self.ranks = first, ranks
        self.most = LOOKED_UP if kind == "free" else COMPUTED
        self.drafters = {
            kind: TrueDrafter(
                lambda request, position: self.first,
                None if kind == "free" else lambda many: 0.15 * SECONDS(many),
                0.15 * 0.0014,
                informative=informative,
                stops=kind != "free",
                ranks=lambda: self.ranks,
            )
        }

    def simulation(self, seed: int) -> Simulation:
        return Simulation(AdaptiveController(PRIOR), self.drafters, SECONDS, most=self.most, seed=seed)

    def best(self, batch: int) -> float:
        return best_rate(SECONDS, range(batch), self.drafters, most=self.most)

    def best_chain(self, batch: int) -> float:
        ranks, self.ranks = self.ranks, ()
        try:
            return self.best(batch)
        finally:
            self.ranks = ranks


def branches_a_step(world: Simulation, begin: int) -> float:
    steps = world.history[begin:]
    return sum(step.branches for step in steps) / len(steps)


@pytest.mark.parametrize(
    "first, ranks", [(0.4, (0.5, 0.3)), (0.5, (0.6, 0.4)), (0.55, (0.05, 0.05)), (0.8, (0.3, 0.2))]
)
@pytest.mark.parametrize("kind, batch", [("free", 1), ("free", 2), ("model", 1)])
def test_within_50_steps_drafts_are_as_good_as_the_best_fixed_tree(
    kind: str, first: float, ranks: Sequence[float], batch: int
) -> None:
    world = World(kind, first, ranks)
    best = world.best(batch)
    shares, branches = [], []
    for seed in range(5):
        run = world.simulation(seed)
        run.run(range(batch), 50)
        shares.append(run.run(range(batch), 100) / best)
        branches.append(branches_a_step(run, 50))
    least = 0.97 if kind == "free" else 0.95
    assert median(shares) > least, (shares, branches)
    if world.best_chain(batch) > 0.999 * best:
        assert median(branches) < 0.1, "chains where siblings do not pay"
    elif world.best_chain(batch) < 0.95 * best:
        assert median(branches) > 0.5, "and trees where they do"


@pytest.mark.parametrize("kind", ["free", "model"])
@pytest.mark.parametrize("before, after", [((0.02, 0.02), (0.6, 0.4)), ((0.6, 0.4), (0.02, 0.02))])
def test_when_siblings_begin_or_cease_to_be_right_that_is_noticed(
    kind: str, before: Sequence[float], after: Sequence[float]
) -> None:
    shares, branches = [], []
    for seed in range(3):
        world = World(kind, 0.5, before)
        run = world.simulation(seed)
        run.run([0], 150)
        world.ranks = after
        run.run([0], 100)
        shares.append(run.run([0], 100) / world.best(1))
        branches.append(branches_a_step(run, 250))
    assert median(shares) > (0.96 if kind == "free" else 0.94), (shares, branches)
    assert (median(branches) > 0.5) == (after[0] > 0.5), branches


@pytest.mark.parametrize("kind", ["free", "model"])
def test_what_the_drafter_says_of_siblings_beats_every_fixed_tree(kind: str) -> None:
    world = World(kind, 0.6, (0.5, 0.3), informative=True)
    best, shares, branches = world.best(1), [], []
    for seed in range(3):
        run = world.simulation(seed)
        run.run([0], 60)
        shares.append(run.run([0], 150) / best)
        branches.append(branches_a_step(run, 60))
    assert median(shares) > 1.0, shares
    assert 0.05 < median(branches) < 3.0, "where the first is unsure, and not elsewhere"


@pytest.mark.parametrize("kind", ["free", "model"])
def test_large_batches_get_chains(kind: str) -> None:
    world = World(kind, 0.7, (0.5, 0.3))
    run = world.simulation(0)
    run.run(range(16), 60)
    assert branches_a_step(run, 20) < 0.02 * 16


def test_trying_branches_costs_no_more_than_the_share_for_probes() -> None:
    """In time that was really lost."""
    world = World("model", 0.7, (0.02, 0.02))
    run = world.simulation(0)
    run.stalls = 0.0
    run.run([0], 300)
    wide = [step for step in run.history if step.wide]
    assert 3 <= len(wide) < 0.3 * len(run.history), "tried now and then"
    assert share_lost(wide, run.history, world.best_chain(1)) < 0.02


def test_what_branches_bring_a_new_drafter_is_told_from_whole_drafts() -> None:
    """Few tokens of its first drafts are verified; that is no reason to take branches for worthless."""
    known, new = (AdaptiveController() for _ in range(2))
    wish, tree = Wish(1, 16, "free", {}, 500, {"free": 3}), Offer(1, "free", 6, parents=(-1, 0, 1, -1, 0, 3))
    for controller, drafts in ((known, 100), (new, 0)):
        acceptance = controller.knowledge.acceptance("free")
        acceptance.num_drafts = drafts
        for _ in range(20):
            acceptance.ranks.observe(None, 2, 1)
        controller.observe(StepFacts(2, 0, [1], [], [], 0.01))
        for _ in range(3):
            assert controller.width(wish, 1) == 3
            controller.allot([wish], [tree], 0)
            controller.observe(StepFacts(2, 0, [1], [], [], 0.01))
    gains = [controller.knowledge.branch_gain(1, "free", 1) for controller in (known, new)]
    assert all(gain is not None and gain > 0.2 for gain in gains), gains


def test_a_step_is_one_try_of_branches_however_many_requests_are_in_it() -> None:
    intervals = []
    for batch in (1, 8):
        controller = AdaptiveController()
        controller.observe(StepFacts(2, 0, range(batch), [], [], 0.01))
        wishes = [Wish(request, 4, "free", {}, 500, {"free": 3}) for request in range(batch)]
        offers = [Offer(request, "free", 4, parents=(-1, -1, -1, -1)) for request in range(batch)]
        assert {controller.width(wish, batch) for wish in wishes} == {3}
        controller.allot(wishes, offers, 0)
        intervals.append(controller.knowledge.branch_pace("free").interval)
    assert intervals[0] == intervals[1]


def test_a_width_that_is_not_allowed_is_never_asked_for() -> None:
    """The simulation checks every width that is asked for; here nobody may branch, whatever it would bring."""
    world = World("model", 0.5, (0.6, 0.4))
    world.drafters["model"].ranks = None
    run = world.simulation(0)
    run.run([0], 100)
    assert not branches_a_step(run, 0) and not any(call.num_wide for call in run.calls)
