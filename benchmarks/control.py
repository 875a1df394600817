"""Does the controller keep its promises: never slower than plain decoding, and near the best fixed choice?

    python benchmarks/control.py --model smollm2-135m --save RESULTS
    python benchmarks/control.py --model TARGET --draft DRAFT --batches 1,4 --sweep 2,4,8

Every prompt of the file is answered plainly and with drafts on one engine, in rounds that alternate. Ratios are a
request's own decoding rate (the first step excluded) over its plain one in the same round; the median counts requests
of at least 64 tokens. Ways of drafting:

  auto            what is loaded: suffix and, with --draft, that model; the controller chooses
  D k=N           drafter D alone, always N tokens where it has them: the sweep (--sweep), at batch 1
  useless, slow   the controller over a small model, and over one as large as the target, with random weights, both
                  beside suffix (--setups): engines of their own

The text must be the same whichever way; if it is not, the exit code is 1. Times mean something only on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from machine import describe_machine
from random_draft import save_random_draft

from outpace import LLM, SamplingParams, SpeculationParams
from outpace.control.fixed import FixedController
from outpace.protocols import Controller

_SHORTEST = 64
"""Tokens of a request that counts."""


@dataclass(frozen=True)
class Way:
    """One way to answer: what is asked, and who decides."""

    name: str
    speculation: SpeculationParams
    controller: Controller


@dataclass
class Measured:
    """Rates of one way: {prompt id: one a round}, the gains that were expected of it, and what became of drafts.

    Of requests whose text is the same in all ways, all have as many rates.
    """

    rates: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    expected: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    drafted: int = 0
    accepted: int = 0


class Bench:
    """One engine, and prompts for it.

    Args:
        llm: with every drafter that is to be tried.
        prompts: lines of the file.
        max_tokens: of an answer, if less than its prompt's own.
        say: takes progress.
    """

    def __init__(
        self, llm: LLM, prompts: Sequence[Mapping[str, Any]], max_tokens: int | None, say: Callable[[str], None]
    ) -> None:
        self._llm = llm
        self._steering = llm.engine.steering
        self.adaptive = self._steering.controller
        self._prompts = [prompt for prompt in prompts if prompt["max_tokens"] >= _SHORTEST]
        self._most = max_tokens
        self._say = say
        self._texts: dict[str, list[int]] = {}
        self.differing: set[str] = set()

    def run(self, ways: Sequence[Way], batch: int, rounds: int) -> dict[str, Measured]:
        """All ways, round by round, each round in another order; plain is first among them."""
        found = {way.name: Measured() for way in ways}
        for number in range(rounds):
            prompts = self._prompts[:]
            random.Random(number).shuffle(prompts)
            groups = [prompts[begin : begin + batch] for begin in range(0, len(prompts), batch)]
            if len(groups[-1]) < batch:
                groups[-1] = (groups[-1] + prompts)[:batch]
            for index, group in enumerate(groups):
                turn = (number + index) % len(ways)
                for way in [*ways[turn:], *ways[:turn]]:
                    self._answer(way, group, found[way.name])
                self._say(f"batch {batch}, round {number + 1} of {rounds}: {index + 1} of {len(groups)}")
        return found

    def _answer(self, way: Way, group: Sequence[Mapping[str, Any]], measured: Measured) -> None:
        self._steering.controller = way.controller
        self._llm.engine.clear_prefixes()
        before = way.controller.report()
        lengths = [min(prompt["max_tokens"], self._most or prompt["max_tokens"]) for prompt in group]
        params = [SamplingParams(temperature=0.0, max_tokens=length) for length in lengths]
        outputs = self._llm.chat([prompt["messages"] for prompt in group], params, way.speculation)
        expected = way.controller.report().expected_gain_since(before)
        for prompt, output in zip(group, outputs, strict=True):
            name = prompt["id"]
            ids = output.outputs[0].token_ids
            if self._texts.setdefault(name, ids) != ids:
                self.differing.add(name)
            rate = output.stats.decode_tokens_per_second
            if rate is not None and len(ids) >= _SHORTEST:
                measured.rates[name].append(rate)
                if expected is not None and len(group) == 1:
                    measured.expected[name].append(expected)
            measured.drafted += output.stats.draft_tokens
            measured.accepted += output.stats.accepted_tokens


def without(found: Mapping[str, Measured], names: Collection[str]) -> dict[str, Measured]:
    """Leaves out what cannot be compared: requests whose text was not the same whichever way."""
    return {
        way: replace(
            measured,
            rates={name: rates for name, rates in measured.rates.items() if name not in names},
            expected={name: gains for name, gains in measured.expected.items() if name not in names},
        )
        for way, measured in found.items()
    }


def table_of(found: Mapping[str, Measured], tasks: Mapping[str, str]) -> list[dict[str, Any]]:
    """A row for every way but plain: the median ratio over requests, of all and by task; none where nothing counts."""
    plain = found["plain"].rates
    rows: list[dict[str, Any]] = []
    if not plain:
        return rows
    for way, measured in found.items():
        if way == "plain":
            continue
        ratios = {
            name: median(rate / base for rate, base in zip(rates, plain[name], strict=True))
            for name, rates in measured.rates.items()
        }
        by_task = defaultdict(list)
        for name, ratio in ratios.items():
            by_task[tasks[name]].append(ratio)
        row = {"way": way, "all": median(ratios.values()), "least": min(ratios.values())}
        row |= {task: median(values) for task, values in sorted(by_task.items())}
        row["accepted"] = measured.accepted / measured.drafted if measured.drafted else None
        rows.append(row)
    return rows


def gains_of(found: Mapping[str, Measured], tasks: Mapping[str, str]) -> list[dict[str, Any]]:
    """Expected and real gain of every request that was answered alone, by task."""
    plain = found["plain"].rates
    return [
        {"task": tasks[name], "way": way, "expected": expected, "real": rate / base}
        for way, measured in found.items()
        if way != "plain"
        for name, several in measured.expected.items()
        for expected, rate, base in zip(several, measured.rates[name], plain[name], strict=True)
    ]


def text_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """As a table in Markdown."""
    if not rows:
        return f"nothing to compare: no request of {_SHORTEST} tokens or more has the same text whichever way"
    head = list(rows[0])
    lines = ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    for row in rows:
        values = [row.get(column) for column in head]
        cells = ["-" if v is None else f"{v:.2f}" if isinstance(v, float) else str(v) for v in values]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def sweep_ways(llm: LLM, lengths: Sequence[int]) -> Iterator[Way]:
    """Every drafter with every length, fixed."""
    fixed = FixedController()
    for name in llm.engine.drafting.drafters:
        for length in lengths:
            asked = SpeculationParams(method=name, num_speculative_tokens=length)
            yield Way(f"{name} k={length}", asked, fixed)


def best_fixed(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The best of the sweep for every task, and what share of it the controller reaches."""
    auto = next(row for row in rows if row["way"] == "auto")
    others = [row for row in rows if row["way"] != "auto"]
    shares: dict[str, Any] = {"way": "auto / best fixed"}
    for column in auto:
        if column not in ("way", "least", "accepted"):
            shares[column] = auto[column] / max(1.0, max(row[column] for row in others))
    return shares


