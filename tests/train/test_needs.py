"""What training is said to take: as many weights as are trained, and more for more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from outpace.errors import OutOfMemory
from outpace.train import needs as needs_module
from outpace.train.kinds.base import Kind
from outpace.train.kinds.draft import Draft, DraftOptions
from outpace.train.kinds.eagle3 import Eagle3, Eagle3Options
from outpace.train.kinds.early_exit import EarlyExit
from outpace.train.needs import Needs, require_training_fit, training_needs
from outpace.train.settings import TrainSettings
from tests.train.tiny import World

SETTINGS = TrainSettings(batch_windows=3)
CASES: list[tuple[str, dict[str, Any]]] = [
    ("early-exit", {}),
    ("early-exit", {"exit_layers": [1, 3]}),
    ("eagle3", {"draft_vocab": 40}),
    ("eagle3", {"draft_vocab": 40, "train_head": True}),
    ("draft", {"layers": 2}),
    ("draft", {"layers": 3, "train_embedding": True}),
]


def made(world: World, kind: str, options: dict[str, Any]) -> Kind:
    if kind == "eagle3":
        return Eagle3(world.material, torch.arange(options["draft_vocab"]), Eagle3Options(**options))
    if kind == "draft":
        return Draft(world.material, DraftOptions(**options))
    return EarlyExit(world.material, options.get("exit_layers", [1]))


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_weights_are_those_that_are_trained(world: World, kind: str, options: dict[str, Any]) -> None:
    vocab = world.material.vocab_size
    found = needs_module._shape_of(kind, options, world.shape, vocab)
    module = made(world, kind, options).module
    assert found.trained == sum(item.numel() for item in module.parameters() if item.requires_grad)
    needs = training_needs(kind, options, world.shape, vocab, SETTINGS, 64)
    assert needs.weights == 32 * found.trained + 4 * found.kept
    longer = training_needs(kind, options, world.shape, vocab, SETTINGS, 128)
    wider = training_needs(kind, options, world.shape, vocab, replace(SETTINGS, batch_windows=9), 64)
    assert needs.weights == longer.weights == wider.weights
    assert wider.batch - needs_module._LOGITS == pytest.approx(3 * (needs.batch - needs_module._LOGITS), rel=1e-4)
    assert longer.batch > needs.batch


def test_what_does_not_fit_is_refused_with_what_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = Needs(weights=3 << 30, batch=2 << 30)
    monkeypatch.setattr(needs_module, "available_bytes", lambda: 6 << 30)
    require_training_fit(needs, 512 << 20, SETTINGS, 64)
    monkeypatch.setattr(needs_module, "available_bytes", lambda: None)
    require_training_fit(needs, 512 << 20, SETTINGS, 64)
    monkeypatch.setattr(needs_module, "available_bytes", lambda: 5 << 30)
    with pytest.raises(OutOfMemory, match=r"3 windows of 64 tokens\), .* are free: .*--batch-windows"):
        require_training_fit(needs, 512 << 20, SETTINGS, 64)
