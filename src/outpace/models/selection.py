"""Which kernels and numbers a model gets from settings that leave it open."""

from __future__ import annotations

from collections.abc import Iterator

from outpace.config import EngineConfig
from outpace.errors import InvalidParameter
from outpace.models.checkpoint import Checkpoint
from outpace.models.files import format_bytes
from outpace.models.linear import has_int8
from outpace.models.memory import estimate_bytes
from outpace.models.native.library import why_unavailable
from outpace.models.precision import Precision

__all__ = ["precision_notes", "select_precision"]


def select_precision(config: EngineConfig, checkpoint: Checkpoint) -> Precision:
    """Resolves what the settings leave automatic, for one model.

    Native kernels where they run, else torch's. Natively a file that is quantised is computed as it is stored, any
    other in int8; on torch int8 where there is a kernel for it.

    Raises:
        InvalidParameter: kernels that do not run here, or a combination that they do not know.
    """
    reason = why_unavailable()
    if config.kernels == "native" and reason is not None:
        raise InvalidParameter(f"kernels='native' is not possible: {reason}; use kernels='torch'")
    kernels = "torch" if config.kernels == "torch" or reason is not None else "native"
    quantization = config.quantization
    if quantization == "auto":
        if config.dtype != "auto":
            quantization = "none"
        elif kernels == "torch":
            quantization = "int8" if has_int8() else "none"
        else:
            quantization = "file" if checkpoint.kinds else "int8"
    if reason is not None and quantization in ("file", "int4"):
        raise InvalidParameter(
            f"quantization={quantization!r} needs the native kernels, which do not run here ({reason}); "
            "without them: int8 or none"
        )
    return Precision(quantization, config.dtype, kernels)


def precision_notes(label: str, checkpoint: Checkpoint, precision: Precision) -> Iterator[str]:
    """What a user should know about the numbers and kernels that were chosen for a model, in sentences."""
    if precision.kernels == "torch":
        yield (
            f"{label} runs on torch's own kernels: a step of several tokens costs several steps of one, so speculation "
            "may not pay"
        )
    elif precision.quantization in ("int8", "none") and checkpoint.kinds:
        used, stored = (
            format_bytes(estimate_bytes(checkpoint, item)) for item in (precision, Precision("file", "auto", "native"))
        )
        yield f"{label} takes {used} in this precision; quantization='file', its blocks as stored, takes {stored}"
