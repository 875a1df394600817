"""The controller that a setting names, and what it learnt the last time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from outpace.control import memory
from outpace.control.controller import AdaptiveController
from outpace.control.fixed import FixedController
from outpace.control.knowledge import FLOOR, ControlSettings, Knowledge
from outpace.decisions import GRAMMAR
from outpace.protocols import Controller

__all__ = ["make_controller"]

_WORTH_KEEPING = 50
"""Fewest steps that say something."""
_FORCED = 0.95
"""Chance that a token of text that a grammar prescribes is kept: only how it is split into tokens can differ."""


def make_controller(
    control: str,
    relative_costs: Mapping[str, float],
    folder: Path | None = None,
    key: Callable[[], str] = str,
    *,
    floor: float = FLOOR,
) -> tuple[Controller, Callable[[], None]]:
    """The controller for `EngineConfig.speculative_control`, and what keeps what it has learnt.

    Args:
        control: "adaptive" or "fixed".
        relative_costs: see `ControlSettings`.
        folder: where numbers are kept from one run to the next; None: nowhere.
        floor: share of its plain rate that every request of a batch keeps.
        key: gives all that they depend on, as of now: drafters may be replaced before they are kept.
    """
    if control == "fixed":
        return FixedController(), _nothing
    settings = ControlSettings(floor=floor, relative_costs=relative_costs, first_guesses={GRAMMAR: _FORCED})
    knowledge = Knowledge(settings)
    controller = AdaptiveController(settings, knowledge)
    if folder is None:
        return controller, _nothing
    memory.load(knowledge, folder, key())
    place = folder

    def keep() -> None:
        if controller.report().steps >= _WORTH_KEEPING:
            memory.save(knowledge, place, key())

    return controller, keep


def _nothing() -> None:
    """There is nothing to keep."""
