"""EAGLE-3 heads on disk: read as written in both layouts, and refused by name where they are wrong."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import outpace.heads.writing as writing
from outpace.errors import CheckpointError, InvalidParameter, ModelNotFound, OutpaceError, UnsupportedModel
from outpace.heads import Eagle3Config, Verifier, open_eagle3, open_head, save_eagle3, token_ids_of
from outpace.models.adapter import ADAPTER_TYPE
from outpace.models.eagle3_config import default_aux_layers
from tests.models.tiny_models import LLAMA3_ROPE, SIZES, YARN_ROPE

from .tiny_heads import AUX_LAYERS, rewrite, tiny_config, tiny_target, tiny_tensors

H, V = SIZES["hidden_size"], SIZES["vocab_size"]
LLAMA = Verifier("someone/llama", ("LlamaForCausalLM",))
CONFIGS: dict[str, Eagle3Config] = {
    "usual": tiny_config(),
    "whole vocabulary": tiny_config(V),
    "shared head": tiny_config(shares_target_head=True),
    "own layers": tiny_config(aux_layers=(0, 3), num_aux=2),
    "norms": tiny_config(norm_before_residual=True, norm_before_fc=True, norm_output=True),
    "a norm each": tiny_config(fc_norm=True, fc_bias=True),
    "biases": tiny_config(layer={"attention_bias": True, "mlp_bias": True}),
    "llama3 rope": tiny_config(layer={"rope_scaling": LLAMA3_ROPE}),
    "yarn": tiny_config(layer={"rope_scaling": YARN_ROPE, "max_position_embeddings": 2048}),
    "qwen3": tiny_config(layer={"model_type": "qwen3", "head_dim": 16}),
}


def saved(folder: Path, config: Eagle3Config | None = None, **options: Any) -> Path:
    config = config or tiny_config()
    save_eagle3(folder, config, tiny_tensors(config), **options)
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("layout", ["native", "speculators"])
@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_written_is_read_bit_for_bit(tmp_path: Path, name: str, layout: str, dtype: torch.dtype) -> None:
    config = CONFIGS[name]
    tensors = tiny_tensors(config, embedding=name == "usual")
    tensors = {name: each.to(dtype) if each.is_floating_point() else each for name, each in tensors.items()}
    save_eagle3(tmp_path / "head", config, tensors, layout=layout, verifier=LLAMA)
    found = open_eagle3(tmp_path / "head", tiny_target())
    assert found.config == config
    assert found.verifier == LLAMA
    assert set(found.weights.shapes) == tensors.keys() - {"d2t"}
    for each in found.weights.shapes:
        assert found.weights.get(each).dtype is dtype
        assert torch.equal(found.weights.get(each), tensors[each])
    if config.is_pruned:
        assert found.token_ids is not None and torch.equal(found.token_ids, token_ids_of(tensors["d2t"]))
    else:
        assert found.token_ids is None
    assert sorted(each.name for each in (tmp_path / "head").iterdir()) == ["config.json", "model.safetensors"]
    assert [each.name for each in tmp_path.iterdir()] == ["head"], "something was left beside"


def test_names_and_keys_are_those_of_other_engines(tmp_path: Path) -> None:
    native = load_file(saved(tmp_path / "native") / "model.safetensors")
    assert native["midlayer.self_attn.q_proj.weight"].shape == (H, 2 * H)
    assert native["fc.weight"].shape == (H, 3 * H)
    assert {"midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight", "norm.weight", "d2t"} <= native.keys()
    assert native["t2d"].dtype is torch.bool and native["t2d"].sum() == 60
    ids = native["d2t"] + torch.arange(60)
    assert native["t2d"][ids].all()
    keys = json.loads((tmp_path / "native/config.json").read_text())
    assert keys["architectures"] == ["LlamaForCausalLMEagle3"] and keys["model_type"] == "llama"
    assert keys["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert keys["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2], "ids there are of what leaves a layer"
    assert keys["tie_word_embeddings"] is False and keys["vocab_size"] == V and keys["draft_vocab_size"] == 60
    other = load_file(saved(tmp_path / "spec", layout="speculators", verifier=LLAMA) / "model.safetensors")
    assert other["layers.0.self_attn.q_proj.weight"].shape == (H, 2 * H)
    keys = json.loads((tmp_path / "spec/config.json").read_text())
    assert keys["speculators_model_type"] == "eagle3" and keys["norm_before_residual"] is False
    assert "model_type" not in keys, "vLLM would look for it among the models of transformers"
    assert keys["speculators_config"]["verifier"]["name_or_path"] == "someone/llama"
    assert keys["speculators_config"]["proposal_methods"][0]["speculative_tokens"] > 0
    assert keys["transformer_layer_config"]["vocab_size"] == V


def test_usual_layers_are_not_written_and_follow_the_target(tmp_path: Path) -> None:
    keys = json.loads((saved(tmp_path / "a", tiny_config(aux_layers=None)) / "config.json").read_text())
    assert "eagle_config" not in keys and "eagle_aux_hidden_state_layer_ids" not in keys
    found = open_eagle3(tmp_path / "a", tiny_target(num_hidden_layers=28))
    assert found.config.aux_layers_of(28) == default_aux_layers(28) == (2, 14, 25)
    with pytest.raises(CheckpointError, match=r"layers \[2, 2, 1\]; of a target with 4 layers"):
        open_eagle3(tmp_path / "a", tiny_target())


def test_usual_layers_said_as_an_empty_list(tmp_path: Path) -> None:
    saved(tmp_path, tiny_config(aux_layers=None))
    usual = open_head(tmp_path).config
    for place in ({"eagle_aux_hidden_state_layer_ids": []}, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}):
        rewrite(tmp_path, keys=place)
        assert open_head(tmp_path).config == usual


@pytest.mark.parametrize("layout", ["native", "speculators"])
def test_a_head_for_another_number_of_layers_is_refused(tmp_path: Path, layout: str) -> None:
    """Same width, same vocabulary, and usual layers that both have: it would read other states without a word."""
    saved(tmp_path, tiny_config(aux_layers=None, target_layers=9), layout=layout)
    assert open_eagle3(tmp_path, tiny_target(num_hidden_layers=9)).config.target_layers == 9
    with pytest.raises(CheckpointError, match=r"made for a target of layer count 9; this one has 12"):
        open_eagle3(tmp_path, tiny_target(num_hidden_layers=12))
    rewrite(tmp_path, keys={"target_num_hidden_layers": "9"})
    with pytest.raises(CheckpointError, match=r"target_num_hidden_layers='9'; it must be a whole number"):
        open_head(tmp_path)


def test_a_published_head_opens(tmp_path: Path) -> None:
    """Keys as SafeAILab's heads have them: no architecture of its own, no flags, pickled weights."""
    saved(tmp_path, tiny_config(aux_layers=None))
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    own = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    keys = {**{key: SIZES[key] for key in own}, "num_hidden_layers": 1, "max_position_embeddings": 2048}
    keys |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "draft_vocab_size": 60, "hidden_act": "silu"}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    with pytest.raises(CheckpointError, match="allow_pickle"):
        open_head(tmp_path)
    found = open_eagle3(tmp_path, tiny_target(num_hidden_layers=9), allow_pickle=True)
    assert torch.equal(found.weights.get("fc.weight"), tensors["fc.weight"])
    assert not found.config.norm_before_residual and found.config.num_aux == 3


