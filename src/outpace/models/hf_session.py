"""Borrowing a model of transformers for one forward pass, and giving it back as it was."""

from __future__ import annotations

import contextlib
import inspect
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from outpace.errors import UnsupportedModel

__all__ = ["BorrowedModel"]

_LOCKS: weakref.WeakKeyDictionary[torch.nn.Module, threading.RLock] = weakref.WeakKeyDictionary()
_LOCKS_LOCK = threading.Lock()
_ATTENTION, _EXPERTS = "_attn_implementation_internal", "_experts_implementation_internal"


class BorrowedModel:
    """Runs somebody's model with another attention, in evaluation mode, one pass at a time.

    Args:
        model: stays its owner's; nothing of it is changed but during `logits`.

    Raises:
        UnsupportedModel: weights that are not on the CPU, a forward that cannot be told positions, or a compiled one.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.kind: str = model.config.model_type
        devices = sorted({str(weight.device) for weight in model.parameters()} - {"cpu"})
        if devices:
            raise UnsupportedModel(
                f"{self.kind} on {', '.join(devices)} is not possible: outpace runs models on the CPU"
            )
        parameters = inspect.signature(model.forward).parameters
        if "position_ids" not in parameters:
            raise UnsupportedModel(
                f"{self.kind} is not possible: its forward takes no position_ids, so rows of several requests cannot "
                "stand side by side"
            )
        if getattr(model, "_compiled_call_impl", None) is not None:
            raise UnsupportedModel("a model that was compiled (`model.compile()`) is not possible: pass it uncompiled")
        self._keeps_logits = "logits_to_keep" in parameters
        self._modules = list(model.modules())
        self._configs = list({id(config): config for config in self._all_configs()}.values())
        with _LOCKS_LOCK:
            self._lock = _LOCKS.setdefault(model, threading.RLock())

    def _all_configs(self) -> Iterator[Any]:
        for module in self._modules:
            config = getattr(module, "config", None)
            if hasattr(config, _ATTENTION):
                yield config

    def logits(self, ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor, attention: str) -> torch.Tensor:
        """One pass over rows that are one sequence to the model, whatever they are to its attention.

        Args:
            ids: [R] int64.
            positions: [R] int64.
            wanted: [N] int64 rows, ascending.
            attention: the implementation to run with.

        Returns:
            [N, V] in the model's float type.
        """
        keep = {"logits_to_keep": wanted} if self._keeps_logits else {}
        with self._lock, self._borrowed(attention), torch.no_grad(), torch.autocast("cpu", enabled=False):
            output = self.model(
                input_ids=ids[None], position_ids=positions[None], use_cache=False, return_dict=True, **keep
            )
        logits: torch.Tensor = output.logits[0]
        return logits if len(logits) == len(wanted) else logits[wanted]

    @contextlib.contextmanager
    def _borrowed(self, attention: str) -> Iterator[None]:
        names = [{key: getattr(config, key) for key in (_ATTENTION, _EXPERTS)} for config in self._configs]
        trained = [module for module in self._modules if module.training]
        try:
            for module in trained:
                module.training = False
            for config in self._configs:
                setattr(config, _ATTENTION, attention)
                setattr(config, _EXPERTS, "eager")  # the others mix rows of different requests in one product
            yield
        finally:
            for config, before in zip(self._configs, names, strict=True):
                for key, value in before.items():
                    setattr(config, key, value)
            for module in trained:
                module.training = True
