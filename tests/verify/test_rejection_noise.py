"""The rules with real noise: sampled text follows the target's law, and noise that is used twice is caught."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch

from outpace.sampling.choose import NO_TOKEN
from outpace.sampling.noise import noise_key, uniform
from outpace.types import Draft, Purpose
from outpace.verify import block, standard
from outpace.verify.noise import StepNoise
from tests.sampling.chi_square import ALPHA, chi_square_p

from .branching import Rule
from .toy import Table, chain, constant, plain, table, text_law

V = 3
LENGTH = 4
NUM_TEXTS = 1500
HISTORY_TARGET, HISTORY_DRAFTER = table(V, 15, (1, 4, 20)), table(V, 16, (1, 4, 20))
CONSTANT_TARGET, CONSTANT_DRAFTER = constant("0.5", "0.3", "0.2"), constant("0.9", "0.05", "0.05")
Noise = Callable[[int, int, int], StepNoise]


@cache
def law_of(source: Table, history: tuple[int, ...]) -> np.ndarray:
    return np.array([float(chance) for chance in source(history)])


@dataclass(frozen=True)
class Engine:
    """Decodes with drafts whose tokens are drawn with the step's own noise, siblings without replacement."""

    rule: Rule
    shape: tuple[int, ...]
    target: Table
    drafter: Table
    noise: Noise = StepNoise
    point_masses: bool = False

    def text(self, seed: int) -> tuple[int, ...]:
        tokens: tuple[int, ...] = ()
        while len(tokens) < LENGTH:
            draft, histories = self.draft(tokens, seed)
            laws = np.stack([law_of(self.target, history) for history in histories])
            verdict = self.rule(draft, laws, self.noise(seed, 0, len(tokens)))
            tokens += (*(draft.ids[node] for node in verdict.accepted), verdict.bonus)
        return tokens[:LENGTH]

    def draft(self, tokens: tuple[int, ...], seed: int) -> tuple[Draft, list[tuple[int, ...]]]:
        ids: list[int] = []
        rows: list[np.ndarray] = []
        histories = [tokens]
        for node, parent in enumerate(self.shape):
            past = histories[1 + parent]
            rows.append(law_of(self.drafter, past))
            left = rows[-1].copy()
            left[[ids[i] for i in range(node) if self.shape[i] == parent]] = 0
            sharing = sum(len(history) == len(past) + 1 for history in histories)  # nodes at the same position
            noise = StepNoise(seed, sharing, len(tokens))
            ids.append(noise.draw(left, len(past) - len(tokens), Purpose.DRAFT))
            histories.append((*past, ids[-1]))
        probabilities = None if self.point_masses or not rows else torch.from_numpy(np.stack(rows))
        return Draft(tuple(ids), self.shape, ("toy",) * len(ids), probabilities), histories

    def fit(self, num_texts: int) -> float:
        """The p-value of the texts of so many seeds under the target's law."""
        found = Counter(self.text(seed) for seed in range(num_texts))
        law = text_law(plain(self.target), LENGTH)
        texts = list(itertools.product(range(V), repeat=LENGTH))
        return chi_square_p([found[text] for text in texts], [float(law.get(text, 0)) for text in texts])


RULES = {"standard": standard.verify, "block": block.verify}
KINDS = {"constant": (CONSTANT_TARGET, CONSTANT_DRAFTER), "history": (HISTORY_TARGET, HISTORY_DRAFTER)}


