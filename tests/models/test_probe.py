"""The probe passes here, notices kernels that do not, and falls back to what passes."""

from __future__ import annotations

import pytest
import torch

from outpace.errors import CheckpointError
from outpace.models import blocks
from outpace.models.decoder import RowPath
from outpace.models.probe import probe_rows
from tests.models.tiny_models import tiny_decoder

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


@pytest.mark.parametrize("quantization", ["int8", "none"])
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


def test_one_layer():
    assert probe_rows(tiny_decoder("llama", num_hidden_layers=1)).passed


def plant(decoder, part, kind):
    """Puts a misbehaving layer in place of a good one."""
    owner = decoder if part == "head" else decoder.blocks[-1]
    setattr(owner, part, kind(getattr(owner, part)))


@pytest.mark.parametrize("part", ["_qkv", "_out", "_gate_up", "_down", "head"])
def test_a_linear_layer_that_minds_its_neighbours(part, caplog):
    decoder = tiny_decoder("llama")
    plant(decoder, part, NeighbourlyLinear)
    report = probe_rows(decoder)
    assert report.passed
    assert report.row_path is decoder.row_path is RowPath.SINGLE_ROWS
    assert list(report.changed) == list(RowPath)
    # of 66 comparisons, a few are of rows whose logits are computed alone in both
    assert report.changed[RowPath.BLOCKS] >= 60 and report.changed[RowPath.ROW_ATTENTION] >= 60
    assert report.changed[RowPath.SINGLE_ROWS] == 0
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "using: one row at a time" in caplog.text


def test_attention_that_minds_its_neighbours(monkeypatch, caplog):
    honest = blocks.attend

    def neighbourly(plan, *rest):
        result = honest(plan, *rest)
        row_by_row = len(plan._products) == plan.num_rows
        return result if row_by_row else result * (1 + 2.0**-20)

    monkeypatch.setattr(blocks, "attend", neighbourly)
    decoder = tiny_decoder("llama")
    report = probe_rows(decoder)
    assert report.passed
    assert report.row_path is decoder.row_path is RowPath.ROW_ATTENTION
    assert list(report.changed) == [RowPath.BLOCKS, RowPath.ROW_ATTENTION]
    assert "attention one row at a time" in caplog.text


def test_kernels_that_never_repeat_are_reported_and_not_believed(caplog):
    decoder = tiny_decoder("llama")
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
    assert probe_rows(tiny_decoder("llama", num_hidden_layers=1)).changed[RowPath.BLOCKS] > 0


def test_weights_that_are_no_numbers_are_blamed_on_the_checkpoint():
    decoder = tiny_decoder("llama")
    plant(decoder, "head", lambda inner: lambda rows: inner(rows) * float("nan"))
    with pytest.raises(CheckpointError, match="not finite"):
        probe_rows(decoder)


def test_tells_how_far_it_is():
    heard = []
    probe_rows(tiny_decoder("llama", num_hidden_layers=1), lambda done, total: heard.append((done, total)))
    assert heard == [(done, 41) for done in range(1, 42)]  # 34 packs of single rows, and 1 and 6 in blocks


def test_leaves_the_callers_random_state_alone():
    decoder = tiny_decoder("llama")
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    probe_rows(decoder)
    assert torch.equal(torch.rand(3), wanted)
