"""The page in a browser: the keyboard, small screens, dark and light, and that nothing moves."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.browser import CTRL, Browser, Tab
from tests.server.page_runs import (
    ENDED,
    HISTOGRAM,
    answer,
    endless,
    is_plain,
    opened,
    run,
)
from tests.server.page_server import Answer, chunk, counts, serving

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def test_the_keyboard_is_enough(browser: Browser) -> None:
    with serving(answer) as server, browser.tab() as tab:
        opened(tab, server)
        fields = ["temperature", "max-tokens", "draft-tokens", "seed"]
        for place in ["prompt", "mode-on", *fields, "run", "stop", "chat", "text"]:
            tab.press("Tab")
            assert tab.value("document.activeElement.id || document.activeElement.className") == place
            assert tab.value("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        tab.value("document.querySelector('#mode-on').focus()")
        tab.press("ArrowRight")
        tab.press("ArrowRight")
        assert tab.value("document.querySelector('#mode-both').checked") is True
        assert tab.value("document.querySelector('#at-once').disabled") is False
        tab.value("document.querySelector('#prompt').focus()")
        tab.type("Say it")
        tab.press("Enter")  # a new line
        tab.type("twice")
        tab.press("Enter", CTRL)
        assert "Same text" in tab.wait_for(ENDED)
        assert server.bodies[0]["messages"][0]["content"] == "Say it\ntwice"
        assert tab.value("document.activeElement.id") == "prompt"


def test_pressing_run_keeps_the_focus_and_runs_once(browser: Browser) -> None:
    with serving(endless) as server, browser.tab() as tab:
        opened(tab, server, prompt="Say it")
        tab.value("document.querySelector('#run').focus()")
        for _ in range(3):
            tab.press("Enter")
        tab.wait_for("document.querySelectorAll('.text span').length > 3")
        assert tab.value("document.activeElement.id") == "run"
        assert len(server.bodies) == 1
        tab.press("Escape")
        tab.wait_for(ENDED)


def test_a_value_out_of_range_is_not_sent(browser: Browser) -> None:
    with serving(answer) as server, browser.tab() as tab:
        opened(tab, server, prompt="Say it", **{"draft-tokens": 65}, run=1)
        tab.wait_for("document.querySelector(':invalid#draft-tokens') && document.activeElement.id === 'draft-tokens'")
        assert server.bodies == []


_PLACES = (
    "JSON.stringify([...document.querySelectorAll('#panes, .pane, .text, #legend, #facts, #bars, .speed')]"
    ".map(e => { const r = e.getBoundingClientRect(); return [e.id || e.className, r.x, r.y + scrollY, r.width, "
    "r.height] }))"
)


@pytest.mark.parametrize("mode", ["on", "off", "both"])
@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_moves_when_an_answer_comes(browser: Browser, width: int, mode: str) -> None:
    def long_answer(body: dict[str, Any]) -> Answer:
        for _ in range(20):
            yield from (event for event in answer(body) if event["choices"])
        yield counts([], None if is_plain(body) else HISTOGRAM, 10)

    with serving(long_answer) as server, browser.tab(width) as tab:
        opened(tab, server, prompt="Say it", speculation=mode)
        tab.wait_for("document.querySelector('#model').textContent.includes('scripted')")
        before = json.loads(tab.value(_PLACES))
        tab.click("#run")
        tab.wait_for(ENDED)
        assert json.loads(tab.value(_PLACES)) == before
        # The newest text is in view.
        rest = "(e => e.scrollHeight - e.clientHeight - e.scrollTop)(document.querySelector('.text'))"
        assert tab.value(rest) <= 1


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_it_fits_and_follows_the_system_colours(browser: Browser, width: int, dark: bool) -> None:
    def wide(body: dict[str, Any]) -> Answer:
        yield chunk([("x" * 500, "prompt"), ("y" * 500, None)])
        yield from answer(body)

    with serving(wide) as server, browser.tab(width, dark=dark) as tab:
        run(tab, server, speculation="both")
        assert tab.value("document.documentElement.scrollWidth") == width
        over = "[...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > innerWidth + 1)"
        assert tab.value(f"{over}.length") == 0
        panes = tab.value("[...document.querySelectorAll('.pane')].map(e => e.getBoundingClientRect().top)")
        assert (panes[0] == panes[1]) is (width == 1280)  # below each other on a phone
        lightness = tab.value(
            "getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).reduce((a, b) => a + Number(b), 0)"
        )
        assert (lightness < 200) is dark
        assert colours_of(tab, tab.screenshot()) > 50


@pytest.mark.parametrize(("histogram", "shown"), [([3, *[0] * 15, 1], 16), ([3, 1, 1, *[0] * 14], 5)])
def test_long_drafts_do_not_widen_the_page(browser: Browser, histogram: list[int], shown: int) -> None:
    """Positions that no draft reached are not shown beyond the fifth."""

    def drafted(body: dict[str, Any]) -> Answer:
        *steps, _ = answer(body)
        yield from steps
        yield counts([], histogram, 40)

    with serving(drafted) as server, browser.tab(360) as tab:
        run(tab, server)
        assert tab.value("document.querySelectorAll('#bars li').length") == shown
        assert tab.value("document.documentElement.scrollWidth") == 360


def colours_of(tab: Tab, png: str) -> int:
    """How many different colours a picture has; a blank one has 1."""
    tab.open("about:blank")
    found: int = tab.value(
        f"(async () => {{ const data = Uint8Array.from(atob('{png}'), c => c.charCodeAt(0));"
        " const picture = await createImageBitmap(new Blob([data], { type: 'image/png' }));"
        " const canvas = new OffscreenCanvas(picture.width, picture.height).getContext('2d');"
        " canvas.drawImage(picture, 0, 0);"
        " const pixels = canvas.getImageData(0, 0, picture.width, picture.height).data;"
        " return new Set(new Uint32Array(pixels.buffer)).size })()"
    )
    return found
