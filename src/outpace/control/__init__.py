"""Decides who drafts how much. Learns from steps that were made anyway; imports no engine, drafter, model or torch."""

from outpace.control.controller import AdaptiveController
from outpace.control.knowledge import ControlSettings

__all__ = ["AdaptiveController", "ControlSettings"]
