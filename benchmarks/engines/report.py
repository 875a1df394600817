"""Tables of a comparison from what was recorded; `compare.py` prints and saves them. Nothing here measures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

__all__ = ["Run", "losses", "prompt_medians", "render", "standings", "task_medians"]

Run = Mapping[str, Any]
"""What `compare.py` saves: machine, models, settings, prompts [{name, task, tokens}], contenders {name: record}.

A record has engine, variant, versions, notes, load_seconds [s a round], memory {resident, peak} in bytes, quality
{kl, median_kl, agreement, positions} or a reason as text, reason (why it was not or not fully measured, or None), and
answers [{round, prompt, token_ids, first_seconds, milliseconds_per_token, whole_milliseconds_per_token, passes,
drafted, accepted, others_cores}].
"""


def prompt_medians(record: Mapping[str, Any], key: str) -> dict[str, float]:
    """Median over the rounds of one number, by prompt; prompts without it are left out."""
    found: dict[str, list[float]] = {}
    for answer in record["answers"]:
        if answer[key] is not None:
            found.setdefault(answer["prompt"], []).append(answer[key])
    return {prompt: median(values) for prompt, values in found.items()}


def task_medians(run: Run, record: Mapping[str, Any], key: str) -> dict[str, tuple[float, int]]:
    """By task: the median over prompts of their medians over rounds, and of how many prompts."""
    by_prompt = prompt_medians(record, key)
    found: dict[str, list[float]] = {}
    for prompt in run["prompts"]:
        if prompt["name"] in by_prompt:
            found.setdefault(prompt["task"], []).append(by_prompt[prompt["name"]])
    return {task: (median(values), len(values)) for task, values in found.items()}


def losses(run: Run, key: str) -> list[str]:
    """A line for every row that beats outpace on a task: its fastest row there, or its row of the same method."""
    speeds = {name: task_medians(run, record, key) for name, record in run["contenders"].items()}
    lines = []
    for task in _tasks(run):
        here = {name: speed[task][0] for name, speed in speeds.items() if task in speed}
        ours = {name: value for name, value in here.items() if _is_own(run, name)}
        for name, theirs in here.items():
            if name in ours or not ours:
                continue
            best = min(ours, key=ours.__getitem__)
            same = [one for one in ours if _method(run, one) == _method(run, name)]
            peer = min(same, key=ours.__getitem__, default=best)
            if theirs < ours[best]:
                lines.append(
                    f"{task}: {name} beats every row of outpace, {ours[best] / theirs:.2f} times as fast as {best}"
                )
            elif theirs < ours[peer]:
                lines.append(f"{task}: {name} beats the same method, {ours[peer] / theirs:.2f} times as fast as {peer}")
    return lines


def standings(run: Run, key: str, form: str) -> list[str]:
    """By task: outpace's fastest row beside the fastest of the others."""
    speeds = {name: task_medians(run, record, key) for name, record in run["contenders"].items()}
    lines = []
    for task in _tasks(run):
        found: dict[bool, tuple[float, str]] = {}
        for name, speed in speeds.items():
            if task in speed:
                side, row = _is_own(run, name), (speed[task][0], name)
                found[side] = min(found.get(side, row), row)
        if len(found) == 2:
            (own, name), (other, rival) = found[True], found[False]
            lines.append(f"{task}: {name} {own:{form}}, {rival} {other:{form}} ({other / own:.2f} times)")
    return lines


def render(run: Run) -> str:
    """The whole report, markdown."""
    parts = [f"# Engines side by side\n\n{_head(run)}"]
    counts = {task: _median_tokens(run, task) for task in _tasks(run)}
    lengths = ", ".join(f"{task} {tokens:.0f}" for task, tokens in counts.items())
    speed = "Milliseconds a token, decoding alone: median over prompts of the median over rounds. In brackets: prompts."
    parts.append(f"## Decoding\n\n{speed}\n\n{_task_table(run, 'milliseconds_per_token', '.1f')}")
    first = f"Seconds from the request to the first token. Tokens of a prompt, median: {lengths}."
    parts.append(f"## Prompt processing\n\n{first}\n\n{_task_table(run, 'first_seconds', '.2f')}")
    whole = (
        "Milliseconds a token of whole answers, prompt included. Engines read the prompt with the draft model at "
        "different moments, before or after the first token; here that makes no difference."
    )
    parts.append(f"## Whole answers\n\n{whole}\n\n{_task_table(run, 'whole_milliseconds_per_token', '.1f')}")
    about = (
        "Tokens a pass and acceptance over all prompts, where the engine says. Memory: resident after the last answer, "
        "mapped files included (peak in brackets). KL, mean (median), and agreement: next-token distributions against "
        "float32 on the dequantised weights, teacher-forced. Same text: answers equal to the same engine's "
        "without speculation. Others: cores that other programs used meanwhile, median."
    )
    parts.append(f"## What it took\n\n{about}\n\n{_cost_table(run)}")
    parts.append("## Where outpace stands\n\n" + _loss_text(run))
    parts.append("## Not measured\n\n" + _bullets(_missing(run), "Everything asked for was measured."))
    parts.append("## Versions and notes\n\n" + _bullets(_notes(run), "None."))
    return "\n\n".join(parts) + "\n"


def _head(run: Run) -> str:
    settings = run["settings"]
    draft = f", draft model {run['models']['draft']}" if run["models"]["draft"] else ""
    threads = f"{settings['threads']} thread{'s' * (settings['threads'] != 1)}"
    rounds = f"{settings['rounds']} rounds, one engine at a time, greedy, {threads} each"
    ends = "end tokens ignored" if settings["ignore_eos"] else "answers end at the end token"
    limits = f"at most {settings['max_tokens']} tokens an answer ({ends})"
    drafts = f"{settings['draft_tokens']} draft tokens a step where the engine lets one say"
    models = f"Target {run['models']['target']}{draft}; outpace at revision {run['revision']}."
    return f"{run['machine']}\n\n{models} {rounds}, {limits}, {drafts}. Begun {run['began']}."


