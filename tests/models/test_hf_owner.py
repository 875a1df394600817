"""The model stays its owner's: during a pass it is borrowed, outside of one it is as it was."""

from __future__ import annotations

import copy

import pytest
import torch

from outpace.errors import InvalidParameter, OutOfMemory, UnsupportedModel
from outpace.models import hf
from outpace.models.hf import TransformersModel
from outpace.models.hf_attention import RUN
from outpace.models.hf_bits import probe_rows
from outpace.models.native.library import why_unavailable
from outpace.models.precision import Precision
from outpace.types import Pack, Segment
from tests.models.hf_tiny import eager_logits, tiny_model
from tests.models.tiny_models import pack_of, random_ids

pytestmark = pytest.mark.usefixtures("one_thread")

IDS = random_ids(30, 1)


def lane_of(model):
    cache = model.new_cache(1, 64, 64)
    assert cache.reserve(cache.allocate(), 64)
    return cache


def logits_of(model):
    return model.forward(pack_of((0, 0, IDS)), lane_of(model)).logits


@pytest.mark.parametrize("kind", ["gpt2", "gemma2", "qwen2_moe"])
def test_unchanged_outside_of_a_pass(kind):
    owner = tiny_model(kind)
    tensors = copy.deepcopy(owner.state_dict())
    config, settings = owner.config.to_dict(), (owner.config._attn_implementation, owner.config._experts_implementation)
    calls = []
    owner.register_forward_hook(lambda module, args, output: calls.append(owner.config._attn_implementation))
    with torch.no_grad():
        before = owner(input_ids=torch.tensor([IDS])).logits
    model = TransformersModel(owner)
    logits_of(model)
    assert RUN in calls, "the owner's hook did not see outpace's pass"
    assert (owner.config._attn_implementation, owner.config._experts_implementation) == settings
    assert owner.config.to_dict() == config
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in owner.state_dict().items())
    with torch.no_grad():
        assert torch.equal(owner(input_ids=torch.tensor([IDS])).logits, before)
    assert torch.get_num_threads() == 1


def test_training_goes_on():
    """A model that is being trained keeps its modes and gradients, and its passes here are without dropout."""
    owner = tiny_model("gpt2", attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5).requires_grad_(True).train()
    owner.transformer.h[0].eval()
    modes = [module.training for module in owner.modules()]
    model = TransformersModel(owner)
    first = logits_of(model)
    assert torch.equal(first, logits_of(model)) and not first.requires_grad
    assert [module.training for module in owner.modules()] == modes
    owner(input_ids=torch.tensor([IDS]), labels=torch.tensor([IDS])).loss.backward()
    assert all(weight.grad is not None for weight in owner.parameters())


@pytest.mark.parametrize("pack", [True, False])
def test_follows_weights_that_are_trained(pack):
    owner = tiny_model("qwen3")
    model = TransformersModel(owner, pack=pack)
    before = logits_of(model)
    with torch.no_grad():
        for weight in owner.parameters():
            weight.mul_(1.25)
    after = logits_of(model)
    assert float((after - before).abs().max()) > 0.1
    torch.testing.assert_close(after, eager_logits(owner, IDS), atol=1e-3, rtol=1e-3)


def test_given_back_after_a_failure():
    owner = tiny_model("gpt2").train()
    model = TransformersModel(owner)
    implementation = owner.config._attn_implementation

    def fail(module, args):
        raise ArithmeticError("of the owner's hook")

    handle = owner.transformer.h[1].register_forward_pre_hook(fail)
    with pytest.raises(ArithmeticError):
        logits_of(model)
    handle.remove()
    assert owner.config._attn_implementation == implementation and owner.training
    assert logits_of(model).isfinite().all()


def test_layers_that_are_taken_away_are_noticed():
    owner = tiny_model("gpt2")
    model = TransformersModel(owner)
    owner.transformer.h = owner.transformer.h[:2]
    with pytest.raises(RuntimeError, match="2 of 3 layers attended"):
        logits_of(model)
    owner.transformer.h = torch.nn.ModuleList(reversed(owner.transformer.h))
    with pytest.raises(RuntimeError, match="another module"):
        logits_of(model)


def test_its_attention_outside_of_a_pass_is_an_error():
    owner = tiny_model("gpt2")
    TransformersModel(owner)
    owner.config._attn_implementation_internal = RUN
    with pytest.raises(RuntimeError, match="outside of a pass"):
        owner(input_ids=torch.tensor([IDS]))


def test_two_adapters_share_a_model():
    owner = tiny_model("gpt2")
    one, other = TransformersModel(owner), TransformersModel(owner, vocab_size=50)
    assert torch.equal(logits_of(one)[:, :50], logits_of(other))


@pytest.mark.parametrize("pack", [True, False])
def test_memory_is_counted(pack):
    owner = tiny_model("qwen3")
    own = sum(weight.nbytes for weight in owner.parameters())
    matrices = sum(weight.nbytes for weight in owner.parameters() if weight.dim() > 1)
    model = TransformersModel(owner, pack=pack)
    if pack:
        assert own + 0.9 * matrices < model.weight_bytes < own + 1.4 * matrices
    else:
        assert model.weight_bytes == own
        assert "one row at a time" in model.describe()


def test_without_memory_products_go_row_by_row(monkeypatch, caplog):
    monkeypatch.setattr(hf, "available_bytes", lambda: hf.RESERVE_BYTES + 1000)
    model = TransformersModel(tiny_model("gpt2"))
    assert "weights as loaded, one row at a time" in model.describe()
    assert "products go one row at a time" in caplog.text
    assert probe_rows(model).passed
    with pytest.raises(OutOfMemory, match="packed copies of the weights take"):
        TransformersModel(tiny_model("gpt2"), pack=True)


def test_what_cannot_be_asked_for():
    owner = tiny_model("gpt2")
    with pytest.raises(InvalidParameter, match="max_model_len=321 is not possible: gpt2 has 320 positions"):
        TransformersModel(owner, max_model_len=321)
    with pytest.raises(InvalidParameter, match="quantization='int8' is not possible here"):
        TransformersModel(owner, precision=Precision("int8", kernels="torch"), pack=False)
    if why_unavailable() is None:
        with pytest.raises(InvalidParameter, match=r"quantization='int4'.*possible: none, int8"):
            TransformersModel(owner, precision=Precision("int4"))
        with pytest.raises(InvalidParameter, match="dtype='float16' is not possible for a model in memory"):
            TransformersModel(owner, precision=Precision(dtype="float16"))
    model = TransformersModel(owner)
    asks_for_states = pack_of((0, 0, IDS), aux_layers=(1,))
    with pytest.raises(UnsupportedModel, match="cannot be left or entered in the middle"):
        model.forward(asks_for_states, lane_of(model))
    row = torch.arange(1)
    resumes = Pack(
        row, row, (Segment(0, 0, 1, 0),), row, resume_layer=1, resume_rows=row, resume_hidden=torch.ones(1, 48)
    )
    with pytest.raises(UnsupportedModel, match="early exit"):
        model.forward(resumes, lane_of(model))


def test_rotations_that_depend_on_the_longest_text_are_kept_out_of_reach():
    half = 6
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * half,
        "long_factor": [4.0] * half,
        "original_max_position_embeddings": 128,
    }
    owner = tiny_model("phi3", rope_parameters=rope, original_max_position_embeddings=128)
    assert TransformersModel(owner).max_model_len == 128
    with pytest.raises(InvalidParameter, match="phi3 has 128 positions"):
        TransformersModel(owner, max_model_len=129)
