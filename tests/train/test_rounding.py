"""Weights in fewer bits for as long as one looks."""

from __future__ import annotations

import pytest
import torch

from outpace.train.rounding import SAVED_AS, rounded, stored_weights


@pytest.mark.parametrize("name", list(SAVED_AS))
def test_rounded_within_and_as_they_were_behind(name: str) -> None:
    module = torch.nn.Linear(5, 3)
    before = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    stored = stored_weights(module, SAVED_AS[name])
    with pytest.raises(KeyboardInterrupt), rounded(module, SAVED_AS[name]):
        for key, tensor in module.state_dict().items():
            assert torch.equal(tensor, stored[key].float())
            assert torch.equal(tensor, before[key]) == (name == "fp32")
        assert torch.is_grad_enabled()
        raise KeyboardInterrupt
    assert all(torch.equal(tensor, before[key]) for key, tensor in module.state_dict().items())
    assert all(tensor.dtype == SAVED_AS[name] for tensor in stored.values())
