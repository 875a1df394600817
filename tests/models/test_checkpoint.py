"""Checkpoints on disk: what is read, and that every kind of damage names its file and tensor."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from outpace.errors import CheckpointError
from outpace.models import checkpoint as checkpoint_module
from outpace.models.checkpoint import Checkpoint, read_json
from outpace.models.stored import header_metadata

EMBEDDING = "model.embed_tokens.weight"


def tensors() -> dict[str, torch.Tensor]:
    return {
        EMBEDDING: torch.arange(12, dtype=torch.float16).reshape(4, 3),
        "model.norm.weight": torch.tensor([1.0, 2.0, 3.0]),
        "model.layers.0.mlp.up_proj.weight": torch.full((2, 3), 0.5, dtype=torch.bfloat16),
    }


def write_sharded(folder: Path) -> dict[str, str]:
    stored = tensors()
    places = {name: f"model-0000{number}-of-00003.safetensors" for number, name in enumerate(stored, 1)}
    for name, shard in places.items():
        save_file({name: stored[name]}, str(folder / shard))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return places


def expected() -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors().items()}


def header(entries: dict[str, object]) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


def huge_file(path: Path, num_bytes: int) -> None:
    """A file of one tensor that takes no room on the disk."""
    begin = header({"w": {"dtype": "F16", "shape": [num_bytes // 2], "data_offsets": [0, num_bytes]}})
    path.write_bytes(begin)
    with path.open("r+b") as file:
        file.truncate(len(begin) + num_bytes)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_file_larger_than_memory_is_opened_but_not_mapped(tmp_path: Path, sharded: bool) -> None:
    """So that whoever opens it can say how much memory is missing."""
    name, num_bytes = ("part.safetensors" if sharded else "model.safetensors"), 2 << 40
    huge_file(tmp_path / name, num_bytes)
    if sharded:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.num_bytes == num_bytes
    checkpoint.check({"w": (num_bytes // 2,)})


def test_a_tensor_that_cannot_be_read_names_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError("unable to mmap\nmore")

    save_file(tensors(), str(tmp_path / "model.safetensors"))
    monkeypatch.setattr(checkpoint_module, "safe_open", fail)
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors: tensor 'model\.norm.* cannot be read \(unable to mmap\)"
    ):
        Checkpoint.open(tmp_path).get("model.norm.weight")


@pytest.mark.parametrize("sharded", [False, True])
def test_reads_every_tensor_as_stored(tmp_path: Path, sharded: bool) -> None:
    if sharded:
        write_sharded(tmp_path)
    else:
        save_file(tensors(), str(tmp_path / "model.safetensors"))
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.shapes == expected()
    assert checkpoint.dtypes == {name: tensor.dtype for name, tensor in tensors().items()}
    assert checkpoint.num_bytes == 12 * 2 + 3 * 4 + 6 * 2
    assert checkpoint.num_weights == 12 + 3 + 6
    for name, tensor in tensors().items():
        assert torch.equal(checkpoint.get(name), tensor) and checkpoint.get(name).dtype == tensor.dtype
    checkpoint.check(expected())


def test_get_names_an_unknown_tensor(tmp_path: Path) -> None:
    save_file(tensors(), str(tmp_path / "model.safetensors"))
    with pytest.raises(CheckpointError, match=r"model\.safetensors has no tensor 'nope'"):
        Checkpoint.open(tmp_path).get("nope")


def test_check_names_a_missing_a_misshapen_and_an_extra_tensor(tmp_path: Path) -> None:
    save_file(tensors(), str(tmp_path / "model.safetensors"))
    checkpoint = Checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.safetensors lacks tensor 'model\.new\.weight' of shape \[7\]"):
        checkpoint.check({**expected(), "model.new.weight": (7,)})
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' has shape \[3\], config\.json asks for \[5\]"):
        checkpoint.check({**expected(), "model.norm.weight": (5,)})
    rest = {name: shape for name, shape in expected().items() if name != EMBEDDING}
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor 'model\.embed_tokens\.weight' has no place"):
        checkpoint.check(rest)


def test_check_lets_known_extras_pass_but_still_wants_an_expected_head(tmp_path: Path) -> None:
    extras = {"lm_head.weight": torch.ones(4, 3), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    save_file({**tensors(), **extras}, str(tmp_path / "model.safetensors"))
    checkpoint = Checkpoint.open(tmp_path)
    checkpoint.check(expected())
    with pytest.raises(CheckpointError, match=r"'lm_head\.weight' has shape \[4, 3\]"):
        checkpoint.check({**expected(), "lm_head.weight": (5, 3)})


def test_check_refuses_integers_as_weights(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2, dtype=torch.int8)}, str(tmp_path / "model.safetensors"))
    with pytest.raises(CheckpointError, match=r"tensor 'w' is torch\.int8"):
        Checkpoint.open(tmp_path).check({"w": (2,)})


def test_truncated_file_names_the_first_tensor_that_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(100), "b": torch.zeros(100), "c": torch.zeros(100)}, str(path))
    whole = path.read_bytes()
    path.write_bytes(whole[:-500])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated: tensor 'b' ends at byte"):
        Checkpoint.open(tmp_path)
    path.write_bytes(whole[:50])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is no safetensors file, or ends inside its header"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", "is a Git LFS pointer"),
        (b"\n <!DOCTYPE html><html><body>Log in</body></html>", "is an HTML page"),
        (b"<html>404</html>", "is an HTML page"),
        (b"", "is empty"),
        (b"something else altogether", "is no safetensors file"),
        ((16).to_bytes(8, "little") + b"{not json}      ", "has a damaged header"),
        (header({"w": {"dtype": "F32", "shape": [2]}}), r"has a damaged header \(tensor 'w'\)"),
        (header({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}), r"damaged header \(size of tensor 'w'"),
        (header({"w": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}), "tensor 'w' is of unknown type F4"),
        (header({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}) + b"12345", "goes on behind its last"),
    ],
)
@pytest.mark.parametrize("sharded", [False, True])
def test_names_what_stands_in_place_of_weights(tmp_path: Path, content: bytes, message: str, sharded: bool) -> None:
    name = list(write_sharded(tmp_path).values())[1] if sharded else "model.safetensors"
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint.open(tmp_path)
    assert str(tmp_path / name) in str(caught.value)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    shard = write_sharded(tmp_path)["model.norm.weight"]
    (tmp_path / shard).unlink()
    with pytest.raises(CheckpointError, match=f"{shard} is missing"):
        Checkpoint.open(tmp_path)


def test_index_that_names_a_tensor_its_shard_lacks(tmp_path: Path) -> None:
    places = write_sharded(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {**places, "ghost": places[EMBEDDING]}}))
    with pytest.raises(CheckpointError, match=f"{places[EMBEDDING]} lacks tensor 'ghost'"):
        Checkpoint.open(tmp_path)


def test_tensor_the_index_forgot_is_not_overlooked(tmp_path: Path) -> None:
    places = write_sharded(tmp_path)
    save_file({"model.norm.weight": torch.ones(3), "stowaway": torch.ones(1)}, tmp_path / places["model.norm.weight"])
    with pytest.raises(CheckpointError, match="tensor 'stowaway' has no place"):
        Checkpoint.open(tmp_path).check(expected())


@pytest.mark.parametrize("text", ["{", "[1]", '{"weight_map": 3}', "{}"])
def test_damaged_index_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        Checkpoint.open(tmp_path)


def test_folder_without_weights_says_what_belongs_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no model\.safetensors and no model\.safetensors\.index\.json"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("zipped", [True, False])
def test_pickled_weights_only_when_allowed(tmp_path: Path, zipped: bool) -> None:
    torch.save(tensors(), tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match=r"only pickled weights.*--allow-pickle"):
        Checkpoint.open(tmp_path)
    checkpoint = Checkpoint.open(tmp_path, allow_pickle=True)
    checkpoint.check(expected())
    assert torch.equal(checkpoint.get(EMBEDDING), tensors()[EMBEDDING])


def test_safetensors_are_preferred_to_pickled_weights(tmp_path: Path) -> None:
    save_file(tensors(), str(tmp_path / "model.safetensors"))
    (tmp_path / "pytorch_model.bin").write_bytes(b"never opened")
    Checkpoint.open(tmp_path, allow_pickle=True).check(expected())


class Payload:
    """Would run code while it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (Path.touch, (Path("ran"),))  # type: ignore[return-value]


