"""Reports of steps, made up."""

from __future__ import annotations

from collections.abc import Sequence

from outpace.async_llm import FinishedRequest, Load, StepReport, VerifiedDraft

IDLE, BUSY = Load(), Load(running=1)


def step(
    drafts: Sequence[tuple[str, int, int]] = (),
    *,
    seconds: float = 0.5,
    prompt: int = 0,
    generated: int = 0,
    preemptions: int = 0,
    first: Sequence[float] = (),
    gaps: Sequence[float] = (),
    finished: Sequence[FinishedRequest] = (),
    load: Load = BUSY,
) -> StepReport:
    """What a step did; `drafts` are (drafter, draft tokens, accepted)."""
    return StepReport(
        seconds=seconds,
        rows=prompt + generated,
        num_requests=1,
        drafts=[VerifiedDraft(*draft) for draft in drafts],
        prompt_tokens=prompt,
        generated_tokens=generated,
        preemptions=preemptions,
        first_token_seconds=list(first),
        gap_seconds=list(gaps),
        finished=list(finished),
        load=load,
    )
