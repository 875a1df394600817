"""EAGLE-3 heads on disk, opened and checked before a weight is loaded: nothing missing, unknown or misshapen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from outpace.errors import CheckpointError, InvalidParameter, ModelNotFound
from outpace.heads.config_json import Verifier, read_config
from outpace.heads.draft_vocabulary import are_distinct, marks_of, token_ids_of
from outpace.heads.tensor_names import canonical_names
from outpace.models.adapter import ADAPTER_TYPE
from outpace.models.checkpoint import Checkpoint, read_json
from outpace.models.config import DecoderConfig
from outpace.models.eagle3_config import Eagle3Config, eagle3_tensors

__all__ = ["Eagle3Files", "open_eagle3", "open_head"]

_OFFSETS, _MARKS, _EMBEDDING = "d2t", "t2d", "embed_tokens.weight"
_INTEGERS = (torch.int64, torch.int32)
_MARK_TYPES = (torch.bool, torch.uint8)


@dataclass(frozen=True, slots=True)
class Eagle3Files:
    """An EAGLE-3 head's folder, checked; its matrices are not in memory yet.

    Args:
        config: its shape.
        weights: its tensors under the names of `eagle3_tensors`, and `embed_tokens.weight` if it has its own.
        token_ids: [draft vocabulary] int64, the target's token that each guess stands for; None for all, in order.
        verifier: the target it says it was made for.
        folder: where it lies.
    """

    config: Eagle3Config
    weights: Checkpoint
    token_ids: torch.Tensor | None
    verifier: Verifier | None
    folder: Path

    @property
    def has_embedding(self) -> bool:
        """Whether it has embeddings of its own; otherwise it reads the target's."""
        return _EMBEDDING in self.weights.shapes

    def check_target(self, target: DecoderConfig) -> None:
        """Raises CheckpointError if it was made for a target of another shape."""
        config, path = self.config, self.folder / "config.json"
        made_for = {"hidden size": config.target_hidden_size, "vocabulary": config.vocab_size}
        has = {"hidden size": target.hidden_size, "vocabulary": target.vocab_size}
        if config.target_layers is not None:
            made_for["layer count"], has["layer count"] = config.target_layers, target.num_layers
        for what, value in made_for.items():
            if value != has[what]:
                raise CheckpointError(
                    f"{path}: the head was made for a target of {what} {value}; this one has {has[what]}"
                )
        try:
            config.aux_layers_of(target.num_layers)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error


def open_eagle3(folder: str | Path, target: DecoderConfig, *, allow_pickle: bool = False) -> Eagle3Files:
    """Opens a head's folder, in either layout, and checks it against its target.

    Args:
        folder: holds config.json and model.safetensors; `~` is expanded.
        target: the shape of the model it is for.
        allow_pickle: read `pytorch_model.bin` if there is no safetensors file.

    Raises:
        ModelNotFound: no such folder.
        CheckpointError: a file is damaged, or it is not a head for this model; names file and tensor.
        UnsupportedModel: no EAGLE-3 head, or one that outpace does not run.
    """
    files = open_head(folder, allow_pickle=allow_pickle)
    files.check_target(target)
    return files


def open_head(folder: str | Path, *, allow_pickle: bool = False) -> Eagle3Files:
    """`open_eagle3` without a target to check against."""
    path = Path(folder).expanduser()
    if not (path / "config.json").is_file():
        raise ModelNotFound(f"{folder}: no EAGLE-3 head there; its folder holds config.json and model.safetensors")
    keys = read_json(path / "config.json")
    if keys.get("model_type") == ADAPTER_TYPE:
        raise InvalidParameter(
            f"{folder} is an adapter of an early exit, not an EAGLE-3 head: it goes with method 'early_exit'"
        )
    config, verifier = read_config(keys, path / "config.json")
    stored = Checkpoint.open(path, allow_pickle=allow_pickle)
    names = _names(stored)
    token_ids = _token_ids(config, stored, names)
    weights = stored.select({name: other for name, other in names.items() if name not in (_OFFSETS, _MARKS)})
    expected = eagle3_tensors(config)
    if _EMBEDDING in names:
        expected[_EMBEDDING] = (config.vocab_size, config.hidden_size)
    elif config.hidden_size != config.target_hidden_size:
        raise CheckpointError(
            f"{stored.source} lacks tensor {_EMBEDDING!r}: the target's embeddings, {config.target_hidden_size} wide, "
            f"do not fit a head of hidden size {config.hidden_size}"
        )
    _check_head(config, stored, names)
    weights.check(expected)
    return Eagle3Files(config, weights, token_ids, verifier, path)


def _names(stored: Checkpoint) -> dict[str, str]:
    """{canonical name: the one stored tensor that has it}."""
    found: dict[str, str] = {}
    for name, others in canonical_names(stored.shapes).items():
        if len(others) > 1:
            raise CheckpointError(f"{stored.source}: tensors {others[0]!r} and {others[1]!r} are the same one twice")
        found[name] = others[0]
    return found


def _check_head(config: Eagle3Config, stored: Checkpoint, names: Mapping[str, str]) -> None:
    """The output head is stored, or config.json says whose it is; never both, never neither."""
    has_head = "lm_head.weight" in names
    if config.shares_target_head and has_head:
        raise CheckpointError(
            f"{stored.source}: tensor 'lm_head.weight' has no place in a head that shares_target_head, as config.json "
            "says"
        )
    if config.shares_target_head and config.hidden_size != config.target_hidden_size:
        raise CheckpointError(
            f"{stored.source}: rows of the target's head, {config.target_hidden_size} wide, do not fit a head of "
            f"hidden size {config.hidden_size}, though config.json says shares_target_head"
        )
    if not config.shares_target_head and not has_head:
        raise CheckpointError(
            f"{stored.source} lacks tensor 'lm_head.weight' of shape {[config.draft_vocab_size, config.hidden_size]}; "
            'a head that uses the target\'s rows says so in config.json: "shares_target_head": true'
        )


def _token_ids(config: Eagle3Config, stored: Checkpoint, names: Mapping[str, str]) -> torch.Tensor | None:
    """What `d2t` says, if it says anything and does not contradict `t2d`."""
    size, shapes = config.draft_vocab_size, stored.shapes
    if _OFFSETS not in names:
        if config.is_pruned:
            raise CheckpointError(
                f"{stored.source} lacks tensor {_OFFSETS!r} of shape [{size}]: which {size} of the target's "
                f"{config.vocab_size} tokens the head guesses"
            )
        return None
    kinds = {_OFFSETS: (_INTEGERS, (size,)), _MARKS: (_MARK_TYPES, (config.vocab_size,))}
    for name in names.keys() & kinds.keys():
        types, shape = kinds[name]
        found = names[name]
        if stored.dtypes[found] not in types or shapes[found] != shape:
            raise CheckpointError(
                f"{stored.source}: tensor {found!r} is {stored.dtypes[found]} of shape {list(shapes[found])}; it must "
                f"be {types[0]} of shape {list(shape)}"
            )
    token_ids = token_ids_of(stored.get(names[_OFFSETS]))
    if not are_distinct(token_ids, config.vocab_size):
        raise CheckpointError(
            f"{stored.source}: tensor {names[_OFFSETS]!r} does not name {size} different tokens of the target's "
            f"{config.vocab_size}"
        )
    if _MARKS in names and not torch.equal(
        stored.get(names[_MARKS]).to(torch.bool), marks_of(token_ids, config.vocab_size)
    ):
        raise CheckpointError(
            f"{stored.source}: tensors {names[_OFFSETS]!r} and {names[_MARKS]!r} contradict each other"
        )
    return token_ids
