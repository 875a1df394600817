"""`StructuredOutputs`: exactly one field, of the right type, held so that nobody can change it."""

from __future__ import annotations

import pickle
from types import MappingProxyType
from typing import Any

import pytest

from outpace.errors import InvalidParameter
from outpace.structured import StructuredOutputs

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, None, True, 1.5, "é"]}}}


@pytest.mark.parametrize(
    ("name", "written", "held"),
    [
        ("json", SCHEMA, SCHEMA),
        ("json", MappingProxyType(SCHEMA), SCHEMA),
        ("json", {}, {}),
        ("json", ' {"b": 1, "a": 2}', ' {"b": 1, "a": 2}'),
        ("json", "true", "true"),
        ("json", "false", "false"),
        ("regex", " ", " "),
        ("choice", ["b", "a"], ("b", "a")),
        ("choice", ("only",), ("only",)),
        ("grammar", "start: /a/", "start: /a/"),
        ("json_object", True, True),
    ],
)
def test_what_is_possible(name: str, written: Any, held: Any) -> None:
    made = StructuredOutputs(**{name: written})
    assert getattr(made, name) == held
    assert StructuredOutputs.parse({name: written, "json_object": name == "json_object"}).regex == made.regex
    assert StructuredOutputs.parse(made) is made
    assert pickle.loads(pickle.dumps(made)) == made
    assert hash(pickle.loads(pickle.dumps(made))) == hash(made)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        *[("json", value, "a JSON schema") for value in (5, True, ["a"], b"{}", "", "[1]", "5", "null", '"a"')],
        *[
            ("json", value, "is not JSON")
            for value in ("{", "{'a': 1}", '{"a": NaN}', '{"a": Infinity}', "[" * 100_000)
        ],
        *[("json", {"a": value}, "cannot be written as JSON") for value in ({1}, float("nan"), b"a", object)],
        *[("regex", value, "regular expression") for value in ("", 5, ["a"], "\ud800")],
        *[("grammar", value, "text of a grammar") for value in ("", 5, {"a": 1}, "\ud800")],
        *[("choice", value, "a list of one or more different texts") for value in ([], "ab", 5, {"a": 1}, b"ab")],
        *[("choice", value, "a list of one or more different texts") for value in ([""], ["a", 5], [None], ["\udc00"])],
        ("choice", ["a", "b", "a"], "'a' twice"),
        *[("json_object", value, "True or False") for value in (1, "true", {})],
    ],
)
def test_what_is_impossible_is_named(name: str, value: Any, words: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        StructuredOutputs(**{name: value})
    message = str(caught.value)
    assert message.startswith(f"structured_outputs.{name}")
    assert words in message
    assert len(message) < 500
    assert len(message.splitlines()) == 1


def test_a_schema_that_contains_itself_is_refused() -> None:
    schema: dict[str, Any] = {}
    schema["again"] = schema
    with pytest.raises(InvalidParameter, match="cannot be written as JSON"):
        StructuredOutputs(json=schema)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "nothing"),
        ({"json_object": False}, "nothing"),
        ({"regex": None}, "nothing"),
        ({"regex": "a", "choice": ["a"]}, "regex and choice"),
        ({"json": {}, "json_object": True}, "json and json_object"),
    ],
)
def test_exactly_one_is_wanted(given: dict[str, Any], words: str) -> None:
    for make in (lambda: StructuredOutputs(**given), lambda: StructuredOutputs.parse(given)):
        with pytest.raises(InvalidParameter, match=f"{words} is not possible: give exactly one of json, regex"):
            make()


def test_an_unknown_field_is_refused_with_the_closest() -> None:
    with pytest.raises(InvalidParameter, match="has no 'choices'; did you mean choice\\?"):
        StructuredOutputs.parse({"choices": ["a"]})
    with pytest.raises(InvalidParameter, match="structured_outputs='a' is not possible"):
        StructuredOutputs.parse("a")  # type: ignore[arg-type]
