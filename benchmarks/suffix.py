"""What the suffix drafter costs at a long context: `python benchmarks/suffix.py`.

For every kind of text: microseconds of processor time to index a token (the slowest token beside it), microseconds to
draft 16 tokens once the text is indexed and how many tokens such drafts have, bytes a token takes and what
`memory_bytes` says. Real texts come with Python: the sources of its library and its manual, as words and marks.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from pydoc_data import topics

from machine import describe_machine

from outpace.drafters.suffix import SuffixDrafter
from outpace.drafters.suffix_automaton import SuffixAutomaton
from outpace.params import SamplingParams
from outpace.types import Ask

NUM_QUERIES = 200
NUM_DRAFT_TOKENS = 16


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
    """Seconds of a draft, and its mean length, over the last tokens of a text that is indexed up to there."""
    drafter, params = SuffixDrafter(), SamplingParams()
    drafter.start(0, tokens, len(tokens))
    seconds, drafted = 0.0, 0
    for end in range(len(tokens) - NUM_QUERIES, len(tokens)):
        ask = Ask(0, tokens[:end], NUM_DRAFT_TOKENS, params, 0, 0, 0)
        drafter.propose([ask], 0)  # indexes what is new; the second time there is nothing new
        began = time.process_time()
        (draft,) = drafter.propose([ask], 0)
        seconds += time.process_time() - began
        drafted += len(draft)
    return seconds / NUM_QUERIES, drafted / NUM_QUERIES


def memory(tokens: Sequence[int]) -> tuple[int, int]:
    """Bytes that an index takes: measured, and as it says itself."""
    tracemalloc.start()
    automaton = SuffixAutomaton()
    automaton.extend(tokens)
    measured, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return measured, automaton.memory_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000)
    args = parser.parse_args()
    print(describe_machine())
    print(f"{args.tokens} tokens")
    print("| text | us/token | slowest token, ms | us/draft | draft tokens | bytes/token | as reported |")
    print("|---|---|---|---|---|---|---|")
    for name, make in TEXTS.items():
        tokens = make(args.tokens)
        seconds, worst = index_seconds(tokens)
        query, drafted = query_seconds(tokens)
        measured, reported = memory(tokens)
        size = len(tokens)
        print(
            f"| {name} | {1e6 * seconds / size:.1f} | {1e3 * worst:.1f} | {1e6 * query:.1f} | {drafted:.1f} "
            f"| {measured / size:.0f} | {reported / size:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
