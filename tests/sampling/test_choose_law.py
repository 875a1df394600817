"""Chosen tokens follow the filtered law exactly, and the law is what it is said to be."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from outpace.params import SamplingParams
from outpace.sampling.choose import choose_rows
from outpace.sampling.reference import filtered_law
from outpace.types import Choice

from .chi_square import ALPHA, chi_square_p


def params(temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> SamplingParams:
    return SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)


LAWS = [
    params(),
    params(0.5),
    params(1.7),
    params(top_k=4),
    params(top_p=0.8),
    params(top_p=0.3),
    params(min_p=0.1),
    params(0.7, 0.9, 6),
    params(1.3, 0.85, 0, 0.05),
    params(0.9, 0.95, 7, 0.02),
]


def logits_of(size: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(size).astype(np.float32) * 2)


def law_p(row: torch.Tensor, kind: SamplingParams, choices: list[Choice]) -> float:
    """How well one row's tokens over many keys fit the exact law."""
    tokens = choose_rows(row.expand(len(choices), -1), choices)
    law = filtered_law(row.tolist(), kind)
    counts = np.bincount(tokens, minlength=row.numel()).tolist()
    return chi_square_p(counts, [law.get(token, 0.0) for token in range(row.numel())])


@pytest.mark.parametrize("kind", LAWS)
def test_tokens_follow_the_law_over_positions(kind: SamplingParams) -> None:
    assert law_p(logits_of(14, 0), kind, [Choice(kind, 7, position) for position in range(2500)]) > ALPHA


@pytest.mark.parametrize("kind", LAWS[::3])
def test_tokens_follow_the_law_over_seeds_and_numbers(kind: SamplingParams) -> None:
    assert law_p(logits_of(14, 1), kind, [Choice(kind, seed, 33) for seed in range(-1250, 1250)]) > ALPHA
    assert law_p(logits_of(14, 2), kind, [Choice(kind, 5, 33, number) for number in range(2500)]) > ALPHA


@pytest.mark.parametrize("kind", [params(), params(top_p=0.9), params(1.5, min_p=1e-3)])
def test_tokens_follow_the_law_in_a_large_vocabulary(kind: SamplingParams) -> None:
    row = logits_of(20_000, 3)
    row[:3] += 12
    law = filtered_law(row.tolist(), kind)
    tokens = choose_rows(row.expand(4000, -1), [Choice(kind, 2, position) for position in range(4000)])
    order = sorted(range(row.numel()), key=lambda token: -row[token].item())
    cell = np.empty(row.numel(), dtype=np.int64)
    for place, token in enumerate(order):  # the best alone, then ever larger groups
        cell[token] = int(math.log2(place + 1) * 2)
    chances = [math.fsum(law.get(token, 0.0) for token in np.flatnonzero(cell == c)) for c in range(cell.max() + 1)]
    counts = np.bincount(cell[tokens], minlength=len(chances)).tolist()
    assert chi_square_p(counts, chances) > ALPHA


def test_a_rare_token_is_as_likely_as_it_should_be() -> None:
    # 4,000 tokens of probability 1e-7 each: chosen together 4e-4 of the time, so 12 times in 30,000.
    row = torch.full((4001,), math.log(1e-7))
    row[0] = math.log(1 - 4e-4)
    tokens = choose_rows(row.expand(30_000, -1), [Choice(params(), 11, position) for position in range(30_000)])
    assert 2 <= sum(token > 0 for token in tokens) <= 30


def test_two_positions_are_independent() -> None:
    row = logits_of(5, 4)
    tokens = choose_rows(row.expand(8000, -1), [Choice(params(), 1, position) for position in range(8000)])
    law = filtered_law(row.tolist(), params())
    pairs = np.bincount([a * 5 + b for a, b in zip(tokens[::2], tokens[1::2], strict=True)], minlength=25).tolist()
    assert chi_square_p(pairs, [law[a] * law[b] for a in range(5) for b in range(5)]) > ALPHA


def test_noise_without_position_is_caught() -> None:
    """The mutant: every position of a request uses the same noise. The law test above must see it."""
    row, kind = logits_of(14, 0), LAWS[0]
    mutants = [replace(Choice(kind, 7, position), position=0) for position in range(4000)]
    assert law_p(row, kind, mutants) < ALPHA


def test_a_wrong_law_is_caught() -> None:
    """The mutant: temperature 1.15 taken for 1. The sample is large enough to tell."""
    row = logits_of(14, 0)
    hot = params(1.15)
    tokens = choose_rows(row.expand(4000, -1), [Choice(hot, 7, position) for position in range(4000)])
    law = filtered_law(row.tolist(), params())
    assert chi_square_p(np.bincount(tokens, minlength=14).tolist(), [law[t] for t in range(14)]) < ALPHA


HALF, QUARTER, EIGHTH = math.log(0.5), math.log(0.25), math.log(0.125)


@pytest.mark.parametrize(
    ("kind", "law"),
    [
        (params(), {0: 0.5, 1: 0.25, 2: 0.125, 3: 0.125}),
        (params(0.5), {0: 16 / 22, 1: 4 / 22, 2: 1 / 22, 3: 1 / 22}),
        (params(top_k=3), {0: 4 / 7, 1: 2 / 7, 2: 1 / 7}),
        (params(top_k=2), {0: 2 / 3, 1: 1 / 3}),
        (params(top_p=0.7), {0: 2 / 3, 1: 1 / 3}),
        (params(top_p=0.76), {0: 4 / 7, 1: 2 / 7, 2: 1 / 7}),
        (params(top_p=0.49), {0: 1.0}),
        (params(min_p=0.3), {0: 2 / 3, 1: 1 / 3}),
        (params(min_p=0.2), {0: 0.5, 1: 0.25, 2: 0.125, 3: 0.125}),
        (params(top_k=2, top_p=0.6), {0: 1.0}),  # 2/3 of what top_k left
        (params(0.5, top_p=0.8), {0: 0.8, 1: 0.2}),  # 16/22 falls short, 20/22 does not
        (params(top_k=3, min_p=0.3), {0: 2 / 3, 1: 1 / 3}),
    ],
)
def test_law_of_a_table(kind: SamplingParams, law: dict[int, float]) -> None:
    found = filtered_law([HALF, QUARTER, EIGHTH, EIGHTH, -math.inf], kind)
    assert found.keys() == law.keys()
    for token, chance in law.items():
        assert found[token] == pytest.approx(chance, abs=1e-12)


def law_from_probabilities(logits: np.ndarray, kind: SamplingParams) -> np.ndarray:
    """The same law another way: a softmax first, then filters that renormalise probabilities, one after the other."""
    assert kind.temperature is not None and kind.top_k is not None and kind.top_p is not None
    p = np.exp(logits / kind.temperature - np.logaddexp.reduce(logits / kind.temperature))
    p = np.where(p >= kind.min_p * p.max(), p, 0)
    order = np.argsort(-p, kind="stable")
    if kind.top_k > 0:
        p[order[kind.top_k :]] = 0
    p /= p.sum()
    short = np.cumsum(p[order]) < kind.top_p
    if kind.top_p < 1:
        p[order[short.sum() + 1 :]] = 0
    return np.asarray(p / p.sum())


@pytest.mark.parametrize("kind", LAWS)
def test_law_agrees_with_an_independent_computation(kind: SamplingParams) -> None:
    for seed in range(60):
        logits = np.random.default_rng(seed).standard_normal(30) * 3
        found = filtered_law(logits.tolist(), kind)
        expected = law_from_probabilities(logits, kind)
        assert np.abs(expected - [found.get(token, 0.0) for token in range(30)]).max() < 1e-12
