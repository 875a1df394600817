"""Whether drafts with branches beat chains: tokens a step by most nodes and width, without running the target twice.

    python benchmarks/trees.py answers --model TARGET --answers FILE
    python benchmarks/trees.py replay --answers FILE --draft DRAFT
    python benchmarks/trees.py replay --answers FILE --draft suffix
    python benchmarks/trees.py rows --model TARGET
    python benchmarks/trees.py speed --model TARGET --draft DRAFT

`answers` answers prompts of prompts.jsonl plainly, greedily and at temperature 1, and keeps prompts and answers as
token ids. Under the coupled rule a draft is kept as far as it says what follows, so `replay` needs only the drafter and
these texts. It prints for every width (1 is a chain) and number of nodes: tokens a step (mean acceptance length, the
bonus token included), how often the first token was among the children of the text, passes of the draft model a step
and rows in them. `rows` times a pass of the target over so many rows as a chain and as a tree, alternating, at one
context. `speed` answers prompts with what the controller chooses if drafts are chains, and if they may branch, on one
engine, alternating with plain decoding.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from machine import describe_machine

from outpace import LLM, SamplingParams, SpeculationParams
from outpace.control import AdaptiveController, FixedController
from outpace.decisions import Allotment, Offer, Wish
from outpace.drafters.draft_model import DraftModelDrafter
from outpace.drafters.suffix import SuffixDrafter
from outpace.params import SamplingDefaults
from outpace.protocols import Drafter
from outpace.types import Ask, Draft, ForwardResult, Observation, Pack, Segment
from outpace.verify.coupled import verify

WIDTHS, NODES = (1, 2, 3), (4, 8, 16)
TEMPERATURES = (0.0, 1.0)
MAX_LEN = 2048


def params_of(temperature: float, seed: int, max_tokens: int) -> SamplingParams:
    """Nothing but the temperature: a model's own defaults would hide what it does."""
    return SamplingParams(
        temperature=temperature,
        seed=seed,
        max_tokens=max_tokens,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        repetition_penalty=1.0,
    )


def answer(args: argparse.Namespace) -> None:
    llm = LLM(args.model, "none", threads=args.threads, max_model_len=MAX_LEN)
    prompts = [json.loads(line) for line in Path(__file__).with_name("prompts.jsonl").read_text().splitlines()]
    by_task: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for prompt in prompts:
        by_task[prompt["task"]].append(prompt)
    texts = []
    for task, found in by_task.items():
        for seed, prompt in enumerate(found[: args.per_task]):
            for temperature in TEMPERATURES:
                (output,) = llm.chat(prompt["messages"], params_of(temperature, seed, args.tokens))
                text = {"task": task, "temperature": temperature, "seed": seed, "prompt": output.prompt_token_ids}
                texts.append({**text, "output": output.outputs[0].token_ids})
                print(f"{prompt['id']} at {temperature}: {len(texts[-1]['output'])} tokens", flush=True)
    args.answers.write_text(json.dumps(texts))


@dataclass
class Count:
    """What came of the drafts of one setting."""

    steps: int = 0
    tokens: int = 0
    first: int = 0
    passes: int = 0
    rows: int = 0
    seconds: float = 0.0

    def cells(self) -> list[str]:
        steps = max(1, self.steps)
        numbers = (self.tokens / steps, self.first / steps, self.passes / steps, self.rows / steps)
        return [f"{number:.2f}" for number in numbers]


@dataclass
class Counted:
    """A draft model that counts its passes."""

    model: Any
    count: Count = field(default_factory=Count)

    @property
    def vocab_size(self) -> int:
        size: int = self.model.vocab_size
        return size

    @property
    def takes_trees(self) -> bool:
        takes: bool = self.model.takes_trees
        return takes

    def forward(self, pack: Pack, cache: Any) -> ForwardResult:
        self.count.passes += 1
        self.count.rows += pack.num_rows
        result: ForwardResult = self.model.forward(pack, cache)
        return result


