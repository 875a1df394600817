"""Acceptance, speed and equality of text by task, for one drafter on one target.

    python benchmarks/by_task.py --model TARGET --drafter ngram
    python benchmarks/by_task.py other.jsonl --model TARGET --drafter DRAFT -k 4 --json out.json

Every line of the file (prompts.jsonl here, unless another is named) is {"id", "task", "messages", "max_tokens"}. Each
prompt is answered plainly and with the drafter, alternating which goes first, on one engine. Speed is decoding alone,
the first step excluded. Acceptance is accepted / drafted, mean acceptance length includes the bonus token,
"plain_over_floor" is the time of a plain token over that of reading its weights once, "outside" the time of a step
outside models: schedule, pack, verify, logprobs, commit.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from machine import describe_machine

from outpace import LLM, RequestOutput, SamplingParams, SpeculationParams
from outpace.config import SpeculativeConfig


@dataclass
class Row:
    """One prompt, answered both ways."""

    task: str
    plain: RequestOutput
    drafted: RequestOutput

    @property
    def same(self) -> bool:
        return self.plain.outputs[0].token_ids == self.drafted.outputs[0].token_ids

    @property
    def speedup(self) -> float | None:
        speeds = [output.stats.decode_tokens_per_second for output in (self.plain, self.drafted)]
        return speeds[1] / speeds[0] if speeds[0] and speeds[1] else None


def answer_all(llm: LLM, path: Path, temperature: float, limit: int | None) -> list[Row]:
    rows = []
    for index, line in enumerate(path.read_text().splitlines()):
        prompt = json.loads(line)
        count = min(prompt["max_tokens"], limit or prompt["max_tokens"])
        params = SamplingParams(temperature=temperature, seed=index, max_tokens=count)
        outputs = {}
        for enabled in (True, False) if index % 2 else (False, True):
            (outputs[enabled],) = llm.chat(prompt["messages"], params, SpeculationParams(enabled=enabled))
        row = Row(prompt["task"], outputs[False], outputs[True])
        rows.append(row)
        stats = row.drafted.stats
        print(
            f"{prompt['id']:14} {stats.accepted_tokens:4}/{stats.draft_tokens:<4} accepted, "
            f"{row.speedup or 0:.2f}x, same text: {'yes' if row.same else 'NO'}",
            flush=True,
        )
    return rows


def summary(task: str, rows: list[Row], floor: float) -> dict[str, object]:
    plain_rate = median(row.plain.stats.decode_tokens_per_second or 0 for row in rows)
    drafted = sum(row.drafted.stats.draft_tokens for row in rows)
    accepted = sum(row.drafted.stats.accepted_tokens for row in rows)
    drafts = sum(row.drafted.stats.drafts for row in rows)
    return {
        "task": task,
        "prompts": len(rows),
        "tokens": sum(len(row.plain.outputs[0].token_ids) for row in rows),
        "draft_tokens": drafted,
        "acceptance_rate": accepted / drafted if drafted else None,
        "mean_acceptance_length": 1 + accepted / drafts if drafts else None,
        "plain_tokens_per_second": plain_rate,
        "plain_over_floor": 1 / (plain_rate * floor) if plain_rate else None,
        "speedup_median": median(row.speedup or 0 for row in rows),
        "outside_ms": median(outside_ms(row.drafted) for row in rows),
        "same_text": all(row.same for row in rows),
    }


def outside_ms(output: RequestOutput) -> float:
    seconds = output.stats.station_seconds
    own = ("schedule", "pack", "verify", "logprobs", "commit")
    return 1e3 * sum(seconds.get(name, 0.0) for name in own) / output.stats.steps


def text(value: object) -> str:
    return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path, nargs="?", default=Path(__file__).parent / "prompts.jsonl")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafter", default="ngram", help="suffix, ngram, self, self:E, or a draft model")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("-k", type=int, default=5, help="most draft tokens a step")
    parser.add_argument("--control", default="fixed", help="fixed: always k tokens; adaptive: at most (default: fixed)")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, help="answers no longer than this")
    parser.add_argument("--json", type=Path, help="write the table here too")
    args = parser.parse_args()
    config = SpeculativeConfig.parse(args.drafter)
    settings = {name: getattr(config, name) for name in config.__dataclass_fields__}
    config = SpeculativeConfig(**{**settings, "num_speculative_tokens": args.k})
    llm = LLM(
        args.model,
        config,
        quantization=args.quantization,
        max_num_seqs=1,
        speculative_control=args.control,
        notify=print,
    )
    print(describe_machine())
    print(llm.banner())
    floor = llm.floor_seconds()
    print(
        f"temperature {args.temperature}; floor {1e3 * floor:.1f} ms a plain token (its weights read once)", flush=True
    )
    rows = answer_all(llm, args.prompts, args.temperature, args.max_tokens)
    tasks: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        tasks[row.task].append(row)
    table = [summary(task, found, floor) for task, found in tasks.items()] + [summary("all", rows, floor)]
    print("\n| " + " | ".join(table[0]) + " |\n|" + "---|" * len(table[0]))
    for line in table:
        print("| " + " | ".join(text(value) for value in line.values()) + " |")
    if args.json:
        head = {"machine": describe_machine(), "model": llm.banner(), "temperature": args.temperature}
        args.json.write_text(json.dumps({**head, "table": table}, indent=2) + "\n")


if __name__ == "__main__":
    main()
