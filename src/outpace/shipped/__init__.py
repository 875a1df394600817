"""Trained drafters that come with outpace, each for one model, known by its weights.

A folder for each model:

    target.json    the model's `Identity`
    eagle3/        an EAGLE-3 head
    early-exit/    an adapter of an early exit
    README.md      the model card: data, steps, acceptance by task, licence
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from outpace.models.checkpoint import read_json
from outpace.models.config import DecoderConfig
from outpace.models.identity import Identity
from outpace.models.load import LoadedFiles

__all__ = ["EAGLE3", "EARLY_EXIT", "FOLDER", "TARGET", "Shipped", "shipped_for"]

FOLDER = Path(__file__).parent
TARGET, EAGLE3, EARLY_EXIT = "target.json", "eagle3", "early-exit"


@dataclass(frozen=True, slots=True)
class Shipped:
    """What there is for a model.

    Args:
        eagle3: folder of the head, if there is one.
        early_exit: folder of the adapter, if there is one.
    """

    eagle3: Path | None = None
    early_exit: Path | None = None


def shipped_for(files: LoadedFiles, shape: DecoderConfig | None) -> Shipped:
    """Drafters for exactly this model: a finetune or another quantisation of it has other weights, and gets none.

    Args:
        files: the target's.
        shape: of it; None if it runs on other layers than outpace's own.
    """
    for place, target in _targets(FOLDER).items():
        if shape is not None and (target.get("hidden_size"), target.get("num_layers")) == (
            shape.hidden_size,
            shape.num_layers,
        ):
            own = Identity.of(files, shape)
            if (target.get("weights"), target.get("tokenizer")) == (own.weights, own.tokenizer):
                return Shipped(_there(place / EAGLE3), _there(place / EARLY_EXIT))
    return Shipped()


@cache
def _targets(folder: Path) -> dict[Path, dict[str, object]]:
    return {path.parent: read_json(path) for path in sorted(folder.glob(f"*/{TARGET}"))}


def _there(folder: Path) -> Path | None:
    return folder if (folder / "config.json").is_file() else None
