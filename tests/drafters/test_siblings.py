"""The best tokens of a row of logits: the draft model's own choice first, then those that would win without it."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from outpace.drafters.siblings import siblings
from outpace.params import SamplingDefaults, SamplingParams
from outpace.sampling.choose import choose_rows
from outpace.sampling.noise import gumbel, key_of
from outpace.sampling.reference import survivors
from outpace.types import Choice

GREEDY = SamplingParams(temperature=0.0).resolved(SamplingDefaults())
LAWS = [
    SamplingParams(**settings).resolved(SamplingDefaults())
    for settings in (
        {"temperature": 1.0},
        {"temperature": 1e300, "top_p": 0.9},
        {"temperature": 0.6, "top_p": 0.9},
        {"temperature": 1.5, "top_k": 5},
        {"temperature": 1.2, "top_k": 12, "top_p": 0.8},
        {"temperature": 0.9, "min_p": 0.05},
    )
]


class NoToken:
    """Rules that allow only some tokens."""

    def __init__(self, allowed: set[int]) -> None:
        self.allowed = allowed

    def __call__(self, logits: np.ndarray, path: object) -> np.ndarray:
        return np.array([z if token in self.allowed else -np.inf for token, z in enumerate(logits)], np.float32)


def test_greedily_they_are_the_largest_logits_with_the_models_own_probabilities() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 3.0, -1.0])
    found = siblings(logits, Choice(GREEDY, 0, 7), 3)
    assert [each.token for each in found] == [1, 3, 2]
    assert [each.chance for each in found] == pytest.approx(logits.softmax(0)[[1, 3, 2]].tolist(), rel=1e-6)


@pytest.mark.parametrize("params", LAWS)
def test_sampled_they_are_the_best_in_the_race_that_the_target_will_run(params: SamplingParams) -> None:
    """Against the race over all tokens that the filters leave."""
    generator = torch.Generator().manual_seed(4)
    for position in range(60):
        logits = torch.randn(40, generator=generator) * 2
        choice = Choice(params, 5, position)
        kept = survivors(logits.tolist(), params)
        scores = {token: s + gumbel(key_of(choice), token) for token, s in kept.items()}
        best = sorted(scores, key=lambda token: -scores[token])[:3]
        found = siblings(logits, choice, 3)
        assert [found[0].token] == best[:1] == choose_rows(logits[None], [choice])
        likely = sorted(range(40), key=lambda token: -float(logits[token]))[:24]
        if set(best) <= set(likely):
            assert [each.token for each in found] == best
        chances = [each.chance for each in found]
        assert chances == sorted(chances, reverse=True) and 0 < sum(chances) < 1 + 1e-9


def test_next_to_no_temperature_is_none() -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(2))
    cold = replace(LAWS[1], temperature=5e-324)
    assert siblings(logits, Choice(cold, 5, 3), 3) == siblings(logits, Choice(GREEDY, 5, 3), 3)


def test_chances_say_how_far_the_race_is_decided() -> None:
    close, clear = torch.zeros(30), torch.zeros(30)
    clear[4] = 30.0
    choice = Choice(LAWS[0], 1, 2)
    assert siblings(clear, choice, 2)[0].chance > 0.999
    first, second = siblings(close, choice, 2)
    assert first.chance < 0.9 and second.chance > 0.05
    ratio = math.exp(gumbel(key_of(choice), first.token) - gumbel(key_of(choice), second.token))
    assert first.chance / second.chance == pytest.approx(ratio, rel=1e-6)


@pytest.mark.parametrize("params", [GREEDY, *LAWS])
def test_rules_leave_fewer_and_what_is_no_number_leaves_none(params: SamplingParams) -> None:
    logits, source = torch.randn(40, generator=torch.Generator().manual_seed(1)), random.Random(2)
    for _ in range(20):
        allowed = set(source.sample(range(40), source.randint(1, 3)))
        found = siblings(logits, replace(Choice(params, 3, 9), rules=NoToken(allowed)), 4)
        assert 1 <= len(found) <= len(allowed) and {each.token for each in found} <= allowed
    for value in (float("nan"), float("inf")):
        broken = logits.clone()
        broken[3] = value
        assert siblings(broken, Choice(params, 3, 9), 4) == []
    assert siblings(torch.full((40,), -torch.inf), Choice(params, 3, 9), 4) == []
