"""Whether a model fits: counted before loading, against the system's memory and every control group's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from outpace.errors import InvalidParameter, OutOfMemory
from outpace.models import memory
from outpace.models.checkpoint import Checkpoint
from outpace.models.files import format_bytes
from outpace.models.memory import RESERVE_BYTES, available_bytes, estimate_bytes, require_fit

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


def test_estimate_counts_every_tensor_once_and_the_largest_twice(tmp_path: Path) -> None:
    tensors = {
        "model.embed_tokens.weight": torch.zeros(100, 8, dtype=torch.float16),
        "model.layers.0.mlp.up_proj.weight": torch.zeros(50, 8, dtype=torch.float16),
        "model.norm.weight": torch.zeros(8, dtype=torch.float16),
    }
    save_file(tensors, str(tmp_path / "model.safetensors"))
    tied = Checkpoint.open(tmp_path)
    embedding, norm, transient = 100 * 8 * 2, 8 * 4, 100 * 8 * 4
    scales = 8 * (100 + 50)
    assert estimate_bytes(tied, "int8") == embedding + (800 + 400) + scales + norm + transient
    assert estimate_bytes(tied, "none") == embedding + 4 * (800 + 400) + scales + norm + transient
    save_file({**tensors, "lm_head.weight": torch.zeros(100, 8)}, str(tmp_path / "model.safetensors"))
    assert estimate_bytes(Checkpoint.open(tmp_path), "int8") == estimate_bytes(tied, "int8")
    with pytest.raises(InvalidParameter, match="quantization='auto' has no size; possible: int8, none"):
        estimate_bytes(tied, "auto")


def test_what_does_not_fit_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 4 * GB)
    require_fit("Big-7B", 3 * GB, 4 * GB - 3 * GB - RESERVE_BYTES)
    with pytest.raises(OutOfMemory) as caught:
        require_fit("Big-7B", 3 * GB, 1 + 4 * GB - 3 * GB - RESERVE_BYTES)
    message = str(caught.value)
    assert message.startswith(
        "Big-7B needs 3 GB for weights, 732 MB for the cache and 268 MB to work with, 4 GB of memory"
    )
    assert "a smaller model, quantization int8, or fewer cache_tokens" in message


def test_no_refusal_where_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: None)
    require_fit("Huge", 10**15)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (98e6, "98 MB"), (3.09e9, "3.09 GB"), (4.61e12, "4.61 TB")],
)
def test_sizes_for_people(count: float, text: str) -> None:
    assert format_bytes(count) == text
