"""The probe passes here, notices kernels that do not, and falls back to what passes."""

from __future__ import annotations

import pytest
import torch

from outpace.errors import CheckpointError
from outpace.models import blocks
from outpace.models.config import DecoderConfig
from outpace.models.decoder import Decoder, RowPath
from outpace.models.probe import probe_rows
from tests.models.tiny_models import PRECISIONS, precision, reference_model, tiny_decoder, tiny_weights

pytestmark = pytest.mark.usefixtures("one_thread")


class NeighbourlyLinear:
    """A linear layer that gives a row other bits in a block than alone, as stock kernels do."""

    def __init__(self, inner):
        self._inner = inner

    def __call__(self, rows):
        result = self._inner(rows)
        return result if len(rows) == 1 else result * (1 + 2.0**-20)

    def add_to(self, residual, rows):
        return residual + self(rows)


class RestlessLinear(NeighbourlyLinear):
    """One that never gives the same bits twice."""

    calls = 0

    def __call__(self, rows):
        self.calls += 1
        return self._inner(rows) * (1 + self.calls * 2.0**-20)


@pytest.mark.parametrize("quantization", PRECISIONS)
@pytest.mark.parametrize("variant", ["llama", "qwen2-window", "qwen3-biases"])
def test_passes_here(variant, quantization, caplog):
    decoder = tiny_decoder(variant, quantization)
    report = probe_rows(decoder)
    assert (report.row_path, report.passed, report.changed) == (RowPath.BLOCKS, True, {RowPath.BLOCKS: 0})
    assert decoder.row_path is RowPath.BLOCKS
    assert report.compared == 66  # 24 rows of one request and 9 of another in 2 arrangements
    assert report.threads == 1
    assert report.describe() == "rows have the same bits in every pack (66 compared, 1 thread)"
    assert not caplog.records


@pytest.mark.parametrize("quantization", PRECISIONS)
def test_one_layer(quantization):
    assert probe_rows(tiny_decoder("llama", quantization, num_hidden_layers=1)).passed


def plant(decoder, part, kind):
    """Puts a misbehaving layer in place of a good one of torch's."""
    owner = decoder.head if part == "_matrix" else decoder.layers.blocks[-1]
    setattr(owner, part, kind(getattr(owner, part)))


def assert_falls_back_to_single_rows(decoder, caplog):
    report = probe_rows(decoder)
    assert report.passed
    assert report.row_path is decoder.row_path is RowPath.SINGLE_ROWS
    assert list(report.changed) == list(RowPath)
    # of 66 comparisons, a few are of rows whose logits are computed alone in both
    assert report.changed[RowPath.BLOCKS] >= 60 and report.changed[RowPath.ROW_ATTENTION] >= 60
    assert report.changed[RowPath.SINGLE_ROWS] == 0
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "using: one row at a time" in caplog.text


@pytest.mark.parametrize(
    ("part", "quantization"),
    [*((part, "torch none") for part in ("_qkv", "_out", "_gate_up", "_down", "_matrix")), ("_down", "torch int8")],
)
def test_a_linear_layer_that_minds_its_neighbours(part, quantization, caplog):
    decoder = tiny_decoder("llama", quantization, num_hidden_layers=1)
    plant(decoder, part, NeighbourlyLinear)
    assert_falls_back_to_single_rows(decoder, caplog)


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("part", ["layers", "head"])
def test_native_kernels_that_mind_their_neighbours(part, quantization, caplog, monkeypatch):
    decoder = tiny_decoder("llama", quantization)
    owner, name = (decoder.layers, "run") if part == "layers" else (decoder.head, "logits")
    honest = getattr(owner, name)

    def neighbourly(hidden, *rest):
        return NeighbourlyLinear(lambda rows: honest(rows, *rest))(hidden)

    monkeypatch.setattr(owner, name, neighbourly)
    assert_falls_back_to_single_rows(decoder, caplog)


