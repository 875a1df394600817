"""Matrices keep their weights: read row by row, and packed into the panels of every format."""

from __future__ import annotations

import ctypes

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize

from outpace.errors import UnsupportedModel
from outpace.models.native.matrix import PackedMatrices, Stored, packed_bytes
from outpace.models.native.structures import Format, Source
from outpace.models.stored import QuantizedBlocks
from tests.models.native.calls import multiply
from tests.models.native.kinds import (
    ANY_SOURCE,
    BLOCKS,
    FORMATS,
    FOUR_BITS,
    SIX_BITS,
    SOURCES,
    Floats,
    make,
    make_for,
    pack,
)
from tests.models.native.reference import eight_bits, four_bits, in_groups, own_four_bits, own_six_bits
from tests.models.tiny_models import DictWeights

ANY_SIZES = [(1, 1), (7, 5), (8, 32), (9, 33), (3, 100), (100, 72)]
BLOCK_SIZES = [(1, 256), (7, 256), (8, 512), (13, 768)]
CASES = [
    *((kind, *size) for kind in ("F32", "F16", "BF16") for size in ANY_SIZES),
    *((kind, *size) for kind in BLOCKS for size in BLOCK_SIZES),
    *((kind, 9, inputs) for kind in ("Q4_0", "Q4_1", "Q5_0", "Q8_0") for inputs in (32, 96)),
]
each_case = pytest.mark.parametrize(("kind", "outputs", "inputs"), CASES)


def unpacked(stored: Stored, format: int) -> Floats:
    """The weights of a packed matrix, [outputs, inputs]: its products with rows of which one input is 1."""
    return multiply(pack(stored, format), torch.eye(stored.inputs)).T.numpy()


