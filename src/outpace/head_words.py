"""Which files are an EAGLE-3 head, told from their config or their name. Never imports torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["is_eagle3_config", "names_eagle3_head"]


def is_eagle3_config(config: Mapping[str, Any]) -> bool:
    """Whether a parsed config.json describes an EAGLE-3 head, in whatever layout."""
    kind = config.get("speculators_model_type")
    if kind is not None:
        return bool(kind == "eagle3")
    names = config.get("architectures")
    named = isinstance(names, list) and any("eagle3" in str(name).lower() for name in names)
    return named or "draft_vocab_size" in config


def names_eagle3_head(model: str) -> bool:
    """Whether a folder holds an EAGLE-3 head, or a name that is no path says so, as published ones do ("EAGLE3-...").

    What cannot be read is no head here; loading it says what is wrong with it.
    """
    try:
        path = Path(model).expanduser()
        if not path.exists():
            return "eagle3" in model.lower()
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError, RecursionError):
        return False
    return isinstance(config, dict) and is_eagle3_config(config)
