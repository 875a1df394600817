"""Any causal language model of transformers that attends fully or in a window, over outpace's cache.

The layers are the model's own modules, run as they are; attention and cache are outpace's, and so are the products with
weights, because those of torch give a row other bits beside other rows (`hf_rows`). The model stays its owner's: it is
changed during a pass only, and is given back as it was (`hf_session`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from outpace.errors import InvalidParameter, OutOfMemory, UnsupportedModel
from outpace.kv.cache import KvCache
from outpace.models.decoder import RowPath
from outpace.models.files import format_bytes
from outpace.models.hf_attention import RUN, PackAttention, listening
from outpace.models.hf_check import check_against_eager
from outpace.models.hf_probe import refuse_by_config, study
from outpace.models.hf_rows import RowProducts, can_pack, require_possible
from outpace.models.hf_session import BorrowedModel
from outpace.models.memory import RESERVE_BYTES, available_bytes
from outpace.models.native.library import why_unavailable
from outpace.models.precision import Precision
from outpace.types import ForwardResult, Pack

__all__ = ["TransformersModel"]

_LOG = logging.getLogger(__name__)

_UNSAID_POSITIONS = 2048
"""Context of a model whose config names none."""
_FAULTS = (RuntimeError, ValueError, TypeError, KeyError, AttributeError, IndexError, NotImplementedError)
_INT8_BYTES = 34 / 32  # of a weight, its share of a scale included


class TransformersModel:
    """A model of transformers that is already in memory (`protocols.TargetModel`).

    Its weights are not copied but for packed copies of the matrices, which make several rows cost little more than one;
    without memory or kernels for them, products go one row at a time. The copies follow changes of the weights in place
    that torch counts (an optimizer's step); `refresh` finds those behind its back (`weight.data`) too.

    Call `hf_bits.probe_rows` before promising anything about bits: it sets `row_path` and `takes_trees`.

    Args:
        model: the model, on the CPU; not for use by another thread during a pass.
        vocab_size: ids the tokenizer knows; logits are cut to them. None, or more than the model has, keeps its own.
        max_model_len: longest prompt plus output wanted; None is the model's own.
        precision: int8 or none, for the packed copies; None keeps the type of the weights.
        pack: make packed copies; None makes them where there are kernels and memory.

    Raises:
        UnsupportedModel: the model has something that outpace does not run; says what.
        InvalidParameter: max_model_len beyond the model's positions, or a precision there is no kernel for.
        OutOfMemory: no memory for copies that were asked for.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        vocab_size: int | None = None,
        max_model_len: int | None = None,
        precision: Precision | None = None,
        pack: bool | None = None,
    ) -> None:
        refuse_by_config(model)
        precision = precision or Precision(kernels="native" if why_unavailable() is None else "torch")
        self.row_path = RowPath.BLOCKS
        self.takes_trees = True
        self.precision = precision
        self.kind: str = model.config.model_type
        self.hidden_size: int = model.config.hidden_size
        limit = _position_limit(model.config)
        if limit is not None and max_model_len is not None and max_model_len > limit:
            raise InvalidParameter(f"max_model_len={max_model_len} is not possible: {self.kind} has {limit} positions")
        self.max_model_len = max_model_len or limit or _UNSAID_POSITIONS
        self._head_rows = _head_rows(model)
        self.vocab_size = min(vocab_size or self._head_rows, self._head_rows)
        self._borrowed = BorrowedModel(model)
        self._products = RowProducts(model, precision, pack=_may_pack(model, precision, pack))
        try:
            found = study(self._borrowed, self.vocab_size, self.max_model_len)
            self.rules = tuple(seen.rule for seen in found.seen)
            self._modules = tuple(seen.module for seen in found.seen)
            self.num_layers = len(self.rules)
            check_against_eager(self, self._borrowed, found, rounded=precision.quantization != "none")
        except _FAULTS as error:  # of somebody else's layers, which are run in a way their author did not foresee
            raise UnsupportedModel(f"{self.kind} is not possible: it fails when it is checked ({error})") from error

    def refresh(self) -> None:
        """Notices weights that were changed in any way since the last call; to be called between requests.

        Raises:
            UnsupportedModel: the output embeddings have another number of rows than when the model was checked.
        """
        size = _head_rows(self._borrowed.model)
        if size != self._head_rows:
            raise UnsupportedModel(
                f"the model's head had {self._head_rows} rows and has {size} now: outpace has to look at it again"
            )
        self._products.check_copies()

    @property
    def weight_bytes(self) -> int:
        """Memory held by the model's weights and their packed copies, in bytes."""
        own: int = sum(weight.nbytes for weight in self._borrowed.model.parameters())
        return own + self._products.weight_bytes

    @property
    def bytes_per_token(self) -> int:
        """Weights read to compute one row: all but the embedding and the experts that a row does not go to."""
        model, total = self._borrowed.model, 0.0
        head = model.get_output_embeddings().weight
        for weight in model.parameters():
            if weight is model.get_input_embeddings().weight and weight is not head:
                continue
            rounded = weight.dim() > 1 and self.precision.quantization == "int8"
            share = _experts_share(model.config) if weight.dim() == 3 else 1.0
            total += share * (weight.numel() * _INT8_BYTES if rounded else weight.nbytes)
        return int(total)

    @property
    def cache_bytes_per_row(self) -> int:
        """Bytes of one row of the cache, all layers."""
        return 2 * 4 * sum(rule.kv_heads * rule.cache_dim for rule in self.rules)

    def describe(self) -> str:
        """Whose layers these are, precision of their products, and which way rows go, for people."""
        return f"{self.kind} on transformers' layers; {self._products.describe()}; {self.row_path.value}"

    def new_cache(self, num_lanes: int, capacity: int, max_rows: int) -> KvCache:
        """An empty cache of this model's shape.

        Args:
            num_lanes: requests side by side.
            capacity: rows in a lane.
            max_rows: rows reserved at most over all lanes.
        """
        return KvCache(
            num_layers=self.num_layers,
            num_kv_heads=self.rules[0].kv_heads,
            head_dim=self.rules[0].cache_dim,
            num_lanes=num_lanes,
            capacity=capacity,
            max_rows=max_rows,
        )

    def forward(self, pack: Pack, cache: KvCache) -> ForwardResult:
        """Computes a pack once and writes its rows to the cache.

        Raises:
            UnsupportedModel: states inside of the model are asked for or given: these are somebody else's layers.
            RuntimeError: the model does not attend as it did when it was loaded.
        """
        if pack.aux_layers or pack.resume_rows is not None:
            raise UnsupportedModel(
                f"{self.kind} runs on transformers' layers, which cannot be left or entered in the middle: "
                "methods that use states inside of the target (early exit, EAGLE) are not possible with it; n-gram and "
                "draft models are"
            )
        if self.row_path is RowPath.SINGLE_ROWS and pack.num_rows > 1:
            return self._forward_singly(pack, cache)
        attention = PackAttention(
            self.rules,
            self._modules,
            pack.segments,
            cache,
            row_by_row=self.row_path is RowPath.ROW_ATTENTION,
            outside=self._products.outside,
        )
        with listening(attention), self._products.running():
            logits = self._borrowed.logits(pack.ids, pack.positions, pack.logits_rows, RUN)
        if attention.calls != self.num_layers:
            raise RuntimeError(
                f"{attention.calls} of {self.num_layers} layers attended: the model was changed meanwhile"
            )
        return ForwardResult(logits=logits[:, : self.vocab_size].float().contiguous())

    def _forward_singly(self, pack: Pack, cache: KvCache) -> ForwardResult:
        """Every row in a pack of its own, in order: slow, and independent of its neighbours by construction."""
        found: list[torch.Tensor] = []
        wanted = set(pack.logits_rows.tolist())
        for segment in pack.segments:
            for row in range(segment.begin, segment.end):
                alone = Pack(
                    ids=pack.ids[row : row + 1],
                    positions=pack.positions[row : row + 1],
                    segments=(segment.part(row - segment.begin, row - segment.begin + 1, 0),),
                    logits_rows=torch.arange(int(row in wanted), dtype=torch.int64, device="cpu"),
                )
                found.append(self.forward(alone, cache).logits)
        return ForwardResult(logits=torch.cat(found))


