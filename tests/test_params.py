"""Every request parameter: its edges are taken in any spelling and held in one form, the rest is refused by value."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Mapping
from dataclasses import fields, replace
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from outpace import StructuredOutputs
from outpace.checks import shown
from outpace.errors import InvalidParameter
from outpace.params import SamplingDefaults, SamplingParams, SpeculationParams

NAN, INF = float("nan"), float("inf")


def of_two(output_ids: list[int], logits: Any) -> Any:
    return logits


def of_three(prompt_ids: list[int], output_ids: list[int], logits: Any) -> Any:
    return logits


def with_keyword(output_ids: list[int], logits: Any, *, scale: float) -> Any:
    return logits


def with_default(output_ids: list[int], logits: Any, scale: float = 1.0, *, shift: float = 0.0) -> Any:
    return logits


def three_and_default(prompt_ids: list[int], output_ids: list[int], logits: Any, scale: float = 1.0) -> Any:
    return logits


def of_any(*arguments: Any) -> Any:
    return arguments[-1]


class Processor:
    def __call__(self, output_ids: list[int], logits: Any) -> Any:
        return logits


SAME_OBJECT = Processor()
PARTIAL = functools.partial(of_three, [1])

ACCEPTED: dict[str, list[tuple[Any, Any]]] = {
    "n": [(1, 1), (128, 128), (np.int64(3), 3)],
    "temperature": [(None, None), (0, 0.0), (np.float32(0.5), 0.5), (Fraction(1, 4), 0.25), (1e9, 1e9)],
    "top_p": [(None, None), (1, 1.0), (1e-9, 1e-9)],
    "top_k": [(None, None), (-1, -1), (0, 0), (np.int32(40), 40)],
    "min_p": [(None, None), (0, 0.0), (1, 1.0), (np.float64(0.25), 0.25)],
    "seed": [
        (None, None),
        (-1, None),
        (0, 0),
        (-(2**63), -(2**63)),
        (2**64 - 1, 2**64 - 1),
        (np.uint64(2**64 - 1), 2**64 - 1),
    ],
    "presence_penalty": [(-2, -2.0), (2, 2.0), (0.5, 0.5)],
    "frequency_penalty": [(-2, -2.0), (2, 2.0), (np.float32(0.5), 0.5)],
    "repetition_penalty": [(None, None), (0.01, 0.01), (1, 1.0), (100, 100.0)],
    "logit_bias": [
        (None, None),
        ({}, {}),
        ({"42": 1}, {42: 1.0}),
        ({0: -100, np.int64(7): np.float32(100)}, {0: -100.0, 7: 100.0}),
        (MappingProxyType({5: 0}), {5: 0.0}),
    ],
    "allowed_token_ids": [(None, None), ([0], (0,)), (np.array([3, 1]), (3, 1)), (range(2), (0, 1)), ({4}, (4,))],
    "bad_words": [(None, ()), ([], ()), (["a", "b c"], ("a", "b c"))],
    "logits_processors": [
        (None, ()),
        ([], ()),
        ([of_two, of_three], (of_two, of_three)),
        ((SAME_OBJECT, PARTIAL), (SAME_OBJECT, PARTIAL)),
        ([with_default, of_any, three_and_default], (with_default, of_any, three_and_default)),
    ],
    "structured_outputs": [
        (None, None),
        ({"regex": "a+"}, StructuredOutputs(regex="a+")),
        ({"choice": ["a", "b"], "json": None}, StructuredOutputs(choice=("a", "b"))),
        (StructuredOutputs(json_object=True), StructuredOutputs(json_object=True)),
    ],
    "min_tokens": [(0, 0), (np.int64(9), 9)],
    "max_tokens": [(None, None), (1, 1), (np.int64(4), 4)],
    "stop": [(None, ()), ("end", ("end",)), ([], ()), (["a", "a"], ("a", "a")), ("\n", ("\n",))],
    "stop_token_ids": [(None, ()), ([], ()), ([np.int32(7), 0], (7, 0)), (np.array([2]), (2,))],
    "include_stop_str_in_output": [(True, True), (False, False)],
    "ignore_eos": [(True, True), (False, False)],
    "logprobs": [(None, None), (True, 1), (False, None), (-1, -1), (0, 0), (np.int64(20), 20)],
    "prompt_logprobs": [(None, None), (-1, -1), (0, 0), (5, 5)],
    "logprobs_mode": [("raw_logprobs", "raw_logprobs"), ("processed_logprobs", "processed_logprobs")],
    "skip_special_tokens": [(True, True), (False, False)],
    "spaces_between_special_tokens": [(True, True), (False, False)],
    "truncate_prompt_tokens": [(None, None), (-1, -1), (1, 1), (np.int64(100), 100)],
}

NO_COUNT = [1.0, "1", True, NAN, [1]]
NO_NUMBER = ["1", True, NAN, INF, -INF, 1j, [1], 10**400]
NO_BOOLEAN = [None, 0, 1, "true", np.True_]
NO_TEXTS = [[""], ["a", ""], 5, [5], [None], [b"a"], b"a", {"a": 1}, ["\ud800"]]
NO_IDS = [3, "3", ["3"], [-1], [1.0], [True], [None], {3: 1}, b"3", [[1]], np.array(3)]

REFUSED: dict[str, list[Any]] = {
    "n": [*NO_COUNT, None, 0, -1, 129],
    "temperature": [*NO_NUMBER, -0.1],
    "top_p": [*NO_NUMBER, 0, 0.0, -1, 1.01],
    "top_k": [*NO_COUNT, -2],
    "min_p": [*NO_NUMBER, -0.1, 1.1],
    "seed": [*NO_COUNT, 2**64, -(2**63) - 1],
    "presence_penalty": [*NO_NUMBER, None, -2.01, 2.01],
    "frequency_penalty": [*NO_NUMBER, None, -2.01, 2.01],
    "repetition_penalty": [*NO_NUMBER, 0, 0.009, 100.1, -1],
    "logit_bias": [
        *([("42", 1)], "42", 5, {-1: 1}, {"-1": 1}, {"x": 1}, {"4.0": 1}, {" 4": 1}, {"+4": 1}, {"4_2": 1}, {"": 1}),
        *({4.0: 1}, {True: 1}, {None: 1}, {1: 100.1}, {1: -101}, {1: NAN}, {1: INF}, {1: "5"}, {1: None}, {1: True}),
        *({"1": 1, 1: 2}, {"²": 1}, {"٤": 1}, {"9" * 5000: 1}),
    ],
    "allowed_token_ids": [*NO_IDS, [], ()],
    "bad_words": [*NO_TEXTS, "a"],
    "logits_processors": [
        *(of_two, [5], [None], "f", [lambda: 0], [lambda logits: logits], [lambda a, b, c, d: a], [with_keyword]),
        *({of_two: 1}, [lambda *, output_ids, logits: logits]),
    ],
    "structured_outputs": ["json", 5, True, [("regex", "a")]],
    "min_tokens": [*NO_COUNT, None, -1],
    "max_tokens": [*NO_COUNT, 0, -1],
    "stop": NO_TEXTS,
    "stop_token_ids": NO_IDS,
    "include_stop_str_in_output": NO_BOOLEAN,
    "ignore_eos": NO_BOOLEAN,
    "logprobs": [1.0, "1", NAN, [1], -2],
    "prompt_logprobs": [1.0, "1", NAN, [1], -2],
    "logprobs_mode": [None, "raw", "", 5, ["raw_logprobs"], "raw_logits"],
    "skip_special_tokens": NO_BOOLEAN,
    "spaces_between_special_tokens": NO_BOOLEAN,
    "truncate_prompt_tokens": [*NO_COUNT, 0, -2],
}


def pairs(table: Mapping[str, list[Any]]) -> list[Any]:
    return [(name, value) for name, values in table.items() for value in values]


def ways_to_name(value: Any) -> list[str]:
    """How an error may name a value: the whole, or the wrong item, which is the last one in the lists above."""
    ways = [f"={shown(value)} is not possible"]
    if isinstance(value, list) and value:
        ways.append(f" with {shown(value[-1])} is not possible")
    if isinstance(value, dict) and value:
        ways += [f" with {shown(item)} is not possible" for item in (value, next(iter(value)))]
        ways += [f" has token id {key} twice" for key in value if len(value) > 1]
    return ways


def types_within(value: Any) -> set[type]:
    if isinstance(value, tuple):
        return {type(value)}.union(*(types_within(item) for item in value))
    if isinstance(value, dict):
        return {type(value)}.union(*(types_within(item) for pair in value.items() for item in pair))
    return {type(value)}


def test_the_tables_have_every_parameter() -> None:
    names = [item.name for item in fields(SamplingParams)]
    assert list(ACCEPTED) == names
    assert list(REFUSED) == names


@pytest.mark.parametrize(("name", "case"), pairs(ACCEPTED))
def test_what_is_possible_is_held_in_one_form(name: str, case: tuple[Any, Any]) -> None:
    written, held = case
    found = getattr(SamplingParams(**{name: written}), name)
    assert found == held
    assert types_within(found) == types_within(held)  # no numpy number, list or other integer is left


@pytest.mark.parametrize(("name", "value"), pairs(REFUSED))
def test_what_is_impossible_is_refused_with_name_value_and_range(name: str, value: Any) -> None:
    with pytest.raises(InvalidParameter, match=name) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert any(message.startswith(f"{name}{named}") for named in ways_to_name(value))


@pytest.mark.parametrize("name", [name for name in REFUSED if name != "structured_outputs"])
def test_the_range_in_an_error_is_the_one_in_the_docs(name: str) -> None:
    valid = next(item.metadata["valid"] for item in fields(SamplingParams) if item.name == name)
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(**{name: REFUSED[name][0]})
    assert str(caught.value).endswith(f"it must be {valid}")


def test_every_parameter_says_what_people_have_to_know() -> None:
    for item in fields(SamplingParams):
        for key in ("meaning", "valid", "speculation"):
            assert len(item.metadata[key]) > 5, (item.name, key)
        assert bool(item.metadata["unset"]) == (item.default is None), item.name


def test_defaults_stay_as_they_are() -> None:
    params = SamplingParams()
    assert all(getattr(params, item.name) == item.default for item in fields(SamplingParams))


def test_least_and_most_tokens_have_to_agree() -> None:
    assert SamplingParams(min_tokens=3, max_tokens=3).min_tokens == 3
    with pytest.raises(InvalidParameter, match="min_tokens=4 is more than max_tokens=3"):
        SamplingParams(min_tokens=4, max_tokens=3)
    assert SamplingParams(min_tokens=600).resolved(SamplingDefaults(max_tokens=512)).max_tokens == 600
    assert SamplingParams(min_tokens=600).resolved(SamplingDefaults(max_tokens=None)).max_tokens is None


def test_what_the_caller_changes_later_changes_nothing() -> None:
    bias, ids, schema = {1: 1.0}, [1], {"type": "object", "required": ["a"]}
    params = SamplingParams(logit_bias=bias, allowed_token_ids=ids, structured_outputs={"json": schema})
    bias[2], schema["type"] = 5.0, "array"
    ids.append(2)
    schema["required"].append("b")  # type: ignore[attr-defined]
    assert (params.logit_bias, params.allowed_token_ids) == ({1: 1.0}, (1,))
    assert params.structured_outputs is not None
    assert params.structured_outputs.json == {"type": "object", "required": ["a"]}


FULL = SamplingParams(
    n=2, temperature=0.5, logit_bias={"3": 2}, bad_words=["a"], stop="x", logits_processors=[of_two], logprobs=0,
    structured_outputs={"json": {"type": "object"}}, max_tokens=5,
)  # fmt: skip


def test_parameters_can_be_pickled_copied_replaced_and_hashed() -> None:
    for copied in (pickle.loads(pickle.dumps(FULL)), copy.copy(FULL), copy.deepcopy(FULL), replace(FULL)):
        assert copied == FULL
        assert type(copied) is SamplingParams
        assert hash(copied) == hash(FULL)
    assert replace(FULL, n=3) != FULL
    assert replace(FULL, logit_bias={3: 2.5}) != FULL
    assert replace(FULL, n=3).bad_words == ("a",)
    with pytest.raises(InvalidParameter, match="n=0"):
        replace(FULL, n=0)
    with pytest.raises(InvalidParameter, match="best_of=2"):
        replace(FULL, best_of=2)  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        FULL.n = 3  # type: ignore[misc]


def test_a_long_value_is_shortened() -> None:
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(stop_token_ids="7" * 100_000)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("enabled", value) for value in NO_BOOLEAN],
        *[("method", value) for value in ("", 5, ["ngram"])],
        *[("num_speculative_tokens", value) for value in (-1, 65, 1.5, "5", True)],
    ],
)
def test_impossible_speculation_is_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidParameter, match=f"{name}=") as caught:
        SpeculationParams(**{name: value})
    assert repr(value) in str(caught.value)


def test_possible_speculation() -> None:
    params = SpeculationParams(enabled=False, method="ngram", num_speculative_tokens=np.int64(64))  # type: ignore[arg-type]
    assert (params.enabled, params.method, params.num_speculative_tokens) == (False, "ngram", 64)
    assert type(params.num_speculative_tokens) is int
    assert pickle.loads(pickle.dumps(params)) == params
    with pytest.raises(InvalidParameter, match="'k'; known: enabled, method, num_speculative_tokens"):
        SpeculationParams(k=3)  # type: ignore[call-arg]
