"""The native kernels: C files beside this one, compiled once for the processor at hand and kept in the cache folder.

Any C compiler will do (`$CC`, cc, gcc, clang, or `pip install outpace[compiler]`, which brings one). Without one, or
on a processor without AVX2, the decoder runs on torch's own kernels, which are slower; `library` says why.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

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


class NativeUnavailable(Exception):
    """The kernels cannot run here; the message says why and what would help."""


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded kernels, compiled first if this was not done before (a few seconds).

    Raises:
        NativeUnavailable: another processor, no compiler, or a compiler that fails.
    """
    _require_processor()
    reasons = []
    for command in _compilers():
        try:
            loaded = ctypes.CDLL(str(_compiled(command)))
        except (OSError, subprocess.SubprocessError) as error:
            reasons.append(f"{' '.join(command)}: {_reason(error)}")
            continue
        return loaded
    if reasons:
        raise NativeUnavailable("the kernels do not compile here (" + "; ".join(reasons) + ")")
    raise NativeUnavailable("there is no C compiler: install gcc or clang, or `pip install outpace[compiler]`")


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
        targets = [_target(command) for command in _compilers()]
    except (NativeUnavailable, OSError):
        return  # `why_unavailable` tells when somebody asks for the kernels
    if targets and not any(target.is_file() for target in targets):
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


def _compilers() -> Iterator[list[str]]:
    named = shlex.split(os.environ.get("CC", ""))
    for command in (named, ["cc"], ["gcc"], ["clang"]):
        if command and shutil.which(command[0]):
            yield command
    if importlib.util.find_spec("ziglang") is not None:
        yield [sys.executable, "-m", "ziglang", "cc"]


def _target(command: list[str]) -> Path:
    """Where the shared library lies that this compiler makes of these sources for this processor."""
    mark = hashlib.blake2b(repr((command, _FLAGS, _GCC_FLAGS, _processor_flags())).encode(), digest_size=10)
    for file in sorted(_SOURCES.glob("*.[ch]")):
        mark.update(file.read_bytes())
    return cache_folder() / "kernels" / f"outpace-{mark.hexdigest()}.so"


def _compiled(command: list[str]) -> Path:
    """The shared library of this compiler, made now if need be."""
    target = _target(command)
    if target.is_file():
        return target
    target = _writable(target.parent) / target.name
    _LOG.info("compiling the kernels for this processor, once: %s", target)
    partial = target.parent / f".{target.name}.{os.getpid()}"
    try:
        _compile(command, [str(file) for file in sorted(_SOURCES.glob("*.c"))], partial)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return target


def _compile(command: list[str], sources: list[str], target: Path) -> None:
    for extra in (_GCC_FLAGS, ()):
        arguments = [*command, *_FLAGS, *extra, *sources, "-o", str(target), "-ldl", "-lm"]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
        if done.returncode == 0:
            return
    raise subprocess.SubprocessError((done.stderr.strip() or f"exit status {done.returncode}").splitlines()[0])


def _writable(folder: Path) -> Path:
    """The folder, or one for this process alone where it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError as error:
        _LOG.debug("%s cannot be made: %s", folder, error)
    return Path(tempfile.mkdtemp(prefix="outpace-kernels-"))


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.TimeoutExpired):
        return f"not done within {_TIMEOUT} s"
    return (str(error) or type(error).__name__).splitlines()[0]