@pytest.mark.parametrize(("target", "drafter"), KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("k", [0, 1, 2, 3])
@pytest.mark.parametrize("name", RULES)
@pytest.mark.thinned(3)
def test_text_follows_the_law(name: str, k: int, target: Table, drafter: Table) -> None:
    assert Engine(RULES[name], chain(k), target, drafter).fit(NUM_TEXTS) > ALPHA


@pytest.mark.parametrize("name", RULES)
def test_text_follows_the_law_with_point_masses(name: str) -> None:
    assert Engine(RULES[name], chain(3), HISTORY_TARGET, HISTORY_DRAFTER, point_masses=True).fit(NUM_TEXTS) > ALPHA


@pytest.mark.parametrize("shape", [(-1, -1), (-1, -1, 0, 1)])
def test_text_follows_the_law_with_trees(shape: tuple[int, ...]) -> None:
    assert Engine(standard.verify, shape, HISTORY_TARGET, HISTORY_DRAFTER).fit(NUM_TEXTS) > ALPHA


class WithoutOrigin(StepNoise):
    """The mutant: a position has the same noise whichever step looks at it."""

    def _uniform(self, depth: int, purpose: Purpose, token: int) -> float:
        return uniform(noise_key(self.seed, self.number, self.origin + depth, purpose), token)


class OneForAll(StepNoise):
    """The mutant: accepting, the residual and the bonus share their noise."""

    def _uniform(self, depth: int, purpose: Purpose, token: int) -> float:
        key = noise_key(self.seed, self.number, self.origin + depth, Purpose.ACCEPT, self.origin)
        return uniform(key, 0)


def test_block_with_noise_that_later_steps_see_again_is_caught() -> None:
    """It looks at noise behind the end of what it accepts, so that noise is not fresh any more."""
    assert Engine(block.verify, chain(2), CONSTANT_TARGET, CONSTANT_DRAFTER, noise=WithoutOrigin).fit(NUM_TEXTS) < ALPHA


@pytest.mark.parametrize("name", RULES)
def test_noise_shared_between_purposes_is_caught(name: str) -> None:
    assert Engine(RULES[name], chain(1), CONSTANT_TARGET, CONSTANT_DRAFTER, noise=OneForAll).fit(NUM_TEXTS) < ALPHA


@pytest.mark.parametrize("name", RULES)
def test_a_step_asked_again_decides_the_same(name: str) -> None:
    engine = Engine(RULES[name], chain(3), HISTORY_TARGET, HISTORY_DRAFTER)
    texts = [engine.text(seed) for seed in range(50)]
    assert [engine.text(seed) for seed in range(50)] == texts
    assert len(set(texts)) > 10


def test_a_token_is_accepted_by_its_own_noise_at_its_position() -> None:
    for seed, number, origin, depth, token in itertools.product((0, -5), (0, 1), (7, 8), (0, 2), (0, 150_000)):
        noise = StepNoise(seed, number, origin)
        own = uniform(noise_key(seed, number, origin + depth, Purpose.ACCEPT, origin), token)
        assert noise.accepts(own * (1 + 1e-9), depth, token)
        assert not noise.accepts(own, depth, token)  # strictly less
        assert not noise.accepts(0.0, depth, token)
        assert noise.accepts(1.0, depth, token)


@pytest.mark.parametrize("purpose", [Purpose.BONUS, Purpose.RESIDUAL])
def test_draws_follow_weights(purpose: Purpose) -> None:
    weights = np.array([0.0, 3.0, 0.0, 1.0, 4.0, 0.0])
    counts = np.bincount([StepNoise(seed, 0, 5).draw(weights, 1, purpose) for seed in range(4000)], minlength=6)
    assert chi_square_p(counts.tolist(), (weights / 8).tolist()) > ALPHA


def test_draws_in_a_large_vocabulary() -> None:
    weights = np.random.default_rng(0).random(150_000) ** 8
    weights[::3] = 0
    cells = np.arange(weights.size) * 20 // weights.size
    drawn = [StepNoise(seed, 0, 5).draw(weights, 0, Purpose.BONUS) for seed in range(400)]
    assert weights[drawn].min() > 0
    law = np.bincount(cells, weights) / weights.sum()
    assert chi_square_p(np.bincount(cells[drawn], minlength=20).tolist(), law.tolist()) > ALPHA


def test_draws_at_the_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = StepNoise(1, 0, 0)
    assert noise.draw(np.zeros(4), 0, Purpose.BONUS) == NO_TOKEN
    assert noise.draw(np.array([0, 0, 1e-300, 0]), 0, Purpose.BONUS) == 2
    weights = np.array([0.0, 0.1, 0.2, 0.0, 0.7, 0.0])
    for value, token in ((2.0**-53, 1), (0.1, 2), (1 - 2.0**-53, 4)):
        monkeypatch.setattr(StepNoise, "_uniform", lambda *_, value=value: value)
        assert noise.draw(weights, 0, Purpose.BONUS) == token
