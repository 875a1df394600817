"""Block formats: every one from file to folder to floats, and what is told of damage and of sizes."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from outpace.models import stored
from outpace.models.checkpoint import Checkpoint
from outpace.models.config import DecoderConfig, expected_tensors
from outpace.models.gguf import convert_gguf
from outpace.models.stored import FLOAT_KINDS, QuantizedBlocks, block_size, dequantize_rows, rows_are_finite, to_half
from tests.models import gguf_files
from tests.models.gguf_files import write_gguf

Q = gguf.GGMLQuantizationType
BLOCK_KINDS = [kind for kind in Q if block_size(kind.name) is not None]
package_quantize = gguf.quants.quantize


def random_blocks(count: int, kind: Q, seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (count, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)


def quantize(values: np.ndarray[Any, Any], kind: Q) -> np.ndarray[Any, Any]:
    """As the package does it; where it cannot, bytes that depend on the row alone and are finite numbers."""
    try:
        raw: np.ndarray[Any, Any] = package_quantize(values, kind)
        return raw
    except NotImplementedError:
        count, pool = values.shape[1] // gguf.GGML_QUANT_SIZES[kind][0], finite_blocks(kind)
        seeds = [zlib.crc32(row.tobytes()) for row in values]
        return np.stack([pool[seed % 1000 :][:count].reshape(-1) for seed in seeds])


@cache
def finite_blocks(kind: Q) -> np.ndarray[Any, Any]:
    drawn = random_blocks(2000, kind, seed=0)
    finite = drawn[np.isfinite(dequantize_rows(drawn, kind.name)).all(axis=1)]
    assert len(finite) > 1100
    return finite


def can_quantize(kind: Q) -> bool:
    try:
        package_quantize(np.zeros((1, 256), np.float32), kind)
    except NotImplementedError:
        return False
    return True


def rounded(values: torch.Tensor) -> torch.Tensor:
    return values.half() if values.abs().max() <= torch.finfo(torch.float16).max else values.bfloat16()


@pytest.fixture
def wide_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where to write a model whose rows hold whole blocks of every format, with a cache beside it."""
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    for name, value in {"HIDDEN": 256, "WIDE": 512, "HEAD_DIM": 64}.items():
        monkeypatch.setattr(gguf_files, name, value)
    monkeypatch.setattr(gguf.quants, "quantize", quantize)
    return tmp_path / "m.gguf"


