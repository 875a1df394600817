"""Named tensors on disk: one safetensors file, a sharded set, or (only when allowed) pickled weights.

Matrices of a converted GGUF file are stored in its block formats (`outpace.models.stored`); the rest are floats.
Every way a download can be wrong ends in one error that names the file, and the tensor where there is one.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from outpace.errors import CheckpointError
from outpace.models.files import describe_impostor
from outpace.models.stored import QuantizedBlocks, kinds_in_metadata, matrix_shape, rows_are_finite

__all__ = ["Checkpoint", "first_line", "read_json"]

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_WEIGHTS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class _Stored:
    """One tensor: where it lies, what it is (of blocks: what their matrix is), how to read what is stored."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]
    num_bytes: int
    kind: str | None = None


class Checkpoint:
    """The weights of one model, read tensor by tensor when asked for.

    Args:
        source: the file that lists the tensors: the only one, or the index of a sharded set.
        tensors: what is stored, by name.
    """

    def __init__(self, source: Path, tensors: Mapping[str, _Stored]) -> None:
        self.source = source
        self._tensors = dict(tensors)

    @classmethod
    def open(cls, folder: Path, *, allow_pickle: bool = False) -> Checkpoint:
        """Opens the weights in a model folder; reads headers only.

        Args:
            folder: holds `model.safetensors` or `model.safetensors.index.json` with its shards; with `allow_pickle`
                also `pytorch_model.bin` or its index.
            allow_pickle: read `.bin` files (with torch's restricted unpickler) if there are no safetensors.

        Raises:
            CheckpointError: no weights, a missing or damaged file, an index that does not fit its shards.
        """
        kinds = [("model.safetensors", _read_safetensors)]
        if allow_pickle:
            kinds.append(("pytorch_model.bin", _read_pickle))
        for name, read in kinds:
            if (folder / name).is_file():
                return cls(folder / name, read(folder / name))
            index = folder / f"{name}.index.json"
            if index.is_file():
                return cls(index, _read_shards(index, read))
        pickled = sorted(folder.glob("*.bin"))
        if pickled and not allow_pickle:
            raise CheckpointError(
                f"{folder} holds only pickled weights ({pickled[0].name}), which can run code while they load: "
                "convert them to safetensors, or allow them with allow_pickle=True (--allow-pickle)"
            )
        hint = "" if allow_pickle else " (pickled pytorch_model.bin weights need allow_pickle=True)"
        raise CheckpointError(f"{folder} holds no model.safetensors and no model.safetensors.index.json{hint}")

    def select(self, names: Mapping[str, str]) -> Checkpoint:
        """Some of the tensors under names of the caller's: {name there: name as stored}."""
        return Checkpoint(self.source, {name: self._stored(stored) for name, stored in names.items()})

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, by name; of blocks that of their matrix."""
        return {name: stored.shape for name, stored in self._tensors.items()}

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Type of every tensor as stored, by name; of blocks float16, which `get` makes of them."""
        return {name: stored.dtype for name, stored in self._tensors.items()}

    @property
    def kinds(self) -> dict[str, str]:
        """GGML's name of the block format of every tensor that is stored as blocks, by name."""
        return {name: stored.kind for name, stored in self._tensors.items() if stored.kind is not None}

    @property
    def num_bytes(self) -> int:
        """Size of all tensors as stored."""
        return sum(stored.num_bytes for stored in self._tensors.values())

    @property
    def num_weights(self) -> int:
        """Numbers stored, over all tensors."""
        return sum(_count(stored.shape) for stored in self._tensors.values())

    def get(self, name: str) -> torch.Tensor:
        """Reads one tensor, in its stored type. It may share memory with the file: copy it before changing it.

        Blocks are dequantised, a few rows at a time: to float16, or to bfloat16 if a value is too large for that.

        Raises:
            CheckpointError: there is no such tensor, it cannot be read, or its blocks hold values that are not finite.
        """
        blocks = self.blocks(name)
        if blocks is None:
            return self._read(name)
        values = blocks.to_half()
        if values is None:
            file = self._tensors[name].file
            raise CheckpointError(f"{file}: tensor {name!r} holds values that are not finite: a damaged file")
        return values

    def blocks(self, name: str) -> QuantizedBlocks | None:
        """One matrix as a GGUF file stores it, or None if it is stored as floats.

        Raises:
            CheckpointError: there is no such tensor, it cannot be read, or its scales are not finite.
        """
        stored = self._stored(name)
        if stored.kind is None:
            return None
        rows, columns = stored.shape
        blocks = QuantizedBlocks(stored.kind, (rows, columns), self._read(name))
        if not rows_are_finite(blocks.data.numpy(), stored.kind):
            raise CheckpointError(
                f"{stored.file}: tensor {name!r} holds values that are not finite: a damaged file; delete "
                f"{stored.file.parent} if it is outpace's copy of a GGUF file, which is then made again"
            )
        return blocks

    def _stored(self, name: str) -> _Stored:
        if name not in self._tensors:
            raise CheckpointError(f"{self.source} has no tensor {name!r}")
        return self._tensors[name]

    def _read(self, name: str) -> torch.Tensor:
        """A tensor as it lies in its file."""
        stored = self._stored(name)
        try:
            return stored.read()
        except (SafetensorError, OSError, RuntimeError) as error:  # RuntimeError: torch cannot map the file
            raise CheckpointError(f"{stored.file}: tensor {name!r} cannot be read ({first_line(error)})") from error

    def check(
        self, expected: Mapping[str, tuple[int, ...]], optional: Mapping[str, tuple[int, ...]] | None = None
    ) -> None:
        """Accounts for every tensor: none missing, none unknown, each with its shape and a type of weights.

        Two kinds of unknown tensors are harmless and let pass: `lm_head.weight` where the model expects none (its
        head is the embedding, and some tools store it twice) and `rotary_emb.inv_freq` buffers.

        Args:
            expected: shape by name of every tensor the model needs.
            optional: of tensors that may be there as well.

        Raises:
            CheckpointError: naming the file and the first tensor that does not fit.
        """
        optional = optional or {}
        for name, shape in {**expected, **optional}.items():
            stored = self._tensors.get(name)
            if stored is None and name in optional:
                continue
            if stored is None:
                raise CheckpointError(f"{self.source} lacks tensor {name!r} of shape {list(shape)}: incomplete weights")
            if stored.shape != tuple(shape):
                raise CheckpointError(
                    f"{stored.file}: tensor {name!r} has shape {list(stored.shape)}, config.json asks for {list(shape)}"
                )
            if stored.dtype not in _WEIGHTS:
                raise CheckpointError(
                    f"{stored.file}: tensor {name!r} is {stored.dtype}; float16, bfloat16, float32, float64 and blocks "
                    "whose format the header names are read"
                )
        for name, stored in self._tensors.items():
            harmless = name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq")
            if name not in expected and name not in optional and not harmless:
                raise CheckpointError(
                    f"{stored.file}: tensor {name!r} has no place in this model: config.json describes another one"
                )


