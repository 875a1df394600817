"""The state of a run: weights, optimiser, place in the data, random numbers. From it training goes on to the bit."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch

from outpace.errors import CheckpointError
from outpace.models.checkpoint import first_line
from outpace.train.writing import write_bytes

__all__ = ["FORMAT", "read_checkpoint", "write_checkpoint"]

FORMAT = 2


def write_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Replaces the checkpoint; the old one stays until the new one is safely on disk.

    Raises:
        OutpaceError: it cannot be written.
    """
    buffer = io.BytesIO()  # torch.save straight into a file hides why the system refused to write
    torch.save({"format": FORMAT, **state}, buffer)
    write_bytes(path, buffer.getbuffer())


def read_checkpoint(path: Path) -> dict[str, Any]:
    """What `write_checkpoint` wrote.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    if not path.is_file():
        raise CheckpointError(f"{path.parent} holds no checkpoint to go on from ({path.name} is missing)")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the unpickler trips over damage in any way: EOFError, KeyError, RuntimeError, ...
        raise CheckpointError(f"{path} is damaged ({first_line(error)}): train again without --resume") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(f"{path} is no checkpoint of this version: train again without --resume")
    return state
