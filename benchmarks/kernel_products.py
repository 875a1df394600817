"""Matrix products of the layers of a 1.5B model on every kernel at hand, for kernels.py.

Each kernel gets as many layers of random weights as lie well beyond the last-level cache, so that memory is what is
read. Query, key and value are one matrix here, gate and up another: an engine may multiply them so.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from outpace.doctor.machine import last_level_cache_bytes
from outpace.doctor.sample import sample_config
from outpace.models.linear import Int8Linear, PrepackedLinear, has_int8
from outpace.models.native.layers import NativeHead
from outpace.models.native.library import why_unavailable
from outpace.models.native.matrix import PackedMatrices, Stored, format_of
from outpace.models.precision import Precision

SHAPES = ((2048, 1536), (1536, 1536), (17920, 1536), (1536, 8960))
"""[outputs, inputs] of the matrices of a layer: query with key and value, out, gate with up, down."""
_LEAST_BYTES = 280_000_000
_BLOCK = 32  # weights that share a scale in onnxruntime's 4-bit matrices

Apply = Callable[[torch.Tensor], object]
"""Multiplies rows [R, inputs] with one matrix."""


@dataclass(frozen=True)
class Product:
    """The layers of one kernel.

    Args:
        name: the kernel and its precision.
        bytes_read: of all weights.
        weights: how many they are.
        layers: for each matrix of each layer what multiplies with it, and its number of inputs.
    """

    name: str
    bytes_read: int
    weights: int
    layers: tuple[tuple[Apply, int], ...]

    def run(self, inputs: Mapping[int, torch.Tensor], rows: int) -> None:
        """Multiplies the first rows of the inputs, by their width, with every matrix once."""
        for apply, width in self.layers:
            apply(inputs[width][:rows])


def all_products(
    threads: int, shapes: tuple[tuple[int, int], ...] = SHAPES, least_bytes: int | None = None
) -> list[Product]:
    """Every kernel that runs here, with its weights in memory.

    Args:
        threads: for kernels that do not take torch's number.
        shapes: [outputs, inputs] of the matrices of a layer.
        least_bytes: weights of a kernel at least; None: well beyond the last-level cache.
    """
    generator = torch.Generator().manual_seed(0)
    matrices = [torch.randn(shape, generator=generator) * shape[1] ** -0.5 for shape in shapes]
    least = least_bytes or max(_LEAST_BYTES, 2 * (last_level_cache_bytes() or 0))
    makers: dict[str, Callable[[torch.Tensor], tuple[Apply, int]]] = {}
    if why_unavailable() is None:
        for name, precision in (
            ("native f32", Precision(dtype="float32")),
            ("native f16", Precision(dtype="float16")),
            ("native int8", Precision("int8")),
            ("native int4", Precision("int4")),
        ):
            makers[name] = lambda weight, precision=precision: _native(weight, precision)
    makers["torch f32"] = lambda weight: _torch(weight.clone())
    makers["torch bf16"] = lambda weight: _torch(weight.bfloat16())
    makers["oneDNN f32"] = lambda weight: _packed(PrepackedLinear(weight, None))
    if has_int8():
        makers["fbgemm int8"] = lambda weight: _packed(Int8Linear(weight, None))
    products = [_repeat(name, make, matrices, least) for name, make in makers.items()]
    if all(importlib.util.find_spec(name) for name in ("onnxruntime", "onnx")):
        products.append(_onnxruntime_int4(shapes, least, threads))
    return products


def _repeat(
    name: str, make: Callable[[torch.Tensor], tuple[Apply, int]], matrices: list[torch.Tensor], least_bytes: int
) -> Product:
    """Layers until they have so many bytes, each with matrices of its own."""
    layers: list[tuple[Apply, int]] = []
    read = count = 0
    while read < least_bytes:
        for weight in matrices:
            apply, num_bytes = make(weight)
            layers.append((apply, weight.shape[1]))
            read += num_bytes
            count += weight.numel()
    return Product(name, read, count, tuple(layers))


def _native(weight: torch.Tensor, precision: Precision) -> tuple[Apply, int]:
    source = SimpleNamespace(shapes={"w": tuple(weight.shape)}, get=lambda name: weight, blocks=lambda name: None)
    stored = Stored.find(source, "w")
    packed = PackedMatrices([(stored, format_of(precision, stored.source, blocks=False), None)])
    config = replace(sample_config(), hidden_size=weight.shape[1])
    return NativeHead(config, torch.ones(weight.shape[1]), packed, "").logits, packed.weight_bytes


def _torch(weight: torch.Tensor) -> tuple[Apply, int]:
    return lambda rows: F.linear(rows.to(weight.dtype), weight), weight.nbytes


def _packed(linear: PrepackedLinear | Int8Linear) -> tuple[Apply, int]:
    return linear, linear.weight_bytes


def _onnxruntime_int4(shapes: tuple[tuple[int, int], ...], least_bytes: int, threads: int) -> Product:
    """All layers as one graph of MatMulNBits, so that one pool of threads computes them."""
    import numpy as np
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    each = sum(prod(shape) // 2 + 4 * prod(shape) // _BLOCK for shape in shapes)
    layers = -(-least_bytes // each)
    random = np.random.default_rng(0)
    nodes, constants, outputs = [], [], []
    for number, (width, inputs) in enumerate(shapes * layers):
        packed = random.integers(0, 256, (width, inputs // _BLOCK, _BLOCK // 2), dtype=np.uint8)
        scales = np.full(width * inputs // _BLOCK, 0.01, np.float32)
        constants += [numpy_helper.from_array(packed, f"w{number}"), numpy_helper.from_array(scales, f"s{number}")]
        names = [f"x{inputs}", f"w{number}", f"s{number}"]
        settings = {"K": inputs, "N": width, "bits": 4, "block_size": _BLOCK, "accuracy_level": 4}
        nodes.append(helper.make_node("MatMulNBits", names, [f"y{number}"], domain="com.microsoft", **settings))
        outputs.append(helper.make_tensor_value_info(f"y{number}", TensorProto.FLOAT, ["rows", width]))
    widths = sorted({inputs for _, inputs in shapes})
    entries = [helper.make_tensor_value_info(f"x{width}", TensorProto.FLOAT, ["rows", width]) for width in widths]
    graph = helper.make_graph(nodes, "products", entries, outputs, constants)
    versions = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    model = helper.make_model(graph, opset_imports=versions, ir_version=9)
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

    def apply(rows: torch.Tensor) -> None:
        # Only the widest input is handed over; the others are its first columns.
        wide = rows.numpy()
        session.run(None, {f"x{width}": np.ascontiguousarray(wide[:, :width]) for width in widths})

    weights = layers * sum(map(prod, shapes))
    return Product("onnxruntime int4", layers * each, weights, ((apply, widths[-1]),))
