"""What quantisation costs in quality: each precision against the same weights in fp32.

    python benchmarks/quality.py
    nice python benchmarks/quality.py a.gguf b.gguf --precisions int8 --json out.json

Every line of texts.jsonl beside this script (or of --texts) is {"id", "text"} or {"id", "messages"}; a conversation
goes through the model's chat template, and is left out for models without one. A text of n tokens (cut to the model's
context) has n - 1 positions, each with a token after it; all of them count, the first ones too. Per position: the KL
divergence of the next token's distribution, reference || precision, in nats (temperature 1, whole vocabulary); whether
both have the same most likely token; and how likely the text's own next token is, whose mean makes the perplexity.

The reference is outpace's decoder with linear layers in fp32, on weights as the checkpoint gives them (of a GGUF file:
its blocks dequantised), so what the *file's* quantisation cost is not in these numbers. Its logits wait in temporary
files, 4 bytes a number (1 GB at a vocabulary of 150,000; TMPDIR says where), so that one model is in memory at a time.
Everything runs on one thread; speed is not measured.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import torch.nn.functional as F
from machine import describe_machine
from precisions import engine_config

from outpace import __version__
from outpace.models.decoder import Decoder
from outpace.models.load import LoadedFiles, estimate_bytes, load_files, require_fit
from outpace.models.precision import Precision
from outpace.models.selection import select_precision
from outpace.models.tokenizer import Tokenizer
from outpace.types import Pack, Segment

REFERENCE = "float32"
"""The precision that the others are held against."""
PRECISIONS = ("file", "int8", "int4", "torch-int8")
ROWS_PER_PACK = 64
"""Positions computed and compared at a time; in float64 they take 78 MB at a vocabulary of 152,064."""

TABLE = {
    "precision": "{}",
    "kl_mean": "{:.5f}",
    "kl_p99": "{:.4f}",
    "greedy_agreement": "{:.2%}",
    "perplexity": "{:.4f}",
    "weight_bytes": "{:,}",
    "bytes_per_token": "{:,}",
}
"""Columns printed, and how."""


# The only functions that know how a precision becomes a decoder.


def resolve(files: LoadedFiles, precision: str) -> Precision:
    """A precision by its name in benchmarks, for these files.

    Raises:
        InvalidParameter: there is no such precision, or it does not run here.
    """
    return select_precision(engine_config(files.label, precision), files.checkpoint)


def check_precision(files: LoadedFiles, precision: str) -> None:
    """Raises an OutpaceError for a precision that does not exist, does not run here or does not fit in memory."""
    require_fit(f"{files.label} in {precision}", estimate_bytes(files.checkpoint, resolve(files, precision)))


def load_decoder(files: LoadedFiles, precision: str) -> Decoder:
    return Decoder(
        files.checked_shape(),
        files.checkpoint,
        precision=resolve(files, precision),
        vocab_size=files.tokenizer.vocab_size,
    )


# Logits of a text, in packs of [ROWS_PER_PACK or fewer, V].


def computed_logits(decoder: Decoder, ids: Sequence[int]) -> Iterator[torch.Tensor]:
    """Logits of every position but the last, after which no token of the text comes."""
    count = len(ids) - 1
    cache = decoder.new_cache(1, count, count)
    lane = cache.allocate()
    if lane is None or not cache.reserve(lane, count):
        raise AssertionError(f"a cache made for {count} rows does not take them")
    for first in range(0, count, ROWS_PER_PACK):
        end = min(first + ROWS_PER_PACK, count)
        pack = Pack(
            ids=torch.tensor(ids[first:end]),
            positions=torch.arange(first, end),
            segments=(Segment(lane, 0, end - first, first),),
            logits_rows=torch.arange(end - first),
        )
        yield decoder.forward(pack, cache).logits


def keep_logits(path: Path, packs: Iterable[torch.Tensor]) -> None:
    with path.open("wb") as stream:
        for logits in packs:
            np.save(stream, logits.numpy())


def kept_logits(path: Path) -> Iterator[torch.Tensor]:
    """The packs that `keep_logits` was given."""
    with path.open("rb") as stream:
        while stream.peek(1):
            yield torch.from_numpy(np.load(stream))


# Scores.


@dataclass(frozen=True)
class Scores:
    """What was found at N positions.

    Args:
        kl: [N] float64, KL divergence reference || other in nats.
        same: [N] bool, whether both have the same most likely token.
        loss: [N] float64, -log probability of the token that follows in the text, in nats.
    """

    kl: torch.Tensor
    same: torch.Tensor
    loss: torch.Tensor

    @classmethod
    def join(cls, parts: Sequence[Scores]) -> Scores:
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in ("kl", "same", "loss")))

    def summary(self) -> dict[str, float]:
        return {
            "positions": len(self.kl),
            "kl_mean": float(self.kl.mean()),
            "kl_p99": float(self.kl.quantile(0.99)),
            "greedy_agreement": float(self.same.double().mean()),
            "perplexity": float(self.loss.mean().exp()),
        }


@torch.inference_mode()
def score_rows(reference: torch.Tensor, logits: torch.Tensor, following: torch.Tensor) -> Scores:
    """Compares logits [N, V] with the reference's, for a text in which the tokens [N] `following` come next.

    Raises:
        ValueError: a logit is not finite, so nothing can be said.
    """
    if not (reference.isfinite().all() and logits.isfinite().all()):
        raise ValueError("logits are not finite (NaN or infinite): this precision does not run these weights")
    # In float64, because the sum over a large vocabulary cancels to a hundredth of its terms and less.
    log_p, log_q = reference.double().log_softmax(-1), logits.double().log_softmax(-1)
    return Scores(
        kl=F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1),
        same=reference.argmax(-1) == logits.argmax(-1),
        loss=-log_q.gather(-1, following[:, None])[:, 0],
    )


def score(reference: Iterable[torch.Tensor], packs: Iterable[torch.Tensor], ids: Sequence[int]) -> Scores:
    """`score_rows` over a whole text that comes in packs."""
    following = torch.split(torch.tensor(ids[1:]), ROWS_PER_PACK)
    return Scores.join([score_rows(*part) for part in zip(reference, packs, following, strict=True)])


# Texts, models, the table.


def encode_texts(path: Path, tokenizer: Tokenizer, most: int) -> dict[str, list[int]]:
    """At most so many token ids by the text's id; conversations only if the tokenizer has a chat template."""
    found: dict[str, list[int]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        item = json.loads(line)
        if "text" in item:
            found[item["id"]] = tokenizer.encode(item["text"])
        elif tokenizer.has_chat_template:
            found[item["id"]] = tokenizer.encode_chat(item["messages"], add_generation_prompt=False)
        else:
            print(f"{item['id']}: left out, {tokenizer.label} has no chat template")
    return {name: ids[:most] for name, ids in found.items()}


def row_of(decoder: Decoder, precision: str, scores: dict[str, Scores]) -> dict[str, object]:
    return {
        "precision": precision,
        **Scores.join(list(scores.values())).summary(),
        "weight_bytes": decoder.weight_bytes,
        "bytes_per_token": decoder.bytes_per_token,
        "linear_layers": decoder.describe(),
        "texts": {name: found.summary() for name, found in scores.items()},
    }


def measure_reference(files: LoadedFiles, texts: dict[str, list[int]], kept: dict[str, Path]) -> dict[str, object]:
    """Writes the reference's logits to the files `kept` and returns its row of the table."""
    decoder = load_decoder(files, REFERENCE)
    for name, ids in texts.items():
        keep_logits(kept[name], computed_logits(decoder, ids))
    own = {name: score(kept_logits(kept[name]), kept_logits(kept[name]), ids) for name, ids in texts.items()}
    return row_of(decoder, REFERENCE, own)


def measure_precision(
    files: LoadedFiles, precision: str, texts: dict[str, list[int]], kept: dict[str, Path]
) -> dict[str, object]:
    decoder = load_decoder(files, precision)
    scores = {name: score(kept_logits(kept[name]), computed_logits(decoder, ids), ids) for name, ids in texts.items()}
    return row_of(decoder, precision, scores)


def measure_model(name: str, precisions: Sequence[str], texts_path: Path) -> dict[str, object]:
    """The table of one model, printed as it grows: the reference's row, then one for every other precision."""
    files = load_files(name, notify=print)
    others = [precision for precision in dict.fromkeys(precisions) if precision != REFERENCE]
    for precision in (REFERENCE, *others):
        check_precision(files, precision)
    texts = encode_texts(texts_path, files.tokenizer, files.checked_shape().max_positions)
    print(f"\n{files.label}: " + ", ".join(f"{name} {len(ids)}" for name, ids in texts.items()) + " tokens\n")
    print("| " + " | ".join(TABLE) + " |\n|" + "---|" * len(TABLE))
    table = []
    with TemporaryDirectory(prefix="outpace-quality-") as folder:
        kept = {text: Path(folder) / f"{index}.npy" for index, text in enumerate(texts)}
        for precision in (REFERENCE, *others):
            if precision == REFERENCE:
                row = measure_reference(files, texts, kept)
            else:
                row = measure_precision(files, precision, texts, kept)
            table.append(row)
            print("| " + " | ".join(form.format(row[key]) for key, form in TABLE.items()) + " |", flush=True)
    return {"model": files.label, "table": table}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["smollm2-135m"], help="GGUF files, folders, aliases or hub ids")
    parser.add_argument("--precisions", nargs="+", default=PRECISIONS, help=f"default: {' '.join(PRECISIONS)}")
    parser.add_argument("--texts", type=Path, default=Path(__file__).parent / "texts.jsonl")
    parser.add_argument("--json", type=Path, help="write the tables here too")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    head = {
        "machine": describe_machine(),
        "outpace": __version__,
        "reference": REFERENCE,
        "texts_sha256": hashlib.sha256(args.texts.read_bytes()).hexdigest(),
    }
    print(f"{head['machine']}, outpace {__version__}; reference: {REFERENCE}")
    models: list[dict[str, object]] = []
    for name in args.models:
        models.append(measure_model(name, args.precisions, args.texts))
        if args.json:  # after each, for the next may take long
            args.json.write_text(json.dumps({**head, "models": models}, indent=2) + "\n")


if __name__ == "__main__":
    main()
