"""Two answers side by side on a terminal, each with a clock, accepted draft tokens coloured by where they came from."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from outpace.cli.measure import Run
from outpace.cli.report import counted

if TYPE_CHECKING:
    from outpace.engine.outputs import Piece

__all__ = ["SidePanes", "source_counts"]

_STYLES = {"prompt": "bold green", "output": "bold cyan", "draft model": "bold magenta", "early exit": "bold yellow"}
_OTHER_STYLE = "bold blue"
_FRAMES_PER_SECOND = 12


def source_counts(pieces: Iterable[Piece]) -> dict[str, int]:
    """{source: accepted draft tokens from it}, most frequent first; the target's own tokens are left out."""
    return dict(Counter(piece.source for piece in pieces if piece.source is not None).most_common())


class SidePanes:
    """Shows the plain run as it comes, then the speculative one beside a replay of the plain one at its own pace.

    A context manager. `show_plain` and `show_speculative` are watchers for `measure_run`; the time they take is not
    measured.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=False, vertical_overflow="crop")
        self._drawn_at = 0.0
        self._plain = Run()
        self._speculative: Run | None = None

    def __enter__(self) -> SidePanes:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._draw(finished=True)
        self._live.stop()

    def show_plain(self, run: Run) -> None:
        """Draws the plain run so far."""
        self._plain = run
        self._draw_now_and_then()

    def show_speculative(self, run: Run) -> None:
        """Draws the speculative run so far."""
        self._speculative = run
        self._draw_now_and_then()

    def _draw_now_and_then(self) -> None:
        now = time.perf_counter()
        if now - self._drawn_at >= 1 / _FRAMES_PER_SECOND:
            self._drawn_at = now
            self._draw(finished=False)

    def _draw(self, *, finished: bool) -> None:
        left = self._pane("plain", self._plain, None)
        right: RenderableType = Panel(
            "waits for its turn", title="speculative", title_align="left", height=self._height
        )
        pieces: list[Piece] = []
        if self._speculative is not None:
            moment = None if finished else self._speculative.seconds
            left = self._pane("plain" if finished else "plain, replayed", self._plain, moment)
            right = self._pane("speculative", self._speculative, None)
            pieces = self._speculative.pieces
        grid = Table.grid(expand=True)
        grid.add_column(ratio=1)
        grid.add_column(ratio=1)
        grid.add_row(left, right)
        self._live.update(Group(grid, legend(pieces)), refresh=True)

    @property
    def _height(self) -> int:
        return max(8, min(30, self._console.height - 6))

    def _pane(self, title: str, run: Run, moment: float | None) -> Panel:
        """One run as it stood at `moment` (engine seconds after its first token), or as it stands."""
        pieces, seconds = run.pieces, run.seconds
        if moment is not None and moment < run.seconds:
            index = bisect_right(run.arrivals, moment, key=lambda arrival: arrival[0]) - 1
            pieces, seconds = run.pieces[: run.arrivals[index][1] if index >= 0 else 0], moment
        clock = (
            f"{title}  {seconds:5.1f} s  {counted(len(pieces), 'token')}" if pieces else f"{title}  reading the prompt"
        )
        width = max(10, self._console.width // 2 - 4)
        lines = coloured(pieces).wrap(self._console, width, overflow="fold")
        shown = Text("\n").join(lines[-(self._height - 2) :])
        return Panel(shown, title=clock, title_align="left", height=self._height)


def coloured(pieces: Iterable[Piece]) -> Text:
    """The text of the pieces, each in the colour of its source."""
    text = Text()
    for piece in pieces:
        text.append(piece.text, style=_style(piece.source))
    return text


def legend(pieces: Iterable[Piece]) -> Text:
    """What the colours mean, with counts: accepted draft tokens by source, and the target's own."""
    pieces = list(pieces)
    counts = source_counts(pieces)
    text = Text("accepted draft tokens from: ") if counts else Text("the target's own tokens are not coloured")
    for source, count in counts.items():
        text.append(f"{source} {count}", style=_style(source))
        text.append("   ")
    if counts:
        text.append(f"the target's own {len(pieces) - sum(counts.values())}")
    return text


def _style(source: str | None) -> str:
    return "" if source is None else _STYLES.get(source, _OTHER_STYLE)
