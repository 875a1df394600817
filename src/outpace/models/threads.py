"""How many threads to compute with."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["usable_cores"]


def usable_cores(root: Path = Path("/")) -> int:
    """Cores this process may use: its affinity, and what a control group's quota leaves of it, at least 1.

    Args:
        root: where /sys is; another one in tests.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, _quota(root) or cores))


def _quota(root: Path) -> int | None:
    """Whole cores a control group (version 2, then 1) grants, or None if it sets no limit."""
    group = root / "sys/fs/cgroup"
    try:
        limit, period = (group / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            limit = (group / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (group / "cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    if limit in ("max", "-1"):
        return None
    return max(1, int(limit) // int(period))
