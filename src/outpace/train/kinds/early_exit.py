"""Adapters at early exits: one block and a norm behind layer E, the head being the target's (`models.adapter`).

While drafting, the adapter reads the states at E of draft tokens, which layers [0, E) have computed exactly. So what
it does in training, on the target's own states, is what it will do while serving, as long as the text is one that the
target itself would say. Adapters at several exits learn side by side from one pass of the target.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import nn

from outpace.errors import InvalidParameter
from outpace.models.adapter import ADAPTER_TYPE
from outpace.models.config import DecoderConfig
from outpace.train.acceptance import Chains, chains_of_rows
from outpace.train.kinds.base import Loss, Material, follows, head_weight
from outpace.train.losses import Teacher, head_loss
from outpace.train.modules.layer import DecoderLayer, RmsNorm, Rotary, seen
from outpace.train.rounding import stored_weights
from outpace.train.target import Batch
from outpace.train.teacher import PartOfHead, SubsetTeacher, WholeTeacher
from outpace.train.vocabulary import some_tokens
from outpace.train.writing import make_folder, write_bytes, write_json

__all__ = ["EarlyExit", "ExitBlock", "check_layers"]


class ExitBlock(nn.Module):
    """What `models.adapter.BlockAdapter` serves, with tensors of the same names."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.block = DecoderLayer(config)
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, hidden: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor], mask: torch.Tensor
    ) -> torch.Tensor:
        """[B, W, H] states at the exit -> [B, W, H] what the head takes."""
        result: torch.Tensor = self.norm(self.block(hidden, turn, mask))
        return result


def check_layers(shape: DecoderConfig, exits: Sequence[int], init_layer: int | None) -> None:
    """Refuses layers that there are not; see `EarlyExit`."""
    most = shape.num_layers - 1
    for layer in exits:
        if not 1 <= layer <= most:
            raise InvalidParameter(f"exit layer {layer} is not possible: it must be in 1 to {most}")
    if not exits or len(set(exits)) != len(exits):
        raise InvalidParameter(f"exit layers {list(exits)} are not possible: name each once, and at least one")
    if init_layer is not None and not 0 <= init_layer <= most:
        raise InvalidParameter(f"init_layer={init_layer} is not possible: it must be in 0 to {most}")


class EarlyExit:
    """`Kind` of adapters at one exit or several.

    Args:
        material: the target.
        exits: layers they stand behind, each 1 to num_layers - 1.
        init_layer: the target's layer a block begins as; None is its last.
        common: [C] int64 ids, ascending, of tokens that the loss looks at in every step, beside others drawn anew each
            time: a head over a large vocabulary costs more than all else. None: it looks at all.

    Raises:
        InvalidParameter: there is no such layer, or an exit comes twice.
    """

    def __init__(
        self,
        material: Material,
        exits: Sequence[int],
        init_layer: int | None = None,
        common: torch.Tensor | None = None,
    ) -> None:
        check_layers(material.shape, exits, init_layer)
        self._material, self._exits = material, tuple(exits)
        self._init = material.shape.num_layers - 1 if init_layer is None else init_layer
        self._rotary = Rotary(material.shape.rope, material.shape.head_dim)
        self._head = head_weight(material)
        self._norm = material.weight("model.norm.weight")
        self._common = common
        self._blocks = {layer: self._new_block() for layer in exits}
        self._module = nn.ModuleDict({f"exit_{layer}": block for layer, block in self._blocks.items()})

    @property
    def module(self) -> nn.Module:
        return self._module

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self._exits

    def describe(self) -> Mapping[str, Any]:
        common = None if self._common is None else hashlib.sha256(self._common.numpy().tobytes()).hexdigest()
        return {"kind": "early-exit", "exits": list(self._exits), "init_layer": self._init, "common": common}

    def loss(self, batch: Batch) -> Loss:
        rows = batch.windows.counted.flatten().nonzero().squeeze(1)
        teacher, head, bias = self._teacher(batch, rows)
        kind = self._material.loss
        found = [head_loss(kind, out, head, teacher, bias=bias) for out in self._run(batch, rows).values()]
        value = torch.stack([item.loss for item in found]).mean()
        alpha = torch.cat([item.alpha for item in found]).mean() if len(rows) else 0.0
        agreement = torch.cat([item.agrees for item in found]).float().mean() if len(rows) else 0.0
        return Loss(value, len(rows), float(alpha), float(agreement))

    @torch.no_grad()
    def chains(self, batch: Batch) -> dict[str, Chains]:
        rows = batch.windows.counted.flatten().nonzero().squeeze(1)
        teacher = WholeTeacher(batch, rows, shared=len(self._exits) > 1)
        behind = follows(rows)
        result = {}
        for layer, out in self._run(batch, rows).items():
            found = head_loss("tv", out, self._head, teacher)
            result[f"exit {layer}"] = chains_of_rows(found.agrees, found.alpha, behind, self._material.chain)
        return result

    def save(
        self, folder: Path, dtype: torch.dtype = torch.float32, only: Collection[str] | None = None
    ) -> dict[str, str]:
        for layer, block in self._blocks.items():
            if only is not None and f"exit {layer}" not in only:
                continue
            place = make_folder(self._place(folder, layer))
            write_bytes(place / "model.safetensors", save(stored_weights(block, dtype)))
            write_json(
                place / "config.json",
                {
                    "model_type": ADAPTER_TYPE,
                    "exit_layer": layer,
                    "hidden_size": self._material.shape.hidden_size,
                    "num_hidden_layers": self._material.shape.num_layers,
                    "vocab_size": self._material.shape.vocab_size,
                },
            )
        return self.served(folder)

    def served(self, folder: Path) -> dict[str, str]:
        return {
            f"exit {layer}": json.dumps({"method": "early_exit", "adapter": str(self._place(folder, layer))})
            for layer in self._exits
        }

    def _place(self, folder: Path, layer: int) -> Path:
        return folder / f"exit-{layer}" if len(self._exits) > 1 else folder

    def _teacher(self, batch: Batch, rows: torch.Tensor) -> tuple[Teacher, torch.Tensor, torch.Tensor | None]:
        """The teacher of these rows, and head [D, H] and bias [D] over the same tokens."""
        if self._common is None:
            return WholeTeacher(batch, rows, shared=len(self._exits) > 1), self._head, None
        ids, bias = some_tokens(self._common, len(self._head))
        head = self._head[ids]
        part = PartOfHead(self._norm, self._material.shape.rms_norm_eps, head)
        return SubsetTeacher(batch, rows, ids, part, bias).of(rows), head, bias

    def _run(self, batch: Batch, rows: torch.Tensor) -> dict[int, torch.Tensor]:
        """{exit: [N, H] what the head takes, of these rows}."""
        turn = self._rotary.at(batch.windows.positions)
        mask = seen(batch.windows.pieces)
        outs = {layer: block(batch.aux[layer], turn, mask) for layer, block in self._blocks.items()}
        return {layer: out.flatten(0, 1)[rows] for layer, out in outs.items()}

    def _new_block(self) -> ExitBlock:
        """Begins as a layer of the target under its final norm: tensors of the same names and shapes."""
        block = ExitBlock(self._material.shape)
        prefix = f"model.layers.{self._init}."
        block.load_state_dict(
            {
                name: self._material.weight(
                    "model.norm.weight" if name == "norm.weight" else prefix + name.removeprefix("block.")
                )
                for name in block.state_dict()
            }
        )
        return block