def _task_table(run: Run, key: str, form: str) -> str:
    tasks = _tasks(run)
    asked = {task: sum(prompt["task"] == task for prompt in run["prompts"]) for task in tasks}
    rows = []
    for name, record in _measured(run):
        found = task_medians(run, record, key)
        cells = [_cell(found.get(task), asked[task], form) for task in tasks]
        rows.append([name, *cells])
    return _table(["engine", *(f"{task} ({asked[task]})" for task in tasks)], rows)


def _cell(found: tuple[float, int] | None, asked: int, form: str) -> str:
    if found is None:
        return "-"
    value, prompts = found
    return format(value, form) + (f" ({prompts})" if prompts < asked else "")


def _cost_table(run: Run) -> str:
    columns = ["engine", "tokens a pass", "acceptance", "memory MB", "load s", "KL", "agreement", "same text", "others"]
    rows = []
    for name, record in _measured(run):
        answers, quality = record["answers"], record["quality"]
        known = isinstance(quality, Mapping)
        memory = record["memory"]
        rows.append(
            [
                name,
                _ratio(answers, lambda a: len(a["token_ids"]), "passes", ".2f"),
                _ratio(answers, lambda a: a["accepted"], "drafted", ".0%"),
                f"{memory['resident'] / 1e6:.0f} ({memory['peak'] / 1e6:.0f})",
                f"{median(record['load_seconds']):.1f}",
                f"{quality['kl']:.2g} ({quality['median_kl']:.2g})" if known else "-",
                f"{quality['agreement']:.1%}" if known else "-",
                _same_text(run, record),
                f"{median(answer['others_cores'] for answer in answers):.2f}",
            ]
        )
    return _table(columns, rows)


def _ratio(
    answers: Iterable[Mapping[str, Any]], upper: Callable[[Mapping[str, Any]], int | None], lower: str, form: str
) -> str:
    pairs = [(upper(answer), answer[lower]) for answer in answers]
    known = [(top, bottom) for top, bottom in pairs if top is not None and bottom is not None]
    total = sum(bottom for _, bottom in known)
    return format(sum(top for top, _ in known) / total, form) if total else "-"


def _same_text(run: Run, record: Mapping[str, Any]) -> str:
    """Prompts whose answer is that of the engine's plain row, of those both answered."""
    plain = run["contenders"].get(f"{record['engine']}/plain")
    if plain is None or record["variant"] == "plain":
        return "-"
    texts = {answer["prompt"]: answer["token_ids"] for answer in plain["answers"]}
    own = {answer["prompt"]: answer["token_ids"] for answer in record["answers"]}
    both = texts.keys() & own.keys()
    return f"{sum(texts[prompt] == own[prompt] for prompt in both)} of {len(both)}"


def _loss_text(run: Run) -> str:
    if not any(_is_own(run, name) for name, _ in _measured(run)):
        return "outpace was not among the engines measured."
    decoding = _bullets(losses(run, "milliseconds_per_token"), "On no task of this run.")
    prompts = _bullets(losses(run, "first_seconds"), "On no task of this run.")
    best = _bullets(standings(run, "milliseconds_per_token", ".1f"), "Nobody else was measured.")
    answers = _bullets(losses(run, "whole_milliseconds_per_token"), "On no task of this run.")
    return (
        f"Fastest row of outpace and of the others by task, ms a token, and how many times faster outpace is:\n\n{best}"
        f"\n\nDecoding:\n\n{decoding}\n\nPrompt processing:\n\n{prompts}\n\nWhole answers:\n\n{answers}"
    )


def _missing(run: Run) -> list[str]:
    return [f"{name}: {record['reason']}" for name, record in run["contenders"].items() if record["reason"]]


def _notes(run: Run) -> list[str]:
    """Versions by engine; what is said of all its rows once, what is said of one with its name."""
    lines = []
    for engine in dict.fromkeys(record["engine"] for record in run["contenders"].values()):
        records = [record for record in run["contenders"].values() if record["engine"] == engine and record["versions"]]
        if not records:
            continue
        versions = ", ".join(f"{package} {version}" for package, version in records[0]["versions"].items())
        common = [note for note in records[0]["notes"] if all(note in record["notes"] for record in records)]
        quality = records[0]["quality"]
        if isinstance(quality, str):
            common.append(f"quality not measured: {quality}")
        own = [f"{record['variant']}: {note}" for record in records for note in record["notes"] if note not in common]
        lines.append("; ".join([f"{engine}: {versions}", *common, *own]))
    return lines


def _measured(run: Run) -> list[tuple[str, Mapping[str, Any]]]:
    return [(name, record) for name, record in run["contenders"].items() if record["answers"]]


def _is_own(run: Run, name: str) -> bool:
    return bool(run["contenders"][name]["engine"].startswith("outpace"))


def _method(run: Run, name: str) -> str:
    return str(run["contenders"][name]["variant"]).partition("-")[0]


def _tasks(run: Run) -> list[str]:
    return list(dict.fromkeys(prompt["task"] for prompt in run["prompts"]))


def _median_tokens(run: Run, task: str) -> float:
    return float(median(prompt["tokens"] for prompt in run["prompts"] if prompt["task"] == task))


def _bullets(lines: Sequence[str], otherwise: str) -> str:
    return "\n".join(f"- {line}" for line in lines) if lines else otherwise


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "| " + " | ".join(columns) + " |\n|" + "---|" * len(columns)
    return "\n".join([head, *("| " + " | ".join(row) + " |" for row in rows)])
