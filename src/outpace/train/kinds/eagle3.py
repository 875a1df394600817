"""EAGLE-3 heads: one layer that reads the target's states and drafts token after token (`models.eagle3_config`).

What is written runs here and, taken over with `outpace export`, in vLLM and SGLang: one layer of the Llama shape
without biases, no norm before the residual, three states of the target.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outpace.errors import InvalidParameter
from outpace.heads import Eagle3Config, Verifier, default_aux_layers, offsets_of, save_eagle3
from outpace.models.config import DecoderConfig
from outpace.train.acceptance import Chains
from outpace.train.data.packing import Windows
from outpace.train.kinds.base import Loss, Material, follows, head_weight
from outpace.train.losses import HeadLoss, head_loss
from outpace.train.modules.eagle3 import Eagle3Head
from outpace.train.rounding import stored_weights
from outpace.train.target import Batch
from outpace.train.teacher import PartOfHead, SubsetTeacher

__all__ = [
    "LEAST_SHARE",
    "Eagle3",
    "Eagle3Options",
    "aux_layers",
    "head_config",
    "layer_shape",
    "thinned",
]


LEAST_SHARE = 0.25
"""Of the rows, what a step of training looks at at least."""


@dataclass(frozen=True, slots=True)
class Eagle3Options:
    """What only these heads take.

    Args:
        unroll: steps a chain is drafted in training.
        draft_vocab: tokens it can guess; no more than there are.
        train_head: its output head learns too; otherwise it is made of the target's rows and not stored.
        decay: weight of a step in the loss, against the one before it.
        row_share: rows that a step looks at, against the one before it, but a quarter of all at least.
    """

    unroll: int = 4
    draft_vocab: int = 8192
    train_head: bool = False
    decay: float = 0.8
    row_share: float = 0.6

    def __post_init__(self) -> None:
        if not 1 <= self.unroll <= 16:
            raise InvalidParameter(f"unroll={self.unroll} is not possible: it must be in 1 to 16")
        if self.draft_vocab < 2:
            raise InvalidParameter(f"draft_vocab={self.draft_vocab} is not possible: it must be at least 2")
        if not 0 < self.decay <= 1:
            raise InvalidParameter(f"decay={self.decay} is not possible: above 0, at most 1")
        if not 0 < self.row_share <= 1:
            raise InvalidParameter(f"row_share={self.row_share} is not possible: above 0, at most 1")


def aux_layers(num_layers: int) -> tuple[int, int, int]:
    """Layers of the target whose entering states a head reads: the usual ones, or others if those are not three.

    Raises:
        InvalidParameter: the target has too few layers.
    """
    low, middle, high = default_aux_layers(num_layers)
    if low < middle < high:
        return low, middle, high
    if num_layers < 4:
        raise InvalidParameter(f"an EAGLE-3 head reads three states, and needs a model of 4 layers, not {num_layers}")
    return 1, num_layers // 2, num_layers - 1


def head_config(shape: DecoderConfig, size: int, options: Eagle3Options) -> Eagle3Config:
    """What a head for this target is.

    Args:
        shape: of the target.
        size: tokens it can guess.
        options: of these heads.

    Raises:
        InvalidParameter: the target has too few layers.
    """
    layers = aux_layers(shape.num_layers)
    return Eagle3Config(
        layer=layer_shape(shape),
        target_hidden_size=shape.hidden_size,
        draft_vocab_size=size,
        aux_layers=None if layers == default_aux_layers(shape.num_layers) else layers,
        shares_target_head=not options.train_head,
        target_layers=shape.num_layers,
    )


class Eagle3:
    """`Kind` of an EAGLE-3 head.

    Args:
        material: the target.
        ids: [D] the draft vocabulary, ascending.
        options: of these heads.

    Raises:
        InvalidParameter: the target has too few layers.
    """

    def __init__(self, material: Material, ids: torch.Tensor, options: Eagle3Options) -> None:
        self._material, self._ids, self._options = material, ids, options
        self._aux_layers = aux_layers(material.shape.num_layers)
        self._layer = layer_shape(material.shape)
        rows = head_weight(material)[ids]
        self._head = Eagle3Head(self._layer, material.shape.hidden_size, len(ids) if options.train_head else None)
        self._shared_rows = None if options.train_head else rows
        self._teaching = PartOfHead(material.weight("model.norm.weight"), material.shape.rms_norm_eps, rows)
        _initialise(self._head, material, rows)

    @property
    def module(self) -> nn.Module:
        return self._head

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self._aux_layers

    def describe(self) -> Mapping[str, Any]:
        digest = hashlib.sha256(self._ids.numpy().tobytes()).hexdigest()
        options = self._options
        return {"kind": "eagle3", "unroll": options.unroll, "draft_vocab": len(self._ids), "draft_ids": digest,
                "train_head": options.train_head, "decay": options.decay, "row_share": options.row_share}  # fmt: skip

    def loss(self, batch: Batch) -> Loss:
        teacher, rows = self._teacher(batch)
        chosen = thinned(rows, self._options.unroll, self._options.row_share)
        found = self._judged(batch, teacher, chosen)
        weights = [self._options.decay**step for step in range(len(found))]
        terms = [weight * item.loss for weight, item in zip(weights, found, strict=True)]
        value = torch.stack(terms).sum() / sum(weights)
        count = sum(len(item.alpha) for item in found)
        alpha = sum(float(item.alpha.sum()) for item in found) / max(1, count)
        agreement = sum(int(item.agrees.sum()) for item in found) / max(1, count)
        return Loss(value, count, alpha, agreement)

    @torch.no_grad()
    def chains(self, batch: Batch) -> dict[str, Chains]:
        teacher, rows = self._teacher(batch)
        chain = self._material.chain
        place = torch.full((batch.windows.ids.numel(),), -1, dtype=torch.int64, device="cpu")
        place[rows] = torch.arange(len(rows), dtype=torch.int64, device="cpu")
        agrees = torch.zeros(len(rows), chain, dtype=torch.bool, device="cpu")
        alpha = torch.zeros(len(rows), chain, dtype=torch.float32, device="cpu")
        exists = torch.zeros_like(agrees)
        starts = [_starts(rows, step) for step in range(chain)]
        for step, found in enumerate(self._judged(batch, teacher, starts)):
            at = place[starts[step]]
            agrees[at, step], alpha[at, step], exists[at, step] = found.agrees, found.alpha, True
        return {"eagle3": Chains(agrees, alpha, exists, follows(rows))}

    def save(
        self, folder: Path, dtype: torch.dtype = torch.float32, only: Collection[str] | None = None
    ) -> dict[str, str]:
        material = self._material
        config = head_config(material.shape, len(self._ids), self._options)
        tensors = stored_weights(self._head, dtype)
        if config.is_pruned:
            tensors["d2t"] = offsets_of(self._ids)
        architectures = tuple(map(str, material.files.config.get("architectures") or ()))
        save_eagle3(folder, config, tensors, verifier=Verifier(material.name, architectures))
        return self.served(folder)

    def served(self, folder: Path) -> dict[str, str]:
        return {"eagle3": json.dumps({"method": "eagle3", "model": str(folder)})}

    def _rows(self) -> torch.Tensor:
        """[D, H] the output head."""
        if self._shared_rows is not None:
            return self._shared_rows
        assert self._head.lm_head is not None
        return self._head.lm_head.weight

    def _teacher(self, batch: Batch) -> tuple[SubsetTeacher, torch.Tensor]:
        """The teacher, and rows [N] of the flattened batch a chain may be drafted behind: with a row before them."""
        counted = batch.windows.counted
        rows = (counted & ~batch.windows.starts).flatten().nonzero().squeeze(1)
        return SubsetTeacher(batch, rows, self._ids, self._teaching), rows

    def _judged(self, batch: Batch, teacher: SubsetTeacher, starts: Sequence[torch.Tensor]) -> list[HeadLoss]:
        """Token `step` of the chains behind rows `starts[step]`, for every step."""
        states = self._states(batch, starts)
        return [
            head_loss(self._material.loss, out, self._rows(), teacher.of(behind + step))
            for step, (behind, out) in enumerate(zip(starts, states, strict=True))
        ]

    def _states(self, batch: Batch, starts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """For every step, [n, H] for the output head: what guesses token `step` behind rows `starts[step]`.

        Behind row r that is row r - 1, which has the embedding of token r + step.
        """
        windows = batch.windows
        aux = torch.cat([batch.aux[layer] for layer in self._aux_layers], -1).flatten(0, 1)
        embedded = batch.target.embed(windows.ids).flatten(0, 1)
        # What is rolled around the end stands in rows that do not count.
        head = self._head.begin(aux, embedded.roll(-1, 0), windows.positions.flatten(), _pieces(windows))
        outs = [head.first(starts[0] - 1)]
        for step, behind in enumerate(starts[1:], 1):
            outs.append(head.further(embedded[behind + step], behind - 1))
        return outs


def _pieces(windows: Windows) -> list[tuple[int, int]]:
    """(begin, end) slots of every piece in flattened windows; filling counts as one."""
    begins = windows.starts.flatten().nonzero().squeeze(1).tolist()
    return list(zip(begins, [*begins[1:], windows.ids.numel()], strict=True))


def thinned(rows: torch.Tensor, steps: int, share: float) -> list[torch.Tensor]:
    """Rows behind which chains are trained, by step: all of them for the first token, fewer and fewer further on.

    Neighbouring rows teach nearly the same in later steps, which weigh less and cost as much. Each step's rows are
    among those of the step before; which ones, torch's generator draws.
    """
    ranks = torch.rand(int(rows[-1]) + 1 if len(rows) else 0, dtype=torch.float32, device="cpu")
    chosen = []
    for step in range(steps):
        there = _starts(rows, step)
        chosen.append(there[ranks[there] < max(LEAST_SHARE, share**step)])
    return chosen


def _starts(rows: torch.Tensor, step: int) -> torch.Tensor:
    """Those rows behind which `step` more rows of the same text count; neighbours among `rows` are of one text."""
    last = torch.arange(len(rows), dtype=torch.int64, device="cpu") + step
    there = last < len(rows)
    there[there.clone()] &= rows[last[there]] == rows[there] + step
    return rows[there]


def layer_shape(shape: DecoderConfig) -> DecoderConfig:
    """A layer that every engine for these heads can run."""
    return replace(
        shape,
        model_type="llama",
        num_layers=1,
        windows=(None,),
        tie_word_embeddings=False,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
    )


@torch.no_grad()
def _initialise(head: Eagle3Head, material: Material, rows: torch.Tensor) -> None:
    """Begins as the target's last layer over the highest state; what reads embeddings begins as the first layer's."""
    last, first = f"model.layers.{material.shape.num_layers - 1}.", "model.layers.0."
    hidden = material.shape.hidden_size
    head.fc.weight.zero_()
    head.fc.weight[:, -hidden:] = torch.eye(hidden, dtype=torch.float32, device="cpu")
    layer = head.midlayer
    layer.input_layernorm.weight.copy_(material.weight(f"{first}input_layernorm.weight"))
    layer.hidden_norm.weight.copy_(material.weight(f"{last}input_layernorm.weight"))
    layer.post_attention_layernorm.weight.copy_(material.weight(f"{last}post_attention_layernorm.weight"))
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = layer.self_attn.get_parameter(f"{name}.weight")
        for part, prefix in ((slice(hidden), first), (slice(hidden, None), last)):
            weight[:, part] = _as_if_normed(material, prefix, name)
    layer.self_attn.o_proj.weight.copy_(material.weight(f"{last}self_attn.o_proj.weight"))
    for name in ("gate_proj", "up_proj", "down_proj"):
        layer.mlp.get_parameter(f"{name}.weight").copy_(material.weight(f"{last}mlp.{name}.weight"))
    head.norm.weight.copy_(material.weight("model.norm.weight"))
    if head.lm_head is not None:
        head.lm_head.weight.copy_(rows)


def _as_if_normed(material: Material, prefix: str, name: str) -> torch.Tensor:
    """[heads * D, H] a projection of the target's layer, for a layer without norms of queries and keys.

    Where the target has these, what its matrices put out may have any length. Here every head is scaled to the length
    that the norm would give on average, its inputs being as independent as after a norm.
    """
    weight = material.weight(f"{prefix}self_attn.{name}.weight")
    if not material.shape.qk_norm or name == "v_proj":
        return weight
    norm = material.weight(f"{prefix}self_attn.{name[0]}_norm.weight")
    heads = weight.view(-1, len(norm), weight.shape[1])
    entering = material.weight(f"{prefix}input_layernorm.weight")
    lengths = (heads * entering).square().sum(-1).mean(1).sqrt()
    return (heads * (norm / lengths.unsqueeze(1).clamp_min(1e-6)).unsqueeze(-1)).view_as(weight)
