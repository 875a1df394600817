"""The page in a browser, for its tests: a scripted answer, how a run is begun, and what is then shown."""

from __future__ import annotations

import itertools
import threading
from typing import Any
from urllib.parse import urlencode

from tests.server.browser import Tab
from tests.server.page_server import Answer, PageServer, Step, chunk, counts

STEPS: list[Step] = [
    [("The", None)],
    [(" quick", "prompt"), (" brown", "prompt"), (" fox", None)],
    [(" jumps", "output"), (" over", None)],
    [(" the", "draft model"), (" lazy", "early exit"), ("\ndog", "grammar"), (" <b>twice", "suffix tree"), (".", None)],
    [("", None)],
]
TOKENS = [piece for step in STEPS for piece in step]
TEXT = "".join(text for text, _ in TOKENS)
HISTOGRAM = [1, 1, 1, 0, 1]
"""Of four drafts one each kept 0, 1, 2 and 4 tokens of at most 4."""
ENDED = "document.querySelector('#run').ariaDisabled === 'false' && document.querySelector('#status').textContent"


def is_plain(body: dict[str, Any]) -> bool:
    return body["speculative"]["enabled"] is False


def answer(body: dict[str, Any]) -> Answer:
    """The same text with and without drafts."""
    steps: list[Step] = [[(text, None)] for text, _ in TOKENS] if is_plain(body) else STEPS
    for step in steps[:-1]:
        yield chunk(step)
    yield chunk(steps[-1], "stop")
    yield counts(steps, None if is_plain(body) else HISTOGRAM, 10)


def opened(tab: Tab, server: PageServer, **query: Any) -> None:
    tab.open(f"{server.address}/?{urlencode(query)}")


def run(tab: Tab, server: PageServer, **query: Any) -> str:
    """Opens the page with a prompt, runs it and returns what is announced at the end."""
    opened(tab, server, prompt="Say it", run=1, **query)
    announced: str = tab.wait_for(ENDED)
    return announced


def tokens_of(tab: Tab, pane: str) -> list[list[str]]:
    """[text, source] of every token that is shown."""
    spans = f"document.querySelectorAll('[data-run={pane}] .text span')"
    found: list[list[str]] = tab.value(f"[...{spans}].map(span => [span.textContent, span.dataset.source])")
    return found


def numbers_of(tab: Tab, pane: str) -> dict[str, str]:
    names = ("tokens", "speed", "per-step", "first", "state")
    return {name: tab.text(f"[data-run={pane}] .{name}") for name in names}


def legend_of(tab: Tab) -> dict[str, int]:
    rows = tab.value(
        "[...document.querySelectorAll('#legend li')].map(i => [i.dataset.name, i.lastElementChild.textContent])"
    )
    return {name: int(count) for name, count in rows}


def bars_of(tab: Tab) -> list[tuple[str, str]]:
    """(share as text, height of the bar) for every position."""
    rows = tab.value(
        "[...document.querySelectorAll('#bars li')].map(i => [i.querySelector('.share').textContent,"
        " i.querySelector('.bar').style.height])"
    )
    return [(share, height) for share, height in rows]


def endless(body: dict[str, Any]) -> Answer:
    pause = threading.Event()
    for number in itertools.count():
        yield chunk([(f"{number} ", None)])
        pause.wait(0.01)
