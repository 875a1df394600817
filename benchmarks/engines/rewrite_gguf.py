"""A GGUF file with tensors of types that a reader does not know stored in Q8_0 instead.

    python benchmarks/engines/rewrite_gguf.py MODEL.gguf OUT.gguf

OpenVINO GenAI reads F16, F32, Q4_0, Q4_1, Q8_0, Q4_K and Q6_K; files of small models hold Q5_0 too, as rows that are no
multiple of 256 cannot be stored in K types. Q8_0 keeps Q5_0 values to 0.4 % of a block's largest.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np

__all__ = ["READABLE", "rewrite", "unreadable_types"]

_TYPE = gguf.GGMLQuantizationType
READABLE = frozenset({_TYPE.F16, _TYPE.F32, _TYPE.Q4_0, _TYPE.Q4_1, _TYPE.Q8_0, _TYPE.Q4_K, _TYPE.Q6_K})


def unreadable_types(path: Path) -> list[str]:
    """Names of the types in a file that OpenVINO GenAI does not read, sorted."""
    return sorted({tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors} - {t.name for t in READABLE})


def rewrite(source: Path, target: Path) -> None:
    """Writes `target` with all of `source`, unreadable tensors in Q8_0. It appears only when it is complete."""
    reader = gguf.GGUFReader(source)
    partial = target.with_name(target.name + ".partial")
    architecture = str(reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(partial, architecture)
    for name, field in reader.fields.items():
        if name == "general.architecture" or name.startswith("GGUF."):
            continue  # the writer puts these itself
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=inner)
    readable = [tensor.tensor_type in READABLE for tensor in reader.tensors]
    for tensor, keep in zip(reader.tensors, readable, strict=True):
        shape, kind = tensor.data.shape, tensor.tensor_type
        if not keep:
            kind = _TYPE.Q8_0
            rows = [int(size) for size in reversed(tensor.shape)]
            shape = gguf.quant_shape_to_byte_shape(rows, kind)
        size = int(np.prod(shape)) * tensor.data.dtype.itemsize
        writer.add_tensor_info(tensor.name, shape, tensor.data.dtype, size, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor, keep in zip(reader.tensors, readable, strict=True):
        writer.write_tensor_data(tensor.data if keep else _as_q8(tensor))
    writer.close()
    partial.rename(target)


def _as_q8(tensor: gguf.ReaderTensor) -> np.ndarray:
    values = gguf.dequantize(tensor.data, tensor.tensor_type)
    packed: np.ndarray = gguf.quantize(values, _TYPE.Q8_0)
    return packed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    args = parser.parse_args()
    rewrite(args.source, args.target)


if __name__ == "__main__":
    main()
