"""The law of a row, fast, equals the definition; and tokens follow it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.errors import OutpaceError
from outpace.params import SamplingParams
from outpace.sampling import law as law_module
from outpace.sampling.choose import choose_rows
from outpace.sampling.law import law_rows, log_law
from outpace.sampling.reference import filtered_law, survivors
from outpace.types import Choice

from .chi_square import ALPHA, chi_square_p
from .test_choose_law import LAWS, logits_of, params

EXTREME = [params(1e-310), params(1e-30, 0.5), params(1e-5, 0.9), params(1e4, 0.5, 3), params(1e300, 0.37)]


def definition(row: torch.Tensor, kind: SamplingParams) -> np.ndarray:
    law = np.zeros(row.numel())
    for token, chance in filtered_law(row.tolist(), kind).items():
        law[token] = chance
    return law


def check(row: torch.Tensor, kind: SamplingParams) -> None:
    """Equal to the definition to 1e-12, and zero for exactly the same tokens."""
    found, expected = law_rows(row[None], [Choice(kind, 0, 0)]), definition(row, kind)
    assert not found.errors
    assert np.abs(found.rows[0] - expected).max() < 1e-12
    assert np.array_equal(found.rows[0] > 0, expected > 0)


@pytest.mark.parametrize("kind", LAWS + EXTREME)
@pytest.mark.parametrize("size", [1, 2, 14, 600, 3000])
def test_equals_the_definition(size: int, kind: SamplingParams) -> None:
    for seed in range(3):
        check(logits_of(size, seed), kind)
        check(logits_of(size, seed).round(), kind)  # ties everywhere


@given(
    values=st.lists(st.sampled_from([-math.inf, -3.0, -1.0, 0.0, 0.5, 0.6931472, 2.0]), min_size=1, max_size=12),
    temperature=st.sampled_from([0.25, 0.5, 1.0, 3.0]),
    top_k=st.integers(-1, 13),
    top_p=st.sampled_from([1e-9, 0.25, 0.5, 0.75, 0.9, 1 - 1e-12, 1.0]),
    min_p=st.sampled_from([0.0, 1e-9, 0.25, 0.5, 1.0]),
)
@settings(max_examples=400, deadline=None, derandomize=True)
def test_equals_the_definition_at_every_edge(
    values: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    if max(values) > -math.inf:
        check(torch.tensor(values), params(temperature, top_p, top_k, min_p))


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.999])
def test_a_large_flat_row(top_p: float) -> None:
    """The nucleus holds thousands of tokens, and of equal ones the first."""
    row = logits_of(20_000, 5) * 0.2
    check(row, params(top_p=top_p))
    check(torch.zeros(20_000), params(top_p=top_p))


@pytest.mark.parametrize("top_p", [0.5, 0.7, 0.9])
def test_a_large_row_with_a_heavy_tail(top_p: float) -> None:
    """Weights 1 / rank: every round of narrowing drops as much as the one before, so what was dropped has to count."""
    row = -torch.arange(1, 40_001).log()
    check(row[torch.randperm(row.numel(), generator=torch.Generator().manual_seed(2))], params(top_p=top_p))


def test_edges_closer_than_rounding_are_left_to_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def spy(logits: Sequence[float], kind: SamplingParams) -> dict[int, float]:
        asked.append(len(logits))
        return survivors(logits, kind)

    monkeypatch.setattr(law_module, "survivors", spy)
    check(torch.tensor([math.log(p) for p in (0.5, 0.25, 0.125, 0.125)]), params(top_p=0.75))
    assert asked == [4]
    check(torch.tensor([math.log(p) for p in (0.5, 0.25, 0.125, 0.125)]), params(top_p=0.76))
    check(logits_of(3000, 1), params(top_p=0.9))
    assert asked == [4]


@pytest.mark.parametrize("kind", [params(0.01), params(0.01, 0.9), params(0.5, 0.999, 30), params(1.0, min_p=0.1)])
def test_log_probabilities_do_not_end_where_probabilities_do(kind: SamplingParams) -> None:
    """At T = 0.01 most probabilities are too small for a float; their logarithms are not."""
    row = logits_of(60, 5)
    logs = log_law(row.numpy(), Choice(kind, 0, 0))
    kept = survivors(row.tolist(), kind)
    total = math.log(math.fsum(math.exp(s) for s in kept.values()))
    expected = [kept[token] - total if token in kept else -math.inf for token in range(60)]
    assert np.allclose(logs, expected, rtol=1e-12, atol=1e-12)
    if kind.top_p == 1 and kind.temperature == 0.01:
        assert logs.min() < -745 and np.isfinite(logs).all()


def test_temperature_zero_is_a_point_mass_on_the_first_of_the_best() -> None:
    row = torch.tensor([[1.0, 3.0, 3.0, -math.inf]])
    greedy = params(0.0, 0.5, 2, 0.3)
    assert law_rows(row, [Choice(greedy, 0, 0)]).rows.tolist() == [[0, 1, 0, 0]]


def test_rows_that_allow_no_choice_cost_the_others_nothing() -> None:
    row = logits_of(6, 2)
    bad = [torch.full((6,), -math.inf), row.clone(), row.clone()]
    bad[1][3], bad[2][4] = math.nan, math.inf
    logits = torch.stack([row, bad[0], row, bad[1], bad[2]])
    kinds = [params(), params(), params(0.0), params(0.0), params(top_k=2)]
    laws = law_rows(logits, [Choice(kind, 0, 10 + i) for i, kind in enumerate(kinds)])
    assert laws.errors.keys() == {1, 3, 4}
    assert "row 1 (position 11) has no finite value" in laws.errors[1]
    assert "NaN" in laws.errors[3]
    assert "+inf" in laws.errors[4]
    assert not laws.rows[[1, 3, 4]].any()
    assert np.abs(laws.rows[0] - definition(row, params())).max() < 1e-12
    assert laws.rows[2].argmax() == row.argmax() and laws.rows[2].sum() == 1


def ban_the_last(logits: np.ndarray, path: Sequence[int]) -> np.ndarray:
    if path and path[-1] == 5:
        raise OutpaceError("a rule failed")
    changed = logits.copy()
    changed[list(path[-1:])] = -np.inf
    return changed


def test_rules_come_first_with_the_rows_own_path() -> None:
    row = logits_of(6, 3)
    logits = row.expand(4, -1)
    choices = [Choice(params(), 0, 9, rules=ban_the_last, path=path) for path in ((), (2,), (2, 4), (5,))]
    laws = law_rows(logits, choices)
    for index, banned in enumerate([[], [2], [4]]):
        expected = row.clone()
        expected[banned] = -math.inf
        assert np.abs(laws.rows[index] - definition(expected, params())).max() < 1e-12
    assert laws.errors == {3: "a rule failed"}
    assert torch.equal(row, logits_of(6, 3))


def test_strides_and_precisions_do_not_matter() -> None:
    logits = torch.stack([logits_of(50, seed) for seed in range(4)]).bfloat16()
    choices = [Choice(params(0.7, 0.9, 20), 0, i) for i in range(4)]
    expected = law_rows(logits.float(), choices).rows
    assert np.array_equal(law_rows(logits, choices).rows, expected)
    assert np.array_equal(law_rows(logits.t().contiguous().t(), choices).rows, expected)
    assert law_rows(logits[:0], []).rows.shape == (0, 50)


def test_wrong_calls_are_errors() -> None:
    with pytest.raises(ValueError, match="2 choices"):
        law_rows(logits_of(6, 0)[None], [Choice(params(), 0, 0)] * 2)
    with pytest.raises(ValueError, match="resolved"):
        law_rows(logits_of(6, 0)[None], [Choice(SamplingParams(), 0, 0)])


@pytest.mark.parametrize("kind", LAWS[::3])
def test_chosen_tokens_follow_it(kind: SamplingParams) -> None:
    row = logits_of(14, 6)
    tokens = choose_rows(row.expand(3000, -1), [Choice(kind, 7, position) for position in range(3000)])
    law = law_rows(row[None], [Choice(kind, 7, 0)]).rows[0]
    assert chi_square_p(np.bincount(tokens, minlength=14).tolist(), law.tolist()) > ALPHA
