"""How models write tool calls: one format a file, each with a parser and the grammar that prescribes it."""

from __future__ import annotations

__all__: list[str] = []
