"""Whether a head that drafts a block in one pass beats one that drafts token after token, on this machine.

    python benchmarks/parallel.py --model TARGET --data DATA --steps 400 --out FOLDER

Both heads have the tensors of EAGLE-3 and begin alike. The serial one reads, at step j, the token drafted before and
what it put out itself. The parallel one cannot know either: it reads one learnt embedding and one learnt feature in
their place, and so drafts all tokens in a single pass. Both are trained on DATA (a folder of `outpace train data`) with
the same batches and as many steps, and measured on the same held-out answers. Then passes are timed, for every draft
length up to k: a pass of the target over length + 1 rows, so many passes of a head over one row, one pass of it over so
many. Tokens a second follow from both, for each head at its own best length. Heads that are in FOLDER already, after as
many steps, are not trained again.
"""

from __future__ import annotations

import argparse
import json
import operator
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from machine import describe_machine
from torch import nn

from outpace.config import EngineConfig
from outpace.heads import open_eagle3
from outpace.models.decoder import Decoder
from outpace.models.eagle3 import Eagle3Head as ServedHead
from outpace.models.native.library import prepare
from outpace.source import Source
from outpace.train.data.shards import read_data
from outpace.train.identity import Identity
from outpace.train.kinds.base import Material
from outpace.train.kinds.eagle3 import Eagle3, Eagle3Options
from outpace.train.memory import keep_freed_memory
from outpace.train.modules.eagle3 import Eagle3Head, Unrolling
from outpace.train.settings import TrainSettings
from outpace.train.states import StoredStates
from outpace.train.target import Target
from outpace.train.trainer import DRAFTER, Sources, Trainer
from outpace.train.vocabulary import draft_vocabulary
from outpace.types import Pack, Segment

CONTEXT = 300


