"""The error bounds that `choose_rows` relies on hold, with room to spare."""

from __future__ import annotations

import math

import numpy as np
import pytest

from outpace.sampling import choose, race
from outpace.sampling.noise import MAX_GUMBEL, gumbel, noise_key
from outpace.sampling.race import RowContext, Tokens
from outpace.types import Purpose

BIT = 2.0**23  # screening scores are counted in 2**-23 bits
SIZE = 3000


def context(values: np.ndarray, temperature: float, position: int) -> RowContext:
    return RowContext(float(values.max()), temperature, noise_key(3, 0, position, Purpose.CHOOSE))


@pytest.mark.parametrize("offset", [0.0, -1e4, 1e6])
@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 0.3, 1.0, 50.0])
def test_screening_scores_bound_the_scores_from_above(temperature: float, offset: float) -> None:
    rng = np.random.default_rng(1)
    values = (rng.uniform(-45, 0, SIZE) * temperature + offset).astype(np.float32)
    row = context(values, temperature, position=8)
    for ids in (None, np.sort(rng.choice(100_000, SIZE, replace=False))):
        tokens = Tokens(ids, values)
        screen = race._screening_scores(tokens, row).astype(np.float64) / BIT
        for index in range(SIZE):
            scaled = row.scaled(float(values[index]))
            noise = gumbel(row.key, tokens.id_at(index))
            if scaled >= -41:
                above = screen[index] - (scaled + noise) / math.log(2)
                assert above > -1e-4  # a tenth of the margin
                # v is at most log2(E / v) below E, and the bits of a float are at most 0.0861 below its logarithm.
                assert above < 0.0862 + 1e-4 + math.log2(math.exp(-noise) / -math.expm1(-math.exp(-noise)))


def test_no_token_that_far_behind_can_win() -> None:
    # The best token's noise is at least -log(53 log 2); what is 41 behind cannot make that up.
    assert -math.log(53 * math.log(2)) > MAX_GUMBEL - 41


@pytest.mark.parametrize("depth", [0.0, -1.0, -12.0, -14.0, -30.0])
@pytest.mark.parametrize("temperature", [1e-6, 0.7, 1.0])
def test_masses_are_off_by_less_than_their_margin(depth: float, temperature: float) -> None:
    rng = np.random.default_rng(2)
    values = ((rng.uniform(-1, 0, 300_000) + depth) * temperature + 20).astype(np.float32)
    values[1234] = 20
    row = context(values, temperature, position=0)
    weights = choose._weights(values, row)
    exact = np.exp((values.astype(np.float64) - row.best) / temperature)
    half = rng.random(values.size) < 0.5
    assert abs(float(weights.sum()) / exact.sum() - 1) < choose._MASS_MARGIN / 4
    assert abs(float((weights * half).sum()) - (exact * half).sum()) < choose._MASS_MARGIN / 4 * exact.sum()


@pytest.mark.parametrize("top_p", [0.999, 0.9, 0.5])
def test_what_is_dropped_before_the_race_is_outside_the_nucleus(top_p: float) -> None:
    rng = np.random.default_rng(4)
    shrunk = 0
    for spread in (1, 3, 6, 12):
        values = (rng.standard_normal(5000) * spread).astype(np.float32)
        row = context(values, 1.0, position=0)
        weights = choose._weights(values, row)
        total = float(weights.sum())
        tokens, kept = choose._shrink_to_nucleus(Tokens(None, values), weights, total, top_p, row)
        exact = np.exp(values.astype(np.float64) - row.best)
        assert kept.size == tokens.values.size
        assert exact[values >= tokens.values.min()].sum() >= top_p * exact.sum()
        shrunk += tokens.values.size < 2500
    assert shrunk >= 2
