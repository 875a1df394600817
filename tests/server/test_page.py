"""The page as a file: what can be told of it without a browser."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from html.parser import HTMLParser

import httpx
import pytest

from outpace.server.page import content_security_policy, load_page
from outpace.server.settings import ServerSettings
from tests.server.calling import client_of
from tests.server.scripted import scripted

HTML = load_page().body.decode()
_VOID = {"meta", "link", "input", "br"}
_SOURCES = ["prompt", "output", "draft-model", "early-exit", "grammar", "pool", "other"]
"""CSS variables of the drafters' colours."""
_READABLE = 4.5
"""Least contrast of text, WCAG 2.2 level AA."""
_VISIBLE = 3.0
"""Least contrast of a control's edge and of bars."""


class Elements(HTMLParser):
    """All elements with their attributes; fails on tags that do not match."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self._open: list[str] = []
        self.feed(HTML)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs)
        self.found.append((tag, dict(attrs)))
        if tag not in _VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def all(self, name: str) -> list[str]:
        """Values of an attribute."""
        return [value for _, attributes in self.found if (value := attributes.get(name)) is not None]


@pytest.fixture(scope="module")
def elements() -> Elements:
    return Elements()


def script() -> str:
    return HTML.split("<script>")[1].split("</script>")[0]


def fetched(path: str = "/", method: str = "GET", settings: ServerSettings | None = None) -> httpx.Response:
    """An answer of the application."""

    async def ask() -> httpx.Response:
        async with client_of(scripted(), settings) as client:
            return await client.request(method, path)

    return asyncio.run(ask())


def test_the_server_shows_the_page_at_its_root() -> None:
    answer = fetched()
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.content == load_page().body


def test_head_has_the_headers_alone() -> None:
    answer = fetched(method="HEAD")
    assert answer.status_code == 200
    assert answer.content == b""
    assert answer.headers["content-security-policy"] == load_page().headers["Content-Security-Policy"]


def test_the_page_is_open_where_the_api_wants_a_key() -> None:
    settings = ServerSettings(api_keys=("secret",))
    assert fetched(settings=settings).status_code == 200
    assert fetched("/v1/models", settings=settings).status_code == 401


def test_the_policy_lets_only_the_pages_own_script_and_style_run() -> None:
    policy = dict(rule.split(" ", 1) for rule in fetched().headers["content-security-policy"].split("; "))
    for tag in ("script", "style"):
        text = HTML.split(f"<{tag}>")[1].split(f"</{tag}>")[0]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy.pop(f"{tag}-src") == f"'sha256-{digest}'"
    assert policy == {
        "default-src": "'none'",
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }


@pytest.mark.parametrize("broken", ["<style></style>", "<script></script><script></script><style></style>"])
def test_a_page_with_another_number_of_scripts_has_no_policy(broken: str) -> None:
    with pytest.raises(ValueError, match=r"the page has \d <script> elements"):
        content_security_policy(broken)


def test_other_headers_keep_the_page_to_itself() -> None:
    headers = fetched().headers
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cross-origin-opener-policy"] == "same-origin"


def test_nothing_is_asked_of_other_servers(elements: Elements) -> None:
    assert re.findall(r"https?:|//[a-z]|@import|url\(", HTML, re.IGNORECASE) == []
    assert elements.all("src") == []
    assert elements.all("href") == ["data:,"]


def test_no_markup_is_made_from_text_and_none_carries_code(elements: Elements) -> None:
    assert re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", HTML) == []
    names = [name for _, attributes in elements.found for name in attributes]
    assert [name for name in names if name == "style" or name.startswith("on")] == []


def test_every_element_that_the_script_asks_for_exists_once(elements: Elements) -> None:
    ids = elements.all("id")
    assert len(set(ids)) == len(ids)
    asked = set(re.findall(r'\$\("([^"]+)"\)', script()))
    assert len(asked) > 15
    assert asked - set(ids) == set()
    named_in_address = re.search(r"for \(const id of \[(.*?)\]\)", script())
    assert named_in_address is not None
    assert set(re.findall(r'"([^"]+)"', named_in_address[1])) - set(ids) == set()


def test_every_part_of_a_pane_that_the_script_asks_for_exists(elements: Elements) -> None:
    classes = {name for value in elements.all("class") for name in value.split()}
    asked = set(re.findall(r'(?:find|show)\("\.([^"]+)"', script()))
    assert {"text", "state", "speed", "tokens", "per-step", "first"} <= asked
    assert asked - classes == set()


def test_every_control_has_a_label(elements: Elements) -> None:
    labelled = set(elements.all("for"))
    controls = [a for tag, a in elements.found if tag in ("input", "textarea")]
    assert len(controls) == 11
    for control in controls:
        # A choice stands inside of its label, with the words behind it.
        inside = re.search(rf'<label><input [^>]*id="{control["id"]}"[^>]*> \w', HTML)
        assert control["id"] in labelled or inside, control
    targets = elements.all("aria-labelledby") + elements.all("aria-describedby")
    assert set(targets) - set(elements.all("id")) == set()


def test_the_stream_is_silent_and_the_outcome_is_announced(elements: Elements) -> None:
    by_class = {attributes.get("class"): attributes for _, attributes in elements.found}
    assert by_class["text"]["aria-live"] == "off"
    assert by_class["text"]["tabindex"] == "0"
    by_id = {attributes.get("id"): attributes for _, attributes in elements.found}
    assert by_id["status"]["role"] == "status"
    assert by_id["error"]["role"] == "alert"


# Colours.


def palettes() -> dict[str, dict[str, str]]:
    """{"light" or "dark": {variable: colour}}"""
    blocks = re.findall(r":root \{(.*?)\}", HTML, re.DOTALL)
    light, dark = (dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", block)) for block in blocks)
    assert set(light) == set(dark)
    return {"light": light, "dark": dark}


def luminance(colour: str) -> float:
    """WCAG's relative luminance of "#rrggbb"."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """WCAG's contrast ratio, 1 to 21."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_measured_as_wcag_does() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["text", "quiet", "accent", "good", "bad", *_SOURCES])
def test_text_is_readable_on_both_backgrounds(scheme: str, name: str) -> None:
    palette = palettes()[scheme]
    for background in ("back", "panel"):
        assert contrast(palette[name], palette[background]) >= _READABLE


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_controls_and_bars_are_visible(scheme: str) -> None:
    palette = palettes()[scheme]
    assert contrast(palette["on-accent"], palette["accent"]) >= _READABLE
    assert contrast(palette["line"], palette["back"]) >= _VISIBLE
    assert contrast(palette["line"], palette["panel"]) >= _VISIBLE
    assert contrast(palette["accent"], palette["faint"]) >= _VISIBLE


def test_sources_are_told_apart_without_colours() -> None:
    rules = re.findall(r"^\[data-source(?:=\"?([a-z ]+)\"?)?\] \{(.*?)\}$", HTML, re.MULTILINE)
    drawn = {name: re.search(r"text-decoration: ([^;]*)", body) for name, body in rules}
    lines = {name: found[1] for name, found in drawn.items() if found is not None}
    assert set(lines) == {"", "own", "prompt", "output", "draft model", "early exit", "grammar", "pool"}
    styles = {re.sub(r" \d+px", "", line) for name, line in lines.items() if name}
    # Any other drafter has a plain line too, but its tokens are slanted.
    assert len(styles) == len(lines) - 1
    assert "font-style: italic" in dict(rules)[""]
