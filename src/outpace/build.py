"""The only place that names concrete classes and puts an engine together.

A new drafter is one file in `outpace/drafters` and one entry in `_PLANNERS` here (and its name in
`outpace.config.METHODS`); nothing else learns its name. A planner checks all that can be checked before weights are
loaded, which takes long, and returns what makes the drafter afterwards.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from outpace.config import EngineConfig, SpeculativeConfig
from outpace.control.making import make_controller
from outpace.drafters.draft_model import DraftModelDrafter
from outpace.drafters.early_exit import EarlyExitDrafter
from outpace.drafters.exit_probe import SAMPLE_TEXT, probe_exits
from outpace.drafters.feature_head import FeatureHeadDrafter
from outpace.drafters.ngram import NgramDrafter
from outpace.drafters.suffix import LEAST_CHANCE, SuffixDrafter
from outpace.drafters.suffix_pool import OutputPool
from outpace.engine.engine import Engine
from outpace.errors import InvalidParameter, OutOfMemory, UnsupportedModel
from outpace.heads import has_own_mtp, open_eagle3, open_mtp, read_mtp
from outpace.kv.cache import KvCache
from outpace.models.adapter import BlockAdapter, open_adapter
from outpace.models.bandwidth import read_bytes_per_second
from outpace.models.checkpoint import Checkpoint
from outpace.models.config import DecoderConfig
from outpace.models.decoder import Decoder
from outpace.models.eagle3 import Eagle3Head
from outpace.models.files import cache_folder, format_bytes
from outpace.models.load import LoadedFiles, available_bytes, estimate_bytes, require_fit
from outpace.models.machine import processor_name
from outpace.models.mtp import MtpHead
from outpace.models.native.library import prepare
from outpace.models.precision import Precision
from outpace.models.probe import ProbeReport
from outpace.models.resolve import resolve_model
from outpace.models.selection import select_precision
from outpace.models.threads import ThreadGovernor, usable_cores
from outpace.models.tokenizer import Tokenizer, check_same_vocabulary
from outpace.models.vocabulary import ModelVocabulary
from outpace.params import SamplingDefaults
from outpace.protocols import Drafter
from outpace.sampling.grammar import GrammarCompiler
from outpace.source import Notify, Progress, Source, probe_target, same_target_bits

if TYPE_CHECKING:
    from outpace.models.hf import TransformersModel

__all__ = ["Built", "Notify", "Progress", "build"]

_MOST_POSITIONS = 32768
"""Context unless max_model_len asks for more."""
_CACHE_SHARE = 0.5
"""Share of the memory left after loading that the cache may grow into unless cache_tokens says."""

log = logging.getLogger(__name__)


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


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a drafter may need to be made."""

    target: Decoder | TransformersModel
    cache: KvCache
    tokenizer: Tokenizer
    max_model_len: int
    max_rows: int
    notify: Notify
    progress: Progress
    relative_costs: dict[str, float] = field(default_factory=dict)
    at_end: list[Callable[[], None]] = field(default_factory=list)


_Maker = Callable[[_Parts], tuple[Drafter, SpeculativeConfig]]
"""Makes a drafter; returns it with its settings, resolved."""


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
    wanted = _wanted(speculative, config, own_head=False)
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
    if has_own_mtp(source.shape, files.checkpoint):
        wanted = _wanted(speculative, config, own_head=True)
    defaults = files.sampling_defaults(front)
    require_fit(files.label, source.num_bytes, source.cache_bytes(config))
    makers = {item.method: _PLANNERS[item.method](item, source, config, notify) for item in wanted}
    parameters = source.num_parameters
    linear = source.precision.describe()
    target = source.load(config, config.max_model_len, progress)
    max_rows = _cache_rows(config, target, source.cache_bytes_per_token)
    max_model_len = min(target.max_model_len, config.max_model_len or _MOST_POSITIONS, max_rows)
    cache = target.new_cache(config.max_num_seqs, max_model_len, max_rows)
    probe = probe_target(target, progress)
    if governor is not None:
        governor.trust(lambda threads: same_target_bits(target, probe))
    parts = _Parts(target, cache, files.tokenizer, max_model_len, max_rows, notify, progress)
    drafters: dict[str, Drafter] = {}
    resolved: list[SpeculativeConfig] = []
    for method, make in makers.items():
        drafters[method], used = make(parts)
        resolved.append(used)
    controller, keep = make_controller(
        config.speculative_control, parts.relative_costs, cache_folder() / "control", _control_key(source, resolved)
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
    )


def _wanted(
    speculative: Sequence[SpeculativeConfig], config: EngineConfig, *, own_head: bool
) -> list[SpeculativeConfig]:
    """The drafters that the settings mean, one method each; for `own_head` see `SpeculativeConfig.parts`."""
    adaptive = config.speculative_control == "adaptive"
    wanted = [part for item in speculative for part in item.parts(adaptive=adaptive, own_head=own_head)]
    methods = [item.method for item in wanted]
    if len(set(methods)) < len(methods):
        raise InvalidParameter(f"speculative methods {methods} are not possible: each at most once")
    return wanted


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
        (item.method, item.model, item.quantization, item.exit_layer, item.adapter, item.rejection_sample_method)
        for item in drafters
    ]
    return repr((str(source.files.folder), source.precision.describe(), settings, processor_name()))


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


