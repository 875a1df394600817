"""recipes/ship.py: what a run made becomes a drafter of the package, with a card that says what was measured."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import outpace.shipped
from outpace.shipped import shipped_for
from outpace.train.kinds.eagle3 import Eagle3, Eagle3Options
from outpace.train.result import weights_digest
from tests.train.tiny import World, save_target

SETTINGS = {"model": "tiny", "quantization": "auto", "k": 4, "temperature": 0.0, "max_tokens": 96, "threads": None,
            "prompts": "prompts.jsonl", "num_prompts": 26, "rounds": 2}  # fmt: skip


@pytest.fixture
def ship(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "recipes"))
    return importlib.import_module("ship")


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(save_target(tmp_path / "tiny"))


@pytest.fixture
def run(tmp_path: Path, world: World) -> Path:
    """A finished run of `outpace train eagle3`, as far as its files are read."""
    run, data = tmp_path / "run", tmp_path / "data"
    run.mkdir()
    data.mkdir()
    Eagle3(world.material, torch.arange(50), Eagle3Options()).save(run / "drafter")
    (run / "drafter" / "notes.txt").write_text("mine")
    train = {"steps": 60, "batch_windows": 2, "accumulate": 1, "lr": 1e-3, "loss": "lk", "seed": 7}
    plan = {"kind": "eagle3", "data": str(data), "train": train, "options": {"draft_vocab": 50}}
    (run / "run.json").write_text(json.dumps(plan))
    lines = ['{"step": 1, "loss": 2.0}', held_out(0, 1.1), held_out(20, 2.25), held_out(60, 2.2)]
    (run / "log.jsonl").write_text("\n".join(lines))
    index = {"window": 32, "sources": ["builtin"], "splits": {"train": {"windows": 40, "labels": 1234}}}
    (data / "index.json").write_text(json.dumps(index))
    return run


def held_out(step: int, length: float) -> str:
    found = {"chain": 4, "greedy": [0.5, 0.25, 0.2, 0.1], "greedy_length": length, "sampled_length": 1.4}
    return json.dumps({"step": step, "valid": {"eagle3": found}})


def line(drafter: str, speed: float, task: str = "all") -> dict[str, Any]:
    return {"drafter": drafter, "task": task, "acceptance_rate": 0.75, "mean_acceptance_length": 3.5,
            "speedup_median": speed}  # fmt: skip


def measured(run: Path, without: float = 1.3, with_head: float = 1.2) -> dict[str, Any]:
    """What the benchmark writes."""
    table = [line("eagle3", 1.625, "json"), line("eagle3", 0.5), line("auto without head", without),
             line("auto with head", with_head), line("suffix", 1.5), line("ngram", 0.9)]  # fmt: skip
    weights = {"eagle3": weights_digest(run / "drafter")}
    return {"machine": "a machine", "settings": SETTINGS, "weights": weights, "table": table}


def put(ship: ModuleType, run: Path, found: Mapping[str, Any]) -> Path:
    """Ships the run with these measurements. Returns the folder in which drafters lie."""
    place = run.parent
    (place / "measured.json").write_text(json.dumps(found))
    ship.main(["--model", str(place / "tiny"), "--eagle3", str(run), "--name", "small", "--folder",
               str(place / "shelf"), "--measured", str(place / "measured.json")])  # fmt: skip
    return place / "shelf"


def in_auto(world: World, shelf: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(outpace.shipped, "FOLDER", shelf)
    outpace.shipped._targets.cache_clear()
    found = shipped_for(world.files, world.shape)
    assert found.eagle3 == shelf / "small" / "eagle3"
    return found.in_auto


def test_a_run_is_put_into_the_package(
    ship: ModuleType, world: World, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = put(ship, run, measured(run))
    assert {path.name for path in (shelf / "small" / "eagle3").iterdir()} == {"config.json", "model.safetensors"}
    assert not in_auto(world, shelf, monkeypatch)
    card = (shelf / "small" / "README.md").read_text()
    for part in ("1,234 tokens to be predicted", "sources: builtin", "60 steps of 2 windows (3.0 rounds)",
                 "2.25 at temperature 0 and 1.40 at 1 after step 20 (1.10 and", "0.50, 0.25, 0.20, 0.10 by position",
                 "| EAGLE-3 head | json | 75% | 3.50 | 1.62x |", "seed 7",
                 "`auto` does without the head (1.30 times the speed of plain decoding without it, 1.20 with it)",
                 "| `auto` with the head | all | 75% | 3.50 | 1.20x |"):  # fmt: skip
        assert part in card
    assert "suffix" not in card
    assert "`self`" not in card  # no adapter was shipped


def test_auto_takes_the_head_if_it_is_faster_with_it_than_without(
    ship: ModuleType, world: World, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever looking drafts up at a fixed length (suffix, 1.5) gave: that is not what it is compared with."""
    shelf = put(ship, run, measured(run, 1.3, 1.31))
    assert in_auto(world, shelf, monkeypatch)
    assert "`auto` takes the head (1.30 times" in (shelf / "small" / "README.md").read_text()


