"""Windows on disk: `train-00000.safetensors` ..., `valid-00000.safetensors` ..., and `index.json` that lists them.

index.json   {"format": 1, "target": who tokenised it, "window": W, "splits": {"train": {"windows", "tokens",
              "labels", "shards": [names]}, "valid": ...}, "choosing": how many of the windows that are held out come
              first and are there to choose by (lacking in data of earlier versions), "sources": [what it was made of]}
a shard      ids int32 [n, W], pieces int32 [n, W], labels uint8 [n, W]
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from outpace.errors import BadInput, CheckpointError, OutpaceError
from outpace.models.checkpoint import first_line, read_json
from outpace.train.data.packing import NOTHING, Windows
from outpace.train.identity import Identity
from outpace.train.writing import make_folder, write_bytes, write_json

__all__ = ["BYTES_PER_TOKEN", "TrainingData", "forget_data", "holds_data", "read_data", "write_data"]

BYTES_PER_TOKEN = 9
"""On disk."""
_INDEX = "index.json"
_FORMAT = 1
_SHARD_TOKENS = 4 << 20


@dataclass(frozen=True, slots=True)
class TrainingData:
    """Windows to train on and windows to measure on, of different texts (of one, if there is a single one).

    Args:
        train: the former.
        valid: the latter, those to choose the best state on before those to judge it on.
        index: what `index.json` says.
    """

    train: Windows
    valid: Windows
    index: dict[str, Any]

    @property
    def choosing(self) -> int:
        """How many windows to choose on `valid` begins with; none may be left to judge on.

        Raises:
            CheckpointError: they were made by an earlier version, which did not tell them apart.
        """
        count = self.index.get("choosing")
        if not isinstance(count, int):
            raise CheckpointError(
                "training that begins as a head needs held-out texts that choose the best state and others that judge "
                "it, and this data, of an earlier version of outpace, does not tell them apart: make it again (answers "
                "that are there are kept)"
            )
        return count


def write_data(
    folder: Path,
    train: Windows,
    choosing: Windows,
    judging: Windows,
    target: Identity,
    sources: list[str],
    *,
    private: bool = False,
) -> TrainingData:
    """Writes windows, for the owner alone if they are private; the index last, so that a folder with an index is whole.

    Args:
        folder: to be made or written over.
        train: to train on.
        choosing: held out, to choose the best state on; see `holding_out`.
        judging: held out, to judge it on.
        target: who tokenised them.
        sources: what they were made of.
        private: nobody else may read them.

    Raises:
        BadInput: there is nothing to train on, or nothing to measure on.
        OutpaceError: the folder cannot be written.
    """
    count, valid = len(choosing) or len(judging), Windows.joined((choosing, judging))
    if not (len(train) and len(valid)):  # a single text falls on one side
        train, valid = _last_held_out(Windows.joined((train, valid)))
        count = len(valid)
    if not len(train) or not len(valid):
        raise BadInput(
            f"no usable text: {len(train) + len(valid)} windows of {train.width} tokens came of it, at least 2 are "
            "needed, one of them to measure on; give more text, or shorter windows (--window)"
        )
    make_folder(folder)
    forget_data(folder)
    both = (("train", train), ("valid", valid))
    splits = {name: _write_split(folder, name, windows, private) for name, windows in both}
    index = {
        "format": _FORMAT,
        "target": target.as_dict(),
        "window": train.width,
        "splits": splits,
        "choosing": count,
        "sources": sources,
    }
    write_json(folder / _INDEX, index)
    return TrainingData(train, valid, index)


def holds_data(folder: Path) -> bool:
    """Whether there is data that was written to its end."""
    return (folder / _INDEX).is_file()


def forget_data(folder: Path) -> None:
    """Takes away what `write_data` wrote, its index first: windows of two writings must not be mixed.

    Raises:
        OutpaceError: it cannot be taken away.
    """
    shards = [path for split in ("train", "valid") for path in folder.glob(f"{split}-*.safetensors")]
    for path in (folder / _INDEX, *shards):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise OutpaceError(
                f"{path} cannot be replaced: {error.strerror}; name another folder with --out"
            ) from error


def read_data(folder: Path, target: Identity) -> TrainingData:
    """Reads what `write_data` wrote.

    Raises:
        BadInput: there is none.
        CheckpointError: it was tokenised for another model, or a file is missing or damaged.
    """
    if not holds_data(folder):
        raise BadInput(f"{folder} holds no training data ({_INDEX} is missing): make some with `outpace train data`")
    index = read_json(folder / _INDEX)
    if index.get("format") != _FORMAT:
        raise CheckpointError(
            f"{folder / _INDEX}: format {index.get('format')!r} is not {_FORMAT}: make the data again"
        )
    target.require(index.get("target"), str(folder / _INDEX), weights=False)
    try:
        splits: Any = index["splits"]
        parts = [_read_split(folder, splits[name]["shards"]) for name in ("train", "valid")]
        choosing: Any = index.get("choosing", 1)
        if not 0 < choosing <= len(parts[1]):
            raise IndexError(f"choosing={choosing}")
    except (KeyError, TypeError, IndexError) as error:
        raise CheckpointError(f"{folder / _INDEX} is damaged ({error!r}): make the data again") from error
    return TrainingData(parts[0], parts[1], index)


def _last_held_out(windows: Windows) -> tuple[Windows, Windows]:
    """The last window is held out, and the rest is to train on."""
    most = max(0, len(windows) - 1)
    return windows[:most], windows[most:]


def _write_split(folder: Path, name: str, windows: Windows, private: bool) -> dict[str, Any]:
    step = max(1, _SHARD_TOKENS // windows.width)
    shards = []
    for number, begin in enumerate(range(0, len(windows), step)):
        part = windows[begin : begin + step]
        tensors = {"ids": part.ids.int(), "pieces": part.pieces.int(), "labels": part.labels.to(torch.uint8)}
        shards.append(f"{name}-{number:05}.safetensors")
        write_bytes(
            folder / shards[-1], save({key: value.contiguous() for key, value in tensors.items()}), private=private
        )
    counts = {"windows": len(windows), "tokens": windows.num_tokens, "labels": int(windows.labels.sum())}
    return {**counts, "shards": shards}


def _read_split(folder: Path, shards: list[str]) -> Windows:
    parts = [_read_shard(folder / name) for name in shards]
    if not parts:
        raise IndexError("a split without shards")
    return Windows.joined(parts)


def _read_shard(path: Path) -> Windows:
    try:
        found = load_file(path)
        ids, pieces, labels = found["ids"].long(), found["pieces"].long(), found["labels"].bool()
    except (SafetensorError, OSError, KeyError) as error:
        raise CheckpointError(f"{path} is missing or damaged ({first_line(error)}): make the data again") from error
    if not ids.shape == pieces.shape == labels.shape or ids.dim() != 2 or int(pieces.min()) < NOTHING:
        raise CheckpointError(f"{path} is damaged (its tensors do not fit each other): make the data again")
    return Windows(ids, pieces, labels)
