"""The machine a benchmark ran on, as a line to print beside its numbers."""

from __future__ import annotations

import platform
from pathlib import Path

import torch


def describe_machine() -> str:
    """Processor, threads, versions."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        models = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        name = models[0] if models else name
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    return f"{name}, {threads_text(torch.get_num_threads())}, {versions}"


def threads_text(count: int) -> str:
    """A number of threads: "1 thread", "2 threads"."""
    return f"{count} thread{'s' * (count != 1)}"
