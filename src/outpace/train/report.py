"""What a run says as it goes on, in lines for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outpace.train.acceptance import Acceptance

__all__ = ["Speed", "measured_lines", "step_line"]


@dataclass
class Speed:
    """Tokens and time of the steps of one session; measurements are not counted."""

    tokens: int = 0
    seconds: float = 0.0
    target_seconds: float = 0.0

    def add(self, tokens: int, seconds: float, target_seconds: float) -> None:
        """One step's."""
        self.tokens += tokens
        self.seconds += seconds
        self.target_seconds += target_seconds

    def describe(self) -> str:
        """Tokens a second, and the target's share of the time."""
        if not self.seconds:
            return "no step yet"
        share = self.target_seconds / self.seconds
        return f"{self.tokens / self.seconds:.0f} tokens/s, {share:.0%} of the time in the target"


def step_line(line: Mapping[str, Any], steps: int, speed: Speed) -> str:
    """One step: loss, what is accepted in training, and how fast it goes."""
    return (
        f"step {line['step']}/{steps}  loss {line['loss']:.4f}  accepted {line['agreement']:.3f} at temperature 0, "
        f"{line['alpha']:.3f} at 1  lr {line['lr']:.1e}  {speed.describe()}"
    )


def measured_lines(step: int, found: Mapping[str, Acceptance]) -> list[str]:
    """Acceptance on held-out text, a line for each drafter."""
    lines = []
    for name, item in found.items():
        by_position = " ".join(f"{rate:.2f}" for rate in item.greedy)
        lines.append(
            f"after step {step}, held out, {name}: mean acceptance length {item.greedy_length:.3f} at temperature 0, "
            f"{item.sampled_length:.3f} at 1, of {item.chain} draft tokens; by position {by_position}"
        )
    return lines
