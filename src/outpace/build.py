"""The only place that names concrete classes and puts an engine together.

A new drafter is one file in `outpace/drafters` and one entry in `planners.PLANNERS` (and its name in
`outpace.config.METHODS`); nothing else learns its name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from outpace.config import EngineConfig, SpeculativeConfig
from outpace.control.making import make_controller
from outpace.engine.engine import Engine
from outpace.errors import InvalidParameter, OutOfMemory
from outpace.heads import has_own_mtp
from outpace.models.bandwidth import read_bytes_per_second
from outpace.models.decoder import Decoder
from outpace.models.files import cache_folder, format_bytes
from outpace.models.load import LoadedFiles, available_bytes, require_fit
from outpace.models.machine import processor_name
from outpace.models.native.library import prepare
from outpace.models.probe import ProbeReport
from outpace.models.threads import ThreadGovernor, usable_cores
from outpace.models.tokenizer import Tokenizer
from outpace.models.vocabulary import ModelVocabulary
from outpace.params import SamplingDefaults
from outpace.planners import PLANNERS, Parts
from outpace.protocols import Drafter
from outpace.sampling.grammar import GrammarCompiler
from outpace.shipped import shipped_for
from outpace.source import Notify, Progress, Source, probe_target, same_target_bits

if TYPE_CHECKING:
    from outpace.models.hf import TransformersModel

__all__ = ["Built", "NewDrafter", "Notify", "Progress", "build"]

_MOST_POSITIONS = 32768
"""Context unless max_model_len asks for more."""
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
_CACHE_SHARE = 0.5
"""Share of the memory left after loading that the cache may grow into unless cache_tokens says."""

log = logging.getLogger(__name__)


class NewDrafter(NamedTuple):
    """A drafter that no engine uses yet.

    Args:
        drafter: the drafter.
        settings: its own, resolved.
        relative_cost: of its pass over the target's, a first guess; None if there is none.
    """

    drafter: Drafter
    settings: SpeculativeConfig
    relative_cost: float | None


@dataclass(frozen=True, slots=True)
class Built:
    """An engine, ready, and what it was made of.

    Args:
        engine: the engine.
        tokenizer: the target's.
        defaults: what sampling parameters left at None mean.
        config: the engine's settings with every automatic value resolved.
        speculative: the drafters' settings, resolved.
        label: the target's name.
        parameters: weights of the target, a count.
        bytes_per_token: weights read to decode one token.
        linear: precision of the linear layers, for people.
        probe: whether a row's bits depend on its neighbours here.
        at_end: what is written to disk when the engine is no longer used; see `close`.
        source: the target's files; None for stand-ins.
        make_drafter: loads a drafter for this engine beside those it has; None for stand-ins.
        in_use: the drafters' settings as they are now, under which what was learnt is kept.
    """

    engine: Engine
    tokenizer: Tokenizer
    defaults: SamplingDefaults
    config: EngineConfig
    speculative: tuple[SpeculativeConfig, ...]
    label: str
    parameters: int
    bytes_per_token: int
    linear: str
    probe: ProbeReport
    at_end: Sequence[Callable[[], None]] = ()
    source: Source | None = None
    make_drafter: Callable[[SpeculativeConfig], NewDrafter] | None = None
    in_use: list[SpeculativeConfig] = field(default_factory=list)

    def with_drafter(self, settings: SpeculativeConfig) -> Built:
        """The same with a drafter of these settings in the place of the one of the same method."""
        used = tuple(settings if item.method == settings.method else item for item in self.speculative)
        self.in_use[:] = used
        return replace(self, speculative=used)

    def close(self) -> None:
        """Keeps what was learnt for the next time. A file that cannot be written is a line in the log, no more."""
        for write in self.at_end:
            try:
                write()
            except OSError as error:
                log.warning("what was learnt cannot be kept: %s", error)

    def describe(self) -> dict[str, Any]:
        """Every setting in force, JSON-able."""
        return {
            "engine": asdict(self.config),
            "speculative": [asdict(config) for config in self.speculative],
            "sampling": asdict(self.defaults),
            "linear_layers": self.linear,
            "row_independence": self.probe.describe(),
            "threads_now": torch.get_num_threads(),
        }

    def floor_seconds(self) -> float:
        """Time in which this machine can read the weights of one plain token; measured now, in some tenths of a second.

        No engine decodes plainly faster at this precision.
        """
        return self.bytes_per_token / read_bytes_per_second()

    def banner(self) -> str:
        """One line for people."""
        drafters = ", ".join(_drafter_text(config) for config in self.speculative) or "none"
        most = self.config.threads or usable_cores()
        threads = f"{'up to ' * (self.config.threads is None and most > 1)}{most} thread{'s' * (most != 1)}"
        return f"{_model_text(self.label, self.parameters, self.linear)}; drafter {drafters}; {threads}"


def build(
    config: EngineConfig,
    speculative: Sequence[SpeculativeConfig],
    *,
    front: str = "api",
    notify: Notify | None = None,
    progress: Progress | None = None,
) -> Built:
    """Loads what the settings name and puts it together.

    Args:
        config: the engine's settings.
        speculative: drafters to load, the default first; those of method "none" are left out.
        front: "api" or "cli", see `LoadedFiles.sampling_defaults`.
        notify: takes notes.
        progress: takes progress of loading.

    Raises:
        OutpaceError: models cannot be found, read, run, or held in memory, or do not go together.
    """
    notify, progress = notify or log.info, progress or _no_progress
    wanted = _wanted(speculative, config, own=None)
    if config.max_num_batched_tokens <= config.max_num_seqs:
        raise InvalidParameter(
            f"max_num_batched_tokens={config.max_num_batched_tokens} is not possible: it must be more than "
            f"max_num_seqs={config.max_num_seqs}"
        )
    _note_verification(wanted, notify)
    governor = _set_threads(config)
    if config.kernels != "torch":
        prepare(notify)
    source = Source.open(config.model, config, notify)
    files = source.files
    wanted = _wanted(speculative, config, own=_own_drafter(source))
    defaults = files.sampling_defaults(front)
    require_fit(files.label, source.num_bytes, source.cache_bytes(config))
    makers = {item.method: PLANNERS[item.method](item, source, config, notify) for item in wanted}
    parameters = source.num_parameters
    linear = source.precision.describe()
    target = source.load(config, config.max_model_len, progress)
    max_rows = _cache_rows(config, target, source.cache_bytes_per_token)
    max_model_len = min(target.max_model_len, config.max_model_len or _MOST_POSITIONS, max_rows)
    cache = target.new_cache(config.max_num_seqs, max_model_len, max_rows)
    probe = probe_target(target, progress)
    if governor is not None:
        governor.trust(lambda threads: same_target_bits(target, probe))
    parts = Parts(target, cache, files.tokenizer, max_model_len, max_rows, notify, progress)
    drafters: dict[str, Drafter] = {}
    resolved: list[SpeculativeConfig] = []
    for method, make in makers.items():
        drafters[method], used = make(parts)
        resolved.append(used)
    controller, keep = make_controller(
        config.speculative_control,
        parts.relative_costs,
        cache_folder() / "control",
        lambda: _control_key(source, resolved),
        floor=config.speculative_floor,
    )
    parts.at_end.append(keep)
    engine = Engine(
        target,
        cache,
        drafters,
        vocabulary=_vocabulary(files, target.vocab_size),
        eos_ids=files.eos_ids,
        max_model_len=max_model_len,
        num_speculative_tokens={item.method: item.num_speculative_tokens or 0 for item in resolved},
        verification={item.method: item.rejection_sample_method for item in resolved},
        disable_by_batch_size={
            item.method: item.disable_by_batch_size for item in resolved if item.disable_by_batch_size is not None
        },
        controller=controller,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_logprobs=config.max_logprobs,
        enable_prefix_caching=config.enable_prefix_caching,
        weight_bytes=target.weight_bytes,
        before_step=_do_nothing if governor is None else governor.adjust,
    )
    return Built(
        engine=engine,
        tokenizer=files.tokenizer,
        defaults=defaults,
        config=replace(
            config,
            quantization=source.precision.quantization,
            kernels=source.precision.kernels,
            max_model_len=max_model_len,
            cache_tokens=max_rows,
        ),
        speculative=tuple(resolved),
        label=files.label,
        parameters=parameters,
        bytes_per_token=target.bytes_per_token,
        linear=linear,
        probe=probe,
        at_end=parts.at_end,
        source=source,
        make_drafter=partial(_another_drafter, source=source, config=config, parts=parts),
        in_use=resolved,
    )


def _another_drafter(item: SpeculativeConfig, *, source: Source, config: EngineConfig, parts: Parts) -> NewDrafter:
    """Loads a drafter beside a running engine, whose weights and cache are in memory already.

    Raises:
        OutpaceError: it cannot be found, read, or held in memory, or does not go with the target.
    """
    beside, costs = replace(source, num_bytes=0), dict[str, float]()
    make = PLANNERS[item.method](item, beside, replace(config, cache_tokens=None), log.info)
    drafter, settings = make(replace(parts, relative_costs=costs, notify=log.info, in_use=True))
    return NewDrafter(drafter, settings, costs.get(item.method))


def _wanted(
    speculative: Sequence[SpeculativeConfig], config: EngineConfig, *, own: str | None
) -> list[SpeculativeConfig]:
    """The drafters that the settings mean, one method each; for `own` see `SpeculativeConfig.parts`."""
    adaptive = config.speculative_control == "adaptive"
    wanted = [part for item in speculative for part in item.parts(adaptive=adaptive, own=own)]
    methods = [item.method for item in wanted]
    if len(set(methods)) < len(methods):
        raise InvalidParameter(f"speculative methods {methods} are not possible: each at most once")
    return wanted


def _own_drafter(source: Source) -> str | None:
    """The method of a drafter that is there for this model without being named."""
    if has_own_mtp(source.shape, source.files.checkpoint):
        return "mtp"
    return "eagle3" if shipped_for(source.files, source.shape).in_auto else None


# Settings that depend on the machine.


def _set_threads(config: EngineConfig) -> ThreadGovernor | None:
    """The number asked for; or a governor that has set it to the cores that are free and goes on doing so."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
        return None
    governor = ThreadGovernor(usable_cores())
    governor.start()
    return governor


