"""benchmarks/drafters.py: every drafter on every prompt, what is missing left out, and the picture."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from outpace.errors import CheckpointError
from outpace.train.kinds.eagle3 import Eagle3, Eagle3Options
from outpace.train.result import weights_digest
from tests.train.tiny import World, save_target


@pytest.fixture
def drafters() -> ModuleType:
    return importlib.import_module("drafters")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    lines = [{"id": f"{task}-{number}", "task": task, "max_tokens": 24,
              "messages": [{"role": "user", "content": f"{task} {number} " * 4}]}
             for task in ("chat", "json") for number in range(2)]  # fmt: skip
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return tmp_path / "prompts.jsonl"


def test_what_is_measured(
    drafters: ModuleType,
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = save_target(tmp_path / "tiny")
    command = ["--model", str(model), "--prompts", str(prompts), "--quantization", "none", "--threads", "1"]
    out, picture = tmp_path / "found.json", tmp_path / "found.png"
    monkeypatch.setattr(sys, "argv", ["drafters.py", *command, "--json", str(out), "--plot", str(picture)])
    assert drafters.main() == 0
    printed = capsys.readouterr().out
    assert "eagle3 is left out: method='eagle3' needs a model" in printed
    assert "answers that differ from the plain one: ngram 0, suffix 0, early exit 0, auto 0" in printed
    found = json.loads(out.read_text())
    table = found["table"]
    assert found["weights"] == {}
    assert [(line["drafter"], line["task"], line["prompts"]) for line in table] == [
        (name, task, 4 if task == "all" else 2)
        for name in ("ngram", "suffix", "early exit", "auto")
        for task in ("all", "chat", "json")
    ]
    assert all(line["same_text"] for line in table)
    whole = next(line for line in table if line["drafter"] == "early exit" and line["task"] == "all")
    assert 1 < whole["mean_acceptance_length"] <= 5
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_drafter_that_was_asked_for_must_be_there(
    drafters: ModuleType, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_target(tmp_path / "tiny")
    command = ["--model", str(model), "--prompts", str(prompts), "--drafter", '{"method": "eagle3"}']
    monkeypatch.setattr(sys, "argv", ["drafters.py", *command])
    with pytest.raises(drafters.OutpaceError, match="needs a model"):
        drafters.main()


def test_auto_without_and_with_a_head_in_one_run(
    drafters: ModuleType, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(save_target(tmp_path / "tiny"))
    head, out = tmp_path / "head", tmp_path / "found.json"
    Eagle3(world.material, torch.arange(world.material.vocab_size), Eagle3Options()).save(head)
    command = ["--model", str(tmp_path / "tiny"), "--prompts", str(prompts), "--quantization", "none", "--threads", "1",
               "--head", str(head), "--max-tokens", "8", "--rounds", "2", "--json", str(out)]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["drafters.py", *command])
    assert drafters.main() == 0
    found = json.loads(out.read_text())
    assert "eagle3" not in found["drafters"]["auto without head"]
    assert "suffix" in found["drafters"]["auto with head"]
    assert "eagle3" in found["drafters"]["auto with head"]
    lines = {line["drafter"]: line for line in found["table"] if line["task"] == "all"}
    assert list(lines) == ["ngram", "suffix", "eagle3", "early exit", "auto without head", "auto with head"]
    assert {(line["prompts"], line["answers"], line["tokens"]) for line in lines.values()} == {(4, 8, 64)}
    assert found["weights"] == {"eagle3": weights_digest(head)}
    assert found["settings"] == {
        "model": str(tmp_path / "tiny"), "quantization": "none", "k": 4, "temperature": 0.0, "max_tokens": 8,
        "threads": 1, "rounds": 2, "prompts": "prompts.jsonl", "num_prompts": 4,
    }  # fmt: skip


def test_a_head_that_is_not_there(
    drafters: ModuleType, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [
        "--model",
        str(save_target(tmp_path / "tiny")),
        "--prompts",
        str(prompts),
        "--head",
        str(tmp_path / "no"),
    ]
    monkeypatch.setattr(sys, "argv", ["drafters.py", *command])
    with pytest.raises(CheckpointError, match="no holds no weights"):
        drafters.main()
