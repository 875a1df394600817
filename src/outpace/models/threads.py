"""How many threads to compute with: the cores nobody else is using, looked at again while running.

Threads of one product wait for each other, so a product on two cores of which one is busy waits for the busy one: a
token of SmolLM2 took 6.3 ms with two threads and 9.4 with one on a quiet machine, 16 and 9.1 beside a busy core.
`ThreadGovernor` therefore gives a core up as soon as somebody else computes on it, and takes it back when it is free.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

__all__ = ["CpuUsage", "ThreadGovernor", "usable_cores"]

_INTERVAL = 0.5
"""Seconds between two looks: fifty ticks of the system's own clock a core."""
_MARGIN = 0.4
"""A core counts as free if others use less than this share of it."""


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


class CpuUsage:
    """What others compute on the cores this process may use, from the system's counters.

    Args:
        stat: the counters; another file in tests.
        clock: wall time in seconds.
        own: processor time of this process in seconds, all threads.
    """

    def __init__(
        self,
        stat: Path = Path("/proc/stat"),
        clock: Callable[[], float] = time.perf_counter,
        own: Callable[[], float] = time.process_time,
    ) -> None:
        self._stat, self._clock, self._own = stat, clock, own
        self._cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
        self._last = self._read()

    def others(self) -> float | None:
        """Cores others kept busy since the last call, as 0.7; None where the system does not tell."""
        now = self._read()
        last, self._last = self._last, now
        if now is None or last is None or now[0] <= last[0]:
            return None
        wall, busy, own = (new - old for new, old in zip(now, last, strict=True))
        return max(0.0, (busy - own) / wall)

    def _read(self) -> tuple[float, float, float] | None:
        """(wall seconds, busy seconds of the allowed cores, own processor seconds)."""
        try:
            lines = self._stat.read_text().splitlines()
        except OSError:
            return None
        ticks = os.sysconf("SC_CLK_TCK")
        busy = 0
        for line in lines:
            name, *counts = line.split()
            if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in self._cpus:
                user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, counts[:8])
                busy += user + nice + system + irq + softirq + steal
        return self._clock(), busy / ticks, self._own()


class ThreadGovernor:
    """Sets torch's number of threads to the cores that are free.

    Args:
        most: cores this process may use.
        usage: what others compute.
        clock: wall time in seconds.
    """

    def __init__(
        self, most: int, usage: CpuUsage | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._most = most
        self._usage = usage or CpuUsage()
        self._clock = clock
        self._next = clock() + _INTERVAL
        self._rising = False
        self._allowed: dict[int, bool] = {}
        self._check: Callable[[int], bool] = lambda count: True

    def start(self, seconds: float = 0.1) -> int:
        """Looks for a moment and sets the first number of threads. Returns it."""
        time.sleep(seconds if self._most > 1 else 0)
        count = self._free_cores() or self._most
        torch.set_num_threads(count)
        return count

    def trust(self, check: Callable[[int], bool]) -> None:
        """From now on a number of threads other than the present one is used only if `check` of it is true, once."""
        self._allowed = {torch.get_num_threads(): True}
        self._check = check

    def adjust(self) -> None:
        """Called between steps: looks every half second, gives up a core at once, takes one back at the second look."""
        if self._most == 1 or self._clock() < self._next:
            return
        self._next = self._clock() + _INTERVAL
        free, current = self._free_cores(), torch.get_num_threads()
        if free is None or free == current:
            self._rising = False
            return
        if free > current and not self._rising:
            self._rising = True
            return
        self._rising = False
        torch.set_num_threads(free)
        if free not in self._allowed:
            self._allowed[free] = self._check(free)
        if not self._allowed[free]:
            torch.set_num_threads(current)

    def _free_cores(self) -> int | None:
        others = self._usage.others()
        return None if others is None else max(1, min(self._most, int(self._most - others + _MARGIN)))
