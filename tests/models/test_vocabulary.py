"""What the engine is told about a model's tokens."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer as Backend

from outpace.errors import InvalidParameter
from outpace.models.tokenizer import Tokenizer
from outpace.models.vocabulary import ModelVocabulary
from outpace.protocols import Grammar
from outpace.sampling.grammar import GrammarCompiler
from outpace.structured import StructuredOutputs
from tests.models.tiny_tokenizers import MAKERS, byte_level, sentencepiece


def _none(wanted: StructuredOutputs) -> Grammar:
    raise AssertionError(f"nobody asked for {wanted}")


def _vocabulary(backend: Backend, extra: int = 0) -> ModelVocabulary:
    tokenizer = Tokenizer(backend)
    return ModelVocabulary(tokenizer, tokenizer.vocab_size + extra, _none)


@pytest.mark.parametrize("kind", MAKERS)
def test_ids_without_a_token_are_named(kind: str) -> None:
    full, padded = _vocabulary(MAKERS[kind]()), _vocabulary(MAKERS[kind](), extra=3)
    assert list(full.missing_ids) == []
    assert padded.size == full.size + 3
    assert list(padded.missing_ids) == [full.size, full.size + 1, full.size + 2]
    assert [padded.token_text(index) for index in padded.missing_ids] == ["", "", ""]


def test_text_is_encoded_with_nothing_around_it() -> None:
    backend = byte_level(bos=True)
    bos = backend.token_to_id("<s>")
    assert Tokenizer(backend).encode("hello")[0] == bos  # a prompt has it
    vocabulary = _vocabulary(backend)
    assert [backend.id_to_token(index) for index in vocabulary.encode("hello")] == ["hell", "o"]
    assert vocabulary.encode("<s>hello") == [bos, *vocabulary.encode("hello")]
    assert vocabulary.encode("") == []
    with pytest.raises(InvalidParameter, match="half a surrogate pair at character 1"):
        vocabulary.encode("a\ud83d")


def test_token_text_shows_special_tokens_and_parts_of_characters() -> None:
    backend = byte_level()
    vocabulary = _vocabulary(backend)
    texts = [vocabulary.token_text(backend.token_to_id(token)) for token in ("</s>", "Ġhell", "ð", "<tool> é")]
    assert texts == ["</s>", " hell", "\ufffd", "<tool> é"]


@pytest.mark.parametrize("skip", [False, True])
def test_detokenizers_show_special_tokens_if_asked_to(skip: bool) -> None:
    backend = sentencepiece()
    vocabulary = _vocabulary(backend)
    for _ in range(2):  # each has a state of its own
        stream = vocabulary.detokenizer(skip_special_tokens=skip, spaces_between_special_tokens=False)
        ids = [backend.token_to_id(token) for token in ("▁hell", "o", "</s>")]
        assert "".join([*map(stream.push, ids), stream.flush()]) == ("hello" if skip else "hello</s>")


def test_grammars_come_from_the_compiler() -> None:
    tokenizer = Tokenizer(byte_level())
    compiler = GrammarCompiler(tokenizer.to_json(), tokenizer.vocab_size, [1])
    vocabulary = ModelVocabulary(tokenizer, tokenizer.vocab_size, compiler.compile)
    assert vocabulary.grammar(StructuredOutputs(choice=["hello"])).forced(99) == vocabulary.encode("hello")
