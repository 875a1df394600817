"""What a grammar may cost, and that nobody pays for what others looked at."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from outpace.errors import InvalidParameter, OutpaceError
from outpace.models.load import LoadedFiles
from outpace.protocols import Grammar
from outpace.sampling import grammar_beginning
from outpace.sampling.grammar import GrammarCompiler
from outpace.structured import StructuredOutputs
from tests.sampling.grammars import tiny

MANY_STATES = StructuredOutputs(regex=r"(\w{1,20}[ ,.]?){1,50}")
FEW_STATES = StructuredOutputs(regex=r"(\w{1,8}[ ,.]?){1,20}")


def walk(grammar: Grammar, seed: int, length: int, ahead: int) -> list[int] | str:
    """A random text, or its error. Before each token it looks `ahead`, along other ways, as drafters do."""
    chosen, guessing = random.Random(seed), random.Random(seed + 1)
    tokens: list[int] = []
    try:
        while len(tokens) < length and not grammar.ended:
            _look_ahead(grammar, guessing, ahead)
            tokens.append(chosen.choice(np.flatnonzero(grammar.mask()).tolist()))
            assert grammar.consume(tokens[-1])
    except OutpaceError as error:
        return str(error)
    return tokens


def _look_ahead(grammar: Grammar, guessing: random.Random, steps: int) -> None:
    moved = 0
    try:
        while moved < steps and not grammar.ended:
            moved += grammar.consume(guessing.choice(np.flatnonzero(grammar.mask()).tolist()))
    except OutpaceError:
        pass  # where a guess fails, only the guess ends
    grammar.rollback(moved)


@pytest.fixture
def compiler(smollm2_files: LoadedFiles) -> GrammarCompiler:
    tokenizer = smollm2_files.tokenizer
    return GrammarCompiler(tokenizer.to_json(), tokenizer.vocab_size, smollm2_files.eos_ids)


@pytest.mark.smollm2
def test_a_long_text_leaves_the_grammar_as_good_as_new(compiler: GrammarCompiler) -> None:
    short = walk(compiler.compile(MANY_STATES), seed=7, length=2, ahead=0)
    text = walk(compiler.compile(MANY_STATES), seed=7, length=20, ahead=0)
    assert len(short) == 2 and isinstance(text, list) and len(text) == 20
    assert walk(compiler.compile(MANY_STATES), seed=7, length=2, ahead=0) == short


@pytest.mark.smollm2
@pytest.mark.parametrize("seed", range(4, 7))
@pytest.mark.thinned(3)
def test_looking_ahead_changes_nothing(compiler: GrammarCompiler, smollm2_files: LoadedFiles, seed: int) -> None:
    plain = walk(compiler.compile(FEW_STATES), seed, length=12, ahead=0)
    tokenizer = smollm2_files.tokenizer
    other = GrammarCompiler(tokenizer.to_json(), tokenizer.vocab_size, smollm2_files.eos_ids)
    assert isinstance(plain, list) and walk(other.compile(FEW_STATES), seed, length=12, ahead=8) == plain


@pytest.fixture
def starved(monkeypatch: pytest.MonkeyPatch) -> GrammarCompiler:
    """A compiler whose limits are met by MANY_STATES, and by a matcher alone a little later."""
    monkeypatch.setattr(grammar_beginning, "_STEP_FUEL", 6_000)
    return tiny("byte-level")[1]


def test_a_failure_poisons_nobody(starved: GrammarCompiler) -> None:
    living = starved.compile(MANY_STATES)
    first = living.mask()
    failure = walk(starved.compile(MANY_STATES), seed=1, length=60, ahead=0)
    assert isinstance(failure, str) and "cannot be followed behind" in failure
    assert (living.mask() == first).all() and (starved.compile(MANY_STATES).mask() == first).all()
    assert isinstance(walk(living, seed=1, length=2, ahead=0), list)


def test_a_failure_is_one_of_the_text_and_comes_again(starved: GrammarCompiler) -> None:
    grammar = starved.compile(MANY_STATES)
    failure = walk(grammar, seed=1, length=60, ahead=0)
    for _ in range(2):
        with pytest.raises(OutpaceError) as caught:
            grammar.mask()
        assert str(caught.value) == failure and not grammar.ended
    behind = int(failure.split(" tokens")[0].split()[-1]) if isinstance(failure, str) else 0
    assert behind > 1
    grammar.rollback(1)
    assert grammar.mask().any()
    assert walk(starved.compile(MANY_STATES), seed=1, length=60, ahead=0) == failure


def test_where_a_copy_fails_a_matcher_alone_decides(starved: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    failure = walk(starved.compile(MANY_STATES), seed=1, length=60, ahead=0)
    monkeypatch.setattr(grammar_beginning, "_ALONE", 1_000)
    text = walk(tiny("byte-level")[1].compile(MANY_STATES), seed=1, length=60, ahead=0)
    assert isinstance(failure, str) and isinstance(text, list)


def test_an_ambiguous_grammar_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_beginning, "_OPEN_PARTS_OF_FREE_GRAMMARS", 150)  # the work grows with its third power
    tokenizer, compiler, _, _ = tiny("byte-level")
    grammar = compiler.compile(StructuredOutputs(grammar='start: x\nx: x x x | "a"'))
    with pytest.raises(OutpaceError, match=r"more than 150 parts .* read in one way"):
        for _ in range(1_000):
            assert grammar.consume(tokenizer.vocab["a"])


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def properties(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{number}": {} for number in range(count)}}


DOUBLED = "start: A0\n" + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(20)) + "\nA20: /a?/"
ALTERNATIVES = "\n".join(
    ["start: " + " | ".join(f"r{i}" for i in range(1200)), *(f'r{i}: "w" "x"*' for i in range(1200))]
)
ALL_OF = {"allOf": [{"type": "string", "pattern": f"a.{{{count}}}b"} for count in range(13)]}

TOO_LARGE = {
    "schema": ({"json": properties(10_000)}, "characters, at most 65536 are possible: use a smaller schema"),
    "schema text": ({"json": json.dumps({"description": "a" * 70_000})}, "at most 65536"),
    "optional properties": ({"json": properties(4_000)}, "4000 properties in one object, at most 1000"),
    "depth": ({"json": nested(128)}, "nested too deeply: at most 127"),
    "greater depth": ({"json": nested(450)}, "nested too deeply: at most 127"),
    "merged properties": ({"json": {"allOf": [properties(501), properties(500)]}}, "1001 properties in one object"),
    "steps": ({"json": {"type": "integer", "multipleOf": 20_011}}, "it has 20011 as multipleOf"),
    "patterns": ({"json": {"items": [{"pattern": "a?" * 201}] * 2}}, "402 repetitions"),
    "pattern of names": ({"json": {"patternProperties": {"a?" * 401: {}}}}, "401 repetitions"),
    "patterns of all": ({"json": ALL_OF}, "13 patterns below one allOf, at most 12"),
    "regex": ({"regex": "a" * 16_385}, "16385 characters, at most 16384 are possible: use a shorter expression"),
    "repetitions": ({"regex": "a?" * 401}, "401 repetitions .* repeat a group"),
    "choices": ({"choice": [str(number) for number in range(10_001)]}, "10001 texts, at most 10000"),
    "choice": ({"choice": ["a" * 100_000]}, "100000 characters in one text, at most 10000"),
    "all choices": ({"choice": ["a" * 9_000 + str(number) for number in range(12)]}, "in all, at most 100000"),
    "grammar": ({"grammar": "start: " + '"a" ' * 20_000}, "80007 characters, at most 50000"),
    "doubled": ({"grammar": DOUBLED}, "1048576 repetitions"),
    "literal": ({"grammar": f"start: /{'a?' * 401}/"}, "401 repetitions"),
    "gbnf": ({"grammar": 'root ::= "a" ' + "[a-z]? " * 7_300}, "characters, at most 50000"),
    "alternatives": ({"grammar": ALTERNATIVES}, "more than 700 parts of it are open at one place"),
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_what_is_too_large_is_refused_before_it_is_compiled(name: str) -> None:
    wanted, reason = TOO_LARGE[name]
    _, compiler, _, _ = tiny("byte-level")
    with pytest.raises(InvalidParameter, match=reason) as caught:
        compiler.compile(StructuredOutputs(**wanted))
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize("depth", [900, 5_000, 100_000])
def test_any_depth_is_refused_by_name(depth: int) -> None:
    _, compiler, _, _ = tiny("byte-level")
    with pytest.raises(InvalidParameter, match=r"deep|recursion"):
        compiler.compile(StructuredOutputs(json=nested(depth)))
    with pytest.raises(InvalidParameter, match=r"deep|recursion"):
        compiler.compile(StructuredOutputs(json='{"items":' * depth + "{}" + "}" * depth))


LARGE = {
    "properties": {"json": properties(1_000)},
    "required": {"json": {**properties(1_000), "required": [f"p{number}" for number in range(1_000)]}},
    "enum": {"json": {"enum": [f"value {number}" for number in range(4_000)]}},
    "depth": {"json": nested(100)},
    "choices": {"choice": [f"text {number}" for number in range(9_000)]},
    "choice": {"choice": ["ab " * 3_333]},
    "words": {"regex": "|".join(f"word{number}" for number in range(1_500))},
    "repetitions": {"regex": "a?" * 400},
    "states": {"regex": MANY_STATES.regex},
    "rules": {
        "grammar": "\n".join(
            ["start: (" + " | ".join(f"r{i}" for i in range(200)) + ")+"] + [f'r{i}: "w{i}"' for i in range(200)]
        )
    },
}


@pytest.mark.parametrize("name", LARGE)
def test_what_is_large_is_followed(name: str) -> None:
    _, compiler, _, _ = tiny("byte-level")
    grammar = compiler.compile(StructuredOutputs(**LARGE[name]))
    text = walk(grammar, seed=3, length=12, ahead=2)
    assert isinstance(text, list) and grammar.rollback(len(text)) is None
    assert grammar.count_legal(text) == len(text)


def test_forced_text_is_cut_to_what_is_wanted() -> None:
    tokenizer, compiler, _, _ = tiny("byte-level")
    grammar = compiler.compile(StructuredOutputs(choice=["hello " * 1_500]))
    tokens = tokenizer.encode("hello " * 1_500)
    assert [grammar.forced(most) for most in (0, 1, 5)] == [[], tokens[:1], tokens[:5]]
    assert grammar.count_legal(tokens[:20]) == 20
