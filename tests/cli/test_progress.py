"""Progress on standard error: a bar on a terminal, few lines elsewhere, nothing at all where it is over soon."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest

from outpace.cli.progress import Progress, PromptProgress


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


def test_what_takes_minutes_says_now_and_then_how_far_it_is_without_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    seconds = iter([0.0, 10.0, 31.0, 40.0, 62.0, 95.0, 95.0])
    with Progress(interval=30, clock=lambda: next(seconds)) as progress:
        for done in (0, 20, 60, 80, 139, 200, 200):
            progress.report("answering prompts", done, 200)
    assert capsys.readouterr().err.splitlines() == [
        "answering prompts ...",
        "answering prompts: 30 %",
        "answering prompts: 69 %",
        "answering prompts: done in 95.0 s",
    ]


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


def wait_for(words: str, read: Callable[[], str]) -> str:
    """What was written until these words came."""
    text, end = "", time.monotonic() + 20
    while words not in text:
        assert time.monotonic() < end, text
        time.sleep(0.005)
        text += read()
    return text


def test_a_prompt_that_is_read_soon_needs_no_words(capsys: pytest.CaptureFixture[str]) -> None:
    with PromptProgress(patience=60) as reading:
        reading.report(512, 9000)
        reading.report(1024, 9000)
        reading.finish()
    assert capsys.readouterr().err == ""


def test_a_long_prompt_is_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    with PromptProgress(patience=0.01, interval=10, clock=lambda: now[0]) as reading:
        wait_for("reading the prompt ...\n", lambda: capsys.readouterr().err)  # before the first step is done
        for second in range(1, 26):
            now[0] = float(second)
            reading.report(100 * second, 9000)
        reading.finish()
        reading.finish()
        reading.report(9000, 9000)
    assert capsys.readouterr().err.splitlines() == [
        "reading the prompt: 1000 of 9000 tokens",
        "reading the prompt: 2000 of 9000 tokens",
        "reading the prompt: done in 25.0 s",
    ]


def test_reading_that_is_interrupted_is_not_called_done(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), PromptProgress(patience=0.01) as reading:
        reading.report(512, 9000)
        shown = wait_for("9000", lambda: capsys.readouterr().err)
        raise KeyboardInterrupt
    assert shown == "reading the prompt: 512 of 9000 tokens\n"
    assert capsys.readouterr().err == ""


def test_a_terminal_sees_how_much_of_the_prompt_is_read(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with PromptProgress(patience=0.01) as reading:
        reading.report(2048, 9000)
        shown = wait_for("23 %", lambda: capsys.readouterr().err)
        reading.report(4500, 9000)
        shown += wait_for("50 %", lambda: capsys.readouterr().err)
    assert "reading the prompt: 2048 of 9000 tokens" in shown
    assert "reading the prompt: 4500 of 9000 tokens" in shown
