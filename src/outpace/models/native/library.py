"""The native kernels: C files beside this one, compiled once for the processor at hand and kept in the cache folder.

Any C compiler will do (`$CC`, cc, gcc, clang, or `pip install outpace[compiler]`, which brings one). Without one, or
on a processor without AVX2, the decoder runs on torch's own kernels, which are slower; `library` says why.

A compiled file is named `outpace-MARK-DIGEST.so`: the mark stands for compiler, flags, processor and sources, the
digest for the file's content. It is checked before the file is loaded: a process may die of loading one cut short.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from outpace.errors import OutpaceError
from outpace.models.files import cache_folder

__all__ = ["NativeUnavailable", "library", "prepare", "why_unavailable"]

_LOG = logging.getLogger(__name__)
_SOURCES = Path(__file__).parent
# Without contraction, every compiler rounds alike. gcc's own tuning for AMD splits loads of 32 bytes (fp32 products
# take 1.6 times as long), and its reassociation moves sums out of registers (int8 at one row takes 1.4 times as long).
_FLAGS = ("-O2", "-march=native", "-mtune=haswell", "-ffp-contract=off", "-std=gnu11", "-fPIC", "-shared", "-w")
_GCC_FLAGS = ("-fno-tree-reassoc",)
_NEEDED = {"avx2", "fma", "f16c"}
_TIMEOUT = 120
_LOCK = threading.Lock()  # several threads may ask first; one compiles


class NativeUnavailable(Exception):
    """The kernels cannot run here; the message says why and what would help."""


def library() -> ctypes.CDLL:
    """The loaded kernels, compiled first if this was not done before (a few seconds).

    Raises:
        NativeUnavailable: another processor, no compiler, or a compiler that fails.
    """
    with _LOCK:
        found = _outcome()
    if isinstance(found, str):
        raise NativeUnavailable(found)
    return found


@functools.cache
def _outcome() -> ctypes.CDLL | str:
    """The loaded kernels, or why there are none."""
    try:
        _require_processor()
    except NativeUnavailable as error:
        return str(error)
    commands, reasons = _compilers()
    for reason in reasons:
        _LOG.warning("passed over: %s", reason)
    for command in commands:
        try:
            return _loaded(command)
        except (OSError, subprocess.SubprocessError) as error:
            reasons.append(f"{' '.join(command)}: {_reason(error)}")
    if commands:
        return f"the kernels do not compile here ({'; '.join(reasons)})"
    aside = f" ({'; '.join(reasons)})" if reasons else ""
    return f"there is no C compiler{aside}: install gcc or clang, or `pip install outpace[compiler]`"


@functools.cache
def why_unavailable() -> str | None:
    """None if the kernels run here, else the reason; logged when first asked."""
    try:
        library()
    except NativeUnavailable as error:
        _LOG.warning("torch's own kernels are used, slower than outpace's: %s", error)
        return str(error)
    return None


def prepare(notify: Callable[[str], None]) -> None:
    """Compiles the kernels if that has not been done, and says so first: it takes some seconds."""
    try:
        _require_processor()
        marks = [_mark(command) for command in _compilers()[0]]
    except (NativeUnavailable, OSError):
        return  # `why_unavailable` tells when somebody asks for the kernels
    if marks and not any(_kept(mark) for mark in marks):
        notify("compiling kernels for this processor, once, some seconds")
    why_unavailable()


def _require_processor() -> None:
    machine = platform.machine().lower()
    if machine not in ("x86_64", "amd64") or sys.platform != "linux":
        raise NativeUnavailable(f"the kernels are for x86-64 processors under Linux, this is {machine}/{sys.platform}")
    missing = _NEEDED - set(_processor_flags().split())
    if missing:
        raise NativeUnavailable(f"this processor lacks {', '.join(sorted(missing))}")


@functools.cache
def _processor_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError as error:
        raise NativeUnavailable(f"the processor cannot be identified ({error})") from error
    return next((line.partition(":")[2] for line in lines if line.startswith("flags")), "")


def _compilers() -> tuple[list[list[str]], list[str]]:
    """The commands to try, the best first, and why others are passed over."""
    named: list[str] = []
    reasons = []
    try:
        named = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        reasons.append(f"CC={os.environ['CC']!r} is no command: {error}")
    commands = [command for command in (named, ["cc"], ["gcc"], ["clang"]) if command and shutil.which(command[0])]
    if importlib.util.find_spec("ziglang") is not None:
        commands.append([sys.executable, "-m", "ziglang", "cc"])
    return commands, reasons


def _mark(command: list[str]) -> str:
    """20 hex digits for what this compiler makes of these sources for this processor."""
    mark = hashlib.blake2b(repr((command, _FLAGS, _GCC_FLAGS, _processor_flags())).encode(), digest_size=10)
    for file in sorted(_SOURCES.glob("*.[ch]")):
        mark.update(file.read_bytes())
    return mark.hexdigest()


def _loaded(command: list[str]) -> ctypes.CDLL:
    """The kernels of this compiler, from a file that is kept or, without a sound one, from one that is compiled now."""
    mark = _mark(command)
    for file in _kept(mark):
        with contextlib.suppress(OSError):
            return _load(file)
    problem = OSError("there is no folder to compile in")
    for find in (_cached, _temporary):
        try:
            return _load(_compiled(command, mark, find(make=True)))
        except OSError as error:  # not to be written, or files there may not be run: the other folder may do
            _LOG.debug("no kernels there: %s", error)
            problem = error
    raise problem


def _load(file: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(file))
    except OSError:
        _discard(file)
        raise


def _kept(mark: str) -> list[Path]:
    """Compiled files with this mark whose content is what was written; others of this mark are removed."""
    sound = []
    for find in (_cached, _temporary):
        try:
            files = sorted(find(make=False).glob(f"outpace-{mark}-*.so"))
        except OSError as error:
            _LOG.debug("no kernels there: %s", error)
            continue
        for file in files:
            try:
                content = file.read_bytes()
            except OSError as error:
                _LOG.debug("%s cannot be read: %s", file, error)
                continue
            if file.name == _name(mark, content):
                sound.append(file)
            else:
                _discard(file)
    return sound


def _name(mark: str, content: bytes) -> str:
    return f"outpace-{mark}-{hashlib.blake2b(content, digest_size=10).hexdigest()}.so"


def _discard(file: Path) -> None:
    _LOG.info("%s is damaged or cannot be loaded: it is removed", file)
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        _LOG.debug("%s cannot be removed: %s", file, error)


def _compiled(command: list[str], mark: str, folder: Path) -> Path:
    """The shared library that this compiler makes now."""
    _LOG.info("compiling the kernels for this processor, once, into %s", folder)
    handle, name = tempfile.mkstemp(prefix=f".outpace-{mark}-", suffix=".partial", dir=folder)
    os.close(handle)
    partial = Path(name)
    try:
        _compile(command, [str(file) for file in sorted(_SOURCES.glob("*.c"))], partial)
        with partial.open("rb") as file:
            content = file.read()
            os.fsync(file.fileno())  # else a power cut may leave the new name with a part of the content
        if not content:
            raise subprocess.SubprocessError("exit status 0, but nothing was written")
        partial.chmod(0o755)  # mkstemp lets nobody else read, and a cache may be shared
        return partial.replace(folder / _name(mark, content))
    finally:
        partial.unlink(missing_ok=True)


def _compile(command: list[str], sources: list[str], target: Path) -> None:
    for extra in (_GCC_FLAGS, ()):
        arguments = [*command, *_FLAGS, *extra, *sources, "-o", str(target), "-ldl", "-lm"]
        try:
            done = subprocess.run(
                arguments, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT, check=False
            )
        except OSError as error:  # it does not start, wherever it should write
            raise subprocess.SubprocessError(str(error)) from error
        if done.returncode == 0:
            return
    raise subprocess.SubprocessError((done.stderr.strip() or f"exit status {done.returncode}").splitlines()[0])


def _cached(*, make: bool) -> Path:
    """The folder of kernels in the cache; OSError if there can be none."""
    try:
        folder = cache_folder() / "kernels"
    except OutpaceError as error:  # this user has no home directory
        raise FileNotFoundError(str(error)) from error
    if make:
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def _temporary(*, make: bool) -> Path:
    """This user's folder among the temporary files, for a cache that cannot be written: one, whatever is started.

    OSError if there is none, or if somebody else could put kernels there.
    """
    folder = Path(tempfile.gettempdir()) / f"outpace-kernels-{os.getuid()}"
    if make:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(
            f"{folder} is not a folder of this user alone (mode 700): remove it, or set OUTPACE_CACHE to a folder that "
            "can be written"
        )
    return folder


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.TimeoutExpired):
        return f"not done within {_TIMEOUT} s"
    return (str(error) or type(error).__name__).splitlines()[0]
