"""What an examination found, and what follows from it for speculation. Never imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = [
    "DRAFT_TOKENS",
    "TOKENS_A_STEP",
    "BitCheck",
    "Costs",
    "Examination",
    "Kernels",
    "Machine",
]

DRAFT_TOKENS = 4
"""Draft tokens a step of the speculation that is judged."""
TOKENS_A_STEP = (2, 3, 4)
"""Tokens a step may bring on average, of DRAFT_TOKENS + 1: mean acceptance lengths."""
_NOTICED = 0.2
"""Cores of other programs that are worth a word."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Hardware and system.

    Args:
        processor: its name.
        cores: cores this process may run on.
        usable_cores: whole cores of them after a control group's quota.
        memory_free: bytes this process may still take; None where the system does not tell.
        cache_bytes: size of the last-level cache; None where the system does not tell.
        system: operating system and release.
        versions: {program: version}.
    """

    processor: str
    cores: int
    usable_cores: int
    memory_free: int | None
    cache_bytes: int | None
    system: str
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Kernels:
    """Which kernels run here.

    Args:
        native: outpace's own do.
        compiler: what compiled them, in its own words; None if they do not run, or it left no name.
        file: where the compiled file lies; None if they do not run.
        reason: why they do not run, and what would help; None if they do.
        torch: torch's kernels, the fallback.
    """

    native: bool
    compiler: str | None
    file: str | None
    reason: str | None
    torch: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BitCheck:
    """Whether a row has the same bits in every pack, which equal text with and without speculation rests on.

    Args:
        name: what was checked: a precision, or a model.
        threads: numbers of threads tried.
        independent: rows did not depend on their neighbours with any of them.
        same_on_all: the numbers were the same with each of them.
        text: the probe's own words, with the most threads.
    """

    name: str
    threads: tuple[int, ...]
    independent: bool
    same_on_all: bool
    text: str


@dataclass(frozen=True, slots=True)
class Costs:
    """What a step costs by the number of rows it computes.

    Args:
        name: a precision, or a model.
        kernels: native or torch.
        layers: layers computed.
        bytes_read: weights read in a step, in bytes.
        seconds: {rows: median seconds}; empty if nothing was measured.
        bytes_per_second: memory the same threads read a second, for comparison.
        skipped: why nothing was measured, else None.
    """

    name: str
    kernels: str
    layers: int
    bytes_read: int = 0
    seconds: Mapping[int, float] = field(default_factory=dict)
    bytes_per_second: float = 0.0
    skipped: str | None = None

    def relative(self, rows: int) -> float:
        """V(rows): time of a step of so many rows in steps of one row."""
        return self.seconds[rows] / self.seconds[1]

    def bandwidth_share(self, rows: int) -> float:
        """Weights read over time, as share of what the machine can read."""
        return self.bytes_read / self.seconds[rows] / self.bytes_per_second

    def speed_up(self, tokens: float) -> float:
        """Of speculation that drafts DRAFT_TOKENS for nothing and brings so many tokens a step on average."""
        return tokens / self.relative(DRAFT_TOKENS + 1)

    @property
    def pays_from(self) -> float:
        """Share of the draft tokens that must be accepted before such speculation saves time; 1 or more: never."""
        return max(0.0, (self.relative(DRAFT_TOKENS + 1) - 1) / DRAFT_TOKENS)

    def as_dict(self) -> dict[str, Any]:
        """JSON-able; what follows from the times is null where nothing was measured."""
        measured = bool(self.seconds)
        rows = sorted(self.seconds)
        return {
            **asdict(self),
            "seconds": {str(count): self.seconds[count] for count in rows},
            "relative": {str(count): self.relative(count) for count in rows},
            "bandwidth_share": {str(count): self.bandwidth_share(count) for count in rows},
            "speed_up": {str(tokens): self.speed_up(tokens) for tokens in TOKENS_A_STEP if measured},
            "pays_from": self.pays_from if measured else None,
        }


@dataclass(frozen=True, slots=True)
class Examination:
    """All that was found.

    Args:
        machine: hardware and system.
        kernels: kernels that run here.
        threads: threads measured with.
        bits: one check for each precision, and the model's.
        bytes_per_second: {threads: memory read a second}.
        costs: for each precision, and the model's.
        others: cores that other programs kept busy meanwhile; None where the system does not tell.
        seconds: time the examination took.
    """

    machine: Machine
    kernels: Kernels
    threads: int
    bits: tuple[BitCheck, ...]
    bytes_per_second: Mapping[int, float]
    costs: tuple[Costs, ...]
    others: float | None
    seconds: float

    def advice(self) -> str:
        """One sentence: whether speculation pays here, and from which acceptance on."""
        measured = [costs for costs in self.costs if costs.seconds]
        paying = [costs for costs in measured if costs.pays_from < 1]
        never = ", ".join(costs.name for costs in measured if costs.pays_from >= 1)
        if not measured:
            return "Whether speculation pays here is not known: nothing could be measured."
        if not paying:
            rows = DRAFT_TOKENS + 1
            cost = min(costs.relative(rows) for costs in measured)
            return (
                f"Speculation does not pay on this machine: a step of {rows} rows brings at most {rows} tokens and "
                f"costs {cost:.1f} or more steps of one."
            )
        shares = ", ".join(f"{100 * costs.pays_from:.0f} % ({costs.name})" for costs in paying)
        return (
            f"Speculation pays on this machine once more than {shares} of {DRAFT_TOKENS} draft tokens a step are "
            f"accepted, if drafting costs nothing{'; never in ' * bool(never)}{never}."
        )

    def warnings(self) -> list[str]:
        """What to know before believing the numbers or relying on this machine, a sentence each."""
        found = []
        if self.others is not None and self.others >= _NOTICED:
            found.append(f"Other programs used {self.others:.1f} cores meanwhile: the numbers are pessimistic.")
        if not self.kernels.native:
            found.append(f"outpace's own kernels do not run here, torch's stand in for them: {self.kernels.reason}.")
        dependent = [check.name for check in self.bits if not check.independent]
        if dependent:
            found.append(f"Rows depend on their neighbours here ({', '.join(dependent)}): slower ways are taken.")
        differing = [check.name for check in self.bits if not check.same_on_all]
        if differing:
            found.append(f"The number of threads changes bits here ({', '.join(differing)}): keep it with --threads.")
        return found

    def as_dict(self) -> dict[str, Any]:
        """JSON-able: seconds, bytes, shares of 1."""
        return {
            "machine": asdict(self.machine),
            "kernels": asdict(self.kernels),
            "threads": self.threads,
            "bits": [asdict(check) for check in self.bits],
            "bytes_per_second": {str(count): speed for count, speed in self.bytes_per_second.items()},
            "costs": [costs.as_dict() for costs in self.costs],
            "others": self.others,
            "advice": self.advice(),
            "warnings": self.warnings(),
            "seconds": self.seconds,
        }
