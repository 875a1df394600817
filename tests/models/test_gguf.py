"""Conversion of GGUF files: weights by value, config by key, and what is refused."""

from __future__ import annotations

import json
import pwd
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from outpace.errors import CheckpointError, OutpaceError, UnsupportedModel
from outpace.models import gguf as conversion
from outpace.models import stored
from outpace.models.checkpoint import Checkpoint
from outpace.models.config import DecoderConfig, expected_tensors
from outpace.models.gguf import convert_gguf, converted_models
from outpace.models.gguf_file import GgufFile
from outpace.models.tokenizer import Tokenizer
from tests.models.gguf_files import HEAD_DIM, TEMPLATE, write_gguf

Q = gguf.GGMLQuantizationType


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def convert(path: Path) -> Path:
    return convert_gguf(path, lambda message: None)


def config_of(folder: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return value


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_weights_come_back_by_name_and_value(tmp_path: Path, architecture: str, tied: bool) -> None:
    weights = write_gguf(tmp_path / "m.gguf", architecture=architecture, tied=tied)
    folder = convert(tmp_path / "m.gguf")
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.shapes == {name: value.shape for name, value in weights.items()}
    for name, value in weights.items():
        assert torch.equal(checkpoint.get(name).float(), torch.from_numpy(value)), name
    assert set(checkpoint.dtypes.values()) == {torch.float16}
    # The config asks for exactly these tensors.
    config = DecoderConfig.from_hf(config_of(folder))
    checkpoint.check(expected_tensors(config))
    assert config.tie_word_embeddings is tied
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, HEAD_DIM)


@pytest.mark.parametrize("named", [None, "~nouser-of-this-name/x"])
def test_without_a_home_directory_the_way_out_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str | None
) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(f"uid not found: {uid}")

    write_gguf(tmp_path / "m.gguf")
    for name in ("OUTPACE_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    if named is not None:
        monkeypatch.setenv("OUTPACE_CACHE", named)
    with pytest.raises(OutpaceError, match=r"no cache folder .*: set OUTPACE_CACHE to a folder that can be written"):
        convert(tmp_path / "m.gguf")


def test_config_says_what_the_file_says(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", metadata={"llama.rope.freq_base": 500000.0})
    config = config_of(convert(tmp_path / "m.gguf"))
    wanted = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "vocab_size": 264,
        "bos_token_id": 1,
        "eos_token_id": [0, 2],
    }
    assert {key: config[key] for key in wanted} == wanted


def test_head_size_is_taken_from_the_file_when_it_has_one(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", metadata={"llama.attention.key_length": HEAD_DIM, "llama.embedding_length": 64})
    assert config_of(convert(tmp_path / "m.gguf"))["head_dim"] == HEAD_DIM


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 32},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
    ],
)
def test_rope_scaling_is_kept(tmp_path: Path, kind: dict[str, Any], expected: dict[str, Any]) -> None:
    write_gguf(tmp_path / "m.gguf", metadata={f"llama.rope.scaling.{key}": value for key, value in kind.items()})
    assert config_of(convert(tmp_path / "m.gguf"))["rope_parameters"] == {**expected, "rope_theta": 10000.0}


