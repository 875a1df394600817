"""The target's states on disk: it runs over the data once, and training then needs its output head alone.

states/PLACE/L12-00000.safetensors    states entering layer 12 of some windows: "rows" [n, W, H], in int8 with "scale"
                                      [n, W, H / 32]; the number of layers: leaving the last
states/PLACE/said-00000.safetensors   what the target says: "log_sum" [n, W] float32, the logarithm of the sum of its
                                      exponentiated logits, and "best" [n, W] int32, its likeliest token
states/PLACE/of.json                  whose, in which precision and numbers, of which windows

PLACE is train or valid, the numbers' kind, and a hash of `of.json`: runs of several kinds of drafters share what they
need alike, and runs with other numbers or another precision never meet.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from outpace.errors import CheckpointError
from outpace.models.checkpoint import first_line
from outpace.train.data.packing import Windows
from outpace.train.identity import Identity
from outpace.train.target import Said, Target
from outpace.train.writing import make_folder, write_bytes, write_json

__all__ = ["StoredStates", "stored_bytes"]

_SHARD = 8
"""Windows in a file: what is computed before anything is safe."""
_GROUP = 32
"""Numbers that share a scale in int8."""
_SAID = "said"


def stored_bytes(kind: str, tokens: int, layers: int, hidden_size: int) -> int:
    """What states of so many tokens take on disk, in bytes."""
    per_number = 2.0 if kind == "fp16" else 1 + 4 / _group(hidden_size)
    return int(tokens * (per_number * layers * hidden_size + 8))


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
        self._place = self._folder
        self._target, self._identity = target, identity

    def make(self, windows: Windows, progress: Callable[[int, int], None]) -> None:
        """Computes what is not there; may be stopped and called again.

        Raises:
            OutpaceError: the disk is full, or the folder cannot be written.
        """
        key = self._key(windows)
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        self._place = make_folder(self._folder / f"{self._split}-{self._kind}-{digest[:16]}")
        write_json(self._place / "of.json", key)
        for number, begin in enumerate(range(0, len(windows), _SHARD)):
            which = torch.arange(begin, min(begin + _SHARD, len(windows)), dtype=torch.int64, device="cpu")
            self._make_shard(number, windows[which], which)
            progress(begin + len(which), len(windows))

    def states(self, windows: Windows, which: torch.Tensor) -> dict[int, torch.Tensor]:
        """See `StateSource`.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        found = {}
        for layer in self._layers():
            parts = self._read(_layer_name(layer), which, ("rows", "scale") if self._kind == "int8" else ("rows",))
            found[layer] = torch.stack([_unpacked(*part) for part in parts])
        return found

    def said(self, windows: Windows, which: torch.Tensor) -> Said:
        """See `StateSource`.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        parts = self._read(_SAID, which, ("log_sum", "best"))
        return Said(torch.stack([part[0] for part in parts]), torch.stack([part[1] for part in parts]).long())

    def _layers(self) -> list[int]:
        return sorted({*self._target.aux_layers, self._target.num_layers})

    def _make_shard(self, number: int, windows: Windows, which: torch.Tensor) -> None:
        """What some windows lack; layers behind the last one that is missing do not run."""
        missing = [layer for layer in self._layers() if not self._file(_layer_name(layer), number).is_file()]
        says = not self._file(_SAID, number).is_file()
        wanted = {*missing, *([self._target.num_layers] if says else [])}
        if not wanted:
            return
        states = self._target.states(windows, which, sorted(wanted))
        for layer in missing:
            write_bytes(self._file(_layer_name(layer), number), save(_packed(states[layer], self._kind)))
        if says:
            log_sum, best = self._target.say(states[self._target.num_layers])
            write_bytes(self._file(_SAID, number), save({"log_sum": log_sum, "best": best.int()}))

    def _file(self, what: str, number: int) -> Path:
        return self._place / f"{what}-{number:05}.safetensors"

    def _read(self, what: str, which: torch.Tensor, names: Sequence[str]) -> list[list[torch.Tensor]]:
        """For each window, the tensors of these names."""
        parts = []
        for number in which.tolist():
            path = self._file(what, number // _SHARD)
            try:
                with safe_open(path, "pt") as file:
                    parts.append([file.get_slice(name)[number % _SHARD] for name in names])
            except (SafetensorError, OSError, IndexError) as error:
                raise CheckpointError(
                    f"{path} is missing or damaged ({first_line(error)}): delete it, it is made again"
                ) from error
        return parts

    def _key(self, windows: Windows) -> dict[str, object]:
        digest = hashlib.sha256(windows.ids.numpy().tobytes() + windows.pieces.numpy().tobytes()).hexdigest()
        precision = self._target.model.describe()
        return {"target": self._identity.as_dict(), "precision": precision, "kind": self._kind, "windows": digest}


def _layer_name(layer: int) -> str:
    return f"L{layer:02}"


def _group(width: int) -> int:
    return _GROUP if width % _GROUP == 0 else width


def _grouped(rows: torch.Tensor) -> torch.Tensor:
    return rows.reshape(*rows.shape[:-1], -1, _group(rows.shape[-1]))


def _packed(rows: torch.Tensor, kind: str) -> dict[str, torch.Tensor]:
    if kind == "fp16":
        most = torch.finfo(torch.float16).max
        return {"rows": rows.clamp(-most, most).half()}
    groups = _grouped(rows)
    scale = groups.abs().amax(-1) / 127
    levels = torch.where(scale.unsqueeze(-1) > 0, groups / scale.unsqueeze(-1), 0).round().to(torch.int8)
    return {"rows": levels.flatten(-2).contiguous(), "scale": scale.contiguous()}


def _unpacked(rows: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    return rows.float() if scale is None else (_grouped(rows.float()) * scale.unsqueeze(-1)).flatten(-2)
