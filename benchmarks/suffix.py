"""The suffix drafter: what it costs at a long context, and what it finds in answers of a model, beside prompt lookup.

    python benchmarks/suffix.py cost
    python benchmarks/suffix.py replay --model MODEL --answers FILE [--successors]

`cost` prints for every kind of text microseconds of processor time to index a token (the slowest token beside it),
microseconds to draft 16 tokens once the text is indexed and how many tokens such drafts have, bytes a token takes and
what `memory_bytes` says. Real texts come with Python: sources of its library and its manual, as words and marks.

`replay` answers the prompts of prompts.jsonl plainly, keeps the answers in FILE, and asks the drafters at every step
for what is known to follow: accepted of drafted tokens by task, and tokens a step. "suffix + pool" sees the answers
before. With `--successors` it prints instead what the suffix drafter would win by a table of successors, learnt from
all prompts and answers so far and asked only where it has no draft: how many more tokens are accepted and drafted, and
how many of the latter are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import time
import tracemalloc
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from pydoc_data import topics
from statistics import median
from typing import Any

from machine import describe_machine

from outpace import LLM, SamplingParams
from outpace.drafters.ngram import NgramDrafter
from outpace.drafters.suffix import SuffixDrafter
from outpace.drafters.suffix_automaton import SuffixAutomaton
from outpace.drafters.suffix_pool import OutputPool
from outpace.protocols import Drafter
from outpace.types import Ask, Draft, Observation

NUM_QUERIES = 200
NUM_DRAFT_TOKENS = 16
NUM_REPLAYED = (5, 10)
"""Draft tokens a step, at most, in replays."""
LEAST_CHANCES = (0.3, 0.6)
"""Of drafts of successors."""


def split(text: str) -> list[int]:
    """Words and marks, numbered in order of appearance."""
    numbers: dict[str, int] = {}
    return [numbers.setdefault(piece, len(numbers)) for piece in re.findall(r"\w+|\s+|[^\w\s]", text)]


def library_source(size: int) -> list[int]:
    folder = Path(os.__file__).parent
    files = sorted(folder.glob("*.py"), key=lambda file: file.name)
    return split("\n".join(file.read_text(errors="replace") for file in files)[: 8 * size])[:size]


def manual(size: int) -> list[int]:
    text = split("\n".join(topics.topics.values()))
    return (text * (1 + size // len(text)))[:size]


def fibonacci(size: int) -> list[int]:
    before, now = [1], [0]
    while len(now) < size:
        before, now = now, now + before
    return now[:size]


def runs(size: int) -> list[int]:
    """Ever longer runs of one token, each ended by another: every end of a run is followed by something new."""
    text: list[int] = []
    while len(text) < size:
        text += [0] * (len(text) // 2 + 1) + [len(text) + 1]
    return text[:size]


def random_text(num_ids: int) -> Callable[[int], list[int]]:
    return lambda size: random.Random(0).choices(range(num_ids), k=size)


TEXTS: dict[str, Callable[[int], list[int]]] = {
    "library source": library_source,
    "manual": manual,
    "random, 4 ids": random_text(4),
    "random, 1000 ids": random_text(1000),
    "random, 50000 ids": random_text(50_000),
    "one token": lambda size: [7] * size,
    "two in turn": lambda size: [7, 8] * (size // 2),
    "Fibonacci": fibonacci,
    "runs": runs,
}


def index_seconds(tokens: Sequence[int]) -> tuple[float, float]:
    """Processor time to index a text token by token: all of it, and the slowest token."""
    automaton, worst, began = SuffixAutomaton(), 0.0, time.process_time()
    for token in tokens:
        before = time.process_time()
        automaton.extend((token,))
        worst = max(worst, time.process_time() - before)
    timed = time.process_time() - began
    began = time.process_time()
    for _ in tokens:
        max(0.0, time.process_time() - time.process_time())
    return timed - (time.process_time() - began), worst


def query_seconds(tokens: list[int]) -> tuple[float, float]:
    """Median seconds of a draft, and its mean length, over the last tokens of a text that is indexed up to there."""
    drafter, params = SuffixDrafter(), SamplingParams()
    drafter.start(0, tokens, len(tokens))
    seconds: list[float] = []
    drafted = 0
    for end in range(len(tokens) - NUM_QUERIES, len(tokens)):
        ask = Ask(0, tokens[:end], NUM_DRAFT_TOKENS, params, 0, 0, 0)
        drafter.propose([ask], 0)  # indexes what is new; the second time there is nothing new
        began = time.process_time()
        (draft,) = drafter.propose([ask], 0)
        seconds.append(time.process_time() - began)
        drafted += len(draft)
    return median(seconds), drafted / NUM_QUERIES


def memory(tokens: Sequence[int]) -> tuple[int, int]:
    """Bytes that an index takes: measured, and as it says itself."""
    tracemalloc.start()
    automaton = SuffixAutomaton()
    automaton.extend(tokens)
    measured, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return measured, automaton.memory_bytes


def print_costs(num_tokens: int) -> None:
    print(f"{num_tokens} tokens")
    print("| text | us/token | slowest token, ms | us/draft | draft tokens | bytes/token | as reported |")
    print("|---|---|---|---|---|---|---|")
    for name, make in TEXTS.items():
        tokens = make(num_tokens)
        seconds, worst = index_seconds(tokens)
        query, drafted = query_seconds(tokens)
        measured, reported = memory(tokens)
        size = len(tokens)
        print(
            f"| {name} | {1e6 * seconds / size:.1f} | {1e3 * worst:.1f} | {1e6 * query:.1f} | {drafted:.1f} "
            f"| {measured / size:.0f} | {reported / size:.0f} |",
            flush=True,
        )


class SuffixThenSuccessors(SuffixDrafter):
    """Where the suffix drafter has no draft: the most frequent token after the last few in all text so far, repeatedly.

    Args:
        orders: numbers of last tokens looked up; the first that the text had before is taken.
        least_successor_chance: such a draft ends where its tokens are all kept with less than this chance. A token
            that followed `agreeing` of `total` times is kept with one of agreeing / (total + 1).
        settings: of the suffix drafter.
    """

    def __init__(self, orders: Sequence[int], least_successor_chance: float, **settings: Any) -> None:
        super().__init__(**settings)
        self._orders = orders
        self._least_successor_chance = least_successor_chance
        self._successors: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)

    def start(self, request_id: int, token_ids: Sequence[int], num_prompt_tokens: int, *, tenant: str = "") -> None:
        super().start(request_id, token_ids, num_prompt_tokens, tenant=tenant)
        self._learn(token_ids, 0)

    def observe(self, observations: Sequence[Observation]) -> None:
        super().observe(observations)
        for seen in observations:
            self._learn(seen.token_ids, len(seen.token_ids) - seen.num_new_tokens)

    def propose(self, asks: Sequence[Ask], row_budget: int) -> list[Draft]:
        drafts = super().propose(asks, row_budget)
        return [draft if len(draft) else self._guess(ask) for ask, draft in zip(asks, drafts, strict=True)]

    def _learn(self, tokens: Sequence[int], begin: int) -> None:
        for order in self._orders:
            for at in range(max(begin, order), len(tokens)):
                self._successors[tuple(tokens[at - order : at])][tokens[at]] += 1

    def _guess(self, ask: Ask) -> Draft:
        tokens, chance = list(ask.token_ids[-max(self._orders) :]), 1.0
        ids: list[int] = []
        while len(ids) < ask.num_draft_tokens:
            keys = [tuple(tokens[-order:]) for order in self._orders]
            found = next((self._successors[key] for key in keys if key in self._successors), None)
            if found is None:
                break
            ((token, agreeing),) = found.most_common(1)
            chance *= agreeing / (found.total() + 1)
            if chance < self._least_successor_chance:
                break
            ids.append(token)
            tokens.append(token)
        return Draft.chain(ids, "output") if ids else Draft()


@dataclass
class Score:
    """What drafts were worth."""

    steps: int = 0
    tokens: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0

    def add(self, other: Score) -> None:
        for name in ("steps", "tokens", "drafts", "drafted", "accepted"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def __str__(self) -> str:
        rate = self.accepted / self.drafted if self.drafted else 0.0
        length = 1 + self.accepted / self.drafts if self.drafts else 1.0
        return f"{self.accepted}/{self.drafted} | {rate:.2f} | {length:.2f} | {self.tokens / self.steps:.2f}"


def plain_answers(model: str, file: Path, max_tokens: int) -> list[dict[str, Any]]:
    """Task, prompt and output ids of every prompt, from the file if it is there."""
    if not file.exists():
        llm = LLM(model, "none", threads=1)
        answers = []
        for line in Path(__file__).with_name("prompts.jsonl").read_text().splitlines():
            prompt = json.loads(line)
            (output,) = llm.chat(prompt["messages"], SamplingParams(temperature=0, max_tokens=max_tokens))
            ids = list(output.outputs[0].token_ids)
            answers.append({"task": prompt["task"], "prompt": list(output.prompt_token_ids), "output": ids})
        file.write_text(json.dumps(answers))
    found: list[dict[str, Any]] = json.loads(file.read_text())
    return found


def replay(drafter: Drafter, request_id: int, prompt: list[int], output: list[int], k: int) -> Score:
    """One answer, as an engine with this drafter would go through it."""
    score, tokens = Score(tokens=len(output)), prompt + output
    drafter.start(request_id, prompt, len(prompt))
    end = len(prompt)
    while end < len(tokens):
        (draft,) = drafter.propose([Ask(request_id, tokens[:end], k, SamplingParams(), 0, 0, 0)], 0)
        ids = draft.ids[: len(tokens) - end - 1]
        accepted = next((at for at, token in enumerate(ids) if token != tokens[end + at]), len(ids))
        score.add(Score(1, 0, bool(ids), len(ids), accepted))
        end += accepted + 1
        drafter.observe([Observation(request_id, tokens[:end], accepted + 1, Draft(), accepted, 0, {})])
    drafter.release(request_id)
    return score


def replay_all(drafter: Drafter, answers: list[dict[str, Any]], k: int) -> dict[str, Score]:
    """Scores by task and of "all"."""
    scores: dict[str, Score] = defaultdict(Score)
    for number, answer in enumerate(answers):
        score = replay(drafter, number, answer["prompt"], answer["output"], k)
        scores[answer["task"]].add(score)
        scores["all"].add(score)
    return scores


def print_replay(answers: list[dict[str, Any]]) -> None:
    tasks = list(dict.fromkeys(answer["task"] for answer in answers))
    for k in NUM_REPLAYED:
        print(f"\nAt most {k} draft tokens.\n")
        print("| drafter | task | accepted/drafted | acceptance | mean acceptance length | tokens/step |")
        print("|---|---|---|---|---|---|")
        drafters: dict[str, Drafter] = {
            "ngram": NgramDrafter(),
            "suffix": SuffixDrafter(),
            "suffix, least_chance 0.1": SuffixDrafter(least_chance=0.1),
            "suffix + pool": SuffixDrafter(pool=OutputPool()),
        }
        for name, drafter in drafters.items():
            scores = replay_all(drafter, answers, k)
            for task in (*tasks, "all"):
                print(f"| {name} | {task} | {scores[task]} |")


def print_successors(answers: list[dict[str, Any]]) -> None:
    """What tables of successors add to the suffix drafter, to one that drafts more, and to one with a pool."""
    tables = {"bigram": (1,), "trigram": (2,), "trigram, then bigram": (2, 1)}
    drafters: dict[str, Callable[[], dict[str, Any]]] = {
        "suffix": dict,
        "suffix, least_chance 0.1": lambda: {"least_chance": 0.1},
        "suffix + pool": lambda: {"pool": OutputPool()},
    }
    for k in NUM_REPLAYED:
        print(f"\nAt most {k} draft tokens.\n")
        print("| drafter | table | least chance | accepted more | drafted more | share kept | tokens/step |")
        print("|---|---|---|---|---|---|---|")
        for name, settings in drafters.items():
            alone = replay_all(SuffixDrafter(**settings()), answers, k)["all"]
            print(f"| {name} | none | | | | | {alone.tokens / alone.steps:.2f} |")
            for (table, orders), least in product(tables.items(), LEAST_CHANCES):
                both = replay_all(SuffixThenSuccessors(orders, least, **settings()), answers, k)["all"]
                accepted, drafted = both.accepted - alone.accepted, both.drafted - alone.drafted
                share = f"{accepted / drafted:.2f}" if drafted else ""
                speed = both.tokens / both.steps
                print(f"| {name} | {table} | {least} | {accepted} | {drafted} | {share} | {speed:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    cost = commands.add_parser("cost")
    cost.add_argument("--tokens", type=int, default=100_000)
    again = commands.add_parser("replay")
    again.add_argument("--model", default="smollm2-135m")
    again.add_argument("--answers", type=Path, required=True)
    again.add_argument("--max-tokens", type=int, default=200)
    again.add_argument("--successors", action="store_true", help="what tables of successors would add, instead")
    args = parser.parse_args()
    print(describe_machine())
    if args.command == "cost":
        print_costs(args.tokens)
    else:
        show = print_successors if args.successors else print_replay
        show(plain_answers(args.model, args.answers, args.max_tokens))


if __name__ == "__main__":
    main()
