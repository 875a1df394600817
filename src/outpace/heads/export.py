"""Takes a head to another engine: whatever layout it has, in the one that engine reads, complete."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from outpace.errors import CheckpointError, InvalidParameter, ModelNotFound
from outpace.head_words import is_eagle3_config
from outpace.heads.config_json import Verifier
from outpace.heads.draft_vocabulary import offsets_of
from outpace.heads.portability import ENGINES, LAYOUT_OF, require_portable
from outpace.heads.reading import Eagle3Files, open_head
from outpace.heads.writing import save_eagle3
from outpace.models.adapter import ADAPTER_TYPE
from outpace.models.checkpoint import read_json
from outpace.models.config import SUPPORTED_TYPES, DecoderConfig
from outpace.models.eagle3 import with_target_rows
from outpace.models.load import LoadedFiles, load_files
from outpace.models.resolve import ALIASES, lasting_name, resolve_model

__all__ = ["export_head"]


def export_head(
    head: str,
    folder: str,
    engine: str,
    *,
    target: str | None = None,
    allow_pickle: bool = False,
    notify: Callable[[str], None] | None = None,
) -> None:
    """Writes a head in the layout of another engine, bit for bit, with an output head of its own.

    Args:
        head: its folder or hub id.
        folder: to be made, or one that holds a head, which is replaced.
        engine: "vllm" or "sglang".
        target: the model it is for, as for `LLM`; None takes the one that the head names. It is opened if given, or
            if the head uses the rows of its output head.
        allow_pickle: read `.bin` weights.
        notify: told in lines what takes long.

    Raises:
        InvalidParameter: there is no such engine, it cannot run this head, or has no use for what is in the folder;
            or the target is needed and not known.
        OutpaceError: something cannot be found, read or written, or head and target do not go together.
    """
    if engine not in ENGINES:
        raise InvalidParameter(f"engine={engine!r} is not possible: {' or '.join(ENGINES)}")
    path = resolve_model(head, allow_pickle=allow_pickle).path
    if path.is_file():
        raise _ordinary(head, engine)
    _refuse_others(head, path, engine)
    files = open_head(path, allow_pickle=allow_pickle)
    require_portable(files.config, engine)
    name = target or (files.verifier.name if files.verifier is not None else None)
    if name is None and (engine == "vllm" or files.config.shares_target_head):
        raise InvalidParameter(
            f"{head} does not say what model it is for, which has to be known to write it for {engine}: name it as "
            "target (--target)"
        )
    verifier, opened = files.verifier, None
    if name is not None and (target is not None or files.config.shares_target_head):
        opened = _opened(head, name, target, allow_pickle, notify)
        files.check_target(opened.checked_shape())
        verifier = _verifier_of(name, opened)
    config = replace(files.config, shares_target_head=False)
    save_eagle3(folder, config, _tensors(files, opened), layout=LAYOUT_OF[engine], verifier=verifier)


def _tensors(files: Eagle3Files, target: LoadedFiles | None) -> dict[str, torch.Tensor]:
    """All tensors of the head as they are stored, and an output head where it has none."""
    found = {name: files.weights.get(name) for name in files.weights.shapes}
    if files.token_ids is not None:
        found["d2t"] = offsets_of(files.token_ids)
    if files.config.shares_target_head:
        assert target is not None
        shape = DecoderConfig.from_hf(target.config)
        rows = with_target_rows(files.weights, shape, target.checkpoint, files.token_ids)
        found["lm_head.weight"] = rows.get("lm_head.weight").to(found["fc.weight"].dtype)
    return found


def _verifier_of(name: str, target: LoadedFiles) -> Verifier:
    """The target by a name that another engine understands: a hub id or a whole path."""
    architectures = target.config.get("architectures") or []
    return Verifier(lasting_name(name), tuple(map(str, architectures)))


def _opened(
    head: str, name: str, target: str | None, allow_pickle: bool, notify: Callable[[str], None] | None
) -> LoadedFiles:
    """The target by its name; a hub id that a package on this machine stands for is read from there.

    Raises:
        ModelNotFound: there is no such model; if it is the head that names it, says how to name another.
    """
    if target is None:
        name = next((alias for alias, each in ALIASES.items() if each.repository == name), name)
    try:
        return load_files(name, allow_pickle=allow_pickle, notify=notify)
    except ModelNotFound as error:
        if target is not None:
            raise
        raise ModelNotFound(
            f"{head} says that it is for {name}, which cannot be opened ({error}). Name it as target (--target)"
        ) from error


def _refuse_others(head: str, path: Path, engine: str) -> None:
    """What is no EAGLE-3 head, with what to do instead."""
    keys = read_json(path / "config.json")
    if keys.get("model_type") == ADAPTER_TYPE:
        raise InvalidParameter(
            f"{head} is an adapter of an early exit, which runs in outpace alone: {engine} has nothing that "
            "would run it"
        )
    if not is_eagle3_config(keys) and keys.get("model_type") in SUPPORTED_TYPES:
        raise _ordinary(head, engine)
    names = keys.get("architectures")
    if names is not None and not isinstance(names, list):
        raise CheckpointError(f"{path / 'config.json'} says architectures={names!r}; it must be a list of names")


def _ordinary(head: str, engine: str) -> InvalidParameter:
    return InvalidParameter(
        f"{head} is an ordinary model, not a head: there is nothing to export, {engine} takes such a draft model as it "
        "is"
    )
