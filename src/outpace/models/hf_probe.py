"""What the attention of a model of transformers is, found out by watching it on a short text.

Every layer must call the registered function, and what its eager attention gives there must be what the rule that was
found for it says. The windows are read from the masks themselves, over all the positions of the model.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.masking_utils import eager_mask

from outpace.errors import UnsupportedModel
from outpace.models.hf_attention import STUDY, LayerRule, dense_attention, listening
from outpace.models.hf_session import BorrowedModel

__all__ = ["Seen", "Study", "refuse_by_config", "study"]

_POSSIBLE_LAYERS = {"full_attention", "sliding_attention", "attention", "dense", "sparse", "moe"}
_STATEFUL = (
    "mamba",
    "rwkv",
    "recurrent",
    "shortconv",
    "deltanet",
    "linearattention",
    "lightning",
    "retention",
    "xlstm",
)
_PARTS = {"text_config", "vision_config", "audio_config"}
_HARMLESS = {"dropout", "is_causal", "output_attentions", "position_ids", "cache_position", "use_cache"}
_KNOWN = {"scaling", "sliding_window", "softcap", "s_aux"}
_SAME = 1e-4  # distance of attention from the same float32 numbers
_NEAR_ROWS = 96  # of masks, looked at one by one
_FEWEST_ROWS, _STUDY_ROWS, _MOST_ROWS = 20, 48, 300


def refuse_by_config(model: PreTrainedModel) -> None:
    """Refuses what can be told from the config and the modules.

    Raises:
        UnsupportedModel: an encoder beside the decoder, several parts, or layers with a state.
    """
    config, kind = model.config, model.config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{kind} is not possible: it is an encoder with a decoder; decoders alone are")
    if not model.can_generate() or model.get_output_embeddings() is None:
        raise UnsupportedModel(f"{kind} ({type(model).__name__}) is not possible: it has no language model head")
    parts = sorted(_PARTS.intersection(getattr(config, "sub_configs", {})))
    if parts:
        raise UnsupportedModel(f"{kind} is not possible: it is a model of several parts ({', '.join(parts)})")
    layers = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or []
    strange = sorted(set(layers) - _POSSIBLE_LAYERS)
    stateful = [
        type(m).__name__ for m in model.modules() if any(word in type(m).__name__.lower() for word in _STATEFUL)
    ]
    named = strange or stateful[-1:] or ["recurrent"] * bool(getattr(model, "_is_stateful", False))
    if named:
        raise UnsupportedModel(
            f"{kind} is not possible: it has layers of type {', '.join(named)}; possible are full attention and "
            "attention in a sliding window, whose state can be rolled back"
        )


@dataclass(slots=True)
class Seen:
    """What was seen of one attention call."""

    module: torch.nn.Module
    rule: LayerRule
    key: torch.Tensor
    value: torch.Tensor


class Study:
    """Listens to the model's eager attention over one text; after the pass `seen` has an entry for each call.

    Args:
        kind: the model's type, for messages.
        limit: positions of the model: masks are looked at up to there.
    """

    def __init__(self, kind: str, limit: int) -> None:
        self.seen: list[Seen] = []
        self.ids = torch.empty(0, dtype=torch.int64, device="cpu")
        self._kind = kind
        self._limit = limit
        self._masks: dict[int, tuple[torch.Tensor, dict[str, Any]]] = {}

    def mask(self, options: dict[str, Any]) -> torch.Tensor:
        """See `hf_attention.Listener.mask`: the mask of eager attention, remembered with what it was made of."""
        made: torch.Tensor | None = eager_mask(**options)
        if made is None:
            raise UnsupportedModel(f"{self._kind} is not possible: its attention is not causal")
        self._masks[made.data_ptr()] = (made, options)
        return made

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """See `hf_attention.Listener.attend`: what eager attention gives."""
        layer, kind = len(self.seen), self._kind
        unknown = sorted(
            key
            for key, value in options.items()
            if key not in _KNOWN | _HARMLESS and value is not None and value is not False
        )
        if unknown:
            raise UnsupportedModel(f"{kind} is not possible: attention of layer {layer} asks for {', '.join(unknown)}")
        known = None if mask is None else self._masks.get(mask.data_ptr())
        if mask is None or known is None:
            raise UnsupportedModel(f"{kind} is not possible: layer {layer} makes an attention mask of its own")
        rule = _rule(kind, layer, query, key, value, options, self._window(known[1]))
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        if eager is None:
            raise UnsupportedModel(f"{kind} is not possible: its module has no eager attention to compare with")
        wanted: torch.Tensor = eager(module, query.float(), key.float(), value.float(), mask.float(), **options)[0]
        found = dense_attention(query, key, value, rule, options.get("s_aux"))
        error = _distance(found.flatten(), wanted.flatten())
        if not error < _SAME:
            raise UnsupportedModel(
                f"{kind} is not possible: attention of layer {layer} is not what its scale, mask and window say "
                f"(relative difference {error:.1e})"
            )
        self.seen.append(Seen(module, rule, key[0].float(), value[0].float()))
        result: torch.Tensor = eager(module, query, key, value, mask, **options)[0]
        return result

    def _window(self, options: dict[str, Any]) -> int | None:
        """The window of a mask that transformers asks for; refuses one that is neither causal nor a window."""
        window, sees = options.get("local_size"), options["mask_function"]
        size = min(window or 1, self._limit)
        places = (size - 1, size, 2 * size, 3 * size + 5, self._limit - 1)
        far = sorted({place for place in places if place < self._limit})
        for queries in (
            torch.arange(min(_NEAR_ROWS, self._limit), dtype=torch.int64, device="cpu"),
            torch.tensor(far, dtype=torch.int64, device="cpu"),
        ):
            queries, slots = (
                queries[:, None],
                torch.arange(int(queries.max()) + 2, dtype=torch.int64, device="cpu")[None],
            )
            wanted = (slots <= queries) & (slots > queries - (self._limit if window is None else window))
            zero = torch.zeros((), dtype=torch.int64, device="cpu")
            try:
                found = sees(zero, zero, queries, slots)
            except (RuntimeError, IndexError, TypeError) as error:
                raise UnsupportedModel(
                    f"{self._kind} is not possible: its attention mask cannot be read ({error})"
                ) from error
            if not torch.equal(found.expand_as(wanted), wanted):
                shape = "not causal" if window is None else f"not a window of {window}"
                raise UnsupportedModel(f"{self._kind} is not possible: its attention mask is {shape}")
        return window


def _rule(
    kind: str,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: dict[str, Any],
    window: int | None,
) -> LayerRule:
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4 or query.shape[1] % key.shape[1]:
        shapes = ", ".join(str(tuple(part.shape)) for part in (query, key, value))
        raise UnsupportedModel(f"{kind} is not possible: layer {layer} attends with shapes {shapes}")
    scale = options.get("scaling")
    return LayerRule(
        heads=query.shape[1],
        kv_heads=key.shape[1],
        key_dim=key.shape[3],
        value_dim=value.shape[3],
        scale=float(query.shape[3] ** -0.5 if scale is None else scale),
        window=window,
        softcap=options.get("softcap"),
        sinks=options.get("s_aux") is not None,
    )


def study(borrowed: BorrowedModel, vocab_size: int, limit: int) -> Study:
    """Watches eager passes over a short text, which is longer than the smallest window if that is not long.

    Raises:
        UnsupportedModel: attention that outpace does not compute, or layers that do not call it.
    """
    count = min(_STUDY_ROWS, limit)
    if count < _FEWEST_ROWS:
        raise UnsupportedModel(f"{borrowed.kind} is not possible with {limit} positions; at least {_FEWEST_ROWS} are")
    found = _study_rows(borrowed, _text(count, vocab_size), limit)
    windows = [seen.rule.window for seen in found.seen if seen.rule.window is not None]
    longer = min(windows, default=0) + 17
    if count < longer <= min(_MOST_ROWS, limit):
        found = _study_rows(borrowed, _text(longer, vocab_size), limit)
    return found


def _text(count: int, vocab_size: int) -> torch.Tensor:
    return torch.randint(
        vocab_size, (count,), generator=torch.Generator("cpu").manual_seed(1), dtype=torch.int64, device="cpu"
    )


def _study_rows(borrowed: BorrowedModel, ids: torch.Tensor, limit: int) -> Study:
    listener = Study(borrowed.kind, limit)
    listener.ids = ids
    rows = torch.arange(len(ids), dtype=torch.int64, device="cpu")
    with listening(listener):
        borrowed.logits(ids, rows, rows[-1:], STUDY)
    layers, calling = borrowed.model.config.num_hidden_layers, len({seen.module for seen in listener.seen})
    if calling != layers:
        raise UnsupportedModel(
            f"{borrowed.kind} is not possible: {calling} of its {layers} layers call the attention that "
            "transformers lets one register"
        )
    shapes = {(seen.rule.kv_heads, seen.rule.cache_dim) for seen in listener.seen}
    if len(shapes) > 1:
        raise UnsupportedModel(
            f"{borrowed.kind} is not possible: its layers differ in key heads and their size: {sorted(shapes)}"
        )
    return listener


def _distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Root mean square of the difference over that of what is wanted."""
    return float((found.float() - wanted.float()).norm() / wanted.float().norm().clamp_min(1e-30))
