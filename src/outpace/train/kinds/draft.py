"""Draft models that stand alone: some layers of the target, or as many new ones, taught to say what the target says.

What is written is an ordinary checkpoint, with the target's tokenizer, that any engine runs.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import nn

from outpace.errors import InvalidParameter
from outpace.models.config import DecoderConfig
from outpace.train.acceptance import Chains, chains_of_rows
from outpace.train.kinds.base import Loss, Material, follows
from outpace.train.losses import HeadLoss, head_loss
from outpace.train.modules.small_model import SmallModel
from outpace.train.rounding import stored_weights
from outpace.train.target import Batch
from outpace.train.teacher import WholeTeacher
from outpace.train.writing import make_folder, write_bytes, write_json

__all__ = ["Draft", "DraftOptions", "chosen_layers"]

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
                    "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json",
                    "generation_config.json")  # fmt: skip
_NEW_WEIGHTS = 0.02


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """What only draft models take.

    Args:
        layers: how many it has; None is a quarter of the target's.
        from_scratch: its layers are new, not the target's.
        train_embedding: embedding and output head learn too; otherwise they stay the target's.
    """

    layers: int | None = None
    from_scratch: bool = False
    train_embedding: bool = False


def chosen_layers(options: DraftOptions, num_layers: int) -> tuple[int, ...]:
    """Layers of the target that a draft model keeps: the first, the last, and others at even distances.

    Raises:
        InvalidParameter: no layer, or not fewer than the target has.
    """
    count = max(1, num_layers // 4) if options.layers is None else options.layers
    if not 1 <= count < num_layers:
        raise InvalidParameter(f"layers={count} is not possible: it must be in 1 to {num_layers - 1}")
    if count == 1:
        return (0,)
    return tuple(round(at * (num_layers - 1) / (count - 1)) for at in range(count))


class Draft:
    """`Kind` of a draft model.

    Args:
        material: the target.
        options: of draft models.

    Raises:
        InvalidParameter: as many layers as the target, or none.
    """

    def __init__(self, material: Material, options: DraftOptions) -> None:
        self._material, self._options = material, options
        self._kept = chosen_layers(options, material.shape.num_layers)
        windows = tuple(material.shape.windows[layer] for layer in self._kept)
        self._shape: DecoderConfig = replace(material.shape, num_layers=len(self._kept), windows=windows)
        self._model = SmallModel(self._shape)
        _initialise(self._model, material, self._kept, new=options.from_scratch)
        if not options.train_embedding:
            self._model.model.embed_tokens.requires_grad_(False)
            if self._model.lm_head is not None:
                self._model.lm_head.requires_grad_(False)

    @property
    def module(self) -> nn.Module:
        return self._model

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return ()

    def describe(self) -> Mapping[str, Any]:
        options = self._options
        return {"kind": "draft", "layers": list(self._kept), "from_scratch": options.from_scratch,
                "train_embedding": options.train_embedding}  # fmt: skip

    def loss(self, batch: Batch) -> Loss:
        found, rows = self._judge(self._material.loss, batch)
        alpha = float(found.alpha.mean()) if len(rows) else 0.0
        agreement = float(found.agrees.float().mean()) if len(rows) else 0.0
        return Loss(found.loss, len(rows), alpha, agreement)

    @torch.no_grad()
    def chains(self, batch: Batch) -> dict[str, Chains]:
        found, rows = self._judge("tv", batch)
        return {"draft": chains_of_rows(found.agrees, found.alpha, follows(rows), self._material.chain)}

    def save(
        self, folder: Path, dtype: torch.dtype = torch.float32, only: Collection[str] | None = None
    ) -> dict[str, str]:
        files = self._material.files
        make_folder(folder)
        for name in _TOKENIZER_FILES:
            if (files.folder / name).is_file():
                write_bytes(folder / name, (files.folder / name).read_bytes())
        write_bytes(folder / "model.safetensors", save(stored_weights(self._model, dtype), {"format": "pt"}))
        write_json(folder / "config.json", _config(files.config, self._shape, dtype))
        return self.served(folder)

    def served(self, folder: Path) -> dict[str, str]:
        return {"draft": json.dumps({"method": "draft_model", "model": str(folder)})}

    def _judge(self, loss: str, batch: Batch) -> tuple[HeadLoss, torch.Tensor]:
        windows = batch.windows
        rows = windows.counted.flatten().nonzero().squeeze(1)
        out = self._model(windows.ids, windows.positions, windows.pieces).flatten(0, 1)[rows]
        head = self._model.head[: self._material.vocab_size]
        return head_loss(loss, out, head, WholeTeacher(batch, rows)), rows


@torch.no_grad()
def _initialise(model: SmallModel, material: Material, kept: tuple[int, ...], *, new: bool) -> None:
    """The target's tensors, those of layers only if they are not to be new."""
    for name, tensor in model.state_dict().items():
        prefix, is_layer, rest = name.partition("model.layers.")
        number, _, part = rest.partition(".")
        if not is_layer:
            tensor.copy_(material.weight(name))
        elif not new:
            tensor.copy_(material.weight(f"{prefix}model.layers.{kept[int(number)]}.{part}"))
        elif tensor.dim() > 1:
            tensor.normal_(std=_NEW_WEIGHTS)
        else:
            tensor.fill_(0.0 if name.endswith("bias") else 1.0)


def _config(target: Mapping[str, Any], shape: DecoderConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The target's config.json with fewer layers."""
    config = {name: value for name, value in target.items() if name not in ("torch_dtype", "quantization_config")}
    config |= {"num_hidden_layers": shape.num_layers, "dtype": str(dtype).removeprefix("torch.")}
    if "layer_types" in config or config.get("use_sliding_window"):
        config["layer_types"] = [
            "full_attention" if window is None else "sliding_attention" for window in shape.windows
        ]
    return config
