"""Memory that is freed stays with the process: training asks for the same large blocks in every step.

glibc maps blocks above a threshold anew each time, and the first touch of each of their pages costs microseconds.
"""

from __future__ import annotations

import ctypes

__all__ = ["keep_freed_memory"]

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Parameters of mallopt(3)."""
_LARGEST_KEPT = 32 << 20
"""Bytes; glibc takes no larger threshold. Chunks of the losses stay below it."""


def keep_freed_memory() -> None:
    """For the whole process. Does nothing where the C library has no such setting."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT)
    mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(_TOP_PAD, 256 << 20)
