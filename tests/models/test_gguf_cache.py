"""The cache of converted GGUF files under accidents: crashes, races, damage, full disks."""

from __future__ import annotations

import json
import shutil
import threading
from collections import namedtuple
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors import SafetensorError

from outpace.errors import OutpaceError
from outpace.models import gguf as conversion
from outpace.models.checkpoint import Checkpoint
from outpace.models.files import format_bytes
from outpace.models.gguf import convert_gguf, converted_folder, converted_models, read_manifest
from tests.models.gguf_files import write_gguf


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def convert(path: Path) -> Path:
    return convert_gguf(path, lambda message: None)


def test_size_and_place_are_announced_before_anything_is_written(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    target = converted_folder(tmp_path / "m.gguf")
    seen: list[tuple[str, list[Path]]] = []
    convert_gguf(tmp_path / "m.gguf", lambda message: seen.append((message, list(target.parent.glob("*/")))))
    message, folders = seen[0]
    assert message == f"converting m.gguf (once): 33.7 MB in {target}"
    assert folders == []


def test_second_time_nothing_is_converted_or_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "m.gguf")
    folder = convert(tmp_path / "m.gguf")
    monkeypatch.setattr(conversion, "GgufFile", None)
    messages: list[str] = []
    assert convert_gguf(tmp_path / "m.gguf", messages.append) == folder
    assert messages == []


def test_another_file_of_the_same_name_is_converted_anew(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    first = convert(tmp_path / "m.gguf")
    (tmp_path / "other").mkdir()
    weights = write_gguf(tmp_path / "other/m.gguf", tied=True)
    second = convert(tmp_path / "other/m.gguf")
    assert first != second
    assert Checkpoint.open(second).shapes.keys() == weights.keys()


def damage_by_cutting(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def damage_by_changing(folder: Path) -> None:
    file = folder / "tokenizer.json"
    file.write_bytes(b"x" + file.read_bytes()[1:])


def damage_by_removing(folder: Path) -> None:
    (folder / "config.json").unlink()


def damage_the_manifest(folder: Path) -> None:
    (folder / "outpace.json").write_text("{")


@pytest.mark.parametrize("damage", [damage_by_cutting, damage_by_changing, damage_by_removing, damage_the_manifest])
def test_damaged_copy_is_reported_and_made_again(tmp_path: Path, damage: Any) -> None:
    weights = write_gguf(tmp_path / "m.gguf")
    folder = convert(tmp_path / "m.gguf")
    damage(folder)
    assert read_manifest(folder) is None and converted_models() == []
    messages: list[str] = []
    assert convert_gguf(tmp_path / "m.gguf", messages.append) == folder
    assert messages[0] == f"{folder} is damaged; converting m.gguf again"
    assert read_manifest(folder) is not None and converted_models() == [folder]
    assert torch.equal(
        Checkpoint.open(folder).get("lm_head.weight").float(), torch.from_numpy(weights["lm_head.weight"])
    )


def test_copy_of_an_older_layout_is_replaced_and_called_that(tmp_path: Path) -> None:
    weights = write_gguf(tmp_path / "m.gguf")
    folder = convert(tmp_path / "m.gguf")
    manifest = json.loads((folder / "outpace.json").read_text())
    (folder / "outpace.json").write_text(json.dumps({**manifest, "layout": manifest["layout"] - 1}))
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"old")
    assert read_manifest(folder) is None and converted_models() == []
    messages: list[str] = []
    assert convert_gguf(tmp_path / "m.gguf", messages.append) == folder
    assert messages[0] == f"{folder} was made by another version of outpace; converting m.gguf again"
    assert read_manifest(folder) == manifest and list(folder.parent.glob("*/")) == [folder]
    assert not (folder / "model-00001-of-00002.safetensors").exists()
    assert Checkpoint.open(folder).shapes.keys() == weights.keys()


def test_blocks_are_announced_at_the_size_they_are_stored_in(tmp_path: Path) -> None:
    weights = write_gguf(tmp_path / "m.gguf", quantize=gguf.GGMLQuantizationType.Q4_0)
    messages: list[str] = []
    folder = convert_gguf(tmp_path / "m.gguf", messages.append)
    stored = sum(value.size * 18 // 32 if value.ndim == 2 else 2 * value.size for value in weights.values())
    assert messages[0] == f"converting m.gguf (once): {format_bytes(stored + (32 << 20))} in {folder}"
    assert Checkpoint.open(folder).num_bytes == stored


def test_crash_in_the_middle_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "m.gguf")
    folder = converted_folder(tmp_path / "m.gguf")

    def die(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(conversion, "save_file", die)
        with pytest.raises(KeyboardInterrupt):
            convert(tmp_path / "m.gguf")
    assert list(folder.parent.glob("*/")) == []
    assert convert(tmp_path / "m.gguf") == folder and read_manifest(folder) is not None


def test_leftovers_of_a_killed_process_are_cleared_away(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    folder = converted_folder(tmp_path / "m.gguf")
    partial = folder.parent / f".{folder.name}.partial"
    partial.mkdir(parents=True)
    (partial / "stale.bin").write_bytes(b"x")
    assert convert(tmp_path / "m.gguf") == folder
    assert not partial.exists() and not (folder / "stale.bin").exists()


def test_two_at_once_convert_once_and_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "m.gguf")
    started, results, conversions = threading.Barrier(2), [], []
    original = conversion._convert_into

    def counted(*arguments: Any) -> None:
        conversions.append(1)
        original(*arguments)

    monkeypatch.setattr(conversion, "_convert_into", counted)

    def work() -> None:
        started.wait(10)
        results.append(convert(tmp_path / "m.gguf"))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == [converted_folder(tmp_path / "m.gguf")] * 2
    assert len(conversions) == 1 and read_manifest(results[0]) is not None


def test_full_disk_is_an_error_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "m.gguf")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 5_000_000, 5_000_000))
    with pytest.raises(
        OutpaceError, match=r"needs 33\.7 MB in .*, 5 MB are free; make room there, or set OUTPACE_CACHE"
    ):
        convert(tmp_path / "m.gguf")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("No space left on device")])
def test_disk_that_fills_up_while_writing_is_an_error_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    write_gguf(tmp_path / "m.gguf")

    def full(*arguments: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(conversion, "save_file", full)
    with pytest.raises(OutpaceError, match=r"m\.gguf could not be converted .*No space left on device"):
        convert(tmp_path / "m.gguf")
    assert converted_models() == []


def test_cache_that_is_a_file_is_an_error(tmp_path: Path, cache: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    cache.write_text("in the way")
    with pytest.raises(OutpaceError, match="set OUTPACE_CACHE to another folder"):
        convert(tmp_path / "m.gguf")
