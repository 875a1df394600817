"""What the system tells about the machine, and what the kernels tell about themselves."""

from __future__ import annotations

import platform
from pathlib import Path
from types import SimpleNamespace

import pytest

from outpace.doctor import machine
from outpace.models.linear import describe_precision
from outpace.models.native.library import NativeUnavailable, why_unavailable


def put(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def test_a_system_that_tells_everything(tmp_path: Path) -> None:
    put(tmp_path, "proc/cpuinfo", "processor\t: 0\nmodel name\t: Some CPU @ 3 GHz\n\nprocessor\t: 1\nmodel name\t: B\n")
    put(tmp_path, "proc/meminfo", "MemTotal: 2000 kB\nMemAvailable: 1000 kB\n")
    put(tmp_path, "sys/fs/cgroup/cpu.max", "100000 100000")
    for index, size in enumerate(("32K", "32K", "512K", "32M")):
        put(tmp_path, f"sys/devices/system/cpu/cpu0/cache/index{index}/size", size + "\n")
    found = machine.look_at_machine(tmp_path)
    assert (found.processor, found.usable_cores) == ("Some CPU @ 3 GHz", 1)
    assert (found.memory_free, found.cache_bytes) == (1_024_000, 32 << 20)
    assert set(found.versions) == {"Python", "torch"}


def test_a_system_that_tells_nothing(tmp_path: Path) -> None:
    found = machine.look_at_machine(tmp_path)
    assert (found.memory_free, found.cache_bytes) == (None, None)
    assert found.processor == (platform.processor() or platform.machine())
    assert found.usable_cores == found.cores >= 1


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (b"\0GCC: (Some 12.2.0-14) 12.2.0\0", "GCC: (Some 12.2.0-14) 12.2.0"),
        (b"\0GCC: (Some 12.2.0-14) 12.2.0\0Some clang version 14.0.6\0", "Some clang version 14.0.6"),
        (b"\0nobody\0", None),
    ],
)
def test_the_compiled_file_says_who_compiled_it(
    content: bytes, name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.so"
    file.write_bytes(b"\x7fELF" + content)
    monkeypatch.setattr(machine, "library", lambda: SimpleNamespace(_name=str(file)))
    found = machine.find_kernels()
    assert (found.native, found.compiler, found.file) == (True, name, str(file))


def test_the_kernels_of_this_machine() -> None:
    found = machine.find_kernels()
    assert found.native == (why_unavailable() is None) == (found.reason is None)
    assert not found.native or (found.file is not None and Path(found.file).is_file())
    assert any(text.startswith("fp32") for text in found.torch)


def test_a_machine_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise NativeUnavailable("there is no C compiler")

    monkeypatch.setattr(machine, "library", missing)
    found = machine.find_kernels()
    assert (found.native, found.file, found.reason) == (False, None, "there is no C compiler")
    assert found.torch[-1] == describe_precision("none")
