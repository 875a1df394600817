"""The kernels are compiled once, with the compiler there is; without one the decoder runs on torch and says why."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import pwd
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from outpace.models.config import DecoderConfig
from outpace.models.decoder import Decoder
from outpace.models.native import library as module
from outpace.models.native.library import NativeUnavailable, library, why_unavailable
from outpace.models.native.matrix import Stored
from outpace.models.native.structures import Source
from outpace.models.torch_layers import TorchLayers
from tests.models.tiny_models import lanes, pack_of, random_ids, reference_model, tiny_weights

CACHED = (module._outcome, module.why_unavailable, module._processor_flags)


@pytest.fixture(scope="session")
def built() -> Path:
    """The kernels of this machine, compiled before any test bends the environment."""
    return Path(library()._name)


@pytest.fixture(autouse=True)
def forgotten(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is remembered before and after a test, and what it compiles goes to a folder of its own."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    forget()
    yield
    monkeypatch.undo()
    forget()
    library()


def forget() -> None:
    """As in a process that was just started."""
    for function in CACHED:
        function.cache_clear()


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
    weights = torch.arange(64.0).view(2, 32)
    for _ in range(3):
        forget()
        assert torch.equal(Stored(Source.F32, weights, 2, 32).read_rows(torch.tensor([1])), weights[1:])
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
    forget()
    library()
    assert (len(compilers.calls("cc")), len(compilers.calls("other"))) == (1, 1)
    monkeypatch.setattr(module, "_processor_flags", lambda: "avx2 fma f16c new_feature")
    forget()
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


def test_a_cc_with_an_open_quotation(
    compilers: Compilers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", 'cc -DNAME="x')
    reason = """CC='cc -DNAME="x' is no command: No closing quotation"""
    module.prepare(pytest.fail)
    with pytest.raises(NativeUnavailable, match=rf"there is no C compiler \({reason}\): install gcc"):
        library()
    compilers.add("cc", "exit 1")
    forget()
    with pytest.raises(NativeUnavailable, match=rf"the kernels do not compile here \({reason}; cc: exit status 1\)"):
        library()
    compilers.add_good("cc")
    forget()
    caplog.clear()
    module.prepare(lambda text: None)
    library()
    assert [record.message for record in caplog.records] == [f"passed over: {reason}"]


def test_words_of_a_compiler_that_are_no_text(compilers: Compilers) -> None:
    compilers.add("cc", "printf 'wrong \\377\\376 bytes' >&2; exit 1")
    with pytest.raises(NativeUnavailable, match=r"cc: wrong .+ bytes\)"):
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


def test_a_compiler_that_writes_nothing_or_rubbish(compilers: Compilers, tmp_path: Path) -> None:
    compilers.add("cc", "exit 0")
    rubbish = 'if [ "$before" = -o ]; then echo rubbish > "$each"; fi'
    compilers.add("gcc", f'for each; do {rubbish}; before="$each"; done')
    with pytest.raises(
        NativeUnavailable, match=r"cc: .*nothing was written; gcc: .*(too short|invalid ELF|file format)"
    ):
        library()
    for folder in (tmp_path / "cache/kernels", temporary_folder(tmp_path)):
        assert list(folder.iterdir()) == []


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


def temporary_folder(tmp_path: Path) -> Path:
    return tmp_path / "temporary" / f"outpace-kernels-{os.getuid()}"


def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(f"uid not found: {uid}")

    for name in ("OUTPACE_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(RuntimeError):
        Path.home()


def no_such_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTPACE_CACHE", "~nouser-of-this-name/x")


def a_file_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    Path(os.environ["OUTPACE_CACHE"]).write_text("a file")


def no_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    folder, honest = Path(os.environ["OUTPACE_CACHE"]) / "kernels", tempfile.mkstemp

    def mkstemp(**options: Any) -> tuple[int, str]:
        if options["dir"] == folder:
            raise PermissionError(f"Permission denied: {folder}")
        return honest(**options)

    monkeypatch.setattr(tempfile, "mkstemp", mkstemp)


def nothing_may_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Like a file system that is mounted with noexec."""
    cache, honest = os.environ["OUTPACE_CACHE"], ctypes.CDLL

    def load(name: str) -> ctypes.CDLL:
        if name.startswith(cache):
            raise OSError(f"{name}: failed to map segment from shared object")
        return honest(name)

    monkeypatch.setattr(ctypes, "CDLL", load)


@pytest.mark.parametrize(
    "hinder", [no_home, no_such_user, a_file_in_the_way, no_permission, nothing_may_be_run], ids=lambda it: it.__name__
)
def test_without_a_cache_one_temporary_folder_of_this_user_is_kept(
    compilers: Compilers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hinder: Callable[[pytest.MonkeyPatch], None]
) -> None:
    compilers.add_good("cc")
    hinder(monkeypatch)
    said: list[str] = []
    loaded, calls = [], []
    for _ in range(3):
        forget()
        module.prepare(said.append)
        loaded.append(Path(library()._name))
        calls.append(len(compilers.calls("cc")))
    assert len(said) == 1 and calls[0] == calls[2]
    assert list((tmp_path / "temporary").iterdir()) == [temporary_folder(tmp_path)]
    assert list(temporary_folder(tmp_path).iterdir()) == loaded[:1] and len(set(loaded)) == 1
    assert stat.S_IMODE(temporary_folder(tmp_path).stat().st_mode) == 0o700
    assert not list((tmp_path / "cache").glob("kernels/*"))


