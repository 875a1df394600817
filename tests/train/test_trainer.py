"""The loop: the same curve again, the best state, and what happens when something goes wrong."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outpace.errors import OutpaceError
from outpace.train import writing
from outpace.train.acceptance import Chains
from outpace.train.curves import Curves
from outpace.train.interrupt import Interrupt
from outpace.train.kinds.base import Loss
from outpace.train.kinds.early_exit import EarlyExit
from outpace.train.measuring import spread
from outpace.train.sampler import Sampler
from outpace.train.schedule import learning_rate
from outpace.train.settings import TrainSettings
from outpace.train.target import Batch
from outpace.train.trainer import DRAFTER, Ending, Sources, Trainer
from tests.train.running import SETTINGS, Stopping, curve, trainer, windows
from tests.train.tiny import EXIT, World

pytestmark = pytest.mark.usefixtures("no_pictures")


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


def test_what_a_killed_process_left_is_cleared(tmp_path: Path) -> None:
    (tmp_path / ".a.json.999999999.new").write_text("half")
    (tmp_path / f".a.json.{os.getppid()}.new").write_text("somebody is writing it")
    writing.write_json(tmp_path / "a.json", {})
    assert {path.name for path in tmp_path.iterdir()} == {"a.json", f".a.json.{os.getppid()}.new"}


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