def test_other_names_of_the_same_tensors(tmp_path: Path) -> None:
    config = tiny_config(fc_norm=True)
    saved(tmp_path, config)
    words = {"fc_norm.0.weight": "aux_norm_low.weight", "norm.weight": "model.norm.weight"}
    stored = load_file(tmp_path / "model.safetensors")
    rewrite(tmp_path, tensors={**dict.fromkeys(words), **{words[name]: stored[name] for name in words}})
    found = open_head(tmp_path)
    for name in words:
        assert torch.equal(found.weights.get(name), stored[name])
    rewrite(tmp_path, tensors={"norm.weight": stored["norm.weight"]})
    with pytest.raises(CheckpointError, match=r"'(model\.)?norm.weight'.* twice"):
        open_head(tmp_path)


BAD_TENSORS: list[tuple[dict[str, Any], str]] = [
    ({"fc.weight": None}, "lacks tensor 'fc.weight'"),
    ({"midlayer.hidden_norm.weight": None}, "lacks tensor 'midlayer.hidden_norm.weight'"),
    ({"lm_head.weight": None}, "lacks tensor 'lm_head.weight'.*shares_target_head"),
    ({"d2t": None}, "lacks tensor 'd2t'"),
    ({"midlayer.more.weight": torch.zeros(2)}, "tensor 'midlayer.more.weight' has no place"),
    ({"mask_hidden": torch.zeros(2)}, "tensor 'mask_hidden' has no place"),
    ({"fc.weight": torch.zeros(H, 2 * H)}, r"'fc.weight' has shape \[72, 144\], .* \[72, 216\]"),
    ({"lm_head.weight": torch.zeros(V, H)}, r"'lm_head.weight' has shape \[97, 72\]"),
    ({"fc.weight": torch.zeros(H, 3 * H, dtype=torch.int8)}, "'fc.weight' is torch.int8"),
    ({"embed_tokens.weight": torch.zeros(V, H + 1)}, "'embed_tokens.weight' has shape"),
    ({"d2t": torch.zeros(61, dtype=torch.int64)}, "'d2t' is torch.int64 of shape"),
    ({"d2t": torch.zeros(60)}, "'d2t' is torch.float32"),
    ({"d2t": -torch.arange(60)}, "'d2t' does not name 60 different tokens"),
    ({"d2t": torch.full((60,), 50)}, "'d2t' does not name 60 different tokens"),
    ({"t2d": torch.zeros(V, dtype=torch.bool)}, "'d2t' and 't2d' contradict"),
]