def _head_rows(model: PreTrainedModel) -> int:
    weight = getattr(model.get_output_embeddings(), "weight", None)
    if not isinstance(weight, torch.Tensor):
        raise UnsupportedModel(
            f"{model.config.model_type} is not possible: its output head has no plain weight (a quantised model?)"
        )
    return int(weight.shape[0])


def _may_pack(model: PreTrainedModel, precision: Precision, wanted: bool | None) -> bool:
    """Whether packed copies are made; refuses what cannot be."""
    require_possible(precision)
    if precision.dtype != "auto":
        raise InvalidParameter(
            f"dtype={precision.dtype!r} is not possible for a model in memory, whose weights have a type; use 'auto'"
        )
    dtypes = {weight.dtype for weight in model.parameters()}
    kernels = any(can_pack(precision, dtype) for dtype in dtypes)
    needed = precision.quantization == "int8"
    if needed and not (kernels and wanted is not False):
        raise InvalidParameter("quantization='int8' is not possible here: it needs packed copies and a kernel for them")
    if wanted is False or not kernels:
        return False
    sizes = [weight.numel() * (_INT8_BYTES if needed else weight.element_size()) for weight in model.parameters()]
    free = available_bytes()
    if free is None or sum(sizes) + RESERVE_BYTES <= free:
        return True
    missing = f"packed copies of the weights take {format_bytes(int(sum(sizes)))}, {format_bytes(free)} are free"
    if needed or wanted:
        raise OutOfMemory(f"{missing}: take a smaller model, or quantization='none' without copies")
    _LOG.warning("%s: products go one row at a time, and speculation may not pay", missing)
    return False


def _experts_share(config: Any) -> float:
    """Share of a model's experts that a row goes to."""
    count = next(
        (n for key in ("num_experts", "num_local_experts", "n_routed_experts") if (n := getattr(config, key, 0))), 0
    )
    used = getattr(config, "num_experts_per_tok", None)
    return min(1.0, used / count) if isinstance(used, int) and isinstance(count, int) and count else 1.0


def _position_limit(config: Any) -> int | None:
    """Positions up to which a position's rotation depends on nothing but itself; None if the config does not say."""
    limit: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    for given in (rope, *(value for value in rope.values() if isinstance(value, Mapping))):
        if given.get("rope_type") == "longrope":
            own: int | None = given.get("original_max_position_embeddings")
            limit = min(filter(None, (limit, own)), default=None)
    # Beyond its positions "dynamic" turns all rows by the longest sequence in a pass; up to there it turns none.
    return limit
