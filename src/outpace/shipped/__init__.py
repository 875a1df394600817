"""Trained drafters that come with outpace, each for one model, known by its norms.

Norms are vectors, which files keep as they are however they quantise matrices: so a drafter is there for every
quantisation of its model. A finetune has other norms; one that trained matrices alone counts as the model, which costs
it acceptance, never a right token, and control looks after the rest.

A folder for each model:

    target.json    {"model": its name, "hidden_size", "num_layers", "vocab_size", "norms": `norms_digest`,
                   "auto": whether `auto` was faster with the head than without it, in one benchmark}
    eagle3/        an EAGLE-3 head
    early-exit/    an adapter of an early exit
    README.md      the model card: data, steps, acceptance by task, licence
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from outpace.models.checkpoint import read_json
from outpace.models.config import DecoderConfig
from outpace.models.load import LoadedFiles

__all__ = ["EAGLE3", "EARLY_EXIT", "FOLDER", "TARGET", "Shipped", "describe_target", "norms_digest", "shipped_for"]

FOLDER = Path(__file__).parent
TARGET, EAGLE3, EARLY_EXIT = "target.json", "eagle3", "early-exit"


@dataclass(frozen=True, slots=True)
class Shipped:
    """What there is for a model.

    Args:
        eagle3: folder of the head, if there is one.
        early_exit: folder of the adapter, if there is one.
        in_auto: method "auto" drafts with the head: it was faster so when it was measured.
    """

    eagle3: Path | None = None
    early_exit: Path | None = None
    in_auto: bool = False


def norms_digest(files: LoadedFiles, num_layers: int) -> str:
    """SHA-256 over a model's last norm and those of three layers, in float32."""
    names = ["model.norm.weight"]
    for layer in (0, num_layers // 2, num_layers - 1):
        names += [f"model.layers.{layer}.{name}.weight" for name in ("input_layernorm", "post_attention_layernorm")]
    digest = hashlib.sha256()
    for name in names:
        digest.update(files.checkpoint.get(name).float().contiguous().numpy().tobytes())
    return digest.hexdigest()


def describe_target(files: LoadedFiles, shape: DecoderConfig) -> dict[str, object]:
    """What `target.json` says of a model."""
    return {"model": files.label, **_sizes(shape), "norms": norms_digest(files, shape.num_layers)}


def shipped_for(files: LoadedFiles, shape: DecoderConfig | None) -> Shipped:
    """Drafters for a model.

    Args:
        files: the target's.
        shape: of it; None if it runs on other layers than outpace's own.
    """
    for place, target in _targets(FOLDER).items():
        fits = shape is not None and all(target.get(name) == value for name, value in _sizes(shape).items())
        if shape is not None and fits and target.get("norms") == norms_digest(files, shape.num_layers):
            head = _there(place / EAGLE3)
            return Shipped(head, _there(place / EARLY_EXIT), in_auto=head is not None and target.get("auto") is True)
    return Shipped()


def _sizes(shape: DecoderConfig) -> dict[str, object]:
    return {"hidden_size": shape.hidden_size, "num_layers": shape.num_layers, "vocab_size": shape.vocab_size}


@cache
def _targets(folder: Path) -> dict[Path, dict[str, object]]:
    return {path.parent: read_json(path) for path in sorted(folder.glob(f"*/{TARGET}"))}


def _there(folder: Path) -> Path | None:
    return folder if (folder / "config.json").is_file() else None
