"""A finished request, for programs (`--json`) and for people (`--stats`)."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outpace.decisions import ControlReport
    from outpace.engine.outputs import CompletionOutput, RequestOutput, RequestStats, TokenLogprobs

__all__ = [
    "control_lines",
    "counted",
    "gigabytes",
    "logprob_lines",
    "megabytes",
    "percent",
    "result_object",
    "stats_lines",
]


def result_object(output: RequestOutput) -> dict[str, Any]:
    """What `--json` prints, JSON-able: the first answer and the request's statistics; rates are null without drafts.

    Several answers are all under "choices" too; log probabilities are there if they were asked for.
    """
    first = _choice_object(output.outputs[0])
    shown = ("text", "token_ids", "finish_reason", "logprobs")
    record: dict[str, Any] = {name: first[name] for name in shown if name in first}
    if len(output.outputs) > 1:
        record["choices"] = [_choice_object(choice) for choice in output.outputs]
    if output.prompt_logprobs is not None:
        record["prompt_logprobs"] = [_logprobs_object(entry) for entry in output.prompt_logprobs]
    return {**record, "stats": output.stats.as_dict()}


def logprob_lines(logprobs: Sequence[TokenLogprobs | None], token_ids: Sequence[int]) -> list[str]:
    """One line a token for people: the token, its log probability and rank, then the most likely ones asked for.

    Args:
        logprobs: of every token; None where there is none (the first of a prompt).
        token_ids: the tokens, in the same order.
    """
    lines = []
    for token_id, entry in zip(token_ids, logprobs, strict=True):
        if entry is None:
            lines.append(f"{token_id}: -")
            continue
        own = entry[token_id]
        top = sorted(entry.values(), key=lambda item: item.rank)
        others = ", ".join(f"{item.decoded_token!r} {item.logprob:.3f}" for item in top if item is not own)
        line = f"{own.decoded_token!r} {own.logprob:.3f} (rank {own.rank})"
        lines.append(f"{line}; others: {others}" if others else line)
    return lines


def _choice_object(choice: CompletionOutput) -> dict[str, Any]:
    record = {
        "index": choice.index,
        "text": choice.text,
        "token_ids": list(choice.token_ids),
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }
    if choice.logprobs is not None:
        record["logprobs"] = [_logprobs_object(entry) for entry in choice.logprobs]
    return record


def _logprobs_object(entry: TokenLogprobs | None) -> dict[str, Any] | None:
    """JSON has no -inf: an impossible token has the log probability null."""
    if entry is None:
        return None
    return {
        str(token_id): {
            "logprob": item.logprob if isfinite(item.logprob) else None,
            "rank": item.rank,
            "decoded_token": item.decoded_token,
        }
        for token_id, item in entry.items()
    }


def stats_lines(stats: RequestStats, num_prompt_tokens: int) -> list[str]:
    """The statistics of one request as a few lines for people, bonus tokens included in the mean acceptance length."""
    rate = stats.decode_tokens_per_second
    lines = [
        f"prompt: {counted(num_prompt_tokens, 'token')} in {stats.prefill_seconds:.2f} s, first token included",
        f"decoding: {counted(stats.decode_tokens, 'token')} in {stats.decode_seconds:.2f} s"
        + ("" if rate is None else f", {rate:.1f} tokens/s"),
    ]
    if stats.acceptance_rate is None or stats.mean_acceptance_length is None:
        lines.append(f"speculation: nothing drafted in {counted(stats.steps, 'step')}")
    else:
        lines.append(
            f"speculation: {stats.accepted_tokens} of {stats.draft_tokens} draft tokens accepted "
            f"({percent(stats.acceptance_rate)}) in {counted(stats.drafts, 'draft')} over "
            f"{counted(stats.steps, 'step')}; mean acceptance length {stats.mean_acceptance_length:.2f}"
        )
        lines.append("accepted by position: " + " ".join(percent(share) for share in stats.per_position or []))
    if len(stats.by_drafter) > 1:
        lines += [
            f"  {name}: {counts.accepted_tokens} of {counts.draft_tokens} accepted in {counted(counts.drafts, 'draft')}"
            for name, counts in stats.by_drafter.items()
        ]
    if stats.station_seconds:
        lines.append("seconds: " + ", ".join(f"{name} {took:.3f}" for name, took in stats.station_seconds.items()))
    if stats.memory:
        lines.append("memory: " + ", ".join(f"{name} {megabytes(held)}" for name, held in stats.memory.items()))
    return lines


def control_lines(report: ControlReport) -> list[str]:
    """What every drafter brought since the model was loaded, against what was expected, and why one is not asked."""
    lines = []
    for name, found in report.drafters.items():
        if found.drafts and found.gain is not None and found.expected_gain is not None:
            lines.append(
                f"{name}: {found.gain:.2f}x of plain decoding (expected {found.expected_gain:.2f}x) in its steps; "
                f"{counted(found.accepted, 'token')} kept (expected {found.expected_accepted:.0f}); "
                f"{found.drafting_seconds:.3f} s drafting, {found.verifying_seconds:.3f} s more verifying"
            )
        if found.off is not None:
            lines.append(f"off now: {found.off}")
    return lines


def counted(count: int, thing: str) -> str:
    """A number of things: "1 token", "2 tokens"."""
    return f"{count} {thing}{'s' * (count != 1)}"


def percent(share: float) -> str:
    """A share of 1 as whole percent: 0.123 is "12 %"."""
    return f"{100 * share:.0f} %"


def megabytes(count: int) -> str:
    """Bytes as decimal megabytes: 98_300_000 is "98 MB"."""
    return f"{count / 1e6:.0f} MB"


def gigabytes(count: float) -> str:
    """Bytes as decimal gigabytes: 9_830_000_000 is "9.8 GB"."""
    return f"{count / 1e9:.1f} GB"
