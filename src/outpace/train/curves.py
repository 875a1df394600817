"""How a run goes, kept: lines of JSON always, a picture and TensorBoard's files where their packages are installed."""

from __future__ import annotations

import importlib
import io
import json
from pathlib import Path
from typing import Any

from outpace.errors import OutpaceError
from outpace.models.checkpoint import first_line
from outpace.train.writing import write_bytes

__all__ = ["Curves"]

LOG = "log.jsonl"


class Curves:
    """Writes `log.jsonl` as training goes on, `curves.png` and TensorBoard's files beside it.

    Args:
        folder: of the run.
        tensorboard: write its files too; needs the package tensorboard.

    Raises:
        OutpaceError: the package is not installed.
    """

    def __init__(self, folder: Path, *, tensorboard: bool = False) -> None:
        self._path = folder / LOG
        self._writer: Any = None
        self._library: Any = None
        if tensorboard:
            try:
                self._library = importlib.import_module("torch.utils.tensorboard")
            except ImportError as error:
                raise OutpaceError("--tensorboard needs the package tensorboard: pip install outpace[train]") from error

    def begin(self, step: int, measured: int) -> None:
        """Forgets what was written of steps, and of measurements, behind these, which come again."""
        if self._library is not None:
            folder = str(self._path.with_name("tensorboard"))
            self._writer = self._library.SummaryWriter(folder, purge_step=step + 1)
        lines = [line for line in self.lines() if line["step"] <= (measured if "valid" in line else step)]
        write_bytes(self._path, "".join(json.dumps(line) + "\n" for line in lines).encode())

    def lines(self) -> list[dict[str, Any]]:
        """What was written; a last line that was cut off does not count."""
        if not self._path.is_file():
            return []
        found = []
        for line in self._path.read_text().splitlines():
            try:
                value = json.loads(line)
            except ValueError:
                break
            if not isinstance(value, dict) or not isinstance(value.get("step"), int):
                break
            found.append(value)
        return found

    def add(self, line: dict[str, Any]) -> None:
        """One line; it has a `step`.

        Raises:
            OutpaceError: it cannot be written.
        """
        try:
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise OutpaceError(f"{self._path} cannot be written: {error.strerror}") from error
        if self._writer is not None:
            for name, value in _numbers(line):
                self._writer.add_scalar(name, value, line["step"])

    def close(self) -> bool:
        """Draws the picture. False if the package for it is not installed.

        Raises:
            OutpaceError: it cannot be drawn or written.
        """
        if self._writer is not None:
            self._writer.close()
        try:
            agg = importlib.import_module("matplotlib.backends.backend_agg")
            figure = importlib.import_module("matplotlib.figure").Figure(figsize=(9, 6))
        except ImportError:
            return False
        path, image = self._path.with_name("curves.png"), io.BytesIO()
        try:
            agg.FigureCanvasAgg(figure)
            _draw(figure, self.lines())
            figure.savefig(image, format="png", dpi=100)
        except Exception as error:  # fonts, caches and back ends of the library fail in ways of their own
            raise OutpaceError(f"{path} cannot be drawn: {first_line(error)}") from error
        write_bytes(path, image.getvalue())
        return True


def _numbers(line: dict[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for name, value in line.items():
        if isinstance(value, dict):
            found += _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and name != "step":
            found.append((prefix + name, float(value)))
    return found


def _draw(figure: Any, lines: list[dict[str, Any]]) -> None:
    """Loss above; below, mean acceptance length on held-out text for each drafter."""
    top, bottom = figure.subplots(2, 1, sharex=True)
    steps = [line for line in lines if "loss" in line]
    top.plot([line["step"] for line in steps], [line["loss"] for line in steps], linewidth=1)
    top.set_ylabel("loss")
    measured = [line for line in lines if "valid" in line]
    for name in measured[0]["valid"] if measured else []:
        at = [line["step"] for line in measured]
        for kind, style in (("greedy_length", "-"), ("sampled_length", "--")):
            label = f"{name}, {kind.partition('_')[0]}"
            bottom.plot(at, [line["valid"][name][kind] for line in measured], style, marker="o", label=label)
    bottom.set_ylabel("mean acceptance length")
    bottom.set_xlabel("step")
    if measured:
        bottom.legend()
    figure.tight_layout()
