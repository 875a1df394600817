"""What a run writes down: lines that survive a crash, TensorBoard's numbers, a picture where it can be drawn."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outpace.errors import OutpaceError
from outpace.train import curves as curves_module
from outpace.train.curves import Curves

MEASURED = {"step": 2, "valid": {"exit 2": {"greedy_length": 1.5, "sampled_length": 1.25, "greedy": [0.5]}}}


def test_lines_behind_a_step_are_forgotten_and_half_a_line_too(tmp_path: Path) -> None:
    curves = Curves(tmp_path)
    for step in range(1, 5):
        curves.add({"step": step, "loss": 1 / step})
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    again = Curves(tmp_path)
    again.begin(3, 3)
    assert [line["step"] for line in again.lines()] == [1, 2, 3]
    again.add(MEASURED)
    again.begin(2, 1)  # step 2 is done, but what was measured behind it does not count
    assert again.lines() == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5}]


@pytest.mark.parametrize("line", ["[1, 2]", "7", '{"loss": 1}', '{"step": "3"}', "{"])
def test_what_is_no_line_of_a_log_ends_it(tmp_path: Path, line: str) -> None:
    curves = Curves(tmp_path)
    curves.add({"step": 1, "loss": 1.0})
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write(line + "\n")
    assert curves.lines() == [{"step": 1, "loss": 1.0}]


def test_a_picture_that_cannot_be_drawn_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> None:
        raise ValueError("no such font\nand more")

    monkeypatch.setattr(curves_module, "_draw", broken)
    with pytest.raises(OutpaceError, match=r"curves.png cannot be drawn: no such font$"):
        Curves(tmp_path).close()


def test_tensorboard_gets_every_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[Any, ...]] = []
    closed: list[bool] = []

    class Writer:
        def __init__(self, folder: str, purge_step: int) -> None:
            assert folder == str(tmp_path / "tensorboard")
            assert purge_step == 1  # what was written of steps that come again is not shown

        def add_scalar(self, *arguments: Any) -> None:
            written.append(arguments)

        def close(self) -> None:
            closed.append(True)

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    curves = Curves(tmp_path, tensorboard=True)
    curves.begin(0, -1)
    curves.add({"step": 1, "loss": 2.0})
    curves.add(MEASURED)
    curves.close()
    assert written == [
        ("loss", 2.0, 1),
        ("valid/exit 2/greedy_length", 1.5, 2),
        ("valid/exit 2/sampled_length", 1.25, 2),
    ]
    assert closed == [True]


def test_without_the_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(OutpaceError, match=r"needs the package tensorboard: pip install outpace\[train\]"):
        Curves(tmp_path, tensorboard=True)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    curves = Curves(tmp_path)
    curves.add(MEASURED)
    assert curves.close() is False
    assert not (tmp_path / "curves.png").exists()


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    curves = Curves(tmp_path / "gone")
    with pytest.raises(OutpaceError, match=r"log\.jsonl cannot be written: No such file"):
        curves.add(MEASURED)
