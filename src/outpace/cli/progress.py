"""Notes and progress on standard error: a moving bar on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from outpace.cli.streams import say

__all__ = ["Progress"]


class Progress:
    """How far something is; a context manager. `report` and `say` fit the `progress` and `notify` of `LLM`.

    Args:
        terminal_only: write nothing where there is no terminal.
    """

    def __init__(self, *, terminal_only: bool = False) -> None:
        console = Console(stderr=True)
        self._bars: Bars | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f} %"))
            self._bars = Bars(*columns, TimeElapsedColumn(), console=console, transient=True)
        self._plain = self._bars is None and not terminal_only
        self._tasks: dict[str, TaskID] = {}
        self._begun: dict[str, float] = {}
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
        elif self._plain:
            self._report_line(what, finished=done >= total)

    def say(self, text: str) -> None:
        """A note that leaves the bars in place."""
        if self._bars:
            self._bars.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            say(text)

    def _report_line(self, what: str, *, finished: bool) -> None:
        if what not in self._begun:
            self._begun[what] = time.perf_counter()
            say(f"{what} ...")
        if finished and what not in self._ended:
            self._ended.add(what)
            say(f"{what}: done in {time.perf_counter() - self._begun[what]:.1f} s")
