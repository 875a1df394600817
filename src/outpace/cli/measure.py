"""Measures plain against speculative decoding of the same prompts on the same engine, one after the other.

What is timed is the time spent inside the engine's stream from the first token on, so neither reading the prompt nor
drawing on the screen counts. A row is the median of its repetitions, which alternate between the two ways.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from outpace.cli.backend import stream
from outpace.cli.report import counted, percent
from outpace.params import SamplingParams, SpeculationParams

if TYPE_CHECKING:
    from outpace.engine.outputs import Piece, RequestOutput, RequestStats, StreamChunk
    from outpace.llm import LLM

__all__ = ["PLAIN", "SPECULATIVE", "Comparison", "Run", "Watcher", "measure_run"]

PLAIN = SpeculationParams(enabled=False)
SPECULATIVE = SpeculationParams()


@dataclass
class Run:
    """One answer and how it came.

    Args:
        seconds: engine time from the first token to the last.
        first_tokens: tokens of the first chunk that brought any; reading the prompt gave them.
        steps: chunks that brought tokens after that one.
        arrivals: (seconds, number of pieces so far) at every chunk, for showing it again.
        output: the engine's result; None until it is finished.
    """

    token_ids: list[int] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    seconds: float = 0.0
    first_tokens: int = 0
    steps: int = 0
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    output: RequestOutput | None = None

    @property
    def rate(self) -> float | None:
        """Decoded tokens per second, without those of the first chunk; None for an answer of one chunk."""
        return self._decoded / self.seconds if self.seconds > 0 and self._decoded else None

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens a step brought on average; None for an answer of one chunk."""
        return self._decoded / self.steps if self.steps else None

    @property
    def seconds_per_step(self) -> float | None:
        """What a step took on average; None for an answer of one chunk."""
        return self.seconds / self.steps if self.steps else None

    @property
    def _decoded(self) -> int:
        return len(self.token_ids) - self.first_tokens

    def add(self, chunk: StreamChunk, seconds: float) -> None:
        """Books a chunk that took `seconds` of engine time to come."""
        if self.first_tokens:
            self.seconds += seconds
            self.steps += bool(chunk.token_ids)
        elif chunk.token_ids:
            self.first_tokens = len(chunk.token_ids)
        self.token_ids += chunk.token_ids
        self.pieces += chunk.pieces
        self.arrivals.append((self.seconds, len(self.pieces)))
        if chunk.output:
            self.token_ids = list(chunk.output.outputs[0].token_ids)
            self.output = chunk.output


Watcher = Callable[[Run], None]
"""Called after every chunk with the run so far; its own time is not measured."""


def measure_run(
    llm: LLM,
    prompt: str | list[dict[str, str]],
    params: SamplingParams,
    speculation: SpeculationParams,
    watch: Watcher | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Run:
    """Answers once and times it.

    Raises:
        OutpaceError: the prompt does not fit the model.
        RuntimeError: the stream ended without a result.
    """
    run = Run()
    with closing(stream(llm, prompt, params, speculation)) as chunks:
        while True:
            begin = clock()
            chunk = next(chunks, None)
            took = clock() - begin
            if chunk is None:
                break
            run.add(chunk, took)
            if watch:
                watch(run)
    if run.output is None:
        raise RuntimeError("the stream ended without a result")
    return run


@dataclass
class Comparison:
    """Repetitions of one task, plain and speculative, and what follows from them.

    Args:
        title: the task's name.
        floor_seconds: time in which this machine can read the weights of one plain token.
        plain: runs without drafts, the same number as
        speculative: runs with them.
    """

    title: str
    floor_seconds: float
    plain: list[Run] = field(default_factory=list)
    speculative: list[Run] = field(default_factory=list)

    @property
    def same_text(self) -> bool:
        """Every run, of either kind, gave the same token ids."""
        first = self.plain[0].token_ids
        return all(run.token_ids == first for run in [*self.plain, *self.speculative])

    @property
    def plain_rate(self) -> float | None:
        return _median([run.rate for run in self.plain])

    @property
    def speculative_rate(self) -> float | None:
        return _median([run.rate for run in self.speculative])

    @property
    def speed_up(self) -> float | None:
        """Speculative over plain tokens per second; None if an answer was too short to time."""
        plain, speculative = self.plain_rate, self.speculative_rate
        return speculative / plain if plain and speculative else None

    @property
    def plain_over_floor(self) -> float | None:
        """Time of a plain token over the floor: how honest the baseline is, 1 being the best there can be."""
        return 1 / (self.plain_rate * self.floor_seconds) if self.plain_rate else None

    @property
    def output(self) -> RequestOutput:
        """The engine's result of the first speculative run."""
        output = self.speculative[0].output
        assert output is not None
        return output

    @property
    def stats(self) -> RequestStats:
        """The engine's counts of that run."""
        return self.output.stats

    def explanation(self) -> str | None:
        """Why this row is below 1.0x, from its numbers; None if it is not.

        speed-up = (tokens a step brings) / (what a step costs, in plain steps), so one of the two is to blame.
        """
        speed_up = self.speed_up
        if speed_up is None or speed_up >= 1:
            return None
        brought = _median([run.tokens_per_step for run in self.speculative])
        cost = _median([run.seconds_per_step for run in self.speculative])
        plain_cost = _median([run.seconds_per_step for run in self.plain])
        if brought is None or cost is None or not plain_cost:
            return None
        ratio = cost / plain_cost
        stats = self.stats
        if stats.acceptance_rate is None:
            cause = "nothing was drafted (nothing to copy), so this is what looking for drafts cost, or noise"
        else:
            cause = f"{percent(stats.acceptance_rate)} of {stats.draft_tokens} draft tokens were accepted"
            if stats.drafts < len(self.speculative[0].token_ids) / 10:
                cause = f"little to copy: only {counted(stats.drafts, 'draft')}, {cause}"
            elif stats.acceptance_rate < 0.3:
                cause = f"few drafts fit: {cause}"
        return (
            f"{self.title} {speed_up:.2f}x: {cause}; "
            f"a step brought {brought:.2f} tokens and cost {ratio:.2f} times a plain step here."
        )

    def as_dict(self) -> dict[str, Any]:
        """JSON-able; rates in tokens per second, None where they do not exist."""
        stats = self.stats
        return {
            "task": self.title,
            "tokens": len(self.plain[0].token_ids),
            "runs": len(self.plain),
            "plain_tokens_per_second": self.plain_rate,
            "speculative_tokens_per_second": self.speculative_rate,
            "plain_over_floor": self.plain_over_floor,
            "speed_up": self.speed_up,
            "acceptance_rate": stats.acceptance_rate,
            "mean_acceptance_length": stats.mean_acceptance_length,
            "same_text": self.same_text,
            "explanation": self.explanation(),
        }


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