def test_the_card_says_how_it_was_measured(ship: ModuleType, run: Path) -> None:
    """Every option that numbers depend on, as the benchmark wrote it; what it was not given is left out."""
    card = (put(ship, run, measured(run)) / "small" / "README.md").read_text()
    command = (
        "`python benchmarks/drafters.py --model tiny --quantization auto --prompts prompts.jsonl --rounds 2 "
        "--temperature 0.0 -k 4 --max-tokens 96`, in one run, 26 prompts, a machine;"
    )
    assert command in card
    assert "--threads" not in card


@pytest.mark.parametrize("lacking", ["auto with head", "auto without head", "eagle3"])
def test_measurements_that_lack_a_row_are_refused(ship: ModuleType, run: Path, lacking: str) -> None:
    found = measured(run)
    found["table"] = [each for each in found["table"] if each["drafter"] != lacking]
    with pytest.raises(SystemExit, match=rf"measured\.json lacks '{lacking}': measure again with .* in one run"):
        put(ship, run, found)
    assert not (run.parent / "shelf").exists()


@pytest.mark.parametrize("lacking", ["settings", "weights", "table"])
def test_measurements_of_another_form_are_refused(ship: ModuleType, run: Path, lacking: str) -> None:
    found = measured(run)
    del found[lacking]
    with pytest.raises(SystemExit, match=rf"measured\.json has no '{lacking}': measure again"):
        put(ship, run, found)


def test_measurements_of_another_head_are_refused(ship: ModuleType, world: World, run: Path) -> None:
    before = measured(run)
    (run / "drafter" / "notes.txt").unlink()
    Eagle3(world.material, torch.arange(60), Eagle3Options()).save(run / "drafter")
    with pytest.raises(SystemExit, match=r"measured another EAGLE-3 head than that of .*run, or none.*--head"):
        put(ship, run, before)


def test_a_run_without_a_drafter_is_refused_and_what_was_shipped_stays(ship: ModuleType, run: Path) -> None:
    found = measured(run)
    shelf = put(ship, run, found)
    (run / "drafter" / "config.json").unlink()
    with pytest.raises(SystemExit, match=r"config\.json is missing: name a finished run"):
        put(ship, run, found)
    assert (shelf / "small" / "eagle3" / "config.json").is_file()


def test_nothing_to_ship(ship: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ship.main(["--model", "x", "--name", "y", "--measured", "z"])
    assert "name --eagle3 or --early-exit" in capsys.readouterr().err


def test_both_programs_use_the_same_words(ship: ModuleType) -> None:
    drafters = importlib.import_module("drafters")
    assert (ship.WITHOUT_HEAD, ship.WITH_HEAD) == (drafters.WITHOUT_HEAD, drafters.WITH_HEAD)
    assert list(ship.NAMES.values()) == [drafters.HEAD, drafters.EXIT]
