"""A stand-in for `LLM` that answers from a script, in steps whose time is counted on its own clock."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from outpace.config import EngineConfig, SpeculativeConfig
from outpace.decisions import ControlReport
from outpace.engine.outputs import CompletionOutput, Piece, RequestOutput, RequestStats, StreamChunk
from outpace.params import SamplingParams, SpeculationParams

BANNER = "stand-in-1M, int8 (w7a8); drafter ngram, at most 5 tokens; 2 threads"
WORDS = ("Tea", " is", " hot", ",", " tea", " is", " wet", ".")


@dataclass
class Script:
    """How the stand-in answers.

    Args:
        words: the answer, one token each; token i has id 100 + i.
        accepted: draft tokens kept in each speculative step after the first token, cycled.
        drafted: draft tokens verified in such a step; 0 drafts nothing.
        plain_cost, speculative_cost: seconds of one step.
        fault: raised when a request begins.
        speculative_words: what speculation turns the answer into; None keeps it.
        control: what the controller reports.
        note: what loading says first.
    """

    words: Sequence[str] = WORDS
    accepted: Sequence[int] = (1, 0)
    drafted: int = 2
    plain_cost: float = 1.0
    speculative_cost: float = 1.0
    fault: BaseException | None = None
    speculative_words: Sequence[str] | None = None
    control: ControlReport = field(default_factory=lambda: ControlReport({}, 0, 0.0, 0.0))
    note: str = "a note from loading"


@dataclass
class StandIn:
    """Takes the place of `LLM`; `opened` has the settings it was built with, `requests` what it was asked."""

    script: Script
    chat_template: bool = True
    name: str = BANNER
    opened: list[tuple[EngineConfig, SpeculativeConfig]] = field(default_factory=list)
    requests: list[tuple[Any, SamplingParams, SpeculationParams]] = field(default_factory=list)
    closed: int = 0
    now: float = 0.0
    open_faults: dict[str, BaseException] = field(default_factory=dict)

    def __call__(self, config, *, speculative, front, notify, progress) -> StandIn:
        assert front == "cli"
        if config.model in self.open_faults:
            raise self.open_faults[config.model]
        self.opened.append((config, speculative))
        notify(self.script.note)
        for done in range(3):
            progress("loading layers", done + 1, 3)
        return self

    @property
    def tokenizer(self) -> SimpleNamespace:
        return SimpleNamespace(has_chat_template=self.chat_template)

    def floor_seconds(self) -> float:
        return 0.01

    def banner(self) -> str:
        return self.name

    def describe(self) -> dict[str, Any]:
        config, speculative = self.opened[-1]
        return {
            "engine": asdict(config),
            "speculative": {"method": speculative.method},
            "sampling": {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "max_tokens": 512},
        }

    def control(self) -> ControlReport:
        return self.script.control

    def clock(self) -> float:
        return self.now

    def stream(
        self, prompt: Any, params: SamplingParams, speculation: SpeculationParams | None = None
    ) -> Generator[StreamChunk, None, None]:
        self.requests.append((prompt, params, speculation or SpeculationParams()))
        try:
            yield from self._chunks(params, self.requests[-1][2])
        finally:
            self.closed += 1

    def _chunks(self, params: SamplingParams, speculation: SpeculationParams) -> Generator[StreamChunk, None, None]:
        script = self.script
        if script.fault:
            raise script.fault
        drafting = speculation.enabled and script.drafted > 0
        words = script.speculative_words if speculation.enabled and script.speculative_words else script.words
        words = list(words)[: params.max_tokens]
        stats = RequestStats(prefill_seconds=0.5, memory={"target": 98_000_000, "drafter": 0, "cache": 2_000_000})
        stats.station_seconds = {"forward": 0.25}
        self.now += 7.0
        stats.steps += 1
        yield StreamChunk("", [], (), (4, 9), False, None)
        self.now += 7.0
        stats.steps += 1
        position, number = 1, 0
        yield self._chunk([Piece(words[0], 100, None)], words, stats, finished=len(words) == 1)
        while position < len(words):
            kept = script.accepted[number % len(script.accepted)] if drafting else 0
            kept = min(kept, len(words) - position - 1)
            sources = ["prompt"] * kept + [None]
            if drafting:
                stats.count_draft(script.drafted, kept)
            cost = script.speculative_cost if speculation.enabled else script.plain_cost
            self.now += cost
            stats.steps += 1
            stats.decode_seconds += cost
            stats.decode_tokens += len(sources)
            pieces = [Piece(words[position + i], 100 + position + i, source) for i, source in enumerate(sources)]
            position += len(pieces)
            number += 1
            yield self._chunk(pieces, words, stats, finished=position == len(words))

    def _chunk(self, pieces: list[Piece], words: list[str], stats: RequestStats, *, finished: bool) -> StreamChunk:
        output = None
        if finished:
            choice = CompletionOutput(0, "".join(words), list(range(100, 100 + len(words))), "length")
            if words != list(self.script.words)[: len(words)]:
                choice = replace(choice, token_ids=[0 for _ in words])
            output = RequestOutput(0, None, list(range(9)), [choice], stats)
        text = "".join(piece.text for piece in pieces)
        return StreamChunk(text, [piece.token_id for piece in pieces], tuple(pieces), None, finished, output)
