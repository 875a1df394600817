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
    return f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}, Python {platform.python_version()}"
