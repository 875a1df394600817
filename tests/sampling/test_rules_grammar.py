"""A grammar among the rules: rows behind drafts, the way back, the end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from outpace.errors import OutpaceError
from outpace.params import SamplingParams
from outpace.sampling.rules import LogitsRules
from outpace.structured import StructuredOutputs
from tests.sampling.rules_world import EOS, MISSING, SIZE, SmallVocabulary, left, rules_of, zeros

WHOLE_ROW = list(range(SIZE))


def with_choice(*choices: str, vocabulary: SmallVocabulary | None = None, **given: Any) -> LogitsRules:
    params = SamplingParams(structured_outputs=StructuredOutputs(choice=choices), **given)
    return rules_of(params, vocabulary)


def test_rows_follow_their_own_path() -> None:
    rules = with_choice("ab", "a b", "ba")
    assert left(rules(zeros(), [])) == [0, 1, 5]
    assert left(rules(zeros(), [0])) == [1, 4, 6]
    assert left(rules(zeros(), [1])) == [0]
    assert left(rules(zeros(), [0, 6])) == [1]
    assert left(rules(zeros(), [])) == [0, 1, 5]


def test_a_chain_of_rows_moves_the_grammar_once_a_row() -> None:
    vocabulary = SmallVocabulary()
    rules = with_choice("abcabc", vocabulary=vocabulary)
    chain = [0, 1, 2, 0, 1]
    for end in range(len(chain) + 1):
        rules(zeros(), chain[:end])
    (grammar,) = vocabulary.grammars
    assert grammar.moves == len(chain)
    assert rules.count_legal(chain) == len(chain)
    assert grammar.moves == len(chain) + 1 + len(chain)
    for end in range(len(chain) + 1):
        rules(zeros(), chain[:end])
    assert grammar.consumed == chain


def test_commit_goes_back_to_the_committed_text() -> None:
    vocabulary = SmallVocabulary()
    rules = with_choice("ab", "a b", vocabulary=vocabulary)
    rules(zeros(), [0, 4])
    assert rules.commit(0) is False
    assert vocabulary.grammars[0].consumed == [0]
    assert left(rules(zeros(), [])) == [1, 4, 6]
    rules(zeros(), [4])
    assert rules.commit(1) is True
    assert vocabulary.grammars[0].consumed == [0, 1]


def test_rows_behind_a_broken_path_are_left_alone() -> None:
    rules = with_choice("ab", presence_penalty=1)
    row = np.arange(SIZE, dtype=np.float32)
    values = rules(row, [0, 2])
    assert values.tolist() == row.tolist()
    assert values is not row
    assert left(rules(row, [0])) == [1]
    assert left(rules(row, [0, 2, 1])) == WHOLE_ROW


def test_rows_behind_the_end_raise_nothing() -> None:
    rules = with_choice("a", "ab")
    assert left(rules(zeros(), [0])) == [1, EOS]
    assert left(rules(zeros(), [0, EOS])) == [token for token in WHOLE_ROW if token not in MISSING]
    assert left(rules(zeros(), [5])) == [EOS]


def test_the_end_is_reported_with_its_token() -> None:
    rules = with_choice("a", "ab")
    assert rules.commit(0) is False
    assert rules.commit(EOS) is True


def test_other_bans_hold_in_a_grammar() -> None:
    rules = with_choice("ab", "a b", "ba", bad_words=["ab"], allowed_token_ids=[0, 1, 4, 5])
    assert left(rules(zeros(), [])) == [0, 1]


def test_no_token_left_names_the_grammar() -> None:
    rules = with_choice("a", "b", min_tokens=2)
    assert left(rules(zeros(), [])) == [0, 1]
    with pytest.raises(OutpaceError, match=r"position 3 .*structured_outputs, min_tokens"):
        rules(zeros(), [0])


def test_committing_what_the_grammar_refuses_is_an_error() -> None:
    rules = with_choice("ab")
    with pytest.raises(OutpaceError, match=r"token 2 .*structured_outputs"):
        rules.commit(2)


@pytest.mark.parametrize(
    ("ids", "legal"),
    [
        ([], 0),
        ([2], 0),
        ([0, 1], 2),  # could go on with "c", or end
        ([0, 1, EOS], 3),
        ([0, 1, EOS, 0], 3),
        ([0, 1, 2], 3),
        ([0, 1, 2, EOS], 3),  # nothing may follow, so the text ends with the token before EOS
        ([1, 0, 0], 2),
        ([5, 1], 1),
        ([0, 9], 1),
    ],
)
def test_drafts_are_cut_to_what_the_grammar_takes(ids: list[int], legal: int) -> None:
    rules = with_choice("ab", "abc", "ba")
    rules(zeros(), [0, 1])
    assert rules.count_legal(ids) == legal
    assert left(rules(zeros(), [])) == [0, 1, 5]


@pytest.mark.parametrize("method", ["consume", "rollback"])
def test_a_grammar_that_fails_costs_the_draft_or_the_row_and_recovers(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llguidance may find a text too complex; its state is then that of the tokens that it took."""
    vocabulary = SmallVocabulary()
    rules = with_choice("abcab", vocabulary=vocabulary)
    (grammar,) = vocabulary.grammars
    rules(zeros(), [0])
    works = getattr(grammar, method)

    def fails(argument: int) -> bool:
        if method == "rollback":
            works(argument)
        raise OutpaceError("too complex")

    monkeypatch.setattr(grammar, method, fails)
    path = [0, 1] if method == "consume" else []
    with pytest.raises(OutpaceError, match="too complex"):
        rules(zeros(), path)
    if method == "consume":
        assert rules.count_legal([0, 1]) == 0
    monkeypatch.undo()
    assert rules.count_legal([0, 1, 2, 2]) == 3
    assert left(rules(zeros(), [0, 1])) == [2]
    assert left(rules(zeros(), [])) == [0, 5]


def test_what_a_failing_grammar_forces_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = SmallVocabulary()
    rules = with_choice("ab", vocabulary=vocabulary)

    def fails(most: int) -> list[int]:
        raise OutpaceError("too complex")

    monkeypatch.setattr(vocabulary.grammars[0], "forced", fails)
    assert rules.forced(9) == []


def test_statically_banned_tokens_are_cut_first() -> None:
    assert with_choice("abab", bad_words=["b"]).count_legal([5, 0, 1]) == 2


def test_forced_tokens_start_at_the_committed_text() -> None:
    rules = with_choice("ab a", "b")
    assert rules.forced(9) == []
    rules(zeros(), [1])
    rules.commit(0)
    assert rules.forced(9) == [1, 3]
    rules(zeros(), [1])
    assert rules.forced(9) == [1, 3]
    assert rules.count_legal(rules.forced(9)) == 2
