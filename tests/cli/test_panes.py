"""The demo's two panes: text, clocks, colours and the replay, and where they are drawn."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from outpace.cli import demo
from outpace.cli.measure import PLAIN, SPECULATIVE, Comparison, measure_run
from outpace.cli.panes import SidePanes, coloured, legend, source_counts
from outpace.params import SamplingParams
from tests.cli.stand_in import WORDS, Script, StandIn

TEXT = "".join(WORDS)


def terminal(**options) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=100, height=30, color_system="standard", **options)


def test_panes_show_both_runs_with_their_clocks_and_a_legend() -> None:
    llm = StandIn(Script(speculative_cost=0.5))
    console = terminal()
    with SidePanes(console) as panes:
        measure_run(llm, "Hi", SamplingParams(), PLAIN, panes.show_plain, clock=llm.clock)
        measure_run(llm, "Hi", SamplingParams(), SPECULATIVE, panes.show_speculative, clock=llm.clock)
    shown = console.file.getvalue()
    last = shown[shown.rindex("plain  ") :]
    assert "7.0 s  8 tokens" in last
    assert "2.5 s  8 tokens" in last
    assert last.count(TEXT) == 1  # uncoloured on the left; on the right, colours interrupt it
    assert "prompt 2" in last
    assert "the target's own 6" in last


def test_while_the_speculative_run_streams_the_plain_one_is_replayed_at_its_own_pace() -> None:
    llm = StandIn(Script(plain_cost=1.0, speculative_cost=0.75))
    console = terminal()
    panes = SidePanes(console)
    panes._plain = measure_run(llm, "Hi", SamplingParams(), PLAIN, clock=llm.clock)
    shown = []
    for moment in (0.0, 1.0, 2.5, 7.0):
        pane = panes._pane("plain, replayed", panes._plain, moment)
        shown.append((str(pane.title), str(pane.renderable).strip()))
    assert shown == [
        ("plain, replayed    0.0 s  1 token", "Tea"),
        ("plain, replayed    1.0 s  2 tokens", "Tea is"),
        ("plain, replayed    2.5 s  3 tokens", "Tea is hot"),
        ("plain, replayed    7.0 s  8 tokens", TEXT),
    ]


def test_long_answers_show_their_end() -> None:
    llm = StandIn(Script(words=[f"line {number}\n" for number in range(200)]))
    panes = SidePanes(terminal())
    run = measure_run(llm, "Hi", SamplingParams(), PLAIN, clock=llm.clock)
    text = str(panes._pane("plain", run, None).renderable)
    assert "line 199" in text
    assert "line 0\n" not in text
    assert len(text.splitlines()) <= panes._height - 2


def test_accepted_tokens_have_the_colour_of_their_source() -> None:
    llm = StandIn(Script())
    pieces = measure_run(llm, "Hi", SamplingParams(), SPECULATIVE, clock=llm.clock).pieces
    assert source_counts(pieces) == {"prompt": 2}
    text = coloured(pieces)
    assert [(text.plain[span.start : span.end], span.style) for span in text.spans] == [
        (" is", "bold green"),
        (" tea", "bold green"),
    ]
    assert legend(pieces).plain == "accepted draft tokens from: prompt 2   the target's own 6"


@pytest.mark.parametrize(("options", "panes"), [({}, True), ({"no_color": True}, False)])
def test_panes_are_for_terminals_with_colours(options: dict[str, bool], panes: bool, capsys) -> None:
    console = terminal(**options)
    shown = demo.Demo(StandIn(Script()), SamplingParams(temperature=0.0, max_tokens=4), console)
    shown._show(demo.TASKS[0], Comparison("code edit", 0.01))
    text = console.file.getvalue()
    assert ("╭" in text) is panes
    assert ("as it comes" in text) is not panes
