"""Things to ask for, each with a check of the whole text, and walks through them."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from outpace.models.tokenizer import Tokenizer
from outpace.protocols import Grammar
from outpace.sampling.grammar import GrammarCompiler
from outpace.structured import StructuredOutputs
from tests.models.tiny_tokenizers import byte_level, metaspace, sentencepiece


def _with_marks(backend: Backend) -> Backend:
    """Marks that a model writes, as those of tool calls: not special, and not written by their letters."""
    backend.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in ("<mark>", "</mark>")])
    return backend


TINY = {
    "byte-level": byte_level,
    "sentencepiece": sentencepiece,
    "sentencepiece without prefix": lambda: sentencepiece(prefixed=False),
}

MARKED = {
    "byte-level": lambda: _with_marks(byte_level()),
    "sentencepiece": lambda: _with_marks(sentencepiece()),
    "metaspace": lambda: _with_marks(metaspace()),
}


@dataclass(frozen=True)
class Case:
    wanted: StructuredOutputs
    fits: Callable[[str], bool]


def _json(schema: object, fits: Callable[[object], bool]) -> Case:
    return Case(StructuredOutputs(json=json.dumps(schema)), lambda text: fits(json.loads(text)))


def _regex(expression: str) -> Case:
    return Case(StructuredOutputs(regex=expression), lambda text: re.fullmatch(expression, text) is not None)


def _grammar(grammar: str, expression: str) -> Case:
    return Case(StructuredOutputs(grammar=grammar), lambda text: re.fullmatch(expression, text) is not None)


def _choice(*choice: str) -> Case:
    return Case(StructuredOutputs(choice=choice), lambda text: text in choice)


def _object(properties: dict[str, object], *required: str) -> dict[str, object]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


_COUNT = {"type": "integer", "minimum": -3, "maximum": 120}
_NODE = _object({"v": _COUNT, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}}, "v", "next")


def _is_node(value: object) -> bool:
    return (
        isinstance(value, dict)
        and list(value) == ["v", "next"]
        and -3 <= value["v"] <= 120
        and (value["next"] is None or _is_node(value["next"]))
    )


CASES = {
    "flat": _json(
        _object({"a": _COUNT, "b": {"enum": ["hello", "he", 7]}}, "a", "b"),
        lambda v: list(v) == ["a", "b"] and -3 <= v["a"] <= 120 and v["b"] in ("hello", "he", 7),
    ),
    "nested": _json(
        _object({"a": _object({"b": {"type": "boolean"}}, "b"), "n": {"const": None}}, "a"),
        lambda v: isinstance(v["a"]["b"], bool) and list(v["a"]) == ["b"] and v.get("n") is None,
    ),
    "array": _json(
        {"type": "array", "items": _COUNT, "minItems": 2, "maxItems": 4},
        lambda v: 2 <= len(v) <= 4 and all(-3 <= item <= 120 for item in v),
    ),
    "text": _json(
        {"type": "string", "minLength": 2, "maxLength": 5},
        lambda v: 2 <= len(v) <= 5,
    ),
    "number": _json(
        {"type": "number", "minimum": 0.5, "exclusiveMaximum": 2},
        lambda v: 0.5 <= v < 2,
    ),
    "multiple": _json({"type": "integer", "multipleOf": 3, "minimum": 0}, lambda v: v % 3 == 0),
    "refs": _json({"$ref": "#/$defs/node", "$defs": {"node": _NODE}}, _is_node),
    "any object": Case(StructuredOutputs(json_object=True), lambda text: isinstance(json.loads(text), dict)),
    "date": _json({"type": "string", "format": "date"}, lambda v: re.fullmatch(r"\d{4}-\d\d-\d\d", v) is not None),
    "digits": _regex(r"[0-9]{3}-[0-9]+"),
    "anchored": _regex(r"^(a|he)+(hello|hell)?/\.$"),
    "letters": _regex(r"(?i)h[^a-z]é?\n?"),
    "prefixes": _choice("yes", "yes please", "yes, please", "no"),
    "signs": _choice("a|b", "(.*)", 'c"\\d', "$1/2^[3]{4}", "\n\t", "é 😀", "%#~&<->"),
    "special text": _choice("<s>", "a </s> hello", "<tool> é", "<0x41>"),
    "lark": _grammar('start: "a" start "b" | WORD\nWORD: /he(llo)+/', r"a*he(llo)+b*"),
    "lark, lazy": _grammar('start: x "c"\nx[lazy]: /[ab]+b/', r"[ab]+bc"),
    "lark with json": Case(
        StructuredOutputs(grammar='start: "hello: " %json {"type": "array", "items": {"type": "boolean"}}'),
        lambda text: text.startswith("hello: ") and all(item in (True, False) for item in json.loads(text[7:])),
    ),
    "gbnf": _grammar('root ::= item ("," " "? item)* # comment\nitem ::= [a-c\\u00e9]{1,3} "\\u00e9"?', r"[a-cé, ]+"),
}


def tiny(name: str) -> tuple[Tokenizer, GrammarCompiler, int, set[int]]:
    """A tokenizer, its compiler, V (with one padding id behind the vocabulary), and two ids that end a text."""
    return compiled(TINY[name]())


def compiled(backend: Backend) -> tuple[Tokenizer, GrammarCompiler, int, set[int]]:
    """The same of any tokenizer that has <s> and </s>."""
    tokenizer = Tokenizer(backend)
    size = tokenizer.vocab_size + 1
    eos = {backend.token_to_id("</s>"), backend.token_to_id("<s>")}
    return tokenizer, GrammarCompiler(tokenizer.to_json(), size, eos), size, eos


def random_token(grammar: Grammar, eos: set[int], random_source: random.Random, end: float) -> int:
    """A legal token; EOS with probability `end` where the text may end. Short tokens as often as long ones."""
    legal = np.flatnonzero(grammar.mask()).tolist()
    ends = [index for index in legal if index in eos]
    others = [index for index in legal if index not in eos]
    if ends and (not others or random_source.random() < end):
        return random_source.choice(ends)
    return random_source.choice(others)


def random_text(grammar: Grammar, tokenizer: Tokenizer, eos: set[int], seed: int, longest: int = 400) -> str | None:
    """Text of a random walk to its end; None if it was too long."""
    random_source = random.Random(seed)
    tokens: list[int] = []
    while len(tokens) < longest:
        token = random_token(grammar, eos, random_source, end=0.5)
        assert grammar.consume(token)
        if token in eos:
            return tokenizer.decode(tokens)
        tokens.append(token)
    return None
