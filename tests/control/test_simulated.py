"""The promises, in a simulated world whose optimum is known by trying every fixed choice.

The clock is simulated, everything is seeded, so these are statements about decisions and not about this machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import mean, median

import pytest

from outpace.control import AdaptiveController, ControlSettings
from tests.control.simulator import NATIVE, TORCH, Simulation, Step, TrueDrafter, best_rate, share_lost, table

NATIVE_SECONDS, TORCH_SECONDS = table(NATIVE), table(TORCH)
PRIOR = ControlSettings(relative_costs={"model": 0.2})
"""The true one is 0.15: a guess is a guess."""

Drafters = dict[str, TrueDrafter]


def free(chance: Callable[[int, int], float] | float, decay: float = 0.95) -> TrueDrafter:
    return TrueDrafter(chance if callable(chance) else lambda request, position: chance * decay**position)


def model(
    chance: Callable[[int, int], float] | float, cost: float = 0.15, decay: float = 0.95, **more: bool
) -> TrueDrafter:
    return TrueDrafter(
        chance if callable(chance) else lambda request, position: chance * decay**position,
        lambda many: cost * NATIVE_SECONDS(many),
        cost * 0.0014,
        **more,
    )


def rate(steps: list[Step]) -> float:
    return sum(step.expected for step in steps) / sum(step.exact for step in steps)


def total_over_plain(world: Simulation) -> float:
    """Time taken over the time of plain steps for the same tokens."""
    plain = sum(step.tokens / step.requests * world.seconds(step.requests) for step in world.history)
    return world.clock / plain


def stream(world: Simulation, batch: int, num_requests: int, length: int = 64, behind: int = 10) -> list[float]:
    """Serves requests one after another, `batch` at a time. Returns each one's time over that of plain decoding."""
    left: dict[int, int] = {}
    began: dict[int, tuple[float, int]] = {}
    ratios, came = [], 0
    while left or came < num_requests:
        while len(left) < batch and came < num_requests:
            for name in world.drafters:
                world.behind[came, name] = behind
            left[came], began[came] = length, (world.clock, len(world.history))
            came += 1
        world.step(list(left), remaining=max(left.values()))
        for request in list(left):
            left[request] -= world.last_tokens[request]
            if left[request] <= 0:
                since, first = began[request]
                plain = sum(
                    step.tokens / step.requests * world.seconds(step.requests) for step in world.history[first:]
                )
                ratios.append((world.clock - since) / plain)
                del left[request]
                world.controller.release(request)
                for name in world.drafters:
                    del world.behind[request, name]
    return ratios


# It finds the best.


@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("chance", [0.05, 0.6, 0.9])
@pytest.mark.parametrize("which", ["free", "model", "both"])
@pytest.mark.thinned(2)
def test_within_50_steps_the_choice_is_as_good_as_the_best_fixed_one(which: str, chance: float, batch: int) -> None:
    drafters: Drafters = {}
    if which != "model":
        drafters["free"] = free(chance)
    if which != "free":
        drafters["model"] = model(chance if which == "model" else 0.75)
    best = best_rate(NATIVE_SECONDS, range(batch), drafters)
    chosen, overall = [], []
    # Of sixteen alike the unluckiest one holds the others up for a while: `test_floor.py` says how much.
    settings = replace(PRIOR, floor=0.0) if (which, batch, chance) == ("free", 16, 0.9) else PRIOR
    close = which == "both" and (batch, chance) in ((4, 0.05), (4, 0.6), (1, 0.6))
    for seed in range(3 if batch == 16 else 9):
        world = Simulation(AdaptiveController(settings), drafters, NATIVE_SECONDS, seed=seed)
        world.run(range(batch), 120)
        steps = world.history[50:]
        chosen.append(rate([step for step in steps if not step.probe]) / best)
        overall.append(rate(steps) / best)
    # Where the best drafter is little better than the other one or than none, 50 steps are too few to be sure of it.
    middle = mean if close else median
    least = 0.92 if close else 0.955 if batch == 16 else 0.97
    assert middle(chosen) > least, (chosen, overall)
    assert middle(overall) > least - 0.02, (chosen, overall)


