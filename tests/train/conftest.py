"""The tiny target, written and opened once."""

from __future__ import annotations

from pathlib import Path

import pytest

from outpace.train.curves import Curves
from tests.train.tiny import World, save_target


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(scope="session")
def world(target_folder: Path) -> World:
    return World(target_folder)


@pytest.fixture
def no_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than everything else of a run; one test looks at the picture."""
    if request.node.name != "test_a_run_is_the_same_again_and_learns":
        monkeypatch.setattr(Curves, "close", lambda _: False)