def _do_nothing() -> None:
    """Stands where no governor is wanted."""


def _cache_rows(config: EngineConfig, target: Decoder | TransformersModel, per_row: int) -> int:
    """Rows the cache may hold: as asked, else full lanes or half of the free memory, whichever is less."""
    if config.cache_tokens is not None:
        return config.cache_tokens
    free = available_bytes()
    full = config.max_num_seqs * min(target.max_model_len, config.max_model_len or _MOST_POSITIONS)
    if free is None:
        return full
    rows = min(full, int(free * _CACHE_SHARE) // per_row)
    if rows < min(full, config.max_num_batched_tokens):
        raise OutOfMemory(
            f"{format_bytes(free)} of memory are free, too little for a cache of {config.max_num_batched_tokens} "
            f"tokens at {format_bytes(per_row)} each: take a smaller model, or say how few will do with cache_tokens"
        )
    return rows


def _control_key(source: Source, drafters: Sequence[SpeculativeConfig]) -> str:
    """All that times and acceptance depend on, but for the text."""
    settings = [
        (
            *(item.method, item.model, item.quantization, item.exit_layer, item.adapter, item.rejection_sample_method),
            *(_files_of(place) for place in (item.model, item.adapter) if place is not None),
        )
        for item in drafters
    ]
    folder = str(source.files.folder)
    return repr((folder, _files_of(folder), source.precision.describe(), settings, processor_name()))


def _files_of(place: str) -> list[tuple[str, int, int]]:
    """Name, bytes and time of the files of weights at a path: other ones may lie there later. None of a hub id."""
    path = Path(place).expanduser()
    try:
        files = [path] if path.is_file() else [file for file in path.iterdir() if file.suffix in _WEIGHT_SUFFIXES]
        found = [(file.name, file.stat()) for file in sorted(files)]
    except OSError:
        return []
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in found]


