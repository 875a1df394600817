"""One run on the page, in a browser."""

from __future__ import annotations

import asyncio
import threading
from typing import Any
from urllib.parse import urlencode

import pytest

from outpace.server.settings import ServerSettings
from tests.server.browser import Browser
from tests.server.calling import listening
from tests.server.page_runs import (
    ENDED,
    STEPS,
    TEXT,
    TOKENS,
    answer,
    bars_of,
    legend_of,
    numbers_of,
    opened,
    run,
    tokens_of,
)
from tests.server.page_server import Answer, chunk, serving
from tests.server.scripted import scripted

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def test_tokens_are_shown_by_where_they_came_from(browser: Browser) -> None:
    with serving(answer) as server, browser.tab() as tab:
        announced = run(tab, server)
        assert tokens_of(tab, "speculative") == [[text, source or "own"] for text, source in TOKENS if text]
        assert tab.value("document.querySelectorAll('.text b').length") == 0  # text never becomes markup
        drafted = {"prompt": 2, "output": 1, "draft model": 1, "early exit": 1, "grammar": 1, "other": 1}
        assert legend_of(tab) == {"own": 5, "pool": 0, **drafted}
        drawn = "s => { const c = getComputedStyle(s); return [c.color, c.textDecoration, c.fontStyle].join() }"
        styles = tab.value(f"[...document.querySelectorAll('.text span')].map({drawn})")
        by_source = dict(zip([source for text, source in TOKENS if text], styles, strict=True))
        assert len(set(by_source.values())) == len(by_source) == 7
        assert announced.startswith("Speculative: done, 12 tokens, ")
        assert tab.complaints() == []


def test_the_numbers_of_a_run_are_shown(browser: Browser) -> None:
    with serving(answer) as server, browser.tab() as tab:
        run(tab, server)
        shown = numbers_of(tab, "speculative")
        assert shown["tokens"] == "12"
        assert shown["per-step"] == "2.40"
        assert shown["first"].endswith(" s") and float(shown["first"].split()[0]) >= 0
        assert shown["state"] == "done"
        assert tab.text("#model") == "org/scripted, context 2048 tokens"
        assert bars_of(tab) == [("75 %", "75%"), ("50 %", "50%"), ("25 %", "25%"), ("25 %", "25%"), ("–", "0%")]
        assert tab.text("#facts") == (
            "Share of 4 drafts. 7 of 10 draft tokens kept (70 %), mean acceptance length 2.75."
        )


def test_speed_is_that_of_the_tokens_after_the_first_chunk(browser: Browser) -> None:
    """The clock of the page is replaced, so that the speed is known."""
    with serving(answer) as server, browser.tab() as tab:
        opened(tab, server, prompt="Say it")
        # Started at 0 s, the first chunk comes at 1 s and each further one a second later: 11 tokens in 4 s.
        tab.value("{ let now = -1000; performance.now = () => now += 1000; }")
        tab.click("#run")
        tab.wait_for(ENDED)
        shown = numbers_of(tab, "speculative")
        assert (shown["first"], shown["speed"]) == ("1.00 s", "2.8")


def test_numbers_and_bars_move_while_the_answer_comes(browser: Browser) -> None:
    go_on = threading.Event()

    def halting(body: dict[str, Any]) -> Answer:
        for index, event in enumerate(answer(body)):
            if index == 4:
                assert go_on.wait(60)
            yield event

    with serving(halting) as server, browser.tab() as tab:
        opened(tab, server, prompt="Say it", run=1)
        try:
            tab.wait_for("document.querySelector('.tokens').textContent === '11'")
            assert numbers_of(tab, "speculative")["state"] == "generating"
            assert [share for share, _ in bars_of(tab)] == ["75 %", "50 %", "25 %", "25 %", "–"]
            assert tab.text("#facts") == "Share of 4 steps so far, with a draft or without."
            assert tab.value("document.querySelector('#stop').ariaDisabled") == "false"
            assert tab.text("#status") == "Generating."
        finally:
            go_on.set()
        tab.wait_for("document.querySelector('#status').textContent.startsWith('Speculative: done')")


