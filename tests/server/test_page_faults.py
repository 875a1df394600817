"""Stopping a run on the page, keys of the API, and what goes wrong, in a browser."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.browser import Browser
from tests.server.page_runs import (
    ENDED,
    STEPS,
    TEXT,
    answer,
    endless,
    is_plain,
    opened,
    run,
)
from tests.server.page_server import Answer, Refused, chunk, serving

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.mark.parametrize("how", ["Escape", "#stop"])
@pytest.mark.parametrize("query", [{}, {"speculation": "both"}, {"speculation": "both", "at-once": 1}])
def test_stopping_ends_the_request(browser: Browser, how: str, query: dict[str, Any]) -> None:
    with serving(endless) as server, browser.tab() as tab:
        opened(tab, server, prompt="Say it", run=1, **query)
        tab.wait_for("document.querySelectorAll('.text span').length > 3")
        if how == "Escape":
            tab.press("Escape")
        else:
            tab.click(how)
        assert ": stopped, " in tab.wait_for(ENDED)
        assert server.gone.wait(60)
        assert len(server.bodies) == (2 if "at-once" in query else 1)
        assert tab.value("document.querySelector('#error').hidden") is True


def test_a_run_can_follow_one_that_was_stopped(browser: Browser) -> None:
    def first_endless(body: dict[str, Any]) -> Answer:
        return endless(body) if len(server.bodies) == 1 else answer(body)

    with serving(first_endless) as server, browser.tab() as tab:
        opened(tab, server, prompt="Say it", run=1)
        tab.wait_for("document.querySelectorAll('.text span').length > 3")
        tab.press("Escape")
        tab.wait_for(ENDED)
        tab.click("#run")
        tab.wait_for(ENDED + ".includes('done')")
        assert tab.text(".text") == TEXT


def test_a_key_is_asked_for_where_one_is_wanted(browser: Browser) -> None:
    with serving(answer, key="gëheim") as server, browser.tab() as tab:
        # http.server reads headers as latin-1
        server.key = "gëheim".encode().decode("latin-1")
        opened(tab, server, prompt="Say it")
        tab.wait_for("document.activeElement.id === 'key'")
        assert tab.text("#error") == "401: a valid API key is needed"
        assert tab.text("#model") == "the model is not known"
        tab.type("gëheim")
        tab.press("Enter")
        assert tab.wait_for(ENDED).startswith("Speculative: done, 12 tokens")
        tab.wait_for("document.querySelector('#model').textContent === 'org/scripted, context 2048 tokens'")
        assert tab.value("document.querySelector('#error').hidden") is True
        assert tab.value("JSON.stringify([localStorage.length, sessionStorage.length, document.cookie])") == '[0,0,""]'


REFUSALS = [
    (Refused(400, "max_tokens=9 is not possible"), "400: max_tokens=9 is not possible"),
    (Refused(429, "100 requests wait", {"Retry-After": "3"}), "429: 100 requests wait (try again in 3 s)"),
    (Refused(503, "the server is ending"), "503: the server is ending"),
]


@pytest.mark.parametrize(("refusal", "shown"), REFUSALS)
@pytest.mark.parametrize("mode", ["on", "both"])
def test_a_refusal_is_shown(browser: Browser, refusal: Refused, shown: str, mode: str) -> None:
    def refuse(body: dict[str, Any]) -> Answer:
        raise refusal

    with serving(refuse) as server, browser.tab() as tab:
        assert ": failed, 0 tokens." in run(tab, server, speculation=mode)
        assert tab.text("#error") == shown
        assert len(server.bodies) == 1  # nothing is asked after a refusal


@pytest.mark.parametrize("ending", [[{"error": {"message": "a row had no choice"}}], []], ids=["error", "cut"])
def test_a_failure_on_the_way_is_shown_behind_the_text_so_far(browser: Browser, ending: list[dict[str, Any]]) -> None:
    def failing(body: dict[str, Any]) -> Answer:
        yield chunk(STEPS[0])
        if not ending:
            raise ConnectionError("the script says so")
        yield from ending

    with serving(failing) as server, browser.tab() as tab:
        assert run(tab, server).startswith("Speculative: failed, 1 tokens")
        told = "a row had no choice" if ending else "The connection ended before the answer did."
        assert tab.text("#error") == told
        assert tab.text(".text") == "The"


def test_if_one_of_two_at_once_fails_the_other_is_stopped(browser: Browser) -> None:
    def one_fails(body: dict[str, Any]) -> Answer:
        if is_plain(body):
            return endless(body)
        raise Refused(400, "no such drafter")

    with serving(one_fails) as server, browser.tab() as tab:
        announced = run(tab, server, speculation="both", **{"at-once": 1})
        assert "Plain: stopped" in announced and "Speculative: failed" in announced
        assert tab.text("#error") == "400: no such drafter"


def test_a_server_that_has_gone_is_said_to_be_gone(browser: Browser) -> None:
    with browser.tab() as tab:
        with serving(answer) as server:
            run(tab, server)
        tab.click("#run")
        tab.wait_for("!document.querySelector('#error').hidden")
        assert tab.text("#error") == "The server cannot be reached. Is it still running?"


def test_an_error_goes_away_with_the_next_run(browser: Browser) -> None:
    def first_refused(body: dict[str, Any]) -> Answer:
        if len(server.bodies) == 1:
            raise Refused(400, "not now")
        return answer(body)

    with serving(first_refused) as server, browser.tab() as tab:
        run(tab, server)
        assert tab.text("#error") == "400: not now"
        tab.click("#run")
        tab.wait_for(ENDED + ".includes('done')")
        assert tab.value("document.querySelector('#error').hidden") is True
