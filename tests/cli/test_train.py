"""`outpace train` from the command line to a drafter that is served, on a tiny model."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outpace import LLM, SamplingParams
from outpace.heads import open_head
from outpace.train import needs, run
from outpace.train.settings import PRESETS, DataSettings, TrainSettings
from tests.train.tiny import ENGINE, HIDDEN, save_target

KINDS = ("early-exit", "eagle3", "draft")
FAST = ("--threads", "1", "--quantization", "none", "--window", "32", "--validation", "0.2")
STEPS = (
    "--steps",
    "4",
    "--batch-windows",
    "2",
    "--eval-every",
    "2",
    "--eval-windows",
    "2",
    "--warmup",
    "1",
    "--chain",
    "3",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.mkdir()
    for number in range(20):
        (path / f"{number}.txt").write_text(f"line {number} of a text that goes on\n" * 8)
    return path


def test_data_then_a_drafter_that_is_served(outpace, model: Path, text: Path, tmp_path: Path) -> None:
    data, out = tmp_path / "data", tmp_path / "run"
    made = outpace("train", "data", "--model", str(model), "--text", str(text), "--out", str(data), *FAST)
    assert made.code == 0, made.err
    assert "windows of 32 tokens to train on" in made.err
    result = outpace("train", "early-exit", "--model", str(model), "--data", str(data), "--out", str(out),
                     "--exit-layers", "1,2", *FAST[:4], *STEPS)  # fmt: skip
    assert result.code == 0, result.err
    assert "step 4/4" in result.err
    assert "tokens/s" in result.err
    assert "exit 2: mean acceptance length" in result.err
    found = json.loads(result.out)
    assert found["folder"] == str(out)
    assert found["acceptance"]["exit 1"]["chain"] == 3
    config = found["speculative_config"]["exit 2"]
    assert f"--speculative-config '{json.dumps(config)}'" in result.err
    plain, fast = (LLM(str(model), drafter, **ENGINE) for drafter in ("none", config))
    params = SamplingParams(temperature=0, max_tokens=20)
    outputs = [llm.generate("a text", params)[0] for llm in (plain, fast)]
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids
    assert (out / "log.jsonl").is_file()


def test_everything_from_one_command_and_then_on(outpace, model: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = ("train", "early-exit", "--model", str(model), "--text", str(text), "--prompts", "builtin", "--out",
               str(out), "--max-prompts", "4", "--max-tokens", "6", "--states", "fp16", *FAST, *STEPS)  # fmt: skip
    result = outpace(*command)
    assert result.code == 0, result.err
    assert "states of the train windows take" in result.err
    again = outpace(*command)
    assert again.code == 2
    assert f"holds a run already: go on with --resume {out}" in again.err
    resumed = outpace("train", "early-exit", "--resume", str(out), "--threads", "1")
    assert resumed.code == 0, resumed.err
    assert "going on behind step 4 of 4" in resumed.err
    assert json.loads(resumed.out)["acceptance"] == json.loads(result.out)["acceptance"]
    other = save_target(tmp_path / "other", seed=4)
    refused = outpace("train", "early-exit", "--resume", str(out), "--model", str(other))
    assert refused.code == 1
    assert "was made for tiny (weights" in refused.err
    assert "not for other" in refused.err
    once_more = outpace("train", "early-exit", "--resume", str(out))
    assert once_more.code == 0, once_more.err  # what was refused has changed nothing
    moved = model_copied(model, tmp_path / "moved" / "tiny")
    assert outpace("train", "early-exit", "--resume", str(out), "--model", str(moved)).code == 0
    assert json.loads((out / "run.json").read_text())["engine"]["model"] == str(moved)


def test_whether_states_are_kept_is_decided_once(
    outpace, model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept states are rounded: a run that goes on with others would not be the same run."""
    out = tmp_path / "run"
    result = outpace("train", "early-exit", "--model", str(model), "--text", str(text), "--out", str(out), *FAST,
                     *STEPS, "--batch-windows", "99")  # fmt: skip
    assert result.code == 0, result.err
    assert json.loads((out / "run.json").read_text())["train"]["states"] == "int8"
    monkeypatch.setattr(run.shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    resumed = outpace("train", "early-exit", "--resume", str(out))
    assert "states of the train windows take" in resumed.err
    assert json.loads((out / "run.json").read_text())["train"]["states"] == "int8"


def model_copied(model: Path, folder: Path) -> Path:
    return Path(shutil.copytree(model, folder))


def test_a_run_goes_on_from_any_folder(
    outpace, model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names that were given relative to one folder mean the same from another; data is made again if it must be."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model, "tiny")
    result = outpace("train", "early-exit", "--model", "tiny", "--text", "text", "--out", "run", *FAST, *STEPS)
    assert result.code == 0, result.err
    served = json.loads(result.out)["speculative_config"]["exit 1"]
    assert served == {"method": "early_exit", "adapter": str(tmp_path / "run" / "drafter")}
    (tmp_path / "run" / "data" / "index.json").unlink()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    resumed = outpace("train", "early-exit", "--resume", "../run")
    assert resumed.code == 0, resumed.err
    assert json.loads(resumed.out)["acceptance"] == json.loads(result.out)["acceptance"]


def test_a_run_that_was_stopped_while_its_data_was_made(
    outpace, model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says how to go on, keeps what was answered, and ends as a run that was never stopped."""
    calls = 0
    generate = LLM.generate

    def stopping(self: LLM, *arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return generate(self, *arguments, **options)

    def command(out: Path) -> list[str]:
        return ["train", "early-exit", "--model", str(model), "--prompts", "builtin", "--text", str(text), "--out",
                str(out), "--max-prompts", "6", "--max-tokens", "5", "--batch", "1", *FAST, *STEPS]  # fmt: skip

    monkeypatch.setattr(LLM, "generate", stopping)
    out = tmp_path / "parts"
    stopped = outpace(*command(out))
    assert stopped.code == 130
    assert f"Interrupted. Go on with: outpace train early-exit --resume {out}" in stopped.err
    assert len((out / "data" / "answers.jsonl").read_text().splitlines()) == 4
    result = outpace("train", "early-exit", "--resume", str(out))
    assert result.code == 0, result.err
    assert calls == 3  # the rest was asked in one call
    whole = outpace(*command(tmp_path / "whole"))
    assert whole.code == 0, whole.err
    assert json.loads(result.out)["acceptance"] == json.loads(whole.out)["acceptance"]
    assert (out / "log.jsonl").read_text() == (tmp_path / "whole" / "log.jsonl").read_text()


def test_data_that_was_stopped_says_how_to_go_on(
    outpace, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopping(*arguments: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "generate", stopping)
    result = outpace("train", "data", "--model", str(model), "--prompts", "builtin", "--max-prompts", "4", "--out",
                     str(tmp_path / "data"), *FAST)  # fmt: skip
    assert result.code == 130
    assert "the same command goes on" in result.err


def test_data_of_a_model_that_only_writes_alike_is_taken_with_a_word(
    outpace, model: Path, text: Path, tmp_path: Path
) -> None:
    other = save_target(tmp_path / "other", seed=4)
    data = tmp_path / "data"
    assert outpace("train", "data", "--model", str(other), "--text", str(text), "--out", str(data), *FAST).code == 0
    result = outpace("train", "early-exit", "--model", str(model), "--data", str(data), "--out", str(tmp_path / "run"),
                     *FAST[:4], *STEPS)  # fmt: skip
    assert result.code == 0, result.err
    assert "holds what other says, not tiny" in result.err


def test_memory_is_asked_for_before_data_is_made(
    outpace, model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(needs, "available_bytes", lambda: 300 << 20)
    result = outpace("train", "eagle3", "--model", str(model), "--text", str(text), "--out", str(tmp_path / "run"),
                     *FAST[:4], *STEPS, "--window", "4096", "--batch-windows", "64")  # fmt: skip
    assert result.code == 1
    assert "training takes about" in result.err
    assert "64 windows of 4096 tokens" in result.err
    assert "fewer --batch-windows" in result.err
    assert not (tmp_path / "run" / "data" / "index.json").exists()


@pytest.mark.parametrize("more", [[], ["--train-head"]])
def test_a_head_is_exported_without_a_word_about_its_target(
    outpace, model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    """The head names its model so that others find it, wherever they run."""
    monkeypatch.chdir(model.parent)
    out = tmp_path / "run"
    result = outpace("train", "eagle3", "--model", model.name, "--text", str(text), "--out", str(out), "--draft-vocab",
                     "40", *more, *FAST, *STEPS)  # fmt: skip
    assert result.code == 0, result.err
    assert re.search(r"the 40 tokens that the head can draft are \d+\.\d% of what is to be learnt", result.err)
    monkeypatch.chdir(tmp_path)
    for engine in ("vllm", "sglang"):
        exported = outpace("export", "--to", engine, str(out / "drafter"), str(tmp_path / engine))
        assert exported.code == 0, exported.err
        head = open_head(tmp_path / engine)
        assert head.verifier is not None
        assert head.verifier.name == str(model)
        assert head.weights.shapes["lm_head.weight"] == (40, HIDDEN)
        assert head.weights.dtypes["fc.weight"] == torch.bfloat16
    shutil.move(model, model.parent / "gone")
    try:
        refused = outpace("export", "--to", "vllm", str(out / "drafter"), str(tmp_path / "again"))
    finally:
        shutil.move(model.parent / "gone", model)
    assert refused.code == (0 if more else 2)
    assert more or "(--target)" in refused.err


def test_an_eagle3_head(outpace, model: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = outpace("train", "eagle3", "--model", str(model), "--text", str(text), "--out", str(out), "--unroll", "2",
                     "--draft-vocab", "40", *FAST, *STEPS)  # fmt: skip
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert found["speculative_config"] == {"eagle3": {"method": "eagle3", "model": str(out / "drafter")}}
    config = json.loads((out / "drafter" / "config.json").read_text())
    assert config["draft_vocab_size"] == 40
    assert config["torch_dtype"] == "bfloat16"
    resumed = outpace("train", "eagle3", "--resume", str(out), "--threads", "1")
    assert resumed.code == 0, resumed.err
    assert outpace("train", "early-exit", "--resume", str(out)).code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["early-exit", "--exit-layers", "4"], "exit layer 4 is not possible: it must be in 1 to 3"),
        (["draft", "--layers", "4"], "layers=4 is not possible: it must be in 1 to 3"),
        (["eagle3", "--unroll", "99"], "unroll=99 is not possible: it must be in 1 to 16"),
        (["early-exit", "--exit-layers", "two"], "write layers as 10 or 8,10,12"),
        (["early-exit", "--lr", "0"], "lr=0.0 is not possible: above 0, at most 1"),
        (["early-exit", "--steps", "0"], "steps=0"),
        (["early-exit", "--loss", "huber"], "possible: kl, tv, lk, nla"),
        (["early-exit", "--states", "fp8"], "possible: auto, none, fp16, int8"),
        (["early-exit", "--window", "4"], "window=4"),
        (["early-exit", "--validation", "1"], "validation=1.0 is not possible: it must be above 0 and below 1"),
        (["early-exit", "--text", "nowhere"], "'nowhere' is no text"),
        (["early-exit", "--data", "x", "--text", "stdlib"], "take one of both"),
        (["early-exit", "--data", "nowhere"], "holds no training data"),
        (["early-exit", "--resume", "nowhere"], "holds no run to go on with"),
        (["early-exit", "--resume", "x", "--lr", "1"], "--lr does not go with --resume"),
        (["early-exit", "--preset", "huge"], "invalid choice"),
        (["data"], "--out"),
        (["medusa"], "invalid choice"),
        ([], "WHAT"),
    ],
)
def test_what_cannot_be_done_says_why(outpace, model: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    own = [] if not arguments or "--resume" in arguments or arguments[0] == "medusa" else ["--model", str(model)]
    place = ["--out", str(tmp_path / "run")] if own and arguments != ["data"] else []
    result = outpace("train", *arguments, *own, *place)
    assert result.code in (1, 2)
    assert message in result.err
    assert "bug" not in result.err
    assert len(result.err.strip().splitlines()) <= 4


@pytest.mark.parametrize("kind", ["data", *KINDS])
def test_help_names_every_setting_with_its_default(outpace, kind: str) -> None:
    result = outpace("train", kind, "--help")
    assert result.code == 0
    words = " ".join(result.out.split())
    settings = DataSettings if kind == "data" else TrainSettings
    for item in fields(settings):
        assert "--" + item.name.replace("_", "-") in words
    assert "(default: 0.05)" in words
    assert "--tensorboard" in words or kind == "data"
    for name, preset in PRESETS.items():
        assert f"{name} ({preset.about})" in words or kind == "data"


def test_presets_are_possible_settings() -> None:
    for preset in PRESETS.values():
        assert TrainSettings(**preset.train).steps == preset.train["steps"]
        assert DataSettings(**preset.data).window == preset.data["window"]
