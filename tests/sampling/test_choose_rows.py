"""`choose_rows` gives the reference's token, whatever surrounds the row."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.errors import OutpaceError
from outpace.params import SamplingParams
from outpace.sampling import choose, race
from outpace.sampling.choose import choose_rows
from outpace.sampling.noise import gumbel, noise_bits, noise_key
from outpace.sampling.reference import choose_reference
from outpace.types import Choice, Purpose

INF = math.inf
TEMPERATURES = (0.0, 1e-6, 0.3, 0.7, 1.0, 1.5, 10.0)
TOP_P = (1.0, 0.999999, 0.95, 0.9, 0.5, 0.1, 1e-6)
TOP_K = (0, -1, 1, 2, 5, 50, 999)
MIN_P = (0.0, 1e-9, 0.05, 0.5, 1.0)


def params(temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> SamplingParams:
    return SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)


def choose_one(row: Sequence[float] | np.ndarray, choice: Choice) -> int:
    return choose_rows(torch.tensor(np.asarray(row, dtype=np.float32))[None], [choice])[0]


def as_float32(row: Sequence[float] | np.ndarray) -> list[float]:
    return [float(z) for z in np.asarray(row, dtype=np.float32)]


def language_like(rng: np.random.Generator, size: int) -> np.ndarray:
    """A wide body and a few tokens far above it."""
    row = rng.standard_normal(size) * 3
    row[rng.integers(size, size=20)] += np.linspace(18, 6, 20)
    return row.astype(np.float32)


def random_row(rng: np.random.Generator, size: int) -> np.ndarray:
    """Rows of every scale; many of them with ties or with masked tokens."""
    row = rng.standard_normal(size) * rng.choice([0, 1e-3, 0.5, 2, 5, 30, 1e4])
    if rng.random() < 0.4:
        row = np.round(row)
    if rng.random() < 0.3:
        row[rng.random(size) < 0.4] = -INF
    if not np.isfinite(row).any():
        row[rng.integers(size)] = -7.0
    return row.astype(np.float32)


@pytest.fixture
def fallbacks(monkeypatch: pytest.MonkeyPatch) -> list[Choice]:
    """The choices that the fast way left to the reference."""
    seen: list[Choice] = []

    def spy(logits: Sequence[float], choice: Choice) -> int:
        seen.append(choice)
        return choose_reference(logits, choice)

    monkeypatch.setattr(choose, "choose_reference", spy)
    return seen


@pytest.mark.parametrize("size", [1, 2, 3, 7, 40])
def test_equals_the_reference_for_every_combination_of_parameters(size: int) -> None:
    rng = np.random.default_rng(size)
    for position, combination in enumerate(itertools.product(TEMPERATURES, TOP_P, TOP_K, MIN_P)):
        row = random_row(rng, size)
        choice = Choice(params(*combination), seed=size, position=position)
        assert choose_one(row, choice) == choose_reference(row.tolist(), choice), (row, choice)


@pytest.mark.parametrize(("size", "cases"), [(1000, 600), (50_000, 10)])
def test_equals_the_reference_on_larger_vocabularies(size: int, cases: int) -> None:
    rng = np.random.default_rng(size)
    combinations = list(itertools.product(TEMPERATURES[1:], TOP_P, TOP_K, MIN_P))
    for position in range(cases):
        row = language_like(rng, size) if position % 2 else random_row(rng, size)
        choice = Choice(params(*combinations[rng.integers(len(combinations))]), seed=position, position=position)
        assert choose_one(row, choice) == choose_reference(row.tolist(), choice), choice


@pytest.mark.parametrize("top_p", [0.999, 0.9, 0.3, 0.02])
def test_nucleus_alone_equals_the_reference_on_flat_and_peaked_rows(top_p: float, fallbacks: list[Choice]) -> None:
    rng = np.random.default_rng(3)
    rows = [rng.standard_normal(1500) * 0.1, np.round(rng.standard_normal(1500)), language_like(rng, 1500)]
    for row, seed in itertools.product(rows, range(20)):
        choice = Choice(params(top_p=top_p), seed=seed, position=9)
        assert choose_one(row, choice) == choose_reference(as_float32(row), choice)
    assert len(fallbacks) <= 2


def test_a_heavy_tail_is_narrowed_down_to_no_less_than_the_nucleus() -> None:
    """Weights 1 / rank: every round of narrowing drops as much as the one before, so what was dropped has to count."""
    row = np.random.default_rng(1).permutation(-np.log(np.arange(1, 40_001)))
    for position in (7, 8, 12):  # where the winner is in the tail of the nucleus
        choice = Choice(params(top_p=0.7), seed=1, position=position)
        assert choose_one(row, choice) == choose_reference(as_float32(row), choice)


@settings(max_examples=250, deadline=None, database=None, derandomize=True)
@given(
    row=st.lists(
        st.one_of(
            st.floats(-50, 50, width=32),
            st.floats(allow_nan=False, allow_infinity=False, width=32, allow_subnormal=False),
            st.sampled_from([-INF, -1.0, 0.0, -0.0, 1.0, 1e30, -1e30]),
        ),
        min_size=1,
        max_size=40,
    ).filter(lambda row: max(row) > -INF),
    temperature=st.one_of(st.sampled_from(TEMPERATURES), st.floats(1e-300, 1e300)),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(-1, 45),
    min_p=st.floats(0, 1),
    seed=st.integers(-(2**63), 2**64 - 1),
    position=st.integers(0, 2**20),
    number=st.integers(0, 100),
)
def test_equals_the_reference_on_anything(
    row: list[float],
    temperature: float,
    top_p: float,
    top_k: int,
    min_p: float,
    seed: int,
    position: int,
    number: int,
) -> None:
    choice = Choice(params(temperature, top_p, top_k, min_p), seed, position, number)
    assert choose_one(row, choice) == choose_reference(as_float32(row), choice)


@pytest.mark.parametrize("lead", [-15.0, -60.0])
def test_token_whose_32_bits_are_zero(lead: float, fallbacks: list[Choice], monkeypatch: pytest.MonkeyPatch) -> None:
    # Found by search: its noise is within a billionth of the largest possible, and the first 32 bits cannot say so.
    position, token = 10_118, 64_905
    assert noise_bits(noise_key(0, 0, position, Purpose.CHOOSE), token) >> 20 == 0
    row = np.zeros(65_536, np.float32)
    row[token] = lead
    choice = Choice(params(), seed=0, position=position)
    expected = choose_reference(row.tolist(), choice)
    scored: list[int] = []
    monkeypatch.setattr(race, "gumbel", lambda key, token: scored.append(token) or gumbel(key, token))
    assert choose_one(row, choice) == expected
    assert token in scored and len(scored) < 20 and not fallbacks


def test_token_with_zero_bits_wins_where_it_should() -> None:
    position, token = 10_118, 64_905
    row = np.full(token + 2, -INF, np.float32)
    row[[0, token]] = 0.0, -15.0
    assert choose_one(row, Choice(params(), seed=0, position=position)) == token
    row[token] = -60.0
    assert choose_one(row, Choice(params(), seed=0, position=position)) == 0
    row[0] = -INF
    assert choose_one(row, Choice(params(), seed=0, position=position)) == token


def test_an_edge_too_close_to_call_goes_to_the_reference(fallbacks: list[Choice]) -> None:
    # Two equal tokens and top_p = 0.5: the mass before the second is exactly the goal, so it is outside.
    outcomes = {choose_one([0.0, 0.0], Choice(params(top_p=0.5), seed, 0)) for seed in range(50)}
    assert outcomes == {0}
    assert 10 < len(fallbacks) < 40
    fallbacks.clear()
    assert {choose_one([0.0, 0.0], Choice(params(top_p=0.5001), seed, 0)) for seed in range(50)} == {0, 1}
    assert not fallbacks


def test_the_reference_is_seldom_needed(fallbacks: list[Choice]) -> None:
    rng = np.random.default_rng(0)
    rows = [language_like(rng, 2000) for _ in range(10)]
    kinds = [params(), params(top_p=0.95), params(0.7, 0.9, 50), params(min_p=0.05), params(1.3, 0.99, 0, 0.001)]
    for row, kind, position in itertools.product(rows, kinds, range(40)):
        choose_one(row, Choice(kind, seed=1, position=position))
    assert len(fallbacks) <= 2  # of 2,000; about one in 50,000 is expected


def test_greedy_takes_the_first_of_the_largest() -> None:
    greedy = Choice(params(0.0), seed=0, position=0)
    assert choose_one([1.0, 3.0, 3.0, 2.0], greedy) == 1
    assert choose_one([-INF, -0.0, 0.0, -INF], greedy) == 1
    row = torch.zeros(152_064)
    row[[70_001, 151_000, 9_999]] = 1.0
    assert choose_rows(row[None], [greedy]) == [9_999]


@pytest.mark.parametrize(
    ("kept", "kind"),
    [
        ({1, 3, 4}, params(top_k=3)),  # 2, then the ties at 1 with the lowest ids
        ({3, 1}, params(top_k=2)),
        ({3}, params(top_k=1)),
        ({0, 1, 2, 3, 4, 5}, params(top_k=6)),
        ({0, 1, 2, 3, 4, 5}, params(top_k=-1)),
        ({1, 3, 4, 5}, params(min_p=0.36)),  # exp(-1) = 0.368
        ({3}, params(min_p=0.37)),
        ({3}, params(min_p=1.0)),
        ({3}, params(top_p=0.43)),  # running masses: 0.4369, 0.5977, 0.7584, 0.9191, 0.9782, 1
        ({3, 1}, params(top_p=0.45)),
        ({1, 3, 4, 5}, params(top_p=0.91)),
        ({1, 3, 4, 5, 2}, params(top_p=0.92)),
        ({3, 1}, params(top_k=2, top_p=0.9)),  # renormalised over two: 0.731, 0.269
        ({3}, params(top_k=2, top_p=0.7)),
        ({3}, params(0.3, top_p=0.85)),  # temperature first: 0.902 for the best
        ({1, 3, 4}, params(min_p=0.36, top_k=3)),
        ({3}, params(1e-6)),
    ],
)
def test_exactly_the_surviving_tokens_are_chosen(kept: set[int], kind: SamplingParams) -> None:
    row = [-1.0, 1.0, 0.0, 2.0, 1.0, 1.0, -INF]
    chosen = {choose_one(row, Choice(kind, seed, position=3)) for seed in range(600)}
    assert chosen == kept


def test_min_p_edge_is_drawn_between_neighbouring_floats() -> None:
    under = np.float32(math.log(0.5))  # rounds down, so this token falls short of min_p = 0.5 by 2e-9
    over = np.nextafter(under, np.float32(0))
    assert float(under) < math.log(0.5) < float(over)
    chosen = {choose_one([0.0, under, over], Choice(params(min_p=0.5), seed, position=0)) for seed in range(200)}
    assert chosen == {0, 2}


def test_top_k_keeps_exactly_k_among_thousands_of_ties() -> None:
    row = np.zeros(20_000, np.float32)
    row[[19_999, 12_345]] = 0.5
    chosen = {choose_one(row, Choice(params(top_k=6), seed, position=0)) for seed in range(300)}
    assert chosen == {19_999, 12_345, 0, 1, 2, 3}


MIXED = [params(0.0), params(), params(top_p=0.95), params(0.7, 0.9, 50), params(1.2, min_p=0.05), params(1e-6, 0.5)]


def mixed_batch(size: int, rows: int) -> tuple[torch.Tensor, list[Choice]]:
    rng = np.random.default_rng(size)
    logits = np.stack([language_like(rng, size) if row % 3 else random_row(rng, size) for row in range(rows)])
    choices = [
        Choice(MIXED[row % len(MIXED)], seed=row // 4, position=100 + row, number=row % 2) for row in range(rows)
    ]
    return torch.from_numpy(logits), choices


@pytest.mark.parametrize("size", [33, 4096, 49_152])
def test_rows_are_independent_of_their_neighbours(size: int) -> None:
    logits, choices = mixed_batch(size, 24)
    alone = [choose_rows(logits[i : i + 1], choices[i : i + 1])[0] for i in range(24)]
    assert choose_rows(logits, choices) == alone
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(24).tolist()
        assert choose_rows(logits[order], [choices[i] for i in order]) == [alone[i] for i in order]
    assert choose_rows(logits[5:9], choices[5:9]) == alone[5:9]


@pytest.mark.parametrize("size", [33, 4096, 49_152])
@pytest.mark.parametrize(
    "layout",
    [
        lambda z: torch.cat([z, torch.full((z.shape[0], 7), 99.0)], dim=1)[:, : z.shape[1]],
        lambda z: torch.cat([torch.full((z.shape[0], 3), 99.0), z], dim=1)[:, 3:],
        lambda z: z.t().contiguous().t(),
        lambda z: torch.stack([z, z + 1], dim=2)[:, :, 0],
        lambda z: z.clone().requires_grad_(),
    ],
    ids=["narrowed", "offset", "column-major", "every-other", "with-gradient"],
)
def test_layout_does_not_matter(size: int, layout: Callable[[torch.Tensor], torch.Tensor]) -> None:
    logits, choices = mixed_batch(size, 12)
    assert choose_rows(layout(logits), choices) == choose_rows(logits, choices)


def test_threads_do_not_matter() -> None:
    logits, choices = mixed_batch(49_152, 12)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(choose_rows(logits, choices))
    finally:
        torch.set_num_threads(before)
    assert results[0] == results[1]


def test_logits_are_left_as_they_were() -> None:
    logits, choices = mixed_batch(4096, 12)
    copy = logits.clone()
    choose_rows(logits, choices)
    assert torch.equal(logits, copy)


def test_every_field_of_the_key_counts() -> None:
    row = [0.0] * 1000
    base = Choice(params(), seed=5, position=50, number=0)
    others = [Choice(params(), 6, 50, 0), Choice(params(), 5, 51, 0), Choice(params(), 5, 50, 1)]
    assert choose_one(row, base) == choose_one(row, base)
    assert len({choose_one(row, choice) for choice in [base, *others]}) == 4


def test_choices_are_pinned() -> None:
    row = [math.sin(0.37 * i) * 4 for i in range(500)]
    found = [choose_one(row, Choice(kind, seed=42, position=p)) for kind in MIXED for p in range(3)]
    assert found == [
        *(225, 225, 225),  # greedy
        *(207, 309, 276),  # plain
        *(207, 309, 276),  # top_p
        *(21, 140, 276),  # temperature, top_p and top_k
        *(207, 309, 276),  # temperature and min_p
        *(225, 225, 225),  # nearly greedy
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("row", "found"),
    [
        ([0.0, math.nan, 1.0], "NaN"),
        ([math.nan], "NaN"),
        ([INF, math.nan], "NaN"),
        ([0.0, INF], r"\+inf"),
        ([-INF, -INF], "no finite value"),
    ],
)
def test_damaged_row_is_an_error_that_names_it(row: list[float], found: str, temperature: float) -> None:
    good = [0.0] * len(row)
    logits = torch.tensor([good, row])
    choices = [Choice(params(temperature), seed=0, position=p) for p in (40, 41)]
    with pytest.raises(OutpaceError, match=rf"row 1 \(position 41\) has {found}"):
        choose_rows(logits, choices)


def test_misuse_is_an_error() -> None:
    with pytest.raises(ValueError, match="1 choices for logits of shape"):
        choose_rows(torch.zeros(2, 5), [Choice(params(), 0, 0)])
    with pytest.raises(ValueError, match="resolved"):
        choose_rows(torch.zeros(1, 5), [Choice(SamplingParams(), 0, 0)])
    with pytest.raises(ValueError, match="resolved"):
        choose_reference([0.0], Choice(SamplingParams(temperature=1.0), 0, 0))
    assert choose_rows(torch.zeros(0, 5), []) == []