# The drafters.


def _plan_suffix(item: SpeculativeConfig, target: Source, config: EngineConfig, notify: Notify) -> _Maker:
    least = LEAST_CHANCE[config.speculative_control]
    most = item.suffix_decoding_max_cached_requests
    pool = OutputPool(max_outputs=most) if most else None
    if pool is not None and item.suffix_pool_file is not None:
        path, key = Path(item.suffix_pool_file), _vocabulary_key(target.files)
        if not path.parent.is_dir():
            raise InvalidParameter(f"suffix_pool_file={str(path)!r} is not possible: there is no folder {path.parent}")
        if path.exists():
            pool.load(path, key)

    def make(parts: _Parts) -> tuple[Drafter, SpeculativeConfig]:
        if pool is not None and item.suffix_pool_file is not None:
            parts.at_end.append(lambda: pool.save(path, key))
        used = _with_possible_width(item, parts)
        return SuffixDrafter(least_chance=least, pool=pool, tree_width=used.tree_width or 1), used

    return make


def _with_possible_width(item: SpeculativeConfig, parts: _Parts) -> SpeculativeConfig:
    """The settings with a width, without branches where the target cannot verify them exactly; says so."""
    width = item.width_on(parts.target.takes_trees)
    if item.tree_width is not None and width < item.tree_width:
        parts.notify(
            f"tree_width={item.tree_width}: drafts are chains, for rows of a tree have other bits than those of chains "
            "here"
        )
    return replace(item, tree_width=width)


def _vocabulary_key(files: LoadedFiles) -> str:
    """What token ids mean, in short."""
    return hashlib.sha256(files.tokenizer.to_json().encode()).hexdigest()


def _plan_ngram(item: SpeculativeConfig, target: Source, config: EngineConfig, notify: Notify) -> _Maker:
    shortest = item.prompt_lookup_min
    assert shortest is not None
    return lambda parts: (NgramDrafter(shortest, item.prompt_lookup_max), item)


def _plan_draft_model(item: SpeculativeConfig, target: Source, config: EngineConfig, notify: Notify) -> _Maker:
    assert item.model is not None
    if item.quantization is not None:
        config = replace(config, quantization=item.quantization, dtype="auto")
    source = Source.open(item.model, config, notify)
    check_same_vocabulary(target.files.tokenizer, source.files.tokenizer)
    require_fit(
        f"{target.files.label} with {source.files.label}",
        target.num_bytes + source.num_bytes,
        target.cache_bytes(config) + source.cache_bytes(config),
    )

    def make(parts: _Parts) -> tuple[Drafter, SpeculativeConfig]:
        model = source.load(config, None, parts.progress)
        capacity = min(model.max_model_len, parts.max_model_len)
        cache = model.new_cache(config.max_num_seqs, capacity, parts.max_rows)
        parts.relative_costs["draft_model"] = model.bytes_per_token / parts.target.bytes_per_token
        used = _with_possible_width(item, parts)
        drafter = DraftModelDrafter(
            model, cache, max_model_len=capacity, weight_bytes=model.weight_bytes, tree_width=used.tree_width or 1
        )
        return drafter, used

    return make


def _plan_early_exit(item: SpeculativeConfig, target: Source, config: EngineConfig, notify: Notify) -> _Maker:
    if target.shape is None:
        raise UnsupportedModel(
            f"method='early_exit' is not possible with {target.files.label}: it runs on transformers' layers, which "
            "cannot be left in the middle; possible: ngram or draft_model"
        )
    most = target.shape.num_layers - 1
    if most < 1:
        raise InvalidParameter("method='early_exit' is not possible: the model has only one layer")
    if item.exit_layer is not None and item.exit_layer > most:
        raise InvalidParameter(f"exit_layer={item.exit_layer} is not possible: it must be in 1 to {most}")
    files = None if item.adapter is None else open_adapter(item.adapter, target.shape, item.exit_layer)

    def make(parts: _Parts) -> tuple[Drafter, SpeculativeConfig]:
        assert isinstance(parts.target, Decoder)
        adapter, exit_layer, num_tokens = None, item.exit_layer, item.num_speculative_tokens or 0
        if files is not None:
            exit_layer = files.exit_layer
            adapter = BlockAdapter(
                parts.target,
                files.weights,
                exit_layer=exit_layer,
                num_lanes=config.max_num_seqs,
                capacity=parts.max_model_len,
                max_rows=parts.max_rows,
            )
        elif exit_layer is None:
            exit_layer, num_tokens = _probed_exit(parts, num_tokens)
        parts.relative_costs["early_exit"] = exit_layer / parts.target.num_layers
        drafter = EarlyExitDrafter(parts.target, parts.cache, exit_layer=exit_layer, adapter=adapter)
        return drafter, replace(item, exit_layer=exit_layer, num_speculative_tokens=num_tokens)

    return make


