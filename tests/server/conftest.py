"""A browser for the tests that need one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.browser import Browser, browsing, find_browser


def pytest_configure(config: pytest.Config) -> None:
    """Makes the marker known."""
    config.addinivalue_line("markers", "browser: needs Chromium or Chrome on the path; skipped where there is none")


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One headless browser for all tests; each opens tabs of its own."""
    program = find_browser()
    if program is None:
        pytest.skip("no Chromium or Chrome on the path")
    with browsing(program, tmp_path_factory.mktemp("profile")) as running:
        yield running
