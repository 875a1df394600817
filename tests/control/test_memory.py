"""What is learnt in one run helps the next, and can do no harm."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outpace.control import AdaptiveController, ControlSettings, Knowledge
from outpace.control.memory import file_of, load, save
from tests.control.simulator import TORCH, Simulation, TrueDrafter, best_rate, table

SECONDS = table(TORCH)


def drafters(free: float, model: float) -> dict[str, TrueDrafter]:
    return {
        "free": TrueDrafter(lambda request, position: free),
        "model": TrueDrafter(lambda request, position: model, lambda many: 0.1 * SECONDS(many), 0.0002),
    }


def learnt(free: float = 0.05, model: float = 0.9) -> Knowledge:
    controller = AdaptiveController()
    world = Simulation(controller, drafters(free, model), SECONDS, stalls=0.0)
    for request in range(30):
        world.run([request], 20)
        controller.release(request)
    return controller.knowledge


@pytest.fixture(scope="module")
def knowledge() -> Knowledge:
    return learnt()


def test_what_was_learnt_comes_back(knowledge: Knowledge, tmp_path: Path) -> None:
    assert save(knowledge, tmp_path / "new" / "folder", "model a")
    found = Knowledge(ControlSettings())
    assert load(found, tmp_path / "new" / "folder", "model a")
    before, after = knowledge.target.tables[2], found.target.tables[2]
    assert after.table(1, 600) == pytest.approx(before.table(1, 600))
    assert found.costs("model").call(1, 3, 10) == pytest.approx(knowledge.costs("model").call(1, 3, 10))
    assert found.is_known("model")
    for name in ("free", "model"):
        chances = [
            k.acceptance(name).average_survival(1, k.acceptance(name).correction())[0] for k in (knowledge, found)
        ]
        assert abs(chances[1] - chances[0]) < 0.25
    assert len(found.requests) == 0
    assert list((tmp_path / "new" / "folder").iterdir()) == [file_of(tmp_path / "new" / "folder", "model a")]


def test_it_starts_well_with_it(knowledge: Knowledge, tmp_path: Path) -> None:
    save(knowledge, tmp_path, "k")
    rates = []
    for remembered in (False, True):
        found = Knowledge(ControlSettings())
        if remembered:
            assert load(found, tmp_path, "k")
        world = Simulation(AdaptiveController(knowledge=found), drafters(0.05, 0.9), SECONDS, stalls=0.0, seed=5)
        rates.append(world.run([1], 30) / best_rate(SECONDS, [1], world.drafters))
    assert rates[1] > 0.95
    assert rates[1] > rates[0]


def test_it_is_soon_unlearnt(knowledge: Knowledge, tmp_path: Path) -> None:
    """Remembered: the model drafts well and the lookup does not. Now it is the other way round, on a faster machine."""
    save(knowledge, tmp_path, "k")
    found = Knowledge(ControlSettings())
    assert load(found, tmp_path, "k")
    world = Simulation(
        AdaptiveController(knowledge=found), drafters(0.95, 0.05), lambda rows: SECONDS(rows) / 3, stalls=0.0
    )
    world.run([1], 60)
    assert world.run([1], 60) / best_rate(world.seconds, [1], world.drafters) > 0.9


def test_no_file_is_no_note(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    assert not load(Knowledge(ControlSettings()), tmp_path / "nowhere", "k")
    assert not caplog.records


def _other(content: dict[str, Any], name: str) -> Any:
    changed: dict[str, Any] = json.loads(json.dumps(content))
    model = changed["drafters"]["model"]
    pairs = changed["acceptances"]["model"]
    if name == "another format":
        changed["format"] = 99
    elif name == "another key":
        changed["key"] = "another model"
    elif name == "too few seconds":
        changed["target"]["2"]["seconds"].pop()
    elif name == "negative seconds":
        changed["target"]["2"]["seconds"][3] = -1.0
    elif name == "endless seconds":
        model["passes"]["seconds"][0] = float("inf")
    elif name == "threads with no number":
        changed["target"]["two"] = changed["target"].pop("2")
    elif name == "more kept than seen":
        pairs[0] = [3.0, 2.0]
    elif name == "no number":
        pairs[1] = [float("nan"), 2.0]
    elif name == "missing counts":
        pairs.pop()
    elif name == "a row for nothing":
        model["row"] = 0.0
    elif name == "nothing inside":
        changed = {}
    return changed


@pytest.mark.parametrize(
    "name",
    [
        "another format",
        "another key",
        "too few seconds",
        "negative seconds",
        "endless seconds",
        "threads with no number",
        "more kept than seen",
        "no number",
        "missing counts",
        "a row for nothing",
        "nothing inside",
    ],
)
def test_a_wrong_file_is_ignored_with_a_note(
    name: str, knowledge: Knowledge, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    save(knowledge, tmp_path, "k")
    path = file_of(tmp_path, "k")
    content = json.loads(path.read_text())
    path.write_text(json.dumps(_other(content, name)))
    found = Knowledge(ControlSettings())
    assert not load(found, tmp_path, "k")
    assert not found.target.tables
    assert not found.acceptances
    assert not found.draft_costs
    assert str(path) in caplog.text


@pytest.fixture(scope="module")
def written(knowledge: Knowledge, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    assert save(knowledge, folder, "k")
    return folder


@given(garbage=st.binary(max_size=200), at=st.integers(0, 5000))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_file_is_no_error(garbage: bytes, at: int, written: Path, knowledge: Knowledge) -> None:
    path = file_of(written, "k")
    save(knowledge, written, "k")
    whole = path.read_bytes()
    for damaged in (garbage, whole[:at], whole[:at] + garbage + whole[at + len(garbage) :], b"[" * 100_000):
        path.write_bytes(damaged)
        controller = AdaptiveController()
        load(controller.knowledge, written, "k")
        Simulation(controller, drafters(0.5, 0.5), SECONDS).run([1], 1)


def test_a_folder_that_cannot_be_written_is_no_error(
    knowledge: Knowledge, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    (tmp_path / "file").write_text("")
    assert not save(knowledge, tmp_path / "file" / "folder", "k")
    assert "could not be kept" in caplog.text
    assert not load(Knowledge(ControlSettings()), tmp_path / "file" / "folder", "k")
