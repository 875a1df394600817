"""A model's files, opened together: EOS ids, sampling defaults, errors, and the real packaged model."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from outpace.errors import CheckpointError
from outpace.models.config import DecoderConfig, expected_tensors
from outpace.models.load import LoadedFiles, load_files
from outpace.params import SamplingDefaults
from tests.models.gguf_files import write_gguf
from tests.models.tiny_tokenizers import byte_level


def make_folder(path: Path, *, eos: Any = None, generation: dict[str, Any] | None = None) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": eos}))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    byte_level().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    save_file({"w": torch.zeros(2, 2)}, str(path / "model.safetensors"))
    return path


@pytest.mark.parametrize(
    ("eos", "generation", "expected"),
    [
        (None, None, {1}),
        (7, None, {1, 7}),
        ([7, 8], {"eos_token_id": 9}, {1, 7, 8, 9}),
        (1, {"eos_token_id": [9, 7]}, {1, 7, 9}),
    ],
)
def test_eos_ids_are_the_union(tmp_path: Path, eos: Any, generation: dict[str, Any] | None, expected: set[int]) -> None:
    assert load_files(str(make_folder(tmp_path / "m", eos=eos, generation=generation))).eos_ids == expected


@pytest.mark.parametrize("eos", ["2", -1, [1, None], True, 1.5])
def test_eos_ids_that_are_none_name_the_file(tmp_path: Path, eos: Any) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: eos_token_id="):
        load_files(str(make_folder(tmp_path / "m", eos=eos)))


@pytest.mark.parametrize(
    ("generation", "cli", "api"),
    [
        (None, (0.0, 1.0, 0), (1.0, 1.0, 0)),
        ({}, (0.0, 1.0, 0), (1.0, 1.0, 0)),
        ({"eos_token_id": 2}, (0.0, 1.0, 0), (1.0, 1.0, 0)),
        ({"temperature": 0.7, "top_p": 0.8, "top_k": 20}, (0.7, 0.8, 20), (0.7, 0.8, 20)),
        ({"do_sample": True, "temperature": 0.6}, (0.6, 1.0, 0), (0.6, 1.0, 0)),
        ({"do_sample": True, "top_p": 0.9}, (1.0, 0.9, 0), (1.0, 0.9, 0)),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.9}, (0.0, 0.9, 0), (0.0, 0.9, 0)),
        (
            {"repetition_penalty": 1.05, "temperature": 0.7, "min_p": 0.1},
            (0.7, 1.0, 0, 0.1, 1.05),
            (0.7, 1.0, 0, 0.1, 1.05),
        ),
        ({"temperature": None, "top_p": None, "top_k": None}, (0.0, 1.0, 0), (1.0, 1.0, 0)),
    ],
)
def test_sampling_defaults(tmp_path: Path, generation: Any, cli: tuple[Any, ...], api: tuple[Any, ...]) -> None:
    files = load_files(str(make_folder(tmp_path / "m", generation=generation)))
    assert files.sampling_defaults("cli") == SamplingDefaults(*cli, max_tokens=512)
    assert files.sampling_defaults("api") == SamplingDefaults(*api, max_tokens=None)


@pytest.mark.parametrize(
    "generation", [{"temperature": -1}, {"top_p": 0}, {"top_k": "many"}, {"repetition_penalty": 0}]
)
def test_impossible_defaults_name_the_file(tmp_path: Path, generation: dict[str, Any]) -> None:
    files = load_files(str(make_folder(tmp_path / "m", generation=generation)))
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: {next(iter(generation))}="):
        files.sampling_defaults("cli")


def test_gguf_file_is_converted_and_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    weights = write_gguf(tmp_path / "tiny model.gguf")
    messages: list[str] = []
    files = load_files(str(tmp_path / "tiny model.gguf"), notify=messages.append)
    assert messages[0].startswith("converting tiny model.gguf (once)")
    assert files.label == "tiny model" and files.folder.parent == tmp_path / "cache/converted"
    assert files.generation_config == {} and files.eos_ids == {0, 2}
    assert files.checkpoint.shapes.keys() == weights.keys()
    assert files.config["model_type"] == "llama" and files.tokenizer.has_chat_template
    assert files.sampling_defaults("cli") == SamplingDefaults(0.0, 1.0, 0, max_tokens=512)


def test_damaged_config_is_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    (folder / "config.json").write_text("<html>")
    with pytest.raises(CheckpointError, match=r"m/config\.json cannot be read as JSON"):
        load_files(str(folder))


@pytest.mark.smollm2
def test_smollm2_is_complete(smollm2_files: LoadedFiles) -> None:
    config = DecoderConfig.from_hf(smollm2_files.config)
    smollm2_files.checkpoint.check(expected_tensors(config))
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)
    assert (config.head_dim, config.vocab_size, config.rope.theta) == (64, 49_152, 100_000.0)
    assert config.tie_word_embeddings and config.rms_norm_eps == 1e-5
    assert smollm2_files.checkpoint.num_weights == 134_515_008
    # The file's own blocks: the embedding in 34 bytes for 32 weights, the linear layers in 20, norms in float16.
    embedding, norms = 49_152 * 576, 61 * 576
    linear = 134_515_008 - embedding - norms
    assert Counter(smollm2_files.checkpoint.kinds.values()) == {"Q8_0": 1, "Q4_1": 7 * 30}
    assert smollm2_files.checkpoint.num_bytes == embedding // 32 * 34 + linear // 32 * 20 + 2 * norms
    assert smollm2_files.eos_ids == {0, 2}
