"""Products of rows and packed matrices: against float64, against the stated arithmetic, and bias and residual."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outpace.models.native.matrix import Stored
from outpace.models.native.structures import Source
from tests.models.native.calls import Inputs, multiply
from tests.models.native.kinds import BLOCKS, FORMATS, SIX_BITS, Floats, make, make_for, pack
from tests.models.native.reference import eight_bits, four_bits, in_groups, integers, product

OUTPUTS = (1, 7, 8, 9, 100)
ROWS = tuple(range(1, 14))


def rows_of(count: int, inputs: int, seed: int = 0) -> torch.Tensor:
    """Rows whose groups differ in size a thousandfold."""
    generator = torch.Generator().manual_seed(seed)
    size = 10 ** (torch.rand(count, -(-inputs // 32), 1, generator=generator) * 3 - 2)
    scaled = torch.randn(count, -(-inputs // 32), 32, generator=generator) * size
    return scaled.flatten(1)[:, :inputs].contiguous()


def exact(rows: torch.Tensor, weights: Floats) -> tuple[torch.Tensor, torch.Tensor]:
    """The product in float64, and the sum of its terms' magnitudes."""
    wide = torch.from_numpy(weights).double()
    return rows.double() @ wide.T, rows.double().abs() @ wide.abs().T


@pytest.mark.parametrize("inputs", [5, 32, 100, 576])
@pytest.mark.parametrize("outputs", OUTPUTS)
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_floats(kind: str, outputs: int, inputs: int) -> None:
    stored, floats = make(kind, outputs, inputs)
    packed = pack(stored, FORMATS[kind])
    for count in ROWS:
        rows = rows_of(count, inputs, count)
        wanted, size = exact(rows, floats)
        # Two sums of half the inputs each, each step rounded once.
        assert ((multiply(packed, rows) - wanted).abs() <= 2.0**-24 * (inputs / 2 + 2) * size).all(), count


@pytest.mark.parametrize("inputs", [5, 32, 100, 576])
@pytest.mark.parametrize("outputs", OUTPUTS)
@pytest.mark.parametrize("format", ["Q8", "Q4"])
def test_integers(format: str, outputs: int, inputs: int) -> None:
    """Off by no more than rounding rows and weights to their steps can do."""
    stored, floats = make("F32", outputs, inputs)
    packed, steps = pack(stored, FORMATS[format]), 32767 if format == "Q8" else 127
    matrix = eight_bits(floats) if format == "Q8" else four_bits(floats)
    weights = matrix.weights[:, :inputs]
    rounding = torch.from_numpy(abs(weights - floats)).double()
    for count in ROWS:
        rows = rows_of(count, inputs, count)
        wanted, size = exact(rows, floats)
        step = torch.from_numpy(abs(in_groups(rows.numpy())).max(-1) / steps).double()
        bound = rows.double().abs() @ rounding.T
        bound += 0.501 * step.repeat_interleave(32, 1)[:, :inputs] @ torch.from_numpy(abs(weights)).double().T
        error = (multiply(packed, rows) - wanted).abs()
        assert (error <= bound + 1e-5 * size).all(), count


@pytest.mark.parametrize(
    ("kind", "inputs", "format"),
    [
        *((kind, 768, format) for kind in BLOCKS for format in ("Q8", "Q4")),
        *((kind, 100, format) for kind in ("F32", "F16", "BF16") for format in ("Q8", "Q4")),
        *((kind, 768, "Q6") for kind in SIX_BITS),
        ("Q5_0", 96, "Q6"),
    ],
)
def test_integers_follow_the_stated_arithmetic(kind: str, inputs: int, format: str) -> None:
    steps = 32767 if format == "Q8" else 127
    for outputs in OUTPUTS:
        stored, floats = make(kind, outputs, inputs, outputs)
        matrix = integers(kind, stored.data.contiguous().view(torch.uint8).numpy(), floats, format)
        rows = rows_of(13, inputs, outputs)
        wanted = product(rows.numpy(), matrix, steps)
        terms = abs(matrix.scale[:, :, None] * matrix.numbers) + abs(matrix.minimum[:, :, None])
        size = abs(in_groups(rows.numpy())).reshape(13, -1) @ terms.reshape(outputs, -1).T
        for count in ROWS:
            found = multiply(pack(stored, FORMATS[format]), rows[:count]).numpy()
            assert (abs(found - wanted[:count]) <= 1e-6 * size[:count]).all(), (outputs, count)


