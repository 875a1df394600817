"""Mean acceptance lengths and rates by position, by hand."""

from __future__ import annotations

import pytest
import torch

from outpace.train.acceptance import Chains, Tally, chains_of_rows


def tally(agrees: list[int], alpha: list[float], begins: list[int], chain: int) -> Tally:
    follows = torch.ones(len(agrees), dtype=torch.bool)
    follows[begins] = False
    found = Tally(chain)
    found.add(chains_of_rows(torch.tensor(agrees).bool(), torch.tensor(alpha), follows, chain))
    return found


def test_one_text_by_hand() -> None:
    # Rows   0 1 2 3 4 5; the drafter is right at 0, 1, 3 and 5.
    found = tally([1, 1, 0, 1, 0, 1], [0.5] * 6, [0], 2)
    # Steps: behind row 0 both kept, next is row 3: one kept of two, next is row 5: one kept of the one there is.
    assert (found.steps, found.drafted, found.kept) == (3, 5, 4)
    result = found.result()
    assert result.greedy_length == pytest.approx(1 + 4 / 3)
    assert result.rate == pytest.approx(4 / 5)
    # Position 1: right at 4 of 6 rows. Position 2: of those with a next row, 0 (row 1 right), 1 and 3: one of three.
    assert result.greedy == pytest.approx((4 / 6, 1 / 3))
    assert result.rows == 6


def test_drawn_tokens_by_hand() -> None:
    result = tally([0, 0, 0], [0.5, 0.25, 1.0], [0], 2).result()
    # Token 1: (.5 + .25 + 1) / 3. Token 2 of chains 0 and 1: .5 * .25 and .25 * 1 of the .5 and .25 that reach it.
    assert result.sampled == pytest.approx((1.75 / 3, (0.125 + 0.25) / 0.75))
    assert result.sampled_length == pytest.approx(1 + (1.75 + 0.375) / 3)


def test_chains_do_not_leave_their_text() -> None:
    found = tally([1, 1, 1, 1], [1.0] * 4, [0, 2], 3)
    # Two texts of two rows: a step drafts the two tokens that are left, not three.
    assert (found.steps, found.drafted, found.kept) == (2, 4, 4)
    assert found.result().greedy == (1.0, 1.0, 0.0)
    assert found.result().rate == 1.0


def test_texts_add_up() -> None:
    together = tally([1, 0, 1, 1, 0], [0.5, 0.1, 0.2, 0.9, 0.3], [0, 3], 3)
    apart = tally([1, 0, 1], [0.5, 0.1, 0.2], [0], 3)
    follows = torch.tensor([False, True])
    apart.add(chains_of_rows(torch.tensor([True, False]), torch.tensor([0.9, 0.3]), follows, 3))
    one, other = together.result(), apart.result()
    assert one.greedy == other.greedy
    assert one.sampled == pytest.approx(other.sampled)
    assert (one.rows, one.greedy_length, one.rate) == (other.rows, other.greedy_length, other.rate)


def test_a_drafter_whose_chains_are_its_own() -> None:
    """Rows that were drafted from different beginnings need not agree with each other."""
    agrees = torch.tensor([[True, False], [False, False], [True, True]])
    found = Tally(2)
    found.add(Chains(agrees, agrees.float(), torch.ones_like(agrees), torch.tensor([False, True, True])))
    # Behind row 0 one is kept, next is row 2: both.
    assert (found.steps, found.drafted, found.kept) == (2, 4, 3)


def test_nothing_is_no_error() -> None:
    result = Tally(2).result()
    assert (result.rows, result.greedy_length, result.sampled_length, result.rate) == (0, 1.0, 1.0, 0.0)