@each_case
def test_rows_read_are_those_of_the_gguf_package(kind: str, outputs: int, inputs: int) -> None:
    stored, floats = make(kind, outputs, inputs)
    ids = torch.tensor([outputs - 1, 0, outputs // 2, 0])
    # The factors of a block are multiplied in another order.
    np.testing.assert_allclose(stored.read_rows(ids).numpy(), floats[ids.numpy()], rtol=1e-6, atol=1e-9)
    assert stored.read_rows(ids[:0]).shape == (0, inputs)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q8_0"])
def test_blocks_that_the_gguf_package_quantised(kind: str) -> None:
    original = np.random.default_rng(1).standard_normal((9, 96)).astype(np.float32)
    quantization = gguf.GGMLQuantizationType[kind]
    data = gguf.quants.quantize(original, quantization)
    stored = Stored(SOURCES[kind], torch.from_numpy(data), 9, 96)
    np.testing.assert_allclose(stored.read_rows(torch.arange(9)).numpy(), dequantize(data, quantization), rtol=1e-6)


@each_case
def test_float_formats_hold_what_is_stored(kind: str, outputs: int, inputs: int) -> None:
    stored, floats = make(kind, outputs, inputs)
    rows = stored.read_rows(torch.arange(outputs)).numpy()
    assert np.array_equal(unpacked(stored, Format.F32), rows)
    half = torch.from_numpy(floats).half().float().numpy()
    np.testing.assert_allclose(unpacked(stored, Format.F16), half, rtol=2**-10, atol=2**-24)
    if kind in ("F16", "BF16"):
        assert np.array_equal(unpacked(stored, FORMATS[kind]), floats)


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
def test_bfloat16_is_rounded_to_the_nearest(kind: str) -> None:
    stored, floats = make(kind, 9, 96)
    assert np.array_equal(unpacked(stored, Format.BF16), torch.from_numpy(floats).bfloat16().float().numpy())


@pytest.mark.parametrize("kind", ["F32", "F16"])
def test_float16_is_rounded_to_the_nearest(kind: str) -> None:
    stored, floats = make(kind, 9, 96)
    assert np.array_equal(unpacked(stored, Format.F16), torch.from_numpy(floats).half().float().numpy())


@each_case
def test_eight_bits_are_within_half_a_step(kind: str, outputs: int, inputs: int) -> None:
    stored, floats = make(kind, outputs, inputs)
    found, steps = unpacked(stored, Format.Q8), eight_bits(floats).scale
    assert np.array_equal(steps > 0, abs(in_groups(floats)).max(-1) > 0)
    error = in_groups(found - floats)
    assert (abs(error) <= (0.5 + 1e-4) * steps[:, :, None] + 1e-7 * abs(in_groups(floats))).all()
    np.testing.assert_allclose(found, eight_bits(floats).weights[:, :inputs], rtol=1e-6, atol=1e-9)


def test_blocks_of_eight_bits_keep_their_numbers() -> None:
    """Where a group uses 127, as llama.cpp's own quantiser makes it."""
    original = np.random.default_rng(2).standard_normal((16, 128)).astype(np.float32)
    data = gguf.quants.quantize(original, gguf.GGMLQuantizationType.Q8_0)
    stored = Stored(Source.Q8_0, torch.from_numpy(data), 16, 128)
    floats = dequantize(data, gguf.GGMLQuantizationType.Q8_0)
    np.testing.assert_allclose(unpacked(stored, Format.Q8), floats, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("size", [*BLOCK_SIZES, (9, 1024)])
@pytest.mark.parametrize("kind", FOUR_BITS)
def test_four_bit_blocks_keep_their_numbers(kind: str, size: tuple[int, int]) -> None:
    """All that changes is that scale and minimum of a group become float16, which Q4_0 and Q4_1 hold already."""
    stored, floats = make(kind, *size)
    own = own_four_bits(kind, stored.data.numpy())
    found = unpacked(stored, Format.Q4)
    terms = abs(own.scale[:, :, None] * own.numbers) + abs(own.minimum[:, :, None])
    rounding = 2**-11 if kind == "Q4_K" else 1e-6
    assert (abs(in_groups(found - floats)) <= rounding * terms + 2**-24 * 16).all()
    np.testing.assert_allclose(found, own.weights, rtol=0, atol=1e-6 * terms.max())


@pytest.mark.parametrize("size", [*BLOCK_SIZES, (9, 1024)])
@pytest.mark.parametrize("kind", SIX_BITS)
def test_six_bit_blocks_keep_their_numbers(kind: str, size: tuple[int, int]) -> None:
    """All that changes is that the scale of a half group becomes float16, which that of Q5_0 is already."""
    stored, floats = make(kind, *size)
    own = own_six_bits(kind, stored.data.numpy())
    found = unpacked(stored, Format.Q6)
    rounding = 2**-11 if kind == "Q6_K" else 1e-6
    assert (abs(found - floats) <= rounding * abs(floats) + 2**-24 * 32).all()
    np.testing.assert_allclose(found, own.weights, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("kind", "outputs", "inputs"), [case for case in CASES if case[0] not in FOUR_BITS])
def test_other_weights_in_four_bits(kind: str, outputs: int, inputs: int) -> None:
    stored, floats = make(kind, outputs, inputs)
    rule = four_bits(floats)
    found = unpacked(stored, Format.Q4)
    np.testing.assert_allclose(found, rule.weights[:, :inputs], rtol=0, atol=2e-6 * abs(floats).max())
    error = abs(in_groups(found - floats))
    assert (error <= 0.51 * rule.scale[:, :, None] + 2**-9 * abs(rule.minimum[:, :, None])).all()


@pytest.mark.parametrize("format", ANY_SOURCE)
@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 0.25])
def test_groups_of_one_value(value: float, format: str) -> None:
    stored = Stored(Source.F32, torch.full((3, 40), value), 3, 40)
    assert np.array_equal(unpacked(stored, FORMATS[format]) == 0, np.full((3, 40), value == 0))
    np.testing.assert_allclose(unpacked(stored, FORMATS[format]), value, rtol=1e-3)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("format", ANY_SOURCE)
def test_a_weight_that_is_no_number_spoils_its_output_alone(format: str, value: float) -> None:
    stored, _ = make("F32", 9, 100)
    clean = unpacked(stored, FORMATS[format])
    for column in (0, 31, 50, 99):
        damaged = stored.data.clone()
        damaged[4, column] = value
        packed = pack(Stored(Source.F32, damaged, 9, 100), FORMATS[format])
        result = multiply(packed, torch.eye(100)).T.numpy()
        assert not np.isfinite(result[4, column])
        assert np.array_equal(np.delete(result, 4, 0), np.delete(clean, 4, 0))


def test_matrices_side_by_side_do_not_touch() -> None:
    parts = []
    for number, (format, (outputs, inputs)) in enumerate(zip(FORMATS, ANY_SIZES, strict=True)):
        bias = torch.randn(outputs) if number % 2 else None
        parts.append((make_for(format, outputs, inputs, number)[0], FORMATS[format], bias))
    together = PackedMatrices(parts)
    assert together.weight_bytes == sum(packed_bytes(format, s.outputs, s.inputs) for s, format, _ in parts)
    for struct, part in zip(together.structs, parts, strict=True):
        rows = torch.randn(3, part[0].inputs)
        assert torch.equal(multiply(struct, rows), multiply(pack(*part), rows))


@pytest.mark.parametrize("format", FORMATS)
def test_threads_do_not_change_a_bit(format: str) -> None:
    stored, _ = make_for(format, 300, 200)
    images = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        packed = pack(stored, FORMATS[format])
        images.append(ctypes.string_at(packed.panels, packed_bytes(FORMATS[format], 300, stored.inputs)))
    assert images[0] == images[1] == images[2]


class TestFinding:
    """How a matrix of a checkpoint is taken."""

    def test_blocks_and_floats(self) -> None:
        stored, floats = make("Q4_K", 9, 256)
        blocks = QuantizedBlocks("Q4_K", (9, 256), stored.data)

        class Weights(DictWeights):
            def blocks(self, name: str) -> QuantizedBlocks | None:
                return blocks if name == "a" else super().blocks(name)

        weights = Weights({"b": torch.zeros(4, 6, dtype=torch.bfloat16), "c": torch.ones(4, 6, dtype=torch.float64)})
        found = Stored.find(weights, "a")
        assert (found.source, found.outputs, found.inputs) == (Source.Q4_K, 9, 256)
        np.testing.assert_allclose(found.read_rows(torch.arange(9)).numpy(), floats, rtol=1e-6, atol=1e-9)
        assert Stored.find(weights, "a", 5).outputs == 5
        assert Stored.find(weights, "b").source == Source.BF16
        assert Stored.find(weights, "c").source == Source.F32
        with pytest.raises(KeyError, match="d"):
            Stored.find(weights, "d")

    def test_blocks_of_a_kind_without_a_reader_become_floats(self) -> None:
        original = np.random.default_rng(3).standard_normal((4, 64)).astype(np.float32)
        data = torch.from_numpy(gguf.quants.quantize(original, gguf.GGMLQuantizationType.Q5_1))
        blocks = QuantizedBlocks("Q5_1", (4, 64), data)

        class Weights(DictWeights):
            def blocks(self, name: str) -> QuantizedBlocks | None:
                return blocks

        weights = Weights({"a": blocks.dequantize().half()})
        assert Stored.find(weights, "a").source == Source.F16

    def test_rows_that_are_not_side_by_side(self) -> None:
        tensor = torch.randn(20, 40)
        found = Stored.find(DictWeights({"a": tensor.T}), "a")
        assert np.array_equal(unpacked(found, Format.F32), tensor.T.numpy())


def test_a_matrix_too_large_is_refused_before_memory_is_taken() -> None:
    huge = Stored(Source.F32, torch.zeros(1, 1).expand(1 << 20, 1 << 11), 1 << 20, 1 << 11)
    with pytest.raises(UnsupportedModel, match=r"1048576 x 2048 weights: the kernels take less than 2\^31"):
        PackedMatrices([(huge, Format.Q4, None)])
