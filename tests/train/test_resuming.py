"""Runs that were stopped, died or found a full disk go on to the bit; what does not belong is refused."""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outpace.errors import CheckpointError, InvalidParameter, OutpaceError
from outpace.train import trainer as trainer_module
from outpace.train.acceptance import Chains
from outpace.train.data.shards import TrainingData
from outpace.train.kinds.base import Loss
from outpace.train.kinds.draft import Draft, DraftOptions
from outpace.train.kinds.eagle3 import Eagle3, Eagle3Options
from outpace.train.kinds.early_exit import EarlyExit
from outpace.train.states import StoredStates
from outpace.train.target import Batch, StateSource
from outpace.train.trainer import CHECKPOINT, DRAFTER, Ending, Sources, Trainer
from tests.train import running
from tests.train.running import SETTINGS, Stopping, curve, press_ctrl_c, same, trainer, windows
from tests.train.tiny import EXIT, World

pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("stopped_in", [1, 5, 7, 12])
def test_going_on_gives_the_curve_of_a_run_that_was_never_stopped(
    world: World, tmp_path: Path, stopped_in: int, accumulate: int
) -> None:
    """To the bit: losses, measurements, weights and optimiser."""
    settings = replace(SETTINGS, accumulate=accumulate)
    trainer(world, tmp_path / "whole", settings).run()
    kind = Stopping(EarlyExit(world.material, [EXIT]), stopped_in * accumulate, press_ctrl_c)
    outcome = trainer(world, tmp_path / "parts", settings, kind=kind).run()
    assert outcome.step == stopped_in
    assert outcome.ending is Ending.INTERRUPTED
    again = trainer(world, tmp_path / "parts", settings)
    assert again.resume() == outcome.step
    assert again.run().ending is Ending.DONE
    assert curve(tmp_path / "whole") == curve(tmp_path / "parts")
    one, other = (torch.load(tmp_path / name / CHECKPOINT, weights_only=True) for name in ("whole", "parts"))
    assert same(one, other)
    files = [(tmp_path / name / DRAFTER / "model.safetensors").read_bytes() for name in ("whole", "parts")]
    assert files[0] == files[1]


def test_going_on_after_the_process_died_between_two_checkpoints(world: World, tmp_path: Path) -> None:
    """Steps behind the checkpoint are done again, and their lines in the log are not there twice."""

    def die(found: Loss) -> Loss:
        raise MemoryError

    kind = Stopping(EarlyExit(world.material, [EXIT]), 9, die)
    with pytest.raises(MemoryError):
        trainer(world, tmp_path / "parts", kind=kind).run()
    assert curve(tmp_path / "parts")[-1]["step"] == 8
    again = trainer(world, tmp_path / "parts")
    assert again.resume() == 5
    again.run()
    trainer(world, tmp_path / "whole").run()
    assert curve(tmp_path / "whole") == curve(tmp_path / "parts")


