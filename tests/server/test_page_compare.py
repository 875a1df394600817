"""Two runs side by side on the page, in a browser."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from tests.server.browser import Browser
from tests.server.page_runs import (
    ENDED,
    TEXT,
    answer,
    is_plain,
    legend_of,
    opened,
    run,
)
from tests.server.page_server import Answer, chunk, serving

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.mark.parametrize("query", [{}, {"at-once": 1}], ids=["in turn", "at once"])
def test_side_by_side_finds_the_same_text(browser: Browser, query: dict[str, Any]) -> None:
    with serving(answer) as server, browser.tab() as tab:
        announced = run(tab, server, speculation="both", **query)
        assert sorted(map(is_plain, server.bodies)) == [False, True]
        alike = [{name: value for name, value in body.items() if name != "speculative"} for body in server.bodies]
        assert alike[0] == alike[1]
        verdict = tab.text("#verdict")
        assert verdict.startswith("Same text, 12 tokens. ")
        assert announced.startswith("Plain: done, 12 tokens") and announced.endswith(verdict)
        assert tab.text("[data-run=plain] .text") == tab.text("[data-run=speculative] .text") == TEXT
        assert legend_of(tab)["prompt"] == 2  # the speculative run's, not the sum
        assert tab.complaints() == []


def test_at_once_means_that_both_are_asked_before_either_answers(browser: Browser) -> None:
    both_asked = threading.Barrier(2, timeout=60)

    def together(body: dict[str, Any]) -> Answer:
        both_asked.wait()
        return answer(body)

    with serving(together) as server, browser.tab() as tab:
        run(tab, server, speculation="both", **{"at-once": 1})
        assert tab.text("#verdict").startswith("Same text")


def test_what_speculation_did_stays_in_view_while_the_plain_run_goes_on(browser: Browser) -> None:
    speculated = threading.Event()

    def plain_last(body: dict[str, Any]) -> Answer:
        assert not is_plain(body) or speculated.wait(60)
        yield from answer(body)
        speculated.set()

    with serving(plain_last) as server, browser.tab() as tab:
        run(tab, server, speculation="both", **{"at-once": 1})
        assert legend_of(tab)["prompt"] == 2
        assert tab.text("#facts").startswith("Share of 4 drafts.")


def three_times(body: dict[str, Any]) -> Answer:
    """Long enough to compare speeds."""
    *steps, last, counted = answer(body)
    events = [*steps * 3, last]
    counted["usage"]["completion_tokens"] = sum(len(event["outpace"]["pieces"]) for event in events)
    yield from [*events, counted]


def test_how_much_faster_it_was_is_said_also_when_it_was_slower(browser: Browser) -> None:
    with serving(three_times) as server, browser.tab() as tab:
        opened(tab, server, prompt="Say it", speculation="both")
        tab.value("{ let now = 0; performance.now = () => now += 1000; }")
        tab.click("#run")
        tab.wait_for(ENDED)
        # plain: 33 tokens in 33 s; speculative: 33 in 12 s
        assert tab.text("#verdict").endswith("Speculative was 2.75 times as fast as plain.")
        # The clock goes ten times as slow from the plain run's end on.
        tab.value("{ let now = 0, calls = 0; performance.now = () => now += ++calls > 35 ? 10000 : 1000; }")
        tab.click("#run")
        tab.wait_for("document.querySelector('#verdict').textContent.includes('did not pay')")
        assert tab.text("#verdict").endswith("Speculative was 0.28 times as fast as plain: it did not pay.")


def test_nothing_is_said_about_the_speed_of_a_few_tokens(browser: Browser) -> None:
    """Their time is noise: one run of ten tokens was seen 1.0, 1.5, 2.3 and 3.7 times as fast in four tries."""
    with serving(answer) as server, browser.tab() as tab:
        opened(tab, server, prompt="Say it", speculation="both")
        tab.value("{ let now = 0; performance.now = () => now += 1000; }")
        tab.click("#run")
        tab.wait_for(ENDED)
        assert tab.text("#verdict") == "Same text, 12 tokens. Too short to say how fast."


def test_side_by_side_finds_another_text(browser: Browser) -> None:
    def wrong(body: dict[str, Any]) -> Answer:
        for event in answer(body):
            text = json.dumps(event)
            yield json.loads(text.replace("jumps", "leaps")) if is_plain(body) else event

    with serving(wrong) as server, browser.tab() as tab:
        announced = run(tab, server, speculation="both")
        place = TEXT.index("jumps") + 1
        assert f"Different text from character {place} on." in announced
        assert tab.value("document.querySelector('#verdict').className") == "different"


def test_a_text_that_goes_on_is_another_text(browser: Browser) -> None:
    def longer(body: dict[str, Any]) -> Answer:
        events = list(answer(body))
        return events if is_plain(body) else [*events[:-2], chunk([(" More", None)], "stop"), events[-1]]

    with serving(longer) as server, browser.tab() as tab:
        assert f"Different text from character {len(TEXT) + 1} on." in run(tab, server, speculation="both")


def test_what_is_typed_meanwhile_does_not_reach_the_second_run(browser: Browser) -> None:
    go_on = threading.Event()

    def waiting(body: dict[str, Any]) -> Answer:
        assert go_on.wait(60)
        return answer(body)

    with serving(waiting) as server, browser.tab() as tab:
        opened(tab, server, prompt="Say it", speculation="both", run=1)
        tab.wait_for("document.querySelector('#stop').ariaDisabled === 'false'")
        tab.value("document.querySelector('#prompt').value = 'Other'")
        tab.click("#mode-off")
        go_on.set()
        tab.wait_for(ENDED + ".includes('Same text')")
        assert [body["messages"][0]["content"] for body in server.bodies] == ["Say it", "Say it"]
        assert tab.value("document.querySelector('#verdict').hidden") is False