@pytest.mark.parametrize("content", [{"w": Payload()}, {"w": 3}, [torch.ones(1)]])
def test_pickles_that_hold_more_than_tensors_are_refused(
    tmp_path: Path, content: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        Checkpoint.open(tmp_path, allow_pickle=True)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "content", [b"\x80", b"a", b"\x80\x02.", b"PK\x03\x04", b"0" * 100, b"\x80\x02(K\x01e.", b"t."]
)
def test_pickles_that_cannot_be_read_name_the_file(tmp_path: Path, content: bytes) -> None:
    """torch's unpickler raises IndexError, EOFError, UnpicklingError, KeyError and others over damage."""
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin cannot be read as pickled weights"):
        Checkpoint.open(tmp_path, allow_pickle=True)


# --- matrices in block formats


def q8_rows(rows: int = 4, columns: int = 64) -> torch.Tensor:
    values = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)
    return torch.from_numpy(gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0))


def test_blocks_are_a_matrix_to_whoever_asks(tmp_path: Path) -> None:
    rows = q8_rows()
    metadata = {"format": "pt", **header_metadata({"w": "Q8_0"})}
    save_file({"w": rows, "b": torch.ones(3)}, str(tmp_path / "model.safetensors"), metadata=metadata)
    checkpoint = Checkpoint.open(tmp_path)
    checkpoint.check({"w": (4, 64), "b": (3,)})
    assert checkpoint.shapes == {"w": (4, 64), "b": (3,)}
    assert checkpoint.dtypes == {"w": torch.float16, "b": torch.float32}
    assert checkpoint.num_bytes == rows.numel() + 12 and checkpoint.num_weights == 4 * 64 + 3
    blocks = checkpoint.blocks("w")
    assert blocks is not None and blocks.kind == "Q8_0" and torch.equal(blocks.data, rows)
    assert checkpoint.blocks("b") is None and torch.equal(checkpoint.get("b"), torch.ones(3))
    assert torch.equal(checkpoint.get("w"), blocks.dequantize().half())
    with pytest.raises(CheckpointError, match=r"tensor 'w' has shape \[4, 64\], config\.json asks for \[4, 68\]"):
        checkpoint.check({"w": (4, 68), "b": (3,)})
    with pytest.raises(CheckpointError, match=r"model\.safetensors has no tensor 'nope'"):
        checkpoint.blocks("nope")