def _plan_eagle3(item: SpeculativeConfig, target: Source, config: EngineConfig, notify: Notify) -> _Maker:
    assert item.model is not None
    shape = _shape_for_head(item, target)
    found = resolve_model(item.model, allow_pickle=config.allow_pickle)
    files = open_eagle3(found.path, shape, allow_pickle=config.allow_pickle)

    def load(model: Decoder, precision: Precision) -> Eagle3Head:
        return Eagle3Head(
            model,
            files.config,
            files.weights,
            token_ids=files.token_ids,
            target_weights=target.files.checkpoint,
            precision=precision,
        )

    return _head_maker(item, target, config, found.label, files.config.layer, files.weights, load)


def _plan_mtp(item: SpeculativeConfig, target: Source, config: EngineConfig, notify: Notify) -> _Maker:
    shape = _shape_for_head(item, target)
    if item.model is None:
        files, label = read_mtp(target.files.config, target.files.checkpoint, target.files.folder), "its MTP layer"
    else:
        found = resolve_model(item.model, allow_pickle=config.allow_pickle)
        files, label = open_mtp(found.path, allow_pickle=config.allow_pickle), found.label
    files.check_target(shape)

    def load(model: Decoder, precision: Precision) -> MtpHead:
        return MtpHead(model, files.layer, files.weights, precision=precision)

    return _head_maker(item, target, config, label, files.layer, files.weights, load)


def _shape_for_head(item: SpeculativeConfig, target: Source) -> DecoderConfig:
    """The target's shape, whose states a head reads."""
    if target.shape is None:
        raise UnsupportedModel(
            f"method={item.method!r} is not possible with {target.files.label}: it runs on transformers' layers, whose "
            "states cannot be had; possible: suffix, ngram or draft_model"
        )
    return target.shape


def _head_maker(
    item: SpeculativeConfig,
    target: Source,
    config: EngineConfig,
    label: str,
    layer: DecoderConfig,
    weights: Checkpoint,
    load: Callable[[Decoder, Precision], Eagle3Head | MtpHead],
) -> _Maker:
    """What makes a drafter of a head with one layer of this shape."""
    if item.quantization is not None:
        config = replace(config, quantization=item.quantization, dtype="auto")
    precision = select_precision(config, weights)
    require_fit(
        f"{target.files.label} with {label}",
        target.num_bytes + estimate_bytes(weights, precision),
        target.cache_bytes(config) + (config.cache_tokens or 0) * layer.cache_bytes_per_token,
    )

    def make(parts: _Parts) -> tuple[Drafter, SpeculativeConfig]:
        assert isinstance(parts.target, Decoder)
        head = load(parts.target, precision)
        cache = head.new_cache(config.max_num_seqs, parts.max_model_len, parts.max_rows)
        parts.relative_costs[item.method] = head.bytes_per_token / parts.target.bytes_per_token
        used = _with_possible_width(item, parts)
        return FeatureHeadDrafter(item.method, head, cache, tree_width=used.tree_width or 1), used

    return make


def _probed_exit(parts: _Parts, num_tokens: int) -> tuple[int, int]:
    """Exit and draft length with the best prediction; says so, and says when none pays."""
    assert isinstance(parts.target, Decoder)
    ids = parts.tokenizer.encode(SAMPLE_TEXT)[: parts.max_model_len - 1]
    best = probe_exits(parts.target, parts.cache, ids, most_tokens=max(1, num_tokens))
    found = (
        f"early exit: layer {best.exit_layer} of {parts.target.num_layers} agrees with the model on "
        f"{best.agreement:.0%} of a sample text; predicted speed {best.speedup:.2f}x of plain decoding"
    )
    if best.speedup <= 1.0:
        found += ". It does not pay on this checkpoint: train an adapter for it, or use ngram or a draft model"
    parts.notify(found)
    return best.exit_layer, min(num_tokens, best.num_speculative_tokens)


_PLANNERS: Mapping[str, Callable[[SpeculativeConfig, Source, EngineConfig, Notify], _Maker]] = {
    "suffix": _plan_suffix,
    "ngram": _plan_ngram,
    "draft_model": _plan_draft_model,
    "early_exit": _plan_early_exit,
    "eagle3": _plan_eagle3,
    "mtp": _plan_mtp,
}


def _model_text(label: str, parameters: int, linear: str) -> str:
    size = f"{parameters / 1e6:.0f}M" if parameters < 1e9 else f"{parameters / 1e9:.1f}B"
    return f"{label}, {size} parameters, {linear}"


def _drafter_text(config: SpeculativeConfig) -> str:
    named = "" if config.model is None else f" {config.model}"
    detail = {"draft_model": named, "eagle3": named, "mtp": named, "early_exit": f" after layer {config.exit_layer}"}
    tokens = f"{config.num_speculative_tokens} token{'s' * (config.num_speculative_tokens != 1)}"
    return f"{config.method}{detail.get(config.method, '')}, at most {tokens}"