def llama3_factors(theta: float, factor: float) -> np.ndarray[Any, Any]:
    """As llama.cpp's converter computes them for Llama 3.1."""
    frequencies = 1.0 / theta ** (np.arange(0, HEAD_DIM, 2, dtype=np.float64) / HEAD_DIM)
    factors = []
    for wavelength in 2 * np.pi / frequencies:
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192 / 1:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_stored_rope_factors_become_the_scaling_they_came_from(tmp_path: Path, factor: float) -> None:
    factors = llama3_factors(500000.0, factor)
    assert factors.min() == 1 and factors.max() == factor and ((factors > 1) & (factors < factor)).any()
    write_gguf(tmp_path / "m.gguf", metadata={"llama.rope.freq_base": 500000.0}, extra={"rope_freqs.weight": factors})
    folder = convert(tmp_path / "m.gguf")
    assert config_of(folder)["rope_parameters"] == {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert "rope_freqs.weight" not in Checkpoint.open(folder).shapes


def test_rope_factors_of_an_unknown_scaling_are_refused(tmp_path: Path) -> None:
    factors = np.linspace(1, 9, HEAD_DIM // 2, dtype=np.float32)
    write_gguf(tmp_path / "m.gguf", extra={"rope_freqs.weight": factors})
    with pytest.raises(UnsupportedModel, match=r"m\.gguf: its rope_freqs\.weight follow no scaling"):
        convert(tmp_path / "m.gguf")


@pytest.mark.parametrize("kind", [Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q8_0])
def test_quantised_weights_are_what_the_gguf_package_reads(tmp_path: Path, kind: Q) -> None:
    write_gguf(tmp_path / "m.gguf", architecture="qwen2", quantize=kind)
    checkpoint = Checkpoint.open(convert(tmp_path / "m.gguf"))
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    by_name = {tensor.name: tensor for tensor in reader.tensors}
    for theirs, ours in (
        ("blk.1.ffn_up.weight", "model.layers.1.mlp.up_proj.weight"),
        ("output.weight", "lm_head.weight"),
    ):
        wanted = torch.from_numpy(gguf.quants.dequantize(by_name[theirs].data, kind).copy())
        assert by_name[theirs].tensor_type == kind
        assert torch.equal(checkpoint.get(ours), wanted.half())


def test_a_tensor_beyond_float16_is_kept_in_bfloat16(tmp_path: Path) -> None:
    weights = write_gguf(tmp_path / "first.gguf")
    weights["model.norm.weight"] = weights["model.norm.weight"] + np.float32(2.0**17)
    write_gguf(tmp_path / "m.gguf", weights=weights)
    checkpoint = Checkpoint.open(convert(tmp_path / "m.gguf"))
    wanted = torch.from_numpy(weights["model.norm.weight"]).bfloat16()
    assert torch.equal(checkpoint.get("model.norm.weight"), wanted)
    assert checkpoint.dtypes["lm_head.weight"] == torch.float16
    assert checkpoint.num_bytes == 2 * checkpoint.num_weights


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_no_numbers_name_file_and_tensor(tmp_path: Path, value: float) -> None:
    weights = write_gguf(tmp_path / "first.gguf")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = value
    write_gguf(tmp_path / "m.gguf", weights=weights)
    with pytest.raises(CheckpointError, match=r"m\.gguf: tensor 'blk\.1\.ffn_up\.weight' holds values"):
        convert(tmp_path / "m.gguf")


def test_large_tensors_are_read_in_pieces_and_written_in_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "_CHUNK_WEIGHTS", 5 * 64)
    monkeypatch.setattr(conversion, "_SHARD_BYTES", 20_000)
    weights = write_gguf(tmp_path / "m.gguf")
    folder = convert(tmp_path / "m.gguf")
    sizes = [file.stat().st_size for file in folder.glob("model-*.safetensors")]
    assert len(sizes) >= 4
    checkpoint = Checkpoint.open(folder)
    for name, value in weights.items():
        assert torch.equal(checkpoint.get(name).float(), torch.from_numpy(value)), name


# --- files that are not what they should be


@pytest.mark.parametrize("kind", [Q.Q4_0, Q.Q4_1, Q.Q8_0, Q.MXFP4], ids=lambda kind: kind.name)
def test_blocks_with_a_scale_that_is_no_number_name_file_and_tensor(tmp_path: Path, kind: Q) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, quantize=kind)
    tensor = GgufFile(path).tensors["blk.1.ffn_down.weight"]
    block = gguf.GGML_QUANT_SIZES[kind][1]
    data = bytearray(path.read_bytes())
    at = tensor.offset + tensor.num_bytes - block  # of the last block; every bit is set
    data[at : at + block] = b"\xff" * block
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"m\.gguf: tensor 'blk\.1\.ffn_down\.weight' holds values that are not"):
        convert(path)


def test_rows_that_the_heads_cannot_share_name_the_tensor(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", metadata={"llama.attention.head_count": 3})
    with pytest.raises(CheckpointError, match=r"m\.gguf: tensor 'blk\.0\.attn_q\.weight' has 64 rows, not .* 3 heads"):
        convert(tmp_path / "m.gguf")


def test_truncated_file_names_the_tensor_that_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)
    whole = path.read_bytes()
    last = max(GgufFile(path).tensors.values(), key=lambda tensor: tensor.offset)
    path.write_bytes(whole[: last.offset + last.num_bytes - 1])
    with pytest.raises(CheckpointError, match=rf"m\.gguf is truncated: tensor '{last.name}' ends at byte"):
        convert(path)


@pytest.mark.parametrize("length", [3, 4, 8, 20, 24, 60, 500, 5000])
def test_file_cut_inside_its_header_is_named(tmp_path: Path, length: int) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(CheckpointError, match=r"m\.gguf is truncated or damaged: its header ends"):
        convert(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
        (b"<!doctype html><html>", "is an HTML page"),
        (b"", "is empty"),
        (b"PK\x03\x04 something", "is no GGUF file"),
    ],
)
def test_what_stands_in_place_of_a_gguf_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"m\.gguf {message}"):
        convert(tmp_path / "m.gguf")


