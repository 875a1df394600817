"""What a whole model costs in one precision: time of its steps, load time, memory. For kernels.py.

`measure_model` runs in a process of its own, so that memory is that of one model and nothing is warm from another.
"""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from typing import Any

import torch
from precisions import engine_config

from outpace.doctor.sample import CONTEXT
from outpace.doctor.timing import median_seconds
from outpace.models.bandwidth import read_bytes_per_second
from outpace.models.decoder import Decoder
from outpace.models.load import load_files
from outpace.models.native.layers import NativeHead, NativeLayers
from outpace.models.native.library import library
from outpace.models.native.structures import MatrixStruct
from outpace.models.selection import select_precision
from outpace.models.threads import CpuUsage
from outpace.types import Pack, Segment

PREFILL_ROWS = 512
_PREFILL_ROUNDS = 3
_PROJECTIONS = ("query", "key", "value", "out", "gate", "up", "down")


def measure_model(model: str, precision: str, threads: int, rows: tuple[int, ...], rounds: int) -> dict[str, Any]:
    """Loads a model and times it.

    Args:
        model: as for `--model`.
        precision: see precisions.py.
        threads: CPU threads.
        rows: numbers of rows of the steps; 1 among them.
        rounds: repetitions; the prefill gets fewer.

    Returns:
        JSON-able; seconds and bytes. "products_seconds" is the time of the bare matrix products of one token, None for
        kernels other than the native ones; "others" are cores that other programs kept busy.
    """
    config = engine_config(model, precision)
    torch.set_num_threads(threads)
    usage = CpuUsage()
    before = resident_bytes()
    began = time.perf_counter()
    files = load_files(config.model)
    decoder = Decoder(
        files.checked_shape(),
        files.checkpoint,
        precision=select_precision(config, files.checkpoint),
        vocab_size=files.tokenizer.vocab_size,
    )
    load_seconds = time.perf_counter() - began
    after = resident_bytes()
    timed = Timed(decoder, max(rows))
    keys: list[int | str] = [*rows, *(["products"] if timed.products else [])]
    seconds = median_seconds(timed.run, keys, budget=float("inf"), least=rounds, most=rounds)
    few = min(rounds, _PREFILL_ROUNDS)
    prefill = median_seconds(timed.prefill, [timed.prefill_rows], budget=0, least=few, most=few)[timed.prefill_rows]
    return {
        "precision": precision,
        "description": decoder.describe(),
        "load_seconds": load_seconds,
        "resident_bytes": after["VmRSS"],
        "anonymous_bytes": after["RssAnon"],
        "resident_bytes_before": before["VmRSS"],
        "anonymous_bytes_before": before["RssAnon"],
        "bytes_per_token": decoder.bytes_per_token,
        "bytes_per_second": read_bytes_per_second(),
        "others": usage.others(),
        "seconds": {str(count): seconds[count] for count in rows},
        "products_seconds": seconds.get("products"),
        "prefill_rows": timed.prefill_rows,
        "prefill_tokens_per_second": timed.prefill_rows / prefill,
    }


class Timed:
    """A model's steps behind CONTEXT rows, its prefill, and its bare products.

    Args:
        decoder: the model.
        most_rows: rows of the largest step.
    """

    def __init__(self, decoder: Decoder, most_rows: int) -> None:
        self._decoder = decoder
        size = min(max(PREFILL_ROWS, CONTEXT + most_rows), decoder.max_model_len)
        self.prefill_rows = min(PREFILL_ROWS, size)
        self._first = min(CONTEXT, size - most_rows)
        self._cache = decoder.new_cache(1, size, size)
        lane = self._cache.allocate()
        assert lane is not None and self._cache.reserve(lane, size)
        self.products = bare_products(decoder)

    def run(self, key: int | str) -> None:
        """A step of so many rows with their logits, or all bare products once."""
        if isinstance(key, int):
            self._forward(self._first, key, all_logits=True)
        else:
            for multiply in self.products:
                multiply()

    def prefill(self, rows: int) -> None:
        """Reads a prompt of so many rows; logits of the last."""
        self._forward(0, rows, all_logits=False)

    def _forward(self, first: int, rows: int, *, all_logits: bool) -> None:
        slots = torch.arange(first, first + rows)
        wanted = torch.arange(0 if all_logits else rows - 1, rows)
        ids = slots % self._decoder.vocab_size
        self._decoder.forward(Pack(ids, slots, (Segment(0, 0, rows, first),), wanted), self._cache)


def bare_products(decoder: Decoder) -> list[BareProduct]:
    """A product for each matrix that a token meets, in place; none for kernels other than the native ones."""
    layers, head = decoder.layers, decoder.head
    if not isinstance(layers, NativeLayers) or not isinstance(head, NativeHead):
        return []
    structs = [getattr(layer, name) for layer in layers._layers for name in _PROJECTIONS] + head._matrix.structs[:1]
    return [BareProduct(struct) for struct in structs]


class BareProduct:
    """One row times a packed matrix, by a call whose arguments are made beforehand.

    The kernel also normalises the row and wakes the threads, some microseconds in all.

    Args:
        matrix: the matrix; its owner must outlive this.
    """

    def __init__(self, matrix: MatrixStruct) -> None:
        self.row, self.result = torch.ones(1, matrix.inputs), torch.empty(1, matrix.outputs)
        self._norm = torch.ones(matrix.inputs)
        norm, row, result = (ctypes.c_void_p(t.data_ptr()) for t in (self._norm, self.row, self.result))
        threads = torch.get_num_threads()
        self._arguments = (norm, ctypes.c_float(1e-6), ctypes.byref(matrix), row, 1, result, threads)
        self._run = library().run_head

    def __call__(self) -> None:
        self._run(*self._arguments)


def resident_bytes(status: Path = Path("/proc/self/status")) -> dict[str, int]:
    """{"VmRSS": memory of this process in bytes, "RssAnon": the part that no file backs}."""
    found = {"VmRSS": 0, "RssAnon": 0}
    for line in status.read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in found:
            found[name] = 1024 * int(rest.split()[0])
    return found
