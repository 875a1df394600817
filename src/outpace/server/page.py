"""The page at `/`: type a prompt and watch where its tokens come from. One file; it asks nobody but this server."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from fastapi import Request, Response

__all__ = ["Page", "content_security_policy", "load_page", "show_page"]


class Page(NamedTuple):
    """The page as it is sent: its HTML and the headers that go with it."""

    body: bytes
    headers: dict[str, str]


@cache
def load_page() -> Page:
    """Reads the page out of the package, once."""
    html = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    headers = {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": content_security_policy(html),
        "Cross-Origin-Opener-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        # A newer version shows at once.
        "Cache-Control": "no-cache",
    }
    return Page(html.encode(), headers)


async def show_page(request: Request) -> Response:
    """The page. It is open to everybody: it holds no secret and asks for a key where the server wants one."""
    page = load_page()
    return Response(page.body, headers=page.headers)


def content_security_policy(html: str) -> str:
    """A policy that lets exactly this page's own script and styles run, and that lets it talk to this server alone.

    Text of a model never becomes markup: Trusted Types are required, and there are none.

    Raises:
        ValueError: the page has not exactly one script and one style.
    """
    rules = {
        "default-src": "'none'",
        "script-src": _hash_of("script", html),
        "style-src": _hash_of("style", html),
        "connect-src": "'self'",
        "img-src": "data:",  # the empty icon, so that browsers do not ask for one
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def _hash_of(tag: str, html: str) -> str:
    found: list[str] = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    if len(found) != 1:
        raise ValueError(f"the page has {len(found)} <{tag}> elements without attributes: it must have 1")
    return f"'sha256-{base64.b64encode(hashlib.sha256(found[0].encode()).digest()).decode()}'"
