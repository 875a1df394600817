"""The training loop, the same for every kind of drafter."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from outpace.errors import CheckpointError, OutpaceError
from outpace.models.checkpoint import first_line
from outpace.train.acceptance import Acceptance
from outpace.train.checkpoint import read_checkpoint, write_checkpoint
from outpace.train.curves import Curves
from outpace.train.data.shards import TrainingData
from outpace.train.identity import Identity
from outpace.train.interrupt import Interrupt
from outpace.train.kinds.base import Kind
from outpace.train.measuring import measure
from outpace.train.outcome import Ending, Outcome
from outpace.train.report import Speed, measured_lines, step_line
from outpace.train.rounding import SAVED_AS, rounded
from outpace.train.sampler import Sampler
from outpace.train.schedule import learning_rate
from outpace.train.settings import TrainSettings
from outpace.train.target import Batch, StateSource, Target, batch_of
from outpace.train.writing import write_json

__all__ = ["CHECKPOINT", "DRAFTER", "Ending", "Outcome", "Sources", "Trainer"]

CHECKPOINT = "checkpoint.pt"
DRAFTER = "drafter"
_FAILED = "failed-step.json"
_SECONDS_BETWEEN_CHECKPOINTS = 300.0
"""Most that is lost when a process dies, measurements being far apart."""
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


@dataclass(frozen=True, slots=True)
class Sources:
    """What a run learns from.

    Args:
        target: the teacher.
        data: windows.
        train: states of the windows to train on.
        valid: states of those held out.
        choosing: how many of those held out, from the first on, the best state is chosen on; None: all.
    """

    target: Target
    data: TrainingData
    train: StateSource
    valid: StateSource
    choosing: int | None = None


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
        self._folder, self._identity, self._notify = folder.absolute(), identity, notify
        self._parameters = [item for item in kind.module.parameters() if item.requires_grad]
        self._optimiser = torch.optim.AdamW(
            _groups(kind.module, settings.weight_decay), lr=settings.lr, betas=(0.9, 0.95)
        )
        self._sampler = Sampler(len(sources.data.train), settings.seed)
        self._curves = Curves(folder, tensorboard=tensorboard)
        self._digest = _digest(sources.data)
        self._speed = Speed()
        self._step = 0
        self._measured = -1  # the last step that was measured
        self._best: dict[str, dict[str, Any]] = {}  # of every drafter: step, score, acceptance
        self._misses = 0
        self._first: dict[str, Acceptance] = {}

    def resume(self) -> int:
        """Goes on from the folder's checkpoint. Returns the steps that are done.

        Raises:
            CheckpointError: there is none, it is damaged, or it belongs to another target, kind, data or settings.
        """
        path = self._folder / CHECKPOINT
        state = read_checkpoint(path)
        self._identity.require(state.get("target"), str(path))
        try:
            match = {**state["match"], "data": state["data"]}
            for name, own in {**self._must_match(), "data": self._digest}.items():
                if name not in match:
                    raise CheckpointError(
                        f"{path} is of an earlier version of outpace, which had no {name}: train anew, with another "
                        "--out"
                    )
                if match.get(name) != own:
                    raise CheckpointError(
                        f"{path} was made with {name}={match.get(name)}, not {own}: take that, or train anew"
                    )
            self._restore(state)
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} is damaged ({first_line(error)}): train again without --resume") from error
        return self._step

    def _restore(self, state: dict[str, Any]) -> None:
        self._kind.module.load_state_dict(state["module"])
        self._optimiser.load_state_dict(state["optimiser"])
        self._sampler.restore(state["sampler"])
        torch.set_rng_state(state["random"])
        self._step, self._measured, self._misses = state["step"], state["measured"], state["misses"]
        self._best = {name: dict(item) for name, item in state["best"].items()}
        self._first = {name: Acceptance(**_tuples(item)) for name, item in state["first"].items()}

    def run(self) -> Outcome:
        """Trains until the steps are done, nothing improves any more, or the user presses Ctrl-C.

        Raises:
            OutpaceError: the loss is not a number any more, or the folder cannot be written; the last checkpoint stays.
        """
        self._curves.begin(self._step, self._measured)
        with Interrupt() as interrupt:
            ending = self._loop(interrupt)
        try:
            if self._curves.close():
                self._notify(f"curves: {self._folder / 'curves.png'}")
        except OutpaceError as error:  # what was trained is safe, and the result is still to be told
            self._notify(str(error))
        best = {name: Acceptance(**_tuples(item["acceptance"])) for name, item in self._best.items()}
        steps = {name: item["step"] for name, item in self._best.items()}
        served = self._kind.served(self._folder / DRAFTER)
        return Outcome(ending, self._step, self._first, best, steps, served, self._speed)

    def _loop(self, interrupt: Interrupt) -> Ending:
        settings, saved = self._settings, time.monotonic()
        while True:
            if self._step != self._measured and self._is_due():
                try:
                    measured = self._measure(interrupt)
                finally:  # a folder that takes no drafter any more costs no step
                    self._save()
                if not measured:
                    return Ending.INTERRUPTED
                saved = time.monotonic()
            elif time.monotonic() - saved >= _SECONDS_BETWEEN_CHECKPOINTS:
                self._save()
                saved = time.monotonic()
            if self._step == settings.steps:
                return Ending.DONE
            if settings.patience and self._misses >= settings.patience:
                return Ending.EARLY
            if not self._one_step(interrupt):
                self._save()
                return Ending.INTERRUPTED

    def _is_due(self) -> bool:
        """Whether this many steps are to be measured."""
        return self._step % self._settings.eval_every == 0 or self._step == self._settings.steps

    def _one_step(self, interrupt: Interrupt) -> bool:
        """One optimiser step. False, and no change, if the user wants to stop."""
        settings, before, random = self._settings, self._sampler.state, torch.get_rng_state()
        begun, target_before = time.perf_counter(), self._sources.target.seconds
        rate = learning_rate(self._step, settings)
        self._optimiser.zero_grad(set_to_none=True)
        losses, rows, tokens, alpha, agreement = 0.0, 0, 0, 0.0, 0.0
        taken: list[torch.Tensor] = []
        for _ in range(settings.accumulate):
            if interrupt.asked:
                self._sampler.restore(before)
                torch.set_rng_state(random)
                return False
            taken.append(self._sampler.next(settings.batch_windows))
            batch = self._batch(taken[-1])
            found = self._kind.loss(batch)
            if not math.isfinite(float(found.value.detach())):
                self._fail(f"the loss is {float(found.value.detach())}", taken[-1])
            (found.value / settings.accumulate).backward()  # type: ignore[no-untyped-call]
            losses += float(found.value.detach()) / settings.accumulate
            rows, tokens = rows + found.rows, tokens + batch.windows.num_tokens
            alpha += found.alpha / settings.accumulate
            agreement += found.agreement / settings.accumulate
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, settings.clip))
        if not math.isfinite(norm):
            self._fail(f"the gradient's length is {norm}", torch.cat(taken))
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

    def _batch(self, which: torch.Tensor) -> Batch:
        return batch_of(self._sources.target, self._sources.data.train, self._sources.train, which)

    def _measure(self, interrupt: Interrupt) -> bool:
        """Acceptance on held-out text of the weights as they would be stored; of every drafter the best are.

        Returns:
            False, and nothing is changed, if the user wants to stop.
        """
        dtype = SAVED_AS[self._settings.save_dtype]
        sources = self._sources
        windows = sources.data.valid[: sources.choosing]
        with rounded(self._kind.module, dtype):
            found = measure(self._kind, sources.target, windows, sources.valid, self._settings, lambda: interrupt.asked)
            if found is None:
                return False
            scores = {name: item.greedy_length + item.sampled_length for name, item in found.items()}
            better = {name for name in found if name not in self._best or scores[name] > self._best[name]["score"]}
            if better:
                self._kind.save(self._folder / DRAFTER, dtype, better)
        self._first = self._first or found
        self._curves.add({"step": self._step, "valid": {name: asdict(item) for name, item in found.items()}})
        for line in measured_lines(self._step, found):
            self._notify(line)
        for name in better:
            self._best[name] = {"step": self._step, "score": scores[name], "acceptance": asdict(found[name])}
        self._misses = 0 if better else self._misses + 1
        self._measured = self._step
        return True

    def _save(self) -> None:
        write_checkpoint(
            self._folder / CHECKPOINT,
            {
                "target": self._identity.as_dict(),
                "match": self._must_match(),
                "data": self._digest,
                "module": self._kind.module.state_dict(),
                "optimiser": self._optimiser.state_dict(),
                "sampler": self._sampler.state,
                "random": torch.get_rng_state(),
                "step": self._step,
                "measured": self._measured,
                "misses": self._misses,
                "best": self._best,
                "first": {name: asdict(item) for name, item in self._first.items()},
            },
        )

    def _must_match(self) -> dict[str, Any]:
        settings = asdict(self._settings)
        data = self._sources.data
        shape = {"windows": len(data.train), "window": data.train.width}
        return {**self._kind.describe(), **{name: settings[name] for name in _SAME_ON_RESUME}, **shape}

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


def _groups(module: torch.nn.Module, decay: float) -> list[dict[str, Any]]:
    """Matrices decay, vectors (norms and biases) do not."""
    parameters = [item for item in module.parameters() if item.requires_grad]
    matrices = [item for item in parameters if item.dim() > 1]
    vectors = [item for item in parameters if item.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _digest(data: TrainingData) -> str:
    """Hash of all that a run reads."""
    parts = [part for windows in (data.train, data.valid) for part in (windows.ids, windows.pieces, windows.labels)]
    return hashlib.sha256(b"".join(hashlib.sha256(part.numpy().tobytes()).digest() for part in parts)).hexdigest()


def _tuples(item: dict[str, Any]) -> dict[str, Any]:
    """Numbers of an `Acceptance` as they were before they were written."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in item.items()}