def test_the_largest_numbers_do_not_overflow() -> None:
    """Every weight at the end of its range, every input at the end of its own, alike and opposed in sign."""
    for format, sign in (("Q8", 1.0), ("Q8", -1.0), ("Q4", 1.0), ("Q4", -1.0)):
        weights = torch.full((9, 96), 127.0 if format == "Q8" else 15.0)
        packed = pack(Stored(Source.F32, weights, 9, 96), FORMATS[format])
        found = multiply(packed, torch.full((5, 96), 3.0 * sign))
        torch.testing.assert_close(found, torch.full((5, 9), sign * 3.0 * weights[0, 0].item() * 96), rtol=1e-6, atol=0)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("byte", [0x00, 0xFF])
def test_the_largest_numbers_of_six_bits_do_not_overflow(byte: int, sign: float) -> None:
    data = np.full((9, 3, 22), byte, np.uint8)
    data[:, :, :2] = np.array(1.0, "<f2").reshape(1, 1, 1).view(np.uint8)
    packed = pack(Stored(Source.Q5_0, torch.from_numpy(data).view(9, 66), 9, 96), FORMATS["Q6"])
    wanted = torch.full((5, 9), sign * 3.0 * 96 * (15 if byte else -16))
    torch.testing.assert_close(multiply(packed, torch.full((5, 96), 3.0 * sign)), wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("outputs", OUTPUTS)
@pytest.mark.parametrize("format", FORMATS)
def test_bias_and_residual(format: str, outputs: int) -> None:
    stored, _ = make_for(format, outputs, 100)
    bias = torch.randn(outputs, generator=torch.Generator().manual_seed(outputs))
    plain, biased = pack(stored, FORMATS[format]), pack(stored, FORMATS[format], bias)
    for count in ROWS:
        rows, residual = rows_of(count, stored.inputs, count), torch.randn(count, outputs)
        result = multiply(plain, rows)
        assert torch.equal(multiply(biased, rows), result + bias)
        assert torch.equal(multiply(plain, rows, onto=residual), residual + result)
        assert torch.equal(multiply(biased, rows, onto=residual), residual + (result + bias))


@pytest.mark.parametrize("format", FORMATS)
def test_a_row_has_the_same_bits_beside_any_others(format: str) -> None:
    """Over more rows than one block of the cache holds, and more panels than one task takes."""
    stored, _ = make_for(format, 212, 1000)
    packed, rows = pack(stored, FORMATS[format]), rows_of(130, stored.inputs)
    alone = torch.cat([multiply(packed, row) for row in torch.split(rows, 1)])
    for count in (*range(2, 18), 64, 130):
        assert torch.equal(multiply(packed, rows[:count]), alone[:count]), count
        assert torch.equal(multiply(packed, rows[-count:]), alone[-count:]), count


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_a_row_that_is_no_number_spoils_itself_alone(format: str, value: float) -> None:
    stored, _ = make_for(format, 9, 100)
    packed, rows = pack(stored, FORMATS[format]), rows_of(7, stored.inputs)
    clean = multiply(packed, rows)
    for column in (0, 31, 50, 99):
        spoilt = rows.clone()
        spoilt[3, column] = value
        found = multiply(packed, spoilt)
        assert not found[3].isfinite().any()
        assert torch.equal(found[[0, 1, 2, 4, 5, 6]], clean[[0, 1, 2, 4, 5, 6]])


@pytest.mark.parametrize("size", [0.0, 1e-38, 1e-31, 1e-29, 1e30])
def test_rows_of_any_size(size: float) -> None:
    """Tiny groups count as zero, whose inverse would overflow; large ones keep their precision."""
    rows = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)) * size
    inputs = Inputs(rows)
    for values, scale in ((inputs.words, inputs.word_scale), (inputs.bytes, inputs.byte_scale)):
        steps = values.float() * scale.repeat_interleave(32, 1)
        half_step = rows.abs().view(3, 2, 32).amax(-1) / (65_000 if values is inputs.words else 250)
        assert ((steps - rows).abs() <= half_step.repeat_interleave(32, 1).clamp(min=1e-30)).all()
    sums = inputs.bytes.view(3, 2, 32).float().sum(-1) * inputs.byte_scale
    torch.testing.assert_close(inputs.byte_sum, sums, rtol=1e-6, atol=0)