@pytest.mark.parametrize(("tensors", "message"), BAD_TENSORS, ids=[message[:40] for _, message in BAD_TENSORS])
def test_a_tensor_that_is_wrong_is_named(tmp_path: Path, tensors: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        open_head(rewrite(saved(tmp_path / "head"), tensors=tensors))
    assert str(tmp_path / "head/model.safetensors") in str(caught.value)


BAD_KEYS: list[tuple[dict[str, Any], type[OutpaceError], str]] = [
    ({"num_hidden_layers": 2}, UnsupportedModel, "2 layers"),
    ({"model_type": "gemma"}, UnsupportedModel, "'gemma'"),
    ({"model_type": "mistral"}, UnsupportedModel, "window of 4096"),
    ({"norm_output": 1}, CheckpointError, "norm_output=1; it must be true or false"),
    ({"draft_vocab_size": 98}, CheckpointError, "draft_vocab_size=98"),
    ({"draft_vocab_size": "60"}, CheckpointError, "draft_vocab_size='60'"),
    ({"eagle_aux_hidden_state_layer_ids": ["1"]}, CheckpointError, r"\['1'\]; it must be a list of layer"),
    ({"num_aux_hidden_states": 4}, CheckpointError, r"=4, but names layers \[1, 2, 3\]"),
    ({"eagle_config": {"use_aux_hidden_state": False}}, UnsupportedModel, "use_aux_hidden_state=False"),
    ({"eagle_config": []}, CheckpointError, r"eagle_config=\[\]; it must be an object"),
    ({"medusa_num_heads": 5}, UnsupportedModel, "Medusa"),
    ({"speculators_model_type": "peagle"}, UnsupportedModel, "'peagle' head of speculators"),
    ({"architectures": ["DFlashDraftModel"]}, UnsupportedModel, "DFlash"),
    ({"architectures": ["Qwen3NextMTP"]}, UnsupportedModel, "multi-token.*with method 'mtp'"),
    ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": None}, UnsupportedModel, "describes no EAGLE-3 head"),
    ({"shares_target_head": True}, CheckpointError, "'lm_head.weight' has no place"),
    ({"speculators_model_type": "eagle3"}, CheckpointError, "transformer_layer_config"),
    ({"model_type": ADAPTER_TYPE}, InvalidParameter, "early exit"),
]


@pytest.mark.parametrize(("keys", "kind", "message"), BAD_KEYS, ids=[message[:40] for _, _, message in BAD_KEYS])
def test_a_config_that_is_wrong_is_refused(
    tmp_path: Path, keys: dict[str, Any], kind: type[OutpaceError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        open_head(rewrite(saved(tmp_path / "head"), keys=keys))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 96}, "target of hidden size 72; this one has 96"),
        ({"vocab_size": 100}, "target of vocabulary 97; this one has 100"),
        ({"num_hidden_layers": 3}, "different ones from 0 to 2"),
    ],
)
def test_another_target_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_eagle3(saved(tmp_path / "head"), tiny_target(**changes))