class ParallelHead(Eagle3Head):
    """Reads the same for every token that is not there yet."""

    def __init__(self, like: Eagle3Head, hidden: int, layer: Any) -> None:
        super().__init__(layer, like.fc.in_features // 3)
        self.load_state_dict(like.state_dict())
        self.nothing = nn.Parameter(0.1 * torch.randn(2, hidden, dtype=torch.float32, device="cpu"))
        """[2, H] embedding and feature that stand for what is not known."""

    def begin(self, aux: torch.Tensor, embedded: torch.Tensor, positions: torch.Tensor, pieces: Any) -> Unrolling:
        return ParallelUnrolling(self, self.fc(aux), embedded, positions, pieces)


class ParallelUnrolling(Unrolling):
    """All later steps at once, as far as what they read is concerned."""

    def further(self, embedded: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        head = self._head
        assert isinstance(head, ParallelHead) and self._rows is not None
        feature = torch.zeros(len(self._rows), embedded.shape[1], dtype=torch.float32, device="cpu")
        self._feature = feature + head.nothing[1]
        return super().further(torch.zeros_like(embedded) + head.nothing[0], rows)


class Parallel(Eagle3):
    """`Kind` of the parallel head; it is measured, not served."""

    def __init__(self, material: Material, ids: torch.Tensor, options: Eagle3Options) -> None:
        super().__init__(material, ids, options)
        self._head = ParallelHead(self._head, material.shape.hidden_size, self._layer)

    def save(self, folder: Path, *how: object) -> dict[str, str]:
        return self.served(folder)


HEADS: dict[str, type[Eagle3]] = {"serial": Eagle3, "parallel": Parallel}


def trained(kind: Eagle3, sources: Sources, args: argparse.Namespace, name: str, identity: Identity) -> list[float]:
    """Chance that a token is kept if those before it are, by position, at the end of training."""
    settings = TrainSettings(
        steps=args.steps, batch_windows=2, lr=args.lr, warmup=min(60, args.steps // 5), chain=args.k,
        eval_every=max(1, args.steps // 4), eval_windows=args.eval_windows, seed=0,
    )  # fmt: skip
    folder = args.out / name
    folder.mkdir(parents=True, exist_ok=True)
    if kept_after(folder, args.steps) is None:
        Trainer(kind, sources, settings, folder, identity, lambda text: print(f"{name}: {text}", flush=True)).run()
    kept = kept_after(folder, args.steps)
    assert kept is not None
    return kept


def kept_after(folder: Path, steps: int) -> list[float] | None:
    """What a run measured in the end; None if it has not come so far, or never began."""
    log = folder / "log.jsonl"
    for line in map(json.loads, log.read_text().splitlines() if log.is_file() else ()):
        if "valid" in line and line["step"] == steps:
            (found,) = line["valid"].values()
            return [float(value) for value in found["greedy"]]
    return None


def timed(passes: dict[tuple[str, int], Callable[[], object]], repeats: int) -> dict[tuple[str, int], float]:
    """Milliseconds of each, in turns, medians."""
    times: dict[tuple[str, int], list[float]] = {name: [] for name in passes}
    for _ in range(repeats):
        for name, run in passes.items():
            begun = time.perf_counter()
            run()
            times[name].append(1e3 * (time.perf_counter() - begun))
    return {name: median(found) for name, found in times.items()}


def cost(model: Decoder, folder: Path, source: Source, k: int, repeats: int) -> dict[str, list[float]]:
    """Milliseconds of the passes that a step is made of, by draft length; of `target` from 0 on."""
    files = open_eagle3(folder, model.config)
    head = ServedHead(model, files.config, files.weights, token_ids=files.token_ids,
                      target_weights=source.files.checkpoint, precision=source.precision)  # fmt: skip
    caches = model.new_cache(1, 512, 512), head.new_cache(1, 512, 512)
    for each in caches:
        each.allocate()
        each.reserve(0, CONTEXT + 32)
    ids = torch.arange(CONTEXT) % 1000 + 7

    def target(first: int, rows: int) -> object:
        places = torch.arange(first, first + rows)
        return model.forward(Pack(places % 1000 + 7, places, (Segment(0, 0, rows, first),), places - first), caches[0])

    def draft(first: int, rows: int) -> object:
        places = torch.arange(first, first + rows)
        feature = torch.zeros(rows, model.hidden_size)
        return head.forward(ids[:rows], feature, places, [Segment(0, 0, rows, first)], places - first, caches[1])

    target(0, CONTEXT)
    draft(0, CONTEXT)
    passes: dict[tuple[str, int], Callable[[], object]] = {}
    for length in range(k + 1):
        passes["target", length] = partial(target, CONTEXT, length + 1)
        if length:
            passes["serial", length] = lambda most=length: [draft(CONTEXT + step, 1) for step in range(most)]
            passes["parallel", length] = partial(draft, CONTEXT, length)
    found = timed(passes, repeats)
    return {name: [value for key, value in found.items() if key[0] == name] for name in ("target", *HEADS)}


def gains(kept: Sequence[float], target: Sequence[float], drafting: Sequence[float]) -> list[tuple[float, float]]:
    """(tokens a step, speed over plain decoding) by draft length, from 1 on."""
    lengths = accumulate(accumulate(kept, operator.mul), initial=1.0)
    return [
        (tokens, tokens * target[0] / (verifying + seconds))
        for tokens, verifying, seconds in zip(islice(lengths, 1, None), target[1:], drafting, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--data", type=Path, required=True, help="folder of `outpace train data`")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--eval-windows", type=int, default=20)
    parser.add_argument("-k", type=int, default=4, help="draft tokens a step (default: 4)")
    parser.add_argument("--draft-vocab", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(args.threads)
    engine = EngineConfig(model=args.model, threads=args.threads, quantization=args.quantization)
    source = Source.open(args.model, engine, print)
    shape = source.shape
    assert shape is not None
    identity = Identity.of(source.files, shape)
    data = read_data(args.data, identity)
    vocab_size = min(shape.vocab_size, source.files.tokenizer.vocab_size)
    material = Material(source.files, shape, vocab_size, "lk", args.k, args.model)
    prepare(print)
    model = source.load(engine, None, lambda *_: None)
    assert isinstance(model, Decoder)
    ids = draft_vocabulary(data.train, args.draft_vocab, vocab_size, source.files.eos_ids)
    found = {}
    for name, make in HEADS.items():
        torch.manual_seed(0)
        kind = make(material, ids, Eagle3Options(unroll=args.k))
        target = Target(model, kind.aux_layers)
        states = [StoredStates(args.data / "states", split, "int8", target, identity) for split in ("train", "valid")]
        for store, windows in zip(states, (data.train, data.valid), strict=True):
            store.make(windows, lambda *_: None)
        found[name] = trained(kind, Sources(target, data, states[0], states[1]), args, name, identity)
    times = cost(model, args.out / "serial" / DRAFTER, source, args.k, args.repeats)
    print(f"\n{describe_machine()}; {args.steps} steps; a plain step takes {times['target'][0]:.2f} ms")
    print("\n| head | draft tokens | kept, the last one | tokens a step | drafting, ms | verifying, ms | over plain |")
    print("|---|---|---|---|---|---|---|")
    for name, kept in found.items():
        for length, (tokens, gain) in enumerate(gains(kept, times["target"], times[name]), 1):
            drafting, verifying = times[name][length - 1], times["target"][length]
            cells = f"{kept[length - 1]:.2f} | {tokens:.2f} | {drafting:.2f} | {verifying:.2f} | {gain:.2f}x"
            print(f"| {name} | {length} | {cells} |")
    said = {"machine": describe_machine(), "steps": args.steps, "kept": found, "ms": times}
    (args.out / "found.json").write_text(json.dumps(said) + "\n")


if __name__ == "__main__":
    main()
