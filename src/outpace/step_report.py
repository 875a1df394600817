"""What a step did, in numbers: for metrics, and for whoever asks how busy the engine is.

Everything is read off the requests before and after a step, so the engine keeps no books for this.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from outpace.engine.outputs import CompletionOutput, RequestOutput, StepOutput
from outpace.engine.request import Request
from outpace.params import SamplingParams

__all__ = ["FinishedRequest", "Load", "StepBooks", "StepReport", "VerifiedDraft"]


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the engine is. Every choice counts as a request of its own.

    Args:
        running: requests with a place in the cache.
        waiting: requests without one, those of callers who were accepted a moment ago included.
        cache_usage: share of the cache's rows that are reserved, 0 to 1.
        cache_tokens: rows the cache has, one a token.
        preemptions: how often a running request has lost its place so far.
        steps: steps so far, those that failed included.
        prefix_cache_queries: prompt tokens so far that might have had rows from an earlier request.
        prefix_cache_hits: those that had.
    """

    running: int = 0
    waiting: int = 0
    cache_usage: float = 0.0
    cache_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0


class VerifiedDraft(NamedTuple):
    """What a step found about one draft.

    Args:
        drafter: name of the one who made it; "grammar" for text that a grammar prescribes.
        num_draft_tokens: tokens verified, at least 1.
        num_accepted: how many were kept.
    """

    drafter: str
    num_draft_tokens: int
    num_accepted: int