def replay_text(drafter: Drafter, text: dict[str, Any], nodes: int, count: Count) -> None:
    """Drafts along one text as an engine would, every draft whole."""
    tokens, output = list(text["prompt"]), text["output"]
    params = params_of(text["temperature"], text["seed"], 1).resolved(SamplingDefaults())
    drafter.start(0, tokens, len(tokens))
    place = 1  # the first token comes with the prompt
    tokens += output[:1]
    drafter.observe([Observation(0, tokens, 1, Draft(), (), 0, {})])
    while place < len(output) - 1:
        most = min(nodes, len(output) - place - 1)
        (draft,) = drafter.propose([Ask(0, tokens, most, params, text["seed"], 0, 0)], MAX_LEN)
        depths = [len(path) for path in draft.paths]
        chosen = [output[place], *(output[place + d] if place + d < len(output) else -1 for d in depths)]
        accepted = verify(draft, chosen).accepted
        new = min(len(accepted) + 1, len(output) - place)
        tokens += output[place : place + new]
        place += new
        count.steps += 1
        count.tokens += new
        count.first += bool(accepted)
        drafter.observe([Observation(0, tokens, new, draft, accepted, 0, {})])
    drafter.release(0)


def replay(args: argparse.Namespace) -> None:
    texts = json.loads(args.answers.read_text())
    make: Callable[[int, Count], Drafter]
    if args.draft == "suffix":

        def make(width: int, count: Count) -> Drafter:
            return SuffixDrafter(tree_width=width, least_chance=args.least_chance)

    else:
        model = LLM(args.draft, "none", threads=args.threads, max_model_len=MAX_LEN)._engine.model

        def make(width: int, count: Count) -> Drafter:
            cache = model.new_cache(1, MAX_LEN, MAX_LEN)  # type: ignore[attr-defined]
            return DraftModelDrafter(Counted(model, count), cache, max_model_len=MAX_LEN, tree_width=width)

    print(describe_machine())
    print("| temperature | nodes | width | tokens a step | first token kept | passes a step | rows a step |")
    print("|---|---|---|---|---|---|---|")
    for temperature in TEMPERATURES:
        for nodes in args.nodes:
            for width in args.widths:
                count = Count()
                for text in texts:
                    if text["temperature"] == temperature:
                        prompts = Count()
                        drafter = make(width, prompts)
                        replay_text(drafter, text, nodes, count)
                        # Rows of the prompt belong to no step.
                        count.passes += prompts.passes
                        count.rows += prompts.rows - min(prompts.rows, len(text["prompt"]))
                print(
                    "| " + " | ".join([f"{temperature:g}", str(nodes), str(width), *count.cells()]) + " |", flush=True
                )


