"""The noise never changes, and nothing about it can be told from coin flips."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest

from outpace.sampling import noise
from outpace.sampling.noise import MAX_GUMBEL, NoiseKey, gumbel, high_bits, noise_bits, noise_key
from outpace.types import Purpose

from .chi_square import ALPHA, chi_square_p

IDS = 50_000
SEEDS = (-(2**63), -2, -1, 0, 1, 2, 3, 2**31, 2**32, 2**63, 2**64 - 2, 2**64 - 1)


def key(seed: int = 0, position: int = 0, number: int = 0) -> NoiseKey:
    return noise_key(seed, number, position, Purpose.CHOOSE)


def uniform_p(values: np.ndarray, cells: int) -> float:
    counts = np.bincount(values, minlength=cells).tolist()
    return chi_square_p(counts, [1 / cells] * cells)


@pytest.mark.parametrize(
    ("fields", "bits"),
    [
        ((0, 0, 0), [0x83094D169AD36, 0xE5323B52A5D1F, 0xD0930AE1A8A9C]),
        ((1, 0, 7), [0x457603B79EFDA, 0xF68C7E2823CFB, 0xD61D9E41D15E0]),
        ((-1, 0, 7), [0x2919E634C1BF7, 0x54D9CA7382D65, 0x915A1A7309141]),
        ((2**64 - 1, 3, 100_000), [0x2EA4B5B6EA767, 0x1D2CE0B4A034A, 0xED0C7CEC24EC8]),
    ],
)
def test_stream_is_pinned(fields: tuple[int, int, int], bits: list[int]) -> None:
    pinned = noise_key(*fields, Purpose.CHOOSE)
    assert [noise_bits(pinned, token) for token in (0, 1, 151_935)] == bits


def test_gumbel_is_pinned() -> None:
    assert gumbel(key(), 1) == pytest.approx(-0.8138745157881782, rel=1e-14)
    v = (noise_bits(key(5, 6, 7), 8) + 0.5) / 2**52
    assert gumbel(key(5, 6, 7), 8) == pytest.approx(-math.log(-math.log(1 - v)), rel=1e-9)


def test_numpy_and_python_hash_to_the_same_bits() -> None:
    for seed in SEEDS:
        k = key(seed, position=seed % 1000)
        ids = np.array([0, 1, 2, 127, 4095, 65_535, 65_536, 151_935, 262_143])
        expected = [noise_bits(k, int(token)) >> 20 for token in ids]
        assert high_bits(k, ids).tolist() == expected
        assert high_bits(k, 262_144)[ids].tolist() == expected


def test_given_memory_is_used_and_holds_the_result() -> None:
    out, work = np.full(300, 7, np.uint32), np.full(300, 9, np.uint32)
    assert high_bits(key(), 300, out=out, work=work) is out
    assert out.tolist() == high_bits(key(), 300).tolist()
    ids = np.arange(299, -1, -1)
    assert high_bits(key(), ids, out=out, work=work).tolist() == high_bits(key(), 300)[::-1].tolist()


@pytest.mark.parametrize("bits", [0, 2**52 - 1])
def test_noise_is_finite_and_bounded(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "noise_bits", lambda key, token: bits)
    assert gumbel(key(), 0) == pytest.approx(MAX_GUMBEL if bits == 0 else -math.log(53 * math.log(2)), rel=1e-12)


def test_fields_do_not_run_together() -> None:
    keys = {noise_key(s, n, p, Purpose.CHOOSE) for s in (-1, 1, 11, 2**64 - 1) for n in (0, 1, 11) for p in (0, 1, 11)}
    assert len(keys) == 36


@pytest.mark.parametrize("seed", SEEDS)
def test_bits_are_uniform_over_ids(seed: int) -> None:
    high = high_bits(key(seed, position=17), IDS)
    for shift in (0, 8, 16, 24):
        assert uniform_p((high >> np.uint32(shift)) & np.uint32(255), 256) > ALPHA
    low = np.array([noise_bits(key(seed), token) & 0xFFFFF for token in range(4000)])
    assert uniform_p(low & 255, 256) > ALPHA
    assert uniform_p(low >> 12, 256) > ALPHA


@pytest.mark.parametrize("shift", [0, 4, 12, 20, 28])
def test_one_token_is_uniform_over_positions_seeds_and_numbers(shift: int) -> None:
    for keys in (
        [key(3, position) for position in range(6000)],
        [key(seed, 40) for seed in range(-3000, 3000)],
        [key(3, 40, number) for number in range(6000)],
    ):
        values = np.array([(noise_bits(k, 1000) >> 20 + shift) & 15 for k in keys])
        assert uniform_p(values, 16) > ALPHA


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (key(7, 100), key(7, 101)),
        (key(7, 100), key(8, 100)),
        (key(7, 100), key(6, 101)),
        (key(7, 100, 0), key(7, 100, 1)),
        (key(-1, 100), key(2**64 - 1, 100)),
        (key(0, 0), key(2**63, 0)),
        (key(0, 0), key(2**32, 0)),
    ],
)
@pytest.mark.parametrize("shift", [0, 14, 28])
def test_rows_are_independent(one: NoiseKey, other: NoiseKey, shift: int) -> None:
    a, b = ((high_bits(k, IDS) >> np.uint32(shift)) & np.uint32(15) for k in (one, other))
    assert uniform_p(a * np.uint32(16) + b, 256) > ALPHA
    assert uniform_p((a[1:] * np.uint32(16) + b[:-1]), 256) > ALPHA


@pytest.mark.parametrize("step", [1, 2, 3, 16, 256, 4096])
def test_ids_of_one_row_are_independent(step: int) -> None:
    for position in range(4):
        high = high_bits(key(11, position), IDS + step)
        for shift in (0, 14, 28):
            nibble = (high >> np.uint32(shift)) & np.uint32(15)
            assert uniform_p(nibble[step:] * np.uint32(16) + nibble[:-step], 256) > ALPHA


def test_bits_of_one_token_are_independent() -> None:
    bits = high_bits(key(5, 5), IDS)
    low = np.array([noise_bits(key(5, 5), token) & 0xFFFFF for token in range(8000)])
    columns = [(bits >> np.uint32(i)) & np.uint32(1) for i in range(32)]
    for i, j in combinations(range(32), 2):
        assert uniform_p(columns[i] ^ columns[j], 2) > ALPHA
    assert uniform_p((bits[:8000] >> np.uint32(28)) * 16 + (low >> 16), 256) > ALPHA
    assert uniform_p((bits[:8000] & np.uint32(15)) * 16 + (low & 15), 256) > ALPHA


def test_two_fixed_tokens_are_independent_over_positions() -> None:
    for a, b in ((0, 1), (13, 14), (200, 65_736), (5, 40_000)):
        pair = [high_bits(key(9, position), np.array([a, b])) >> np.uint32(28) for position in range(8000)]
        assert uniform_p(np.array([int(x) * 16 + int(y) for x, y in pair]), 256) > ALPHA