def draw(gains: Sequence[Mapping[str, Any]], path: Path, model: str) -> None:
    """A point for every request answered alone under the controller."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 6), layout="constrained")
    axes = figure.subplots()
    most = 1.1 * max(max(point["expected"], point["real"]) for point in gains)
    axes.plot([0, most], [0, most], color="0.7", linewidth=1, label="as expected")
    axes.axvline(1, color="0.9", linewidth=1, zorder=0)
    axes.axhline(1, color="0.9", linewidth=1, zorder=0)
    for task in sorted({point["task"] for point in gains}):
        own = [point for point in gains if point["task"] == task]
        axes.scatter([p["expected"] for p in own], [p["real"] for p in own], s=18, label=task.replace("_", " "))
    axes.set(xlim=(0.7, most), ylim=(0.7, most), xscale="log", yscale="log", title=model)
    axes.set(xlabel="expected gain over plain decoding, step by step", ylabel="real gain over plain decoding")
    ticks = [tick for tick in (0.8, 1, 1.2, 1.5, 2, 3, 4, 6) if tick < most]
    axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks], minor=False)
    axes.set_yticks(ticks, [f"{tick:g}x" for tick in ticks], minor=False)
    axes.minorticks_off()
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=120)


@contextmanager
def trap_folder(model: str, kind: str) -> Iterator[str]:
    """A folder with a draft model whose weights are random: `useless` and small, or `slow`, as large as the target."""
    folder = Path(tempfile.mkdtemp(prefix="outpace-trap-"))
    try:
        save_random_draft(model, folder, small=kind == "useless")
        yield str(folder)
    finally:
        shutil.rmtree(folder)


def measure(args: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Everything that was asked for."""
    prompts = [json.loads(line) for line in args.prompts.read_text(encoding="utf-8").splitlines()]
    tasks = {prompt["id"]: prompt["task"] for prompt in prompts}
    if args.tasks is not None:
        prompts = [prompt for prompt in prompts if prompt["task"] in args.tasks]
    if args.each is not None:
        prompts = [line for task in sorted(set(tasks.values())) for line in _first(prompts, task, args.each)]
    result: dict[str, Any] = {"machine": describe_machine(), "settings": vars(args) | {"prompts": args.prompts.name}}
    result |= {"tables": {}, "rates": {}, "gains": [], "differing": []}
    config = {"method": "auto", "model": args.draft, "num_speculative_tokens": args.most}
    for setup in args.setups:
        kind = "" if setup == "auto" else setup
        with trap_folder(args.model, kind) if kind else _nothing() as folder:
            used = config | {"model": folder} if kind else config
            llm = LLM(args.model, used, max_num_seqs=max(args.batches), quantization=args.quantization, notify=say)
            bench = Bench(llm, prompts, args.max_tokens, say)
            auto = Way(kind or "auto", SpeculationParams(), bench.adaptive)
            plain = Way("plain", SpeculationParams(enabled=False), FixedController())
            result.setdefault("engine", llm.banner())
            for batch in args.batches:
                ways = [plain, auto]
                if batch == 1 and not kind:
                    ways += sweep_ways(llm, args.sweep)
                found = without(bench.run(ways, batch, args.rounds), bench.differing)
                rows = table_of(found, tasks)
                name = f"batch {batch}" + (f", {kind} draft model" if kind else "")
                result["rates"][name] = {way: measured.rates for way, measured in found.items()}
                result["gains"] += gains_of(found, tasks)
                if len(rows) > 1:
                    rows.append(best_fixed(rows))
                result["tables"][name] = rows
                print(f"\n{name}\n\n{text_of(rows)}", flush=True)
            result["differing"] += sorted(bench.differing)
    return result


