"""Texts that a grammar lets through are those asked for, and its answers depend on nothing but the text so far."""

from __future__ import annotations

import json
import random
import re

import numpy as np
import pytest

from outpace.errors import InvalidParameter, OutpaceError
from outpace.models.load import LoadedFiles
from outpace.protocols import Grammar
from outpace.sampling.grammar import GrammarCompiler
from outpace.structured import StructuredOutputs
from tests.models.tiny_tokenizers import metaspace
from tests.sampling.grammars import CASES, MARKED, TINY, compiled, random_text, random_token, tiny


@pytest.fixture(scope="module")
def smollm2_compiler(smollm2_files: LoadedFiles) -> GrammarCompiler:
    tokenizer = smollm2_files.tokenizer
    return GrammarCompiler(tokenizer.to_json(), tokenizer.vocab_size, smollm2_files.eos_ids)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", TINY)
def test_random_walks_end_in_texts_that_were_asked_for(kind: str, name: str) -> None:
    tokenizer, compiler, _, eos = tiny(kind)
    case = CASES[name]
    texts = [random_text(compiler.compile(case.wanted), tokenizer, eos, seed) for seed in range(12)]
    ended = [text for text in texts if text is not None]
    assert len(ended) >= 6
    assert [text for text in ended if not case.fits(text)] == []
    assert len(set(ended)) > 1


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", TINY)
def test_answers_depend_on_the_tokens_consumed_alone(kind: str, name: str) -> None:
    """Forward and back at random, by EOS too; at every place all answers are those of a fresh grammar."""
    _, compiler, size, eos = tiny(kind)
    wanted = CASES[name].wanted
    grammar, tokens, random_source = compiler.compile(wanted), [], random.Random(5)
    for step in range(80):
        again = compiler.compile(wanted)
        assert all(map(again.consume, tokens))
        mask = grammar.mask()
        assert (mask == again.mask()).all()
        assert (grammar.ended, grammar.forced(99)) == (again.ended, again.forced(99))
        if step % 8 == 0:
            assert [grammar.count_legal([index]) for index in range(-1, size + 1)] == [0, *mask.astype(int), 0]
        if tokens and (tokens[-1] in eos or random_source.random() < 0.3):
            back = random_source.randint(1, min(len(tokens), 12))
            grammar.rollback(back)
            del tokens[-back:]
        else:
            token = random_token(grammar, eos, random_source, end=0.3)
            assert grammar.consume(token)
            tokens.append(token)


@pytest.mark.parametrize("kind", TINY)
def test_every_eos_ends_a_text_exactly_where_it_may_end(kind: str) -> None:
    tokenizer, compiler, size, eos = tiny(kind)
    grammar = compiler.compile(StructuredOutputs(choice=["he", "hello"]))
    first, second = sorted(eos)
    assert not grammar.mask()[[first, second]].any() and not grammar.consume(first) and not grammar.ended
    assert grammar.consume(tokenizer.vocab["he"])
    assert grammar.mask()[[first, second]].all() and not grammar.ended
    assert grammar.count_legal([second, second]) == 2 and not grammar.ended
    assert grammar.consume(second) and grammar.ended
    assert np.flatnonzero(grammar.mask()).tolist() == [first, second]
    assert not grammar.consume(tokenizer.vocab["ll"]) and grammar.forced(99) == []
    grammar.rollback(1)
    assert not grammar.ended
    for token in ("ll", "o"):
        assert grammar.consume(tokenizer.vocab[token])
    assert grammar.ended and np.flatnonzero(grammar.mask()).tolist() == [first, second]
    grammar.rollback(3)
    assert not grammar.ended and not grammar.mask()[[first, second]].any()
    with pytest.raises(ValueError, match="cannot go 1 tokens back: 0 were consumed"):
        grammar.rollback(1)
    assert grammar.mask().shape == (size,) and not grammar.mask()[size - 1]


@pytest.mark.parametrize("kind", TINY)
def test_special_tokens_are_no_text(kind: str) -> None:
    """A text that reads like a special token is written with ordinary ones."""
    tokenizer, compiler, _, eos = tiny(kind)
    grammar = compiler.compile(StructuredOutputs(choice=["</s>"]))
    tokens = grammar.forced(99)
    assert len(tokens) == 4 and not eos & set(tokens)
    assert grammar.count_legal(tokens) == 4
    assert tokenizer.decode(tokens) == "</s>"


@pytest.mark.parametrize("kind", MARKED)
def test_marks_that_are_no_special_tokens_are_text(kind: str) -> None:
    """Such as <tool_call>: where it has to come it is the one token that stands for it, as models write it."""
    tokenizer, compiler, size, eos = compiled(MARKED[kind]())
    opening, closing = tokenizer.vocab["<mark>"], tokenizer.vocab["</mark>"]
    wanted = StructuredOutputs(grammar=r'start: "<mark>" /(he|a)+/ "</mark>"')
    grammar = compiler.compile(wanted)
    assert grammar.forced(99) == [opening]
    assert np.flatnonzero(grammar.mask()).tolist() == [opening]
    assert grammar.consume(opening)
    assert not grammar.mask()[[opening, closing, size - 1]].any()
    assert grammar.consume(tokenizer.vocab["he"]) and grammar.mask()[closing]
    texts = [random_text(compiler.compile(wanted), tokenizer, eos, seed) for seed in range(12)]
    assert all(text is not None and re.fullmatch("<mark>(he|a)+</mark>", text) for text in texts)
    for name in ("special text", "text", "any object") if kind != "metaspace" else ():  # it has few letters
        texts = [random_text(compiler.compile(CASES[name].wanted), tokenizer, eos, seed) for seed in range(12)]
        assert [text for text in texts if text is not None and not CASES[name].fits(text)] == []
        assert sum(text is not None for text in texts) >= 6