@pytest.mark.parametrize("which", ["free", "model", "stopping model"])
@pytest.mark.parametrize("overstated", [False, True])
def test_what_drafters_say_of_their_tokens_is_worth_something(which: str, overstated: bool) -> None:
    """Knowing which tokens will be kept beats every fixed choice, also where it is said in other numbers."""
    say = {"informative": True, "overstated": overstated}
    if which == "free":
        drafters = {"free": TrueDrafter(lambda request, position: 0.5, **say)}
    else:
        drafters = {"model": model(0.7, decay=1.0, stops=which != "model", **say)}
    best = best_rate(NATIVE_SECONDS, [0], drafters)
    rates = []
    for seed in range(3):
        world = Simulation(AdaptiveController(PRIOR), drafters, NATIVE_SECONDS, seed=seed)
        world.run([0], 60)
        rates.append(world.run([0], 200) / best)
    assert median(rates) > (0.98 if which == "model" else 1.0), rates


@pytest.mark.parametrize("batch", [1, 4])
def test_costs_that_are_nothing_like_the_guess_are_found(batch: int) -> None:
    """Two rows take nearly twice as long as one: short drafts never pay, and long ones do."""
    drafters = {"free": free(0.92, decay=1.0)}
    best = best_rate(TORCH_SECONDS, range(batch), drafters)
    rates = []
    for seed in range(5):
        world = Simulation(AdaptiveController(), drafters, TORCH_SECONDS, seed=seed)
        world.run(range(batch), 60)
        rates.append(world.run(range(batch), 100) / best)
    assert median(rates) > 0.94, rates


# It changes its mind.


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("before, after", [(0.03, 0.85), (0.85, 0.03)])
def test_when_acceptance_flips_it_is_as_good_as_before_within_100_steps(
    before: float, after: float, batch: int
) -> None:
    now = {"chance": before}
    drafters = {"free": free(lambda request, position: now["chance"])}
    rates = []
    for seed in range(3):
        now["chance"] = before
        world = Simulation(AdaptiveController(), drafters, NATIVE_SECONDS, seed=seed)
        world.run(range(batch), 200)
        now["chance"] = after
        world.run(range(batch), 100)
        rates.append(world.run(range(batch), 60) / best_rate(NATIVE_SECONDS, range(batch), drafters))
    assert median(rates) > 0.96, rates


def test_a_drafter_that_computes_comes_back_with_the_next_requests() -> None:
    now = {"chance": 0.03}
    drafters = {"model": model(lambda request, position: now["chance"])}
    world = Simulation(AdaptiveController(PRIOR), drafters, NATIVE_SECONDS)
    stream(world, 1, 5)
    now["chance"] = 0.9
    stream(world, 1, 5)
    begin = len(world.history)
    stream(world, 1, 5)
    assert rate(world.history[begin:]) > 0.9 * best_rate(NATIVE_SECONDS, [0], drafters)


@pytest.mark.parametrize("sizes", [(1, 16), (16, 1)])
def test_when_the_batch_changes_so_does_the_choice(sizes: tuple[int, int]) -> None:
    drafters = {"free": free(0.8, decay=1.0)}
    for seed in range(2):
        world = Simulation(AdaptiveController(), drafters, NATIVE_SECONDS, seed=seed)
        world.run(range(sizes[0]), 100)
        world.run(range(100, 100 + sizes[1]), 60)
        best = best_rate(NATIVE_SECONDS, range(sizes[1]), drafters)
        assert world.run(range(100, 100 + sizes[1]), 60) > 0.95 * best


def test_a_busy_core_changes_no_choice() -> None:
    slow = {"factor": 1.0}
    drafters = {"free": free(0.8)}
    world = Simulation(AdaptiveController(), drafters, lambda rows: slow["factor"] * NATIVE_SECONDS(rows))
    world.run([0], 100)
    slow["factor"] = 2.0
    assert world.run([0], 60) > 0.95 * best_rate(world.seconds, [0], drafters)


