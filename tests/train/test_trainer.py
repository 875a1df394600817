"""The loop: the same curve again, the same curve after a stop, and what happens when something goes wrong."""

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
from safetensors.torch import load_file

from outpace.errors import CheckpointError, InvalidParameter, OutpaceError
from outpace.train import trainer as trainer_module
from outpace.train import writing
from outpace.train.acceptance import Chains
from outpace.train.curves import Curves
from outpace.train.data.shards import TrainingData
from outpace.train.identity import Identity
from outpace.train.interrupt import Interrupt
from outpace.train.kinds.base import Kind, Loss
from outpace.train.kinds.draft import Draft, DraftOptions
from outpace.train.kinds.eagle3 import Eagle3, Eagle3Options
from outpace.train.kinds.early_exit import EarlyExit
from outpace.train.measuring import spread
from outpace.train.sampler import Sampler
from outpace.train.schedule import learning_rate
from outpace.train.settings import TrainSettings
from outpace.train.states import StoredStates
from outpace.train.target import Batch, StateSource
from outpace.train.trainer import CHECKPOINT, DRAFTER, Ending, Sources, Trainer
from tests.train.tiny import EXIT, World, random_windows

SETTINGS = TrainSettings(steps=12, batch_windows=2, lr=1e-3, warmup=3, eval_every=5, eval_windows=2, chain=3)


