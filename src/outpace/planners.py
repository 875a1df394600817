"""Drafters from their settings: what each needs is found and checked first, and made when the target is loaded.

A planner reads files and refuses what cannot be, so that a mistake costs seconds and no loading; what it returns makes
the drafter and says with which settings.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from outpace.config import EngineConfig, SpeculativeConfig
from outpace.drafters.draft_model import DraftModelDrafter
from outpace.drafters.early_exit import EarlyExitDrafter
from outpace.drafters.exit_probe import SAMPLE_TEXT, probe_exits
from outpace.drafters.feature_head import FeatureHeadDrafter
from outpace.drafters.ngram import NgramDrafter
from outpace.drafters.suffix import LEAST_CHANCE, SuffixDrafter
from outpace.drafters.suffix_pool import OutputPool
from outpace.errors import InvalidParameter, UnsupportedModel
from outpace.heads import open_eagle3, open_mtp, read_mtp
from outpace.kv.cache import KvCache
from outpace.models.adapter import BlockAdapter, open_adapter
from outpace.models.checkpoint import Checkpoint
from outpace.models.config import DecoderConfig
from outpace.models.decoder import Decoder
from outpace.models.eagle3 import Eagle3Head
from outpace.models.load import LoadedFiles, estimate_bytes, require_fit
from outpace.models.mtp import MtpHead
from outpace.models.precision import Precision
from outpace.models.resolve import resolve_model
from outpace.models.selection import select_precision
from outpace.models.tokenizer import Tokenizer, check_same_vocabulary
from outpace.protocols import Drafter
from outpace.shipped import shipped_for
from outpace.source import Notify, Progress, Source

if TYPE_CHECKING:
    from outpace.models.hf import TransformersModel

__all__ = ["PLANNERS", "Maker", "Parts"]


@dataclass(frozen=True, slots=True)
class Parts:
    """What a drafter may need to be made.

    Args:
        target: loaded.
        cache: the target's.
        tokenizer: the target's.
        max_model_len: most positions of a text.
        max_rows: of the cache.
        notify: takes notes.
        progress: takes progress of loading.
        relative_costs: of drafters' passes over the target's, by method; makers add theirs.
        at_end: what is written when the engine is no longer used; makers add theirs.
        in_use: an engine steps with target and cache meanwhile: nobody else computes with them.
    """

    target: Decoder | TransformersModel
    cache: KvCache
    tokenizer: Tokenizer
    max_model_len: int
    max_rows: int
    notify: Notify
    progress: Progress
    relative_costs: dict[str, float] = field(default_factory=dict)
    at_end: list[Callable[[], None]] = field(default_factory=list)
    in_use: bool = False


Maker = Callable[[Parts], tuple[Drafter, SpeculativeConfig]]
"""Makes a drafter; returns it with its settings, resolved."""


def _plan_suffix(item: SpeculativeConfig, target: Source, config: EngineConfig, notify: Notify) -> Maker:
    least = LEAST_CHANCE[config.speculative_control]
    most = item.suffix_decoding_max_cached_requests
    pool = OutputPool(max_outputs=most) if most else None
    if pool is not None and item.suffix_pool_file is not None:
        path, key = Path(item.suffix_pool_file), _vocabulary_key(target.files)
        if not path.parent.is_dir():
            raise InvalidParameter(f"suffix_pool_file={str(path)!r} is not possible: there is no folder {path.parent}")
        if path.exists():
            pool.load(path, key)

    def make(parts: Parts) -> tuple[Drafter, SpeculativeConfig]:
        if pool is not None and item.suffix_pool_file is not None:
            parts.at_end.append(lambda: pool.save(path, key))
        used = _with_possible_width(item, parts)
        return SuffixDrafter(least_chance=least, pool=pool, tree_width=used.tree_width or 1), used

    return make


def _with_possible_width(item: SpeculativeConfig, parts: Parts) -> SpeculativeConfig:
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


def _plan_ngram(item: SpeculativeConfig, target: Source, config: EngineConfig, notify: Notify) -> Maker:
    shortest = item.prompt_lookup_min
    assert shortest is not None
    return lambda parts: (NgramDrafter(shortest, item.prompt_lookup_max), item)


def _plan_draft_model(item: SpeculativeConfig, target: Source, config: EngineConfig, notify: Notify) -> Maker:
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

    def make(parts: Parts) -> tuple[Drafter, SpeculativeConfig]:
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


def _plan_early_exit(item: SpeculativeConfig, target: Source, config: EngineConfig, notify: Notify) -> Maker:
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
    if files is not None:
        require_fit(
            f"{target.files.label} with the adapter {item.adapter}",
            target.num_bytes + estimate_bytes(files.weights, target.precision),
            target.cache_bytes(config),
        )
    own = shipped_for(target.files, target.shape).early_exit if files is None and item.exit_layer is None else None
    if own is not None:
        files, item = open_adapter(str(own), target.shape, None), replace(item, adapter=str(own))

    def make(parts: Parts) -> tuple[Drafter, SpeculativeConfig]:
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
        used = replace(_with_possible_width(item, parts), exit_layer=exit_layer, num_speculative_tokens=num_tokens)
        width = used.tree_width or 1
        drafter = EarlyExitDrafter(parts.target, parts.cache, exit_layer=exit_layer, adapter=adapter, tree_width=width)
        return drafter, used

    return make


def _plan_eagle3(item: SpeculativeConfig, target: Source, config: EngineConfig, notify: Notify) -> Maker:
    shape = _shape_for_head(item, target)
    if item.model is None:
        item = replace(item, model=_shipped_head(target))
    assert item.model is not None
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


def _shipped_head(target: Source) -> str:
    folder = shipped_for(target.files, target.shape).eagle3
    if folder is None:
        raise InvalidParameter(
            f"method='eagle3' needs a model, the head's folder or hub id: none comes with outpace for "
            f"{target.files.label}"
        )
    return str(folder)


def _plan_mtp(item: SpeculativeConfig, target: Source, config: EngineConfig, notify: Notify) -> Maker:
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
) -> Maker:
    """What makes a drafter of a head with one layer of this shape."""
    if item.quantization is not None:
        config = replace(config, quantization=item.quantization, dtype="auto")
    precision = select_precision(config, weights)
    require_fit(
        f"{target.files.label} with {label}",
        target.num_bytes + estimate_bytes(weights, precision),
        target.cache_bytes(config) + (config.cache_tokens or 0) * layer.cache_bytes_per_token,
    )

    def make(parts: Parts) -> tuple[Drafter, SpeculativeConfig]:
        assert isinstance(parts.target, Decoder)
        head = load(parts.target, precision)
        cache = head.new_cache(config.max_num_seqs, parts.max_model_len, parts.max_rows)
        parts.relative_costs[item.method] = head.bytes_per_token / parts.target.bytes_per_token
        used = _with_possible_width(item, parts)
        return FeatureHeadDrafter(item.method, head, cache, tree_width=used.tree_width or 1), used

    return make


def _probed_exit(parts: Parts, num_tokens: int) -> tuple[int, int]:
    """Exit and draft length with the best prediction; says so, and says when none pays.

    Raises:
        InvalidParameter: an engine uses the cache, of whose lanes trying takes one.
    """
    assert isinstance(parts.target, Decoder)
    if parts.in_use:
        raise InvalidParameter(
            "method='early_exit' without exit_layer or adapter is not possible while the engine runs: which exit is "
            "best can be tried at start alone; name exit_layer or adapter"
        )
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


PLANNERS: Mapping[str, Callable[[SpeculativeConfig, Source, EngineConfig, Notify], Maker]] = {
    "suffix": _plan_suffix,
    "ngram": _plan_ngram,
    "draft_model": _plan_draft_model,
    "early_exit": _plan_early_exit,
    "eagle3": _plan_eagle3,
    "mtp": _plan_mtp,
}
