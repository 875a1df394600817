"""Tokens that stand for a whole vocabulary."""

from __future__ import annotations

import pytest
import torch

from outpace.train.vocabulary import some_tokens


def test_common_tokens_and_some_of_the_others() -> None:
    common = torch.tensor([2, 5, 7, 11])
    torch.manual_seed(1)
    ids, bias = some_tokens(common, 20)
    assert ids[:4].tolist() == [2, 5, 7, 11]
    others = ids[4:].tolist()
    assert len(set(others)) == 2
    assert not set(others) & {2, 5, 7, 11}
    assert bias.exp().tolist() == pytest.approx([1, 1, 1, 1, 8, 8])
    drawn = {token for _ in range(100) for token in some_tokens(common, 20).ids[4:].tolist()}
    assert drawn == set(range(20)) - {2, 5, 7, 11}


def test_sums_are_right_in_the_mean() -> None:
    values = torch.rand(500, generator=torch.Generator().manual_seed(3))
    common = torch.arange(0, 500, 10)
    torch.manual_seed(2)
    sums = [float((values[ids] * bias.exp()).sum()) for ids, bias in (some_tokens(common, 500) for _ in range(400))]
    assert sum(sums) / 400 == pytest.approx(float(values.sum()), rel=0.01)


def test_a_vocabulary_that_is_common_throughout() -> None:
    ids, bias = some_tokens(torch.arange(6), 6)
    assert ids.tolist() == [0, 1, 2, 3, 4, 5]
    assert bias.tolist() == [0.0] * 6
