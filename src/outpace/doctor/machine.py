"""Looks at the machine and at the kernels that run on it; measures nothing."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import torch

from outpace.doctor.report import Kernels, Machine
from outpace.models.linear import describe_precision, has_int8
from outpace.models.machine import processor_name
from outpace.models.memory import available_bytes
from outpace.models.native.library import NativeUnavailable, library
from outpace.models.threads import usable_cores

__all__ = ["find_kernels", "last_level_cache_bytes", "look_at_machine"]

# Compilers leave their names in what they compile; clang also links files of a gcc, so its name counts first.
_COMPILERS = (rb"[\w ]*clang version [ -~]+", rb"GCC: [ -~]+")


def look_at_machine(root: Path = Path("/")) -> Machine:
    """Reads what the system tells.

    Args:
        root: where /proc and /sys are; another one in tests.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(
        processor=processor_name(root),
        cores=cores,
        usable_cores=usable_cores(root),
        memory_free=available_bytes(root),
        cache_bytes=last_level_cache_bytes(root),
        system=f"{platform.system()} {platform.release()}",
        versions={"Python": platform.python_version(), "torch": str(torch.__version__)},
    )


def last_level_cache_bytes(root: Path = Path("/")) -> int | None:
    """Size of the largest cache of the first core; None where the system does not tell."""
    sizes = []
    for file in root.glob("sys/devices/system/cpu/cpu0/cache/index*/size"):
        found = re.fullmatch(r"(\d+)([KM]?)", file.read_text().strip())
        if found:
            sizes.append(int(found[1]) << {"": 0, "K": 10, "M": 20}[found[2]])
    return max(sizes, default=None)


def find_kernels() -> Kernels:
    """Which kernels run here; the native ones are compiled if this was not done before."""
    fallback = [describe_precision(name) for name in ("int8", "none") if name == "none" or has_int8()]
    try:
        file = Path(library()._name)
    except NativeUnavailable as error:
        return Kernels(native=False, compiler=None, file=None, reason=str(error), torch=tuple(fallback))
    return Kernels(native=True, compiler=_compiler_of(file), file=str(file), reason=None, torch=tuple(fallback))


def _compiler_of(file: Path) -> str | None:
    content = file.read_bytes()
    for pattern in _COMPILERS:
        found = re.search(pattern, content)
        if found:
            return found[0].decode().strip()
    return None