@dataclass(frozen=True, slots=True)
class FinishedRequest(RequestOutput):
    """A request that has ended, with all its choices; times in seconds.

    A choice that failed has the finish reason "error", one that was given up "abort"; both have no log probabilities.

    Args:
        params: resolved sampling parameters.
        queue_seconds: from its arrival to its first step; None if it never had one.
        first_token_seconds: from its arrival to its first token; None if there was none.
        total_seconds: from its arrival to its end.
    """

    params: SamplingParams = field(default_factory=SamplingParams)
    queue_seconds: float | None = None
    first_token_seconds: float | None = None
    total_seconds: float = 0.0

    @classmethod
    def of(
        cls, output: RequestOutput | None, choices: Sequence[Request], prompt: str | None, arrived: float
    ) -> FinishedRequest:
        """Of requests that are the choices of one caller.

        Args:
            output: what the caller got; None if it was given up or failed.
            choices: one for each choice.
            prompt: the text they were asked with.
            arrived: `time.perf_counter` when they were asked for.
        """
        if output is None:
            output = RequestOutput.joined([_unfinished(request) for request in choices], prompt)
        begins = [r.first_step_at for r in choices if r.first_step_at is not None]
        first_tokens = [r.first_token_at for r in choices if r.first_token_at is not None]
        return cls(
            **{item.name: getattr(output, item.name) for item in fields(RequestOutput)},
            params=choices[0].params,
            queue_seconds=min(begins) - arrived if begins else None,
            first_token_seconds=min(first_tokens) - arrived if first_tokens else None,
            total_seconds=time.perf_counter() - arrived,
        )


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step did. If requests ended between two steps, it took no time and has no rows.

    Args:
        seconds: of the step.
        rows: rows of the target it computed, drafts included; those that a request which had lost its place found again
            are counted too. 0 if the step failed.
        num_requests: requests that computed rows, every choice being one.
        drafts: of every request that had a draft verified.
        prompt_tokens: prompt tokens computed for the first time, or found in the cache.
        generated_tokens: output tokens committed.
        preemptions: running requests that lost their place.
        first_token_seconds: of every request whose first token came, from its arrival.
        gap_seconds: of every request that got further tokens, since it got the ones before.
        finished: callers' requests that ended, also without success.
        load: how busy the engine is after the step.
    """

    seconds: float
    rows: int
    num_requests: int
    drafts: list[VerifiedDraft]
    prompt_tokens: int
    generated_tokens: int
    preemptions: int
    first_token_seconds: list[float]
    gap_seconds: list[float]
    finished: list[FinishedRequest]
    load: Load


@dataclass(slots=True)
class _Seen:
    """A request as it was after the last step."""

    request: Request
    arrived: float
    num_tokens: int
    num_computed: int = 0
    prompt_done: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    drafted_by: dict[str, tuple[int, int]] = field(default_factory=dict)
    preemptions: int = 0
    admitted: bool = False
    ended: bool = False
    last_tokens_at: float | None = None


class StepBooks:
    """Keeps what is needed to tell what a step did.

    Args:
        cache_tokens: rows of the cache, all free now.
    """

    def __init__(self, cache_tokens: int) -> None:
        self._cache_tokens = cache_tokens
        self._seen: dict[int, _Seen] = {}
        self._steps = 0
        self._preemptions = 0

    def add(self, request: Request, arrived: float) -> None:
        """A request was queued; `arrived` is `time.perf_counter` when it was asked for."""
        self._seen[request.id] = _Seen(request, arrived, len(request.token_ids))

    def took_part(self) -> list[Request]:
        """Requests to end because a step has failed: those it was working on, or all if it did not get so far.

        A failed step takes every place away, which counts as a preemption. Requests it did not touch can go on, and
        those that came to their end in it are all right: the next step hands that out. Some request always ends.
        """
        torn, ended = [], False
        for seen in self._seen.values():
            request = seen.request
            if request.finish_reason is None:
                if request.stats.preemptions > seen.preemptions:
                    torn.append(request)
            else:
                ended |= not seen.ended
        return torn if torn or ended else [seen.request for seen in self._seen.values()]

    def step(
        self,
        seconds: float,
        outputs: Iterable[StepOutput],
        finished: list[FinishedRequest],
        leaving: Iterable[Request],
        free_rows: int,
        prefix_cache: tuple[int, int] = (0, 0),
    ) -> StepReport:
        """Books a step.

        Args:
            seconds: it took; 0 if there was none.
            outputs: what the engine returned.
            finished: for the report.
            leaving: requests that have ended, and are booked for the last time; unknown ones are ignored.
            free_rows: of the cache, now.
            prefix_cache: (queries, hits) of the prefix cache so far.
        """
        now = time.perf_counter()
        rows = prompt_tokens = generated = 0
        drafts: list[VerifiedDraft] = []
        first, gaps = [], []
        # Of a request whose job failed with another of its choices there may still be an output.
        served = [self._seen[output.request_id] for output in outputs if output.request_id in self._seen]
        for seen in served:
            request, stats = seen.request, seen.request.stats
            new_tokens = len(request.token_ids) - seen.num_tokens
            drafted = stats.draft_tokens - seen.draft_tokens
            accepted = stats.accepted_tokens - seen.accepted_tokens
            drafts += _new_drafts(seen)
            rows += drafted + _committed_rows(seen, new_tokens, accepted)
            prompt_tokens += _new_prompt_tokens(seen)
            generated += new_tokens
            if new_tokens:
                if seen.last_tokens_at is None:
                    first.append(now - seen.arrived)
                else:
                    gaps.append(now - seen.last_tokens_at)
                seen.last_tokens_at = now
        preempted = self._catch_up()
        for request in leaving:
            self._seen.pop(request.id, None)
        self._steps += seconds > 0
        return StepReport(
            seconds=seconds,
            rows=rows,
            num_requests=len(served),
            drafts=drafts,
            prompt_tokens=prompt_tokens,
            generated_tokens=generated,
            preemptions=preempted,
            first_token_seconds=first,
            gap_seconds=gaps,
            finished=finished,
            load=self.load(free_rows, prefix_cache),
        )

    def load(self, free_rows: int, prefix_cache: tuple[int, int] = (0, 0)) -> Load:
        """How busy the engine is; `free_rows` of the cache, (queries, hits) of the prefix cache."""
        open_requests = [seen.request for seen in self._seen.values() if seen.request.finish_reason is None]
        running = sum(request.lane is not None for request in open_requests)
        return Load(
            running=running,
            waiting=len(open_requests) - running,
            cache_usage=1 - free_rows / self._cache_tokens,
            cache_tokens=self._cache_tokens,
            preemptions=self._preemptions,
            steps=self._steps,
            prefix_cache_queries=prefix_cache[0],
            prefix_cache_hits=prefix_cache[1],
        )

    def _catch_up(self) -> int:
        """Remembers how the requests are now. Returns how many lost their place since the last time."""
        preempted = 0
        for seen in self._seen.values():
            request, stats = seen.request, seen.request.stats
            preempted += stats.preemptions - seen.preemptions
            seen.preemptions = stats.preemptions
            seen.num_tokens, seen.num_computed = len(request.token_ids), request.num_computed
            seen.draft_tokens, seen.accepted_tokens = stats.draft_tokens, stats.accepted_tokens
            seen.drafted_by = {name: (c.draft_tokens, c.accepted_tokens) for name, c in stats.by_drafter.items()}
            seen.admitted = request.num_cached_tokens is not None
            seen.ended = request.finish_reason is not None
        self._preemptions += preempted
        return preempted


def _new_drafts(seen: _Seen) -> list[VerifiedDraft]:
    """The draft this step verified, if there was one."""
    found = []
    for name, counts in seen.request.stats.by_drafter.items():
        tokens, accepted = seen.drafted_by.get(name, (0, 0))
        if counts.draft_tokens > tokens:
            found.append(VerifiedDraft(name, counts.draft_tokens - tokens, counts.accepted_tokens - accepted))
    return found


def _committed_rows(seen: _Seen, new_tokens: int, accepted: int) -> int:
    """Rows of committed tokens in this step. One that brought tokens has computed all there were before it."""
    request = seen.request
    before = seen.num_computed if seen.admitted else request.num_cached_tokens or 0
    if new_tokens:
        return seen.num_tokens - before
    return max(0, request.num_computed - before - accepted)


def _new_prompt_tokens(seen: _Seen) -> int:
    """Prompt tokens whose rows are there since this step and never were before, so recomputed ones do not count."""
    request = seen.request
    done = request.num_prompt_tokens if request.num_output_tokens else request.num_computed
    new = max(0, done - seen.prompt_done)
    seen.prompt_done += new
    return new


def _unfinished(request: Request) -> RequestOutput:
    """A choice that was given up or failed, with what there is of it."""
    completion = CompletionOutput(
        index=request.number,
        text=request.text.text,
        token_ids=request.token_ids[request.num_prompt_tokens :],
        finish_reason=request.finish_reason or "abort",
        stop_reason=request.stop_reason,
    )
    prompt_ids = request.token_ids[: request.num_prompt_tokens]
    return RequestOutput(request.id, None, prompt_ids, [completion], request.stats)
