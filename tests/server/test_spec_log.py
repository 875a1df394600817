"""The line about speculation in the log, word by word and when it comes."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from outpace.async_llm import Load
from outpace.server.spec_log import SpecLogger
from tests.server.steps import BUSY, IDLE, step


class Window:
    """Steps at times of a clock that the test sets, and the lines they bring."""

    def __init__(self, caplog: pytest.LogCaptureFixture, positions: int = 0) -> None:
        caplog.set_level(logging.INFO, "outpace")
        self._records = caplog.records
        self._now = 0.0
        self._logger = SpecLogger(positions, clock=lambda: self._now)

    def step(
        self, at: float, drafts: Sequence[tuple[int, int]] = (), *, seconds: float = 1.0, load: Load = BUSY
    ) -> list[str]:
        """A step that ends at this time; the lines it brings."""
        self._now = at
        before = len(self._records)
        drafted = [("ngram", *draft) for draft in drafts]
        self._logger.observe(step(drafted, seconds=seconds, load=load))
        return [record.getMessage() for record in self._records[before:]]


def line(text: str) -> float:
    """Draft tokens in a line."""
    return float(text.split("Drafted: ")[1].split(" ")[0])


def test_the_line_is_the_one_of_vllm(caplog: pytest.LogCaptureFixture) -> None:
    window = Window(caplog, positions=4)
    assert window.step(101.0, [(4, 4), (4, 1)]) == []
    assert window.step(105.0) == []
    assert window.step(110.0, [(2, 0)], seconds=0.5) == [
        "SpecDecoding metrics: Mean acceptance length: 2.67, Accepted throughput: 0.50 tokens/s, "
        "Drafted throughput: 1.00 tokens/s, Accepted: 5 tokens, Drafted: 10 tokens, "
        "Per-position acceptance rate: 0.667, 0.333, 0.333, 0.333, Avg Draft acceptance rate: 50.0%"
    ]


def test_positions_never_drafted_count_as_misses_and_longer_drafts_are_shown(caplog: pytest.LogCaptureFixture) -> None:
    window = Window(caplog, positions=3)
    (short,) = window.step(1.0, [(1, 1)], load=IDLE)
    assert "Per-position acceptance rate: 1.000, 0.000, 0.000, Avg Draft acceptance rate: 100.0%" in short
    window.step(2.0, [(5, 4)])
    (long,) = window.step(12.0)
    assert "Per-position acceptance rate: 1.000, 1.000, 1.000, 1.000, 0.000, " in long


def test_a_line_every_ten_seconds_of_work_and_every_draft_once(caplog: pytest.LogCaptureFixture) -> None:
    window = Window(caplog)
    lines = [(second, text) for second in range(1, 36) for text in window.step(second, [(3, 2)])]
    assert [second for second, _ in lines] == [10, 20, 30]
    assert [line(text) for _, text in lines] == [30, 30, 30]
    assert all("Drafted throughput: 3.00 tokens/s" in text for _, text in lines)


def test_silence_without_drafts(caplog: pytest.LogCaptureFixture) -> None:
    window = Window(caplog)
    assert [window.step(second) for second in range(1, 40)] == [[]] * 39
    assert window.step(40.0, load=IDLE) == []


def test_a_short_request_is_heard_of_at_its_end_but_not_every_one(caplog: pytest.LogCaptureFixture) -> None:
    window = Window(caplog)
    assert window.step(1.0, [(3, 1)], load=Load(waiting=1)) == []
    (first,) = window.step(2.0, [(3, 1)], load=IDLE)
    assert "Accepted throughput: 1.00 tokens/s" in first and line(first) == 6
    assert window.step(5.0, [(4, 1)], load=IDLE) == []
    assert window.step(8.0, [(4, 1)], load=IDLE) == []
    (second,) = window.step(12.0, [(4, 1)], load=IDLE)
    assert line(second) == 12


def test_a_long_pause_does_not_thin_the_numbers(caplog: pytest.LogCaptureFixture) -> None:
    window = Window(caplog)
    window.step(1.0, [(3, 1)], load=IDLE)
    assert window.step(4.0, [(4, 2)], load=IDLE) == []
    (late,) = window.step(1001.0, [(5, 5)])
    assert "Accepted throughput: 2.00 tokens/s, Drafted throughput: 4.00 tokens/s" in late and line(late) == 4
    (after,) = window.step(1010.0)
    assert "Drafted throughput: 0.50 tokens/s" in after and line(after) == 5


def test_what_ends_between_steps_opens_no_window(caplog: pytest.LogCaptureFixture) -> None:
    window = Window(caplog)
    assert window.step(1.0, seconds=0.0, load=IDLE) == []
    assert window.step(21.0, [(3, 1)]) == []
    (text,) = window.step(24.0, seconds=0.0, load=IDLE)
    assert "Drafted throughput: 3.00 tokens/s" in text
