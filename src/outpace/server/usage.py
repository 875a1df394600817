"""Counts of tokens, and what speculation did."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from openai.types import CompletionUsage
from openai.types.completion_usage import PromptTokensDetails

from outpace.build import Built
from outpace.engine.outputs import RequestOutput, RequestStats
from outpace.params import SpeculationParams
from outpace.server.bodies import Metrics, SpeculativeDecoding

__all__ = ["metrics_of", "num_speculative_tokens", "usage", "usage_of"]


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> CompletionUsage:
    """Counts of one request, all prompts and choices together; a prompt counts once for all its choices."""
    return CompletionUsage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
    )


def usage_of(outputs: Sequence[RequestOutput]) -> CompletionUsage:
    """Counts of finished requests."""
    return usage(
        sum(len(output.prompt_token_ids) for output in outputs),
        sum(len(choice.token_ids) for output in outputs for choice in output.outputs),
        sum(output.num_cached_tokens for output in outputs),
    )


def num_speculative_tokens(built: Built, speculation: SpeculationParams | None) -> int:
    """Most draft tokens a step of a request that asks for this; 0 if it is decoded plainly."""
    wanted = speculation or SpeculationParams()
    configured = {config.method: config.num_speculative_tokens or 0 for config in built.speculative}
    if not configured or not wanted.enabled:
        return 0
    if wanted.num_speculative_tokens is not None:
        return wanted.num_speculative_tokens
    return max(configured.values()) if wanted.method is None else configured.get(wanted.method, 0)


def metrics_of(outputs: Sequence[RequestOutput], most: int) -> Metrics:
    """What speculation did for one answer; None of several, and for one that was decoded plainly.

    Args:
        outputs: of one request of a client.
        most: draft tokens a step that were asked for, see `num_speculative_tokens`.
    """
    one_answer = len(outputs) == 1 and len(outputs[0].outputs) == 1
    if not one_answer or (most == 0 and not outputs[0].stats.drafts):
        return Metrics(speculative_decoding=None)
    return Metrics(speculative_decoding=_speculative_decoding(outputs[0].stats, most))


def _speculative_decoding(stats: RequestStats, most: int) -> SpeculativeDecoding:
    # Drafts that kept at least 0, 1, 2, ... tokens; tokens are kept from the first on, so exactly j is a difference.
    at_least = [stats.drafts, *stats.accepted_at]
    at_least += [0] * (most + 2 - len(at_least))
    return SpeculativeDecoding(
        mean_acceptance_length=stats.mean_acceptance_length or 1.0,
        draft_acceptance_rate=stats.acceptance_rate or 0.0,
        acceptance_histogram=[more - less for more, less in pairwise(at_least)],
        num_spec_steps=stats.drafts,
        num_accepted_draft_tokens=stats.accepted_tokens,
        num_draft_tokens=stats.draft_tokens,
        num_spec_tokens=most,
    )