@pytest.fixture(autouse=True)
def no_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than everything else; one test looks at the picture."""
    if request.node.name != "test_a_run_is_the_same_again_and_learns":
        monkeypatch.setattr(Curves, "close", lambda _: False)


def windows(world: World) -> TrainingData:
    vocab = world.material.vocab_size
    return TrainingData(random_windows(7, 16, vocab), random_windows(3, 16, vocab, seed=9), {})


def trainer(
    world: World,
    folder: Path,
    settings: TrainSettings = SETTINGS,
    *,
    kind: Kind | None = None,
    identity: Identity | None = None,
    said: list[str] | None = None,
) -> Trainer:
    folder.mkdir(exist_ok=True)
    target = world.target(EXIT)
    sources = Sources(target, windows(world), target, target)
    learner = kind or EarlyExit(world.material, [EXIT])
    notify = (said if said is not None else []).append
    torch.manual_seed(1)
    return Trainer(learner, sources, settings, folder, identity or world.identity, notify)


def curve(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


class Stopping:
    """A kind that does something at the n-th loss it is asked for."""

    def __init__(self, kind: EarlyExit, at: int, what: Callable[[Loss], Loss]) -> None:
        self._kind, self._left, self._what = kind, at, what

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kind, name)

    def loss(self, batch: Batch) -> Loss:
        self._left -= 1
        found = self._kind.loss(batch)
        return self._what(found) if self._left == 0 else found


def press_ctrl_c(found: Loss) -> Loss:
    os.kill(os.getpid(), signal.SIGINT)
    return found


def test_a_run_is_the_same_again_and_learns(world: World, tmp_path: Path) -> None:
    said: list[str] = []
    first = trainer(world, tmp_path / "a", said=said).run()
    second = trainer(world, tmp_path / "b").run()
    assert first.ending is second.ending is Ending.DONE
    assert curve(tmp_path / "a") == curve(tmp_path / "b")
    losses = [line["loss"] for line in curve(tmp_path / "a") if "loss" in line]
    assert len(losses) == 12
    assert losses[-1] < losses[0]
    assert [line["step"] for line in curve(tmp_path / "a") if "valid" in line] == [0, 5, 10, 12]
    assert any("tokens/s" in line and "of the time in the target" in line for line in said)
    assert (tmp_path / "a" / "curves.png").read_bytes()[:4] == b"\x89PNG"


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


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


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


def test_every_exit_keeps_its_own_best(world: World, tmp_path: Path) -> None:
    """The first exit is best before training, the second behind step 5: the files are those of these steps."""
    kind = EarlyExit(world.material, [1, 2])
    right = {"exit 1": [True, False, False, False], "exit 2": [False, True, False, False]}
    weights: list[dict[str, torch.Tensor]] = []

    class Scripted:
        def __getattr__(self, name: str) -> Any:
            return getattr(kind, name)

        def chains(self, batch: Batch) -> dict[str, Chains]:
            weights.append({name: tensor.clone() for name, tensor in kind.module.state_dict().items()})
            there = torch.ones(4, 3, dtype=torch.bool)
            follows = torch.tensor([False, True, True, True])
            agrees = {name: torch.full_like(there, each[len(weights) - 1]) for name, each in right.items()}
            return {name: Chains(each, each.float(), there, follows) for name, each in agrees.items()}

    target = world.target(1, 2)
    sources = Sources(target, windows(world), target, target)
    (tmp_path / "run").mkdir()
    outcome = Trainer(Scripted(), sources, SETTINGS, tmp_path / "run", world.identity, lambda _: None).run()
    assert outcome.best_steps == {"exit 1": 0, "exit 2": 5}
    assert outcome.best["exit 1"].rate == outcome.best["exit 2"].rate == 1.0
    for layer, measured in ((1, 0), (2, 1)):
        files = load_file(tmp_path / "run" / DRAFTER / f"exit-{layer}" / "model.safetensors")
        for name, tensor in files.items():
            assert torch.equal(tensor.float(), weights[measured][f"exit_{layer}.{name}"])
    config = json.loads(outcome.served["exit 2"])
    assert config["adapter"] == str(tmp_path / "run" / DRAFTER / "exit-2")


def test_a_run_that_was_moved_says_where_its_drafter_is(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer(world, Path("old"), replace(SETTINGS, steps=1)).run()
    Path("old").rename("new")
    again = trainer(world, Path("new"), replace(SETTINGS, steps=1))
    again.resume()
    assert json.loads(again.run().served[f"exit {EXIT}"])["adapter"] == str(tmp_path / "new" / DRAFTER)


def test_a_picture_that_cannot_be_drawn_costs_no_result(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Curves) -> bool:
        raise OutpaceError("curves.png cannot be drawn: no such font")

    monkeypatch.setattr(Curves, "close", broken)
    said: list[str] = []
    assert trainer(world, tmp_path, replace(SETTINGS, steps=1), said=said).run().ending is Ending.DONE
    assert said[-1] == "curves.png cannot be drawn: no such font"


def test_the_best_state_is_kept_and_training_ends_early(world: World, tmp_path: Path) -> None:
    """A rate that destroys what there was: nothing after the beginning is better."""
    settings = replace(SETTINGS, lr=1.0, warmup=0, eval_every=2, patience=2, loss="kl", save_dtype="fp32")
    kind = EarlyExit(world.material, [EXIT])
    before = {name: tensor.clone() for name, tensor in kind.module.state_dict().items()}
    outcome = trainer(world, tmp_path, settings, kind=kind).run()
    assert (outcome.ending, outcome.step, outcome.best_steps) == (Ending.EARLY, 4, {f"exit {EXIT}": 0})
    assert outcome.best == outcome.first
    files = {name.partition(".")[2]: tensor for name, tensor in before.items()}
    found = load_file(tmp_path / DRAFTER / "model.safetensors")
    assert found.keys() == files.keys()
    assert torch.equal(found["block.mlp.up_proj.weight"], files["block.mlp.up_proj.weight"])
    last = kind.module.get_parameter(f"exit_{EXIT}.block.mlp.up_proj.weight")
    assert not torch.equal(last, found["block.mlp.up_proj.weight"])


def test_what_is_measured_is_what_is_stored(world: World, tmp_path: Path) -> None:
    """A block whose weights have more bits than bf16: acceptance is that of the file, and training goes on from its own
    weights."""
    kind = EarlyExit(world.material, [EXIT])
    before = {name: tensor.clone() for name, tensor in kind.module.state_dict().items()}
    seen: list[dict[str, torch.Tensor]] = []

    class Watching:
        def __getattr__(self, name: str) -> Any:
            return getattr(kind, name)

        def chains(self, batch: Batch) -> dict[str, Chains]:
            seen.append({name: tensor.clone() for name, tensor in kind.module.state_dict().items()})
            return kind.chains(batch)

    trainer(world, tmp_path, replace(SETTINGS, steps=1, lr=1e-9, clip=1e-9), kind=Watching()).run()
    files = load_file(tmp_path / DRAFTER / "model.safetensors")
    for name, tensor in before.items():
        stored = files[name.partition(".")[2]]
        assert stored.dtype == torch.bfloat16
        assert torch.equal(stored, tensor.bfloat16())
        assert torch.equal(seen[0][name], stored.float())
    some = "block.mlp.up_proj.weight"
    assert not torch.equal(files[some].float(), before[f"exit_{EXIT}.{some}"])
    torch.testing.assert_close(kind.module.state_dict(), before, rtol=0, atol=1e-8)


def test_windows_at_even_distances_are_measured() -> None:
    assert spread(10, 4).tolist() == [0, 3, 6, 9]
    assert spread(10, 99).tolist() == list(range(10))
    assert spread(7, 1).tolist() == [0]
    for count in (2, 5, 100):
        for most in (2, 3, 50):
            chosen = spread(count, most).tolist()
            assert len(set(chosen)) == len(chosen) == min(count, most)
            assert (chosen[0], chosen[-1]) == (0, count - 1)


def test_a_loss_that_is_no_number_stops_with_step_and_batch(world: World, tmp_path: Path) -> None:
    def spoil(found: Loss) -> Loss:
        return replace(found, value=found.value * float("nan"))

    kind = Stopping(EarlyExit(world.material, [EXIT]), 7, spoil)
    with pytest.raises(OutpaceError, match=r"the loss is nan at step 7; .*failed-step.json.*lower --lr than 0.001"):
        trainer(world, tmp_path, kind=kind).run()
    report = json.loads((tmp_path / "failed-step.json").read_text())
    data = windows(world).train
    assert report["step"] == 7
    assert report["ids"] == data.ids[torch.tensor(report["windows"])].tolist()
    assert trainer(world, tmp_path).resume() == 5


def test_a_gradient_that_is_no_number_stops_too(world: World, tmp_path: Path) -> None:
    """Whichever of the passes it came from, all of them are written down."""
    kind = Stopping(EarlyExit(world.material, [EXIT]), 4, lambda found: replace(found, value=_infinite(found.value)))
    with pytest.raises(OutpaceError, match=r"the gradient's length is (nan|inf) at step 2"):
        trainer(world, tmp_path, replace(SETTINGS, accumulate=3), kind=kind).run()
    report = json.loads((tmp_path / "failed-step.json").read_text())
    sampler = Sampler(len(windows(world).train), SETTINGS.seed)
    assert report["windows"] == sampler.next(12)[6:].tolist()
    assert len(report["ids"]) == 6


def _infinite(value: torch.Tensor) -> torch.Tensor:
    """The same number with an endless slope."""
    result: torch.Tensor = _Steep.apply(value)  # type: ignore[no-untyped-call]
    return result


class _Steep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> torch.Tensor:
        return slope * float("inf")


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
        patch.setitem(globals(), "windows", _other_labels)
        with pytest.raises(CheckpointError, match=r"was made with data=.*take that, or train anew"):
            trainer(world, tmp_path).resume()
    stranger = replace(world.identity, model="another", weights="0")
    with pytest.raises(CheckpointError, match=r"was made for tiny \(weights .*, not for another"):
        trainer(world, tmp_path, identity=stranger).resume()


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


def test_what_a_killed_process_left_is_cleared(tmp_path: Path) -> None:
    (tmp_path / ".a.json.999999999.new").write_text("half")
    (tmp_path / f".a.json.{os.getppid()}.new").write_text("somebody is writing it")
    writing.write_json(tmp_path / "a.json", {})
    assert {path.name for path in tmp_path.iterdir()} == {"a.json", f".a.json.{os.getppid()}.new"}


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_asking_twice_stops_at_once(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with Interrupt() as interrupt:
        os.kill(os.getpid(), number)
        assert interrupt.asked
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_every_window_comes_once_a_round() -> None:
    sampler = Sampler(5, seed=3)
    taken = torch.cat([sampler.next(3) for _ in range(5)]).tolist()
    assert [sorted(taken[begin : begin + 5]) for begin in (0, 5, 10)] == [list(range(5))] * 3
    assert taken[:5] != taken[5:10]
    state = sampler.state
    ahead = sampler.next(7).tolist()
    again = Sampler(5, seed=3)
    again.restore(state)
    assert again.next(7).tolist() == ahead
    assert Sampler(5, seed=4).next(15).tolist() != taken


def test_the_rate_rises_and_falls() -> None:
    settings = TrainSettings(steps=11, warmup=4, lr=1.0, lr_floor=0.1)
    rates = [learning_rate(step, settings) for step in range(11)]
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates[4:] == pytest.approx([1.0, 0.9397, 0.775, 0.55, 0.325, 0.1603, 0.1], abs=1e-4)
    assert learning_rate(0, TrainSettings(steps=1, warmup=0, lr=1.0)) == 1.0
