"""Weights that change between two calls, in every way their owner can change them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import outpace
from outpace.errors import UnsupportedModel

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    tie_word_embeddings=False,
)
PROMPT = torch.arange(1, 10)[None]
GREEDY = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}


def fresh() -> LlamaForCausalLM:
    torch.manual_seed(1)
    model = LlamaForCausalLM(CONFIG).eval()
    for weight in model.parameters():
        weight.data.normal_(std=0.3)
    return model


def others(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    return {name: value.flip(0) for name, value in model.state_dict().items()}


def optimizer_step(model: LlamaForCausalLM) -> None:
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight) * weight.flip(0)
    torch.optim.SGD(model.parameters(), lr=0.5).step()


def in_place_behind_the_counter(model: LlamaForCausalLM) -> None:
    """As adapters are merged."""
    for weight in model.parameters():
        weight.data.add_(weight.data.flip(0))


def one_number(model: LlamaForCausalLM) -> None:
    model.lm_head.weight.data[5, 3] += 1e4


def another_tensor(model: LlamaForCausalLM) -> None:
    projection = model.model.layers[0].mlp.down_proj.weight
    projection.data = projection.data.flip(0).clone()


def numbers_change_places(model: LlamaForCausalLM) -> None:
    model.lm_head.weight.data.copy_(model.lm_head.weight.data.flip(0))


def signs_of_a_column(model: LlamaForCausalLM) -> None:
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.data[:, 1::2].neg_()


CHANGES: dict[str, Callable[[LlamaForCausalLM], object]] = {
    "optimizer": optimizer_step,
    "load_state_dict": lambda model: model.load_state_dict(others(model)),
    "load_state_dict, assigned": lambda model: model.load_state_dict(others(model), assign=True),
    "data in place": in_place_behind_the_counter,
    "one number": one_number,
    "another tensor": another_tensor,
    "places": numbers_change_places,
    "signs": signs_of_a_column,
}


@pytest.mark.parametrize("name", CHANGES)
def test_text_follows_the_weights(name: str) -> None:
    model = fresh()
    fast = outpace.accelerate(model, None)
    before = fast.generate(PROMPT, **GREEDY)
    assert torch.equal(before, model.generate(PROMPT, **GREEDY))
    CHANGES[name](model)
    after = model.generate(PROMPT, **GREEDY)
    assert not torch.equal(before, after), "a change that changes nothing proves nothing"
    assert torch.equal(fast.generate(PROMPT, **GREEDY), after)


def test_copies_of_weights_that_are_gone_are_given_back() -> None:
    model = fresh()
    fast = outpace.accelerate(model, None)
    held = []
    for _ in range(3):
        fast.generate(PROMPT, **GREEDY)
        held.append(fast._parts.target.weight_bytes)
        model.load_state_dict(others(model), assign=True)
    assert held[0] == held[1] == held[2]


def test_a_head_of_another_size_is_refused() -> None:
    model = fresh()
    fast = outpace.accelerate(model, None)
    model.resize_token_embeddings(80, mean_resizing=False)
    with pytest.raises(UnsupportedModel, match="64 rows and has 80 now"):
        fast.generate(PROMPT, **GREEDY)


def test_a_quantised_head_is_refused_by_name() -> None:
    model = fresh()
    model.lm_head = torch.nn.Identity()
    with pytest.raises(UnsupportedModel, match="no plain weight"):
        outpace.accelerate(model, None)
