"""A model's files, checked before any weight is loaded, and what they are loaded into."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outpace.config import EngineConfig
from outpace.errors import UnsupportedModel
from outpace.models.config import DecoderConfig
from outpace.models.decoder import Decoder
from outpace.models.load import LoadedFiles, estimate_bytes, load_files
from outpace.models.precision import Precision
from outpace.models.probe import ProbeReport, probe_rows, same_bits
from outpace.models.selection import precision_notes, select_precision

if TYPE_CHECKING:
    from outpace.models.hf import TransformersModel
    from outpace.models.hf_load import TransformersFiles

__all__ = ["Notify", "Progress", "Source", "probe_target", "same_target_bits"]

Notify = Callable[[str], None]
"""Takes a line for people: what is being done, or what was found."""
Progress = Callable[[str, int, int], None]
"""Takes (what, done, total) of a long step."""


@dataclass(frozen=True, slots=True)
class Source:
    """A model that can be loaded.

    Args:
        files: its files.
        shape: of the lean decoder; None for a model that runs on transformers' layers.
        adapted: the model on transformers' layers, where it runs on those.
        precision: of its weights.
        num_bytes: memory it will take.
    """

    files: LoadedFiles
    shape: DecoderConfig | None
    adapted: TransformersFiles | None
    precision: Precision
    num_bytes: int

    @classmethod
    def open(cls, name: str, config: EngineConfig, notify: Notify) -> Source:
        """Finds a model and looks whether it can be run.

        Raises:
            OutpaceError: it cannot be found, read or run; says why.
        """
        files = load_files(
            name, allow_pickle=config.allow_pickle, trust_remote_code=config.trust_remote_code, notify=notify
        )
        precision = select_precision(config, files.checkpoint)
        try:
            shape = files.checked_shape()
        except UnsupportedModel as error:
            return cls._open_adapted(files, config, precision, error, notify)
        for note in precision_notes(files.label, files.checkpoint, precision):
            notify(note)
        return cls(files, shape, None, precision, estimate_bytes(files.decoder_weights(shape), precision))

    @classmethod
    def _open_adapted(
        cls, files: LoadedFiles, config: EngineConfig, precision: Precision, refusal: UnsupportedModel, notify: Notify
    ) -> Source:
        """A model that the lean decoder refused, on transformers' layers."""
        if files.checkpoint.kinds or "quantization_config" in files.config:
            raise refusal  # blocks and packed weights are for the lean decoder alone
        from outpace.models.hf_load import TransformersFiles  # most models do not need transformers, which loads slowly

        adapted = TransformersFiles.open(
            files, allow_pickle=config.allow_pickle, trust_remote_code=config.trust_remote_code
        )
        notify(f"{files.label} runs on transformers' layers, slower than outpace's own ({refusal})")
        return cls(files, None, adapted, precision, adapted.estimate_bytes(precision))

    @property
    def cache_bytes_per_token(self) -> int:
        """Memory of one position's keys and values."""
        if self.adapted is not None:
            return self.adapted.cache_bytes_per_token
        assert self.shape is not None
        return self.shape.cache_bytes_per_token

    @property
    def num_parameters(self) -> int:
        """Weights, each counted once."""
        if self.adapted is not None:
            return self.adapted.num_parameters
        assert self.shape is not None
        return self.files.num_parameters(self.shape)

    def cache_bytes(self, config: EngineConfig) -> int:
        """Memory of the cache asked for; 0 if it is to take what is free."""
        return (config.cache_tokens or 0) * self.cache_bytes_per_token

    def load(self, config: EngineConfig, max_model_len: int | None, progress: Progress) -> Decoder | TransformersModel:
        """The model with its weights.

        Raises:
            OutpaceError: its weights are damaged, or it fails the checks of `models.hf`.
        """
        if self.adapted is not None:
            progress(f"loading {self.files.label}", 0, 1)
            model = self.adapted.load(self.precision, max_model_len)
            progress(f"loading {self.files.label}", 1, 1)
            return model
        assert self.shape is not None
        return Decoder(
            self.shape,
            self.files.checkpoint,
            precision=self.precision,
            vocab_size=self.files.tokenizer.vocab_size,
            max_model_len=max_model_len,
            progress=lambda done, total: progress(f"loading {self.files.label}", done, total),
        )


def probe_target(target: Decoder | TransformersModel, progress: Progress) -> ProbeReport:
    """Looks whether rows keep their bits, on the way that the model's layers allow."""

    def step_done(done: int, total: int) -> None:
        progress("checking that rows are independent", done, total)

    if isinstance(target, Decoder):
        return probe_rows(target, step_done)
    from outpace.models import hf_bits

    return hf_bits.probe_rows(target, step_done)


def same_target_bits(target: Decoder | TransformersModel, report: ProbeReport) -> bool:
    """Whether the threads in use now give rows the bits they had in the report."""
    if isinstance(target, Decoder):
        return same_bits(target, report)
    from outpace.models import hf_bits

    return hf_bits.same_bits(target, report)
