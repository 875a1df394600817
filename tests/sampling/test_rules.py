"""What each parameter does to a row, worked out by hand, and what is refused before a request starts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from outpace.errors import InvalidParameter, OutpaceError
from outpace.params import SamplingParams
from outpace.sampling.choose import choose_each, choose_rows
from outpace.sampling.rules import LogitsRules, compile_rules
from outpace.types import Choice
from tests.sampling.rules_world import (
    END,
    EOS,
    MISSING,
    SIZE,
    STOPS,
    WHOLE,
    SmallVocabulary,
    left,
    rules_of,
    zeros,
)

PRESENT = [token for token in range(SIZE) if token not in MISSING]


def greedy_tokens(count: int, **given: Any) -> list[int]:
    """What a model says whose logits are always [2, 1.9, 0, 0, ...], one committed token at a time."""
    params = SamplingParams(temperature=0, top_k=0, top_p=1, **given)
    rules = rules_of(params, WHOLE, prompt=[6])
    logits = torch.tensor([[2, 1.9, 0, 0, 0, 0, 0, 0]])
    tokens = []
    for position in range(1, count + 1):
        tokens += choose_rows(logits, [Choice(params, 0, position, rules=rules)])
        rules.commit(tokens[-1])
    return tokens


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ({"presence_penalty": 0.2}, [0, 1, 0, 0, 0, 0]),
        ({"frequency_penalty": 0.2}, [0, 1, 0, 1, 0, 1]),
        ({"repetition_penalty": 1.1}, [0, 1, 0, 0, 0, 0]),
        ({"presence_penalty": 2.0, "frequency_penalty": -2.0}, [0, 0, 0, 0, 0, 0]),
        ({"presence_penalty": -0.1}, [0, 0, 0, 0, 0, 0]),
        ({"frequency_penalty": 2.0}, [0, 1, 0, 2, 3, 4]),  # 2, 1.9; then 0 ties with all that were not said
        ({"repetition_penalty": 100}, [0, 1, 0, 0, 0, 0]),  # 0.02 is still above 0.019 and 0
        ({"presence_penalty": 2.0, "repetition_penalty": 100}, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_penalties_change_greedy_text_as_worked_out(given: dict[str, float], tokens: list[int]) -> None:
    assert greedy_tokens(6, **given) == tokens


def test_penalties_are_elementwise_float32() -> None:
    params = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=0.1)
    rules = rules_of(params, WHOLE, prompt=[0, 1], output=[2])
    f = np.float32
    row = np.array([1.7, -1.7, 1.7, -1.7, 1.7, 0, 1.7, 1.7], f)
    up, down = f(1.7) / f(1.3), f(-1.7) * f(1.3)
    twice = up - f(0.7) * f(2) - f(0.1)
    assert rules(row, [2, 3]).tolist() == [up, down, twice, down - f(0.7) - f(0.1), f(1.7), 0, f(1.7), f(1.7)]


def test_the_prompt_counts_for_repetition_only() -> None:
    row = np.ones(WHOLE.size, np.float32)
    assert rules_of(SamplingParams(repetition_penalty=2), WHOLE, prompt=[3, 3])(row, []).tolist()[3] == 0.5
    both = SamplingParams(frequency_penalty=1, presence_penalty=1)
    assert rules_of(both, WHOLE, prompt=[3, 3])(row, []).tolist() == row.tolist()


def test_many_committed_tokens_are_counted() -> None:
    """More distinct tokens than the first arrays hold, on top of those of the prompt."""
    size = 1000
    vocabulary = SmallVocabulary(tokens=tuple(map(str, range(size))), missing_ids=())
    rules = rules_of(
        SamplingParams(frequency_penalty=0.5, repetition_penalty=2), vocabulary, prompt=range(5), stops=frozenset()
    )
    text = [7 * i % size for i in range(700)] + [7] * 30
    for token in text:
        rules.commit(token)
    row = rules(np.ones(size, np.float32), [3])
    assert row[3] == 0.5 - 0.5 * (text.count(3) + 1)
    assert row[7] == 0.5 - 0.5 * 31
    seen = {*text, *range(5)}
    assert [token for token in range(size) if row[token] != 1] == sorted(seen)


def test_ids_without_a_token_never_come() -> None:
    assert left(rules_of(SamplingParams())(zeros(), [])) == PRESENT


@pytest.mark.parametrize(
    "given",
    [{}, {"logit_bias": {1: 0.0}}, {"allowed_token_ids": list(range(8))}, {"bad_words": []}, {"presence_penalty": 0}],
)
def test_there_are_no_rules_where_nothing_would_change(given: dict[str, Any]) -> None:
    assert compile_rules(SamplingParams(**given), WHOLE, STOPS, [0]) is None


def test_min_tokens_without_stop_tokens_changes_nothing() -> None:
    assert compile_rules(SamplingParams(min_tokens=5), WHOLE, frozenset(), [0]) is None
    assert compile_rules(SamplingParams(min_tokens=5), WHOLE, frozenset({1}), [0]) is not None


def test_allowed_tokens_are_what_is_left() -> None:
    assert left(rules_of(SamplingParams(allowed_token_ids=[EOS, 2, 2, 9]))(zeros(), [0])) == [2, EOS]


def test_bias_is_added() -> None:
    row = np.full(SIZE, 0.5, np.float32)
    values = rules_of(SamplingParams(logit_bias={0: -100, 4: 0.25}))(row, [])
    assert values[[0, 1, 4]].tolist() == [-99.5, 0.5, 0.75]


@pytest.mark.parametrize(("output", "held"), [([], True), ([0], True), ([0, 0], False), ([0, 0, 0], False)])
def test_min_tokens_holds_stop_tokens_back(output: list[int], held: bool) -> None:
    for split in range(len(output) + 1):
        values = rules_of(SamplingParams(min_tokens=2), output=output[:split])(zeros(), output[split:])
        assert ({EOS, END} & set(left(values)) == set()) is held


@pytest.mark.parametrize(
    ("word", "output", "banned"),
    [
        ("a", [], {0, 3}),  # at the start of a text and after a space
        ("a", [5, 5], {0, 3}),
        (" a", [], {0, 3}),  # space in front makes no difference
        ("\n", [], {10}),  # not the space that would stand before it
        ("ab", [], {5}),
        ("ab", [3], {5}),  # " ab" has two tokens: another spelling, which may go on with "b"
        ("ba", [], set()),
        ("ba", [1], {0}),
        ("ba", [2, 1], {0}),
        ("ba", [1, 2], set()),
        ("ba", [4], {0}),  # " ba", of the same length
        ("abc", [5], {2}),
        ("abc", [0, 1], set()),  # spelled otherwise
        ("aaa", [0], set()),
        ("aaa", [0, 0], {0}),
    ],
)
def test_bad_words(word: str, output: list[int], banned: set[int]) -> None:
    for split in range(len(output) + 1):
        rules = rules_of(SamplingParams(bad_words=[word]), prompt=[1, 5, 0, 0], output=output[:split])
        assert set(PRESENT) - set(left(rules(zeros(), output[split:]))) == banned


def test_words_that_cannot_be_written_ban_nothing() -> None:
    """A tokenizer may know tokens beyond the model's head."""
    vocabulary = SmallVocabulary(tokens=("a", "b"), missing_ids=())
    vocabulary.encode = lambda text: [5] if text.strip() == "zz" else [1]  # type: ignore[method-assign]
    assert compile_rules(SamplingParams(bad_words=["zz"]), vocabulary, frozenset(), [0]) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"logit_bias": {SIZE: 1.0}}, f"logit_bias: {SIZE} .* 0 to {SIZE - 1}"),
        ({"allowed_token_ids": [0, 99]}, f"allowed_token_ids: 99 .* 0 to {SIZE - 1}"),
        ({"stop_token_ids": [SIZE]}, f"stop_token_ids: {SIZE} .* 0 to {SIZE - 1}"),
        ({"bad_words": ["a", "zz"]}, "bad_words: 'zz'"),
        ({"allowed_token_ids": [9, 11]}, r"allowed_token_ids=\[9, 11\].*tokenizer has no token"),
        ({"allowed_token_ids": [0, 3], "bad_words": ["a"]}, r"allowed_token_ids=\[0, 3\].* bad_words"),
        ({"allowed_token_ids": [0, 3, 9], "bad_words": ["a"]}, "together leave no token"),
        ({"allowed_token_ids": [EOS, END], "min_tokens": 1}, "min_tokens=1 .* allowed_token_ids"),
        ({"allowed_token_ids": [EOS, 0, 3], "min_tokens": 3, "bad_words": ["a"]}, "min_tokens=3 .* bad_words"),
    ],
)
def test_impossible_requests_are_refused_with_the_value(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        compile_rules(SamplingParams(**given), SmallVocabulary(), STOPS, [0])


def test_what_is_just_possible_is_not_refused() -> None:
    assert left(rules_of(SamplingParams(allowed_token_ids=[0, 1, 3], bad_words=["a"]))(zeros(), [])) == [1]
    stop_only = rules_of(SamplingParams(allowed_token_ids=[EOS, 1], min_tokens=1))
    assert left(stop_only(zeros(), [])) == [1]
    assert left(rules_of(SamplingParams(allowed_token_ids=[EOS]))(zeros(), [])) == [EOS]


def test_all_tokens_stopping_the_text_is_refused_with_min_tokens() -> None:
    with pytest.raises(InvalidParameter, match="all tokens end the text"):
        compile_rules(SamplingParams(min_tokens=1), WHOLE, frozenset(range(8)), [0])


def test_nothing_left_is_an_error_that_names_position_and_parameters() -> None:
    params = SamplingParams(allowed_token_ids=[0, EOS], bad_words=["ba"], min_tokens=9, frequency_penalty=1)
    rules = rules_of(params, prompt=[0] * 5, output=[0, 1])
    with pytest.raises(OutpaceError) as caught:
        rules(zeros(), [])
    text = str(caught.value)
    assert "position 7 (output token 3)" in text
    assert all(name in text for name in ("allowed_token_ids", "bad_words", "min_tokens"))
    assert "penalty" not in text
    assert left(rules(zeros(), [0])) == [0]


def test_a_row_without_tokens_costs_the_others_nothing() -> None:
    params = SamplingParams(temperature=0, top_k=0, top_p=1, allowed_token_ids=[0, EOS], bad_words=["ba"], min_tokens=9)
    rules = rules_of(params, output=[1])
    choices = [Choice(params, 0, 3 + len(path), rules=rules, path=path) for path in ((), (0,))]
    chosen = choose_each(torch.zeros(2, SIZE), choices)
    assert chosen.tokens == [-1, 0]
    assert "no token is left at position 3" in chosen.errors[0]


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_broken_logits_stay_visible(broken: float) -> None:
    row = zeros()
    row[2] = broken
    params = SamplingParams(
        temperature=0, top_k=0, top_p=1, repetition_penalty=1.5, logits_processors=[lambda ids, logits: logits * 0]
    )
    choice = Choice(params, 0, 2, rules=rules_of(params, prompt=[2, 0]))
    with pytest.raises(OutpaceError, match=r"logits row 0 \(position 2\) has (NaN|\+inf)"):
        choose_rows(torch.from_numpy(row)[None], [choice])


def test_a_model_that_allows_nothing_is_not_blamed_on_parameters() -> None:
    assert left(rules_of(SamplingParams())(np.full(SIZE, -np.inf, np.float32), [])) == []


def test_the_argument_stays_as_it_is_and_may_be_an_inference_tensor_with_strides() -> None:
    with torch.inference_mode():
        logits = torch.arange(2.0 * SIZE).reshape(SIZE, 2)[:, 1]
    row, before = logits.numpy(), logits.tolist()
    rules = rules_of(SamplingParams(repetition_penalty=2, allowed_token_ids=[0, 1, 5]))
    values = rules(row, [5])
    assert logits.tolist() == before
    values[:] = 7
    assert logits.tolist() == before
    assert values.flags.c_contiguous


@pytest.mark.parametrize("width", [SIZE - 4, SIZE + 3])
def test_rows_of_a_draft_model_with_another_head_keep_their_width(width: int) -> None:
    """Padding and added tokens differ between models of one family."""
    rules = rules_of(SamplingParams(repetition_penalty=2, logit_bias={SIZE - 2: 1}), prompt=[SIZE - 2, 0])
    values = rules(np.ones(width, np.float32), [1])
    assert values.size == width
    assert left(values) == [token for token in PRESENT if token < width]
    assert values[:3].tolist() == [0.5, 0.5, 1]


def count(rules: LogitsRules, *ids: int) -> int:
    return rules.count_legal(ids)


def test_drafts_are_cut_before_what_is_banned() -> None:
    rules = rules_of(SamplingParams(allowed_token_ids=[0, 1, 2, 3, EOS, 9], bad_words=["a"], min_tokens=3))
    assert count(rules) == 0
    assert count(rules, 1, 2, 1) == 3
    assert count(rules, 1, 0, 1) == 1  # a bad word
    assert count(rules, 1, 4) == 1  # not allowed
    assert count(rules, 9) == 0  # no token
    assert count(rules, 1, SIZE) == 1
    assert count(rules, -1) == 0
    assert count(rules, 1, 2, EOS) == 2  # too early
    assert count(rules, 1, 2, 1, EOS) == 4
    rules.commit(1)
    assert count(rules, 1, 2, EOS, 1) == 4  # what follows a stop token is not for rules to say
    assert rules.forced(9) == []


def test_requests_do_not_share_state() -> None:
    params = SamplingParams(frequency_penalty=1)
    one, other = rules_of(params), rules_of(params)
    one.commit(0)
    assert one(zeros(), [])[0] == -1
    assert other(zeros(), [])[0] == 0
    assert one.commit(1) is False
