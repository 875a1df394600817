"""Python time of a step outside the model, at batch 1 and 8: `python benchmarks/step_overhead.py`.

Decodes with n-gram drafts and divides the time of every station but the model's forward pass by
the number of steps. Emitting is what is left of the step's whole time.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable

from machine import describe_machine

from outpace import LLM, SamplingParams

PROMPT = [{"role": "user", "content": "Write this list again: oak, elm, ash, yew, oak, elm, ash, yew, oak, elm, ash."}]


def timed(step: Callable[[], object], total: Counter[str]) -> Callable[[], object]:
    def run() -> object:
        began = time.perf_counter()
        result = step()
        total["all"] += time.perf_counter() - began
        total["steps"] += 1
        return result

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    llm = LLM(args.model, "ngram", threads=args.threads, max_model_len=2048)
    engine = llm._engine
    print(describe_machine())
    print("| batch | temperature | steps | whole step ms | model ms | outside ms | " + " | ".join(STATIONS) + " |")
    for batch in (1, 8):
        for temperature in (0.0, 1.0):
            params = [
                SamplingParams(temperature=temperature, top_p=0.95, seed=seed, max_tokens=96, ignore_eos=True)
                for seed in range(batch)
            ]
            total: Counter[str] = Counter()
            step = engine.step
            engine.step = timed(step, total)  # type: ignore[method-assign,assignment]
            outputs = llm.chat([PROMPT] * batch, params)
            engine.step = step  # type: ignore[method-assign]
            # All requests run from the first step; the longest saw every step.
            stations = max((o.stats for o in outputs), key=lambda s: s.steps).station_seconds
            per_step = {name: 1e3 * seconds / total["steps"] for name, seconds in stations.items()}
            whole = 1e3 * total["all"] / total["steps"]
            cells = [batch, temperature, int(total["steps"]), whole, per_step["forward"], whole - per_step["forward"]]
            cells += [per_step[name] for name in STATIONS]
            print("| " + " | ".join(f"{c:.2f}" if isinstance(c, float) else str(c) for c in cells) + " |")


STATIONS = ("schedule", "draft", "pack", "verify", "logprobs", "commit")

if __name__ == "__main__":
    main()
