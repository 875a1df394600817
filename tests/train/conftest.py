"""The tiny target, written and opened once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.tiny import World, save_target


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(scope="session")
def world(target_folder: Path) -> World:
    return World(target_folder)
