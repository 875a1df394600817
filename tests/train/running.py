"""Runs of a few steps on the tiny target, and kinds that do something in the middle of one."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from outpace.train.data.shards import TrainingData
from outpace.train.identity import Identity
from outpace.train.kinds.base import Kind, Loss
from outpace.train.kinds.early_exit import EarlyExit
from outpace.train.settings import TrainSettings
from outpace.train.target import Batch
from outpace.train.trainer import Sources, Trainer
from tests.train.tiny import EXIT, World, random_windows

SETTINGS = TrainSettings(steps=12, batch_windows=2, lr=1e-3, warmup=3, eval_every=5, eval_windows=2, chain=3)


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


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)
