"""Attention of transformers' models over outpace's cache, through the functions that transformers lets one register.

Two names are registered. "outpace" is what a forward pass of outpace runs with: each call is the next layer of the
pack. "outpace-study" is the model's own eager attention with a listener beside it, which finds out what each layer's
attention is: its heads, its scale, and from the mask itself which slots a row sees. Outside of such a pass both refuse.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from outpace.kv.attention import AttentionPlan, attend
from outpace.kv.cache import KvCache
from outpace.types import Segment

__all__ = ["RUN", "STUDY", "LayerRule", "Listener", "PackAttention", "dense_attention", "listening"]

RUN, STUDY = "outpace", "outpace-study"


@dataclass(frozen=True, slots=True)
class LayerRule:
    """What one layer's attention is.

    Args:
        heads: query heads.
        kv_heads: key heads.
        key_dim: numbers in a key.
        value_dim: numbers in a value.
        scale: of scores.
        window: slots a row sees at most, itself included; None for all.
        softcap: scores become softcap * tanh(score / softcap); None for no cap.
        sinks: each head has a logit of nothing beside its scores.
    """

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: bool

    @property
    def cache_dim(self) -> int:
        """Numbers in a head of the cache, which has one size for keys and values."""
        return max(self.key_dim, self.value_dim)

    @property
    def is_plain(self) -> bool:
        """Scores go to the softmax as they are."""
        return self.softcap is None and not self.sinks


class Listener(Protocol):
    """Takes the attention calls of one forward pass."""

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Query, key and value [1, heads, R, dim] -> [1, R, heads, dim]."""
        ...

    def mask(self, options: dict[str, Any]) -> torch.Tensor | None:
        """The mask for what transformers asks with these arguments."""
        ...


_LISTENER: ContextVar[Listener | None] = ContextVar("outpace attention", default=None)


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Makes this the one that takes the calls of models run in this context."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def _listener() -> Listener:
    found = _LISTENER.get()
    if found is None:
        raise RuntimeError(
            "this model is set to outpace's attention outside of a pass of outpace: is it used from two threads?"
        )
    return found


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    return _listener().attend(module, query, key, value, attention_mask, options), None


def _mask(**options: Any) -> torch.Tensor | None:
    return _listener().mask(options)


for _name in (RUN, STUDY):
    AttentionInterface.register(_name, _attention)
    AttentionMaskInterface.register(_name, _mask)


