"""Microseconds a row that `choose_rows` takes: `python benchmarks/choose_rows.py` (some ten seconds).

Two kinds of rows: peaked, like a language model's (a wide body and twenty tokens standing out of it), and flat (nearly
uniform, the worst case for top_p, whose nucleus is then most of the vocabulary). The median over repetitions with
fresh positions is printed, and the fastest, which tells more on a busy machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator

import numpy as np
import torch
from machine import describe_machine

from outpace.params import SamplingParams
from outpace.sampling.choose import choose_rows
from outpace.types import Choice

VOCABULARIES = (49_152, 152_064)
ROWS = (1, 6, 48)
SETTINGS = {
    "T=0": SamplingParams(temperature=0.0, top_p=1.0, top_k=0),
    "T=1": SamplingParams(temperature=1.0, top_p=1.0, top_k=0),
    "T=1 top_p=.95": SamplingParams(temperature=1.0, top_p=0.95, top_k=0),
    "T=.7 top_p=.9 top_k=50": SamplingParams(temperature=0.7, top_p=0.9, top_k=50),
}


def make_logits(kind: str, rows: int, vocabulary: int) -> torch.Tensor:
    """[rows, vocabulary] float32."""
    rng = np.random.default_rng(vocabulary)
    logits = rng.standard_normal((rows, vocabulary), dtype=np.float32) * np.float32(3 if kind == "peaked" else 0.1)
    if kind == "peaked":
        for row in logits:
            row[rng.integers(vocabulary, size=20)] += np.linspace(22, 8, 20, dtype=np.float32)
    return torch.from_numpy(logits)


def seconds_per_call(logits: torch.Tensor, params: SamplingParams, budget: float) -> Iterator[float]:
    """Times of single calls, each with positions not used before, until the budget of seconds is used up."""
    rows = logits.shape[0]
    end = time.perf_counter() + budget
    for call in range(1_000_000):
        choices = [Choice(params, seed=1, position=call * rows + row) for row in range(rows)]
        begin = time.perf_counter()
        choose_rows(logits, choices)
        now = time.perf_counter()
        if call:  # the first one touches memory and tables
            yield now - begin
        if now > end and call >= 3:
            return


def main() -> None:
    parser = argparse.ArgumentParser(description="Microseconds a row that choose_rows takes.")
    parser.add_argument("--seconds", type=float, default=0.15, help="time for each line (default: %(default)s)")
    budget = parser.parse_args().seconds
    print(f"{describe_machine()}, numpy {np.__version__}")
    print(f"{'vocabulary':>10}  {'logits':<7} {'setting':<23} {'rows':>4} {'median µs/row':>14} {'fastest':>8}")
    for vocabulary in VOCABULARIES:
        for kind in ("peaked", "flat"):
            logits = make_logits(kind, max(ROWS), vocabulary)
            for name, params in SETTINGS.items():
                for rows in ROWS:
                    times = [1e6 * t / rows for t in seconds_per_call(logits[:rows], params, budget)]
                    median, fastest = statistics.median(times), min(times)
                    print(f"{vocabulary:>10}  {kind:<7} {name:<23} {rows:>4} {median:>14.0f} {fastest:>8.0f}")


if __name__ == "__main__":
    main()
