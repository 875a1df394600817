"""Puts trained drafters into the package, with a model card.

    python recipes/ship.py --model smollm2-135m --eagle3 RUN --early-exit RUN --name smollm2-135m-instruct \\
        --measured drafters.json

RUN is a folder of `outpace train`; `--measured` takes what `benchmarks/drafters.py --json` wrote, for the table by
task.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outpace.config import EngineConfig
from outpace.shipped import EAGLE3, EARLY_EXIT, FOLDER, TARGET, describe_target
from outpace.source import Source

KINDS = {EAGLE3: "EAGLE-3 head", EARLY_EXIT: "adapter of an early exit"}


def copy_drafter(run: Path, place: Path) -> None:
    """The drafter alone, without what a run keeps beside it."""
    files = [run / "drafter" / name for name in ("config.json", "model.safetensors")]
    for file in files:
        if not file.is_file():
            sys.exit(f"{file} is missing: name a finished run of `outpace train`, with one exit layer at most")
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for file in files:
        shutil.copyfile(file, place / file.name)


def measurements(run: Path) -> list[dict[str, Any]]:
    """What was measured on held-out texts, in order: lines of log.jsonl."""
    lines = map(json.loads, (run / "log.jsonl").read_text().splitlines())
    return [line for line in lines if "valid" in line]


def best_of(run: Path) -> tuple[dict[str, Any], dict[str, Any], int]:
    """First and best measurement, and the step of the best."""
    found = measurements(run)
    (name,) = found[0]["valid"]

    def score(line: Mapping[str, Any]) -> float:
        return float(line["valid"][name]["greedy_length"] + line["valid"][name]["sampled_length"])

    best = max(found, key=score)
    return found[0]["valid"][name], best["valid"][name], best["step"]


def about_run(kind: str, run: Path, folder: Path) -> list[str]:
    plan = json.loads((run / "run.json").read_text())
    index = json.loads((Path(plan["data"] or run / "data") / "index.json").read_text())
    train, settings = index["splits"]["train"], plan["train"]
    first, best, step = best_of(run)
    size = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
    rounds = settings["steps"] * settings["batch_windows"] * settings["accumulate"] / train["windows"]
    positions = ", ".join(f"{value:.2f}" for value in best["greedy"])
    return [
        f"## {KINDS[kind]} (`{kind}/`, {size:.1f} MB)",
        "",
        f"Data: {train['windows']:,} windows of {index['window']} tokens, {train['labels']:,} tokens to be predicted; "
        f"sources: {', '.join(index['sources'])}. {settings['steps']:,} steps of {settings['batch_windows']} windows "
        f"({rounds:.1f} rounds), learning rate {settings['lr']:g}, loss {settings['loss']}, seed {settings['seed']}; "
        f"options {json.dumps(plan['options'])}.",
        "",
        f"Held-out answers, chains of {best['chain']} tokens, teacher-forced: mean acceptance length "
        f"{best['greedy_length']:.2f} at temperature 0 and {best['sampled_length']:.2f} at 1 after step {step} "
        f"({first['greedy_length']:.2f} and {first['sampled_length']:.2f} untrained). A token is kept, if those before "
        f"it are, with chance {positions} by position.",
        "",
    ]


def by_task(measured: Mapping[str, Any]) -> list[str]:
    names = {"eagle3": "EAGLE-3 head", "early exit": "early exit"}
    table = [line for line in measured["table"] if line["drafter"] in names]
    lines = [
        "## By task",
        "",
        f"`python benchmarks/drafters.py`: chains of {measured['k']} tokens in every step, temperature "
        f"{measured['temperature']:g}, {measured['machine']}. Speed is decoding over plain decoding.",
        "",
        "| drafter | task | draft tokens kept | tokens a step | speed |",
        "|---|---|---|---|---|",
    ]
    for line in table:
        lines.append(
            f"| {names[line['drafter']]} | {line['task']} | {line['acceptance_rate'] or 0:.0%} | "
            f"{line['mean_acceptance_length'] or 1:.2f} | {line['speedup_median']:.2f}x |"
        )
    return [*lines, ""]


def pays(measured: Mapping[str, Any]) -> bool:
    """Whether `auto`, which had the head, was faster than looking drafts up alone, over all prompts."""
    found = {line["drafter"]: line["speedup_median"] for line in measured["table"] if line["task"] == "all"}
    return bool(found.get("auto", 0) > found.get("suffix", 0))


def card(label: str, runs: Mapping[str, Path], place: Path, measured: Mapping[str, Any] | None) -> str:
    by_itself = "`auto` takes the head" if measured is None or pays(measured) else "`auto` does without them"
    lines = [
        f"# Drafters for {label}",
        "",
        f"They draft for {label} and are of no use alone. {by_itself}; `self` takes the adapter, and the speculative "
        'config {"method": "eagle3"} the head. Whatever they guess, the text of the model stays the same.',
        "",
    ]
    for kind, run in runs.items():
        lines += about_run(kind, run, place / kind)
    if measured is not None:
        lines += by_task(measured)
    lines += [
        "## Licence",
        "",
        "Apache 2.0, as outpace. They begin as layers of the model, which is Apache 2.0 too, and learn from its own "
        "answers; prompts are made from templates, and quote Python's standard library (PSF licence).",
        "",
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--name", required=True, help="folder in the package")
    parser.add_argument("--eagle3", type=Path, metavar="RUN")
    parser.add_argument("--early-exit", type=Path, metavar="RUN")
    parser.add_argument("--measured", type=Path, metavar="FILE.json")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="(default: the package's own)")
    args = parser.parse_args(arguments)
    runs = {kind: run for kind, run in ((EAGLE3, args.eagle3), (EARLY_EXIT, args.early_exit)) if run is not None}
    if not runs:
        parser.error("name --eagle3 or --early-exit")
    source = Source.open(args.model, EngineConfig(model=args.model), logging.info)
    assert source.shape is not None
    place = args.folder / args.name
    for kind, run in runs.items():
        copy_drafter(run, place / kind)
    measured = None if args.measured is None else json.loads(args.measured.read_text())
    target = {**describe_target(source.files, source.shape), "auto": measured is None or pays(measured)}
    (place / TARGET).write_text(json.dumps(target, indent=2) + "\n")
    (place / "README.md").write_text(card(source.files.label, runs, place, measured))
    print(f"{place}: {', '.join(runs)}")


if __name__ == "__main__":
    main()
