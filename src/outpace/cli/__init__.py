"""The command `outpace`: options, the commands themselves, and what they show."""

from __future__ import annotations

__all__: list[str] = []
