"""A request that fails fails alone: processors that raise, grammars that break, logits that are no numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from outpace.errors import OutpaceError
from outpace.params import SamplingParams
from outpace.sampling.rules import LogitsRules
from outpace.structured import StructuredOutputs

from .fakes import HistoryModel, IdVocabulary, TokenCache
from .harness import Job, make_engine, run_all
from .oracle import Oracle
from .parameter_cases import DRAFTERS, EOS, MODEL, V, case, drafter_for
from .toy_grammar import ToyGrammar

NEIGHBOURS = ("presence", "logprobs 3", "grammar", "greedy penalties", "everything", "min p", "ignore eos")


def beside_others(
    params: SamplingParams, drafter: str | None = "random", *, k: int = 4, model: HistoryModel = MODEL, rows: int = 512
) -> str | list[int]:
    """Runs a request in a batch of eight, and checks the others. Returns what it came to: its error, or its ids."""
    others = [case(name) for name in NEIGHBOURS]
    drafters = {} if drafter is None else {drafter: drafter_for(drafter, others, MODEL)}
    cache = TokenCache()
    engine = make_engine(model, cache, drafters, k=k, eos=sorted(EOS), rows=rows)
    result, *results = run_all(engine, [Job([23, 23, 1], params), *(other.job for other in others)])
    for other, got in zip(others, results, strict=True):
        assert not isinstance(got, OutpaceError), (other.name, got)
        other.expected.check(got)
    assert engine.free_rows == 4096
    return str(result) if isinstance(result, OutpaceError) else result.outputs[0].token_ids


def base(**changes: object) -> SamplingParams:
    return replace(case("ignore eos").job.params, seed=77, **changes)  # type: ignore[arg-type]


PLAIN = Oracle(MODEL, EOS).decode(Job([23, 23, 1], base())).token_ids

_KNOWN_DRAFTERS = tuple(name for name in DRAFTERS if name != "oracle")


def refuses_at(step: int) -> Callable[[list[int], torch.Tensor], torch.Tensor]:
    def picky(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(output_ids) == step:
            raise KeyError(f"no entry for {step}")
        return logits

    return picky


@pytest.mark.parametrize("k", [1, 8])
@pytest.mark.parametrize("step", [0, 6, 19])
@pytest.mark.parametrize("drafter", [None, *_KNOWN_DRAFTERS])
@pytest.mark.thinned(2)
def test_a_processor_that_raises_ends_its_own_request(drafter: str | None, step: int, k: int) -> None:
    got = beside_others(base(logits_processors=(refuses_at(step),)), drafter, k=k)
    assert isinstance(got, str)
    assert re.search(rf"picky.*position {3 + step}.*KeyError.*no entry for {step}", got)


@pytest.mark.parametrize("result", [None, torch.zeros(V + 1), torch.full((V,), torch.nan), np.zeros(V, np.float32)])
def test_a_processor_that_returns_nonsense_ends_its_own_request(result: object) -> None:
    got = beside_others(base(logits_processors=(lambda output_ids, logits: result,)))
    assert isinstance(got, str)
    assert "logits processor" in got and "position 3" in got


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("drafter", [None, *_KNOWN_DRAFTERS])
@pytest.mark.thinned(2)
def test_a_processor_may_refuse_what_is_never_reached(drafter: str | None, temperature: float, mode: str) -> None:
    """It raises for every history that is not plain decoding's own: drafts that go wrong must not matter."""
    params = base(temperature=temperature, logprobs=2, logprobs_mode=mode)
    plain = Oracle(MODEL, EOS).decode(Job([23, 23, 1], params)).token_ids

    def strict(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        if output_ids != plain[: len(output_ids)]:
            raise ValueError(f"{output_ids} is no text of mine")
        return logits

    assert beside_others(replace(params, logits_processors=(strict,)), drafter, k=8) == plain


def test_a_processor_that_bans_everything_ends_its_own_request() -> None:
    got = beside_others(base(logits_processors=(lambda output_ids, logits: logits - torch.inf,)))
    assert isinstance(got, str)
    assert "no token is left" in got and "logits_processors" in got


def flaky(times: int) -> Callable[[list[int], torch.Tensor], torch.Tensor]:
    """Not a function of history: the call number `times` raises, whatever it is for."""
    calls = 0

    def forgetful(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == times:
            raise ConnectionError("gone away")
        return logits

    return forgetful


@pytest.mark.parametrize("times", range(1, 12))
def test_a_processor_that_raises_now_and_then_never_ends_others(times: int) -> None:
    beside_others(base(logits_processors=(flaky(times),)), "wrong")


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_processor_that_raises_for_log_probabilities_never_ends_others(temperature: float) -> None:
    """They ask it once more for a row that was chosen already."""
    params = base(logprobs=1, logprobs_mode="processed_logprobs", temperature=temperature)
    beside_others(replace(params, logits_processors=(flaky(2),)), None)


def test_a_processor_that_raises_for_log_probabilities_leaves_no_wrong_ones() -> None:
    """Its second call is for the log probabilities of the first token, which then cannot be given."""
    params = base(logprobs=1, logprobs_mode="processed_logprobs", logits_processors=(flaky(2),), max_tokens=3)
    (result,) = run_all(make_engine(MODEL, TokenCache(), {}), [Job([23, 23, 1], params)])
    assert isinstance(result, OutpaceError)
    assert "gone away" in str(result)


@pytest.mark.parametrize("method", ["coupled", "standard", "block"])
@pytest.mark.parametrize("drafter", _KNOWN_DRAFTERS)
def test_rows_behind_tokens_that_cannot_come_may_fail(
    drafter: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever verifies: a processor that raises behind a token that is not allowed is never asked by the text."""
    monkeypatch.setattr(LogitsRules, "count_legal", lambda self, token_ids: len(token_ids))

    def strict(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        if any(token % 2 for token in output_ids):
            raise ValueError(f"odd tokens in {output_ids}")
        return logits

    params = base(allowed_token_ids=range(0, V, 2), logits_processors=(strict,), logprobs=1)
    jobs = [Job([23, 23, 1], params), Job([1], base()), Job([2], replace(params, temperature=0.0))]
    drafters = {drafter: drafter_for(drafter, ())}
    for result in run_all(make_engine(MODEL, TokenCache(), drafters, k=4, verification=method), jobs):
        assert not isinstance(result, OutpaceError), result
        assert len(result.outputs[0].token_ids) == params.max_tokens


@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("step", [0, 1, 6])
@pytest.mark.parametrize("drafter", _KNOWN_DRAFTERS)
def test_a_processor_that_raises_ends_its_own_request_under_rejection_sampling(
    drafter: str, step: int, method: str
) -> None:
    jobs = [Job([23, 23, 1], base(logits_processors=(refuses_at(step),))), Job([1], base(temperature=0.0))]
    drafters = {drafter: drafter_for(drafter, ())}
    failed, other = run_all(make_engine(MODEL, TokenCache(), drafters, k=4, verification=method), jobs)
    assert isinstance(failed, OutpaceError)
    assert f"position {3 + step}: KeyError" in str(failed)
    assert not isinstance(other, OutpaceError)
    Oracle(MODEL).decode(jobs[1]).check(other)


class BreakingGrammar(ToyGrammar):
    """Fails at the call number `at` of one method, as a grammar in an error state does."""

    method = ""
    at = 0
    calls = 0

    def _count(self, method: str) -> None:
        kind = type(self)
        kind.calls += self.method == method
        if self.method == method and kind.calls == self.at:
            raise OutpaceError("the grammar broke")

    def mask(self) -> np.ndarray:
        self._count("mask")
        return super().mask()

    def consume(self, token_id: int) -> bool:
        self._count("consume")
        return super().consume(token_id)

    def forced(self, most: int) -> list[int]:
        self._count("forced")
        return super().forced(most)

    def rollback(self, count: int) -> None:
        super().rollback(count)
        self._count("rollback")


@pytest.mark.parametrize("at", range(1, 9))
@pytest.mark.parametrize("method", ["mask", "consume", "forced", "rollback"])
@pytest.mark.parametrize("drafter", ["random", "wrong", "ngram"])
@pytest.mark.thinned(3)
def test_a_grammar_that_breaks_ends_its_own_request(
    drafter: str, method: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = IdVocabulary.grammar

    def grammar(self: IdVocabulary, structured_outputs: StructuredOutputs) -> object:
        if structured_outputs.regex != "breaking":
            return real(self, structured_outputs)
        return BreakingGrammar("breaking", self.size, EOS)

    monkeypatch.setattr(IdVocabulary, "grammar", grammar)
    for name, value in {"method": method, "at": at, "calls": 0}.items():
        monkeypatch.setattr(BreakingGrammar, name, value)
    got = beside_others(base(structured_outputs=StructuredOutputs(regex="breaking")), drafter)
    assert isinstance(got, list) or "the grammar broke" in got


class Spoilt(HistoryModel):
    """No number where the newest token is the prompt's last: at one id, or everywhere."""

    ids: Sequence[int] | slice = slice(None)
    value = np.nan

    def logits(self, history: Sequence[int]) -> np.ndarray:
        values = super().logits(history).copy()
        if list(history[:2]) == [23, 23] and len(history) in (1, 2, 8):
            values[self.ids] = self.value
        return values


@pytest.mark.parametrize("ids", [slice(None), [3]], ids=["all", "one"])
@pytest.mark.parametrize(
    ("logprobs", "value"),
    [(0, np.nan), (0, np.inf), (3, np.nan), (3, np.inf), (-1, np.nan)],
)
def test_prompt_logits_that_are_no_numbers_do_not_end_others(
    logprobs: int, ids: Sequence[int] | slice, value: float
) -> None:
    model = Spoilt(V)
    model.ids, model.value = ids, value
    params = base(prompt_logprobs=logprobs, logprobs=logprobs)
    got = beside_others(params, model=model)
    assert isinstance(got, str)
    assert "NaN" in got or "+inf" in got


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_no_numbers_at_ids_that_are_not_allowed_do_not_end_others(mode: str, temperature: float) -> None:
    """The rules take such an id away, so a token is chosen; the raw logits still have it."""
    model = Spoilt(V)
    model.ids = [3]
    allowed = tuple(token for token in range(V) if token != 3)
    params = base(allowed_token_ids=allowed, logprobs=2, logprobs_mode=mode, temperature=temperature)
    got = beside_others(params, model=model)
    assert isinstance(got, str) or len(got) == params.max_tokens
