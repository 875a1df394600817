"""A file of recorded answers while it is written, and those that a folder holds.

Whoever writes a file holds a lock on it (`flock`), so that several servers can record into one folder: none deletes
what another is writing. Files that no server wrote are nobody's to count or delete, whatever they are called.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from datetime import datetime, timezone
from pathlib import Path

from outpace.errors import OutpaceError
from outpace.train.data.recorded import PATTERN, header_of, record_files

__all__ = ["OWNER_ONLY", "RecordFile", "delete_unless_written", "file_name", "own_files"]

OWNER_ONLY = 0o600
_NAME = re.compile(r"answers-\d{8}T\d{6}\.\d{6}-\d+-\d{6,}\.jsonl")


def file_name(number: int) -> str:
    """Of a file that this process begins now, the so-manieth."""
    begun = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S.%f")
    return PATTERN.replace("*", f"{begun}-{os.getpid()}-{number:06}")


def own_files(folder: Path) -> list[Path]:
    """The files of a folder that servers wrote, the oldest first."""
    return [path for path in record_files(folder) if _NAME.fullmatch(path.name) and _has_header(path)]


def delete_unless_written(path: Path) -> None:
    """Deletes a file, unless a server is writing it.

    Raises:
        OSError: it cannot be deleted.
    """
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return  # another server was quicker
    try:
        with contextlib.suppress(OSError):  # a file system without locks: as if there were one server
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
        path.unlink(missing_ok=True)
    finally:
        os.close(file)


class RecordFile:
    """A file of whole lines.

    Args:
        path: must not be there.
        header: its first line.

    Raises:
        OSError: it cannot be written; then it is not there.
    """

    def __init__(self, path: Path, header: bytes) -> None:
        self.path = path
        self.size = 0
        self.is_torn = False
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_ONLY)
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.append(header)
        except OSError:
            self.close()
            path.unlink(missing_ok=True)
            raise

    @property
    def is_gone(self) -> bool:
        """Whether it was deleted or moved: what is written now would not be found."""
        try:
            return not os.path.samestat(self.path.stat(), os.fstat(self._file))
        except FileNotFoundError:
            return True

    def append(self, line: bytes) -> None:
        """Writes a line. If that fails, what there is of it goes; if that fails too, the file takes no more lines."""
        written = 0
        try:
            while written < len(line):
                written += os.write(self._file, line[written:])
        except OSError:
            self.is_torn = True
            os.ftruncate(self._file, self.size)
            os.lseek(self._file, self.size, os.SEEK_SET)
            self.is_torn = False
            raise
        self.size += len(line)

    def close(self) -> None:
        os.close(self._file)


def _has_header(path: Path) -> bool:
    try:
        return header_of(path) is not None
    except OutpaceError:  # of another version, or not for us to read: not ours
        return False