def test_pickled_weights_are_floats(tmp_path: Path) -> None:
    torch.save(tensors(), tmp_path / "pytorch_model.bin")
    checkpoint = Checkpoint.open(tmp_path, allow_pickle=True)
    assert [checkpoint.blocks(name) for name in tensors()] == [None] * 3
    assert checkpoint.num_bytes == 12 * 2 + 3 * 4 + 6 * 2


@pytest.mark.parametrize(("bits", "dtype"), [(0x7BFF, torch.bfloat16), (0x7C00, None), (0x7E00, None)])
def test_scales_beyond_float16_are_kept_and_those_that_are_no_numbers_refused(
    tmp_path: Path, bits: int, dtype: torch.dtype | None
) -> None:
    """The manifest of a converted folder does not look at every byte, so damage can show as late as here."""
    rows = q8_rows()
    rows[2, :2] = torch.tensor([bits & 0xFF, bits >> 8])
    rows[2, 2] = 100
    save_file({"w": rows}, str(tmp_path / "model.safetensors"), metadata=header_metadata({"w": "Q8_0"}))
    checkpoint = Checkpoint.open(tmp_path)
    if dtype is None:
        with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor 'w' holds values that are not finite"):
            checkpoint.get("w")
        with pytest.raises(CheckpointError, match=r"not finite: a damaged file; delete .* which is then made again"):
            checkpoint.blocks("w")
        return
    blocks = checkpoint.blocks("w")
    assert blocks is not None and blocks.dequantize()[2, 0] == 65504 * 100
    assert torch.equal(checkpoint.get("w"), blocks.dequantize().to(dtype)) and checkpoint.get("w").dtype == dtype


