"""In which numbers a model computes, and on whose kernels."""

from __future__ import annotations

from dataclasses import dataclass

from outpace.errors import InvalidParameter

__all__ = ["Precision"]

_NATIVE_ONLY = ("int4", "file")


@dataclass(frozen=True, slots=True)
class Precision:
    """What a decoder is built for; everything resolved, nothing automatic.

    Args:
        quantization: of the linear layers: int8, int4, file (as the file stores each matrix), or none.
        dtype: of weights that are not quantised: auto (as stored), float32, float16 or bfloat16. Products are
            computed in float32 whatever it is.
        kernels: native or torch. Torch's know int8 and float32.

    Raises:
        InvalidParameter: a combination that there is not.
    """

    quantization: str = "none"
    dtype: str = "auto"
    kernels: str = "native"

    def __post_init__(self) -> None:
        if self.kernels == "torch" and self.quantization in _NATIVE_ONLY:
            raise InvalidParameter(
                f"quantization={self.quantization!r} needs the native kernels; with kernels='torch': int8 or none"
            )
        if self.kernels == "torch" and self.dtype not in ("auto", "float32"):
            raise InvalidParameter(f"dtype={self.dtype!r} needs the native kernels; with kernels='torch': float32")
        if self.quantization != "none" and self.dtype != "auto":
            raise InvalidParameter(
                f"dtype={self.dtype!r} goes with quantization='none', not with {self.quantization!r}"
            )

    def describe(self) -> str:
        """In a few words, for people."""
        if self.kernels == "torch":
            return "int8 (7-bit weights, 8-bit activations, torch's kernels)" if self.quantization == "int8" else "fp32"
        stored = {"auto": "weights as stored, blocks in fp32", "float32": "fp32 weights"}
        return {
            "int8": "int8 (8-bit weights, 16-bit activations)",
            "int4": "int4 (4-bit weights, 8-bit activations; 8-bit head)",
            "file": "as the file is quantised (4- to 6-bit blocks with their numbers, others in 8 bits)",
            "none": f"not quantised ({stored.get(self.dtype, f'{self.dtype} weights')}, fp32 products)",
        }[self.quantization]
