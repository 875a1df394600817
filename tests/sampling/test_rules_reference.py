"""Rules give the reference's bits, however the text before a row is split into committed and draft tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from outpace.errors import InvalidParameter, OutpaceError
from outpace.params import SamplingParams
from outpace.sampling import rules as rules_module
from outpace.sampling.bad_words import BadSequences
from outpace.sampling.grammar_rule import GrammarRule
from outpace.sampling.penalties import Penalties, _Tally
from outpace.sampling.processors import Processor
from outpace.sampling.reference import processed_reference
from outpace.sampling.rules import LogitsRules, compile_rules
from outpace.sampling.stage import History
from outpace.sampling.token_rules import LogitBias, MinTokens
from outpace.structured import StructuredOutputs
from tests.sampling.rules_world import EOS, SIZE, STOPS, SmallVocabulary, outcome, rules_of

Row = np.ndarray


def halve(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits /= 2
    output_ids.append(99)
    return logits


def count_ids(prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    return logits + 0.25 * len(output_ids) - 0.125 * sum(prompt_ids)


def ban_first(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits[0] = -math.inf
    return logits.to(torch.float64)


def revive(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    return torch.where(logits == -math.inf, 1.0, logits)


def numbers(low: float, high: float) -> st.SearchStrategy[float]:
    return st.one_of(st.sampled_from([low, 0.0, high]), st.floats(low, high, width=32))


ids = st.integers(0, SIZE - 1)
logit = st.one_of(
    st.floats(-50, 50, width=32), st.sampled_from([-math.inf, -3e38, -1.0, -0.0, 0.0, 1e-40, 1.0, 2.0, 1e30, 3e38])
)
rows = st.lists(logit, min_size=SIZE, max_size=SIZE).filter(lambda row: max(row) > -math.inf)
texts = st.sampled_from(["a", "b", "ab", " a", "aa", "ba", "abc", "a b", "\n", " ", "cab", "b\n"])
choices = st.lists(st.sampled_from(["a", "ab", "abc", "a b", "ba", "a ab", "c"]), min_size=1, max_size=3, unique=True)
parameters = st.fixed_dictionaries(
    {},
    optional={
        "presence_penalty": numbers(-2, 2),
        "frequency_penalty": numbers(-2, 2),
        "repetition_penalty": st.one_of(st.sampled_from([0.5, 1.1, 1.3]), st.floats(0.015625, 100, width=32)),
        "logit_bias": st.dictionaries(ids, numbers(-100, 100), max_size=4),
        "allowed_token_ids": st.lists(ids, min_size=1, max_size=9),
        "bad_words": st.lists(texts, max_size=4),
        "min_tokens": st.integers(0, 4),
        "logits_processors": st.lists(st.sampled_from([halve, count_ids, ban_first, revive]), max_size=2),
        "structured_outputs": st.builds(lambda items: StructuredOutputs(choice=items), choices),
    },
)
prompts = st.lists(ids, min_size=1, max_size=5)
outputs = st.lists(st.one_of(st.integers(0, 5), ids), max_size=6)


def expected(row: Row, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> Row | None:
    with np.errstate(over="ignore"):
        values = processed_reference(row.tolist(), params, prompt, output, SmallVocabulary(), STOPS)
    return np.array(values, np.float32) if max(values) > -math.inf else None


def same(row: Row | None, other: Row | None) -> bool:
    """Bit for bit, but for the sign of zero, which no choice sees."""
    if row is None or other is None:
        return row is other
    return (row + np.float32(0)).tobytes() == (other + np.float32(0)).tobytes()


def check(row: Row, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> None:
    """Every row along the output, for every split of what is before it."""
    wanted = [expected(row, params, prompt, output[:end]) for end in range(len(output) + 1)]
    for committed in range(len(output) + 1):
        rules = compile_rules(params, SmallVocabulary(), STOPS, prompt)
        assert rules is not None  # ids are missing
        if not _commit(rules, params, output[:committed]):
            return
        for end in [*range(committed, len(output) + 1), committed]:
            before = row.copy()
            assert same(outcome(rules, row, output[committed:end]), wanted[end]), (committed, end)
            assert row.tobytes() == before.tobytes()


def _commit(rules: LogitsRules, params: SamplingParams, tokens: Sequence[int]) -> bool:
    """False if the grammar refuses one of them: then there is no row to compare."""
    wanted = params.structured_outputs
    grammar = None if wanted is None else SmallVocabulary().grammar(wanted)
    for token in tokens:
        if grammar is not None and not grammar.consume(token):
            with pytest.raises(OutpaceError, match="structured_outputs"):
                rules.commit(token)
            return False
        assert rules.commit(token) is (grammar is not None and grammar.ended)
    return True


@settings(max_examples=250, deadline=None, database=None, derandomize=True)
@given(rows, parameters, prompts, outputs)
@example([0.5] * SIZE, {"structured_outputs": StructuredOutputs(choice=["ab", "a b"])}, [0], [0, 4, EOS])
@example([0.5] * SIZE, {"structured_outputs": StructuredOutputs(choice=["a", "ab"]), "min_tokens": 2}, [0], [0, 1])
@example([3e38] * SIZE, {"repetition_penalty": 0.015625, "frequency_penalty": 2}, [0], [0, 0, 0])
def test_equals_the_reference_for_every_split(
    row: list[float], given: dict[str, object], prompt: list[int], output: list[int]
) -> None:
    params = SamplingParams(**given)  # type: ignore[arg-type]
    try:
        compile_rules(params, SmallVocabulary(), STOPS, prompt)
    except InvalidParameter as error:
        assert "leave no token" in str(error) or "min_tokens" in str(error)
        return
    check(np.array(row, np.float32), params, prompt, output)


@settings(max_examples=80, deadline=None, database=None, derandomize=True)
@given(rows, st.lists(outputs, min_size=1, max_size=5), outputs)
def test_rows_asked_for_in_any_order_do_not_disturb_each_other(
    row: list[float], paths: list[list[int]], output: list[int]
) -> None:
    params = SamplingParams(
        presence_penalty=0.3, frequency_penalty=-0.2, repetition_penalty=1.7, bad_words=["a b", "ba"], min_tokens=3
    )
    values = np.array(row, np.float32)
    rules = rules_of(params, prompt=[1, 4], output=output)
    for path in paths + paths[::-1]:
        assert same(outcome(rules, values, path), expected(values, params, [1, 4], output + path))


def _all_parameters() -> SamplingParams:
    return SamplingParams(
        presence_penalty=0.3,
        frequency_penalty=0.7,
        repetition_penalty=1.3,
        logit_bias={1: 0.4, 2: -3.0},
        bad_words=["a b", "ba"],
        min_tokens=3,
        logits_processors=[count_ids],
    )


ROW = np.linspace(-2, 3, SIZE, dtype=np.float32)
CASES = [[], [0], [0, 0], [1, 0, 0, 1], [5, 0], [2, 1, 1]]


def _mutants() -> dict[str, tuple[type, str, object]]:
    """What goes wrong when a rule is written carelessly: where, and the careless version."""
    tally, sequences, min_tokens, processor = _Tally.with_path, BadSequences.apply, MinTokens.apply, Processor.apply

    def committed_only(history: History) -> History:
        return History(history.prompt, history.committed, ())

    def remembering(self: _Tally, path: Sequence[int]) -> object:
        for token in path:
            self.add(token)
        return tally(self, ())

    def uncounted(self: _Tally, path: Sequence[int]) -> object:
        found, counts = tally(self, path)
        return found, np.minimum(counts, 1)

    return {
        "penalties forget the path": (_Tally, "with_path", lambda self, path: tally(self, ())),
        "path tokens count twice": (_Tally, "with_path", lambda self, path: tally(self, [*path, *path])),
        "path tokens stay counted": (_Tally, "with_path", remembering),
        "frequency counts once": (_Tally, "with_path", uncounted),
        "committed tokens are not counted": (Penalties, "commit", lambda self, token: None),
        "bad words forget the path": (
            BadSequences,
            "apply",
            lambda self, values, history: sequences(self, values, committed_only(history)),
        ),
        "bad words see the prompt": (
            BadSequences,
            "apply",
            lambda self, values, history: sequences(
                self, values, History((), [*history.prompt, *history.committed], history.path)
            ),
        ),
        "min_tokens forgets the path": (
            MinTokens,
            "apply",
            lambda self, values, history: min_tokens(self, values, committed_only(history)),
        ),
        "processors forget the path": (
            Processor,
            "apply",
            lambda self, values, history: processor(self, values, committed_only(history)),
        ),
        "no bias": (LogitBias, "apply", lambda self, values, history: None),
    }


@pytest.mark.parametrize("name", _mutants())
def test_mutants_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for output in CASES:
        check(ROW, _all_parameters(), [3, 0], output)
    owner, attribute, mutant = _mutants()[name]
    monkeypatch.setattr(owner, attribute, mutant)
    with pytest.raises(AssertionError):
        for output in CASES:
            check(ROW, _all_parameters(), [3, 0], output)


@pytest.mark.parametrize("careless", ["grammar stays behind the last row", "grammar is shared"])
def test_mutants_of_the_grammar_are_noticed(careless: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputs(choice=["ab", "a b", "abc"]))
    check(ROW, params, [0], [0, 1, 2])
    if careless == "grammar is shared":
        one = SmallVocabulary().grammar(params.structured_outputs)  # type: ignore[arg-type]
        monkeypatch.setattr(rules_module, "GrammarRule", lambda grammar: GrammarRule(one))
    else:

        def stay(self: GrammarRule, path: Sequence[int]) -> bool:
            return all(self._grammar.consume(token) for token in path)

        monkeypatch.setattr(GrammarRule, "_move_to", stay)
    with pytest.raises((AssertionError, OutpaceError)):
        check(ROW, params, [0], [0, 1, 2])