def _vocabulary(files: LoadedFiles, size: int) -> ModelVocabulary:
    compiler = GrammarCompiler(files.tokenizer.to_json(), size, files.eos_ids)
    return ModelVocabulary(files.tokenizer, size, compiler.compile)


def _note_verification(configs: Sequence[SpeculativeConfig], notify: Notify) -> None:
    for method in sorted({item.rejection_sample_method for item in configs} - {"coupled"}):
        notify(
            f"rejection_sample_method={method}: sampled text has the same distribution with and without speculation, "
            "but a seed no longer gives the same text"
        )


def _no_progress(what: str, done: int, total: int) -> None:
    """Takes progress nobody wants to see."""


def _model_text(label: str, parameters: int, linear: str) -> str:
    size = f"{parameters / 1e6:.0f}M" if parameters < 1e9 else f"{parameters / 1e9:.1f}B"
    return f"{label}, {size} parameters, {linear}"


def _drafter_text(config: SpeculativeConfig) -> str:
    named = "" if config.model is None else f" {config.model}"
    detail = {"draft_model": named, "eagle3": named, "mtp": named, "early_exit": f" after layer {config.exit_layer}"}
    tokens = f"{config.num_speculative_tokens} token{'s' * (config.num_speculative_tokens != 1)}"
    return f"{config.method}{detail.get(config.method, '')}, at most {tokens}"