def test_without_speculation_the_server_is_asked_for_none(browser: Browser) -> None:
    with serving(answer) as server, browser.tab() as tab:
        assert run(tab, server, speculation="off").startswith("Plain: done, 12 tokens")
        assert server.bodies[0]["speculative"] == {"enabled": False}
        assert tab.text("#facts") == "This run does not speculate."
        assert {source for _, source in tokens_of(tab, "plain")} == {"own"}


def test_the_form_becomes_the_request(browser: Browser) -> None:
    settings = {"temperature": "0.5", "max-tokens": "7", "draft-tokens": "3", "seed": "42"}
    with serving(answer) as server, browser.tab() as tab:
        run(tab, server, **settings)
        assert server.paths[-1] == "/v1/chat/completions"
        assert server.bodies == [
            {
                "messages": [{"role": "user", "content": "Say it"}],
                "model": "org/scripted",
                "temperature": 0.5,
                "max_tokens": 7,
                "seed": 42,
                "stream": True,
                "stream_options": {"include_usage": True},
                "outpace": {"pieces": True},
                "speculative": {"enabled": True, "num_speculative_tokens": 3},
            }
        ]


def test_text_may_be_continued_without_a_chat_template(browser: Browser) -> None:
    def completion(body: dict[str, Any]) -> Answer:
        for event in answer(body):
            choices = [{"text": c["delta"]["content"], "finish_reason": c["finish_reason"]} for c in event["choices"]]
            yield {**event, "choices": choices}

    with serving(completion) as server, browser.tab() as tab:
        run(tab, server, chat=0)
        assert server.paths[-1] == "/v1/completions"
        assert server.bodies[0]["prompt"] == "Say it"
        assert "messages" not in server.bodies[0]
        assert tab.text("[data-run=speculative] .text") == TEXT


def test_an_answer_without_pieces_is_shown_all_the_same(browser: Browser) -> None:
    def bare(body: dict[str, Any]) -> Answer:
        return ({name: value for name, value in event.items() if name != "outpace"} for event in answer(body))

    with serving(bare) as server, browser.tab() as tab:
        run(tab, server)
        assert tab.text("[data-run=speculative] .text") == TEXT
        assert numbers_of(tab, "speculative")["tokens"] == "12"  # the server's count


def test_an_answer_that_was_cut_off_says_so(browser: Browser) -> None:
    """Then its last step may have no token of the model's own."""
    last = chunk([(" quick", "prompt"), (" brown", "prompt")], "length")
    with serving(lambda body: iter([chunk(STEPS[0]), last])) as server, browser.tab() as tab:
        run(tab, server)
        shown = numbers_of(tab, "speculative")
        assert (shown["state"], shown["tokens"], shown["per-step"]) == ("ended at max tokens", "3", "1.50")


@pytest.mark.parametrize("chat", [1, 0], ids=["chat", "text"])
def test_with_the_real_server(browser: Browser, chat: int) -> None:
    text = "one two three, one two three, one two three."

    def look(address: str) -> None:
        query = urlencode({"prompt": "Say it", "run": 1, "speculation": "both", "draft-tokens": 3, "chat": chat})
        with browser.tab() as tab:
            tab.open(f"{address}/?{query}")
            announced = tab.wait_for(ENDED)
            assert f"Same text, {len(text) + 1} tokens." in announced, (announced, tab.text("#error"))
            assert tab.text("[data-run=speculative] .text") == tab.text("[data-run=plain] .text") == text
            assert {source for _, source in tokens_of(tab, "speculative")} == {"own", "output"}
            assert legend_of(tab)["output"] > 10
            assert len(bars_of(tab)) == 3
            assert tab.text("#facts").startswith("Share of ")
            assert tab.text("#model") == "org/scripted, context 1200 tokens"
            assert tab.complaints() == []

    async def check() -> None:
        async with listening(scripted(text), ServerSettings()) as address:
            await asyncio.to_thread(look, address)

    asyncio.run(check())
