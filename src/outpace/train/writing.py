"""Files that are there whole or not at all, whatever interrupts the writing."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

from outpace.errors import OutpaceError
from outpace.models.files import format_bytes

__all__ = ["make_folder", "write_bytes", "write_json"]


def write_bytes(path: Path, content: bytes | memoryview, *, private: bool = False) -> None:
    """Replaces a file by one with this content. What was there stays until the new one is safely on disk.

    Args:
        path: of the file.
        content: of the file.
        private: nobody but its owner may read it.

    Raises:
        OutpaceError: it cannot be written; says why (a full disk above all) and that the old file is as it was.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        temporary.unlink(missing_ok=True)
        with open(temporary, "wb", opener=partial(os.open, mode=0o600 if private else 0o666)) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _flush_folder(path.parent)
        _clear(path)
    except OSError as error:
        raise OutpaceError(_message(path, len(content), error)) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()  # gone already if all went well


def write_json(path: Path, value: Any) -> None:
    """`write_bytes` of a JSON value."""
    write_bytes(path, (json.dumps(value, indent=2) + "\n").encode())


def make_folder(path: Path, *, private: bool = False) -> Path:
    """The folder, made if it is not there; `private`: for its owner alone, if it is made.

    Raises:
        OutpaceError: it cannot be made.
    """
    try:
        path.mkdir(mode=0o700 if private else 0o777, parents=True, exist_ok=True)
    except OSError as error:
        raise OutpaceError(f"folder {path} cannot be made: {error.strerror}; name another one with --out") from error
    return path


def _flush_folder(folder: Path) -> None:
    """Makes sure that the new name is on disk as well; systems that cannot do that are left alone."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _clear(path: Path) -> None:
    """Takes away what processes that were killed while they wrote this file have left."""
    for left in path.parent.glob(f".{path.name}.*.new"):
        number = left.name.rsplit(".", 2)[1]
        if Path("/proc/self").exists() and number.isdigit() and not Path(f"/proc/{number}").exists():
            left.unlink(missing_ok=True)


def _message(path: Path, size: int, error: OSError) -> str:
    kept = "; what was there before is untouched" if path.exists() else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"the disk is full: {path} needs {format_bytes(size)}{kept}. Make room, then go on: with --resume if it is "
            "a run, else the same command"
        )
    return f"{path} cannot be written: {error.strerror}{kept}"
