"""Packed linear layers: right values, and the same bits for a row in any company."""

from __future__ import annotations

import pytest
import torch

from outpace.errors import InvalidParameter, UnsupportedModel
from outpace.models import linear
from outpace.models.linear import Int8Linear, PlainLinear, PrepackedLinear, describe_precision, pack_linear

KINDS = (Int8Linear, PrepackedLinear, PlainLinear)
ROW_COUNTS = (*range(1, 18), 33, 97, 200, 512, 2048)
SHAPES = ((100, 60), (960, 576), (61, 64), (64, 72))


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def layer_parts(shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    spread = torch.rand(shape[0], 1, generator=generator) * 3
    return torch.randn(shape, generator=generator) * spread, torch.randn(shape[0], generator=generator)


def int8_by_hand(weight, bias, rows):
    """The definition, in float64 and one step at a time."""
    weight_scale = weight.abs().amax(1, keepdim=True) / 63
    integers = (weight / weight_scale).round().double()
    row_scale = rows.abs().amax(1, keepdim=True)
    row_integers = (rows / row_scale * 127).round().double()
    product = row_integers @ integers.T * weight_scale.T.double() * row_scale.double() / 127
    return (product + (0 if bias is None else bias.double())).float()


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.usefixtures("one_thread")
class TestValues:
    @pytest.mark.parametrize("kind", [PrepackedLinear, PlainLinear])
    def test_fp32(self, kind, shape, with_bias):
        weight, bias = layer_parts(shape)
        rows = torch.randn(9, shape[1])
        layer = kind(weight, bias if with_bias else None)
        wanted = rows.double() @ weight.double().T + (bias.double() if with_bias else 0)
        torch.testing.assert_close(layer(rows).double(), wanted, rtol=0, atol=2e-6 * wanted.abs().max().item())

    def test_int8_is_what_it_says(self, shape, with_bias):
        weight, bias = layer_parts(shape)
        rows = torch.randn(9, shape[1]) * torch.tensor([1e-6, 1e-3, 0.1, 1, 1, 1, 10, 1e3, 1e6])[:, None]
        bias = bias if with_bias else None
        found, wanted = Int8Linear(weight, bias)(rows), int8_by_hand(weight, bias, rows)
        assert ((found - wanted).abs() <= 1e-5 * wanted.abs().amax(1, keepdim=True)).all()

    @pytest.mark.parametrize("kind", KINDS)
    def test_add_to(self, kind, shape, with_bias):
        weight, bias = layer_parts(shape)
        rows, residual = torch.randn(9, shape[1]), torch.randn(9, shape[0])
        before = residual.clone()
        layer = kind(weight, bias if with_bias else None)
        wanted = residual + layer(rows)
        torch.testing.assert_close(layer.add_to(residual, rows), wanted, rtol=0, atol=1e-6 * wanted.abs().max().item())
        assert torch.equal(residual, before)


class TestRowsAreIndependent:
    @pytest.mark.parametrize("with_bias", [False, True])
    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.thinned(2)
    def test_same_bits_alone_and_in_any_block(self, kind, shape, with_bias, threads):
        weight, bias = layer_parts(shape)
        layer = kind(weight, bias if with_bias else None)
        rows, residual = torch.randn(max(ROW_COUNTS), shape[1]), torch.randn(max(ROW_COUNTS), shape[0])
        probes = [i for i in (*range(17), 32, 96, 199, 511, 1023, 1024, 2047)]
        alone = {i: layer(rows[i : i + 1])[0] for i in probes}
        added = {i: layer.add_to(residual[i : i + 1], rows[i : i + 1])[0] for i in probes}
        for count in ROW_COUNTS:
            block, sums = layer(rows[:count]), layer.add_to(residual[:count], rows[:count])
            for i in probes:
                if i < count:
                    assert torch.equal(block[i], alone[i]), (count, i)
                    assert torch.equal(sums[i], added[i]), (count, i)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.usefixtures("one_thread")
    def test_views_into_wider_rows(self, kind):
        weight, _ = layer_parts((100, 64))
        layer = kind(weight, None)
        wide = torch.randn(7, 128)
        assert torch.equal(layer(wide[:, :64]), layer(wide[:, :64].contiguous()))


@pytest.mark.usefixtures("one_thread")
class TestEdges:
    @pytest.mark.parametrize("kind", KINDS)
    def test_rows_of_zeros_give_the_bias(self, kind):
        weight, bias = layer_parts((100, 60))
        rows = torch.randn(3, 60)
        rows[1] = 0
        assert torch.equal(kind(weight, None)(rows)[1], torch.zeros(100))
        assert torch.equal(kind(weight, bias)(rows)[1], bias)
        assert torch.equal(kind(weight, None).add_to(torch.ones(3, 100), rows)[1], torch.ones(100))

    def test_an_output_of_zero_weights_is_zero(self):
        weight, _ = layer_parts((100, 60))
        weight[7] = 0
        found = Int8Linear(weight, None)(torch.randn(3, 60))
        assert torch.equal(found[:, 7], torch.zeros(3))
        assert found.isfinite().all()

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_broken_row_stays_broken_and_alone(self, kind):
        weight, _ = layer_parts((100, 60))
        rows = torch.randn(3, 60)
        wanted = kind(weight, None)(rows)
        rows[1, 5] = float("nan")
        found = kind(weight, None)(rows)
        assert found[1].isnan().all()
        assert torch.equal(found[[0, 2]], wanted[[0, 2]])

    def test_extreme_weights_do_not_saturate(self):
        # Largest products of both signs in every pair: 8-bit weights would overflow the kernel's 16-bit sums here.
        layer = Int8Linear(torch.ones(32, 512), None)
        assert torch.equal(layer(torch.ones(2, 512)), torch.full((2, 32), 512.0))
        assert torch.equal(layer(-torch.ones(2, 512)), torch.full((2, 32), -512.0))

    @pytest.mark.parametrize("outputs", [linear._PACKING_ROWS - 1, linear._PACKING_ROWS + 5])
    def test_packing_in_parts_changes_nothing(self, outputs, monkeypatch):
        weight, _ = layer_parts((outputs, 8))
        rows = torch.randn(2, 8)
        found = Int8Linear(weight, None)(rows)
        monkeypatch.setattr(linear, "_PACKING_ROWS", 1 << 30)
        assert torch.equal(found, Int8Linear(weight, None)(rows))

    def test_the_processor_wide_engine_setting_is_left_alone(self):
        before = torch.backends.quantized.engine
        Int8Linear(torch.randn(4, 8), None)
        assert torch.backends.quantized.engine == before


class TestChoice:
    def test_by_quantization(self):
        weight, _ = layer_parts((100, 60))
        assert pack_linear(weight, None, "int8").describe() == "int8 rows (7-bit weights, 8-bit activations)"
        assert pack_linear(weight, None, "none").describe() == "fp32 prepacked (oneDNN)"
        with pytest.raises(InvalidParameter, match=r"'int4'.*int8, none"):
            pack_linear(weight, None, "int4")

    def test_weight_bytes(self):
        weight, bias = layer_parts((100, 60))
        assert pack_linear(weight, None, "int8").weight_bytes == 100 * 60 + 100 * 12
        assert pack_linear(weight, bias, "int8").weight_bytes == 100 * 60 + 100 * 16
        assert pack_linear(weight, bias, "none").weight_bytes == 100 * 61 * 4

    def test_without_the_int8_kernel(self, monkeypatch):
        monkeypatch.setattr(linear, "has_int8", lambda: False)
        with pytest.raises(InvalidParameter, match=r"int8.*quantization='none'"):
            pack_linear(torch.ones(4, 8), None, "int8")

    def test_without_the_prepacked_kernel_the_reason_is_logged_once(self, monkeypatch, caplog):
        def broken(*_):
            raise RuntimeError("no such kernel")

        linear._has_prepacked.cache_clear()
        monkeypatch.setattr(PrepackedLinear, "__init__", broken)
        try:
            first, second = (pack_linear(torch.ones(4, 8), None, "none") for _ in range(2))
        finally:
            linear._has_prepacked.cache_clear()
        assert isinstance(first, PlainLinear) and isinstance(second, PlainLinear)
        assert [record.getMessage() for record in caplog.records if "no such kernel" in record.getMessage()] == [
            "oneDNN's prepacked fp32 linear layer does not run here (no such kernel); rows go one at a time"
        ]


def test_a_layer_beyond_the_kernels_sizes_is_refused_before_it_crashes():
    with pytest.raises(UnsupportedModel, match="2\\^31"):
        pack_linear(torch.empty(1, dtype=torch.float16).expand(2**16, 2**15), None, "int8")


@pytest.mark.parametrize(("quantization", "kind"), [("int8", Int8Linear), ("none", PrepackedLinear)])
def test_precision_is_known_before_anything_is_loaded(quantization, kind):
    assert describe_precision(quantization) == kind(torch.eye(16), None).describe()
