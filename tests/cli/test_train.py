"""`outpace train` from the command line to a drafter that is served, on a tiny model."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from outpace import LLM, SamplingParams
from outpace.train.settings import PRESETS, DataSettings, TrainSettings
from tests.train.tiny import ENGINE, save_target

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


def test_an_eagle3_head(outpace, model: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = outpace("train", "eagle3", "--model", str(model), "--text", str(text), "--out", str(out), "--unroll", "2",
                     "--draft-vocab", "40", *FAST, *STEPS)  # fmt: skip
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert found["speculative_config"] == {"eagle3": {"method": "eagle3", "model": str(out / "drafter")}}
    config = json.loads((out / "drafter" / "config.json").read_text())
    assert config["draft_vocab_size"] == 40
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
