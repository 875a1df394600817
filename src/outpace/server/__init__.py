"""The server: OpenAI's HTTP interface over `AsyncLLM`. Importing this package brings neither torch nor a web stack."""

from __future__ import annotations

__all__: list[str] = []