def rows(args: argparse.Namespace) -> None:
    """Milliseconds of a pass of the target over a chain and over random trees of as many rows."""
    engine = LLM(args.model, "none", threads=args.threads, max_model_len=MAX_LEN)._engine
    model: Any = engine.model
    cache = model.new_cache(1, MAX_LEN, MAX_LEN)
    cache.allocate()
    cache.reserve(0, args.context + 64)
    source = random.Random(0)
    ids = torch.tensor([source.randrange(1000) for _ in range(args.context)])
    context = torch.arange(args.context)
    model.forward(Pack(ids, context, (Segment(0, 0, args.context, 0),), context[:1]), cache)
    print(describe_machine())
    print("| rows | chain ms | tree ms |")
    print("|---|---|---|")
    for count in args.rows:
        packs = [_pack(args.context, [node - 1 for node in range(count)])]
        packs.append(_pack(args.context, [max(-1, (node - 1) // 2) for node in range(count)]))
        times: list[list[float]] = [[], []]
        for _ in range(args.repeats):
            for pack, took in zip(packs, times, strict=True):
                began = time.perf_counter()
                model.forward(pack, cache)
                took.append(1e3 * (time.perf_counter() - began))
        print(f"| {count} | {median(times[0]):.2f} | {median(times[1]):.2f} |", flush=True)


def _pack(first: int, parents: Sequence[int]) -> Pack:
    draft = Draft(tuple(parents), tuple(parents), ("x",) * len(parents))
    paths = tuple(tuple(first + node for node in path) for path in draft.paths)
    straight = draft.is_chain
    segment = Segment(0, 0, len(parents), first, 0 if straight else first, () if straight else paths)
    positions = torch.tensor([first + len(path) - 1 for path in paths])
    wanted = torch.arange(len(parents))
    return Pack(wanted + 7, positions, (segment,), wanted)


class ChainsOnly:
    """A controller that is told that no drafter can branch."""

    def __init__(self) -> None:
        self._inner = AdaptiveController()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def ceilings(self, wishes: Sequence[Wish], *others: int) -> list[int]:
        return self._inner.ceilings([replace(wish, widths={}) for wish in wishes], *others)

    def width(self, wish: Wish, decoding: int) -> int:
        return 1

    def allot(self, wishes: Sequence[Wish], offers: Sequence[Offer | None], *others: int) -> list[Allotment]:
        return self._inner.allot([replace(wish, widths={}) for wish in wishes], offers, *others)


def speed(args: argparse.Namespace) -> None:
    """Decoding tokens a second of plain steps, of chains and of what may branch; the first round warms up."""
    config: dict[str, Any] = {"method": "suffix"} if args.draft == "suffix" else {"model": args.draft}
    llm = LLM(args.model, config, threads=args.threads, max_model_len=MAX_LEN)
    steering = llm._engine.steering
    # Plain steps teach neither of the two what their own steps have to be compared with.
    ways: dict[str, Any] = {"plain": FixedController(), "chains": ChainsOnly(), "trees": AdaptiveController()}
    prompts = [json.loads(line) for line in Path(__file__).with_name("prompts.jsonl").read_text().splitlines()]
    chosen = {prompt["task"]: prompt for prompt in reversed(prompts) if prompt["task"] in args.tasks}
    rates: dict[tuple[str, float, str], list[float]] = defaultdict(list)
    tokens: Counter[tuple[float, str]] = Counter()
    for number in range(1 + args.rounds):
        for task, prompt in chosen.items():
            for temperature in TEMPERATURES:
                for way, controller in ways.items():
                    steering.controller = controller
                    params = params_of(temperature, 0, args.tokens)
                    (output,) = llm.chat(prompt["messages"], params, SpeculationParams(enabled=way != "plain"))
                    rate = output.stats.decode_tokens_per_second
                    if number and rate is not None:
                        rates[task, temperature, way].append(rate)
                        tokens[temperature, way + " drafted"] += output.stats.draft_tokens
                        tokens[temperature, way + " kept"] += output.stats.accepted_tokens
    print(describe_machine())
    print("| task | temperature | plain tokens/s | chains | trees |")
    print("|---|---|---|---|---|")
    for task in chosen:
        for temperature in TEMPERATURES:
            found = [median(rates[task, temperature, way]) for way in ways]
            print(f"| {task} | {temperature:g} | " + " | ".join(f"{rate:.1f}" for rate in found) + " |")
    print(dict(tokens))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("answers", "replay", "rows", "speed"))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--draft", default="suffix", help="a draft model, or suffix")
    parser.add_argument("--least-chance", type=float, default=0.1, help="of suffix, as under adaptive control")
    parser.add_argument("--answers", type=Path, default=Path("answers.json"))
    parser.add_argument("--tokens", type=int, default=96, help="of an answer")
    parser.add_argument("--per-task", type=int, default=1, help="prompts of each task")
    parser.add_argument("--nodes", type=int, nargs="+", default=NODES)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--rows", type=int, nargs="+", default=(1, 2, 3, 5, 9, 17))
    parser.add_argument("--context", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tasks", nargs="+", default=("code_edit", "code_write", "chat", "json"))
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    {"answers": answer, "replay": replay, "rows": rows, "speed": speed}[args.what](args)


if __name__ == "__main__":
    main()
