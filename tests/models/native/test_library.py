"""The kernels are compiled once, with the compiler there is; without one the decoder runs on torch and says why."""

from __future__ import annotations

import importlib.util
import os
import platform
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from outpace.models.config import DecoderConfig
from outpace.models.decoder import Decoder
from outpace.models.native import library as module
from outpace.models.native.library import NativeUnavailable, library, why_unavailable
from outpace.models.torch_layers import TorchLayers
from tests.models.tiny_models import lanes, pack_of, random_ids, reference_model, tiny_weights

CACHED = (module.library, module.why_unavailable, module._processor_flags)


@pytest.fixture(scope="session")
def built() -> Path:
    """The kernels of this machine, compiled before any test bends the environment."""
    return Path(library()._name)


@pytest.fixture(autouse=True)
def forgotten(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is remembered before and after a test, and what it compiles goes to a folder of its own."""
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    for function in CACHED:
        function.cache_clear()
    yield
    monkeypatch.undo()
    for function in CACHED:
        function.cache_clear()
    library()


class Compilers:
    """Shell scripts that stand for compilers, in the only folder of the path; each logs its arguments."""

    def __init__(self, folder: Path, built: Path) -> None:
        self.folder, self.built = folder, built
        folder.mkdir()

    def add(self, name: str, body: str) -> None:
        script = self.folder / name
        log = self.folder / f"{name}.log"
        script.write_text(f'#!/bin/sh\necho "$*" >> {log}\nfor last; do :; done\n{body}\n')
        script.chmod(script.stat().st_mode | stat.S_IXUSR)

    def add_good(self, name: str) -> None:
        """One that is done at once: it copies what was compiled before to where -o says."""
        copy = f'if [ "$before" = -o ]; then /bin/cp {self.built} "$each"; fi'
        self.add(name, f'for each; do {copy}; before="$each"; done')

    def calls(self, name: str) -> list[list[str]]:
        log = self.folder / f"{name}.log"
        return [line.split() for line in log.read_text().splitlines()] if log.exists() else []


@pytest.fixture
def compilers(tmp_path: Path, built: Path, monkeypatch: pytest.MonkeyPatch) -> Compilers:
    pretend_package(monkeypatch, None)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return Compilers(tmp_path / "bin", built)


def pretend_package(monkeypatch: pytest.MonkeyPatch, spec: object | None) -> None:
    """The package that brings a compiler is there, or is not; others are looked for as ever."""
    honest = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: spec if name == "ziglang" else honest(name, *rest)
    )


def test_without_a_compiler_the_message_says_what_to_install(compilers: Compilers) -> None:
    with pytest.raises(NativeUnavailable, match=r"there is no C compiler: install gcc or clang, or `pip install "):
        library()


def test_without_a_path(compilers: Compilers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NativeUnavailable, match="there is no C compiler"):
        library()


def test_the_decoder_falls_back_to_torch_and_warns_once(compilers: Compilers, caplog: pytest.LogCaptureFixture) -> None:
    model = reference_model("llama")
    config = DecoderConfig.from_hf(model.config.to_dict())
    ids = random_ids(12)
    with torch.no_grad():
        wanted = model(torch.tensor([ids])).logits[0]
    for _ in range(2):
        decoder = Decoder(config, tiny_weights(model))
        assert decoder.precision.kernels == "torch" and isinstance(decoder.layers, TorchLayers)
        found = decoder.forward(pack_of((0, 0, ids)), lanes(decoder, 1, 12)).logits
        assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "torch's own kernels are used" in record.message and "there is no C compiler" in record.message


def test_with_kernels_nothing_is_said(compilers: Compilers, caplog: pytest.LogCaptureFixture) -> None:
    compilers.add_good("cc")
    model = reference_model("llama")
    assert Decoder(DecoderConfig.from_hf(model.config.to_dict()), tiny_weights(model)).precision.kernels == "native"
    assert why_unavailable() is None
    assert not caplog.records


def test_compiled_once(compilers: Compilers, tmp_path: Path) -> None:
    compilers.add_good("cc")
    for _ in range(3):
        library.cache_clear()
        assert library().run_layers is not None
    assert len(compilers.calls("cc")) == 1
    (kept,) = (tmp_path / "cache/kernels").iterdir()  # nothing half-done beside it
    assert kept.suffix == ".so"


def test_compiled_again_for_another_processor_or_compiler(
    compilers: Compilers, monkeypatch: pytest.MonkeyPatch
) -> None:
    compilers.add_good("cc")
    compilers.add_good("other")
    library()
    monkeypatch.setenv("CC", "other")
    library.cache_clear()
    library()
    assert (len(compilers.calls("cc")), len(compilers.calls("other"))) == (1, 1)
    monkeypatch.setattr(module, "_processor_flags", lambda: "avx2 fma f16c new_feature")
    library.cache_clear()
    library()
    assert (len(compilers.calls("cc")), len(compilers.calls("other"))) == (1, 2)


def test_sources_flags_and_target_are_given(compilers: Compilers) -> None:
    compilers.add_good("gcc")
    library()
    (arguments,) = compilers.calls("gcc")
    names = {Path(argument).name for argument in arguments if argument.endswith(".c")}
    assert names == {path.name for path in Path(module.__file__).parent.glob("*.c")} != set()
    assert "-march=native" in arguments and "-ffp-contract=off" in arguments and "-ffast-math" not in arguments


def test_cc_is_honoured_with_its_own_options_before_all_others(
    compilers: Compilers, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("cc", "gcc", "mine"):
        compilers.add_good(name)
    monkeypatch.setenv("CC", "mine --target 'a b'")
    library()
    assert compilers.calls("mine")[0][:3] == ["--target", "a", "b"]
    assert compilers.calls("cc") == compilers.calls("gcc") == []


def test_a_cc_that_is_not_there_is_passed_over(compilers: Compilers, monkeypatch: pytest.MonkeyPatch) -> None:
    compilers.add_good("clang")
    monkeypatch.setenv("CC", "/nowhere/cc")
    library()
    assert len(compilers.calls("clang")) == 1


@pytest.mark.xfail(strict=True, raises=ValueError, reason="FAULT: a CC that cannot be split ends in a traceback")
def test_a_cc_with_an_open_quotation(compilers: Compilers, monkeypatch: pytest.MonkeyPatch) -> None:
    compilers.add_good("cc")
    monkeypatch.setenv("CC", 'cc -DNAME="x')
    library()


def test_a_compiler_that_fails_is_reported_with_its_first_line(compilers: Compilers) -> None:
    compilers.add("cc", "echo 'cc: error: no such thing' >&2; echo more >&2; exit 3")
    compilers.add("gcc", "exit 4")
    with pytest.raises(NativeUnavailable, match=r"cc: cc: error: no such thing; gcc: exit status 4\)$"):
        library()


def test_the_next_compiler_is_tried_after_one_that_fails(compilers: Compilers) -> None:
    compilers.add("cc", "exit 1")
    compilers.add_good("gcc")
    library()
    assert compilers.calls("cc") and compilers.calls("gcc")


def test_a_compiler_that_writes_nothing_or_rubbish(compilers: Compilers) -> None:
    compilers.add("cc", "exit 0")
    rubbish = 'if [ "$before" = -o ]; then echo rubbish > "$each"; fi'
    compilers.add("gcc", f'for each; do {rubbish}; before="$each"; done')
    with pytest.raises(NativeUnavailable, match=r"cc: .*No such file.*; gcc: .*(too short|invalid ELF|file format)"):
        library()


def test_a_compiler_without_the_flags_of_gcc(compilers: Compilers) -> None:
    compilers.add_good("real")
    refuse = 'for each; do if [ "$each" = -fno-tree-reassoc ]; then exit 1; fi; done'
    compilers.add("clang", f'{refuse}\n{compilers.folder}/real "$@"')
    library()
    assert len(compilers.calls("clang")) == 2


def test_a_compiler_that_hangs_is_given_up(compilers: Compilers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TIMEOUT", 0.2)
    compilers.add("cc", "exec /bin/sleep 30")
    with pytest.raises(NativeUnavailable, match=r"cc: not done within 0\.2 s"):
        library()


def test_the_compiler_that_a_package_brings(compilers: Compilers, monkeypatch: pytest.MonkeyPatch) -> None:
    compilers.add_good("python")
    pretend_package(monkeypatch, object())
    monkeypatch.setattr(sys, "executable", str(compilers.folder / "python"))
    library()
    assert compilers.calls("python")[0][:3] == ["-m", "ziglang", "cc"]


def test_a_cache_folder_that_cannot_be_written(
    compilers: Compilers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels go to a folder of this process: here a file stands in the way."""
    compilers.add_good("cc")
    (tmp_path / "cache").write_text("a file")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    loaded = Path(library()._name)
    assert loaded.is_relative_to(tmp_path / "temporary") and loaded.is_file()


def test_a_folder_without_permission(compilers: Compilers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compilers.add_good("cc")
    allowed = os.access
    folder = tmp_path / "cache/kernels"
    monkeypatch.setattr(os, "access", lambda path, mode, **rest: path != folder and allowed(path, mode, **rest))
    assert not Path(library()._name).is_relative_to(folder)


@pytest.mark.parametrize(
    ("flags", "missing"),
    [("fpu sse2 avx", "avx2, f16c, fma"), ("avx2 fma", "f16c"), ("avx512f avx2x fma f16c", "avx2")],
)
def test_a_processor_without_the_instructions(
    compilers: Compilers, monkeypatch: pytest.MonkeyPatch, flags: str, missing: str
) -> None:
    compilers.add_good("cc")
    pretend_processor(monkeypatch, f"processor\t: 0\nflags\t\t: {flags}\n\nprocessor\t: 1\nflags\t\t: avx2 fma f16c\n")
    with pytest.raises(NativeUnavailable, match=rf"^this processor lacks {missing}$"):
        library()
    assert why_unavailable() == f"this processor lacks {missing}"
    assert compilers.calls("cc") == []


def test_a_system_that_does_not_tell_its_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_processor(monkeypatch, None)
    with pytest.raises(NativeUnavailable, match=r"the processor cannot be identified \(no such file\)"):
        library()


@pytest.mark.parametrize(("machine", "system"), [("aarch64", "linux"), ("x86_64", "darwin"), ("AMD64", "win32")])
def test_other_machines(monkeypatch: pytest.MonkeyPatch, machine: str, system: str) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(sys, "platform", system)
    with pytest.raises(NativeUnavailable, match=rf"this is {machine.lower()}/{system}"):
        library()


def pretend_processor(monkeypatch: pytest.MonkeyPatch, text: str | None) -> None:
    honest = Path.read_text

    def read_text(path: Path, *rest: object) -> str:
        if path != Path("/proc/cpuinfo"):
            return honest(path, *rest)  # type: ignore[arg-type]
        if text is None:
            raise FileNotFoundError("no such file")
        return text

    monkeypatch.setattr(Path, "read_text", read_text)
