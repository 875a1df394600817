"""MTP layers in checkpoints, found and checked before a weight is loaded: nothing missing, nothing of another model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outpace.errors import CheckpointError, UnsupportedModel
from outpace.models.checkpoint import Checkpoint, read_json
from outpace.models.config import DecoderConfig
from outpace.models.mtp_config import (
    MTP_TYPES,
    layer_tensors,
    mtp_layer,
    mtp_prefix,
    mtp_tensors,
    names_mtp_layers,
    stores_mtp,
)

__all__ = ["MtpFiles", "has_own_mtp", "open_mtp", "read_mtp", "why_no_mtp"]


@dataclass(frozen=True, slots=True)
class MtpFiles:
    """A checkpoint's MTP layer, checked; its matrices are not in memory yet.

    Args:
        layer: its shape.
        weights: its tensors under the names of `layer_tensors`.
        source: the config.json that describes it.
    """

    layer: DecoderConfig
    weights: Checkpoint
    source: Path

    def check_target(self, target: DecoderConfig) -> None:
        """Raises CheckpointError if it came with a model of another shape: embedding and head are the target's."""
        for what in ("hidden_size", "vocab_size", "rms_norm_eps"):
            own, other = getattr(self.layer, what), getattr(target, what)
            if not math.isclose(own, other, rel_tol=1e-6):  # a GGUF file rounds its epsilon to float32
                raise CheckpointError(
                    f"{self.source}: its MTP layer goes with a model of {what} {own}; this one has {other}"
                )


def open_mtp(folder: Path, *, allow_pickle: bool = False) -> MtpFiles:
    """The MTP layer in a folder of a whole checkpoint, or of its MTP tensors alone.

    Raises:
        CheckpointError: a file is damaged, or the MTP layer is not whole; names file and tensor.
        UnsupportedModel: there is none, or one that outpace does not run.
    """
    if not folder.is_dir():
        raise UnsupportedModel(f"{folder}: MTP layers are read from a folder with config.json and safetensors alone")
    return read_mtp(read_json(folder / "config.json"), Checkpoint.open(folder, allow_pickle=allow_pickle), folder)


def read_mtp(keys: Mapping[str, Any], stored: Checkpoint, folder: Path) -> MtpFiles:
    """The MTP layer among these tensors.

    Args:
        keys: the parsed config.json.
        stored: all tensors; those of the decoder are nobody's concern here.
        folder: of the config, for messages.

    Raises:
        CheckpointError: a tensor of it is missing, unknown, or of another shape; names file and tensor.
        UnsupportedModel: there is none, or one that outpace does not run.
    """
    source, reason = folder / "config.json", why_no_mtp(keys)
    if reason is not None:
        raise UnsupportedModel(f"{source}: {reason}")
    shape = DecoderConfig.from_hf(keys, source)
    of_layers = mtp_prefix(0).rpartition("0.")[0]
    found = {name: name for name in stored.shapes if name.startswith(of_layers)}
    if not found:
        raise CheckpointError(
            f"{stored.source} holds no tensor {of_layers}*, though config.json says "
            f"num_nextn_predict_layers={shape.mtp_layers}: a converted copy loses them, take the original checkpoint"
        )
    stored.select(found).check(mtp_tensors(shape))
    own = {name: mtp_prefix(0) + name for name in layer_tensors(shape)}
    return MtpFiles(mtp_layer(shape), stored.select(own), source)


def has_own_mtp(shape: DecoderConfig | None, stored: Checkpoint) -> bool:
    """Whether a target's checkpoint has an MTP layer that can be run; None is a target on transformers' layers."""
    return shape is not None and stores_mtp(shape, stored.shapes)


def why_no_mtp(keys: Mapping[str, Any]) -> str | None:
    """Why the checkpoint of this config has no MTP layer that can be run, or None if it may have one."""
    kind = keys.get("model_type")
    if not names_mtp_layers(keys):
        return "the checkpoint has no multi-token-prediction layer (no num_nextn_predict_layers in its config)"
    if kind not in MTP_TYPES:
        return (
            f"multi-token-prediction layers of model type {kind!r} are not supported; supported: {', '.join(MTP_TYPES)}"
        )
    count = keys.get("num_nextn_predict_layers")
    if count != 1:
        return f"it says num_nextn_predict_layers={count!r}; one layer is run, applied again for every further token"
    return None
