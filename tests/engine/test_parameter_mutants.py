"""Faults planted in what parameters do: the identity of text, ends and log probabilities must notice each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import outpace.drafters.growth as growth_module
import outpace.engine.engine as engine_module
from outpace.engine.outputs import TokenLogprobs
from outpace.engine.pack import Block
from outpace.engine.request import Request
from outpace.errors import OutpaceError
from outpace.sampling.bad_words import BadSequences
from outpace.sampling.law import Laws
from outpace.sampling.penalties import Penalties
from outpace.sampling.processors import Processor
from outpace.sampling.rules import LogitsRules
from outpace.sampling.token_rules import MinTokens
from outpace.types import Choice, Verdict

from ..sampling.chi_square import ALPHA
from .parameter_cases import case
from .test_parameters import check
from .test_parameters_laws import SEEDS, SETTINGS, WARM, likelihood, sampled
from .toy_grammar import ToyGrammar

PENALTIES = ("presence", "frequency among few", "greedy penalties", "penalties among few")


def identical(names: Sequence[str], drafters: Sequence[str] = ("right", "oracle", "random")) -> bool:
    """Whether the cases, side by side, give what they have to with each of some drafters."""
    for drafter in drafters:
        try:
            check([case(name) for name in names], drafter, 4)
        except (AssertionError, OutpaceError):
            return False
    return True


def without_path(real: Callable[..., None]) -> Callable[..., None]:
    """A stage that looks at committed tokens only."""
    return lambda self, values, history: real(self, values, replace(history, path=()))


def test_without_a_fault_everything_is_identical() -> None:
    names = (*PENALTIES, "logprobs 3", "grammar", "min tokens", "bad words of every pair", "processor", "allowed")
    assert identical(names)


@pytest.mark.parametrize(
    ("stage", "names"),
    [
        (Penalties, PENALTIES),
        (MinTokens, ("min tokens", "bias for eos")),
        (BadSequences, ("bad words of every pair",)),
        (Processor, ("processor",)),
    ],
)
def test_rules_that_forget_the_draft_are_noticed(
    stage: type[Any], names: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Penalties from committed text only, min_tokens counted a step at a time, and so on."""
    monkeypatch.setattr(stage, "apply", without_path(stage.apply))
    assert not identical(names, ("oracle", "right"))


def test_committing_twice_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Penalties.commit

    def twice(self: Penalties, token_id: int) -> None:
        real(self, token_id)
        real(self, token_id)

    monkeypatch.setattr(Penalties, "commit", twice)
    assert not identical(PENALTIES)


def test_committing_bonus_tokens_only_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Request.append

    def append(self: Request, token_id: int, source: str | None, logprobs: TokenLogprobs | None = None) -> bool:
        rules = self.rules
        self.rules = None if source is not None else rules
        ended = real(self, token_id, source, logprobs)
        self.rules = rules
        return ended

    monkeypatch.setattr(Request, "append", append)
    assert not identical(PENALTIES)


@pytest.mark.parametrize("name", ["logprobs 3", "logprobs processed", "logprobs 0"])
@pytest.mark.parametrize("shift", [-1, 1])
def test_logprobs_of_the_wrong_row_are_noticed(name: str, shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = engine_module.output_logprobs

    def shifted(block: Block, verdict: Verdict, logits: torch.Tensor, text: Callable[[int], str]) -> Any:
        rows = [min(max(row + shift, 0), len(logits) - 1) for row in block.choice_rows]
        return real(replace(block, choice_rows=rows), verdict, logits, text)  # type: ignore[arg-type]

    monkeypatch.setattr(engine_module, "output_logprobs", shifted)
    assert not identical((name,))


def test_logprobs_after_the_commit_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processed values count from the committed text, which has moved on by then."""
    real = engine_module.output_logprobs

    def late(block: Block, verdict: Verdict, logits: torch.Tensor, text: Callable[[int], str]) -> Any:
        penalties = block.turn.request.rules._penalties if block.turn.request.rules else None
        for node in verdict.accepted if penalties else ():
            penalties.commit(block.draft.ids[node])
        return real(block, verdict, logits, text)

    monkeypatch.setattr(engine_module, "output_logprobs", late)
    assert not identical(("logprobs processed", "logprobs processed, greedy"))


@pytest.mark.parametrize("drafter", ["right", "random", "wrong"])
def test_a_grammar_that_does_not_go_back_is_noticed(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ToyGrammar, "rollback", lambda self, count: None)
    assert not identical(("grammar", "grammar, penalties"), (drafter,))


def test_a_block_that_goes_on_behind_its_end_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Request.append

    def append(self: Request, token_id: int, source: str | None, logprobs: TokenLogprobs | None = None) -> bool:
        real(self, token_id, source, logprobs)
        return False

    monkeypatch.setattr(Request, "append", append)
    assert not identical(("stop at a letter", "stop over tokens", "stop inside a token"))


NEVER_REACHED = (
    "grammar",
    "greedy grammar",
    "allowed",
    "bad words",
    "min tokens",
    "grammar, penalties",
    "bias for eos",
)


@pytest.mark.parametrize("drafter", ["right", "wrong", "random", "illegal", "oracle", "ngram"])
def test_drafts_that_are_not_cut_at_illegal_tokens_change_nothing(
    drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It costs rows; the text stands on the rows themselves."""
    monkeypatch.setattr(LogitsRules, "count_legal", lambda self, token_ids: len(token_ids))
    assert identical(NEVER_REACHED, (drafter,))


@pytest.mark.parametrize("drafter", ["right", "wrong", "random", "illegal", "oracle", "ngram"])
def test_wrong_forced_tokens_change_nothing(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LogitsRules, "forced", lambda self, most: [3, 1, 4, 1, 5])
    assert identical(NEVER_REACHED, (drafter,))


@pytest.mark.parametrize("method", ["standard", "block"])
def test_a_draft_that_states_another_law_than_it_was_drawn_from_is_noticed(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = growth_module.law_rows

    def hotter(logits: torch.Tensor, choices: Sequence[Choice]) -> Laws:
        return real(logits, [replace(each, params=replace(each.params, temperature=9.0)) for each in choices])

    params = replace(WARM, **SETTINGS["penalties and top_p"])
    monkeypatch.setattr(growth_module, "law_rows", hotter)
    assert likelihood(sampled("wrong", method, 3, params, range(SEEDS)), params) < ALPHA
