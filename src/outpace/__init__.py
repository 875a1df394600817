"""outpace: lossless speculative decoding for people who run language models themselves.

    from outpace import LLM, SamplingParams

    llm = LLM("smollm2-135m", speculative_config="ngram")
    print(llm.generate("Once upon a time", SamplingParams(max_tokens=64))[0].text)

Settings and errors come at once; what needs torch is imported when it is first asked for, so that the command line
answers `--help` and bad options without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from outpace.config import EngineConfig, SpeculativeConfig
from outpace.errors import (
    BadInput,
    CheckpointError,
    InvalidParameter,
    InvalidPrompt,
    ModelNotFound,
    OutOfMemory,
    OutpaceError,
    QueueFull,
    RequestCutOff,
    RequestFailed,
    Unavailable,
    UnsupportedModel,
    VocabularyMismatch,
)
from outpace.params import SamplingParams, SpeculationParams
from outpace.structured import StructuredOutputs

if TYPE_CHECKING:
    from outpace.accelerated.model import AcceleratedModel, accelerate
    from outpace.async_llm import AsyncLLM
    from outpace.engine.outputs import CompletionOutput, Logprob, Piece, RequestOutput, RequestStats, StreamChunk
    from outpace.llm import LLM

__all__ = [
    "LLM",
    "AcceleratedModel",
    "AsyncLLM",
    "BadInput",
    "CheckpointError",
    "CompletionOutput",
    "EngineConfig",
    "InvalidParameter",
    "InvalidPrompt",
    "Logprob",
    "ModelNotFound",
    "OutOfMemory",
    "OutpaceError",
    "Piece",
    "QueueFull",
    "RequestCutOff",
    "RequestFailed",
    "RequestOutput",
    "RequestStats",
    "SamplingParams",
    "SpeculationParams",
    "SpeculativeConfig",
    "StreamChunk",
    "StructuredOutputs",
    "Unavailable",
    "UnsupportedModel",
    "VocabularyMismatch",
    "__version__",
    "accelerate",
]

_LAZY = {
    "LLM": "outpace.llm",
    "AcceleratedModel": "outpace.accelerated.model",
    "AsyncLLM": "outpace.async_llm",
    "accelerate": "outpace.accelerated.model",
    "CompletionOutput": "outpace.engine.outputs",
    "Logprob": "outpace.engine.outputs",
    "Piece": "outpace.engine.outputs",
    "RequestOutput": "outpace.engine.outputs",
    "RequestStats": "outpace.engine.outputs",
    "StreamChunk": "outpace.engine.outputs",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        # Imported here: it takes most of the time this package needs before the command line can answer.
        value: Any = import_module("importlib.metadata").version("outpace")
    elif name in _LAZY:
        value = getattr(import_module(_LAZY[name]), name)
    else:
        raise AttributeError(f"module 'outpace' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
