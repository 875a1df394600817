"""A head that training goes on with: its weights instead of new ones, and the settings that come with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from outpace.errors import CheckpointError, InvalidParameter, UnsupportedModel
from outpace.heads import Eagle3Files, open_eagle3
from outpace.models.adapter import open_adapter
from outpace.models.checkpoint import Checkpoint
from outpace.models.config import DecoderConfig
from outpace.models.resolve import resolve_model
from outpace.train.kinds.base import Kind
from outpace.train.kinds.eagle3 import aux_layers, layer_shape
from outpace.train.result import weights_digest
from outpace.train.trainer import DRAFTER

__all__ = ["Beginning", "head_folder", "open_beginning"]

_FREE = frozenset({"max_positions", "model_type", "tie_word_embeddings", "num_layers", "windows", "vocab_size"})
"""What a layer's weights do not depend on."""
_OTHER_FORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "fc_bias")


@dataclass(frozen=True, slots=True)
class Beginning:
    """A head that was opened and fits its target.

    Args:
        kind: eagle3 or early-exit.
        folder: where it lies.
        digest: of its weights, as they are now.
        options: of the kind, those that it decides as it has them.
        token_ids: [draft vocabulary] int64 of an EAGLE-3 head; None for an adapter.
        weights: its tensors, by the names of the module that is trained, less `prefix`.
        prefix: of the module's names.
    """

    kind: str
    folder: Path
    digest: str
    options: Mapping[str, Any]
    token_ids: torch.Tensor | None
    weights: Checkpoint
    prefix: str = ""

    def load(self, kind: Kind) -> None:
        """Puts its weights into a kind that was made with its options and draft vocabulary.

        Raises:
            CheckpointError: a weight is no number.
        """
        state = {name: self.weights.get(name.removeprefix(self.prefix)).float() for name in kind.module.state_dict()}
        for name, tensor in state.items():
            if not bool(torch.isfinite(tensor).all()):
                raise CheckpointError(f"{self.folder}: tensor {name!r} holds values that are no numbers: take another")
        kind.module.load_state_dict(state)


def head_folder(name: str, *, allow_pickle: bool = False) -> Path:
    """The folder of a head: one that holds it, a run's, or that of a hub id.

    Raises:
        ModelNotFound: there is none.
    """
    path = Path(name).expanduser()
    if (path / DRAFTER / "config.json").is_file():
        return path / DRAFTER
    if (path / "config.json").is_file():
        return path
    return Path(resolve_model(name, allow_pickle=allow_pickle).path)


def open_beginning(
    kind: str, name: str, shape: DecoderConfig, given: Mapping[str, Any], *, allow_pickle: bool = False
) -> Beginning:
    """Opens a head to go on with.

    Args:
        kind: eagle3 or early-exit.
        name: its folder, a run's folder, or a hub id.
        shape: of the target.
        given: options of the kind that were asked for; those that the head decides must be as it has them.
        allow_pickle: read `pytorch_model.bin` if there is no safetensors file.

    Raises:
        ModelNotFound: there is none.
        CheckpointError: it is damaged, or made for another target.
        UnsupportedModel: its form is not one that is trained here.
        InvalidParameter: an option contradicts it, or this kind has no heads.
    """
    folder = head_folder(name, allow_pickle=allow_pickle)
    if kind == "eagle3":
        return _eagle3(folder, shape, given, allow_pickle)
    if kind == "early-exit":
        return _early_exit(folder, shape, given)
    raise InvalidParameter(f"head={name!r} is not possible for a {kind} drafter: it goes with eagle3 or early-exit")


def _eagle3(folder: Path, shape: DecoderConfig, given: Mapping[str, Any], allow_pickle: bool) -> Beginning:
    files = open_eagle3(folder, shape, allow_pickle=allow_pickle)
    config = files.config
    _check_form(files, shape)
    size = config.draft_vocab_size
    own = {"draft_vocab": size, "train_head": not config.shares_target_head}
    _check_given(given, own, folder)
    ids = torch.arange(size, dtype=torch.int64, device="cpu") if files.token_ids is None else files.token_ids
    return Beginning("eagle3", folder, weights_digest(folder), {**given, **own}, ids, files.weights)


def _early_exit(folder: Path, shape: DecoderConfig, given: Mapping[str, Any]) -> Beginning:
    files = open_adapter(str(folder), shape, None)
    own = {"exit_layers": [files.exit_layer]}
    _check_given(given, own, folder)
    if given.get("init_layer") is not None:
        raise InvalidParameter(
            f"init_layer={given['init_layer']} is not possible with the head {folder}, which training begins as: "
            "leave it out"
        )
    prefix = f"exit_{files.exit_layer}."
    return Beginning("early-exit", folder, weights_digest(folder), {**given, **own}, None, files.weights, prefix)


def _check_given(given: Mapping[str, Any], own: Mapping[str, Any], folder: Path) -> None:
    for name, value in own.items():
        if given.get(name) not in (None, value):
            raise InvalidParameter(
                f"{name}={given[name]} is not possible with the head {folder}, which has {value}: leave it out"
            )


def _check_form(files: Eagle3Files, shape: DecoderConfig) -> None:
    """Refuses heads that run here, but are of another form than those trained here."""
    config, wanted = files.config, layer_shape(shape)
    other = [name for name in _OTHER_FORMS if getattr(config, name)]
    other += [
        item.name
        for item in fields(DecoderConfig)
        if item.name not in _FREE and getattr(config.layer, item.name) != getattr(wanted, item.name)
    ]
    if files.has_embedding:
        other.append("embeddings of its own")
    if config.aux_layers_of(shape.num_layers) != aux_layers(shape.num_layers):
        other.append(f"aux layers {list(config.aux_layers_of(shape.num_layers))}")
    if other:
        raise UnsupportedModel(
            f"{files.folder}: heads of another form than those made here cannot be trained on ({', '.join(other)}): "
            "leave --head out to begin a new one"
        )
