"""The controller that a setting names."""

from __future__ import annotations

from collections.abc import Mapping

from outpace.control.controller import AdaptiveController
from outpace.control.fixed import FixedController
from outpace.control.knowledge import ControlSettings
from outpace.protocols import Controller

__all__ = ["make_controller"]


def make_controller(control: str, relative_costs: Mapping[str, float]) -> Controller:
    """The controller for `EngineConfig.speculative_control`; costs as in `ControlSettings`."""
    return (
        FixedController() if control == "fixed" else AdaptiveController(ControlSettings(relative_costs=relative_costs))
    )