def test_costs_that_change_their_shape_are_noticed() -> None:
    """Another program takes the arithmetic: a row more suddenly costs as much as the first."""
    linear = {"now": False}
    drafters = {"free": free(0.6)}
    world = Simulation(
        AdaptiveController(), drafters, lambda rows: 0.01 * rows if linear["now"] else NATIVE_SECONDS(rows), stalls=0.0
    )
    world.run([0], 150)
    linear["now"] = True
    world.run([0], 150)
    assert world.run([0], 100) > 0.95 * best_rate(world.seconds, [0], drafters)


# It is never much slower.

USELESS: dict[str, tuple[Drafters, ControlSettings]] = {
    "free": ({"free": free(0.02)}, ControlSettings()),
    "model": ({"model": model(0.02)}, PRIOR),
    "free and model": ({"free": free(0.02), "model": model(0.02)}, PRIOR),
    "slow model": ({"model": model(0.9, cost=10.0)}, ControlSettings(relative_costs={"model": 10.0})),
    "model that is slower than it looks": ({"model": model(0.9, cost=2.0)}, PRIOR),
    "sure of what is wrong": (
        {"free": TrueDrafter(lambda request, position: 0.02, informative=True, overstated=True)},
        ControlSettings(),
    ),
}


@pytest.mark.parametrize("name", USELESS)
@pytest.mark.parametrize("batch", [1, 8, 32])
def test_useless_drafters_cost_next_to_nothing(name: str, batch: int) -> None:
    drafters, settings = USELESS[name]
    world = Simulation(AdaptiveController(settings), drafters, NATIVE_SECONDS, stalls=0.001)
    ratios = stream(world, batch, max(20, 2 * batch))
    assert median(ratios) < 1.03
    assert total_over_plain(world) < 1.03


def test_a_slow_drafter_of_which_nothing_is_known_is_called_once() -> None:
    world = Simulation(AdaptiveController(), {"model": model(0.9, cost=10.0)}, NATIVE_SECONDS)
    ratios = stream(world, 1, 20, length=100)
    assert median(ratios) < 1.01
    assert total_over_plain(world) < 1.03
    asked = [step for step in world.history if step.exact > 5 * NATIVE_SECONDS(1)]
    assert 1 <= len(asked) <= 2


def test_prompts_that_are_long_are_not_caught_up_with_for_nothing() -> None:
    world = Simulation(AdaptiveController(PRIOR), {"model": model(0.02)}, NATIVE_SECONDS, stalls=0.0)
    ratios = stream(world, 1, 40, behind=300)
    assert median(ratios) < 1.01
    assert sum(ratios[3:]) / len(ratios[3:]) < 1.03


def test_few_requests_that_can_be_guessed_gain_and_the_others_do_not_pay() -> None:
    drafters = {"free": free(lambda request, position: 0.9 if request % 10 >= 7 else 0.02)}
    world = Simulation(AdaptiveController(), drafters, NATIVE_SECONDS)
    ratios = stream(world, 1, 40)
    assert median(ratios) < 1.03
    good = [ratio for request, ratio in enumerate(ratios) if request % 10 >= 7]
    assert median(good) < 0.7


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("chance", [0.02, 0.9])
def test_what_is_tried_costs_no_more_than_its_share(chance: float, batch: int) -> None:
    """In time that was really lost, not by what the controller supposes."""
    drafters = {"free": free(chance), "model": model(0.5)}
    world = Simulation(AdaptiveController(PRIOR), drafters, NATIVE_SECONDS, stalls=0.0)
    world.run(range(batch), 300)
    probes = [step for step in world.history if step.probe]
    assert probes and share_lost(probes, world.history, best_rate(NATIVE_SECONDS, range(batch), drafters)) < 0.02
    report = world.controller.report()
    assert 0.0 < report.probing_seconds < 0.02 * report.seconds


def test_prompts_and_plain_requests_beside_it_are_no_trouble() -> None:
    drafters = {"free": free(0.9), "model": model(0.75)}
    world = Simulation(AdaptiveController(PRIOR), drafters, NATIVE_SECONDS)
    for step in range(120):
        world.step(range(2), prompt_rows=200 if step % 3 == 0 else 0, plain=step % 2)
    alone = [step for step in world.history[60:] if step.requests == 2 and step.exact < 0.05 and not step.probe]
    assert rate(alone) > 0.93 * best_rate(NATIVE_SECONDS, range(2), drafters)