def test_unknown_block_format_names_file_and_tensor(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)
    data = bytearray(path.read_bytes())
    at = data.index(b"output_norm.weight") + len(b"output_norm.weight") + 4 + 8
    for kind, message in ((999, "unknown type 999"), (int(Q.I32), "stored as I32")):
        data[at : at + 4] = kind.to_bytes(4, "little")
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=rf"m\.gguf: tensor 'output_norm\.weight' is .*{message}"):
            convert(path)


def test_tensor_without_a_place_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", extra={"blk.0.ffn_gate_inp.weight": np.zeros((4, 64), np.float32)})
    with pytest.raises(CheckpointError, match=r"m\.gguf: tensor 'blk\.0\.ffn_gate_inp\.weight' has no place"):
        convert(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("metadata", "error", "message"),
    [
        (
            {"general.architecture": "mamba"},
            UnsupportedModel,
            "architecture 'mamba'; GGUF files of llama, qwen2, qwen3",
        ),
        ({"llama.expert_count": 8}, UnsupportedModel, "mixture of experts"),
        ({"llama.block_count": None}, CheckpointError, "lacks the metadata llama.block_count"),
        ({"llama.rope.dimension_count": 8}, UnsupportedModel, "rotates a part of each head"),
        ({"llama.rope.scaling.type": "longrope"}, UnsupportedModel, "'longrope'; linear and yarn"),
        ({"llama.attention.head_count_kv": [1, 2]}, UnsupportedModel, "differs from layer to layer"),
        ({"split.count": 3}, UnsupportedModel, "one part of a split model"),
        ({"tokenizer.ggml.pre": "dbrx"}, UnsupportedModel, "splits text by 'dbrx'"),
        ({"tokenizer.ggml.pre": None}, UnsupportedModel, "splits text by None"),
        ({"tokenizer.ggml.model": "bert"}, UnsupportedModel, "tokenizer of kind 'bert'"),
        ({"tokenizer.ggml.tokens": None}, CheckpointError, "no tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.merges": None}, CheckpointError, "merges are missing"),
        ({"tokenizer.ggml.merges": ["xx yy"]}, CheckpointError, "do not fit together"),
        ({"tokenizer.ggml.token_type": [1, 2]}, CheckpointError, "264 tokens but 2 token types"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(
    tmp_path: Path, cache: Path, metadata: dict[str, Any], error: type[Exception], message: str
) -> None:
    architecture = metadata.pop("general.architecture", "llama")
    write_gguf(tmp_path / "m.gguf", metadata=metadata)
    if architecture != "llama":
        data = (tmp_path / "m.gguf").read_bytes()
        (tmp_path / "m.gguf").write_bytes(data.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba", 1))
    with pytest.raises(error, match=message) as caught:
        convert(tmp_path / "m.gguf")
    assert "m.gguf" in str(caught.value)
    assert converted_models() == []
    assert [path.name for path in (cache / "converted").iterdir() if path.is_dir()] == []


def test_header_reader_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", metadata={"x.flag": True, "x.list": [1, -2, 3], "x.words": ["a", "é"]})
    mine, theirs = GgufFile(tmp_path / "m.gguf"), gguf.GGUFReader(tmp_path / "m.gguf")
    assert {t.name: (t.offset, t.num_bytes) for t in mine.tensors.values()} == {
        t.name: (t.data_offset, t.n_bytes) for t in theirs.tensors
    }
    fields = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert mine.metadata == fields


def test_tokenizer_and_template_come_from_the_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    tokenizer = Tokenizer.from_folder(convert(tmp_path / "m.gguf"))
    byte = {letter: tokenizer.vocab[letter] for letter in "abo1"}
    assert tokenizer.encode("hello") == [tokenizer.vocab["hell"], byte["o"]]
    assert tokenizer.encode("<|im_start|>a11") == [1, byte["a"], byte["1"], byte["1"]]
    assert tokenizer.encode_chat([{"role": "user", "content": "b"}]) == [1, byte["b"], 2]
    assert "{{ m.content }}" in TEMPLATE
    # Padding tokens are no tokens.
    assert tokenizer.vocab_size == 262 and tokenizer.special_ids == {0, 1, 2} and tokenizer.eos_ids == {2}
