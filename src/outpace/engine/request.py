"""One request on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from outpace.engine.outputs import RequestStats
from outpace.engine.text import TextBuilder
from outpace.params import SamplingParams

__all__ = ["Request"]


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
        drafter: name of its drafter, None for plain decoding.
        num_speculative_tokens: most draft tokens a step.
        drafts_before_first_token: whether its drafter may be asked before there is a first token: it only looks things
            up, so nobody waits for it.
        text: its text so far.
        lane: its lane in the target's cache while running.
        num_computed: tokens whose rows are in the target's cache.
        finish_reason: why it ended, None before that; see `CompletionOutput`, and "error" for a fault inside.
        stop_reason: the stop string or stop token id that ended it.
        error: what went wrong, if its finish reason is "error".
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
    drafter: str | None
    num_speculative_tokens: int
    drafts_before_first_token: bool
    text: TextBuilder
    lane: int | None = None
    num_computed: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
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

    def append(self, token_id: int, source: str | None) -> bool:
        """Commits one token and looks for an end. Returns True if generation ends with it.

        A stop beats length, and the token that completes a stop is part of the token ids.
        """
        self.token_ids.append(token_id)
        found = None
        if token_id in self.stop_ids:
            self.text.push_silent(token_id, source)
            self.finish_reason = "stop"
            self.stop_reason = token_id if token_id in self.params.stop_token_ids else None
        else:
            found = self.text.push(token_id, source)
            if found is None and len(self.token_ids) >= self.max_total_tokens:
                self.finish_reason = "length"
        if self.finish_reason:
            found = self.text.finish()
        if found is not None:
            self.finish_reason, self.stop_reason = "stop", found
        return self.finish_reason is not None

    def fail(self, error: str) -> None:
        """Ends the request for a fault inside the engine; the others go on."""
        self.finish_reason, self.error = "error", error
