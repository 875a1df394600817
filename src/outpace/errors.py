"""The one exception tree.

    OutpaceError              exit code 1, HTTP 500
    ├── BadInput              exit code 2, HTTP 400: what the caller sent cannot be done as asked
    │   ├── InvalidParameter  a sampling or engine parameter outside its range
    │   ├── InvalidPrompt     an empty prompt, or one longer than the context
    │   ├── ModelNotFound     no such model id, folder, file or alias
    │   └── VocabularyMismatch  the draft model's vocabulary is not the target's
    ├── CheckpointError       weights that are damaged, incomplete or not what the config says
    ├── UnsupportedModel      an architecture or feature that outpace does not run
    ├── OutOfMemory           the model or its cache would not fit
    ├── QueueFull             HTTP 429: too many requests wait already; has `retry_after`
    ├── Unavailable           HTTP 503: no requests are taken: not started, draining, closed, or stopped by a fault
    └── RequestFailed         HTTP 500: this request failed inside the engine; the others were not touched
        └── RequestCutOff     HTTP 503: the engine was closed before this request was complete

Every message names the value, the limit and what would work, in one or two lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = [
    "BadInput",
    "CheckpointError",
    "InvalidParameter",
    "InvalidPrompt",
    "ModelNotFound",
    "OutOfMemory",
    "OutpaceError",
    "QueueFull",
    "RequestCutOff",
    "RequestFailed",
    "Unavailable",
    "UnsupportedModel",
    "VocabularyMismatch",
]


class OutpaceError(Exception):
    """Root of everything outpace raises on purpose."""

    exit_code = 1


class BadInput(OutpaceError):
    """The caller asked for something that cannot be done as asked."""

    exit_code = 2


class InvalidParameter(BadInput, ValueError):
    """A parameter is outside its range, or two contradict each other."""


class InvalidPrompt(BadInput, ValueError):
    """A prompt is empty, or does not fit the model's context."""


class ModelNotFound(BadInput):
    """No model goes by this id, alias, folder or file name."""


class VocabularyMismatch(BadInput):
    """A draft model's tokens do not mean what the target's tokens mean."""


class CheckpointError(OutpaceError):
    """A file of weights is damaged, incomplete, or does not match its config."""


class UnsupportedModel(OutpaceError):
    """The architecture, or something it needs, is not one that outpace runs."""


class OutOfMemory(OutpaceError):
    """The model or its cache would not fit into this machine's memory."""


class QueueFull(OutpaceError):
    """Too many requests wait already: ask again later.

    Args:
        message: for people.
        retry_after: seconds after which a place may be free, an estimate.
    """

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Unavailable(OutpaceError):
    """No requests are taken: the engine was not started, is being drained, is closed, or was stopped by a fault."""


class RequestFailed(OutpaceError):
    """This request failed inside the engine, or ended because the engine did.

    Args:
        outputs: of `LLM.generate`, one a prompt: those that did not fail, None for those that did.
    """

    def __init__(self, message: str, outputs: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.outputs = list(outputs)


class RequestCutOff(RequestFailed):
    """The engine was closed before this request was complete: nothing is wrong with it, and it may be made again."""
