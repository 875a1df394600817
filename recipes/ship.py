"""Puts trained drafters into the package, with a model card.

    python benchmarks/drafters.py --model smollm2-135m --head RUN/drafter --adapter RUN/drafter --json drafters.json
    python recipes/ship.py --model smollm2-135m --eagle3 RUN --early-exit RUN --name smollm2-135m-instruct \\
        --measured drafters.json

RUN is a folder of `outpace train`; `--measured` takes what the benchmark found of these very drafters. The card says
it, and `auto` takes the head if it was faster with it than without it over all prompts of that benchmark.
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
from outpace.train.result import weights_digest

KINDS = {EAGLE3: "EAGLE-3 head", EARLY_EXIT: "adapter of an early exit"}


NAMES = {EAGLE3: "eagle3", EARLY_EXIT: "early exit"}
"""As the benchmark calls them."""
WITHOUT_HEAD, WITH_HEAD = "auto without head", "auto with head"
FILES = ("config.json", "model.safetensors")


def read_measured(path: Path, runs: Mapping[str, Path]) -> dict[str, Any]:
    """What the benchmark wrote, if it measured the drafters of these runs and all that the card says."""
    found: dict[str, Any] = json.loads(path.read_text())
    lacking = [name for name in ("settings", "weights", "table") if name not in found]
    if lacking:
        sys.exit(f"{path} has no {lacking[0]!r}: measure again with benchmarks/drafters.py --json {path}")
    for kind, run in runs.items():
        for name in FILES:
            if not (run / "drafter" / name).is_file():
                sys.exit(
                    f"{run / 'drafter' / name} is missing: name a finished run of `outpace train`, with one exit layer "
                    "at most"
                )
        if found["weights"].get(NAMES[kind]) != weights_digest(run / "drafter"):
            option = "--head" if kind == EAGLE3 else "--adapter"
            sys.exit(
                f"{path} measured another {KINDS[kind]} than that of {run}, or none: measure again with "
                f"benchmarks/drafters.py {option} {run / 'drafter'} --json {path}"
            )
    wanted = [*(NAMES[kind] for kind in runs), *((WITHOUT_HEAD, WITH_HEAD) if EAGLE3 in runs else ())]
    there = {line["drafter"] for line in found["table"] if line["task"] == "all"}
    if missing := [name for name in wanted if name not in there]:
        sys.exit(
            f"{path} lacks {missing[0]!r}: measure again with benchmarks/drafters.py and without its --drafter, which "
            "measures all that is needed in one run"
        )
    return found


def copy_drafter(run: Path, place: Path) -> None:
    """The drafter alone, without what a run keeps beside it."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for name in FILES:
        shutil.copyfile(run / "drafter" / name, place / name)


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
    names = {
        NAMES[EAGLE3]: "EAGLE-3 head",
        NAMES[EARLY_EXIT]: "early exit",
        WITHOUT_HEAD: "`auto` without the head",
        WITH_HEAD: "`auto` with the head",
    }
    table = [line for line in measured["table"] if line["drafter"] in names]
    lines = [
        "## By task",
        "",
        f"`python benchmarks/drafters.py {options_of(measured['settings'])}`, in one run, "
        f"{measured['settings']['num_prompts']} prompts, {measured['machine']}; head and exit draft in every step, "
        "`auto` chooses. Speed is decoding over plain decoding.",
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


def options_of(settings: Mapping[str, Any]) -> str:
    """The benchmark's command line, as far as numbers depend on it; what was left to itself is left out."""
    names = ("model", "quantization", "prompts", "rounds", "temperature", "k", "max_tokens", "threads")
    given = {name: settings[name] for name in names if settings[name] is not None}
    return " ".join(f"{'-' if name == 'k' else '--'}{name.replace('_', '-')} {value}" for name, value in given.items())


def speed_of_auto(measured: Mapping[str, Any]) -> tuple[float, float]:
    """Speed of `auto` over plain decoding, over all prompts: without the head and with it."""
    found = {line["drafter"]: line["speedup_median"] for line in measured["table"] if line["task"] == "all"}
    return found[WITHOUT_HEAD], found[WITH_HEAD]


def head_pays(measured: Mapping[str, Any]) -> bool:
    """Whether `auto` was faster with the head than without it."""
    without, with_head = speed_of_auto(measured)
    return with_head > without


def card(label: str, runs: Mapping[str, Path], place: Path, measured: Mapping[str, Any]) -> str:
    uses = []
    if EAGLE3 in runs:
        without, with_head = speed_of_auto(measured)
        uses += [
            f"`auto` {'takes the head' if head_pays(measured) else 'does without the head'} ({without:.2f} times the "
            f"speed of plain decoding without it, {with_head:.2f} with it)",
            'the speculative config {"method": "eagle3"} takes the head',
        ]
    if EARLY_EXIT in runs:
        uses.append("`self` takes the adapter")
    lines = [
        f"# Drafters for {label}",
        "",
        f"They draft for {label} and are of no use alone: {'; '.join(uses)}. Whatever they guess, the text of the "
        "model stays the same.",
        "",
    ]
    for kind, run in runs.items():
        lines += about_run(kind, run, place / kind)
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
    parser.add_argument("--measured", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="(default: the package's own)")
    args = parser.parse_args(arguments)
    runs = {kind: run for kind, run in ((EAGLE3, args.eagle3), (EARLY_EXIT, args.early_exit)) if run is not None}
    if not runs:
        parser.error("name --eagle3 or --early-exit")
    measured = read_measured(args.measured, runs)
    source = Source.open(args.model, EngineConfig(model=args.model), logging.info)
    assert source.shape is not None
    place = args.folder / args.name
    for kind, run in runs.items():
        copy_drafter(run, place / kind)
    target = {**describe_target(source.files, source.shape), "auto": EAGLE3 in runs and head_pays(measured)}
    (place / TARGET).write_text(json.dumps(target, indent=2) + "\n")
    (place / "README.md").write_text(card(source.files.label, runs, place, measured))
    print(f"{place}: {', '.join(runs)}")


if __name__ == "__main__":
    main()