def read_json(path: Path) -> dict[str, object]:
    """Reads a JSON object.

    Raises:
        CheckpointError: naming a file that cannot be read or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}): download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}, not an object: download it again")
    return value


def first_line(error: Exception) -> str:
    """What an exception of other people's code says, in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _count(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _require_file(path: Path) -> None:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: download it again")
    impostor = describe_impostor(path)
    if impostor:
        raise CheckpointError(f"{path} {impostor}")


class _SafetensorsFile:
    """A file that is mapped into memory when its first tensor is read: not before it is known to fit."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @cached_property
    def _opened(self) -> Any:
        return safe_open(str(self._path), framework="pt")

    def get(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._opened.get_tensor(name)
        return tensor


def _read_safetensors(path: Path) -> dict[str, _Stored]:
    """What the header says is stored; its claims are checked against each other and the size of the file."""
    _require_file(path)
    entries, kinds, begin = _read_header(path)
    file, stored, ends = _SafetensorsFile(path), {}, {}
    for name, entry in entries.items():
        try:
            kind, shape = str(entry["dtype"]), tuple(map(int, entry["shape"]))
            first, end = map(int, entry["data_offsets"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} has a damaged header (tensor {name!r}): download it again") from error
        if kind not in _DTYPES:
            raise CheckpointError(f"{path}: tensor {name!r} is of unknown type {kind}")
        if first < 0 or min(shape, default=0) < 0 or end - first != _count(shape) * _DTYPES[kind].itemsize:
            raise CheckpointError(f"{path} has a damaged header (size of tensor {name!r}): download it again")
        tensor = _Stored(path, shape, _DTYPES[kind], partial(file.get, name), end - first)
        stored[name] = _as_blocks(name, tensor, kinds[name]) if name in kinds else tensor
        ends[name] = begin + end
    size = path.stat().st_size
    cut = min((name for name, end in ends.items() if end > size), key=ends.__getitem__, default=None)
    if cut is not None:
        raise CheckpointError(
            f"{path} is truncated: tensor {cut!r} ends at byte {ends[cut]}, the file at {size}: download it again"
        )
    if max(ends.values(), default=begin) != size:
        raise CheckpointError(f"{path} goes on behind its last tensor ({size} bytes): download it again")
    return stored


def _as_blocks(name: str, tensor: _Stored, kind: str) -> _Stored:
    """A tensor of bytes understood as the matrix whose blocks they are."""
    try:
        shape = matrix_shape(kind, tensor.dtype, tensor.shape)
    except ValueError as error:
        raise CheckpointError(f"{tensor.file}: tensor {name!r} cannot be read: {error}") from error
    return replace(tensor, shape=shape, dtype=torch.float16, kind=kind)


def _read_header(path: Path) -> tuple[dict[str, Any], dict[str, str], int]:
    """Entry of every tensor by name, kinds of those that are blocks, and the byte where the numbers begin.

    Format: 8 bytes little-endian length, JSON of that length, numbers (https://github.com/huggingface/safetensors).
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if 8 + length > size:
            raise CheckpointError(
                f"{path} is no safetensors file, or ends inside its header ({size} bytes): download it again"
            )
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} has a damaged header ({error}): download it again") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} has a damaged header (no object): download it again")
    try:
        kinds = kinds_in_metadata(header.pop("__metadata__", None))
    except ValueError as error:
        raise CheckpointError(f"{path} has a damaged header ({error}): download it again") from error
    for name in kinds.keys() - header.keys():
        raise CheckpointError(f"{path} has a damaged header (no tensor {name!r}, said to be blocks): download it again")
    return header, kinds, 8 + length


