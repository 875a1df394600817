"""What computes here, by name."""

from __future__ import annotations

import platform
from pathlib import Path

__all__ = ["processor_name"]


def processor_name(root: Path = Path("/")) -> str:
    """As the system calls it.

    Args:
        root: of the file system.
    """
    try:
        lines = (root / "proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
