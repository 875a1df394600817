"""See `outpace.models.identity`."""

from outpace.models.identity import Identity

__all__ = ["Identity"]
