"""Drafters that come with outpace: taken for their own model without being named, and for no other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import outpace.shipped
from outpace import LLM, SamplingParams
from outpace.errors import InvalidParameter
from outpace.shipped import FOLDER, Shipped, describe_target, shipped_for
from outpace.train.kinds.eagle3 import Eagle3, Eagle3Options
from outpace.train.kinds.early_exit import EarlyExit
from tests.train.tiny import ENGINE, EXIT, World, save_target

PROMPT = [1, 20, 33, 47, 8]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def shelf(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of shipped drafters with both kinds for the tiny model."""
    world = World(model)
    place = tmp_path / "shelf" / "tiny"
    place.mkdir(parents=True)
    (place / "target.json").write_text(json.dumps({**describe_target(world.files, world.shape), "auto": True}))
    Eagle3(world.material, torch.arange(world.material.vocab_size), Eagle3Options()).save(place / "eagle3")
    EarlyExit(world.material, [EXIT]).save(place / "early-exit")
    monkeypatch.setattr(outpace.shipped, "FOLDER", tmp_path / "shelf")
    return place


def speculative(llm: LLM) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = llm.describe()["speculative"]
    return found


def test_auto_takes_the_head_of_its_model(shelf: Path, model: Path) -> None:
    llm = LLM(str(model), "auto", **ENGINE)
    assert [item["method"] for item in speculative(llm)] == ["suffix", "eagle3"]
    assert speculative(llm)[1]["model"] == str(shelf / "eagle3")
    plain = LLM(str(model), "none", **ENGINE)
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=3)
    outputs = [engine.generate([PROMPT], params)[0].outputs[0].token_ids for engine in (llm, plain)]
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("word", ["self", {"method": "early_exit"}])
def test_self_speculation_takes_the_adapter_of_its_model(shelf: Path, model: Path, word: Any) -> None:
    (item,) = speculative(LLM(str(model), word, **ENGINE))
    assert (item["adapter"], item["exit_layer"]) == (str(shelf / "early-exit"), EXIT)


def test_an_exit_that_is_named_is_taken_bare(shelf: Path, model: Path) -> None:
    (item,) = speculative(LLM(str(model), f"self:{EXIT}", **ENGINE))
    assert (item["adapter"], item["exit_layer"]) == (None, EXIT)


def test_another_model_of_the_same_shape_gets_none(shelf: Path, tmp_path: Path) -> None:
    other = save_target(tmp_path / "other", seed=4)
    assert [item["method"] for item in speculative(LLM(str(other), "auto", **ENGINE))] == ["suffix"]
    with pytest.raises(InvalidParameter, match=r"needs a model, .* none comes with outpace for other"):
        LLM(str(other), {"method": "eagle3"}, **ENGINE)
    world = World(other)
    assert shipped_for(world.files, world.shape) == Shipped()
    assert shipped_for(world.files, None) == Shipped()


@pytest.mark.parametrize(("name", "there"), [("self_attn.q_proj", True), ("input_layernorm", False)])
def test_a_model_is_known_by_its_norms(shelf: Path, tmp_path: Path, name: str, there: bool) -> None:
    """Quantising matrices, or an adapter merged into them, changes the matrices alone."""
    other = save_target(tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights[f"model.layers.0.{name}.weight"] *= 1.01
    save_file(weights, other / "model.safetensors")
    world = World(other)
    assert (shipped_for(world.files, world.shape).eagle3 is not None) == there


def test_a_head_that_does_not_pay_is_there_by_name_alone(shelf: Path, model: Path) -> None:
    target = json.loads((shelf / "target.json").read_text())
    (shelf / "target.json").write_text(json.dumps({**target, "auto": False}))
    outpace.shipped._targets.cache_clear()
    assert [item["method"] for item in speculative(LLM(str(model), "auto", **ENGINE))] == ["suffix"]
    assert [item["method"] for item in speculative(LLM(str(model), {"method": "eagle3"}, **ENGINE))] == ["eagle3"]


def test_a_model_with_one_of_both(shelf: Path, model: Path) -> None:
    (shelf / "eagle3" / "config.json").unlink()
    assert [item["method"] for item in speculative(LLM(str(model), "auto", **ENGINE))] == ["suffix"]


def test_what_is_in_the_package_is_small_and_described() -> None:
    for place in FOLDER.glob("*/target.json"):
        assert (place.parent / "README.md").is_file()
        for path in place.parent.rglob("*.safetensors"):
            assert path.stat().st_size <= 12_000_000, path