class PackAttention:
    """The attention calls of one pack: the n-th call is layer n.

    Args:
        rules: of the layers, in the order in which they call.
        modules: that call.
        segments: of the pack.
        cache: where its rows go.
        row_by_row: attention of every row on its own.
        outside: entered around what is computed here.
    """

    def __init__(
        self,
        rules: Sequence[LayerRule],
        modules: Sequence[torch.nn.Module],
        segments: Sequence[Segment],
        cache: KvCache,
        *,
        row_by_row: bool,
        outside: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        self.calls = 0
        self._rules, self._modules = rules, modules
        self._segments, self._cache = segments, cache
        self._row_by_row, self._outside = row_by_row, outside
        self._plans: dict[tuple[int, int | None], AttentionPlan] = {}

    def mask(self, options: dict[str, Any]) -> torch.Tensor:
        """A mask of the shape asked for; what it says does not matter."""
        shape = (options["batch_size"], 1, options["q_length"], options["kv_length"])
        return torch.zeros((), dtype=options.get("dtype", torch.float32), device="cpu").expand(shape)

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """See `Listener.attend`."""
        layer = self.calls
        self.calls += 1
        if layer >= len(self._rules) or self._modules[layer] is not module:
            raise RuntimeError(f"attention call {layer} comes from another module than when the model was loaded")
        rule = self._rules[layer]
        with self._outside():
            rows = [_cache_rows(part, rule) for part in (query, key, value)]
            rows[0] = rows[0] * rule.scale
            found = self._compute(layer, rule, rows, options.get("s_aux"))
            found = found.view(1, len(found), rule.heads, rule.cache_dim)[..., : rule.value_dim]
            return found.to(query.dtype).contiguous()

    def _compute(
        self, layer: int, rule: LayerRule, rows: Sequence[torch.Tensor], sinks: torch.Tensor | None
    ) -> torch.Tensor:
        query, key, value = rows
        if not rule.is_plain:
            return _attend_rows(self._segments, self._cache, layer, query, key, value, rule, sinks)
        plan = self._plans.get((rule.heads, rule.window))
        if plan is None:
            plan = AttentionPlan(
                self._segments,
                num_heads=rule.heads,
                num_kv_heads=rule.kv_heads,
                head_dim=rule.cache_dim,
                sliding_window=rule.window,
                row_by_row=self._row_by_row,
            )
            self._plans[rule.heads, rule.window] = plan
        return attend(plan, self._cache, layer, query, key, value)


def _cache_rows(part: torch.Tensor, rule: LayerRule) -> torch.Tensor:
    """[1, heads, R, dim] -> [R, heads, cache_dim] float32, zeros behind what there is."""
    rows = part[0].transpose(0, 1).float()
    missing = rule.cache_dim - rows.shape[-1]
    return F.pad(rows, (0, missing)) if missing else rows


def _attend_rows(
    segments: Sequence[Segment],
    cache: KvCache,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rule: LayerRule,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """`kv.attention.attend` for scores that are capped or have sinks: [R, heads * dim].

    Every row is a product of its own, whose shape depends on its position alone.
    """
    keys, values = (
        pool.view(cache.num_lanes, rule.kv_heads, cache.padded_capacity, rule.cache_dim)
        for pool in (cache.keys(layer), cache.values(layer))
    )
    result = torch.empty(len(query), rule.heads, rule.cache_dim, dtype=torch.float32, device="cpu")
    group = rule.heads // rule.kv_heads
    extra = None if sinks is None else sinks.detach().float().view(rule.kv_heads, group, 1)
    for segment in segments:
        cache.require(segment)
        own = slice(segment.first_slot, segment.length)
        for pool, rows in ((keys, key), (values, value)):
            pool[segment.lane, :, own] = rows[segment.begin : segment.end].transpose(0, 1)
        for index in range(len(segment)):
            row, seen = segment.begin + index, _seen_slots(segment, index, rule.window)
            lane_keys, lane_values = (pool[segment.lane, :, seen] for pool in (keys, values))
            scores = torch.bmm(query[row].reshape(rule.kv_heads, group, -1), lane_keys.transpose(1, 2))
            weights = _weights(scores, rule.softcap, extra)
            result[row] = torch.bmm(weights, lane_values).view(rule.heads, -1)
    return result.view(len(query), -1)


def _seen_slots(segment: Segment, index: int, window: int | None) -> slice | list[int]:
    """Slots that row `index` of a segment sees, in the order of their positions."""
    branch = index - segment.num_straight
    if branch < 0:
        end = segment.first_slot + index + 1
        return slice(0 if window is None else max(0, end - window), end)
    seen = [*range(segment.fork), *segment.paths[branch]]
    return seen if window is None else seen[-window:]


def _weights(scores: torch.Tensor, softcap: float | None, sinks: torch.Tensor | None) -> torch.Tensor:
    """[kv heads, group, L] scores -> weights of the L slots; sinks are [kv heads, group, 1]."""
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if sinks is None:
        return torch.softmax(scores, -1)
    return torch.softmax(torch.cat((scores, sinks), -1), -1)[..., :-1]


def dense_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: LayerRule, sinks: torch.Tensor | None
) -> torch.Tensor:
    """What a rule says, written plainly, for one text without a cache.

    Args:
        query: [1, heads, R, key_dim].
        key: [1, kv_heads, R, key_dim].
        value: [1, kv_heads, R, value_dim].
        rule: the layer's.
        sinks: [heads] or None.

    Returns:
        [1, R, heads, value_dim] float32.
    """
    count, group = query.shape[2], rule.heads // rule.kv_heads
    rows = torch.arange(count, dtype=torch.int64, device="cpu")
    distance = rows[:, None] - rows
    hidden = (distance < 0) | (distance >= (rule.window or count))
    split = query[0].float().reshape(rule.kv_heads, group * count, -1) * rule.scale
    scores = torch.bmm(split, key[0].float().transpose(1, 2)).view(rule.kv_heads, group, count, count)
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        extra = sinks.detach().float().view(rule.kv_heads, group, 1, 1).expand(-1, -1, count, 1)
        scores = torch.cat((scores, extra), -1)
    weights = torch.softmax(scores, -1)[..., :count].reshape(rule.kv_heads, group * count, count)
    found = torch.bmm(weights, value[0].float()).view(rule.heads, count, -1)
    return found.transpose(0, 1)[None]
