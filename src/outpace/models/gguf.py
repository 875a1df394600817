"""Converting a GGUF file, once, into a model folder with safetensors that is kept in the cache.

Matrices in a block format stay as the file stores them; what is float there, and every vector, takes 2 bytes a
weight. A folder appears under its final name only when it is complete, and carries a manifest of its files, so that a
crash, a full disk or two processes at once cannot leave half a model.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from outpace.errors import CheckpointError, OutpaceError
from outpace.models.files import cache_folder, fingerprint, format_bytes
from outpace.models.gguf_config import build_config, name_tensors, restore_rows
from outpace.models.gguf_file import GgufFile, GgufTensor
from outpace.models.gguf_tokenizer import build_tokenizer, tokenizer_config
from outpace.models.stored import FLOAT_KINDS, header_metadata, rows_are_finite, to_half

__all__ = ["MANIFEST", "convert_gguf", "converted_folder", "converted_models", "read_manifest"]

MANIFEST = "outpace.json"
_LAYOUT = 2  # raise it when conversions made before must be made again
_SHARD_BYTES = 256 << 20
_OTHER_FILES_BYTES = 32 << 20


def converted_folder(path: Path) -> Path:
    """Where the converted copy of this very file is or will be kept (file name, size and contents decide)."""
    return _root() / f"{path.stem}-{fingerprint(path)[:16]}"


def convert_gguf(path: Path, notify: Callable[[str], None]) -> Path:
    """Converts a GGUF file unless that was done before, and returns the folder of the converted model.

    Args:
        path: the GGUF file; it is only read.
        notify: told, in a line, what is about to be written and where, and how far it is.

    Raises:
        CheckpointError: the file is damaged or not what it says.
        UnsupportedModel: an architecture, tokenizer or feature that cannot be read.
        OutpaceError: the disk is too small or the cache cannot be written.
    """
    folder = converted_folder(path)
    if read_manifest(folder) is not None:
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            if read_manifest(folder) is None:  # another process may have been quicker
                if folder.exists():
                    what = "is damaged" if _layout(folder) == _LAYOUT else "was made by another version of outpace"
                    notify(f"{folder} {what}; converting {path.name} again")
                    shutil.rmtree(folder)
                _convert_into(path, folder, notify)
    except (OSError, SafetensorError) as error:
        raise OutpaceError(
            f"{path.name} could not be converted into {folder.parent} ({error}); "
            "make room there, or set OUTPACE_CACHE to another folder"
        ) from error
    return folder


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """What a converted folder says about itself, or None if it is not there or not whole.

    Keys: layout, source (file name), source_bytes, num_weights, files {name: fingerprint}.
    """
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = manifest["files"].items() if manifest["layout"] == _LAYOUT else None
        whole = files is not None and all(fingerprint(folder / name) == mark for name, mark in files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return manifest if whole else None


def _layout(folder: Path) -> object:
    """The layout a folder's manifest names; the current one if it names none, for then it is damaged."""
    try:
        return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["layout"]
    except (OSError, ValueError, KeyError, TypeError):
        return _LAYOUT


def converted_models() -> list[Path]:
    """Folders of whole converted models in the cache."""
    folders = sorted(_root().glob("*/" + MANIFEST))
    return [file.parent for file in folders if read_manifest(file.parent) is not None]


def _root() -> Path:
    return cache_folder() / "converted"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder.parent / f".{folder.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert_into(path: Path, folder: Path, notify: Callable[[str], None]) -> None:
    file = GgufFile(path)
    config, names = build_config(file), name_tensors(file)
    tokenizer, settings = build_tokenizer(file), tokenizer_config(file)
    num_weights = sum(file.tensors[name].num_weights for name in names)
    size = sum(_stored_bytes(file.tensors[name]) for name in names) + _OTHER_FILES_BYTES
    free = shutil.disk_usage(folder.parent).free
    if free < size:
        raise OutpaceError(
            f"converting {path.name} needs {format_bytes(size)} in {folder.parent}, {format_bytes(free)} are free; "
            "make room there, or set OUTPACE_CACHE to another folder"
        )
    notify(f"converting {path.name} (once): {format_bytes(size)} in {folder}")
    partial = folder.parent / f".{folder.name}.partial"
    # We hold the lock, so what lies here was left by a process that died.
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        _write_json(partial / "config.json", config)
        tokenizer.save(str(partial / "tokenizer.json"), pretty=False)
        _write_json(partial / "tokenizer_config.json", settings)
        _write_weights(file, names, partial, notify)
        marks = {item.name: fingerprint(item) for item in sorted(partial.iterdir())}
        about = {"source": path.name, "source_bytes": path.stat().st_size, "num_weights": num_weights}
        _write_json(partial / MANIFEST, {"layout": _LAYOUT, **about, "files": marks})
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_weights(file: GgufFile, names: dict[str, str], folder: Path, notify: Callable[[str], None]) -> None:
    shards = _plan_shards(file, list(names))
    done, total = 0, sum(_stored_bytes(file.tensors[name]) for name in names)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        of = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        target = folder / f"model{of}.safetensors"
        tensors = {}
        for name in shard:
            tensor = _read_tensor(file, file.tensors[name])
            tensors[names[name]] = restore_rows(file, name, tensor).contiguous()
            done += _stored_bytes(file.tensors[name])
        blocks = {names[name]: file.tensors[name].kind.name for name in shard if _keeps_blocks(file.tensors[name])}
        save_file(tensors, str(target), metadata={"format": "pt", **header_metadata(blocks)})
        _flush(target)
        weight_map.update(dict.fromkeys(tensors, target.name))
        if number < len(shards):
            notify(f"converting {file.path.name}: {100 * done // total} %")
    if len(shards) > 1:
        _write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def _plan_shards(file: GgufFile, names: list[str]) -> list[list[str]]:
    """Groups tensors so that a group, held in memory while it is written, stays small."""
    shards: list[list[str]] = [[]]
    room = _SHARD_BYTES
    for name in names:
        size = _stored_bytes(file.tensors[name])
        if size > room and shards[-1]:
            shards.append([])
            room = _SHARD_BYTES
        shards[-1].append(name)
        room -= size
    return shards


def _keeps_blocks(tensor: GgufTensor) -> bool:
    return len(tensor.shape) == 2 and tensor.kind.name not in FLOAT_KINDS


def _stored_bytes(tensor: GgufTensor) -> int:
    """Size of a tensor in the converted folder."""
    return tensor.num_bytes if _keeps_blocks(tensor) else 2 * tensor.num_weights


def _read_tensor(file: GgufFile, tensor: GgufTensor) -> torch.Tensor:
    """A tensor as it is to be stored: bytes of blocks, or float16 (bfloat16 if a value is too large for that)."""
    stored: torch.Tensor | None = None
    if _keeps_blocks(tensor):
        raw = file.read_bytes(tensor, 0, tensor.rows)
        stored = torch.from_numpy(raw) if rows_are_finite(raw, tensor.kind.name) else None
    else:
        values = to_half(partial(file.read_rows, tensor), (tensor.rows, tensor.shape[-1]))
        stored = None if values is None else values.view(tensor.shape)
    if stored is None:
        raise CheckpointError(f"{file.path}: tensor {tensor.name!r} holds values that are not finite: a damaged file")
    return stored


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False), encoding="utf-8")
    _flush(path)


def _flush(path: Path) -> None:
    """Makes sure a file is on the disk before the folder gets its final name."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
