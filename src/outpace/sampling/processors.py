"""Logits processors: code of the caller, kept away from everything that is ours."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from outpace.checks import num_arguments
from outpace.errors import OutpaceError
from outpace.params import LogitsProcessor
from outpace.sampling.stage import NEVER, Floats, History

__all__ = ["Processor", "takes_prompt"]


def takes_prompt(function: LogitsProcessor) -> bool:
    """Whether it is f(prompt_ids, output_ids, logits) rather than f(output_ids, logits)."""
    return num_arguments(function) == 3


class Processor:
    """One logits processor as a stage.

    It gets copies: a float32 torch tensor [V] and lists, which it may change or keep. What it returns is copied too.
    Tokens that are banned before it stay banned, so that it cannot bring back what other parameters exclude.
    """

    name = "logits_processors"

    def __init__(self, function: LogitsProcessor) -> None:
        self._function = function
        self._shown = _name(function)
        self._takes_prompt = takes_prompt(function)

    def apply(self, values: Floats, history: History) -> None:
        if not values.max() < np.inf:  # the model's own NaN or +inf is no fault of the caller's: the choice reports it
            return
        banned = values == NEVER
        values[:] = self._run(values, history)
        values[banned] = NEVER

    def _run(self, values: Floats, history: History) -> Floats:
        ids = ([*history.prompt], history.output()) if self._takes_prompt else (history.output(),)
        try:
            # An ordinary tensor, not one of inference mode: it may be changed at any time, in any mode.
            with torch.inference_mode(False), torch.no_grad():
                result = self._function(*ids, torch.tensor(values, dtype=torch.float32, device="cpu"))
                problem = _problem(result, values.shape)
                if problem is None:
                    changed: Floats = result.detach().to("cpu", torch.float32).numpy()
        except Exception as error:  # the caller's code may raise anything
            raise self._error(history, f"{type(error).__name__}: {_text_of(error)}") from error
        if problem is None and not changed.max() < np.inf:
            problem = "the logits it returned have " + ("NaN" if np.isnan(changed).any() else "+inf")
        if problem is not None:
            raise self._error(history, problem)
        return changed

    def _error(self, history: History, problem: str) -> OutpaceError:
        return OutpaceError(f"logits processor {self._shown} failed at position {history.position}: {problem}")


def _problem(result: Any, shape: tuple[int, ...]) -> str | None:
    if not isinstance(result, torch.Tensor):
        returned = type(result).__name__
    elif tuple(result.shape) != shape or not result.is_floating_point():
        returned = f"a tensor of shape {list(result.shape)} and type {result.dtype}"
    else:
        return None
    return f"it returned {returned}, and must return a float tensor of shape {list(shape)}"


def _text_of(error: Exception) -> str:
    """What an error of the caller's says, if its own code can say it."""
    try:
        return str(error)
    except Exception:  # of the caller's class; the request's error names it all the same
        return "(its message cannot be shown)"


def _name(function: LogitsProcessor) -> str:
    """For messages; taken when the request is made, because the caller's code may answer with anything."""
    try:
        named = getattr(function, "__qualname__", None)
    except Exception:  # of the caller's class
        named = None
    return named if isinstance(named, str) else type(function).__name__
