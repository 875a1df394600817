"""Logits processors: what they are given, and that nothing they do harms anything but their own request."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch

from outpace.errors import OutpaceError
from outpace.params import SamplingParams
from outpace.sampling.processors import takes_prompt
from outpace.sampling.rules import LogitsRules
from tests.sampling.rules_world import EOS, MISSING, SIZE, left, rules_of, zeros


def with_processors(*functions: Any, **given: Any) -> LogitsRules:
    return rules_of(SamplingParams(logits_processors=functions, **given), prompt=[3, 4, 5], output=[1, 2])


def test_they_see_prompt_output_and_path_as_lists_of_their_own() -> None:
    seen: list[Any] = []

    def short(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(list(output_ids))
        output_ids.clear()
        return logits

    def long(prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append((list(prompt_ids), list(output_ids)))
        prompt_ids[0] = output_ids[0] = -1
        return logits

    rules = with_processors(short, long)
    path = [6]
    for _ in range(2):
        rules(zeros(), path)
    assert path == [6]
    assert seen == [[1, 2, 6], ([3, 4, 5], [1, 2, 6])] * 2
    rules.commit(6)
    rules(zeros(), [])
    assert seen[4:] == seen[:2]


class Adds:
    def __call__(self, output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits + 1

    def method(self, prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits + len(prompt_ids)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda ids, logits: logits, False),
        (lambda prompt, ids, logits: logits, True),
        (lambda ids, logits, scale=2.0: logits, False),
        (functools.partial(lambda ids, logits, scale: logits, scale=2.0), False),
        (functools.partial(lambda scale, ids, logits: logits, 2.0), False),
        (Adds(), False),
        (Adds().method, True),
        (torch.add, False),  # has no signature
    ],
)
def test_the_number_of_positional_parameters_says_what_they_get(function: Any, expected: bool) -> None:
    assert takes_prompt(function) is expected


def test_they_run_in_order_and_any_callable_is_one() -> None:
    def double(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits * 2

    rules = with_processors(Adds(), double, Adds().method, functools.partial(lambda ids, logits, by: logits - by, by=1))
    assert rules(zeros(), [])[0] == 1 * 2 + 3 - 1


def test_bias_comes_before_them_and_penalties_after() -> None:
    def double(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits * 2

    rules = with_processors(double, logit_bias={1: 5.0}, presence_penalty=0.5)
    assert rules(zeros(), [])[1] == 9.5


@pytest.mark.parametrize("inference", [False, True])
def test_changes_in_place_now_and_later_harm_nobody(inference: bool) -> None:
    kept: list[torch.Tensor] = []

    def in_place(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        assert logits.dtype == torch.float32
        assert not logits.is_inference()
        assert not logits.requires_grad
        logits[0] += 1
        kept.append(logits)
        return logits

    row = zeros()
    rules = with_processors(in_place)
    with torch.inference_mode(inference):
        first = rules(row, [])
        for tensor in kept:
            tensor.fill_(77)
        second = rules(row, [])
    kept[1].fill_(78)
    assert first[0] == second[0] == 1
    assert row.tolist() == [0] * SIZE


def test_our_changes_do_not_reach_a_tensor_they_keep_returning() -> None:
    constant = torch.ones(SIZE)

    rules = with_processors(lambda ids, logits: constant, presence_penalty=1, bad_words=["a"])
    assert rules(zeros(), [])[[1, 4]].tolist() == [0, 1]
    assert constant.tolist() == [1] * SIZE


def test_they_may_use_gradients() -> None:
    def climb(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = logits[:2].clone().requires_grad_()
            (x * x).sum().backward()
        assert x.grad is not None
        return logits.index_add(0, torch.tensor([0, 1]), x.grad)

    row = zeros()
    row[0] = 3
    with torch.inference_mode():
        assert with_processors(climb)(row, [])[0] == 9


def test_results_that_require_gradients_or_have_other_precision_are_taken() -> None:
    parameter = torch.nn.Parameter(torch.full((SIZE,), 2.5))
    with torch.inference_mode():
        assert with_processors(lambda ids, logits: parameter)(zeros(), [])[0] == 2.5
    assert with_processors(lambda ids, logits: logits.double() + 0.1)(zeros(), [])[0] == torch.tensor(0.1).item()
    assert with_processors(lambda ids, logits: logits.bfloat16() + 0.5)(zeros(), [])[0] == 0.5


def test_they_cannot_bring_back_what_is_banned() -> None:
    rules = with_processors(lambda ids, logits: torch.ones(SIZE), bad_words=["a"], min_tokens=3)
    assert left(rules(zeros(), [])) == [token for token in range(SIZE) if token not in {0, 3, EOS, 8, *MISSING}]


def explode(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    raise KeyError("lost")


def poison(value: float) -> Any:
    def poisoned(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits[3] = value
        return logits

    return poisoned


@pytest.mark.parametrize(
    ("function", "name", "problem"),
    [
        (explode, "explode", "KeyError: 'lost'"),
        (poison(math.nan), "poisoned", "have NaN"),
        (poison(math.inf), "poisoned", r"have \+inf"),
        (lambda ids, logits: logits.double() + 1e300, "<lambda>", r"have \+inf"),
        (lambda ids, logits: None, "<lambda>", "returned NoneType"),
        (lambda ids, logits: logits.numpy(), "<lambda>", "returned ndarray"),
        (lambda ids, logits: logits[:-1], "<lambda>", rf"shape \[{SIZE - 1}\].* shape \[{SIZE}\]"),
        (lambda ids, logits: logits[None], "<lambda>", rf"shape \[1, {SIZE}\]"),
        (lambda ids, logits: logits[0], "<lambda>", r"shape \[\]"),
        (lambda ids, logits: logits > 0, "<lambda>", "torch.bool"),
        (lambda ids, logits: logits.int(), "<lambda>", "torch.int32"),
        (lambda ids, logits: logits.to("meta"), "<lambda>", "NotImplementedError"),
        (lambda ids, logits: (logits + 1).to_sparse(), "<lambda>", "TypeError"),
    ],
)
def test_failures_name_the_processor_the_error_and_the_position(function: Any, name: str, problem: str) -> None:
    rules = with_processors(function)
    with pytest.raises(OutpaceError, match=rf"{name} failed at position 7: .*{problem}") as caught:
        rules(zeros(), [6, 6])
    if function is explode:
        assert isinstance(caught.value.__cause__, KeyError)


def test_interrupts_are_not_errors_of_the_processor() -> None:
    def interrupted(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        with_processors(interrupted)(zeros(), [])


def test_a_processor_that_bans_everything_is_named() -> None:
    rules = with_processors(lambda ids, logits: torch.full_like(logits, -math.inf))
    with pytest.raises(OutpaceError, match=r"position 5 .* after .*logits_processors"):
        rules(zeros(), [])