def test_a_checkpoint_comes_every_few_minutes(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also between two measurements; what goes on from it is the same to the bit."""

    def die(found: Loss) -> Loss:
        raise MemoryError

    monkeypatch.setattr(trainer_module, "_SECONDS_BETWEEN_CHECKPOINTS", 0.0)
    with pytest.raises(MemoryError):
        trainer(world, tmp_path / "parts", kind=Stopping(EarlyExit(world.material, [EXIT]), 9, die)).run()
    again = trainer(world, tmp_path / "parts")
    assert again.resume() == 8
    again.run()
    trainer(world, tmp_path / "whole").run()
    assert curve(tmp_path / "whole") == curve(tmp_path / "parts")


@pytest.mark.parametrize(("at", "number"), [(1, signal.SIGINT), (2, signal.SIGTERM), (3, signal.SIGINT)])
def test_a_measurement_is_dropped_when_the_user_wants_to_stop(
    world: World, tmp_path: Path, at: int, number: signal.Signals
) -> None:
    """At the second of its batches; it is made when the run goes on."""
    kind = EarlyExit(world.material, [EXIT])
    asked = 0

    class Pressing:
        def __getattr__(self, name: str) -> Any:
            return getattr(kind, name)

        def chains(self, batch: Batch) -> dict[str, Chains]:
            nonlocal asked
            asked += 1
            if asked == 2 * at - 1:
                os.kill(os.getpid(), number)
            return kind.chains(batch)

    settings = replace(SETTINGS, eval_windows=3)
    outcome = trainer(world, tmp_path / "parts", settings, kind=Pressing()).run()
    assert (outcome.ending, outcome.step) == (Ending.INTERRUPTED, 5 * (at - 1))
    assert asked == 2 * at - 1
    again = trainer(world, tmp_path / "parts", settings)
    assert again.resume() == outcome.step
    again.run()
    trainer(world, tmp_path / "whole", settings).run()
    assert curve(tmp_path / "whole") == curve(tmp_path / "parts")


@pytest.mark.parametrize("name", ["eagle3", "draft", "stored states"])
def test_other_kinds_go_on_to_the_bit_too(world: World, tmp_path: Path, name: str) -> None:
    settings = replace(SETTINGS, steps=4, eval_every=3, warmup=1, accumulate=2)

    def make(folder: Path, stop: bool = False) -> Trainer:
        folder.mkdir(exist_ok=True)
        torch.manual_seed(1)
        kind: Any = EarlyExit(world.material, [EXIT])
        if name == "eagle3":
            kind = Eagle3(world.material, torch.arange(0, world.material.vocab_size, 2), Eagle3Options(unroll=2))
        if name == "draft":
            kind = Draft(world.material, DraftOptions(layers=1, from_scratch=True))
        target, data = world.target(*kind.aux_layers), windows(world)
        states: list[StateSource] = [target, target]
        if name == "stored states":
            stored = [StoredStates(folder / "states", split, "int8", target, world.identity) for split in ("a", "b")]
            for one, part in zip(stored, (data.train, data.valid), strict=True):
                one.make(part, lambda *_: None)
            states = [*stored]
        learner = Stopping(kind, 5, press_ctrl_c) if stop else kind  # in the middle of a step, which is dropped
        sources = Sources(target, data, states[0], states[1])
        return Trainer(learner, sources, settings, folder, world.identity, lambda _: None)

    make(tmp_path / "whole").run()
    assert make(tmp_path / "parts", stop=True).run().step == 2
    again = make(tmp_path / "parts")
    assert again.resume() == 2
    again.run()
    assert curve(tmp_path / "whole") == curve(tmp_path / "parts")
    one, other = (torch.load(tmp_path / part / CHECKPOINT, weights_only=True) for part in ("whole", "parts"))
    assert same(one, other)


def test_a_run_that_was_moved_says_where_its_drafter_is(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer(world, Path("old"), replace(SETTINGS, steps=1)).run()
    Path("old").rename("new")
    again = trainer(world, Path("new"), replace(SETTINGS, steps=1))
    again.resume()
    assert json.loads(again.run().served[f"exit {EXIT}"])["adapter"] == str(tmp_path / "new" / DRAFTER)


def _other_labels(world: World, made: Callable[[World], TrainingData] = windows) -> TrainingData:
    data = made(world)
    return replace(data, train=replace(data.train, labels=data.train.labels.logical_not()))


def test_checkpoints_of_something_else_are_refused(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer(world, tmp_path).run()
    with pytest.raises(CheckpointError, match=r"was made with lr=0\.001, not 0\.002"):
        trainer(world, tmp_path, replace(SETTINGS, lr=2e-3)).resume()
    with pytest.raises(CheckpointError, match=r"was made with exits=\[2\], not \[1\]"):
        trainer(world, tmp_path, kind=EarlyExit(world.material, [1])).resume()
    with monkeypatch.context() as patch:
        patch.setattr(running, "windows", _other_labels)
        with pytest.raises(CheckpointError, match=r"was made with data=.*take that, or train anew"):
            trainer(world, tmp_path).resume()
    stranger = replace(world.identity, model="another", weights="0")
    with pytest.raises(CheckpointError, match=r"was made for tiny \(weights .*, not for another"):
        trainer(world, tmp_path, identity=stranger).resume()


def test_a_checkpoint_of_an_earlier_version_is_refused_by_what_it_lacks(world: World, tmp_path: Path) -> None:
    trainer(world, tmp_path, replace(SETTINGS, steps=1)).run()
    state = torch.load(tmp_path / CHECKPOINT, weights_only=True)
    del state["match"]["common"]
    torch.save(state, tmp_path / CHECKPOINT)
    with pytest.raises(CheckpointError, match=r"of an earlier version of outpace, which had no common: train anew, wi"):
        trainer(world, tmp_path, replace(SETTINGS, steps=1)).resume()


@pytest.mark.parametrize("cut", [0, 10, 5000, -20])
def test_a_damaged_checkpoint_is_named(world: World, tmp_path: Path, cut: int) -> None:
    trainer(world, tmp_path, replace(SETTINGS, steps=1)).run()
    path = tmp_path / CHECKPOINT
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(CheckpointError, match=r"checkpoint.pt is damaged .* without --resume"):
        trainer(world, tmp_path, replace(SETTINGS, steps=1)).resume()


def test_no_checkpoint_and_one_of_another_version(world: World, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no checkpoint to go on from"):
        trainer(world, tmp_path).resume()
    torch.save({"format": 99}, tmp_path / CHECKPOINT)
    with pytest.raises(CheckpointError, match="no checkpoint of this version"):
        trainer(world, tmp_path).resume()


@pytest.mark.parametrize(
    ("kind", "writes"), [*(("early-exit", writes) for writes in range(7)), ("eagle3", 1), ("eagle3", 3), ("eagle3", 6)]
)
def test_a_full_disk_is_said_and_costs_nothing(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int, kind: str
) -> None:
    """It is full from some file on: log, drafter, checkpoint of the first measurement or of a later one."""
    settings = replace(SETTINGS, steps=2, eval_every=1, warmup=1)

    def make(folder: Path) -> Trainer:
        if kind == "early-exit":
            return trainer(world, folder, settings)
        folder.mkdir(exist_ok=True)
        torch.manual_seed(1)
        head = Eagle3(world.material, torch.arange(0, world.material.vocab_size, 2), Eagle3Options(unroll=1))
        target = world.target(*head.aux_layers)
        return Trainer(head, Sources(target, windows(world), target, target), settings, folder, world.identity, print)

    true_fsync, left = os.fsync, writes

    def full(descriptor: int) -> None:
        nonlocal left
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            return
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        true_fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OutpaceError, match=r"the disk is full: .*--resume|No space left on device.*make room"):
            make(tmp_path / "parts").run()
    assert not [path for path in (tmp_path / "parts").rglob(".*")]  # no half-written file lies about
    again = make(tmp_path / "parts")
    if (tmp_path / "parts" / CHECKPOINT).is_file():
        again.resume()
    again.run()
    make(tmp_path / "whole").run()
    assert curve(tmp_path / "whole") == curve(tmp_path / "parts")
    one, other = (torch.load(tmp_path / part / CHECKPOINT, weights_only=True) for part in ("whole", "parts"))
    assert same(one, other)


def test_what_stands_beside_a_head_stays(world: World, tmp_path: Path) -> None:
    """A model card is kept when a better head is written; a folder that takes none costs no step."""
    head = Eagle3(world.material, torch.arange(world.material.vocab_size), Eagle3Options(unroll=1))
    head.save(tmp_path / DRAFTER)
    (tmp_path / DRAFTER / "README.md").write_text("a card")
    head.save(tmp_path / DRAFTER)
    assert (tmp_path / DRAFTER / "README.md").read_text() == "a card"
    (tmp_path / DRAFTER / "notes.txt").write_text("mine")
    target = world.target(*head.aux_layers)
    sources = Sources(target, windows(world), target, target)
    with pytest.raises(InvalidParameter, match=r"holds notes.txt"):
        Trainer(head, sources, SETTINGS, tmp_path, world.identity, print).run()
    assert (tmp_path / CHECKPOINT).is_file()
