"""Whether a model fits: counted before loading, against the system's memory and every control group's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import save_file

from outpace.errors import OutOfMemory
from outpace.models import memory
from outpace.models.checkpoint import Checkpoint
from outpace.models.decoder import Decoder
from outpace.models.files import format_bytes
from outpace.models.load import load_files
from outpace.models.memory import RESERVE_BYTES, available_bytes, estimate_bytes, require_fit
from outpace.models.precision import Precision
from tests.models.gguf_files import write_gguf
from tests.models.tiny_models import precision

GB = 10**9


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


MEMINFO = {"proc/meminfo": "MemTotal: 9000000 kB\nMemFree: 10 kB\nMemAvailable:    8000000 kB\n"}


def test_system_memory_without_control_groups(tmp_path: Path) -> None:
    write(tmp_path, MEMINFO)
    assert available_bytes(tmp_path) == 8_000_000 * 1024


def test_nothing_known(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None


def test_version_2_group_with_cached_files_given_back(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/a/b"
    write(tmp_path, {**MEMINFO, "proc/self/cgroup": "0::/a/b\n"})
    write(tmp_path, {f"{group}/memory.max": "3000\n", f"{group}/memory.current": "2500\n"})
    write(tmp_path, {f"{group}/memory.stat": "anon 1\ninactive_file 700\nactive_file 5\n"})
    assert available_bytes(tmp_path) == 3000 - 2500 + 700


def test_the_tightest_of_nested_groups_counts(tmp_path: Path) -> None:
    write(tmp_path, {**MEMINFO, "proc/self/cgroup": "0::/a/b\n"})
    for folder, limit, usage in (("a/b", "max", "5"), ("a", "2000", "500"), ("", "9000", "100")):
        at = f"sys/fs/cgroup/{folder}"
        write(tmp_path, {f"{at}/memory.max": limit, f"{at}/memory.current": usage, f"{at}/memory.stat": "anon 1\n"})
    assert available_bytes(tmp_path) == 1500


def test_version_1_group(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/job"
    write(tmp_path, {**MEMINFO, "proc/self/cgroup": "5:cpu:/x\n4:memory:/job\n0::/\n"})
    write(tmp_path, {f"{group}/memory.limit_in_bytes": "4000", f"{group}/memory.usage_in_bytes": "1000"})
    write(tmp_path, {f"{group}/memory.stat": "cache 3\ntotal_inactive_file 10\n"})
    assert available_bytes(tmp_path) == 3010


def test_a_group_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    write(tmp_path, {**MEMINFO, "proc/self/cgroup": "0::/\n"})
    at = "sys/fs/cgroup"
    write(tmp_path, {f"{at}/memory.max": "10", f"{at}/memory.current": "90", f"{at}/memory.stat": "anon 1\n"})
    assert available_bytes(tmp_path) == 0


def test_this_machine_tells_something() -> None:
    free = available_bytes()
    assert free is not None and free > 100 << 20


TENSORS = {
    "model.embed_tokens.weight": torch.zeros(100, 8, dtype=torch.float16),
    "model.layers.0.mlp.up_proj.weight": torch.zeros(50, 40, dtype=torch.float16),
    "model.norm.weight": torch.zeros(8, dtype=torch.float16),
}
EMBEDDING, NORM = 100 * 8 * 2, 8 * 4


def checkpoint_of(folder: Path, tensors: dict[str, torch.Tensor]) -> Checkpoint:
    save_file(tensors, str(folder / "model.safetensors"))
    return Checkpoint.open(folder)


def test_torch_counts_every_tensor_once_and_the_largest_twice(tmp_path: Path) -> None:
    tied = checkpoint_of(tmp_path, TENSORS)
    scales, transient = 8 * (100 + 50), 4 * 50 * 40
    assert estimate_bytes(tied, precision("torch int8")) == EMBEDDING + (800 + 2000) + scales + NORM + transient
    assert estimate_bytes(tied, precision("torch none")) == EMBEDDING + 4 * (800 + 2000) + scales + NORM + transient
    untied = checkpoint_of(tmp_path, {**TENSORS, "lm_head.weight": torch.zeros(100, 8)})
    assert estimate_bytes(untied, precision("torch int8")) == estimate_bytes(tied, precision("torch int8"))


@pytest.mark.parametrize(
    ("wanted", "group_bytes", "head_group_bytes"),
    [
        (Precision("none"), 64, 64),
        (Precision("none", "float32"), 128, 128),
        (Precision("none", "bfloat16"), 64, 64),
        (Precision("int8"), 34, 34),
        (Precision("int4"), 20, 34),
        (Precision("file"), 64, 64),
    ],
    ids=lambda value: f"{value.quantization}-{value.dtype}" if isinstance(value, Precision) else "",
)
def test_native_counts_every_tensor_once_in_whole_panels(
    tmp_path: Path, wanted: Precision, group_bytes: int, head_group_bytes: int
) -> None:
    """104 outputs of 1 group and 56 of 2, each with a place for a bias."""
    head, layer = 104 * (head_group_bytes + 4), 56 * (2 * group_bytes + 4)
    assert estimate_bytes(checkpoint_of(tmp_path, TENSORS), wanted) == NORM + head + layer


@pytest.mark.parametrize("quantize", [None, *map(gguf.GGMLQuantizationType, (2, 3, 6, 8))])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("quantization", ["file", "none", "int8", "int4"])
def test_what_is_held_after_loading_is_what_was_estimated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantize: Any, tied: bool, quantization: str
) -> None:
    """The embedding stays in the file."""
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "m.gguf", quantize=quantize, tied=tied)
    files = load_files(str(tmp_path / "m.gguf"))
    shape = files.checked_shape()
    decoder = Decoder(shape, files.checkpoint, precision=precision(quantization))
    wanted = estimate_bytes(files.checkpoint, precision(quantization))
    assert decoder.bytes_per_token == decoder.weight_bytes == wanted


def test_what_does_not_fit_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 4 * GB)
    require_fit("Big-7B", 3 * GB, 4 * GB - 3 * GB - RESERVE_BYTES)
    with pytest.raises(OutOfMemory) as caught:
        require_fit("Big-7B", 3 * GB, 1 + 4 * GB - 3 * GB - RESERVE_BYTES)
    message = str(caught.value)
    assert message.startswith(
        "Big-7B needs 3 GB for weights, 732 MB for the cache and 268 MB to work with, 4 GB of memory"
    )
    assert "a smaller model, another quantization (int4 takes least), or fewer cache_tokens" in message


def test_no_refusal_where_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: None)
    require_fit("Huge", 10**15)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (98e6, "98 MB"), (3.09e9, "3.09 GB"), (4.61e12, "4.61 TB")],
)
def test_sizes_for_people(count: float, text: str) -> None:
    assert format_bytes(count) == text
