"""What is checked at load notices mistakes planted in models, and the probe of rows those planted in kernels."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F

from outpace.errors import UnsupportedModel
from outpace.models import hf_attention, hf_rows
from outpace.models.decoder import RowPath
from outpace.models.hf import TransformersModel
from outpace.models.hf_bits import probe_rows, same_bits
from outpace.models.native.library import why_unavailable
from outpace.models.precision import Precision
from tests.models.hf_tiny import RIGHT, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = [torch.float32, torch.bfloat16]


def eager_of(model):
    """The module of a model's class, where its eager attention is."""
    return sys.modules[type(model).__module__]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [1.02, 0.5])
def test_a_scale_that_eager_attention_applies_in_secret(dtype, factor, monkeypatch):
    owner = tiny_model("qwen3", dtype)
    honest = eager_of(owner).eager_attention_forward

    def scaled(module, query, *rest, **options):
        return honest(module, query * factor, *rest, **options)

    monkeypatch.setattr(eager_of(owner), "eager_attention_forward", scaled)
    with pytest.raises(UnsupportedModel, match="qwen3 is not possible: attention of layer 0 is not what its scale"):
        TransformersModel(owner)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mask_that_is_no_window(dtype, monkeypatch):
    owner = tiny_model("qwen3", dtype)
    honest = eager_of(owner).create_causal_mask
    monkeypatch.setattr(
        eager_of(owner),
        "create_causal_mask",
        lambda **given: honest(**given, or_mask_function=lambda batch, head, q, k: (k == q + 1) & (q % 7 == 3)),
    )
    with pytest.raises(UnsupportedModel, match="its attention mask is not causal"):
        TransformersModel(owner)


def test_a_mask_that_forgets_far_beyond_the_text_that_is_tried(monkeypatch):
    owner = tiny_model("qwen3")
    honest = eager_of(owner).create_causal_mask
    monkeypatch.setattr(
        eager_of(owner),
        "create_causal_mask",
        lambda **given: honest(**given, and_mask_function=lambda batch, head, q, k: q - k < 300),
    )
    with pytest.raises(UnsupportedModel, match="its attention mask is not causal"):
        TransformersModel(owner)


def test_an_option_of_attention_that_is_not_known(monkeypatch):
    owner = tiny_model("qwen3")
    attention = owner.model.layers[1].self_attn
    honest = attention.forward
    monkeypatch.setattr(
        attention, "forward", lambda *args, **given: honest(*args, **given, position_bias=torch.ones(1))
    )
    with pytest.raises(UnsupportedModel, match="attention of layer 1 asks for position_bias"):
        TransformersModel(owner)


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_positions_that_are_counted_and_not_read(dtype, quantization, monkeypatch):
    owner = tiny_model("qwen3", dtype)
    rotary = owner.model.rotary_emb
    honest = rotary.forward
    monkeypatch.setattr(rotary, "forward", lambda x, position_ids: honest(x, torch.arange(position_ids.shape[1])[None]))
    with pytest.raises(UnsupportedModel, match="in pieces of several requests its"):
        TransformersModel(owner, precision=Precision(quantization, kernels="torch"))


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_state_that_goes_from_row_to_row(dtype, quantization, monkeypatch):
    owner = tiny_model("qwen3", dtype)
    part = owner.model.layers[0].mlp
    honest = part.forward
    monkeypatch.setattr(part, "forward", lambda x: honest(x + F.pad(x, (0, 0, 1, 0))[:, :-1]))
    with pytest.raises(UnsupportedModel, match="in pieces of several requests its"):
        TransformersModel(owner, precision=Precision(quantization, kernels="torch"))


def test_layers_that_keep_their_attention_to_themselves(monkeypatch):
    owner = tiny_model("qwen3")
    part = owner.model.layers[2].self_attn
    monkeypatch.setattr(part, "forward", lambda hidden_states, **given: (hidden_states * 0.5, None))
    with pytest.raises(UnsupportedModel, match="2 of its 3 layers call the attention"):
        TransformersModel(owner)


def test_what_fails_in_pieces_is_told_as_such(monkeypatch):
    owner = tiny_model("qwen3")
    part = owner.model.layers[0].mlp
    honest = part.forward

    def picky(x):
        if x.shape[1] == 1:
            raise ValueError("one row is too few")
        return honest(x)

    monkeypatch.setattr(part, "forward", picky)
    with pytest.raises(UnsupportedModel, match=r"fails when it is checked \(one row is too few\)"):
        TransformersModel(owner)


