"""A headless Chromium driven over its debugging pipe: real key presses, any width, light and dark."""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PATIENCE = 60.0
"""Seconds after which a browser hangs."""
_NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
# A browser reads its commands from descriptor 3 and answers on descriptor 4.
_LAUNCHER = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
_FREE_DESCRIPTOR = 10
_KEYS = {"Enter": ("\r", 13), "Escape": ("", 27), "Tab": ("", 9), " ": (" ", 32), "ArrowRight": ("", 39)}
CTRL = 2
"""Modifier of a key."""


def find_browser() -> str | None:
    """Path of a Chromium or Chrome, None if there is none."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class Browser:
    """A running browser. Messages are JSON objects, each ended by a zero byte."""

    def __init__(self, popen: subprocess.Popen[bytes], writing: int, reading: int) -> None:
        self.popen = popen
        self._writing = writing
        self._reading = reading
        self._rest = b""
        self._numbers = itertools.count(1)
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """The result of one command; what the browser reports meanwhile goes to `events`."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + PATIENCE
        while True:
            answer = self._receive(end)
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _receive(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._reading], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"the browser did not answer within {PATIENCE} s"
            part = os.read(self._reading, 1 << 16)
            assert part, "the browser has ended"
            self._rest += part
        line, self._rest = self._rest.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        return message

    @contextmanager
    def tab(self, width: int = 1280, *, height: int = 900, dark: bool = False) -> Iterator[Tab]:
        """An empty tab that shares nothing with others."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = Tab(self, session)
        for domain in ("Page", "Runtime", "Log"):
            tab.call(f"{domain}.enable")
        tab.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        tab.call("Emulation.setEmulatedMedia", features=[scheme])
        try:
            yield tab
        finally:
            self.call("Target.disposeBrowserContext", browserContextId=context)


class Tab:
    """One page."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def open(self, url: str) -> None:
        """Goes there and waits until it is loaded."""
        self.call("Page.navigate", url=url)
        self.wait_for(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """What JavaScript makes of it; promises are awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """The first true value of it."""
        end = time.monotonic() + PATIENCE
        while not (found := self.value(expression)):
            assert time.monotonic() < end, f"never: {expression}\n{self.value('document.body.innerText')}"
            time.sleep(0.02)
        return found

    def text(self, selector: str) -> str:
        """The text in an element, hidden text too."""
        found: str = self.value(f"document.querySelector({json.dumps(selector)}).textContent")
        return found

    def click(self, selector: str) -> None:
        """Clicks with the mouse in the middle of an element."""
        place = json.dumps(selector)
        self.value(f"document.querySelector({place}).scrollIntoView({{block: 'center'}})")
        box = self.value(f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])"
                         f"(document.querySelector({place}).getBoundingClientRect())")  # fmt: skip
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Types where the focus is."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, modifiers: int = 0) -> None:
        """One key where the focus is."""
        text, code = _KEYS[key]
        named = {"key": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        self.call("Input.dispatchKeyEvent", type="keyDown", **named, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **named)

    def screenshot(self, path: Path | None = None) -> str:
        """The whole page as PNG, in base64."""
        data: str = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        if path is not None:
            path.write_bytes(base64.b64decode(data))
        return data

    def complaints(self) -> list[str]:
        """What the browser reported: exceptions, refused by the policy, failed loads."""
        mine = [event for event in self._browser.events if event.get("sessionId") == self._session]
        logged = [event["params"]["entry"] for event in mine if event["method"] == "Log.entryAdded"]
        thrown = [event["params"] for event in mine if event["method"] == "Runtime.exceptionThrown"]
        return [entry["text"] for entry in logged if entry["level"] in ("error", "warning")] + [str(t) for t in thrown]


@contextmanager
def browsing(program: str, profile: Path) -> Iterator[Browser]:
    """A browser with a profile of its own; it is closed at the end."""
    ours = os.pipe()
    theirs = os.pipe()
    # Clear of 3 and 4, which the launcher writes over.
    reading, writing = (fcntl.fcntl(fd, fcntl.F_DUPFD, _FREE_DESCRIPTOR) for fd in (ours[0], theirs[1]))
    switches = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--no-first-run",
        "--remote-debugging-pipe",
    ]
    more = [f"--user-data-dir={profile}", "--disable-background-networking", "--disable-dev-shm-usage", "about:blank"]
    popen = subprocess.Popen(
        [sys.executable, "-c", _LAUNCHER, str(reading), str(writing), program, *switches, *more],
        pass_fds=(reading, writing),
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    for fd in (reading, writing, ours[0], theirs[1]):
        os.close(fd)
    try:
        browser = Browser(popen, ours[1], theirs[0])
        browser.call("Browser.getVersion")
        yield browser
        browser.call("Browser.close")
        popen.wait(PATIENCE)
    finally:
        if popen.poll() is None:
            popen.kill()
            popen.wait()
        os.close(ours[1])
        os.close(theirs[0])