BLOCKS_KEY = next(iter(header_metadata({"w": "Q8_0"})))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "has a damaged header .*is no JSON"),
        ("[" * 100_000, "has a damaged header .*is no JSON"),
        ('["w"]', "has a damaged header .*is no object of names and kinds"),
        ('{"w": 8}', "has a damaged header .*is no object of names and kinds"),
        ('{"w": "Q8_0", "ghost": "Q8_0"}', "has a damaged header .*no tensor 'ghost', said to be blocks"),
        ('{"w": "Q9_9"}', "tensor 'w' cannot be read: its blocks are said to be 'Q9_9'"),
        ('{"w": "Q8_K"}', "tensor 'w' cannot be read: its blocks are said to be 'Q8_K'"),
        ('{"w": "F16"}', "tensor 'w' cannot be read: its blocks are said to be 'F16'"),
        ('{"w": "Q4_K"}', r"tensor 'w' .*torch\.uint8 of shape \[4, 68\] is no matrix in Q4_K.*of 144 bytes"),
        ('{"b": "Q8_0"}', r"tensor 'b' .*torch\.float32 of shape \[34\] is no matrix in Q8_0"),
        ('{"flat": "Q8_0"}', r"tensor 'flat' .*torch\.uint8 of shape \[34\] is no matrix"),
        ('{"none": "Q8_0"}', r"tensor 'none' .*torch\.uint8 of shape \[4, 0\] is no matrix"),
    ],
)
@pytest.mark.parametrize("sharded", [False, True])
def test_nonsense_about_blocks_names_file_and_tensor(tmp_path: Path, text: str, message: str, sharded: bool) -> None:
    name = list(write_sharded(tmp_path).values())[1] if sharded else "model.safetensors"
    stored = {"w": q8_rows(), "b": torch.ones(34), "flat": q8_rows()[0, :34].clone(), "none": q8_rows()[:, :0].clone()}
    save_file(stored, str(tmp_path / name), metadata={BLOCKS_KEY: text})
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint.open(tmp_path)
    assert str(tmp_path / name) in str(caught.value)


@pytest.mark.parametrize("metadata", [[], 3, {BLOCKS_KEY: {"w": "Q8_0"}}])
def test_metadata_of_another_form_are_a_damaged_header(tmp_path: Path, metadata: object) -> None:
    entry = {"dtype": "U8", "shape": [1, 34], "data_offsets": [0, 34]}
    (tmp_path / "model.safetensors").write_bytes(header({"__metadata__": metadata, "w": entry}) + bytes(34))
    with pytest.raises(CheckpointError, match=r"model\.safetensors has a damaged header"):
        Checkpoint.open(tmp_path)


def test_bytes_that_nobody_calls_blocks_are_no_weights(tmp_path: Path) -> None:
    save_file({"w": q8_rows()}, str(tmp_path / "model.safetensors"))
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.blocks("w") is None
    with pytest.raises(CheckpointError, match=r"tensor 'w' is torch\.uint8; .* blocks whose format the header names"):
        checkpoint.check({"w": (4, 68)})


def test_read_json_names_a_bad_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for content in ("", "{", "[]", '"text"', "[" * 100_000):
        path.write_text(content)
        with pytest.raises(CheckpointError, match=r"config\.json"):
            read_json(path)
    path.write_text('{"a": 1}')
    assert read_json(path) == {"a": 1}
