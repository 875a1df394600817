"""Heads that training goes on with: the same head to begin with, its settings, and whether the new one is better."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outpace.errors import CheckpointError, InvalidParameter, ModelNotFound, UnsupportedModel
from outpace.heads import open_eagle3, save_eagle3
from outpace.train.beginning import open_beginning
from outpace.train.curves import Curves
from outpace.train.data.packing import Windows
from outpace.train.data.shards import read_data, write_data
from outpace.train.kinds.base import Kind
from outpace.train.kinds.eagle3 import Eagle3, Eagle3Options
from outpace.train.kinds.early_exit import EarlyExit
from outpace.train.outcome import Ending
from outpace.train.result import RESULT, read_result, weights_digest
from outpace.train.run import Plan, resumed, train
from outpace.train.settings import DataSettings, TrainSettings
from tests.train.tiny import EXIT, World, random_windows, save_target

KINDS = ("eagle3", "early-exit")
IDS = torch.arange(0, 200, 2)
OWN: dict[str, dict[str, Any]] = {
    "eagle3": {"draft_vocab": 100, "train_head": False},
    "early-exit": {"exit_layers": [EXIT]},
}


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Curves, "close", lambda _: False)


@pytest.fixture
def data(world: World, tmp_path: Path) -> Path:
    """Six windows to train on, two to choose by, four to judge by."""
    vocab = world.material.vocab_size
    held_out = random_windows(6, 16, vocab, 9)
    write_data(tmp_path / "data", random_windows(6, 16, vocab), held_out[:2], held_out[2:], world.identity, [])
    return tmp_path / "data"


def made(world: World, kind: str) -> Kind:
    torch.manual_seed(0)
    return Eagle3(world.material, IDS, Eagle3Options()) if kind == "eagle3" else EarlyExit(world.material, [EXIT])


def head(world: World, kind: str, folder: Path) -> Path:
    """Saves a head with weights that nothing begins with."""
    found = made(world, kind)
    with torch.no_grad():
        for weight in found.module.parameters():
            weight.mul_(1 + 0.1 * torch.randn_like(weight))
    found.save(folder, torch.bfloat16)
    return folder


def plan(world: World, kind: str, head: Path | None, data: Path, out: Path, **settings: Any) -> Plan:
    steps = {
        "steps": 2,
        "batch_windows": 2,
        "eval_every": 1,
        "eval_windows": 6,
        "warmup": 0,
        "chain": 3,
        "states": "none",
        **settings,
    }
    return Plan(kind, world.engine, TrainSettings(**steps), out, data, (), (), (), DataSettings(window=16), "tiny", {},
                head=None if head is None else str(head))  # fmt: skip


def go(plan: Plan) -> Any:
    return train(plan, lambda _: None, lambda *_: None)


@pytest.mark.parametrize("kind", KINDS)
def test_training_begins_as_the_head_with_its_settings(world: World, kind: str, data: Path, tmp_path: Path) -> None:
    folder = head(world, kind, tmp_path / "head")
    found = open_beginning(kind, str(folder), world.shape, {})
    assert dict(found.options) == OWN[kind]
    again = made(world, kind)
    found.load(again)
    again.save(tmp_path / "again", torch.bfloat16)
    old, new = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "again"))
    assert old.keys() == new.keys()
    assert all(torch.equal(old[name], new[name]) for name in old)
    assert (folder / "config.json").read_text() == (tmp_path / "again" / "config.json").read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_old_and_new_are_measured_on_the_same_windows(world: World, kind: str, data: Path, tmp_path: Path) -> None:
    """A rate that moves no stored bit is no better; one that learns by heart what it is judged by is."""
    folder = head(world, kind, tmp_path / "head")
    still = go(plan(world, kind, folder, data, tmp_path / "still", lr=1e-12))
    assert (still.better, list(still.best_steps.values()), still.first) == (False, [0], still.best)
    result = read_result(tmp_path / "still")
    assert result is not None
    assert not result.better
    assert result.old == result.new == weights_digest(folder) == weights_digest(tmp_path / "still" / "drafter")
    assert "held-out texts (together +0.000 +- 0.000)" in result.said

    heart = random_windows(6, 16, world.material.vocab_size, 9)
    write_data(tmp_path / "same", heart, heart[:2], heart[2:], world.identity, [])
    learnt = go(plan(world, kind, folder, tmp_path / "same", tmp_path / "new", lr=5e-3, steps=20, eval_every=5))
    assert learnt.first == still.first  # the same head on the same windows
    assert learnt.better
    result = read_result(tmp_path / "new")
    assert result is not None
    assert (result.better, result.kind) == (True, kind)
    assert (result.old, result.new) == (weights_digest(folder), weights_digest(tmp_path / "new" / "drafter"))
    written = json.loads((tmp_path / "new" / RESULT).read_text())
    for name in ("old", "new"):
        assert f"{written[name]['greedy_length']:.3f}" in result.said
    world.identity.require(result.target, "here")
    # a run may be gone on with by its own folder
    assert open_beginning(kind, str(tmp_path / "new"), world.shape, {}).digest == result.new


@pytest.mark.parametrize("kind", KINDS)
def test_what_chose_a_head_does_not_judge_it(world: World, kind: str, tmp_path: Path) -> None:
    """A state that is best by far on the windows it was chosen on, for it has learnt them, and no better elsewhere."""
    vocab = world.material.vocab_size
    heart, strange = random_windows(6, 16, vocab, 9), random_windows(6, 16, vocab, 10)
    write_data(tmp_path / "data", heart, heart, strange, world.identity, [])
    folder = head(world, kind, tmp_path / "head")
    learnt = go(plan(world, kind, folder, tmp_path / "data", tmp_path / "new", lr=5e-3, steps=20, eval_every=5))
    [before], [after] = learnt.first.values(), learnt.best.values()
    assert after.greedy_length + after.sampled_length > 1.1 * (before.greedy_length + before.sampled_length)
    assert learnt.better is False
    written = json.loads((tmp_path / "new" / RESULT).read_text())
    assert written["old"]["rows"] == written["new"]["rows"] == rows_of(kind, strange)
    assert written["new"]["greedy_length"] < after.greedy_length
    assert before.rows == rows_of(kind, heart)


def rows_of(kind: str, windows: Windows) -> int:
    """Rows that a chain begins behind."""
    counted = windows.counted & ~windows.starts if kind == "eagle3" else windows.counted
    return int(counted.sum())


def test_all_that_is_held_out_chooses_where_nothing_is_judged(world: World, data: Path, tmp_path: Path) -> None:
    outcome = go(plan(world, "early-exit", None, data, tmp_path / "run"))
    held_out = read_data(data, world.identity).valid
    [found] = outcome.first.values()
    assert (len(held_out), found.rows) == (6, rows_of("early-exit", held_out))


def test_nothing_to_judge_by_is_no_gain(world: World, tmp_path: Path) -> None:
    heart = random_windows(3, 16, world.material.vocab_size, 9)
    write_data(tmp_path / "data", heart, heart, heart[:0], world.identity, [])
    folder, said = head(world, "early-exit", tmp_path / "head"), list[str]()
    run = plan(world, "early-exit", folder, tmp_path / "data", tmp_path / "new", lr=5e-3, steps=20, eval_every=5)
    assert train(run, said.append, lambda *_: None).better is False
    assert said[-1].startswith("no text was held out to judge by, 4 are needed: ")
    assert "acceptance length" not in said[-1]


def test_a_run_that_begins_as_no_head_has_no_result(world: World, data: Path, tmp_path: Path) -> None:
    outcome = go(plan(world, "early-exit", None, data, tmp_path / "run"))
    assert outcome.better is None
    assert read_result(tmp_path / "run") is None


def test_data_whose_held_out_texts_are_not_told_apart(world: World, data: Path, tmp_path: Path) -> None:
    """As an earlier version made it: good for a new head, and refused where two are to be compared."""
    index = json.loads((data / "index.json").read_text())
    del index["choosing"]
    (data / "index.json").write_text(json.dumps(index))
    assert go(plan(world, "early-exit", None, data, tmp_path / "new")).ending is Ending.DONE
    folder = head(world, "early-exit", tmp_path / "head")
    with pytest.raises(CheckpointError, match="of an earlier version of outpace, does not tell them apart: make it ag"):
        go(plan(world, "early-exit", folder, data, tmp_path / "further"))


@pytest.mark.parametrize("choosing", [0, 7, "two", None])
def test_an_index_that_cannot_be(world: World, data: Path, choosing: object) -> None:
    index = json.loads((data / "index.json").read_text())
    (data / "index.json").write_text(json.dumps({**index, "choosing": choosing}))
    with pytest.raises(CheckpointError, match=r"is damaged .*: make the data again"):
        read_data(data, world.identity)


def test_a_run_of_a_version_with_other_settings_is_refused(world: World, data: Path, tmp_path: Path) -> None:
    go(plan(world, "early-exit", None, data, tmp_path / "run"))
    path = tmp_path / "run" / "run.json"
    said = json.loads(path.read_text())
    path.write_text(json.dumps({**said, "train": {**said["train"], "momentum": 0.9}}))
    with pytest.raises(CheckpointError, match=r"run.json is damaged, or of a version .*momentum.* without --resume"):
        resumed(tmp_path / "run", lambda engine: engine)


def test_a_run_from_a_head_goes_on_after_a_stop(world: World, data: Path, tmp_path: Path) -> None:
    folder = head(world, "eagle3", tmp_path / "head")
    whole = go(plan(world, "eagle3", folder, data, tmp_path / "whole", steps=4))

    def stop(line: str) -> None:
        if line.startswith("step 2/4"):
            signal.raise_signal(signal.SIGINT)

    half = train(plan(world, "eagle3", folder, data, tmp_path / "half", steps=4), stop, lambda *_: None)
    assert half.ending is Ending.INTERRUPTED
    again = go(resumed(tmp_path / "half", lambda engine: engine))
    assert (again.first, again.best, again.better) == (whole.first, whole.best, whole.better)


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        ("eagle3", {"draft_vocab": 64}, r"draft_vocab=64 is not possible with the head .*head, which has 100"),
        ("eagle3", {"train_head": True}, "train_head=True is not possible with the head .*which has False"),
        ("early-exit", {"exit_layers": [1]}, r"exit_layers=\[1\] is not possible with the head .*which has \[2\]"),
        ("early-exit", {"init_layer": 1}, "init_layer=1 is not possible with the head"),
        ("draft", {}, "head='.*head' is not possible for a draft drafter"),
    ],
)
def test_settings_that_contradict_the_head_are_refused(
    world: World, kind: str, given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = head(world, "eagle3" if kind == "draft" else kind, tmp_path / "head")
    with pytest.raises(InvalidParameter, match=message):
        open_beginning(kind, str(folder), world.shape, given)


def test_settings_the_head_leaves_open_are_kept(world: World, tmp_path: Path) -> None:
    folder = head(world, "eagle3", tmp_path / "head")
    found = open_beginning("eagle3", str(folder), world.shape, {"unroll": 2, "draft_vocab": 100})
    assert found.options == {"unroll": 2, **OWN["eagle3"]}


def spoil(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_heads_and_those_of_other_models_are_refused(world: World, kind: str, tmp_path: Path) -> None:
    folder = head(world, kind, tmp_path / "head")
    with pytest.raises(CheckpointError, match="made for"):
        open_beginning(kind, str(folder), replace(world.shape, hidden_size=96), {})
    name = "norm.weight"
    spoil(folder, lambda tensors: tensors.update({name: tensors[name] * torch.nan}))
    with pytest.raises(CheckpointError, match=r"norm.weight' holds values that are no numbers"):
        open_beginning(kind, str(folder), world.shape, {}).load(made(world, kind))
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-50])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        open_beginning(kind, str(folder), world.shape, {})
    with pytest.raises(ModelNotFound):
        open_beginning(kind, str(tmp_path / "nowhere"), world.shape, {})


def test_heads_of_another_form_are_refused_by_name(world: World, tmp_path: Path) -> None:
    files = open_eagle3(head(world, "eagle3", tmp_path / "head"), world.shape)
    tensors = {name: files.weights.get(name) for name in files.weights.shapes}
    stored = load_file(tmp_path / "head" / "model.safetensors")
    config = replace(files.config, norm_output=True, aux_layers=(0, 1, 3))
    save_eagle3(tmp_path / "other", config, {**tensors, "d2t": stored["d2t"]})
    with pytest.raises(UnsupportedModel, match=r"another form .* \(norm_output, aux layers \[0, 1, 3\]\)"):
        open_beginning("eagle3", str(tmp_path / "other"), world.shape, {})


def test_a_damaged_result_is_refused(world: World, data: Path, tmp_path: Path) -> None:
    folder = head(world, "early-exit", tmp_path / "head")
    go(plan(world, "early-exit", folder, data, tmp_path / "run", lr=1e-12))
    path = tmp_path / "run" / RESULT
    found = json.loads(path.read_text())
    for damaged, message in (({"format": 2}, "format 2 is not 1"), ({"format": 1, "better": True}, "is damaged")):
        path.write_text(json.dumps(damaged))
        with pytest.raises(CheckpointError, match=message):
            read_result(tmp_path / "run")
    path.write_text(json.dumps({**found, "better": "yes"}))
    result = read_result(tmp_path / "run")
    assert result is not None
    assert not result.better  # only true is true


def test_a_result_is_for_the_target_it_was_measured_on(world: World, data: Path, tmp_path: Path) -> None:
    other = World(save_target(tmp_path / "other", seed=4))
    folder = head(other, "eagle3", tmp_path / "head")
    outcome = go(plan(world, "eagle3", folder, data, tmp_path / "run", lr=1e-12))
    assert outcome.better is False
    result = read_result(tmp_path / "run")
    assert result is not None
    with pytest.raises(CheckpointError, match="was made for tiny"):
        other.identity.require(result.target, "it")
