"""Progress on standard error: a bar on a terminal, few lines elsewhere, nothing where only a terminal wants it."""

from __future__ import annotations

import re

import pytest

from outpace.cli.progress import Progress


def report(progress: Progress) -> None:
    with progress:
        for done in range(31):
            progress.report("loading layers", done, 30)
        progress.say("a [note] from loading")
        progress.report("loading layers", 30, 30)


def test_a_stage_is_two_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    report(Progress())
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(
        r"loading layers \.\.\.\nloading layers: done in \d+\.\d s\na \[note\] from loading\n", captured.err
    )


def test_progress_for_terminals_alone_is_silent_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    report(Progress(terminal_only=True))
    assert capsys.readouterr().err == "a [note] from loading\n"


def test_a_terminal_gets_a_bar_and_whole_notes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm")
    report(Progress())
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "a [note] from loading" in captured.err
    assert "loading layers" in captured.err
    assert "100 %" in captured.err
