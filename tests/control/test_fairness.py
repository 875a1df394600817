"""What a token is worth, and that those who gain nothing are not slowed down for one that gains much."""

from __future__ import annotations

import pytest

from outpace.control.allocation import allocate
from outpace.control.controller import AdaptiveController
from outpace.control.fairness import token_values
from outpace.control.knowledge import ControlSettings
from outpace.control.requests import Requests
from tests.control.simulator import NATIVE, Simulation, TrueDrafter, table


def requests_with(**steps_and_tokens: tuple[int, int]) -> Requests:
    requests = Requests()
    for number, (steps, tokens) in enumerate(steps_and_tokens.values()):
        requests[number].num_steps, requests[number].num_tokens = steps, tokens
    return requests


def test_a_token_is_worth_less_to_those_that_get_many() -> None:
    """8 plain steps count in advance: 16 of 40 tokens and 16 of 16 are worth 2/5 and 1; the third has no wish."""
    requests = requests_with(fast=(8, 32), slow=(8, 8))
    assert token_values(requests, [0, 1], 3) == pytest.approx([3 * 0.4 / 2.4, 3 * 1.0 / 2.4])


def test_alone_or_unknown_all_tokens_count_the_same() -> None:
    requests = requests_with(fast=(8, 32))
    assert token_values(requests, [0], 1) is None
    assert token_values(requests, [], 4) is None
    assert token_values(requests, [7, 8], 2) == [1.0, 1.0]
    assert token_values(requests_with(a=(8, 32), b=(8, 32)), [0, 1], 2) == pytest.approx([1.0, 1.0])


def test_the_more_valuable_token_is_verified_first() -> None:
    """The better draft belongs to the request whose tokens count half as much."""
    plan = allocate([[0.9], [0.5]], [1.0, 1.15, 1.5], decoding=2, values=[0.66, 1.34])
    assert plan.counts == [0, 1]
    assert plan.tokens == pytest.approx(2 + 0.5 * 1.34)
    assert allocate([[0.9], [0.5]], [1.0, 1.15, 1.5], decoding=2).counts == [1, 0]


def slowed_and_sped(values: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[float, float, float]:
    """Rates over plain decoding of three requests that nobody can guess, of one that all can, and of all in sum."""
    if not values:
        monkeypatch.setattr("outpace.control.choosing.token_values", lambda *_: None)
    drafter = TrueDrafter(lambda request, _: 0.97 if request == 0 else 0.02, informative=False)
    seconds = table(NATIVE)
    world = Simulation(
        AdaptiveController(ControlSettings(floor=0.0)), {"free": drafter}, seconds, most=8, noise=0.02, stalls=0.0
    )
    world.run(range(4), 60)
    begin, tokens = world.clock, 0
    for _ in range(200):
        world.step(range(4))
        tokens += world.last_tokens[0]
    stretch = (world.clock - begin) / (200 * seconds(4))
    return 1 / stretch, tokens / 200 / stretch, (3 * 200 + tokens) / 800 / stretch


def test_those_who_gain_nothing_pay_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """The product of all rates rises, which is what proportional fairness means; the sum of tokens pays for it."""
    others, fast, total = slowed_and_sped(True, monkeypatch)
    others_without, fast_without, total_without = slowed_and_sped(False, monkeypatch)
    assert others > 0.8 > 0.7 > others_without
    assert others**3 * fast > 1.15 * others_without**3 * fast_without
    assert 1.1 < total < total_without
