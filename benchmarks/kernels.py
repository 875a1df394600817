"""What products and whole steps cost by their number of rows, on outpace's kernels and on others.

    python benchmarks/kernels.py --threads 2 --save kernels
    python benchmarks/kernels.py --threads 2 --model FILE --precisions file,int8,int4,float16 --save model

Without --model: time of 100 M weights' products by rows, for the shapes of a 1.5B model with weights beyond the
last-level cache; GB/s is weights read over time at one row, beside what this machine can read. The native products
normalise and quantise their rows too, the others quantise theirs where they do. onnxruntime takes part if it is
installed together with onnx.

With --model: V(M), the time of a step of M rows in steps of one row; "/ floor", a plain step over the time to read its
weights once; "products", the bare matrix products of one token, what a small model has for a floor beside that;
prefill at 512 rows; load time and memory right after loading (in brackets: before). Every precision runs in a process
of its own, on a model already converted.

All timed things take turns in rounds, forwards and backwards; medians are printed. --save writes NAME.json and NAME.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from kernel_models import measure_model
from kernel_products import Product, all_products
from machine import describe_machine

from outpace.doctor.timing import median_seconds
from outpace.models.bandwidth import read_bytes_per_second
from outpace.models.load import load_files
from outpace.models.threads import CpuUsage, usable_cores

ROWS = (1, 2, 3, 5, 8, 12, 16)
PREFILL = (64, 256)
_PER = 100_000_000
_PREFILL_ROUNDS = 3


def measure_products(
    products: Sequence[Product], rounds: int, rows: Sequence[int], prefill: Sequence[int]
) -> list[dict[str, Any]]:
    """Times all kernels in turn.

    Args:
        products: the kernels.
        rounds: repetitions; long rows get fewer.
        rows: numbers of rows.
        prefill: large numbers of rows.

    Returns:
        for each kernel its name, bytes a weight, and {rows: seconds for 100 M weights}.
    """
    generator = torch.Generator().manual_seed(1)
    widths = {width for product in products for _, width in product.layers}
    inputs = {width: torch.randn(max(*rows, *prefill), width, generator=generator) for width in widths}

    def run(key: tuple[int, int]) -> None:
        products[key[0]].run(inputs, key[1])

    seconds: dict[tuple[int, int], float] = {}
    with torch.inference_mode():
        for counts, most in ((rows, rounds), (prefill, min(rounds, _PREFILL_ROUNDS))):
            keys = [(number, count) for count in counts for number in range(len(products))]
            seconds |= median_seconds(run, keys, budget=float("inf"), least=most, most=most, round_done=say_round)
    return [
        {
            "kernels": product.name,
            "bytes_per_weight": product.bytes_read / product.weights,
            "weights": product.weights,
            "seconds": {str(count): seconds[number, count] * _PER / product.weights for count in (*rows, *prefill)},
        }
        for number, product in enumerate(products)
    ]


def say_round(done: int, total: int) -> None:
    print(f"round {done} of {total}", flush=True)


def measure_models(model: str, precisions: Sequence[str], threads: int, rounds: int) -> list[dict[str, Any]]:
    """`measure_model` in each precision, one after the other, each in a fresh process."""
    load_files(model, notify=print)  # a GGUF file is converted now, not while loading is timed
    found = []
    for precision in precisions:
        print(f"measuring {precision} ...", flush=True)
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            found.append(pool.submit(measure_model, model, precision, threads, ROWS, rounds).result())
    return found


def products_table(records: Sequence[dict[str, Any]], bytes_per_second: float) -> list[list[str]]:
    """Cells of the linear table, headings first."""
    counts = list(records[0]["seconds"])
    table = [
        [
            "kernels",
            "bytes a weight",
            *(f"{count} row{'s' * (count != '1')}, ms" for count in counts),
            "GB/s, 1 row",
            "of memory's",
        ]
    ]
    for record in records:
        speed = record["bytes_per_weight"] * _PER / record["seconds"]["1"]
        times = [f"{1e3 * record['seconds'][count]:.2f}" for count in counts]
        share = f"{speed / bytes_per_second:.0%}"
        table.append([record["kernels"], f"{record['bytes_per_weight']:.3f}", *times, f"{speed / 1e9:.1f}", share])
    return table


def models_table(records: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Cells of the table of one model, headings first."""
    counts = [count for count in records[0]["seconds"] if count != "1"]
    table = [
        [
            "precision",
            "load s",
            "resident MB (before)",
            "anonymous MB (before)",
            "MB a token",
            "step ms",
            "/ floor",
            "products ms",
        ]
        + [f"V({count})" for count in counts]
        + ["prefill tokens/s"]
    ]
    for record in records:
        one, products = record["seconds"]["1"], record["products_seconds"]
        floor = record["bytes_per_token"] / record["bytes_per_second"]
        table.append(
            [
                record["precision"],
                f"{record['load_seconds']:.1f}",
                *(
                    f"{record[f'{kind}_bytes'] / 1e6:.0f} ({record[f'{kind}_bytes_before'] / 1e6:.0f})"
                    for kind in ("resident", "anonymous")
                ),
                f"{record['bytes_per_token'] / 1e6:.0f}",
                f"{1e3 * one:.2f}",
                f"{one / floor:.2f}",
                "-" if products is None else f"{1e3 * products:.2f}",
                *(f"{record['seconds'][count] / one:.2f}" for count in counts),
                f"{record['prefill_tokens_per_second']:.1f}",
            ]
        )
    return table


def markdown(table: Sequence[Sequence[str]]) -> str:
    """A table's cells, headings first, as Markdown."""
    head, *body = (f"| {' | '.join(cells)} |" for cells in table)
    return "\n".join([head, "|" + "---|" * len(table[0]), *body])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="time this model's steps instead of products")
    parser.add_argument(
        "--precisions",
        default="file,int8,int4,float16",
        help="of the model, with commas: file, int8, int4, float32, float16, bfloat16, torch-int8, torch-float32",
    )
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--save", type=Path, metavar="NAME", help="write NAME.json and NAME.md too")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    speeds = [read_bytes_per_second()]
    if args.model:
        records = measure_models(args.model, args.precisions.split(","), args.threads, args.rounds)
        busy = [record["others"] for record in records]
    else:
        usage = CpuUsage()
        records = measure_products(all_products(args.threads), args.rounds, ROWS, PREFILL)
        busy = [usage.others()]
    speeds.append(read_bytes_per_second())
    others = max((cores for cores in busy if cores is not None), default=None)
    lines = [describe_machine(), f"memory is read at {max(speeds) / 1e9:.1f} GB/s"]
    if args.model:
        lines[1] += f"; model {args.model}"
    if others is not None:
        lines[1] += f"; other programs used up to {others:.1f} cores meanwhile"
    table = models_table(records) if args.model else products_table(records, max(speeds))
    text = "\n".join([*lines, "", markdown(table)])
    print("\n" + text)
    if args.save:
        head = {"machine": lines[0], "threads": args.threads, "bytes_per_second": max(speeds), "others": others}
        name = args.save.with_suffix("") if args.save.suffix in (".json", ".md") else args.save
        name.with_name(name.name + ".json").write_text(
            json.dumps({**head, "model": args.model, "rows": records}, indent=2)
        )
        name.with_name(name.name + ".md").write_text(text + "\n")


if __name__ == "__main__":
    main()
