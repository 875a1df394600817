"""Names of precisions in benchmarks: file, int8, int4, float32, float16, bfloat16, torch-int8, torch-float32."""

from __future__ import annotations

from outpace.config import DTYPES, EngineConfig


def engine_config(model: str, precision: str) -> EngineConfig:
    """Settings for a precision's name: a quantization, a dtype, or one of these after "torch-".

    Raises:
        InvalidParameter: there is no such precision.
    """
    kernels, _, name = precision.rpartition("-")
    known = {"dtype": name} if name in DTYPES and name != "auto" else {"quantization": name}
    return EngineConfig(model, kernels=kernels or "auto", **known)
