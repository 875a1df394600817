"""What the engine gives back: text, tokens, and what speculation did.

Definitions are vLLM's: acceptance rate = accepted / drafted tokens; mean acceptance length = 1 + accepted / drafts, the
bonus token included; `per_position[i]` = drafts whose token i was accepted / all drafts (not conditional).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

__all__ = [
    "CompletionOutput",
    "DraftCounts",
    "Logprob",
    "Piece",
    "RequestOutput",
    "RequestStats",
    "StepOutput",
    "StreamChunk",
    "TokenLogprobs",
]


@dataclass(slots=True)
class DraftCounts:
    """What became of drafts. Rates are None when nothing was drafted.

    Args:
        drafts: passes that verified a draft of at least one token.
        draft_tokens: draft tokens verified, those of all branches.
        accepted_tokens: draft tokens kept in the output.
        accepted_at: [longest path of a draft] how often the draft token at each position was kept.
    """

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_at: list[int] = field(default_factory=list)

    @property
    def acceptance_rate(self) -> float | None:
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else None

    @property
    def mean_acceptance_length(self) -> float | None:
        return 1 + self.accepted_tokens / self.drafts if self.drafts else None

    @property
    def per_position(self) -> list[float] | None:
        return [count / self.drafts for count in self.accepted_at] if self.drafts else None

    def count_draft(self, num_draft_tokens: int, num_accepted: int, depth: int | None = None) -> None:
        """Books one verified draft; `depth` is its longest path, None for a chain."""
        if not num_draft_tokens:
            return
        self.drafts += 1
        self.draft_tokens += num_draft_tokens
        self.accepted_tokens += num_accepted
        self.accepted_at.extend([0] * ((num_draft_tokens if depth is None else depth) - len(self.accepted_at)))
        for position in range(num_accepted):
            self.accepted_at[position] += 1

    def add(self, other: DraftCounts) -> None:
        """Adds the counts of others."""
        self.drafts += other.drafts
        self.draft_tokens += other.draft_tokens
        self.accepted_tokens += other.accepted_tokens
        self.accepted_at = [sum(pair) for pair in zip_longest(self.accepted_at, other.accepted_at, fillvalue=0)]

    def as_dict(self) -> dict[str, Any]:
        """A JSON-able object."""
        return {
            "drafts": self.drafts,
            "draft_tokens": self.draft_tokens,
            "accepted_tokens": self.accepted_tokens,
            "acceptance_rate": self.acceptance_rate,
            "mean_acceptance_length": self.mean_acceptance_length,
            "per_position": self.per_position,
        }


@dataclass(slots=True)
class RequestStats(DraftCounts):
    """Counts and times of one request.

    Args:
        by_drafter: what became of the drafts of each; the text that a grammar prescribes is drafted by "grammar".
        steps: target passes that computed rows of this request, prefill included.
        preemptions: times the request lost its cache rows and was recomputed.
        prefill_seconds: from the first step to the end of the one that brought the first token.
        decode_seconds: from there to the last token.
        decode_tokens: output tokens after that first step.
        station_seconds: time of the steps this request took part in, by station (shared with its neighbours).
        memory: bytes held by target, drafter and cache when the request ended.
    """

    by_drafter: dict[str, DraftCounts] = field(default_factory=dict)
    steps: int = 0
    preemptions: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    decode_tokens: int = 0
    station_seconds: dict[str, float] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)

    @property
    def decode_tokens_per_second(self) -> float | None:
        return self.decode_tokens / self.decode_seconds if self.decode_tokens and self.decode_seconds else None

    def count(self, drafter: str | None, num_draft_tokens: int, num_accepted: int, depth: int) -> None:
        """Books what a step did; `drafter` made the draft, if there was one, and `depth` is its longest path."""
        self.count_draft(num_draft_tokens, num_accepted, depth)
        if drafter is not None and num_draft_tokens:
            self.by_drafter.setdefault(drafter, DraftCounts()).count_draft(num_draft_tokens, num_accepted, depth)

    @classmethod
    def joined(cls, many: Sequence[RequestStats]) -> RequestStats:
        """Of several choices of one request, computed side by side: counts add up, times are the longest."""
        if len(many) == 1:
            return many[0]
        stations = {name for stats in many for name in stats.station_seconds}
        joined = cls(
            steps=max(stats.steps for stats in many),
            preemptions=sum(stats.preemptions for stats in many),
            prefill_seconds=max(stats.prefill_seconds for stats in many),
            decode_seconds=max(stats.decode_seconds for stats in many),
            decode_tokens=sum(stats.decode_tokens for stats in many),
            station_seconds={name: max(s.station_seconds.get(name, 0.0) for s in many) for name in stations},
            memory=max((s.memory for s in many), key=lambda held: held.get("cache", 0)),
        )
        for stats in many:
            joined.add(stats)
            for name, counts in stats.by_drafter.items():
                joined.by_drafter.setdefault(name, DraftCounts()).add(counts)
        return joined

    def as_dict(self) -> dict[str, Any]:
        """A JSON-able object, seconds as floats and memory in bytes."""
        return {
            "steps": self.steps,
            **DraftCounts.as_dict(self),
            "by_drafter": {name: counts.as_dict() for name, counts in self.by_drafter.items()},
            "preemptions": self.preemptions,
            "prefill_seconds": self.prefill_seconds,
            "decode_seconds": self.decode_seconds,
            "decode_tokens": self.decode_tokens,
            "station_seconds": dict(self.station_seconds),
            "memory": dict(self.memory),
        }


@dataclass(frozen=True, slots=True)
class Logprob:
    """How likely a token was at its position.

    Args:
        logprob: natural logarithm of its probability; -inf where it was impossible.
        rank: 1 for the most likely token; of equal ones the lowest id comes first.
        decoded_token: its text alone.
    """

    logprob: float
    rank: int
    decoded_token: str


TokenLogprobs = dict[int, Logprob]
"""By token id: the token itself, then the most likely ones asked for."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The text one token completed, where the token came from (None: the target itself), and how likely it was."""

    text: str
    token_id: int
    source: str | None
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One finished answer.

    Args:
        index: which of the request's choices.
        text: without special tokens and without the stop string, unless asked for.
        token_ids: every generated id, the EOS or stop token included.
        finish_reason: "stop" (EOS, stop id, stop string, end of a grammar) or "length".
        stop_reason: the stop string or stop token id that ended it; None otherwise.
        logprobs: of every token in `token_ids`, None if not asked for.
        cumulative_logprob: their sum.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request.

    Args:
        request_id: of its first choice.
        prompt: None where token ids or messages were given.
        prompt_token_ids: as computed, after truncation.
        outputs: one for each choice.
        stats: of all choices together.
        prompt_logprobs: of every prompt token, None for the first; None if not asked for.
        num_cached_tokens: prompt tokens of the first choice that an earlier request had computed already.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    stats: RequestStats
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.outputs[0].text

    @classmethod
    def joined(cls, choices: Sequence[RequestOutput], prompt: str | None) -> RequestOutput:
        """Of the n choices of one request, each an output of its own; `prompt` is the text they were asked with."""
        return replace(
            choices[0],
            prompt=prompt,
            outputs=[choice.outputs[0] for choice in choices],
            stats=RequestStats.joined([choice.stats for choice in choices]),
        )


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step added to one request.

    Args:
        request_id: whose.
        pieces: tokens that can be shown now; joined texts of all steps equal the final text.
        prefill: (done, total) prompt tokens while the prompt is still being computed.
        finish_reason: set on the last one.
    """

    request_id: int
    pieces: tuple[Piece, ...]
    prefill: tuple[int, int] | None = None
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """What a stream yields: what one step brought to one choice.

    Args:
        text: new text; empty only while the prompt is computed and at the end.
        token_ids: of the pieces.
        pieces: the text token by token, with sources and log probabilities.
        prefill: (done, total) prompt tokens while the prompt is still being computed.
        finished: whether this choice has ended.
        output: the whole result, on the last chunk of the stream.
        index: which of the n choices.
        finish_reason: why this choice ended, on its last chunk; see `CompletionOutput`.
        stop_reason: the stop string or stop token id that ended it, on its last chunk.
    """

    text: str
    token_ids: list[int]
    pieces: tuple[Piece, ...]
    prefill: tuple[int, int] | None
    finished: bool
    output: RequestOutput | None
    index: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    @classmethod
    def of(
        cls, step: StepOutput, index: int, output: RequestOutput | None, stop_reason: str | int | None
    ) -> StreamChunk:
        """What a step brought to choice `index`; `output` as above, `stop_reason` as the request has it by now."""
        return cls(
            text="".join(piece.text for piece in step.pieces),
            token_ids=[piece.token_id for piece in step.pieces],
            pieces=step.pieces,
            prefill=step.prefill,
            finished=step.finish_reason is not None,
            output=output,
            index=index,
            finish_reason=step.finish_reason,
            stop_reason=stop_reason if step.finish_reason else None,
        )
