"""Which model something was made for: what data, states and checkpoints of a run belong to."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Any

from outpace.errors import CheckpointError
from outpace.models.config import DecoderConfig
from outpace.models.load import LoadedFiles

__all__ = ["Identity"]


def _sampled(num_layers: int) -> tuple[str, ...]:
    """Tensors that tell a model from its finetunes; adapters that were merged into it change queries and values."""
    middle = f"model.layers.{num_layers // 2}."
    return ("model.norm.weight", f"{middle}self_attn.q_proj.weight", f"{middle}self_attn.v_proj.weight")


@dataclass(frozen=True, slots=True)
class Identity:
    """A target, by what training depends on.

    Args:
        model: its name for people.
        tokenizer: hash of what token ids mean.
        vocab_size: ids the tokenizer knows.
        hidden_size: width of its states.
        num_layers: its layers.
        weights: hash of names and shapes of its weights, and of some of them.
    """

    model: str
    tokenizer: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    weights: str

    @classmethod
    def of(cls, files: LoadedFiles, shape: DecoderConfig) -> Identity:
        """The identity of a model on disk."""
        digest = hashlib.sha256(repr(sorted(files.checkpoint.shapes.items())).encode())
        for name in _sampled(shape.num_layers):
            digest.update(files.checkpoint.get(name).float().numpy().tobytes())
        return cls(
            model=files.label,
            tokenizer=hashlib.sha256(files.tokenizer.to_json().encode()).hexdigest(),
            vocab_size=files.tokenizer.vocab_size,
            hidden_size=shape.hidden_size,
            num_layers=shape.num_layers,
            weights=digest.hexdigest(),
        )

    def as_dict(self) -> dict[str, Any]:
        """JSON-able; `require` takes it back."""
        return asdict(self)

    def require(self, other: object, place: str, *, weights: bool = True) -> None:
        """Makes sure that something was made for this target.

        Args:
            other: what `as_dict` gave when it was made.
            place: the file, for messages.
            weights: whether the same tokenizer is not enough.

        Raises:
            CheckpointError: it was made for another target, or says nothing that can be read.
        """
        if not isinstance(other, dict):
            raise CheckpointError(f"{place}: it does not say which model it was made for: make it again")
        names = asdict(self) if weights else ("tokenizer", "vocab_size")
        for name in names:
            if name != "model" and other.get(name) != getattr(self, name):
                found, own = (str(value)[:12] for value in (other.get(name), getattr(self, name)))
                raise CheckpointError(
                    f"{place} was made for {other.get('model')} ({name} {found}), not for {self.model} ({own}): "
                    "name that model, or another folder"
                )
