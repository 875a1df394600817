"""Counts that speculation changes no token: every drafter, draft length and batch against plain decoding.

    python benchmarks/identity.py --json out.json
    python benchmarks/identity.py --model TARGET --draft DRAFT --drafters ngram=5 self:20=4 draft=4 --requests 4

Plain decoding is an engine without drafters that computes one request at a time; it answers every (prompt, temperature)
once. Then each drafter answers the same prompts with the same seeds, --batches side by side, with each row budget of
--chunks (long prompts go in pieces of it) and once with a cache that the longest request alone would fill, so that
requests lose their rows and are computed again. Token ids are compared, the end of the answer included.

Drafters are written NAME=K,K,...: `ngram`, `self:E` (the first E layers) or `draft`, the model that --draft names, by
default the target's own layers without the last two, kept in a temporary folder. "tokens" counts those compared.
Every line of the prompts (prompts.jsonl here, unless another is named) is {"id", "task", "messages", "max_tokens"}.

Exit code: 0 if no token differs, 1 if any does.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from identity_plan import DRAFT, Case, Drafter, Prompt, Setup, interleave, parse_drafters, plan
from machine import describe_machine
from safetensors.torch import save_file

from outpace import LLM, RequestOutput, SpeculationParams, __version__
from outpace.models.load import LoadedFiles, load_files

LAYERS_LEFT_OUT = {"draft": 2, "self": 4}
"""Layers that the default draft model and the default early exit do without."""


@dataclass(frozen=True)
class Difference:
    """A request whose tokens are not the plain ones: where it begins, and which tokens stand there (None: the end)."""

    prompt: str
    seed: int
    position: int
    plain: int | None
    speculative: int | None
    neighbours: tuple[str, ...]


Plain = Mapping[tuple[str, float], Sequence[int]]
"""Token ids of the plain answers by (prompt id, temperature)."""


def first_difference(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that differs, the end of the shorter one included; None if there is none."""
    pairs = zip_longest(plain, other)
    return next((index for index, (one, two) in enumerate(pairs) if one != two), None)


def compare(plain: Plain, case: Case, group: Sequence[Prompt], outputs: Sequence[RequestOutput]) -> list[Difference]:
    """What differs among the answers to prompts that were computed side by side."""
    found = []
    for prompt, output in zip(group, outputs, strict=True):
        expected, given = plain[prompt.id, case.temperature], output.outputs[0].token_ids
        at = first_difference(expected, given)
        if at is not None:
            one, two = (ids[at] if at < len(ids) else None for ids in (expected, given))
            found.append(Difference(prompt.id, prompt.seed, at, one, two, tuple(other.id for other in group)))
    return found


# Engines.


def write_shallow(files: LoadedFiles, folder: Path) -> Path:
    """A copy of the model without its last layers, as a model folder: a draft model that is often right, not always."""
    total = files.checked_shape().num_layers
    layers = max(1, total - LAYERS_LEFT_OUT["draft"])
    dropped = tuple(f"model.layers.{index}." for index in range(layers, total))
    names = [name for name in files.checkpoint.shapes if not name.startswith(dropped)]
    target = folder / f"{files.label}-{layers}-layers"
    target.mkdir()
    save_file({name: files.checkpoint.get(name).contiguous() for name in names}, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps({**files.config, "num_hidden_layers": layers}))
    for path in files.folder.glob("tokenizer*"):
        shutil.copy(path, target)
    return target


def answer_plainly(llm: LLM, wanted: Sequence[tuple[Prompt, float]]) -> dict[tuple[str, float], list[int]]:
    """Answers of an engine without drafters, one request at a time."""
    off = SpeculationParams(enabled=False)
    answers = {}
    for prompt, temperature in wanted:
        (output,) = llm.generate([prompt.token_ids], [prompt.params(temperature)], off)
        answers[prompt.id, temperature] = output.outputs[0].token_ids
    return answers


def run_case(llm: LLM, model: str, setup: Setup, case: Case, plain: Plain) -> Row:
    """Answers the prompts of a case, a batch at a time, and compares."""
    outputs: list[RequestOutput] = []
    differences: list[Difference] = []
    for first in range(0, len(case.prompts), case.batch):
        group = case.prompts[first : first + case.batch]
        params = [prompt.params(case.temperature) for prompt in group]
        answers = llm.generate([prompt.token_ids for prompt in group], params, case.drafter.speculation)
        differences += compare(plain, case, group, answers)
        outputs += answers
    return Row(
        model=model,
        drafter=case.drafter.name,
        k=case.drafter.k,
        batch=case.batch,
        chunk=setup.chunk,
        cache_tokens=setup.cache_tokens,
        temperature=case.temperature,
        requests=len(outputs),
        tokens=sum(len(output.outputs[0].token_ids) for output in outputs),
        drafted=sum(output.stats.draft_tokens for output in outputs),
        accepted=sum(output.stats.accepted_tokens for output in outputs),
        preempted=sum(output.stats.preemptions for output in outputs),
        differing=tuple(differences),
    )


# The table.