def _first(prompts: Sequence[Mapping[str, Any]], task: str, count: int) -> list[Mapping[str, Any]]:
    return [prompt for prompt in prompts if prompt["task"] == task][:count]


@contextmanager
def _nothing() -> Iterator[None]:
    yield None


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word]


def _setups(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - {"auto", "useless", "slow"}:
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: it is auto, useless or slow")
    return names


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="target (default: %(default)s)")
    parser.add_argument("--draft", help="a draft model beside suffix")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--batches", type=_numbers, default=[1, 4, 16], metavar="N,N", help="default: 1,4,16")
    parser.add_argument("--sweep", type=_numbers, default=[2, 4, 8, 16], metavar="N,N", help="default: 2,4,8,16")
    parser.add_argument("--most", type=int, default=16, metavar="N", help="num_speculative_tokens (default: 16)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="of an answer (default: what its prompt says)")
    parser.add_argument("--tasks", type=lambda text: text.split(","), metavar="T,T", help="default: all")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="default: 3")
    parser.add_argument("--each", type=int, metavar="N", help="only the first N prompts of every task")
    parser.add_argument(
        "--setups", type=_setups, default=["auto"], metavar="S,S", help="of auto, useless and slow (default: auto)"
    )
    parser.add_argument("--prompts", type=Path, default=Path(__file__).parent / "prompts.jsonl", metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="expected against real gain of requests at batch 1")
    parser.add_argument("--save", type=Path, metavar="PATH", help="writes PATH.json")
    args = parser.parse_args()
    result = measure(args, lambda text: print(text, file=sys.stderr, flush=True))
    print(f"\n{result['machine']}\n{result['engine']}")
    print("texts that differ: " + (", ".join(result["differing"]) or "none"))
    if args.save is not None:
        args.save.with_name(args.save.name + ".json").write_text(json.dumps(result, indent=1, default=str) + "\n")
    if args.plot is not None and result["gains"]:
        draw(result["gains"], args.plot, result["engine"].split(",")[0])
    return 1 if result["differing"] else 0


if __name__ == "__main__":
    sys.exit(main())
