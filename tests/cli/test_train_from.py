"""`outpace train --from DIR`: a server's head goes on with what the server was asked."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from outpace import LLM, SamplingParams
from outpace.cli.train_from import free_name
from outpace.train.curves import Curves
from outpace.train.data.recorded import HEADER
from outpace.train.kinds.early_exit import EarlyExit
from tests.train.tiny import ENGINE, EXIT, World, save_target

OPTIONS = ("--threads", "1", "--window", "32", "--validation", "0.2", "--steps", "2", "--batch-windows", "2",
           "--eval-every", "1", "--eval-windows", "2", "--warmup", "0", "--chain", "3")  # fmt: skip


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Curves, "close", lambda _: False)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(save_target(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(scope="module")
def answers(world: World) -> list[dict[str, Any]]:
    prompts = [[7 * n + 20, 3 * n + 40, 11 * n + 60] for n in range(12)]
    llm = LLM(world.engine.model, "none", **ENGINE)
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    return [{"prompt_token_ids": p, "token_ids": o.outputs[0].token_ids} for p, o in zip(prompts, outputs, strict=True)]


@pytest.fixture
def records(world: World, answers: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a server with an early exit has written."""
    monkeypatch.chdir(tmp_path)
    EarlyExit(world.material, [EXIT]).save(tmp_path / "head")
    write(world, answers, tmp_path / "records", [{"method": "early_exit", "adapter": str(tmp_path / "head")}])
    return tmp_path / "records"


def write(world: World, answers: list[dict[str, Any]], folder: Path, drafters: list[dict[str, str]]) -> None:
    engine = {"model": world.engine.model, "quantization": "none", "dtype": "auto", "kernels": "torch"}
    header = {HEADER: 1, "target": world.identity.as_dict(), "engine": engine, "drafters": drafters}
    folder.mkdir(exist_ok=True)
    lines = [header, *answers]
    (folder / "answers-1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_folder_alone_is_enough(outpace, records: Path, tmp_path: Path) -> None:
    """Model, precision, kind and head are the server's; each run gets a folder of its own."""
    result = outpace("train", "--from", str(records), *OPTIONS)
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert found["folder"] == "outpace-early-exit-tiny"
    assert found["speculative_config"]["exit 2"]["method"] == "early_exit"
    assert found["better"] in (True, False)
    assert ("`outpace swap URL outpace-early-exit-tiny`" in result.err) is found["better"]
    run = json.loads((tmp_path / found["folder"] / "run.json").read_text())
    assert (run["head"], run["engine"]["kernels"]) == (str(tmp_path / "head"), "torch")
    assert json.loads((tmp_path / found["folder"] / "result.json").read_text())["better"] is found["better"]

    assert free_name("outpace-early-exit-tiny") == "outpace-early-exit-tiny-2"
    data = tmp_path / found["folder"] / "data"
    assert {stat.S_IMODE(path.stat().st_mode) for path in data.glob("*.safetensors")} == {0o600}
    assert stat.S_IMODE(data.stat().st_mode) == 0o700
    refused = outpace("train", "early-exit", "--resume", "outpace-early-exit-tiny", "--from", str(records))
    assert "--from does not go with --resume" in refused.err


def test_another_kind_begins_anew(outpace, records: Path) -> None:
    result = outpace("train", "eagle3", "--from", str(records), "--draft-vocab", "40", *OPTIONS)
    assert result.code == 0, result.err
    assert "better" not in json.loads(result.out)


def test_settings_of_the_head_cannot_be_changed(outpace, records: Path) -> None:
    result = outpace("train", "--from", str(records), "--exit-layers", "1", *OPTIONS)
    assert result.code == 2
    assert "exit_layers=[1] is not possible with the head" in result.err


def test_records_of_another_model_are_refused(outpace, records: Path, tmp_path: Path) -> None:
    other = save_target(tmp_path / "other", seed=4)
    result = outpace("train", "early-exit", "--from", str(records), "--model", str(other), *OPTIONS)
    assert result.code == 1
    assert "answers-1.jsonl was made for tiny (weights" in result.err
    assert "not for other" in result.err


def test_a_refused_run_leaves_no_folder(outpace, records: Path, tmp_path: Path) -> None:
    """Nor does it take anything away that it has not made."""
    other = str(save_target(tmp_path / "other", seed=4))
    before = sorted(path.name for path in tmp_path.iterdir())
    assert outpace("train", "early-exit", "--from", str(records), "--model", other, *OPTIONS).code == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    (tmp_path / "mine" / "empty").mkdir(parents=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    for name in ("mine", "run"):
        words = ("train", "early-exit", "--from", str(records), "--model", other, "--out", name)
        assert outpace(*words, *OPTIONS).code == 1
    assert (tmp_path / "mine" / "empty").is_dir()
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


def test_from_needs_a_folder(outpace) -> None:
    result = outpace("train", "--from")
    assert result.code == 2
    assert "--from needs a folder" in result.err
    assert "__main__" not in result.err


def test_a_server_without_a_head(outpace, world: World, answers: list[dict[str, Any]], records: Path) -> None:
    write(world, answers, records, [{"method": "suffix"}])
    result = outpace("train", "--from", str(records), *OPTIONS)
    assert result.code == 2
    assert f"`outpace train eagle3 --from {records}`" in result.err


def test_no_records_and_no_folder(outpace, tmp_path: Path) -> None:
    result = outpace("train", "--from", str(tmp_path))
    assert result.code == 2
    assert f"holds no answers that `outpace serve --record {tmp_path}` has written" in result.err
    assert "what to do" in outpace("train", "--help").out
    assert "--from DIR" in outpace("train", "--help").out


def test_as_many_answers_as_are_wanted(outpace, world: World, records: Path, tmp_path: Path) -> None:
    """Of 12 answers with their prompts, 23 tokens each, five."""
    result = outpace("train", "data", "--records", str(records), "--max-record-tokens", "100", "--out", "data",
                     "--model", world.engine.model, "--quantization", "none", "--threads", "1")  # fmt: skip
    assert result.code == 0, result.err
    assert "100 tokens of recorded answers are enough" in result.err
    assert "lose the beginning" not in result.err
    splits = json.loads((tmp_path / "data" / "index.json").read_text())["splits"]
    assert sum(split["labels"] for split in splits.values()) == 5 * 20


def test_a_window_that_is_too_short_is_said(outpace, world: World, records: Path) -> None:
    result = outpace("train", "data", "--records", str(records), "--out", "data", "--model", world.engine.model,
                     "--quantization", "none", "--threads", "1", "--window", "22")  # fmt: skip
    assert result.code == 0, result.err
    assert "12 of 12 recorded answers lose the beginning of their prompt: --window 22 is short" in result.err
