"""What cannot be is refused with the reason; nothing is followed in part."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.errors import InvalidParameter
from outpace.sampling.gbnf import gbnf_as_lark, looks_like_gbnf
from outpace.sampling.grammar import GrammarCompiler
from outpace.structured import StructuredOutputs
from tests.models.tiny_tokenizers import words
from tests.sampling.grammars import tiny

REFUSED = {
    "unknown type": ({"json": {"type": "bogus"}}, "Invalid type: bogus"),
    "unsupported key": (
        {"json": {"type": "array", "uniqueItems": True}},
        r'Unimplemented keys: \["uniqueItems"\]; leave them out',
    ),
    "leniency": ({"json": {"x-guidance": {"lenient": True}, "not": {"type": "null"}}}, r'keys: \["not"\]; leave'),
    "oneOf": ({"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "oneOf .* use anyOf"),
    "remote": ({"json": {"$ref": "http://example.com/x.json"}}, "does not fetch"),
    "format": ({"json": {"type": "string", "format": "nope"}}, "Unknown format: nope"),
    "empty": (
        {"json": {"type": "integer", "minimum": 5, "maximum": 3}},
        r"minimum \(5\) is greater than maximum \(3\)",
    ),
    "false": ({"json": "false"}, "schema is false"),
    "options": ({"json": {"x-guidance": {"coerce_one_of": 3}}}, "invalid type: integer `3`, expected a boolean"),
    "class": ({"regex": "[0-9"}, r"regex='\[0-9' is not possible: unclosed character class"),
    "look-ahead": ({"regex": "a(?=b)"}, "look-around, .* is not supported"),
    "back reference": ({"regex": r"(a)\1"}, "backreferences are not supported"),
    "word boundary": ({"regex": r"\bfoo"}, "lookarounds not supported yet"),
    "pattern": ({"json": {"type": "string", "pattern": "(?!a)b"}}, "look-around"),
    "lark": ({"grammar": "start: foo"}, 'unknown name: "foo"'),
    "lark syntax": ({"grammar": 'start "a"'}, "Expected token ':'"),
    "lark json": ({"grammar": 'start: %json {"contains": {}}'}, "Unimplemented keys"),
    "lark lenient": (
        {"grammar": 'start: %json {"x-guidance": {"lenient": true}, "contains": {}}'},
        "Unimplemented keys",
    ),
    "special token": ({"grammar": 'start: "a" <s>'}, r"tokens in <\.\.\.> are not supported"),
    "token id": ({"grammar": 'start: "a" <[7]>'}, r"tokens in <\.\.\.> are not supported"),
    "max_tokens": ({"grammar": "start: x\nx[max_tokens=3]: /a+/"}, "a rule's max_tokens is not supported"),
    "temperature": ({"grammar": 'start[temperature=0.5]: "a"'}, "a rule's temperature is not supported"),
    "stop": ({"grammar": 'start: x\nx[capture, stop="]"]: /a+/'}, "a rule's stop is not supported"),
    "gbnf rule": ({"grammar": "root ::= foo"}, "Rule 'foo' not found"),
    "gbnf root": ({"grammar": 'other ::= "a"'}, "No 'root' rule found"),
    "gbnf end": ({"grammar": 'root ::= "a'}, "Unexpected end of input"),
    "gbnf escape": ({"grammar": 'root ::= "a\\'}, "it ends inside an escape"),
    "gbnf depth": ({"grammar": "root ::= " + "(" * 3000}, "nested too deeply"),
    "gbnf surrogate": ({"grammar": 'root ::= "\\ud83d"'}, "is no character"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_impossible_is_refused_with_its_reason(name: str) -> None:
    wanted, reason = REFUSED[name]
    _, compiler, _, _ = tiny("byte-level")
    with pytest.raises(InvalidParameter, match=reason) as caught:
        compiler.compile(StructuredOutputs(**wanted))
    message = str(caught.value)
    assert message.startswith(f"structured_outputs with {next(iter(wanted))}") and len(message) < 700
    assert "<state>" not in message and message.count("\n") == 0
    compiler.compile(StructuredOutputs(regex="a"))  # others go on


def test_a_tokenizer_whose_tokens_are_not_pieces_of_the_text_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="byte-level or SentencePiece"):
        GrammarCompiler(words().to_str(), 3, [0]).compile(StructuredOutputs(regex="a"))


def test_gbnf_is_known_by_its_rules() -> None:
    assert looks_like_gbnf('# a comment\nroot ::= "a"') and looks_like_gbnf('  my-item   ::= "a"')
    assert not looks_like_gbnf('start: "root ::= 1"') and not looks_like_gbnf("start: /::=/")


@pytest.mark.parametrize(
    ("gbnf", "text", "other"),
    [
        (r'root ::= "\u00e9" [\u00e0-\u00ff]', "éö", "ée"),
        (r'root ::= "\U0001F600\u0022\\u0041"', '😀"\\u0041', '😀"A'),
        ("root ::= . .", "\né", "\n"),
        ("root ::= [a&&b~~]+", "a&b~", "a-b"),
        (r'root ::= "[.#" [^\n"] "\n" # "." [&&]', "[.#a\n", "[.#\n\n"),
        (r"root ::= ws [\u005d\x5B]{2}" + "\nws ::= [ \\t]*", " \t][", "[.["),
        ("root ::= fooBar\nfooBar ::= (\n'a'? ".replace("'", '"') + '| "b" )', "b", "ab"),
    ],
)
def test_gbnf_means_what_it_means_in_llama_cpp(gbnf: str, text: str, other: str) -> None:
    tokenizer, compiler, _, _ = tiny("byte-level")
    grammar = compiler.compile(StructuredOutputs(grammar=gbnf))
    fitting, not_fitting = ([*tokenizer.encode(item), tokenizer.vocab["</s>"]] for item in (text, other))
    assert grammar.count_legal(fitting) == len(fitting)
    assert grammar.count_legal(not_fitting) < len(not_fitting)


@given(st.text(alphabet='ab"[]()|*+?{}\\.:=-^\n #1,root', max_size=40))
@settings(max_examples=300, deadline=None)
def test_no_text_makes_the_gbnf_reader_do_anything_but_read_or_refuse(rest: str) -> None:
    try:
        assert "start" in gbnf_as_lark(f"root ::= {rest}")
    except ValueError as error:
        assert str(error)