def test_with_a_cache_no_temporary_folder_is_made(compilers: Compilers, tmp_path: Path) -> None:
    compilers.add_good("cc")
    loaded = Path(library()._name)
    assert loaded.parent == tmp_path / "cache/kernels"
    assert stat.S_IMODE(loaded.stat().st_mode) == 0o755  # of use to all who share the cache
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.parametrize("fault", ["open to others", "a link", "a file", "of somebody else"])
def test_a_temporary_folder_that_others_could_write(
    compilers: Compilers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """What lies there is neither loaded nor added to: anybody may have put it there."""
    compilers.add_good("cc")
    a_file_in_the_way(monkeypatch)
    library()
    folder = temporary_folder(tmp_path)
    if fault == "open to others":
        folder.chmod(0o770)
    elif fault == "of somebody else":
        monkeypatch.setattr(os, "getuid", lambda: 54321)
        folder = folder.rename(temporary_folder(tmp_path))
    else:
        elsewhere = folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(elsewhere) if fault == "a link" else folder.write_text("a file")
    forget()
    message = rf"cc: {folder} is not a folder of this user alone .*set OUTPACE_CACHE to a folder that can be written"
    with pytest.raises(NativeUnavailable, match=message):
        library()
    assert len(compilers.calls("cc")) == 1


@pytest.mark.parametrize("damage", ["empty", "cut", "changed"])
def test_a_damaged_file_is_compiled_again_and_never_loaded(
    compilers: Compilers, tmp_path: Path, built: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    compilers.add_good("cc")
    file, whole = Path(library()._name), built.read_bytes()
    changed = whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:]
    file.unlink()  # what is loaded must not change under it
    file.write_bytes({"empty": b"", "cut": whole[: len(whole) // 2], "changed": changed}[damage])
    honest = ctypes.CDLL

    def load(name: str) -> ctypes.CDLL:
        assert Path(name).read_bytes() == whole  # else this process might die of SIGBUS
        return honest(name)

    monkeypatch.setattr(ctypes, "CDLL", load)
    said: list[str] = []
    for _ in range(2):
        forget()
        module.prepare(said.append)
        assert library()._name == str(file)
    assert len(said) == 1 and len(compilers.calls("cc")) == 2
    assert list((tmp_path / "cache/kernels").iterdir()) == [file]


def test_a_damaged_file_that_cannot_be_removed(
    compilers: Compilers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compilers.add_good("cc")
    file = Path(library()._name)
    file.unlink()
    file.write_bytes(b"")
    honest = Path.unlink

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path == file:
            raise PermissionError("read-only file system")
        honest(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    no_permission(monkeypatch)
    for _ in range(2):
        forget()
        assert Path(library()._name).parent == temporary_folder(tmp_path)
    assert len(compilers.calls("cc")) == 2


def test_a_whole_file_that_does_not_load_is_compiled_again(compilers: Compilers, tmp_path: Path) -> None:
    compilers.add_good("cc")
    file = Path(library()._name)
    mark = file.name.split("-")[1]
    rubbish = file.with_name(module._name(mark, b"rubbish"))
    file.unlink()
    rubbish.write_bytes(b"rubbish")
    forget()
    assert library()._name == str(file)
    assert len(compilers.calls("cc")) == 2
    assert list((tmp_path / "cache/kernels").iterdir()) == [file]


def test_the_content_is_on_disk_before_it_has_its_name(
    compilers: Compilers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compilers.add_good("cc")
    honest, flushed = os.fsync, []

    def fsync(handle: int) -> None:
        assert not list((tmp_path / "cache/kernels").glob("*.so"))
        flushed.append(os.fstat(handle).st_ino)
        honest(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    loaded = Path(library()._name)
    assert flushed == [loaded.stat().st_ino]


def test_half_done_files_have_names_of_their_own(compilers: Compilers) -> None:
    """Threads and processes that compile at the same time do not write into one file."""
    compilers.add_good("cc")
    for _ in range(3):
        forget()
        Path(library()._name).unlink()
    written = [arguments[arguments.index("-o") + 1] for arguments in compilers.calls("cc")]
    assert len(set(written)) == len(written) == 3


@pytest.mark.parametrize("good", [True, False])
def test_threads_that_ask_at_the_same_time_compile_once(compilers: Compilers, good: bool) -> None:
    compilers.add_good("real")
    compilers.add("cc", f'/bin/sleep 0.3\n{compilers.folder}/real "$@"' if good else "/bin/sleep 0.3; exit 1")
    barrier = threading.Barrier(4)

    def ask() -> object:
        barrier.wait(60)
        try:
            return library()
        except NativeUnavailable as error:
            return str(error)

    with ThreadPoolExecutor(4) as pool:
        answers = [future.result() for future in [pool.submit(ask) for _ in range(4)]]
    assert len(set(answers)) == 1 and isinstance(answers[0], str) != good
    assert len(compilers.calls("cc")) == (1 if good else 2)  # with and without the flags of gcc


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
