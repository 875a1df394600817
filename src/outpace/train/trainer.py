"""The training loop, the same for every kind of drafter."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from outpace.errors import CheckpointError, OutpaceError
from outpace.train.acceptance import Acceptance, Tally
from outpace.train.checkpoint import read_checkpoint, write_checkpoint
from outpace.train.curves import Curves
from outpace.train.data.packing import Windows
from outpace.train.data.shards import TrainingData
from outpace.train.identity import Identity
from outpace.train.interrupt import Interrupt
from outpace.train.kinds.base import Kind
from outpace.train.report import Speed, measured_lines, step_line
from outpace.train.rounding import SAVED_AS, rounded
from outpace.train.sampler import Sampler
from outpace.train.schedule import learning_rate
from outpace.train.settings import TrainSettings
from outpace.train.target import Batch, StateSource, Target
from outpace.train.writing import write_json

__all__ = ["CHECKPOINT", "DRAFTER", "Ending", "Outcome", "Sources", "Trainer"]

CHECKPOINT = "checkpoint.pt"
DRAFTER = "drafter"
_FAILED = "failed-step.json"
_SAME_ON_RESUME = (
    "batch_windows",
    "accumulate",
    "lr",
    "warmup",
    "lr_floor",
    "weight_decay",
    "clip",
    "loss",
    "seed",
    "steps",
)


class Ending(Enum):
    """Why a run ended; the value is for people."""

    DONE = "all steps are done"
    EARLY = "no improvement any more"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class Sources:
    """What a run learns from.

    Args:
        target: the teacher.
        data: windows.
        train: states of the windows to train on.
        valid: states of those held out.
    """

    target: Target
    data: TrainingData
    train: StateSource
    valid: StateSource


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a run.

    Args:
        ending: why it ended.
        step: steps done over all sessions.
        first: acceptance before the first step, by drafter.
        best: acceptance of what was saved.
        best_step: after how many steps that was.
        served: how to serve it: {drafter: speculative config as JSON}.
        speed: of this session.
    """

    ending: Ending
    step: int
    first: dict[str, Acceptance]
    best: dict[str, Acceptance]
    best_step: int
    served: dict[str, str]
    speed: Speed


