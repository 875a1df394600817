"""EAGLE-3 heads written to disk, all or nothing."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from outpace.errors import CheckpointError, InvalidParameter, OutpaceError
from outpace.heads.config_json import Verifier, write_config
from outpace.heads.draft_vocabulary import are_distinct, marks_of, token_ids_of
from outpace.heads.tensor_names import stored_name
from outpace.models.eagle3_config import Eagle3Config, eagle3_tensors

__all__ = ["LAYOUTS", "save_eagle3", "write_folder"]

LAYOUTS = ("native", "speculators")
_FILES = ("config.json", "model.safetensors")
_KEPT = ("README", "LICENSE", ".")
"""How names of files begin that stay when a head is replaced: what people and their systems put beside it."""


def save_eagle3(
    folder: str | Path,
    config: Eagle3Config,
    tensors: Mapping[str, torch.Tensor],
    *,
    layout: str = "native",
    verifier: Verifier | None = None,
) -> None:
    """Writes a head. What was in the folder before stays until all of it is on the disk.

    Args:
        folder: to be made, or one that holds a head, which is replaced.
        config: its shape.
        tensors: those of `eagle3_tensors`, in its names; `d2t` if the draft vocabulary is not the whole one; and, if
            it has embeddings of its own, `embed_tokens.weight`.
        layout: "native" or "speculators".
        verifier: the target it is for; None leaves it out of the config.

    Raises:
        CheckpointError: a tensor is missing, unknown or misshapen.
        InvalidParameter: another layout, or the folder holds other files.
        OutpaceError: it cannot be written, the disk being full, say.
    """
    if layout not in LAYOUTS:
        raise InvalidParameter(f"layout={layout!r} is not possible: {' or '.join(LAYOUTS)}")
    found = _checked(config, tensors)
    keys = write_config(config, layout, verifier, _dtype_name(found["fc.weight"].dtype))
    write_folder(Path(folder).expanduser(), keys, {stored_name(name, layout): each for name, each in found.items()})


def write_folder(folder: Path, keys: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes config.json and model.safetensors to a folder beside, which then takes the place of this one.

    Model card, licence and hidden files stay.

    Raises:
        InvalidParameter: the folder holds other files.
        OutpaceError: it cannot be written; the folder is as it was.
    """
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    kept = [item for item in found if item.is_file() and item.name.startswith(_KEPT)]
    others = [item.name for item in found if item.name not in _FILES and item not in kept]
    if others or (folder.exists() and not folder.is_dir()):
        raise InvalidParameter(
            f"{folder} is not possible: it holds {(others or ['a file'])[0]}; give a folder of its own"
        )
    new = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        new.chmod(0o777 & ~_umask())
        (new / _FILES[0]).write_text(json.dumps(keys, indent=2) + "\n", encoding="utf-8")
        # Copies: the format refuses tensors that share memory, as a module's may.
        own = {name: each.detach().to("cpu").contiguous().clone() for name, each in tensors.items()}
        save_file(own, new / _FILES[1], {"format": "pt"})
        (new / _FILES[1]).chmod(0o666 & ~_umask())  # safetensors lets the owner alone read
        for name in _FILES:
            _flush(new / name)
        for item in kept:
            shutil.copy2(item, new / item.name)
        _put_in_place(new, folder)
    except (OSError, SafetensorError) as error:
        raise OutpaceError(f"{folder} cannot be written ({error}): make room or give another one") from error
    finally:
        if new is not None:
            shutil.rmtree(new, ignore_errors=True)


def _put_in_place(new: Path, folder: Path) -> None:
    """Gives a folder the name of another, which goes when that is done."""
    if not folder.exists():
        new.rename(folder)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    folder.rename(old)
    try:
        new.rename(folder)
    except BaseException:
        old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _checked(config: Eagle3Config, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a whole head, with `t2d` beside `d2t`."""
    expected = {name: tuple(shape) for name, shape in eagle3_tensors(config).items()}
    if config.is_pruned or "d2t" in tensors:
        expected["d2t"] = (config.draft_vocab_size,)
    if "embed_tokens.weight" in tensors:
        expected["embed_tokens.weight"] = (config.vocab_size, config.hidden_size)
    found = {name: each for name, each in tensors.items() if name != "t2d"}
    for name in sorted(expected.keys() | found.keys()):
        shape = None if name not in found else tuple(found[name].shape)
        if name not in expected or shape != expected[name]:
            had = "is missing" if shape is None else f"has shape {list(shape)}"
            wanted = f"shape {list(expected[name])}" if name in expected else "none of that name"
            raise CheckpointError(f"tensor {name!r} {had}; a head of this config has {wanted}")
    if "d2t" in found:
        token_ids = token_ids_of(found["d2t"])
        if not are_distinct(token_ids, config.vocab_size):
            raise CheckpointError(
                f"tensor 'd2t' does not name {config.draft_vocab_size} different tokens of {config.vocab_size}"
            )
        found["d2t"], found["t2d"] = found["d2t"].to(torch.int64), marks_of(token_ids, config.vocab_size)
    return found


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _umask() -> int:
    """Permissions that new files of this process do not get."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _flush(path: Path) -> None:
    """Makes sure a file is on the disk before the folder gets its final name."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