def _read_shards(index: Path, read: Callable[[Path], dict[str, _Stored]]) -> dict[str, _Stored]:
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(shard, str) for shard in places.values()):
        raise CheckpointError(f"{index} has no weight_map from tensor to file: download it again")
    shards = {shard: read(index.parent / shard) for shard in sorted(set(places.values()))}
    for name, shard in places.items():
        if name not in shards[shard]:
            raise CheckpointError(f"{index.parent / shard} lacks tensor {name!r}, which {index.name} says it holds")
    # Tensors the index forgot are kept: `check` must see everything that is stored.
    stored = {name: tensor for shard in shards.values() for name, tensor in shard.items()}
    return {**stored, **{name: shards[shard][name] for name, shard in places.items()}}


def _read_pickle(path: Path) -> dict[str, _Stored]:
    _require_file(path)
    try:
        # Old files are no zip archives and cannot be mapped into memory.
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # the unpickler trips over damage in any way: IndexError, KeyError, EOFError, ...
        raise CheckpointError(f"{path} cannot be read as pickled weights ({first_line(error)})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not tensors by name")
    stored = {}
    for name, tensor in content.items():
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(f"{path}: entry {name!r} is a {type(tensor).__name__}, not a tensor")
        num_bytes = tensor.numel() * tensor.itemsize
        read = partial(torch.Tensor.detach, tensor)
        stored[name] = _Stored(path, tuple(tensor.shape), tensor.dtype, read, num_bytes)
    return stored
