"""Decides who drafts how much. Learns from steps that were made anyway; imports no engine, drafter, model or torch."""

from outpace.control.controller import AdaptiveController
from outpace.control.fixed import FixedController
from outpace.control.knowledge import ControlSettings, Knowledge

__all__ = ["AdaptiveController", "ControlSettings", "FixedController", "Knowledge"]
