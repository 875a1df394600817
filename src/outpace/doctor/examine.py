"""The examination: looks, probes, measures. Under a minute on two cores that nobody else uses."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from outpace.config import EngineConfig
from outpace.doctor.machine import find_kernels, last_level_cache_bytes, look_at_machine
from outpace.doctor.report import DRAFT_TOKENS, BitCheck, Costs, Examination
from outpace.doctor.sample import CONTEXT, SampleLayers, SampleWeights, layer_bytes, sample_config, with_layers
from outpace.doctor.timing import median_seconds
from outpace.models.bandwidth import read_bytes_per_second
from outpace.models.config import DecoderConfig
from outpace.models.decoder import Decoder
from outpace.models.files import format_bytes
from outpace.models.linear import has_int8
from outpace.models.load import load_files
from outpace.models.memory import RESERVE_BYTES, available_bytes, estimate_bytes, require_fit
from outpace.models.precision import Precision
from outpace.models.probe import ProbeReport, probe_rows
from outpace.models.selection import select_precision
from outpace.models.threads import CpuUsage, usable_cores
from outpace.types import Pack, Segment

__all__ = ["Plan", "Progress", "examine"]

Progress = Callable[[str, int, int], None]
"""Takes (what, done, total)."""

_LEAST_BYTES = 280_000_000
_PROBED_LAYERS = 2


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured.

    Args:
        shape: of the sample; its number of layers does not count.
        weight_bytes: weights a sample has at least; None: well beyond the last-level cache.
        rows: numbers of rows of the steps; 1 and DRAFT_TOKENS + 1 among them.
        budget: seconds for the steps of one precision.
    """

    shape: DecoderConfig = field(default_factory=sample_config)
    weight_bytes: int | None = None
    rows: tuple[int, ...] = (1, 2, 3, 5, 8, 12, 16)
    budget: float = 4.0

    def num_layers(self, precision: Precision) -> int:
        """Layers of a sample in this precision."""
        least = self.weight_bytes or max(_LEAST_BYTES, 2 * (last_level_cache_bytes() or 0))
        return max(_PROBED_LAYERS, -(-least // layer_bytes(self.shape, precision)))


def examine(
    config: EngineConfig, *, with_model: bool = False, progress: Progress | None = None, plan: Plan | None = None
) -> Examination:
    """Examines this machine, and a model on it if asked to.

    Args:
        config: `threads` (None: all usable cores), and what names a model and its precision.
        with_model: also look at the model that the config names.
        progress: takes progress.
        plan: how much is measured.

    Raises:
        OutpaceError: the model cannot be found, read, run or held in memory.
    """
    assert DRAFT_TOKENS + 1 in (plan or Plan()).rows
    before = torch.get_num_threads()
    try:
        return _Examiner(config, progress or _no_progress, plan or Plan()).run(with_model)
    finally:
        torch.set_num_threads(before)


class _Examiner:
    """One examination; `bits` and `costs` grow as it goes."""

    def __init__(self, config: EngineConfig, progress: Progress, plan: Plan) -> None:
        self._config, self._progress, self._plan = config, progress, plan
        self._threads = config.threads or usable_cores()
        self._speeds: dict[int, float] = {}
        self._bits: list[BitCheck] = []
        self._costs: list[Costs] = []

    def run(self, with_model: bool) -> Examination:
        began = time.perf_counter()
        machine, kernels = look_at_machine(), find_kernels()
        usage = CpuUsage()  # from here on: compiling the kernels is a program of its own
        self._read_memory("measuring memory")
        if with_model:  # first: what is wrong with it should not come after half a minute
            self._examine_model()
        weights = SampleWeights(with_layers(self._plan.shape, 1000))
        for name, precision in _precisions(kernels.native):
            self._check_sample(name, precision, weights)
            self._measure_sample(name, precision, weights)
        self._read_memory("measuring memory again")
        speed = self._speeds[self._threads]
        return Examination(
            machine=machine,
            kernels=kernels,
            threads=self._threads,
            bits=tuple(self._bits),
            bytes_per_second=self._speeds,
            costs=tuple(replace(costs, bytes_per_second=speed) for costs in self._costs),
            others=usage.others(),
            seconds=time.perf_counter() - began,
        )

    def _read_memory(self, what: str) -> None:
        """Measures with one thread and with all of them, the latter last; the best of several moments counts."""
        counts = sorted({1, self._threads})
        self._progress(what, 0, len(counts))
        for number, count in enumerate(counts, 1):
            torch.set_num_threads(count)
            self._speeds[count] = max(read_bytes_per_second(), self._speeds.get(count, 0.0))
            self._progress(what, number, len(counts))

    def _check_sample(self, name: str, precision: Precision, weights: SampleWeights) -> None:
        shape = with_layers(self._plan.shape, _PROBED_LAYERS)
        self._check(name, Decoder(shape, weights, precision=precision))

    def _check(self, name: str, decoder: Decoder) -> None:
        """Probes with one thread and with all of them, the latter last."""
        counts = sorted({1, self._threads})
        reports = [self._probe(name, decoder, number, counts) for number in range(len(counts))]
        independent = all(report.passed and len(report.changed) == 1 for report in reports)
        same = len({report.digest for report in reports}) == 1
        self._bits.append(BitCheck(name, tuple(counts), independent, same, reports[-1].describe()))

    def _probe(self, name: str, decoder: Decoder, number: int, counts: list[int]) -> ProbeReport:
        def probed(done: int, total: int) -> None:
            self._progress(f"comparing bits, {name}", number * total + done, len(counts) * total)

        torch.set_num_threads(counts[number])
        return probe_rows(decoder, probed)

    def _measure_sample(self, name: str, precision: Precision, weights: SampleWeights) -> None:
        count = self._plan.num_layers(precision)
        needed, free = count * layer_bytes(self._plan.shape, precision) + RESERVE_BYTES, available_bytes()
        if free is not None and needed > free:
            reason = f"needs {format_bytes(needed)} of memory, {format_bytes(free)} are free"
            self._costs.append(Costs(name, precision.kernels, count, skipped=reason))
            return
        self._progress(f"measuring steps, {name}", 0, 1)
        layers = SampleLayers(weights, with_layers(self._plan.shape, count), precision, max(self._plan.rows))
        self._measure(name, precision.kernels, count, layers.weight_bytes, layers.step)

    def _measure(self, name: str, kernels: str, layers: int, bytes_read: int, step: Callable[[int], object]) -> None:
        seconds = median_seconds(
            step,
            self._plan.rows,
            budget=self._plan.budget,
            round_done=lambda done, total: self._progress(f"measuring steps, {name}", done, total),
        )
        self._costs.append(Costs(name, kernels, layers, bytes_read, seconds))

    def _examine_model(self) -> None:
        config = self._config
        files = load_files(config.model, allow_pickle=config.allow_pickle, trust_remote_code=config.trust_remote_code)
        shape = files.checked_shape()
        precision = select_precision(config, files.checkpoint)
        require_fit(files.label, estimate_bytes(files.decoder_weights(shape), precision))
        decoder = Decoder(
            shape,
            files.checkpoint,
            precision=precision,
            vocab_size=files.tokenizer.vocab_size,
            progress=lambda done, total: self._progress(f"loading {files.label}", done, total),
        )
        self._check(files.label, decoder)
        steps = _ModelSteps(decoder, max(self._plan.rows))
        self._measure(files.label, precision.kernels, decoder.num_layers, decoder.bytes_per_token, steps.run)


class _ModelSteps:
    """Steps of a model behind CONTEXT rows, or fewer where its context is short; logits of every row."""

    def __init__(self, decoder: Decoder, most_rows: int) -> None:
        self._decoder = decoder
        size = min(CONTEXT + most_rows, decoder.max_model_len)
        self._first = size - most_rows
        self._cache = decoder.new_cache(1, size, size)
        lane = self._cache.allocate()
        assert lane is not None and self._cache.reserve(lane, size)

    def run(self, rows: int) -> torch.Tensor:
        slots = torch.arange(self._first, self._first + rows, dtype=torch.int64, device="cpu")
        wanted = torch.arange(rows, dtype=torch.int64, device="cpu")
        pack = Pack(slots % self._decoder.vocab_size, slots, (Segment(0, 0, rows, self._first),), wanted)
        return self._decoder.forward(pack, self._cache).logits


def _precisions(native: bool) -> list[tuple[str, Precision]]:
    if native:
        return [
            ("int8", Precision("int8")),
            ("int4", Precision("int4")),
            ("fp32", Precision(dtype="float32")),
        ]
    plain = [("fp32 (torch)", Precision(kernels="torch"))]
    return [("int8 (torch)", Precision("int8", kernels="torch")), *plain] if has_int8() else plain


def _no_progress(what: str, done: int, total: int) -> None:
    """Takes progress nobody wants to see."""