def test_attention_that_minds_its_neighbours(monkeypatch, caplog):
    honest = blocks.attend

    def neighbourly(plan, *rest):
        result = honest(plan, *rest)
        row_by_row = len(plan._products) == plan.num_rows
        return result if row_by_row else result * (1 + 2.0**-20)

    monkeypatch.setattr(blocks, "attend", neighbourly)
    decoder = tiny_decoder("llama", "torch none")
    report = probe_rows(decoder)
    assert report.passed
    assert report.row_path is decoder.row_path is RowPath.ROW_ATTENTION
    assert list(report.changed) == [RowPath.BLOCKS, RowPath.ROW_ATTENTION]
    assert "attention one row at a time" in caplog.text


def test_kernels_that_never_repeat_are_reported_and_not_believed(caplog):
    decoder = tiny_decoder("llama", "torch none")
    plant(decoder, "_down", RestlessLinear)
    report = probe_rows(decoder)
    assert not report.passed
    assert decoder.row_path is RowPath.SINGLE_ROWS
    assert report.changed[RowPath.SINGLE_ROWS] > 0
    assert "speculation may change the text here" in caplog.text


def test_a_difference_in_the_cache_alone_is_seen(monkeypatch):
    """Keys written with other bits count, even before any row has read them."""
    honest = blocks.attend

    def smudging(plan, cache, layer, query, key, value):
        result = honest(plan, cache, layer, query, key, value)
        if plan.num_rows > 1:
            last = plan.segments[-1]
            cache.values(layer)[last.lane * cache.num_kv_heads, last.length - 1, 0] += 2.0**-10
        return result

    monkeypatch.setattr(blocks, "attend", smudging)
    decoder = tiny_decoder("llama", "torch none", num_hidden_layers=1)
    assert probe_rows(decoder).changed[RowPath.BLOCKS] > 0


def test_a_difference_in_the_cache_alone_is_seen_of_native_kernels(monkeypatch):
    decoder = tiny_decoder("llama", num_hidden_layers=1)
    honest = decoder.layers.run

    def smudging(hidden, rope, segments, begin, end, cache, *rest):
        result = honest(hidden, rope, segments, begin, end, cache, *rest)
        if len(hidden) > 1:
            last = segments[-1]
            cache.values(begin)[last.lane * cache.num_kv_heads, last.length - 1, 0] += 2.0**-10
        return result

    monkeypatch.setattr(decoder.layers, "run", smudging)
    assert probe_rows(decoder).changed[RowPath.BLOCKS] > 0


@pytest.mark.parametrize("quantization", PRECISIONS)
@pytest.mark.parametrize("name", ["model.layers.3.input_layernorm.weight", "model.norm.weight"])
def test_norms_that_are_no_numbers_are_blamed_on_the_checkpoint(name, quantization):
    assert_blamed(name, float("nan"), quantization)


@pytest.mark.parametrize("quantization", [*PRECISIONS, "int4"])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_matrices_that_are_no_numbers_are_blamed_on_the_checkpoint(quantization, value):
    assert_blamed("model.layers.3.mlp.up_proj.weight", value, quantization)


def assert_blamed(name, value, quantization):
    model = reference_model("llama")
    model.get_parameter(name).view(-1)[4] = value
    config = DecoderConfig.from_hf(model.config.to_dict())
    decoder = Decoder(config, tiny_weights(model), precision=precision(quantization))
    with pytest.raises(CheckpointError, match="not finite"):
        probe_rows(decoder)


def test_tells_how_far_it_is():
    heard = []
    probe_rows(tiny_decoder("llama", num_hidden_layers=1), lambda done, total: heard.append((done, total)))
    assert heard == [(done, 42) for done in range(1, 43)]  # 34 packs of single rows, 1 and 6 in blocks, a tree


def test_leaves_the_callers_random_state_alone():
    decoder = tiny_decoder("llama")
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    probe_rows(decoder)
    assert torch.equal(torch.rand(3), wanted)
