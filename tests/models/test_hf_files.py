"""Models of transformers from a folder: the whole way from files to text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from outpace import LLM, SamplingParams
from outpace.errors import CheckpointError, InvalidParameter, UnsupportedModel
from tests.models.hf_tiny import tiny_model
from tests.models.tiny_tokenizers import byte_level

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS: dict[str, Any] = {"threads": 1, "cache_tokens": 512, "max_model_len": 128}
PARAMS = [
    SamplingParams(max_tokens=16, temperature=0),
    SamplingParams(max_tokens=16, temperature=0.9, top_p=0.9, seed=3),
]


def write_model(folder: Path, kind: str, **changes: Any) -> Path:
    tiny_model(kind, vocab_size=300, **changes).save_pretrained(folder)
    byte_level().save(str(folder / "tokenizer.json"))
    return folder


def texts(model: Path, speculative: Any, **options: Any) -> list[list[int]]:
    llm = LLM(str(model), speculative, **{**OPTIONS, **options})
    return [llm.generate("hello hello hello", params)[0].outputs[0].token_ids for params in PARAMS]


@pytest.mark.parametrize(
    "options",
    [
        {"quantization": "none"},
        {"quantization": "int8"},
        {},
        {"quantization": "none", "dtype": "bfloat16"},
        {"kernels": "torch", "quantization": "none"},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["gpt2", "gemma2"])
@pytest.mark.thinned(4)
def test_text_with_and_without_drafts(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    folder = write_model(tmp_path / kind, kind)
    notes: list[str] = []
    plain = texts(folder, "none", notify=notes.append, **options)
    assert [len(ids) for ids in plain] == [16, 16]
    assert any("runs on transformers' layers" in note and f"model type '{kind}'" in note for note in notes)
    assert texts(folder, "ngram", **options) == plain
    draft = write_model(tmp_path / "draft", kind, **{"n_layer" if kind == "gpt2" else "num_hidden_layers": 1})
    assert texts(folder, {"method": "draft_model", "model": str(draft)}, **options) == plain


def test_settings_tell_the_numbers(tmp_path: Path) -> None:
    llm = LLM(str(write_model(tmp_path / "gpt2", "gpt2")), "none", quantization="none", **OPTIONS)
    settings = llm.describe()
    assert settings["engine"]["quantization"] == "none"
    assert "same bits in every pack" in settings["row_independence"]


def test_early_exit_is_refused_before_weights_are_loaded(tmp_path: Path) -> None:
    folder, heard = write_model(tmp_path / "gpt2", "gpt2"), []
    with pytest.raises(UnsupportedModel, match="early_exit' is not possible with gpt2"):
        LLM(str(folder), {"method": "early_exit"}, progress=lambda what, *_: heard.append(what), **OPTIONS)
    assert heard == []


def test_a_head_on_its_states_is_refused_before_weights_are_loaded(tmp_path: Path) -> None:
    folder, heard = write_model(tmp_path / "gpt2", "gpt2"), []
    head = {"method": "eagle3", "model": "some/head"}
    with pytest.raises(UnsupportedModel, match=r"eagle3' is not possible with gpt2.*states cannot be had"):
        LLM(str(folder), head, progress=lambda what, *_: heard.append(what), **OPTIONS)
    assert heard == []


@pytest.mark.parametrize("kind", ["rwkv", "mamba", "lfm2", "bloom"])
def test_refused_from_its_config_or_its_forward(kind: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=f"{kind} is not possible"):
        LLM(str(write_model(tmp_path / kind, kind)), "none", **OPTIONS)


def test_what_transformers_does_not_know_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "gpt2", "gpt2")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "nobody"}))
    with pytest.raises(UnsupportedModel, match="is not one of the causal language models that transformers makes"):
        LLM(str(folder), "none", **OPTIONS)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "gpt2", "gpt2")
    tensors = load_file(folder / "model.safetensors")
    del tensors["transformer.h.1.mlp.c_fc.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"missing tensors: transformer\.h\.1\.mlp\.c_fc\.weight"):
        LLM(str(folder), "none", **OPTIONS)


def test_int4_is_refused_before_weights_are_loaded(tmp_path: Path) -> None:
    folder, heard = write_model(tmp_path / "gpt2", "gpt2"), []
    with pytest.raises(InvalidParameter, match="int4"):
        LLM(str(folder), "none", quantization="int4", progress=lambda what, *_: heard.append(what), **OPTIONS)
    assert heard == []
