"""Notes and progress on standard error: a moving bar on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from outpace.cli.streams import say

__all__ = ["Progress", "PromptProgress"]


class Progress:
    """How far something is; a context manager. `report` and `say` fit the `progress` and `notify` of `LLM`.

    Args:
        interval: seconds between two lines about the same thing where there is no terminal.
        clock: time in seconds.
    """

    def __init__(self, *, interval: float = 30.0, clock: Callable[[], float] = time.perf_counter) -> None:
        self._bars = _bars()
        self._interval, self._clock = interval, clock
        self._tasks: dict[str, TaskID] = {}
        self._begun: dict[str, float] = {}
        self._last_line: dict[str, float] = {}
        self._ended: set[str] = set()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Takes the bars away."""
        if self._bars:
            self._bars.stop()

    def report(self, what: str, done: int, total: int) -> None:
        """`done` of `total` parts of `what` are ready."""
        if self._bars:
            if what not in self._tasks:
                self._bars.start()
                self._tasks[what] = self._bars.add_task(what, total=total)
            self._bars.update(self._tasks[what], completed=done, total=total)
        else:
            self._report_line(what, done, total)

    def say(self, text: str) -> None:
        """A note that leaves the bars in place."""
        if self._bars:
            self._bars.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            say(text)

    def _report_line(self, what: str, done: int, total: int) -> None:
        now = self._clock()
        if what not in self._begun:
            self._begun[what] = self._last_line[what] = now
            say(f"{what} ...")
        if what in self._ended:
            return
        if done >= total:
            self._ended.add(what)
            say(f"{what}: done in {now - self._begun[what]:.1f} s")
        elif now - self._last_line[what] >= self._interval:
            self._last_line[what] = now
            say(f"{what}: {100 * done // total} %")


class PromptProgress:
    """How much of a prompt has been read, shown only if that takes a while; a context manager around the reading.

    The engine computes for seconds without a word, so a timer of its own decides when somebody has waited long enough.

    Args:
        patience: seconds before anything is shown.
        interval: seconds between two lines where there is no terminal.
        clock: time in seconds.
    """

    def __init__(
        self, *, patience: float = 1.0, interval: float = 10.0, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._bars = _bars()
        self._interval, self._clock = interval, clock
        self._lock = threading.Lock()
        self._timer = threading.Timer(patience, self._show)
        self._timer.daemon = True
        self._task: TaskID | None = None
        self._begun = self._last_line = clock()
        self._counts: tuple[int, int] | None = None
        self._shown = self._over = False

    def __enter__(self) -> PromptProgress:
        self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(done=False)

    def report(self, done: int, total: int) -> None:
        """`done` of `total` tokens are read."""
        with self._lock:
            self._counts = done, total
            if not self._shown or self._over:
                return
            if self._bars and self._task is not None:
                self._bars.update(self._task, description=self._text(), completed=done, total=total)
            elif self._clock() - self._last_line >= self._interval:
                self._say()

    def finish(self) -> None:
        """The prompt is read; may be called more than once."""
        self._end(done=True)

    def _end(self, *, done: bool) -> None:
        self._timer.cancel()
        with self._lock:
            if self._over:
                return
            self._over = True
            if self._bars:
                self._bars.stop()
            elif self._shown and done:
                say(f"reading the prompt: done in {self._clock() - self._begun:.1f} s")

    def _show(self) -> None:
        with self._lock:
            if self._over:
                return
            self._shown = True
            if self._bars:
                done, total = self._counts or (0, None)  # without a total the bar only moves to and fro
                self._bars.start()
                self._task = self._bars.add_task(self._text(), completed=done, total=total)
            else:
                self._say()

    def _say(self) -> None:
        self._last_line = self._clock()
        say(self._text())

    def _text(self) -> str:
        if self._counts is None:
            return "reading the prompt ..."
        return "reading the prompt: {} of {} tokens".format(*self._counts)


def _bars() -> Bars | None:
    """Bars that go away when they are done, or None where there is no terminal for them."""
    console = Console(stderr=True)
    if not console.is_terminal or console.is_dumb_terminal:
        return None
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f} %"))
    return Bars(*columns, TimeElapsedColumn(), console=console, transient=True)
