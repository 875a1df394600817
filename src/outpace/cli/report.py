"""A finished request, for programs (`--json`) and for people (`--stats`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outpace.engine.outputs import RequestOutput, RequestStats

__all__ = ["counted", "gigabytes", "megabytes", "percent", "result_object", "stats_lines"]


def result_object(output: RequestOutput) -> dict[str, Any]:
    """What `--json` prints: the first choice of a request and its statistics, JSON-able; rates null without drafts."""
    choice = output.outputs[0]
    return {
        "text": choice.text,
        "token_ids": list(choice.token_ids),
        "finish_reason": choice.finish_reason,
        "stats": output.stats.as_dict(),
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
    if stats.station_seconds:
        lines.append("seconds: " + ", ".join(f"{name} {took:.3f}" for name, took in stats.station_seconds.items()))
    if stats.memory:
        lines.append("memory: " + ", ".join(f"{name} {megabytes(held)}" for name, held in stats.memory.items()))
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