@pytest.mark.parametrize("path", RowPath)
@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "gpt_oss", "deepseek_v3"])
@pytest.mark.thinned(3)
def test_a_window_or_slot_off_by_one_would_be_noticed(kind, path, monkeypatch):
    """The comparison fails if outpace's own attention sees one slot too few."""
    monkeypatch.setattr(
        hf_attention.KvCache, "reserved", lambda cache, lane: 10**6
    )  # rows behind the end are then taken as they are
    honest = hf_attention.PackAttention._compute

    def shifted(self, layer, rule, rows, sinks):
        rows[1] = rows[1].roll(1, 0)
        return honest(self, layer, rule, rows, sinks)

    monkeypatch.setattr(hf_attention.PackAttention, "_compute", shifted)
    monkeypatch.setattr(TransformersModel, "row_path", path, raising=False)
    with pytest.raises(UnsupportedModel, match="in pieces of several requests its"):
        TransformersModel(tiny_model(kind))


# The probe of rows.


@pytest.mark.parametrize("kind", RIGHT)
@pytest.mark.thinned(4)
def test_rows_keep_their_bits_here(kind):
    report = probe_rows(TransformersModel(tiny_model(kind)))
    assert (report.row_path, report.passed) == (RowPath.BLOCKS, True)


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("kind", ["gpt2", "qwen2_moe"])
def test_rows_keep_their_bits_in_8_bits(kind, kernels):
    if kernels == "native" and why_unavailable() is not None:
        pytest.skip(why_unavailable())
    model = TransformersModel(tiny_model(kind), precision=Precision("int8", kernels=kernels))
    report = probe_rows(model)
    assert report.passed and report.row_path is RowPath.BLOCKS
    assert "8-bit" in model.describe() or "7-bit" in model.describe()


@pytest.mark.parametrize("pack", [True, False])
def test_rows_keep_their_bits_on_torchs_kernels(pack):
    model = TransformersModel(tiny_model("gpt_neox"), precision=Precision(kernels="torch"), pack=pack)
    assert probe_rows(model).passed


@pytest.mark.slow
def test_two_threads_give_the_same_bits():
    model = TransformersModel(tiny_model("gpt_neox"))
    report = probe_rows(model)
    torch.set_num_threads(2)
    assert same_bits(model, report)


def test_products_left_to_torch_are_noticed(monkeypatch):
    """Without the products taken over, rows depend on their neighbours, and the slow way is taken and told."""
    model = TransformersModel(tiny_model("qwen3", hidden_size=256, intermediate_size=512))
    monkeypatch.setattr(hf_rows.RowProducts, "_times", lambda self, rows, weight, bias: F.linear(rows, weight, bias))
    report = probe_rows(model)
    assert report.changed[RowPath.BLOCKS] > 0
    assert report.row_path is model.row_path is RowPath.SINGLE_ROWS and report.passed
    assert "one row at a time" in model.describe()


def test_attention_that_minds_its_neighbours_is_noticed(monkeypatch):
    honest = hf_attention.attend

    def neighbourly(plan, *rest):
        result = honest(plan, *rest)
        return result if len(plan._products) == plan.num_rows else result * (1 + 2.0**-20)

    model = TransformersModel(tiny_model("qwen3"))
    monkeypatch.setattr(hf_attention, "attend", neighbourly)
    report = probe_rows(model)
    assert report.passed and report.row_path is RowPath.ROW_ATTENTION


@pytest.mark.parametrize("function", [F.silu, torch.cos, torch.tanh, F.gelu])
@pytest.mark.parametrize("width", [5, 20, 32, 90])
def test_curves_give_a_row_the_same_bits_beside_others(function, width):
    products = hf_rows.RowProducts(torch.nn.Linear(4, 4), Precision(kernels="torch"), pack=False)
    rows = torch.randn(37, width, generator=torch.Generator().manual_seed(2)) * 3
    with products.running():
        together, turned = function(rows), function(rows.t().contiguous().t())
        alone = torch.cat([function(row) for row in rows.split(1)])
    assert torch.equal(together, alone) and torch.equal(turned, alone)
    assert torch.allclose(together, function(rows), atol=1e-6)