class Trainer:
    """Trains one drafter in one folder.

    Args:
        kind: what learns.
        sources: what it learns from.
        settings: how.
        folder: of the run: checkpoint, log, curves, and the best drafter so far.
        identity: the target's.
        notify: takes lines for people.
        tensorboard: write its files too.
    """

    def __init__(
        self,
        kind: Kind,
        sources: Sources,
        settings: TrainSettings,
        folder: Path,
        identity: Identity,
        notify: Callable[[str], None],
        *,
        tensorboard: bool = False,
    ) -> None:
        self._kind, self._sources, self._settings = kind, sources, settings
        self._folder, self._identity, self._notify = folder, identity, notify
        self._parameters = [item for item in kind.module.parameters() if item.requires_grad]
        self._optimiser = torch.optim.AdamW(
            _groups(kind.module, settings.weight_decay), lr=settings.lr, betas=(0.9, 0.95)
        )
        self._sampler = Sampler(len(sources.data.train), settings.seed)
        self._curves = Curves(folder, tensorboard=tensorboard)
        self._digest = hashlib.sha256(sources.data.train.ids.numpy().tobytes()).hexdigest()
        self._speed = Speed()
        self._step = 0
        self._best: dict[str, Any] = {"step": -1, "score": -math.inf, "acceptance": {}, "misses": 0}
        self._first: dict[str, Acceptance] = {}
        self._served: dict[str, str] = {}

    def resume(self) -> int:
        """Goes on from the folder's checkpoint. Returns the steps that are done.

        Raises:
            CheckpointError: there is none, it is damaged, or it belongs to another target, kind, data or settings.
        """
        path = self._folder / CHECKPOINT
        state = read_checkpoint(path)
        self._identity.require(state.get("target"), str(path))
        for name, own in self._must_match().items():
            found = state["match"].get(name)
            if found != own:
                raise CheckpointError(f"{path} was made with {name}={found}, not {own}: take that, or train anew")
        try:
            self._kind.module.load_state_dict(state["module"])
            self._optimiser.load_state_dict(state["optimiser"])
            self._sampler.restore(state["sampler"])
            torch.set_rng_state(state["random"])
            self._step = state["step"]
            self._best = dict(state["best"])
            self._first = {name: Acceptance(**_tuples(item)) for name, item in state["first"].items()}
            self._served = dict(state["served"])
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{path} is damaged ({str(error).splitlines()[0]}): train again without --resume"
            ) from error
        return self._step

    def run(self) -> Outcome:
        """Trains until the steps are done, nothing improves any more, or the user presses Ctrl-C.

        Raises:
            OutpaceError: the loss is not a number any more, or the folder cannot be written; the last checkpoint stays.
        """
        self._curves.begin(self._step)
        with Interrupt() as interrupt:
            ending = self._loop(interrupt)
        if self._curves.close():
            self._notify(f"curves: {self._folder / 'curves.png'}")
        best = {name: Acceptance(**_tuples(item)) for name, item in self._best["acceptance"].items()}
        return Outcome(ending, self._step, self._first, best, self._best["step"], self._served, self._speed)

    def _loop(self, interrupt: Interrupt) -> Ending:
        settings = self._settings
        if self._best["step"] < 0:
            self._measure()
            self._save()
        while self._step < settings.steps:
            if settings.patience and self._best["misses"] >= settings.patience:
                return Ending.EARLY
            if not self._one_step(interrupt):
                self._save()
                return Ending.INTERRUPTED
            if self._step % settings.eval_every == 0 or self._step == settings.steps:
                self._measure()
                self._save()
        return Ending.DONE

    def _one_step(self, interrupt: Interrupt) -> bool:
        """One optimiser step. False, and no change, if the user wants to stop."""
        settings, before = self._settings, self._sampler.state
        begun, target_before = time.perf_counter(), self._sources.target.seconds
        rate = learning_rate(self._step, settings)
        self._optimiser.zero_grad(set_to_none=True)
        losses, rows, tokens, alpha, agreement = 0.0, 0, 0, 0.0, 0.0
        for _ in range(settings.accumulate):
            if interrupt.asked:
                self._sampler.restore(before)
                return False
            which = self._sampler.next(settings.batch_windows)
            batch = self._batch(self._sources.data.train, self._sources.train, which)
            found = self._kind.loss(batch)
            self._check(found.value, which)
            (found.value / settings.accumulate).backward()  # type: ignore[no-untyped-call]
            losses += float(found.value.detach()) / settings.accumulate
            rows, tokens = rows + found.rows, tokens + batch.windows.num_tokens
            alpha += found.alpha / settings.accumulate
            agreement += found.agreement / settings.accumulate
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, settings.clip))
        if not math.isfinite(norm):
            self._fail(f"the gradient's length is {norm}", which)
        for group in self._optimiser.param_groups:
            group["lr"] = rate
        self._optimiser.step()
        self._step += 1
        self._speed.add(tokens, time.perf_counter() - begun, self._sources.target.seconds - target_before)
        line = {"step": self._step, "loss": losses, "alpha": alpha, "agreement": agreement, "rows": rows,
                "tokens": tokens, "lr": rate, "gradient": norm}  # fmt: skip
        self._curves.add(line)
        if self._step % max(1, settings.eval_every // 5) == 0 or self._step == 1:
            self._notify(step_line(line, settings.steps, self._speed))
        return True

    def _batch(self, windows: Windows, states: StateSource, which: torch.Tensor) -> Batch:
        chosen = windows[which]
        return Batch(chosen, states.states(chosen, which), self._sources.target, states.said(chosen, which))

    def _measure(self) -> None:
        """Acceptance on held-out text of the weights as they would be stored; the best are, as the drafter to serve."""
        with rounded(self._kind.module, SAVED_AS[self._settings.save_dtype]):
            self._measure_rounded()

    def _measure_rounded(self) -> None:
        windows = self._sources.data.valid
        tallies: dict[str, Tally] = {}
        for which in torch.split(_spread(len(windows), self._settings.eval_windows), self._settings.batch_windows):
            batch = self._batch(windows, self._sources.valid, which)
            for name, chains in self._kind.chains(batch).items():
                tallies.setdefault(name, Tally(self._settings.chain)).add(chains)
        found = {name: tally.result() for name, tally in tallies.items()}
        self._first = self._first or found
        self._curves.add({"step": self._step, "valid": {name: asdict(item) for name, item in found.items()}})
        for line in measured_lines(self._step, found):
            self._notify(line)
        score = sum(item.greedy_length + item.sampled_length for item in found.values()) / max(1, len(found))
        if score > self._best["score"]:
            self._served = self._kind.save(self._folder / DRAFTER, SAVED_AS[self._settings.save_dtype])
            kept = {name: asdict(item) for name, item in found.items()}
            self._best = {"step": self._step, "score": score, "acceptance": kept, "misses": 0}
        else:
            self._best["misses"] += 1

    def _save(self) -> None:
        write_checkpoint(
            self._folder / CHECKPOINT,
            {
                "target": self._identity.as_dict(),
                "match": self._must_match(),
                "module": self._kind.module.state_dict(),
                "optimiser": self._optimiser.state_dict(),
                "sampler": self._sampler.state,
                "random": torch.get_rng_state(),
                "step": self._step,
                "best": self._best,
                "first": {name: asdict(item) for name, item in self._first.items()},
                "served": self._served,
            },
        )

    def _must_match(self) -> dict[str, Any]:
        settings = asdict(self._settings)
        data = self._sources.data
        shape = {"windows": len(data.train), "window": data.train.width, "texts": self._digest}
        return {**self._kind.describe(), **{name: settings[name] for name in _SAME_ON_RESUME}, **shape}

    def _check(self, loss: torch.Tensor, which: torch.Tensor) -> None:
        if not math.isfinite(float(loss.detach())):
            self._fail(f"the loss is {float(loss.detach())}", which)

    def _fail(self, what: str, which: torch.Tensor) -> None:
        """Stops for good, and leaves behind what made it stop."""
        path = self._folder / _FAILED
        windows = self._sources.data.train[which]
        batch = {"windows": which.tolist(), "ids": windows.ids.tolist()}
        write_json(
            path, {"step": self._step + 1, "what": what, "lr": learning_rate(self._step, self._settings), **batch}
        )
        raise OutpaceError(
            f"{what} at step {self._step + 1}; its batch is in {path}, the last checkpoint in {self._folder}. Train "
            f"again with a lower --lr than {self._settings.lr:g}"
        )


def _spread(count: int, most: int) -> torch.Tensor:
    """At most `most` of the numbers 0 .. count - 1, at even distances: windows come in the order of their sources."""
    chosen = torch.linspace(0, count - 1, min(count, most), dtype=torch.float64, device="cpu")
    return chosen.round().long()


def _groups(module: torch.nn.Module, decay: float) -> list[dict[str, Any]]:
    """Matrices decay, vectors (norms and biases) do not."""
    parameters = [item for item in module.parameters() if item.requires_grad]
    matrices = [item for item in parameters if item.dim() > 1]
    vectors = [item for item in parameters if item.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _tuples(item: dict[str, Any]) -> dict[str, Any]:
    """Numbers of an `Acceptance` as they were before they were written."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in item.items()}
