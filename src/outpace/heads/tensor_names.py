"""Names of a head's tensors: those of the native layout, and the others that mean the same."""

from __future__ import annotations

from collections.abc import Iterable

from outpace.models.eagle3_config import LAYER_PREFIX

__all__ = ["canonical_names", "stored_name"]

_LAYER_ALIASES = ("layers.0.",)
_NORM_ALIASES = {
    f"aux_norm_{word}.weight": f"fc_norm.{place}.weight" for place, word in enumerate(("low", "mid", "high"))
}


def canonical_names(stored: Iterable[str]) -> dict[str, list[str]]:
    """{name in the native layout: names of stored tensors that mean it}; more than one is a damaged file."""
    found: dict[str, list[str]] = {}
    for name in stored:
        found.setdefault(_canonical(name), []).append(name)
    return found


def stored_name(name: str, layout: str) -> str:
    """How a tensor of the native layout is called in this one ("native" or "speculators")."""
    if layout == "speculators" and name.startswith(LAYER_PREFIX):
        return _LAYER_ALIASES[0] + name.removeprefix(LAYER_PREFIX)
    return name


def _canonical(name: str) -> str:
    name = name.removeprefix("model.")
    for prefix in _LAYER_ALIASES:
        if name.startswith(prefix):
            return LAYER_PREFIX + name.removeprefix(prefix)
    return _NORM_ALIASES.get(name, name)
