"""A trained network at an early exit: one decoder block with a cache of its own and a norm; the head is the target's.

On disk it is a folder:

    config.json          {"model_type": "outpace_exit_adapter", "exit_layer": E,
                          "hidden_size": H, "num_hidden_layers": L, "vocab_size": V}, the last three those of its
                         target; V may be missing
    model.safetensors    block.input_layernorm.weight, block.self_attn.q_proj.weight, ... named and shaped as one
                         layer of the target, and norm.weight [H]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from outpace.errors import CheckpointError, InvalidParameter, ModelNotFound
from outpace.models.checkpoint import Checkpoint, read_json
from outpace.models.config import DecoderConfig, expected_tensors
from outpace.models.decoder import Decoder
from outpace.models.stack import load_layers, new_cache
from outpace.models.weights import WeightSource
from outpace.types import Segment

__all__ = ["ADAPTER_TYPE", "AdapterFiles", "BlockAdapter", "adapter_tensors", "open_adapter"]

ADAPTER_TYPE = "outpace_exit_adapter"


class BlockAdapter:
    """`protocols.ExitAdapter` for the lean decoder.

    Args:
        model: the target, whose head it shares.
        weights: its tensors, named as above.
        exit_layer: the layer whose entering states it reads.
        num_lanes: requests side by side.
        capacity: rows in a lane.
        max_rows: rows of its cache at most over all lanes.
    """

    def __init__(
        self, model: Decoder, weights: WeightSource, *, exit_layer: int, num_lanes: int, capacity: int, max_rows: int
    ) -> None:
        config = model.config
        self.exit_layer = exit_layer
        self._model = model
        one = replace(config, num_layers=1, windows=(None,))
        self._layers = load_layers(one, weights, ["block."], model.precision)
        self._head = model.head.with_norm(weights.get("norm.weight"))
        self.cache = new_cache(one, num_lanes, capacity, max_rows)

    @property
    def weight_bytes(self) -> int:
        return self._layers.weight_bytes + 4 * self._model.hidden_size

    @torch.inference_mode()
    def logits(
        self, hidden: torch.Tensor, positions: torch.Tensor, segments: Sequence[Segment], wanted: torch.Tensor
    ) -> torch.Tensor:
        """[R, H] states at the exit -> [N, V] float32 logits of the `wanted` [N] rows; writes rows to its cache."""
        rope = self._model.rope.at(positions)
        hidden = self._layers.run(hidden, rope, segments, 0, 1, self.cache, {}, wanted)
        if not len(hidden):
            return torch.empty(0, self._model.vocab_size, dtype=torch.float32, device="cpu")
        logits: torch.Tensor = self._head.logits(hidden)
        return logits


def adapter_tensors(target: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of an adapter for this target."""
    one_layer = replace(target, num_layers=1, windows=(None,))
    prefix = "model.layers.0."
    shapes = expected_tensors(one_layer).items()
    block = {"block." + name.removeprefix(prefix): shape for name, shape in shapes if name.startswith(prefix)}
    return {**block, "norm.weight": (target.hidden_size,)}


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter's folder, checked; no weight is in memory yet.

    Args:
        exit_layer: the exit it was trained for.
        weights: what `BlockAdapter` reads.
    """

    exit_layer: int
    weights: Checkpoint


def open_adapter(folder: str, target: DecoderConfig, exit_layer: int | None) -> AdapterFiles:
    """Opens an adapter's folder and checks it against its target.

    Args:
        folder: as described above; `~` is expanded.
        target: the shape of the model it is for.
        exit_layer: the exit asked for, if any.

    Raises:
        ModelNotFound: no such folder.
        CheckpointError: a file is damaged, or it is not an adapter for this model.
        InvalidParameter: it was trained for another exit.
    """
    path = Path(folder).expanduser()
    if not (path / "config.json").is_file():
        raise ModelNotFound(f"{folder}: no adapter there; its folder holds config.json and model.safetensors")
    config = read_json(path / "config.json")
    if config.get("model_type") != ADAPTER_TYPE:
        raise CheckpointError(
            f"{path / 'config.json'}: model_type is {config.get('model_type')!r}, not {ADAPTER_TYPE!r}"
        )
    own = {"hidden_size": target.hidden_size, "num_hidden_layers": target.num_layers}
    if "vocab_size" in config:
        own["vocab_size"] = target.vocab_size
    for key, value in own.items():
        if config.get(key) != value:
            raise CheckpointError(f"{path / 'config.json'}: made for {key}={config.get(key)}, the target has {value}")
    trained = config.get("exit_layer")
    if not isinstance(trained, int) or not 1 <= trained < target.num_layers:
        raise CheckpointError(f"{path / 'config.json'}: exit_layer={trained!r} is not in 1 to {target.num_layers - 1}")
    if exit_layer not in (None, trained):
        raise InvalidParameter(f"exit_layer={exit_layer} does not go with {folder}: it was trained for {trained}")
    weights = Checkpoint.open(path)
    weights.check(adapter_tensors(target))
    return AdapterFiles(trained, weights)
