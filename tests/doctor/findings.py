"""Findings of an examination that never was."""

from __future__ import annotations

from typing import Any

from outpace.doctor.report import BitCheck, Costs, Examination, Kernels, Machine

FALLBACK = ("int8 rows", "fp32 prepacked")
NO_COMPILER = "there is no C compiler: install gcc or clang"


def costs(name: str = "int8", five: float = 2.0) -> Costs:
    """Steps of one row take 10 ms and read 100 MB, those of five rows `five` times as long."""
    return Costs(name, "native", 6, 100_000_000, {5: 0.01 * five, 1: 0.01}, 20e9)


def findings(**changes: Any) -> Examination:
    """A quiet machine of two cores on which all is well."""
    settings: dict[str, Any] = {
        "machine": Machine(
            "a processor", 2, 2, 14_250_000_000, 32 << 20, "Linux 6.1", {"Python": "3.11", "torch": "2.9"}
        ),
        "kernels": Kernels(True, "GCC: 12.2.0", "/cache/kernels/outpace-1.so", None, FALLBACK),
        "threads": 2,
        "bits": (BitCheck("int8", (1, 2), True, True, "rows have the same bits in every pack"),),
        "bytes_per_second": {1: 12e9, 2: 20e9},
        "costs": (costs(),),
        "others": 0.04,
        "seconds": 21.5,
    }
    return Examination(**{**settings, **changes})


def without_kernels() -> Kernels:
    return Kernels(False, None, None, NO_COMPILER, FALLBACK)
