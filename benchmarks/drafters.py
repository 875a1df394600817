"""Every drafter at hand against plain decoding, by task: acceptance, tokens a step, speed-up, and a picture of them.

    python benchmarks/drafters.py
    python benchmarks/drafters.py --drafter suffix --drafter runs/head/drafter --plot drafters.png --json drafters.json
    python benchmarks/drafters.py --model TARGET --drafter suffix --drafter DRAFT --drafter auto
    python benchmarks/drafters.py --model TARGET --head runs/head/drafter --adapter runs/exit/drafter

A drafter is what --speculative-model takes, or a speculative config as JSON. Without --drafter: n-gram, suffix, EAGLE-3
head and early exit (those that --head and --adapter name, else what comes with outpace for the model), each with k
tokens in every step, and auto, which chooses: where there is a head, once without and once with it, whatever auto does
by default. Prompt by prompt every drafter answers on an engine of its own, plainly and drafting, in turns. Speed-up is
drafted over plain tokens a second on the same engine, decoding alone; answers that differ from the plain one are
counted and make the exit code 1. The file that --json writes is what recipes/ship.py takes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from by_task import Row, summary
from by_task import text as cell
from machine import describe_machine

from outpace import LLM, SamplingParams, SpeculationParams
from outpace.config import EngineConfig, SpeculativeConfig
from outpace.errors import OutpaceError
from outpace.shipped import Shipped, shipped_for
from outpace.source import Source
from outpace.train.result import weights_digest

HEAD, EXIT = "eagle3", "early exit"
WITHOUT_HEAD, WITH_HEAD = "auto without head", "auto with head"
SHOWN = ("acceptance_rate", "mean_acceptance_length", "speedup_median")


def config_of(word: str, k: int) -> SpeculativeConfig:
    """The drafter, with a chain of k tokens in every step where nothing chooses."""
    config = SpeculativeConfig.parse(json.loads(word) if word.startswith("{") else word)
    return config if config.method == "auto" else replace(config, num_speculative_tokens=k, tree_width=None)


def trained(args: argparse.Namespace) -> Shipped:
    """Head and adapter to be measured: those that are named, else those that come with outpace for the model."""
    source = Source.open(args.model, EngineConfig(model=args.model), print)
    own = shipped_for(source.files, source.shape)
    return replace(own, eagle3=args.head or own.eagle3, early_exit=args.adapter or own.early_exit)


def usual(found: Shipped) -> dict[str, str]:
    """{name: what is measured if no drafter is asked for}."""
    head, adapter = (None if folder is None else str(folder) for folder in (found.eagle3, found.early_exit))
    configs: dict[str, dict[str, str | None]] = {
        "ngram": {"method": "ngram"},
        "suffix": {"method": "suffix"},
        HEAD: {"method": "eagle3", "model": head},
        EXIT: {"method": "early_exit", "adapter": adapter},
    }
    if head is None:
        configs["auto"] = {"method": "auto"}
    else:
        configs |= {WITHOUT_HEAD: {"method": "auto", "model": "suffix"}, WITH_HEAD: {"method": "auto", "model": head}}
    return {name: json.dumps(config) for name, config in configs.items()}


def open_all(args: argparse.Namespace, words: Mapping[str, str]) -> dict[str, LLM]:
    """An engine for every drafter; those that this model has not are left out, if they were not asked for by name."""
    found = {}
    for name, word in words.items():
        config = config_of(word, args.k)
        control = "adaptive" if config.method == "auto" else "fixed"
        try:
            found[name] = LLM(args.model, config, quantization=args.quantization, max_num_seqs=1,
                              speculative_control=control, threads=args.threads)  # fmt: skip
        except OutpaceError as error:
            if args.drafter:
                raise
            print(f"{name} is left out: {error}", flush=True)
            continue
        print(f"{name}: {found[name].banner()}", flush=True)
    return found


def answer(
    engines: Mapping[str, LLM], prompts: Sequence[Mapping[str, Any]], args: argparse.Namespace
) -> dict[str, list[Row]]:
    """Rows of every drafter, the drafters taking turns at each prompt, all prompts in every round."""
    rows: dict[str, list[Row]] = {name: [] for name in engines}
    names = list(engines)
    asked = [*prompts] * args.rounds
    for index, prompt in enumerate(asked):
        most = min(prompt["max_tokens"], args.max_tokens or prompt["max_tokens"])
        params = SamplingParams(temperature=args.temperature, seed=index, max_tokens=most)
        turn = index % len(names)
        for name in names[turn:] + names[:turn]:
            outputs = {}
            for enabled in (True, False) if index % 2 else (False, True):
                engines[name].engine.clear_prefixes()
                (outputs[enabled],) = engines[name].chat(prompt["messages"], params, SpeculationParams(enabled=enabled))
            rows[name].append(Row(prompt["task"], outputs[False], outputs[True]))
        said = ", ".join(f"{name} {rows[name][-1].speedup or 0:.2f}x" for name in names)
        print(f"{index + 1} of {len(asked)}, {prompt['id']}: {said}", flush=True)
    return rows


def table_of(engines: Mapping[str, LLM], rows: Mapping[str, list[Row]], rounds: int) -> list[dict[str, Any]]:
    """A line for every drafter and task, over the answers of all rounds."""
    table = []
    for name, found in rows.items():
        floor = engines[name].floor_seconds()
        tasks: dict[str, list[Row]] = defaultdict(list)
        for row in found:
            tasks[row.task].append(row)
            tasks["all"].append(row)
        for task, part in sorted(tasks.items()):
            counts = {"prompts": len(part) // rounds, "answers": len(part)}
            table.append({"drafter": name, **summary(task, part, floor), **counts})
    return table


def settings_of(args: argparse.Namespace, prompts: int) -> dict[str, Any]:
    """What was asked for, for whoever reads the numbers; the model as it was named."""
    names = ("model", "quantization", "k", "temperature", "max_tokens", "threads", "rounds")
    return {**{name: getattr(args, name) for name in names}, "prompts": args.prompts.name, "num_prompts": prompts}


def folders_of(found: Shipped) -> dict[str, Path]:
    """{drafter: its folder}, of those that were trained."""
    folders = {HEAD: found.eagle3, EXIT: found.early_exit}
    return {name: folder for name, folder in folders.items() if folder is not None}


def print_tables(table: Sequence[Mapping[str, Any]]) -> None:
    """One table for each number shown, drafters down and tasks across."""
    tasks = sorted({line["task"] for line in table})
    for number in SHOWN:
        print(f"\n{number.replace('_', ' ')}\n\n| drafter | " + " | ".join(tasks) + " |\n|" + "---|" * (len(tasks) + 1))
        for name in dict.fromkeys(line["drafter"] for line in table):
            found = {line["task"]: line[number] for line in table if line["drafter"] == name}
            print(f"| {name} | " + " | ".join(cell(found.get(task)) for task in tasks) + " |")


def plot(table: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Bars: acceptance and speed-up by task and drafter."""
    from matplotlib.figure import Figure

    tasks = sorted({line["task"] for line in table})
    names = list(dict.fromkeys(line["drafter"] for line in table))
    figure = Figure(figsize=(11, 7), layout="constrained")
    for axes, (number, label) in zip(
        figure.subplots(2, 1, sharex=True),
        (("acceptance_rate", "draft tokens kept (share)"), ("speedup_median", "tokens/s over plain")),
        strict=True,
    ):
        for place, name in enumerate(names):
            values = {line["task"]: line[number] or 0 for line in table if line["drafter"] == name}
            at = [task + (place + 0.5) * 0.8 / len(names) - 0.4 for task in range(len(tasks))]
            axes.bar(at, [values[task] for task in tasks], width=0.8 / len(names), label=name)
        axes.set_ylabel(label)
        axes.set_xticks(range(len(tasks)), tasks)
        if number == "speedup_median":
            axes.axhline(1, color="black", linewidth=0.8)
    figure.axes[0].legend(ncols=len(names), fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafter", action="append", metavar="WHAT", help="may be repeated")
    parser.add_argument("--head", type=Path, metavar="DIR", help="EAGLE-3 head (default: the one that outpace has)")
    parser.add_argument("--adapter", type=Path, metavar="DIR", help="of an early exit (default: as for the head)")
    parser.add_argument("--prompts", type=Path, default=Path(__file__).parent / "prompts.jsonl")
    parser.add_argument("--rounds", type=int, default=1, help="how often each prompt is answered (default: 1)")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("-k", type=int, default=4, help="draft tokens a step (default: 4)")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, help="answers no longer than this")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path, help="write the table here too")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw it")
    args = parser.parse_args()
    if args.drafter and (args.head or args.adapter):
        parser.error("--head and --adapter go without --drafter")
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds} is not possible: at least 1")
    print(describe_machine(), flush=True)
    found = Shipped() if args.drafter else trained(args)
    weights = {name: weights_digest(folder) for name, folder in folders_of(found).items()}
    engines = open_all(args, {word: word for word in args.drafter} if args.drafter else usual(found))
    prompts = [json.loads(line) for line in args.prompts.read_text().splitlines()]
    rows = answer(engines, prompts, args)
    table = table_of(engines, rows, args.rounds)
    print_tables(table)
    differing = {name: sum(not row.same for row in found) for name, found in rows.items()}
    print(
        "\nanswers that differ from the plain one: " + ", ".join(f"{name} {count}" for name, count in differing.items())
    )
    if args.json:
        said = {
            "machine": describe_machine(),
            "settings": settings_of(args, len(prompts)),
            "drafters": {name: engine.banner() for name, engine in engines.items()},
            "weights": weights,
            "table": table,
        }
        args.json.write_text(json.dumps(said, indent=2) + "\n")
    if args.plot:
        plot(table, args.plot, f"{args.model}, chains of {args.k}, temperature {args.temperature:g}")
    return 1 if any(differing.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
