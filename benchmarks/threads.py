"""Threads on a quiet machine and beside one busy core: `python benchmarks/threads.py`.

Times single decoding steps with 1 thread, with all cores, and with the number that outpace picks by itself, first
quiet, then while another process computes without pause. Needs a machine that is otherwise quiet.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

from machine import describe_machine

from outpace import LLM, SamplingParams
from outpace.models.threads import usable_cores

_TOKENS = 96


def compute_for_ever() -> None:
    while True:
        sum(range(100_000))


@contextmanager
def busy_core(wanted: bool) -> Iterator[None]:
    """One core kept busy by another process, or nothing."""
    process = multiprocessing.get_context("spawn").Process(target=compute_for_ever, daemon=True)
    if wanted:
        process.start()
        time.sleep(2)
    try:
        yield
    finally:
        if wanted:
            process.kill()
            process.join()


def step_milliseconds(model: str, threads: int | None, rounds: int) -> tuple[float, float]:
    """Median and 90th percentile of the seconds between tokens, in ms."""
    llm = LLM(model, "none", threads=threads, max_model_len=1024)
    params = SamplingParams(temperature=0, max_tokens=_TOKENS, ignore_eos=True)
    gaps: list[float] = []
    for _ in range(rounds):
        last = None
        for _ in llm.stream([{"role": "user", "content": "Tell me a story."}], params):
            now = time.perf_counter()
            if last is not None:
                gaps.append(1e3 * (now - last))
            last = now
    return statistics.median(gaps), statistics.quantiles(gaps, n=10)[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print(describe_machine())
    print("| neighbour | threads | ms between tokens, median | 90th percentile |\n|---|---|---|---|")
    for busy in (False, True):
        for threads in (1, usable_cores(), None):
            with busy_core(busy):
                median, high = step_milliseconds(args.model, threads, args.rounds)
            words = ("one core busy" if busy else "quiet", "outpace's choice" if threads is None else threads)
            print(f"| {words[0]} | {words[1]} | {median:.1f} | {high:.1f} |", flush=True)


if __name__ == "__main__":
    main()
