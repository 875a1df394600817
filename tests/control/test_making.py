"""What is learnt in one run is there in the next, where the same things run; elsewhere nothing is."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from outpace.control.controller import AdaptiveController
from outpace.control.fixed import FixedController
from outpace.control.making import make_controller
from outpace.decisions import StepFacts


def steps(controller: AdaptiveController, count: int) -> None:
    for _ in range(count):
        controller.observe(StepFacts(threads=1, prefill_rows=0, decoding=[1], drafts=[], seconds=0.5))


def test_numbers_survive_under_their_key(tmp_path: Path) -> None:
    first, keep = make_controller("adaptive", {}, tmp_path / "control", lambda: "this")
    assert isinstance(first, AdaptiveController)
    steps(first, 60)
    keep()
    for key, known in (("this", True), ("another", False)):
        again, _ = make_controller("adaptive", {}, tmp_path / "control", partial(str, key))
        assert isinstance(again, AdaptiveController)
        table = again.knowledge.target.tables.get(1)
        assert (table is not None and abs(table.seconds(1) - 0.5) < 0.05) is known


def test_a_few_steps_are_not_worth_a_file(tmp_path: Path) -> None:
    controller, keep = make_controller("adaptive", {}, tmp_path / "control", lambda: "this")
    assert isinstance(controller, AdaptiveController)
    steps(controller, 5)
    keep()
    assert not (tmp_path / "control").exists()


def test_fixed_keeps_nothing(tmp_path: Path) -> None:
    controller, keep = make_controller("fixed", {}, tmp_path / "control", lambda: "this")
    keep()
    assert isinstance(controller, FixedController) and not (tmp_path / "control").exists()
