"""Memory and processor time of a process and all it started, from /proc (Linux). Standard library only."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cpu_seconds_of_tree", "machine_cpu_seconds", "memory_of_tree", "process_tree"]

_PROC = Path("/proc")


def process_tree(pid: int) -> list[int]:
    """A process and its descendants, those that still run."""
    children: dict[int, list[int]] = {}
    for folder in _PROC.glob("[0-9]*"):
        fields = _stat_fields(int(folder.name))
        if fields is not None:
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    found, waiting = [], [pid]
    while waiting:
        one = waiting.pop()
        if _stat_fields(one) is not None:
            found.append(one)
        waiting += children.get(one, [])
    return found


def memory_of_tree(pid: int) -> dict[str, int]:
    """Bytes resident now ("resident") and at most ("peak") over a process and its descendants.

    Pages of mapped model files count, as far as they are in memory. The peak is the sum of each one's own.
    """
    total = {"VmRSS": 0, "VmHWM": 0}
    for one in process_tree(pid):
        for line in _read(_PROC / str(one) / "status").splitlines():
            name, _, value = line.partition(":")
            if name in total:
                total[name] += int(value.split()[0]) * 1024
    return {"resident": total["VmRSS"], "peak": total["VmHWM"]}


def cpu_seconds_of_tree(pid: int) -> float:
    """Processor time used by a process, its descendants, and those of them that have ended and were waited for."""
    ticks = 0
    for one in process_tree(pid):
        fields = _stat_fields(one)
        if fields is not None:
            ticks += sum(int(value) for value in fields[11:15])  # utime, stime, cutime, cstime
    return ticks / os.sysconf("SC_CLK_TCK")


def machine_cpu_seconds() -> float:
    """Processor time used on the whole machine, by anybody, since it started; idle and waiting left out."""
    user, nice, system, _idle, _wait, interrupts, soft = map(int, _read(_PROC / "stat").split()[1:8])
    return (user + nice + system + interrupts + soft) / os.sysconf("SC_CLK_TCK")


def _stat_fields(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the state on (index 0), or None if it runs no more."""
    text = _read(_PROC / str(pid) / "stat")
    return text.rpartition(")")[2].split() if text else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return ""