@dataclass(frozen=True)
class Row:
    """What came of a case; of several cases added up, with None for what they do not share."""

    model: str
    drafter: str
    k: int | None = None
    batch: int | None = None
    chunk: int | None = None
    cache_tokens: int | None = None
    temperature: float | None = None
    requests: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    preempted: int = 0
    differing: tuple[Difference, ...] = ()

    @classmethod
    def total(cls, drafter: str, rows: Sequence[Row]) -> Row:
        """Rows added up."""
        return cls(
            model=rows[0].model,
            drafter=drafter,
            requests=sum(row.requests for row in rows),
            tokens=sum(row.tokens for row in rows),
            drafted=sum(row.drafted for row in rows),
            accepted=sum(row.accepted for row in rows),
            preempted=sum(row.preempted for row in rows),
            differing=tuple(difference for row in rows for difference in row.differing),
        )

    def cells(self) -> dict[str, object]:
        """Columns of the table; None is printed as a dash."""
        cells = asdict(self)
        del cells["differing"]
        cells["acceptance"] = f"{self.accepted / self.drafted:.3f}" if self.drafted else None
        where = ", ".join(f"{one.prompt} at {one.position}" for one in self.differing)
        return {**cells, "differing": f"{len(self.differing)}: {where}" if where else 0}

    def line(self) -> str:
        return "| " + " | ".join("-" if cell is None else str(cell) for cell in self.cells().values()) + " |"


def totals(rows: Sequence[Row]) -> list[Row]:
    """One row a drafter, and one for all."""
    names = dict.fromkeys(row.drafter for row in rows)
    return [
        *(Row.total(f"all {name}", [row for row in rows if row.drafter == name]) for name in names),
        Row.total("all", rows),
    ]


# The command.


def count(text: str) -> int:
    """An integer of at least 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not possible: an integer, at least 1")
    return int(text)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path, nargs="?", default=Path(__file__).parent / "prompts.jsonl")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--draft", help="a draft model; default: the target without its last two layers")
    default = "ngram=2,5,8, self:E=2,4 with E four layers from the end, draft=4"
    parser.add_argument("--drafters", nargs="+", help=f"default: {default}")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--requests", type=count, default=3, help="a row of the table, or more to fill the batch")
    parser.add_argument("--batches", type=count, nargs="+", default=[1, 3, 8], help="requests side by side")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--chunks", type=count, nargs="+", default=[512, 64], help="rows a step, more than any batch")
    parser.add_argument("--max-tokens", type=count, default=64, help="answers no longer than this")
    parser.add_argument("--limit", type=count, help="only so many prompts, tasks taking turns")
    parser.add_argument("--threads", type=count, default=1)
    parser.add_argument("--json", type=Path, help="write the table here too")
    return parser.parse_args(argv)


def read_prompts(path: Path, llm: LLM, most: int) -> list[Prompt]:
    """Prompts encoded by the model's chat template, tasks taking turns."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        Prompt(line["id"], index, llm.encode_chat(line["messages"]), min(most, line["max_tokens"]))
        for index, line in ((index, lines[index]) for index in interleave([line["task"] for line in lines]))
    ]


def default_drafters(layers: int) -> list[str]:
    """For a model of so many layers."""
    return ["ngram=2,5,8", f"self:{max(1, layers - LAYERS_LEFT_OUT['self'])}=2,4", f"{DRAFT}=4"]


def run(args: argparse.Namespace, label: str, drafters: Sequence[Drafter]) -> list[Row]:
    """Computes and prints everything, engine after engine. Returns the rows."""
    options: dict[str, Any] = {"quantization": args.quantization, "threads": args.threads}
    llm = LLM(args.model, "none", max_num_seqs=1, **options)
    settings = [llm.describe()]
    head = {"machine": describe_machine(), "outpace": __version__, "model": llm.banner()}
    print("\n".join(f"{key}: {value}" for key, value in head.items()), flush=True)
    prompts = read_prompts(args.prompts, llm, args.max_tokens)[: args.limit]
    ways = {name: getattr(args, name) for name in ("requests", "batches", "temperatures", "chunks")}
    setups = plan(prompts, drafters, **ways)
    wanted = {(p.id, c.temperature): (p, c.temperature) for s in setups for c in s.cases for p in c.prompts}
    plain = answer_plainly(llm, list(wanted.values()))
    del llm  # its weights, before they are loaded once more
    print(f"plain: {len(plain)} answers, {sum(map(len, plain.values()))} tokens\n")
    columns = Row("", "").cells()
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns), flush=True)
    options["max_model_len"] = max(prompt.most_tokens for prompt in prompts)
    words = list(dict.fromkeys(drafter.word for drafter in drafters))
    rows: list[Row] = []
    for setup in setups:
        options |= {"max_num_batched_tokens": setup.chunk, "cache_tokens": setup.cache_tokens}
        llm = LLM(args.model, words, max_num_seqs=max(args.batches), speculative_control="fixed", **options)
        settings.append(llm.describe())
        for case in setup.cases:
            rows.append(run_case(llm, label, setup, case, plain))
            print(rows[-1].line(), flush=True)
        del llm
        if args.json:  # after each, for the next may take long
            tables = {"table": list(map(asdict, rows)), "totals": list(map(asdict, totals(rows)))}
            args.json.write_text(json.dumps({**head, **tables, "settings": settings}, indent=2) + "\n")
    print("\n".join(row.line() for row in totals(rows)))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    files = load_files(args.model, notify=print)
    words = args.drafters or default_drafters(files.checked_shape().num_layers)
    with TemporaryDirectory(prefix="outpace-identity-") as folder:
        drafters = parse_drafters(words, args.draft or "")
        if not args.draft and any(drafter.name == DRAFT for drafter in drafters):
            drafters = parse_drafters(words, str(write_shallow(files, Path(folder))))
        rows = run(args, files.label, drafters)
    found = totals(rows)[-1]
    print(f"\n{found.tokens} tokens compared, {len(found.differing)} of {found.requests} requests differ")
    return 1 if found.differing else 0


if __name__ == "__main__":
    sys.exit(main())
