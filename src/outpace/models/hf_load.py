"""Models of transformers from files: what the lean decoder does not run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from outpace.errors import CheckpointError, UnsupportedModel
from outpace.models.hf import TransformersModel
from outpace.models.hf_probe import refuse_by_config
from outpace.models.hf_rows import require_possible
from outpace.models.load import LoadedFiles
from outpace.models.precision import Precision

__all__ = ["TransformersFiles"]


@dataclass(frozen=True, slots=True)
class TransformersFiles:
    """A model that transformers knows, looked at without its weights.

    Args:
        files: its files.
        num_parameters: its weights, each counted once.
        cache_bytes_per_token: memory of one position's keys and values, float32, as far as the config tells.
        allow_pickle: read `.bin` weights if there are no safetensors.
        trust_remote_code: run Python code shipped with the model.
    """

    files: LoadedFiles
    num_parameters: int
    cache_bytes_per_token: int
    allow_pickle: bool
    trust_remote_code: bool

    @classmethod
    def open(cls, files: LoadedFiles, *, allow_pickle: bool, trust_remote_code: bool) -> TransformersFiles:
        """Makes the model without memory for weights, to see whether it is one of the possible.

        Raises:
            UnsupportedModel: transformers does not know it as a causal language model, or it is refused by its config.
        """
        options = {"local_files_only": True, "trust_remote_code": trust_remote_code}
        try:
            config = AutoConfig.from_pretrained(files.folder, **options)
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
        except (ValueError, KeyError, TypeError, AttributeError, OSError, ImportError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UnsupportedModel(
                f"{files.label} ({files.config.get('model_type')}) is not one of the causal language models that "
                f"transformers makes here: {reason}"
            ) from error
        refuse_by_config(model)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            files,
            num_parameters=sum(weight.numel() for weight in model.parameters()),
            cache_bytes_per_token=2 * 4 * config.num_hidden_layers * heads * dim,
            allow_pickle=allow_pickle,
            trust_remote_code=trust_remote_code,
        )

    def estimate_bytes(self, precision: Precision) -> int:
        """Memory that loading takes: the weights as stored, and packed copies of them beside them.

        Raises:
            InvalidParameter: a precision that products of these models are not computed in.
        """
        require_possible(precision)
        stored = max((dtype.itemsize for dtype in self.files.checkpoint.dtypes.values()), default=4)
        if precision.dtype != "auto":
            stored = getattr(torch, precision.dtype).itemsize
        packed = 34 / 32 if precision.quantization == "int8" else stored
        return int(self.num_parameters * (stored + packed))

    def load(self, precision: Precision, max_model_len: int | None) -> TransformersModel:
        """The model with its weights, checked.

        Raises:
            CheckpointError: weights are missing, of other shapes, or cannot be read.
            OutpaceError: see `TransformersModel`.
        """
        dtype = precision.dtype if precision.dtype == "auto" else getattr(torch, precision.dtype)
        options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": self.trust_remote_code}
        if not self.allow_pickle:
            options["use_safetensors"] = True
        try:
            with _without_progress_bar():
                model, report = AutoModelForCausalLM.from_pretrained(
                    self.files.folder, dtype=dtype, output_loading_info=True, **options
                )
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise CheckpointError(f"{self.files.folder}: transformers cannot load it ({error})") from error
        for fault in ("missing_keys", "mismatched_keys"):
            if report.get(fault):
                names = ", ".join(sorted(map(str, report[fault]))[:3])
                raise CheckpointError(f"{self.files.folder}: {fault.replace('_keys', '')} tensors: {names}")
        return TransformersModel(
            model.eval().requires_grad_(False),
            vocab_size=self.files.tokenizer.vocab_size,
            max_model_len=max_model_len,
            precision=Precision(precision.quantization, "auto", precision.kernels),
        )


@contextlib.contextmanager
def _without_progress_bar() -> Iterator[None]:
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
