"""What the first line of a file of answers says: which model gave them, how it was run, and who drafted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from outpace.async_llm import AsyncLLM
from outpace.build import Built
from outpace.config import SpeculativeConfig
from outpace.errors import UnsupportedModel
from outpace.train.data.recorded import FORMAT, HEADER
from outpace.train.identity import Identity

__all__ = ["record_header"]

_ENGINE = ("quantization", "dtype", "kernels")
_DRAFTER = ("method", "model", "adapter")


def record_header(llm: AsyncLLM) -> Callable[[], Mapping[str, Any]]:
    """Makes the first line of a new file, as of then.

    Raises:
        UnsupportedModel: the model runs on transformers' layers, for which no drafters are trained.
    """
    source = llm.built.source
    if source is None or source.shape is None:
        raise UnsupportedModel(
            f"--record is not possible with {llm.built.label}: it runs on transformers' layers, for which no drafters "
            "are trained; leave it out"
        )
    target = Identity.of(source.files, source.shape).as_dict()

    def header() -> Mapping[str, Any]:
        built = llm.built
        return {
            HEADER: FORMAT,
            "target": target,
            "engine": _engine_of(built),
            "drafters": [_drafter_of(config) for config in built.speculative],
        }

    return header


def _engine_of(built: Built) -> dict[str, Any]:
    """Settings under which a drafter learns from the states it will be given."""
    settings = asdict(built.config)
    return {"model": _place(built.config.model), **{name: settings[name] for name in _ENGINE}}


def _drafter_of(config: SpeculativeConfig) -> dict[str, Any]:
    found = {name: getattr(config, name) for name in _DRAFTER}
    return {name: _place(value) if name != "method" else value for name, value in found.items() if value is not None}


def _place(name: str) -> str:
    """A folder or file as it is called wherever one stands; anything else as it is."""
    path = Path(name).expanduser()
    return str(path.absolute()) if path.exists() else name
