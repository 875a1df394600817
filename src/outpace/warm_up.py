"""A few steps before anybody asks, so that the controller knows what steps and drafts cost on this machine.

What rows cost is told by plain decoding of several texts at once; what a drafter costs, by drafts that nobody verifies:
nothing is learnt about acceptance from text that nobody would write.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from outpace.build import Built
from outpace.decisions import Allotment, ControlReport, Offer, StepFacts, Wish
from outpace.params import SamplingParams, SpeculationParams
from outpace.protocols import Controller

__all__ = ["warm_up"]

_BATCHES = (1, 2, 3, 5, 8, 12, 16)
"""Rows of a step, as many requests."""
_STEPS = 4
_DRAFT_TOKENS = 3
_PROMPT_TOKENS = 8


class _Trial:
    """Lets one drafter draft and has nothing verified; what it cost is told to the controller that is to learn it."""

    def __init__(self, learner: Controller) -> None:
        self._learner = learner

    def ceilings(self, wishes: Sequence[Wish], other_rows: int, other_decoding: int = 0) -> list[int]:
        return [min(wish.most, _DRAFT_TOKENS) for wish in wishes]

    def width(self, wish: Wish, decoding: int) -> int:
        return 1

    def allot(
        self, wishes: Sequence[Wish], offers: Sequence[Offer | None], other_rows: int, other_decoding: int = 0
    ) -> list[Allotment]:
        return [Allotment(drafter=next(iter(wish.computing), None), num_tokens=wish.most) for wish in wishes]

    def keep(self, offers: Sequence[Offer], other_rows: int, other_decoding: int = 0) -> list[int]:
        return [0] * len(offers)

    def calibrated(
        self, request_id: int, drafter: str, position: int, confidence: float, before: Sequence[float] = ()
    ) -> float:
        return confidence

    def observe(self, facts: StepFacts) -> None:
        self._learner.observe(facts)

    def abandon(self) -> None:
        self._learner.abandon()

    def release(self, request_id: int) -> None:
        self._learner.release(request_id)

    def restart_report(self) -> None:
        self._learner.restart_report()

    def forget(self, drafter: str, relative_cost: float | None = None) -> None:
        self._learner.forget(drafter, relative_cost)

    def report(self) -> ControlReport:
        return self._learner.report()


def warm_up(built: Built, seconds: float = 3.0) -> None:
    """Runs steps of an idle engine, and leaves it as it was.

    Args:
        built: nobody else uses it.
        seconds: after which nothing further is begun.
    """
    room = (built.config.max_model_len or 0) > _PROMPT_TOKENS + 1 + _STEPS
    if not built.speculative or built.config.speculative_control == "fixed" or not room:
        return
    engine, steering = built.engine, built.engine.steering
    began = time.perf_counter()
    learner, steering.controller = steering.controller, _Trial(steering.controller)
    try:
        computing = [name for name, drafter in engine.drafting.drafters.items() if drafter.needs.computes]
        for name in computing:
            _run(built, 1, SpeculationParams(method=name))
        for batch in _BATCHES:
            if batch > built.config.max_num_seqs or time.perf_counter() - began > seconds:
                break
            _run(built, batch, SpeculationParams(enabled=False))
        for name in computing:
            if built.config.max_num_seqs >= 4 and time.perf_counter() - began < seconds:
                _run(built, 4, SpeculationParams(method=name))
    finally:
        steering.controller = learner
        learner.restart_report()  # these steps answered nobody
        engine.clear_prefixes()


def _run(built: Built, batch: int, speculation: SpeculationParams) -> None:
    """Some steps of so many requests, which find nothing in the prefix cache and are not counted there."""
    engine = built.engine
    params = SamplingParams(temperature=0.0, max_tokens=1 + _STEPS, ignore_eos=True, prompt_logprobs=0)
    for number in range(batch):
        prompt = [(number * _PROMPT_TOKENS + index) % engine.model.vocab_size for index in range(_PROMPT_TOKENS)]
        engine.submit(engine.prepare(prompt, params.resolved(built.defaults), speculation))
    while engine.has_work:
        for output in engine.step():
            if output.finish_reason:
                engine.take(output.request_id)
