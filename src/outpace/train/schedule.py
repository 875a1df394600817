"""The learning rate over a run."""

from __future__ import annotations

import math

from outpace.train.settings import TrainSettings

__all__ = ["learning_rate"]


def learning_rate(step: int, settings: TrainSettings) -> float:
    """Rate of step 0, 1, ..., steps - 1: rises in a line over the warm-up, then falls along half a cosine."""
    warmup = min(settings.warmup, settings.steps)
    if step < warmup:
        return settings.lr * (step + 1) / warmup
    done = (step - warmup) / max(1, settings.steps - 1 - warmup)
    share = settings.lr_floor + (1 - settings.lr_floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return settings.lr * share