def test_the_formats_in_use_are_known() -> None:
    names = {kind.name for kind in BLOCK_KINDS}
    assert names >= {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"}
    assert names.isdisjoint(FLOAT_KINDS)
    assert {kind.name for kind in BLOCK_KINDS if can_quantize(kind)} >= {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"}
    assert [block_size(name) for name in ("F16", "I8", "Q8_K", "nonsense", "", "Q4_K", "Q4_0")] == [
        None, None, None, None, None, (256, 144), (32, 18),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", BLOCK_KINDS, ids=lambda kind: kind.name)
def test_blocks_come_through_unchanged_and_their_floats_are_the_packages(wide_model: Path, kind: Q) -> None:
    weights = write_gguf(wide_model, architecture="llama", quantize=kind)
    folder = convert_gguf(wide_model, lambda message: None)
    checkpoint = Checkpoint.open(folder)
    checkpoint.check(expected_tensors(DecoderConfig.from_hf(json.loads((folder / "config.json").read_text()))))
    assert checkpoint.shapes == {name: value.shape for name, value in weights.items()}
    assert set(checkpoint.dtypes.values()) == {torch.float16}
    assert checkpoint.num_weights == sum(value.size for value in weights.values())
    size = 0
    for name, value in weights.items():
        blocks = checkpoint.blocks(name)
        if value.ndim == 1:
            assert blocks is None and torch.equal(checkpoint.get(name), torch.from_numpy(value).half())
            size += 2 * value.size
            continue
        raw = quantize(value, kind)  # in Hugging Face's order of rows, q and k too
        assert blocks is not None and (blocks.kind, blocks.shape) == (kind.name, value.shape)
        assert np.array_equal(blocks.data.numpy(), raw), name
        wanted = torch.from_numpy(gguf.quants.dequantize(raw, kind).copy())
        assert torch.equal(blocks.dequantize(), wanted), name
        assert torch.equal(blocks.dequantize(3, 7), wanted[3:7]) and torch.equal(blocks.dequantize(5), wanted[5:])
        found = checkpoint.get(name)
        assert found.dtype == rounded(wanted).dtype and torch.equal(found, rounded(wanted)), name
        size += raw.nbytes
    assert checkpoint.num_bytes == size
    # What is on the disk is that and little else.
    assert size < sum(file.stat().st_size for file in folder.glob("*.safetensors")) < size + 20_000


def test_blocks_lie_in_shards_with_the_kinds_of_their_own(wide_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.models.gguf._SHARD_BYTES", 100_000)
    weights = write_gguf(wide_model, architecture="qwen2", quantize=Q.Q5_0)
    folder = convert_gguf(wide_model, lambda message: None)
    assert len(list(folder.glob("model-*.safetensors"))) >= 4
    checkpoint = Checkpoint.open(folder)
    for name, value in weights.items():
        blocks = checkpoint.blocks(name)
        assert (blocks is not None) == (value.ndim == 2)
        if blocks is not None:
            assert np.array_equal(blocks.data.numpy(), quantize(value, Q.Q5_0))


@pytest.mark.parametrize("kind", BLOCK_KINDS, ids=lambda kind: kind.name)
def test_scales_tell_what_the_values_tell(kind: Q) -> None:
    """Of random blocks some are damaged; each is found, and no other."""
    drawn = random_blocks(1000, kind, seed=1)
    finite = np.isfinite(dequantize_rows(drawn, kind.name)).all(axis=1)
    assert finite.any() and (kind.name == "NVFP4" or not finite.all())  # NVFP4 has no infinite scale
    assert [rows_are_finite(drawn[row : row + 1], kind.name) for row in range(len(drawn))] == finite.tolist()
    assert rows_are_finite(drawn[finite], kind.name)


@pytest.mark.parametrize("kind", [Q.Q4_K, Q.Q6_K, Q.MXFP4], ids=lambda kind: kind.name)
def test_one_damaged_block_among_pieces_is_found(kind: Q, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = random_blocks(3000, kind, seed=2)
    finite = np.isfinite(dequantize_rows(drawn, kind.name)).all(axis=1)
    rows = drawn[finite][:60].reshape(30, -1)
    monkeypatch.setattr(stored, "_CHUNK_WEIGHTS", 4 * rows.shape[1])
    assert rows_are_finite(rows, kind.name)
    for at in (0, 13, 29):
        damaged = rows.copy()
        damaged[at, -drawn.shape[1] :] = drawn[~finite][0]
        assert not rows_are_finite(damaged, kind.name)


# --- one matrix


def q8_blocks(rows: int = 6, columns: int = 64) -> QuantizedBlocks:
    values = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)
    return QuantizedBlocks("Q8_0", (rows, columns), torch.from_numpy(package_quantize(values, Q.Q8_0)))


def test_rows_that_are_not_there_are_refused() -> None:
    blocks = q8_blocks()
    assert blocks.dequantize(6).shape == (0, 64) and blocks.dequantize(2, 2).shape == (0, 64)
    for begin, end in ((-1, 3), (0, 7), (4, 3), (7, None)):
        with pytest.raises(ValueError, match="the matrix has 6"):
            blocks.dequantize(begin, end)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: ("Q9_9", (6, 64), data), "'Q9_9', which outpace does not read"),
        (lambda data: ("F16", (6, 64), data), "'F16', which outpace does not read"),
        (lambda data: ("Q8_0", (6, 65), data), r"hold \(6, 64\), not \(6, 65\)"),
        (lambda data: ("Q8_0", (5, 64), data), r"hold \(6, 64\), not \(5, 64\)"),
        (lambda data: ("Q8_0", (6, 64), data[:, 1:]), "in whole blocks of 34 bytes"),
        (lambda data: ("Q8_0", (6, 64), data.view(torch.int8)), r"torch\.int8 of shape \[6, 68\] is no matrix"),
        (lambda data: ("Q8_0", (6, 64), data.flatten()), r"\[rows, bytes a row\]"),
    ],
)
def test_blocks_that_do_not_fit_their_shape_are_refused(change: Callable[[torch.Tensor], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QuantizedBlocks(*change(q8_blocks().data))


def test_half_is_made_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, asked = q8_blocks(rows=50), []
    original = stored.dequantize_rows

    def counted(raw: np.ndarray[Any, Any], kind: str) -> np.ndarray[Any, Any]:
        asked.append(len(raw))
        return original(raw, kind)

    monkeypatch.setattr(stored, "dequantize_rows", counted)
    monkeypatch.setattr(stored, "_CHUNK_WEIGHTS", 7 * 64)
    half = blocks.to_half()
    assert asked == [7] * 7 + [1]
    monkeypatch.undo()
    assert half is not None and torch.equal(half, blocks.dequantize().half())


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(65504.0, torch.float16), (65505.0, torch.bfloat16), (-1e38, torch.bfloat16), (np.inf, None), (np.nan, None)],
)
def test_half_takes_the_narrowest_type_that_holds_all(value: float, dtype: torch.dtype | None) -> None:
    values = np.ones((4, 8), np.float32)
    values[3, 7] = value
    half = to_half(lambda begin, end: values[begin:end], (4, 8))
    if dtype is None:
        assert half is None
    else:
        assert half is not None and torch.equal(half, torch.from_numpy(values).to(dtype)) and half.dtype == dtype
