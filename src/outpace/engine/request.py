"""One request on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from outpace.engine.outputs import CompletionOutput, RequestOutput, RequestStats, TokenLogprobs
from outpace.engine.plan import DraftPlan
from outpace.engine.text import TextBuilder
from outpace.errors import OutpaceError
from outpace.params import SamplingParams
from outpace.sampling.rules import LogitsRules

__all__ = ["Request", "result_of"]

_MOST_PROMPT_LOGITS = 64
"""Rows a step of a prompt whose log probabilities are wanted: each costs a row of logits, 600 kB at 152k tokens."""


@dataclass(slots=True, eq=False)
class Request:
    """State of one request. 0 <= num_computed < len(token_ids) <= max_total_tokens.

    Args:
        id: unique in the engine.
        token_ids: prompt and committed output, one growing list.
        num_prompt_tokens: how many of them are the prompt.
        params: resolved sampling parameters.
        seed: of the noise; drawn by the engine if the caller gave none.
        number: which of the caller's n choices this is.
        stop_ids: ids that end generation: EOS (unless ignored) and the caller's.
        max_total_tokens: length at which generation ends.
        plan: how it is drafted for.
        text: its text so far.
        tenant: whose it is; drafts never come from another tenant's text.
        rules: what its parameters do to logits; None for nothing.
        lane: its lane in the target's cache while running.
        num_computed: tokens whose rows are in the target's cache.
        num_cached_tokens: prompt tokens whose rows were there when it got its first lane; None before that.
        finish_reason: why it ended, None before that; see `CompletionOutput`, and "error" for a fault inside.
        stop_reason: the stop string or stop token id that ended it.
        error: what went wrong, if its finish reason is "error".
        reported: whether its end was put out.
        logprobs: of every output token, if asked for.
        prompt_logprobs: of the prompt tokens so far, if asked for; None for the first, which follows nothing.
        stats: counts and times so far.
        first_step_at: clock at the begin of its first step, in seconds.
        first_token_at: clock at the end of the step that brought its first token.
    """

    id: int
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    number: int
    stop_ids: frozenset[int]
    max_total_tokens: int
    plan: DraftPlan
    text: TextBuilder
    tenant: str = ""
    rules: LogitsRules | None = None
    lane: int | None = None
    num_computed: int = 0
    num_cached_tokens: int | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    reported: bool = False
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=lambda: [None])
    stats: RequestStats = field(default_factory=RequestStats)
    first_step_at: float | None = None
    first_token_at: float | None = None

    @property
    def num_uncomputed(self) -> int:
        """Committed tokens whose rows are not in the cache: 1 when decoding, more in prefill or after preemption."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def next_chunk(self) -> int:
        """Most committed tokens to compute in one step."""
        missing = self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens
        return min(self.num_uncomputed, _MOST_PROMPT_LOGITS) if missing else self.num_uncomputed

    def append(self, token_id: int, source: str | None, logprobs: TokenLogprobs | None = None) -> bool:
        """Commits one token and looks for an end. Returns True if generation ends with it.

        A stop beats length, and the token that completes a stop is part of the token ids.
        """
        self.token_ids.append(token_id)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        found = None
        if token_id in self.stop_ids:
            self.text.push_stop(token_id, source, logprobs)
            self.finish_reason = "stop"
            self.stop_reason = token_id if token_id in self.params.stop_token_ids else None
        else:
            found = self.text.push(token_id, source, logprobs)
            if found is None and len(self.token_ids) >= self.max_total_tokens:
                self.finish_reason = "length"
            if found is None and self._ends_grammar(token_id):
                self.finish_reason = "stop"
        if self.finish_reason:
            found = self.text.finish()
        if found is not None:
            self.finish_reason, self.stop_reason = "stop", found
        return self.finish_reason is not None

    def _ends_grammar(self, token_id: int) -> bool:
        """Moves the rules on. A grammar that fails ends the request with an error."""
        if self.rules is None:
            return False
        try:
            return self.rules.commit(token_id)
        except OutpaceError as error:
            self.fail(str(error))
            return False

    def fail(self, error: str) -> None:
        """Ends the request for a fault inside the engine; the others go on."""
        self.finish_reason, self.error = "error", error


def result_of(request: Request) -> RequestOutput:
    """What the caller gets of a request that has finished."""
    assert request.finish_reason is not None
    ids = request.token_ids[request.num_prompt_tokens :]
    logprobs = None if request.params.logprobs is None else request.logprobs
    completion = CompletionOutput(
        index=request.number,
        text=request.text.text,
        token_ids=ids,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        logprobs=logprobs,
        cumulative_logprob=None if logprobs is None else sum(f[i].logprob for i, f in zip(ids, logprobs, strict=True)),
    )
    return RequestOutput(
        request_id=request.id,
        prompt=None,
        prompt_token_ids=request.token_ids[: request.num_prompt_tokens],
        outputs=[completion],
        stats=request.stats,
        prompt_logprobs=None if request.params.prompt_logprobs is None else request.prompt_logprobs,
        num_cached_tokens=request.num_cached_tokens or 0,
    )
