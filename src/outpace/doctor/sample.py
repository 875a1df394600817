"""Layers of random weights with the shapes of a 1.5B model: something to measure on a machine without models."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch

from outpace.models.config import DecoderConfig, RopeConfig, expected_tensors
from outpace.models.native.matrix import format_of, packed_bytes, source_of
from outpace.models.precision import Precision
from outpace.models.rope import RopeTable
from outpace.models.stack import load_layers, new_cache
from outpace.models.stored import QuantizedBlocks
from outpace.types import Segment

__all__ = ["CONTEXT", "SampleLayers", "SampleWeights", "layer_bytes", "sample_config", "with_layers"]

CONTEXT = 256
"""Cache rows before those of a measured step."""
_FIRST = "model.layers.0."


def sample_config(num_layers: int = 1) -> DecoderConfig:
    """The shape of a 1.5B model with so many layers and a small vocabulary."""
    return DecoderConfig(
        model_type="llama",
        hidden_size=1536,
        intermediate_size=8960,
        num_layers=num_layers,
        num_heads=12,
        num_kv_heads=2,
        head_dim=128,
        vocab_size=1000,
        max_positions=4096,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        rope=RopeConfig(),
        windows=(None,) * num_layers,
    )


class SampleWeights:
    """A `WeightSource` of random float16 weights; every layer has those of the first.

    Args:
        config: the shape.
    """

    def __init__(self, config: DecoderConfig) -> None:
        self.shapes = expected_tensors(config)
        generator = torch.Generator().manual_seed(0)
        self._tensors: dict[str, torch.Tensor] = {}
        for name, shape in self.shapes.items():
            if len(shape) < 2:
                self._tensors[name] = torch.ones(shape, dtype=torch.float32, device="cpu")
            elif not name.startswith("model.layers.") or name.startswith(_FIRST):
                # Of unit length on average, so that states neither vanish nor grow from layer to layer.
                values = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") * shape[-1] ** -0.5
                self._tensors[name] = values.half()

    def get(self, name: str) -> torch.Tensor:
        """[outputs, inputs] float16, or [outputs] ones."""
        if name in self._tensors:
            return self._tensors[name]
        if name not in self.shapes:
            raise KeyError(name)
        return self._tensors[_FIRST + name.split(".", 3)[3]]

    def blocks(self, name: str) -> QuantizedBlocks | None:
        return None


def with_layers(config: DecoderConfig, num_layers: int) -> DecoderConfig:
    """The same shape with another number of layers, none of which has a window."""
    return replace(config, num_layers=num_layers, windows=(None,) * num_layers)


def layer_bytes(config: DecoderConfig, precision: Precision) -> int:
    """Memory of the matrices of one layer of this shape, packed."""
    total = 0
    for name, shape in expected_tensors(config).items():
        if not name.startswith(_FIRST) or len(shape) < 2:
            continue
        if precision.kernels == "native":
            total += packed_bytes(format_of(precision, source_of(None, torch.float16), blocks=False), *shape)
        else:
            total += prod(shape) * (1 if precision.quantization == "int8" else 4)
    return total


class SampleLayers:
    """Sample layers with a cache of CONTEXT rows, ready to compute some more.

    Args:
        weights: the weights of each layer.
        config: the shape; its number of layers is loaded.
        precision: of the matrices.
        most_rows: rows of the largest step.
    """

    def __init__(self, weights: SampleWeights, config: DecoderConfig, precision: Precision, most_rows: int) -> None:
        prefixes = [f"model.layers.{layer}." for layer in range(config.num_layers)]
        self._layers = load_layers(config, weights, prefixes, precision)
        self._config = config
        self._rope = RopeTable(config.rope, config.head_dim)
        generator = torch.Generator().manual_seed(1)
        self._hidden = torch.randn(
            most_rows, config.hidden_size, generator=generator, dtype=torch.float32, device="cpu"
        )
        size = CONTEXT + most_rows
        self._cache = new_cache(config, 1, size, size)
        lane = self._cache.allocate()
        assert lane is not None and self._cache.reserve(lane, size)

    @property
    def weight_bytes(self) -> int:
        """Weights read in a step, in bytes."""
        return self._layers.weight_bytes

    @torch.inference_mode()
    def step(self, rows: int) -> torch.Tensor:
        """Computes so many rows behind the context. Returns their states, [rows, H]."""
        rope = self._rope.at(torch.arange(CONTEXT, CONTEXT + rows, dtype=torch.int64, device="cpu"))
        segments = (Segment(0, 0, rows, CONTEXT),)
        end = self._config.num_layers
        return self._layers.run(self._hidden[:rows], rope, segments, 0, end, self._cache, {}, None)
