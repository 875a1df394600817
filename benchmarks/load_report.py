"""What a load test found, as numbers, as a table and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from load_clients import Answer, Loop
from load_library import milliseconds_per_token

T = TypeVar("T")

_MODES = {False: "plain", True: "drafts"}


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Between the two nearest values in proportion; None of nothing."""
    return float(np.percentile(values, percent)) if values else None


def load_row(clients: int, speculative: bool, loops: Sequence[Loop[T]]) -> dict[str, Any]:
    """All rounds with so many clients, in one way of decoding.

    Tokens per second are counted while all clients were busy. Gaps lie between chunks of one stream. Acceptance is
    accepted / drafted tokens, the mean acceptance length has the model's own token in it.
    """
    answers = [answer for loop in loops for _, answer in loop.done]
    good = [answer for answer in answers if answer.error is None]
    firsts = [answer.first_token_seconds for answer in good if answer.first_token_seconds is not None]
    gaps = [gap for answer in good for gap in answer.gaps]
    seconds = sum(loop.busy_seconds for loop in loops)
    drafts, drafted, accepted = (
        sum(getattr(answer, name) for answer in good) for name in ("drafts", "draft_tokens", "accepted")
    )
    return {
        "clients": clients,
        "speculative": speculative,
        "answers": len(good),
        "failed": len(answers) - len(good),
        "tokens": sum(answer.tokens for answer in good),
        "cached_tokens": sum(answer.cached_tokens for answer in good),
        "tokens_per_second": sum(loop.busy_tokens for loop in loops) / seconds if seconds else None,
        "first_token_p50": percentile(firsts, 50),
        "first_token_p95": percentile(firsts, 95),
        "gap_p50": percentile(gaps, 50),
        "gap_p95": percentile(gaps, 95),
        "ms_per_token": milliseconds_per_token(good),
        "acceptance_rate": accepted / drafted if drafted else None,
        "mean_acceptance_length": 1 + accepted / drafts if drafts else None,
    }


def differing(answers: Sequence[tuple[str, Answer]]) -> list[str]:
    """Names of prompts that did not always have the same text; (name, answer) of greedy answers of one length."""
    texts: dict[str, set[str]] = {}
    for name, answer in answers:
        if answer.error is None:
            texts.setdefault(name, set()).add(answer.text)
    return [name for name, found in texts.items() if len(found) > 1]


# Tables.


def render(run: Mapping[str, Any]) -> str:
    """The whole report in markdown."""
    parts = [f"{run['machine']}\n\n{run['versions']}, revision {run['revision']}, {run['began']}\n\n{run['server']}"]
    parts.append("Settings: " + ", ".join(f"{name} {value}" for name, value in run["settings"].items()))
    if run.get("load"):
        text = "never differed" if not run["differing"] else f"DIFFERED for {', '.join(run['differing'])}"
        parts.append(f"{load_table(run['load'])}\n\nTimes in ms. Greedy text of a prompt {text}, over all rows.")
    for found in run.get("prefill", []):
        parts.append(prefill_line(found))
    if run.get("overhead"):
        parts.append(overhead_table(run["overhead"]))
    if run.get("mixed"):
        parts.append(mixed_table(run["mixed"]))
    parts += run.get("notes", [])
    return "\n\n".join(parts) + "\n"


def load_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each number of clients and way of decoding."""
    plain = {row["clients"]: row["tokens_per_second"] for row in rows if not row["speculative"]}
    head = ["clients", "decoding", "tokens/s", "/ plain", "first token p50", "p95", "gap p50", "p95", "ms a token"]
    head += ["acceptance", "mean length", "failed"]
    lines = []
    for row in rows:
        base, rate = plain.get(row["clients"]), row["tokens_per_second"]
        lines.append(
            [
                str(row["clients"]),
                _MODES[row["speculative"]],
                _number(rate, "{:.1f}"),
                _number(rate / base if base and rate else None, "{:.2f}"),
                *(_milliseconds(row[name]) for name in ("first_token_p50", "first_token_p95", "gap_p50", "gap_p95")),
                _number(row["ms_per_token"], "{:.1f}"),
                _number(row["acceptance_rate"], "{:.2f}"),
                _number(row["mean_acceptance_length"], "{:.2f}"),
                str(row["failed"]),
            ]
        )
    return markdown([head, *lines])


def prefill_line(found: Mapping[str, Any]) -> str:
    """One sentence."""
    return (
        f"{found['streams']} running streams ({_MODES[found['speculative']]}): longest gap "
        f"{_milliseconds(found['quiet_seconds'])} ms when quiet, {_milliseconds(found['prefill_seconds'])} ms while a "
        f"prompt of {found['prompt_tokens']} tokens is computed, whose first token takes "
        f"{_milliseconds(found['first_token_seconds'])} ms."
    )


def overhead_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The server beside the library, one stream."""
    head = ["one stream", "server, ms a token", "library", "ratio", "ratio of whole answers", "first token later by"]
    lines = [
        [
            _MODES[row["speculative"]],
            _number(row["server_ms_per_token"], "{:.2f}"),
            _number(row["library_ms_per_token"], "{:.2f}"),
            _number(row["decoding_ratio"], "{:.3f}"),
            _number(row["whole_ratio"], "{:.3f}"),
            f"{_milliseconds(row['first_token_more_seconds'])} ms",
        ]
        for row in rows
    ]
    same = "The same text from both." if all(row["same_text"] for row in rows) else "TEXTS DIFFER."
    return f"{markdown([head, *lines])}\n\n{same}"


def mixed_table(found: Mapping[str, Any]) -> str:
    """What became of mixed requests, and every failure."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in found["kinds"].items())
    memory = [found["resident_bytes_before"], found["resident_bytes_after"]]
    megabytes = " -> ".join(_number(None if value is None else value / 1e6, "{:.0f}") for value in memory)
    rows = [["status", "answers"], *([status, str(count)] for status, count in found["statuses"].items())]
    gauges = ", ".join(f"{name} {value:g}" for name, value in found["gauges"].items())
    failures = [f"FAILED: {text}" for text in found["failures"]] or ["Nothing failed."]
    return "\n\n".join(
        [
            f"{found['requests']} mixed requests ({kinds}) from {found['clients']} clients",
            markdown(rows),
            f"{found['compared']} good answers compared with what each is alone. Afterwards: {gauges}. Resident memory "
            f"of the server: {megabytes} MB.",
            *failures,
        ]
    )


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table whose first row is its head."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _milliseconds(seconds: float | None) -> str:
    return _number(None if seconds is None else 1e3 * seconds, "{:.1f}")


# The picture.


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> bool:
    """Throughput and time to the first token by clients, as a PNG. Returns False where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(9, 4), layout="constrained")
    panels = figure.subplots(1, 2)
    for panel, name, label in zip(
        panels,
        ("tokens_per_second", "first_token_p50"),
        ("tokens/s", "seconds to the first token, median"),
        strict=True,
    ):
        for speculative, mode in _MODES.items():
            points = [
                (row["clients"], row[name])
                for row in rows
                if row["speculative"] is speculative and row[name] is not None
            ]
            if points:
                panel.plot(*zip(*points, strict=True), marker="o", label=mode)
        panel.set(xlabel="clients", ylabel=label, ylim=(0, None))
        panel.legend()
    figure.savefig(path, dpi=120)
    return True
