"""The target's states on disk: it runs over the data once, and training then needs its output head alone.

states/{train,valid}-00000.safetensors   for every layer L wanted: "L" [n, W, H], in int8 with "L.scale"
states/index.json                        whose, which layers, which numbers, of which windows
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from outpace.errors import CheckpointError
from outpace.models.checkpoint import first_line
from outpace.train.data.packing import Windows
from outpace.train.identity import Identity
from outpace.train.target import Target
from outpace.train.writing import make_folder, write_bytes, write_json

__all__ = ["StoredStates", "stored_bytes"]

_SHARD = 8
"""Windows in a file: what is computed before anything is safe, and read to get one window."""
_GROUP = 32
"""Numbers that share a scale in int8."""


def stored_bytes(kind: str, tokens: int, layers: int, hidden_size: int) -> int:
    """What states of so many tokens take on disk, in bytes."""
    per_number = 2.0 if kind == "fp16" else 1 + 4 / _group(hidden_size)
    return int(per_number * tokens * layers * hidden_size)


class StoredStates:
    """`target.StateSource` from files, which are made first where they are missing.

    Args:
        folder: theirs.
        split: train or valid.
        kind: fp16 or int8.
        target: who makes them.
        identity: who that is.
    """

    def __init__(self, folder: Path, split: str, kind: str, target: Target, identity: Identity) -> None:
        self._folder, self._split, self._kind = make_folder(folder), split, kind
        self._target, self._identity = target, identity
        self._opened: tuple[int, dict[str, torch.Tensor]] | None = None

    def make(self, windows: Windows, progress: Callable[[int, int], None]) -> None:
        """Computes what is not there; may be stopped and called again.

        Raises:
            OutpaceError: the disk is full, or the folder cannot be written.
        """
        key = self._key(windows)
        path = self._folder / f"{self._split}.json"
        if not path.is_file() or path.read_text() != json.dumps(key, indent=2) + "\n":
            for old in self._folder.glob(f"{self._split}-*.safetensors"):
                old.unlink()
            write_json(path, key)
        for number, begin in enumerate(range(0, len(windows), _SHARD)):
            file = self._file(number)
            if not file.is_file():
                which = torch.arange(begin, min(begin + _SHARD, len(windows)), dtype=torch.int64, device="cpu")
                states = self._target.states(windows[which], which)
                stored: dict[str, torch.Tensor] = {}
                for layer, rows in states.items():
                    stored.update(_packed(str(layer), rows, self._kind))
                write_bytes(file, save(stored))
            progress(min(begin + _SHARD, len(windows)), len(windows))

    def states(self, windows: Windows, which: torch.Tensor) -> dict[int, torch.Tensor]:
        """See `StateSource`.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        layers = sorted({*self._target.aux_layers, self._target.num_layers})
        rows: dict[int, list[torch.Tensor]] = {layer: [] for layer in layers}
        for number in which.tolist():
            shard = self._shard(number // _SHARD)
            for layer in layers:
                rows[layer].append(_unpacked(str(layer), shard, number % _SHARD))
        return {layer: torch.stack(parts) for layer, parts in rows.items()}

    def _file(self, number: int) -> Path:
        return self._folder / f"{self._split}-{number:05}.safetensors"

    def _shard(self, number: int) -> dict[str, torch.Tensor]:
        if self._opened is None or self._opened[0] != number:
            path = self._file(number)
            try:
                self._opened = (number, load_file(path))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{path} is missing or damaged ({first_line(error)}): delete it, it is made again"
                ) from error
        return self._opened[1]

    def _key(self, windows: Windows) -> dict[str, object]:
        digest = hashlib.sha256(windows.ids.numpy().tobytes() + windows.pieces.numpy().tobytes()).hexdigest()
        layers = sorted({*self._target.aux_layers, self._target.num_layers})
        precision = self._target.model.describe()
        return {
            "target": self._identity.as_dict(), "precision": precision, "kind": self._kind, "layers": layers,
            "windows": digest,
        }  # fmt: skip


def _group(width: int) -> int:
    return _GROUP if width % _GROUP == 0 else width


def _grouped(rows: torch.Tensor) -> torch.Tensor:
    return rows.reshape(*rows.shape[:-1], -1, _group(rows.shape[-1]))


def _packed(name: str, rows: torch.Tensor, kind: str) -> dict[str, torch.Tensor]:
    if kind == "fp16":
        most = torch.finfo(torch.float16).max
        return {name: rows.clamp(-most, most).half()}
    groups = _grouped(rows)
    scale = groups.abs().amax(-1) / 127
    levels = torch.where(scale.unsqueeze(-1) > 0, groups / scale.unsqueeze(-1), 0).round().to(torch.int8)
    return {name: levels.flatten(-2).contiguous(), f"{name}.scale": scale.contiguous()}


def _unpacked(name: str, shard: dict[str, torch.Tensor], at: int) -> torch.Tensor:
    try:
        rows = shard[name][at].float()
        scale = shard.get(f"{name}.scale")
    except (KeyError, IndexError) as error:
        raise CheckpointError(f"stored states lack layer {name} or window {at}: delete their folder") from error
    if scale is None:
        return rows
    return (_grouped(rows) * scale[at].unsqueeze(-1)).flatten(-2)