def _consumed(compiler: GrammarCompiler, wanted: StructuredOutputs, ids: list[int]) -> tuple[int, Grammar]:
    grammar = compiler.compile(wanted)
    legal = grammar.count_legal(ids)
    assert all(map(grammar.consume, ids[:legal]))
    return legal, grammar


@pytest.mark.parametrize(
    ("text", "possible"),
    [
        ('{"a":1,"b":[1,2]}', True),
        ('{"a": 1, "b": [1, 2]}', True),
        (json.dumps({"a": 1, "b": [1, 2]}, indent=2), True),
        (json.dumps({"a": 1, "b": [1, 2]}, indent="\t"), True),
        (json.dumps({"a": 1, "b": [1, {"c": {}}]}, indent=8), True),
        ('{"a":  1}', False),
        ('{"a":\n\n1}', False),
        ("{\n" + " " * 41 + '"a": 1}', False),
        (' {"a": 1}', False),
        ('{"a": 1} ', False),
    ],
)
def test_json_may_be_compact_or_indented_but_not_endless(text: str, possible: bool) -> None:
    tokenizer, compiler, _, _ = tiny("byte-level")
    ids = tokenizer.encode(text)
    legal, grammar = _consumed(compiler, StructuredOutputs(json_object=True), ids)
    assert (legal == len(ids)) == possible
    assert grammar.ended == (possible or text.endswith("} "))


def test_a_place_that_no_token_continues_has_an_empty_mask_and_a_way_back() -> None:
    """The text may be one that only speculation looks at, so this is no error."""
    backend = metaspace()  # without bytes: it has no way to write a "c"
    compiler = GrammarCompiler(backend.to_str(), backend.get_vocab_size(), [2])
    grammar = compiler.compile(StructuredOutputs(regex="[ab](c|bé)"))
    a, b = (backend.token_to_id(letter) for letter in "ab")
    with pytest.raises(InvalidParameter, match="no token of this model can begin such a text"):
        compiler.compile(StructuredOutputs(regex="c"))
    dead = compiler.compile(StructuredOutputs(regex="[ab]c|bé"))
    assert dead.consume(a)
    for _ in range(2):
        assert not dead.mask().any() and not dead.ended and dead.forced(99) == []
    dead.rollback(1)
    assert np.flatnonzero(dead.mask()).tolist() == sorted([a, b])
    assert grammar.consume(a) and np.flatnonzero(grammar.mask()).tolist() == [b]


def test_a_text_too_complex_is_a_named_error_and_can_be_gone_back_from() -> None:
    rules = range(1000)
    lark = "\n".join(
        [
            f'start: /[bc]/ ("o" | {" | ".join(f"r{i}" for i in rules)})',
            *(f'r{i}: "a" q{i}\nq{i}: "b{i}"' for i in rules),
        ]
    )
    tokenizer, compiler, _, _ = tiny("byte-level")
    grammar = compiler.compile(StructuredOutputs(grammar=lark))
    b, o = (tokenizer.vocab[letter] for letter in "bo")
    before = grammar.mask()
    for _ in range(2):
        with pytest.raises(OutpaceError, match=r"cannot be followed behind 0 tokens: .*more than 700 parts"):
            grammar.count_legal([b, o])
        assert (grammar.mask() == before).all() and not grammar.ended


def test_grammars_of_one_request_do_not_move_those_of_another() -> None:
    _, compiler, _, eos = tiny("byte-level")
    wanted = StructuredOutputs(regex="[ab]{3}")
    first, second = compiler.compile(wanted), compiler.compile(wanted)
    before = second.mask()
    for _ in range(3):
        assert first.consume(random_token(first, eos, random.Random(0), end=0))
    assert first.ended and not second.ended and (second.mask() == before).all()


def test_nothing_is_written_to_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    tokenizer, compiler, _, _ = tiny("byte-level")
    grammar = compiler.compile(StructuredOutputs(regex="a{2}"))
    assert not grammar.consume(tokenizer.vocab["b"])
    with pytest.raises(InvalidParameter):
        compiler.compile(StructuredOutputs(regex="["))
    assert capfd.readouterr() == ("", "")


@pytest.mark.smollm2
def test_forced_text_is_split_as_the_tokenizer_would(
    smollm2_files: LoadedFiles, smollm2_compiler: GrammarCompiler
) -> None:
    tokenizer = smollm2_files.tokenizer
    names = {"temperature_celsius": {"type": "integer"}, "wind": {"enum": ["north", "south"]}}
    schema = {"type": "object", "properties": names, "required": list(names), "additionalProperties": False}
    grammar = smollm2_compiler.compile(StructuredOutputs(json=schema))
    for token in tokenizer.encode('{"'):
        assert grammar.consume(token)
    assert grammar.forced(99) == tokenizer.encode("temperature_celsius")
    assert grammar.count_legal(grammar.forced(99)) == len(grammar.forced(99))


@pytest.mark.smollm2
@pytest.mark.parametrize("name", CASES)
def test_random_walks_with_a_real_vocabulary(
    smollm2_files: LoadedFiles, smollm2_compiler: GrammarCompiler, name: str
) -> None:
    tokenizer, case, eos = smollm2_files.tokenizer, CASES[name], set(smollm2_files.eos_ids)
    assert len(eos) == 2
    texts = [random_text(smollm2_compiler.compile(case.wanted), tokenizer, eos, seed, longest=100) for seed in range(4)]
    ended = [text for text in texts if text is not None]
    assert ended and [text for text in ended if not case.fits(text)] == []
