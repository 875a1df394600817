"""Settings of a training run and of the data for it. The help text of a field is the command line's help.

Never imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outpace.errors import InvalidParameter
from outpace.params import check_integer

__all__ = ["KINDS", "LOSSES", "PRESETS", "SAVE_DTYPES", "STATES", "DataSettings", "TrainSettings"]

KINDS = ("early-exit", "eagle3", "draft")
LOSSES = ("kl", "tv", "lk", "nla")
STATES = ("auto", "none", "fp16", "int8")
SAVE_DTYPES = ("bf16", "fp16", "fp32")
_WIDEST = 8192


def _option(default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True, slots=True)
class DataSettings:
    """What the training data is made of."""

    window: int = _option(512, "tokens in a window; texts are packed into windows of this length")
    validation: float = _option(0.05, "share of the texts held out to measure acceptance on, above 0 and below 1")
    max_prompts: int = _option(1000, "most prompts answered by the model, over all sources")
    max_text_tokens: int = _option(1_000_000, "most tokens of text, over all sources")
    max_record_tokens: int = _option(
        5_000_000, "most tokens of recorded answers and their prompts, over all sources, the newest first"
    )
    max_tokens: int = _option(256, "longest answer, in tokens")
    temperature: float = _option(0.0, "of the answers; 0: the model's most likely words")
    keep_answers: bool = _option(False, "take answers that stand in the sources, instead of asking the model")
    batch: int = _option(16, "prompts answered side by side")
    seed: int = _option(0, "of the answers, and of what is held out")

    def __post_init__(self) -> None:
        for name, low, high in (
            ("window", 8, _WIDEST),
            ("max_prompts", 0, math.inf),
            ("max_text_tokens", 0, math.inf),
            ("max_record_tokens", 1, math.inf),
            ("max_tokens", 1, math.inf),
            ("batch", 1, 256),
            ("seed", 0, 2**63 - 1),
        ):
            _put_integer(self, name, low, high)
        if not 0 < self.validation < 1:
            raise InvalidParameter(f"validation={self.validation} is not possible: it must be above 0 and below 1")
        if not 0 <= self.temperature <= 10:
            raise InvalidParameter(f"temperature={self.temperature} is not possible: it must be in 0 to 10")


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """How a drafter is trained, whatever its kind."""

    steps: int = _option(600, "optimiser steps")
    batch_windows: int = _option(2, "windows in a step and pass")
    accumulate: int = _option(1, "passes whose gradients make one step")
    lr: float = _option(5e-4, "highest learning rate, reached after the warm-up")
    warmup: int = _option(30, "steps in which the learning rate rises; it then falls along a cosine")
    lr_floor: float = _option(0.05, "share of the highest learning rate that is left at the end")
    weight_decay: float = _option(0.0, "AdamW's, on matrices")
    clip: float = _option(1.0, "longest gradient (norm); longer ones are shortened to it")
    loss: str = _option(
        "lk",
        "kl (divergence), tv (rejected mass), lk (kl while little is accepted, then tv), or nla (-log acceptance)",
    )
    chain: int = _option(5, "draft length at which acceptance is reported and the best state is chosen")
    eval_every: int = _option(50, "steps between two measurements on the held-out texts")
    eval_windows: int = _option(16, "most held-out windows measured")
    patience: int = _option(0, "measurements without improvement after which training ends; 0: never before its steps")
    states: str = _option(
        "auto",
        "keep the model's states on disk, beside the data, so that it runs once over them: none, fp16, int8, or auto "
        "(int8 if the data are read more than once and there is room)",
    )
    save_dtype: str = _option(
        "bf16", "numbers that the drafter is stored in, and measured with: bf16, fp16 (2 bytes each) or fp32 (4)"
    )
    seed: int = _option(0, "of the order of windows and of new weights")

    def __post_init__(self) -> None:
        for name, low, high in (
            ("steps", 1, math.inf),
            ("batch_windows", 1, 4096),
            ("accumulate", 1, 4096),
            ("warmup", 0, math.inf),
            ("chain", 1, 64),
            ("eval_every", 1, math.inf),
            ("eval_windows", 1, math.inf),
            ("patience", 0, math.inf),
            ("seed", 0, 2**63 - 1),
        ):
            _put_integer(self, name, low, high)
        for name, possible in (("loss", LOSSES), ("states", STATES), ("save_dtype", SAVE_DTYPES)):
            if getattr(self, name) not in possible:
                raise InvalidParameter(f"{name}={getattr(self, name)!r} is not known; possible: {', '.join(possible)}")
        for name, least, most in (
            ("lr", 0.0, 1.0),
            ("lr_floor", 0.0, 1.0),
            ("weight_decay", 0.0, 1.0),
            ("clip", 0.0, math.inf),
        ):
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and least <= value <= most) or (
                name in ("lr", "clip") and value == 0
            ):
                above = "above" if name in ("lr", "clip") else "at least"
                raise InvalidParameter(f"{name}={value} is not possible: {above} {least:g}, at most {most:g}")


@dataclass(frozen=True, slots=True)
class Preset:
    """Sizes that go together.

    Args:
        about: for people.
        train: fields of `TrainSettings`.
        data: fields of `DataSettings`.
        text: text sources if no data is named.
        prompts: prompt sources if no data is named.
    """

    about: str
    train: Mapping[str, Any]
    data: Mapping[str, Any]
    text: tuple[str, ...] = ("stdlib", "docs")
    prompts: tuple[str, ...] = ("builtin",)


PRESETS: Mapping[str, Preset] = {
    "tiny": Preset(
        "minutes: shows that it works",
        {"steps": 240, "batch_windows": 2, "lr": 2e-3, "warmup": 12, "eval_every": 40, "eval_windows": 6},
        {"window": 256, "max_prompts": 128, "max_tokens": 96, "max_text_tokens": 4_000},
    ),
    "small": Preset(
        "hours: useful on one kind of text",
        {"steps": 2000, "batch_windows": 4, "lr": 1e-3, "warmup": 50, "eval_every": 100, "eval_windows": 24},
        {"window": 512, "max_prompts": 3600, "max_tokens": 256, "max_text_tokens": 100_000},
    ),
    "full": Preset(
        "days: for data of your own",
        {"steps": 20_000, "batch_windows": 8, "lr": 3e-4, "warmup": 300, "eval_every": 500, "eval_windows": 64},
        {"window": 1024, "max_prompts": 50_000, "max_tokens": 512, "max_text_tokens": 2_000_000},
    ),
}


def _put_integer(settings: Any, name: str, low: int, high: float) -> None:
    text = f"an integer, at least {low}" if high == math.inf else f"an integer, {low} to {high}"
    value = check_integer(name, getattr(settings, name), low=low, high=high, text=text)
    object.__setattr__(settings, name, value)
