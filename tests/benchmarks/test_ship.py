"""recipes/ship.py: what a run made becomes a drafter of the package, with a card that says what the run's files say."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import outpace.shipped
from outpace.shipped import shipped_for
from outpace.train.kinds.eagle3 import Eagle3, Eagle3Options
from tests.train.tiny import World, save_target


@pytest.fixture
def ship(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "recipes"))
    return importlib.import_module("ship")


def measured(step: int, length: float) -> str:
    found = {"chain": 4, "greedy": [0.5, 0.25, 0.2, 0.1], "greedy_length": length, "sampled_length": 1.4}
    return json.dumps({"step": step, "valid": {"eagle3": found}})


def test_a_run_is_put_into_the_package(ship: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(save_target(tmp_path / "tiny"))
    run, data, shelf = tmp_path / "run", tmp_path / "data", tmp_path / "shelf"
    run.mkdir()
    data.mkdir()
    Eagle3(world.material, torch.arange(50), Eagle3Options()).save(run / "drafter")
    (run / "drafter" / "notes.txt").write_text("mine")
    train = {"steps": 60, "batch_windows": 2, "accumulate": 1, "lr": 1e-3, "loss": "lk", "seed": 7}
    plan = {"kind": "eagle3", "data": str(data), "train": train, "options": {"draft_vocab": 50}}
    (run / "run.json").write_text(json.dumps(plan))
    lines = ['{"step": 1, "loss": 2.0}', measured(0, 1.1), measured(20, 2.25), measured(60, 2.2)]
    (run / "log.jsonl").write_text("\n".join(lines))
    index = {"window": 32, "sources": ["builtin"], "splits": {"train": {"windows": 40, "labels": 1234}}}
    (data / "index.json").write_text(json.dumps(index))
    line = {"drafter": "eagle3", "task": "json", "acceptance_rate": 0.75, "mean_acceptance_length": 3.5,
            "speedup_median": 1.625}  # fmt: skip
    both = [
        {"drafter": name, "task": "all", "speedup_median": speed} for name, speed in (("auto", 1.2), ("suffix", 1.3))
    ]
    table: dict[str, Any] = {"k": 4, "temperature": 0, "machine": "a machine", "table": [line, *both]}
    (tmp_path / "measured.json").write_text(json.dumps(table))
    ship.main(["--model", str(tmp_path / "tiny"), "--eagle3", str(run), "--name", "small", "--folder", str(shelf),
               "--measured", str(tmp_path / "measured.json")])  # fmt: skip

    assert {path.name for path in (shelf / "small" / "eagle3").iterdir()} == {"config.json", "model.safetensors"}
    monkeypatch.setattr(outpace.shipped, "FOLDER", shelf)
    outpace.shipped._targets.cache_clear()
    assert shipped_for(world.files, world.shape).eagle3 == shelf / "small" / "eagle3"
    assert not shipped_for(world.files, world.shape).in_auto  # it was slower with the head
    assert ship.pays({"table": [{**both[0], "speedup_median": 1.31}, both[1]]})
    card = (shelf / "small" / "README.md").read_text()
    for part in ("1,234 tokens to be predicted", "sources: builtin", "60 steps of 2 windows (3.0 rounds)",
                 "2.25 at temperature 0 and 1.40 at 1 after step 20 (1.10 and", "0.50, 0.25, 0.20, 0.10 by position",
                 "| EAGLE-3 head | json | 75% | 3.50 | 1.62x |", "seed 7", "`auto` does without"):  # fmt: skip
        assert part in card


def test_nothing_to_ship(ship: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ship.main(["--model", "x", "--name", "y"])
    assert "name --eagle3 or --early-exit" in capsys.readouterr().err