def test_a_head_narrower_than_its_target_needs_embeddings_of_its_own(tmp_path: Path) -> None:
    config = tiny_config(layer={"hidden_size": 48})
    with pytest.raises(CheckpointError, match=r"lacks tensor 'embed_tokens.weight'.*72 wide"):
        open_head(saved(tmp_path / "head", config))
    save_eagle3(tmp_path / "head", config, tiny_tensors(config, embedding=True))
    assert open_eagle3(tmp_path / "head", tiny_target()).has_embedding


@pytest.mark.parametrize("cut", [7, 900, -9])
def test_a_corrupt_file_is_named(tmp_path: Path, cut: int) -> None:
    file = saved(tmp_path / "head") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        open_head(tmp_path / "head")
    (tmp_path / "head/config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_head(tmp_path / "head")
    with pytest.raises(ModelNotFound, match="nowhere"):
        open_head(tmp_path / "nowhere")


def test_ids_that_leave_a_layer_are_understood(tmp_path: Path) -> None:
    keys = {"eagle_aux_hidden_state_layer_ids": None}
    assert open_head(rewrite(saved(tmp_path / "head"), keys=keys)).config.aux_layers == AUX_LAYERS


# Writing.


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"fc.weight": None}, "'fc.weight' is missing"),
        ({"more": torch.zeros(1)}, "'more' has shape .* none of that name"),
        ({"norm.weight": torch.zeros(3)}, r"'norm.weight' has shape \[3\].* \[72\]"),
        ({"d2t": torch.full((60,), 90)}, "'d2t' does not name 60 different"),
    ],
)
def test_what_is_no_head_is_not_written(tmp_path: Path, tensors: dict[str, Any], message: str) -> None:
    found = {**tiny_tensors(tiny_config()), **tensors}
    with pytest.raises(CheckpointError, match=message):
        save_eagle3(tmp_path / "head", tiny_config(), {name: t for name, t in found.items() if t is not None})
    assert list(tmp_path.iterdir()) == []


def test_layouts_and_folders_that_are_not_possible(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="layout='sgl' is not possible: native or speculators"):
        saved(tmp_path / "head", layout="sgl")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    with pytest.raises(InvalidParameter, match=r"holds notes.txt"):
        saved(tmp_path / "full")
    with pytest.raises(InvalidParameter, match="holds a file"):
        saved(tmp_path / "full/notes.txt")


@pytest.mark.parametrize("step", ["save_file", "_flush", "rename"])
def test_a_full_disk_leaves_the_old_head(tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tmp_path / "head")
    before = {file.name: file.read_bytes() for file in folder.iterdir()}

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    calls: list[Path] = []

    def rename(self: Path, target: Path) -> Path:
        calls.append(target)
        if len(calls) == 2:  # the old head lies aside; the new one is about to take its place
            fail()
        return real(self, target)

    real = Path.rename
    with monkeypatch.context() as patch:
        patch.setattr(*((Path, "rename", rename) if step == "rename" else (writing, step, fail)))
        with pytest.raises(OutpaceError, match=r"head cannot be written .*No space left"):
            saved(folder, tiny_config(50))
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert [each.name for each in tmp_path.iterdir()] == ["head"]
    saved(folder, tiny_config(50))
    assert open_head(folder).config.draft_vocab_size == 50
    assert [each.name for each in tmp_path.iterdir()] == ["head"]


def test_files_may_be_read_by_whoever_may_read_others(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("")
    for file in saved(tmp_path / "head").iterdir():
        assert file.stat().st_mode == plain.stat().st_mode


def test_tensors_that_share_memory_are_written(tmp_path: Path) -> None:
    config = tiny_config(V)
    tensors = tiny_tensors(config)
    tensors["embed_tokens.weight"] = tensors["lm_head.weight"]
    save_eagle3(tmp_path / "head", config, tensors)
    found = open_head(tmp_path / "head")
    assert torch.equal(found.weights.get("embed_tokens.weight"), found.weights.get("lm_head.weight"))
