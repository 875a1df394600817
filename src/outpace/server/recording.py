"""Finished answers, appended to files that `outpace train --from` reads (`train.data.recorded`).

A thread of its own writes. Who has an answer hands it over and goes on at once, whatever the disk does: where the
thread cannot follow, answers are left out and counted.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from outpace.engine.outputs import RequestOutput
from outpace.errors import InvalidParameter
from outpace.models.files import format_bytes
from outpace.server.record_file import OWNER_ONLY, RecordFile, delete_unless_written, file_name, own_files

__all__ = ["LOST", "RecordCounts", "Recorder", "check_folder", "describe"]

log = logging.getLogger(__name__)

LOST = ("disk", "queue", "length")
"""Why an answer was left out: it could not be written, too many waited, or it is longer than a file may be."""
_MOST_WAITING = 4_000_000
"""Tokens that may wait for the thread."""
_FILES = 8
"""So many files make up the limit; the oldest goes when it is reached."""
_KEPT = frozenset({"stop", "length"})
"""Reasons for which an answer that is whole has ended."""


class RecordCounts(NamedTuple):
    """What became of answers so far.

    Args:
        written: answers in files, those that have been deleted since included.
        lost: by reason, those that were left out.
        num_bytes: that the files which servers wrote there take now.
    """

    written: int
    lost: Mapping[str, int]
    num_bytes: int


def check_folder(folder: Path) -> None:
    """Makes the folder if it is missing, for its owner alone, and tries whether it can be written to.

    Raises:
        InvalidParameter: it cannot.
    """
    trial = folder / f".trial-{os.getpid()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        trial.touch(mode=OWNER_ONLY)
        trial.unlink()
    except OSError as error:
        raise InvalidParameter(f"--record {str(folder)!r} is not possible: {error.strerror}; name another") from error


class Recorder:
    """Writes answers to a folder until it is closed.

    Args:
        folder: was checked by `check_folder`.
        max_bytes: most that all files which servers wrote there may take together.
        header: what the first line of a file says; asked for with every new file.
    """

    def __init__(self, folder: Path, max_bytes: int, header: Callable[[], Mapping[str, Any]]) -> None:
        self._folder, self._max_bytes, self._header = folder, max_bytes, header
        self._waiting: deque[tuple[Sequence[int], Sequence[int]]] = deque()
        self._tokens_waiting = 0
        self._changed = threading.Condition()
        self._closed = False
        self._renewed = False
        self._written = 0
        self._lost = dict.fromkeys(LOST, 0)
        self._warned = False
        self._file: RecordFile | None = None
        self._number = 0
        self._others = 0
        """Bytes of the files that are not being written."""
        self._look_at_others()
        self._thread = threading.Thread(target=self._run, name="outpace-record", daemon=True)
        self._thread.start()

    # For other threads. None of this waits for a disk.

    def record(self, output: RequestOutput) -> None:
        """Hands over all choices of an answer; those that did not come to their end are left out."""
        for choice in output.outputs:
            if choice.finish_reason in _KEPT and choice.token_ids:
                self._hand_over(output.prompt_token_ids, choice.token_ids)

    def renew(self) -> None:
        """The next answer begins a new file, because what its first line says has changed."""
        with self._changed:
            self._renewed = True

    def counts(self) -> RecordCounts:
        """What became of answers so far."""
        with self._changed:
            current = 0 if self._file is None else self._file.size
            return RecordCounts(self._written, dict(self._lost), self._others + current)

    def close(self, seconds: float) -> None:
        """Writes what waits, in so many seconds at most."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(seconds)
        if self._thread.is_alive():
            log.warning("answers that were still to be recorded are left out: %s is too slow", self._folder)

    def _hand_over(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        count = len(prompt) + len(answer)
        with self._changed:
            if self._closed or self._tokens_waiting + count > _MOST_WAITING:
                self._lost["queue"] += 1
                return
            self._waiting.append((prompt, answer))
            self._tokens_waiting += count
            self._changed.notify()

    # In the thread.

    def _run(self) -> None:
        while (item := self._next()) is not None:
            line = json.dumps({"prompt_token_ids": item[0], "token_ids": item[1]}, separators=(",", ":"))
            self._write(line.encode() + b"\n")
        if self._file is not None:
            self._file.close()

    def _next(self) -> tuple[list[int], list[int]] | None:
        """What waits the longest; None when it is time to end."""
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait()
            if not self._waiting:
                return None
            prompt, answer = self._waiting.popleft()
            self._tokens_waiting -= len(prompt) + len(answer)
        return list(prompt), list(answer)

    def _write(self, line: bytes) -> None:
        """Appends a line, or counts it as lost; whatever a disk may do, the next one is tried anew."""
        reason = "disk"
        try:
            file = self._file_for(line)
            if file is None:
                reason = "length"
            else:
                file.append(line)
                reason = ""
        except Exception as error:  # whatever it is: a thread that ended would leave out all the others unseen
            self._warn(error)
        with self._changed:
            if reason:
                self._lost[reason] += 1
            else:
                self._written += 1

    def _file_for(self, line: bytes) -> RecordFile | None:
        """The file that takes a line, a new one if the last is full; makes room by deleting the oldest."""
        most = self._max_bytes // _FILES
        with self._changed:
            renewed, self._renewed = self._renewed, False
        file = self._file
        if file is not None and (renewed or file.is_torn or file.is_gone or file.size + len(line) > most):
            self._file = None  # first: one that cannot be closed is not written to either
            try:
                self._look_at_others()
            finally:
                file.close()
        if self._file is None:
            self._number += 1
            header = json.dumps(self._header(), separators=(",", ":")).encode() + b"\n"
            if len(header) + len(line) > most:
                return None
            self._make_room(len(header) + len(line))
            self._file = RecordFile(self._folder / file_name(self._number), header)
        elif len(line) > most:
            return None
        self._make_room(len(line))
        return self._file

    def _make_room(self, count: int) -> None:
        """Deletes the oldest files that nobody is writing until so many bytes more are within the limit."""
        current = 0 if self._file is None else self._file.size
        if self._others + current + count <= self._max_bytes:
            return
        for path in own_files(self._folder):
            if self._file is not None and path == self._file.path:
                continue
            delete_unless_written(path)
            self._look_at_others()
            if self._others + current + count <= self._max_bytes:
                return

    def _look_at_others(self) -> None:
        sizes = 0
        for path in own_files(self._folder):
            if self._file is None or path != self._file.path:
                try:
                    sizes += path.stat().st_size
                except FileNotFoundError:
                    continue  # another server has just deleted it
        with self._changed:
            self._others = sizes

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "answers cannot be recorded in %s (%s): they are left out, and counted in "
                "outpace:unrecorded_answers_total; serving goes on, and so does trying",
                self._folder,
                getattr(error, "strerror", None) or repr(error),
                exc_info=None if isinstance(error, OSError) else error,
            )


def describe(folder: Path, max_bytes: int) -> str:
    """For people."""
    return f"finished answers are recorded in {folder}, at most {format_bytes(max_bytes)}"
