"""Text token by token is what the tokenizers library makes of all tokens at once, for every decoder models use."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models
from tokenizers import Tokenizer as Backend

from outpace.errors import UnsupportedModel
from outpace.models.load import LoadedFiles
from outpace.models.tokenizer import Tokenizer
from tests.models.tiny_tokenizers import MAKERS, byte_level, sentencepiece

EXACT = settings(max_examples=120, deadline=None, derandomize=True, database=None)
REPLACE, BYTES, FUSE = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()


def with_decoder(decoder: Any, tokens: list[str]) -> Tokenizer:
    """A tokenizer of these tokens, id by place, with three added ones behind: special, special, not special."""
    backend = Backend(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token=tokens[0]))
    backend.decoder = decoder
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<s>", "▁é x")])
    backend.add_tokens([AddedToken(" a tool", normalized=True)])
    return Tokenizer(backend)


PIECES = ["<unk>", "▁", "▁▁", "▁a", "b", " ", " b", "", "é", "e", "\u0301", "\u200d", "<0x0A>", "<0xF0>", "<0x9F>"]
PIECES += ["<0x91>", "<0xA9>", "<0xE2>", "<0x80>", "<0x8D>", "<0x20>", "<0xff>", "<0x+1>", "<0x 1>", "<0x٣٣>", "<0xé>"]
WORDS = ["[UNK]", "a", "##b", "##", "####c", "x##y", ".", "?", ",", "!", "'", " ' ", "n't", "do not", " do not", "'s"]
WORDS += ["don", " n't", "'m", "'ve", "'re", "", " ", "a .", "é"]
ENDS = ["<unk>", "a</w>", "b", "</w>", "</w></w>", "c</w>d", "", " ", "é</w>"]

# By the models that have them.
DECODERS: dict[str, tuple[Any, list[str]]] = {
    "Llama 2, Mistral, Phi-3": (decoders.Sequence([REPLACE, BYTES, FUSE, decoders.Strip(" ", 1, 0)]), PIECES),
    "Gemma, Yi": (decoders.Sequence([REPLACE, BYTES, FUSE]), PIECES),
    "T5, XGLM": (decoders.Metaspace(), PIECES),
    "Metaspace, first": (decoders.Metaspace(prepend_scheme="first"), PIECES),
    "Metaspace, never": (decoders.Metaspace(prepend_scheme="never"), PIECES),
    "bytes, then Metaspace": (decoders.Sequence([BYTES, decoders.Metaspace()]), PIECES),
    "nested": (decoders.Sequence([decoders.Sequence([REPLACE, BYTES]), FUSE, decoders.Strip(" ", 2, 0)]), PIECES),
    "letters replaced late": (decoders.Sequence([BYTES, FUSE, REPLACE, decoders.Strip(" ", 3, 0)]), PIECES),
    "stripped by token": (decoders.Sequence([REPLACE, BYTES, decoders.Strip(" ", 1, 0), FUSE]), PIECES),
    "stripped twice": (
        decoders.Sequence([REPLACE, FUSE, decoders.Strip(" ", 1, 0), decoders.Strip("b", 2, 0)]),
        PIECES,
    ),
    "only replaced": (decoders.Replace("▁▁", "b"), PIECES),
    "only bytes": (BYTES, PIECES),
    "only fused": (FUSE, PIECES),
    "no step": (decoders.Sequence([]), PIECES),
    "WordPiece": (decoders.WordPiece(), WORDS),
    "WordPiece, untidied": (decoders.WordPiece(prefix="#", cleanup=False), WORDS),
    "GPT-1": (decoders.BPEDecoder(), ENDS),
    "ends, then fused": (decoders.Sequence([decoders.BPEDecoder(), FUSE, decoders.Strip(" ", 1, 0)]), ENDS),
    "byte-level, then stripped": (
        decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]),
        ["Ġ", "ĠĠa", "Ã"],
    ),
    "replaced, then byte-level": (
        decoders.Sequence([decoders.Replace("a", "Ã"), decoders.ByteLevel()]),
        ["©", "a", "Ġ"],
    ),
    "no decoder": (None, WORDS),
}
CRAFTED = {name: with_decoder(*item) for name, item in DECODERS.items()}
TINY = {name: Tokenizer(make()) for name, make in MAKERS.items()}
TOKENIZERS = {**TINY, **CRAFTED}


def pushed(
    tokenizer: Tokenizer, ids: list[int], skip: bool, tight: bool = False, after: Sequence[int] = ()
) -> list[str]:
    """What every id brings, and what the end brings; `after` is the prompt."""
    detokenizer = tokenizer.detokenizer(skip, spaces_between_special_tokens=not tight, after=after)
    return [*(detokenizer.push(index) for index in ids), detokenizer.flush()]


@pytest.mark.parametrize("name", TOKENIZERS)
@EXACT
@given(data=st.data())
@pytest.mark.thinned(2)
def test_any_ids(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    # Two ids beyond the vocabulary: they have no text.
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=24))
    skip = data.draw(st.booleans())
    assert "".join(pushed(tokenizer, ids, skip)) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("name", CRAFTED)
def test_every_short_sequence(name: str) -> None:
    tokenizer = CRAFTED[name]
    for ids in itertools.chain.from_iterable(itertools.product(range(tokenizer.vocab_size), repeat=n) for n in (1, 2)):
        for skip in (True, False):
            assert "".join(pushed(tokenizer, list(ids), skip)) == tokenizer.decode(ids, skip)


def byte_tokens(name: str) -> dict[int, int]:
    """Token id of every byte."""
    vocab = TINY[name].vocab
    if name == "sentencepiece":
        return {byte: vocab[f"<0x{byte:02X}>"] for byte in range(256)}
    others = iter(range(0x100, 0x200))
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    return {byte: vocab[chr(byte if byte in shown else next(others))] for byte in range(256)}


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece"])
def test_every_kind_of_broken_character(name: str) -> None:
    tokenizer, byte_ids = TINY[name], byte_tokens(name)
    # The bytes at which the rules of UTF-8 change, in every order.
    edges = [0x41, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC1, 0xC2, 0xE0, 0xE2, 0xED, 0xF0, 0xF1, 0xF4, 0xF5]
    for data in itertools.chain(itertools.product(edges, repeat=3), itertools.product(edges[3:14:2], repeat=4)):
        ids = [byte_ids[byte] for byte in data]
        assert "".join(pushed(tokenizer, ids, True)) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece"])
@pytest.mark.parametrize(
    "text", ["\U0001f469\u200d\U0001f469\u200d\U0001f467", "e\u0301\u0323", "\u0e01\u0e33", " \ufeffa"]
)
def test_joined_characters_byte_by_byte(name: str, text: str) -> None:
    tokenizer, byte_ids = TINY[name], byte_tokens(name)
    ids = [byte_ids[byte] for byte in text.encode()]
    shown = pushed(tokenizer, ids, True)
    assert "".join(shown) == tokenizer.decode(ids) == (text if name == "byte-level" else text.removeprefix(" "))
    assert "\ufffd" not in "".join(shown)


@pytest.mark.parametrize("skip", [True, False])
def test_a_special_token_inside_a_character(skip: bool) -> None:
    tokenizer, byte_ids = TINY["byte-level"], byte_tokens("byte-level")
    ids = [byte_ids[0xC3], 0, byte_ids[0xA9]]
    shown = pushed(tokenizer, ids, skip)
    assert shown == (["", "", "é", ""] if skip else ["", "\ufffd<s>", "\ufffd", ""])
    assert "".join(shown) == tokenizer.decode(ids, skip)


def test_a_suffix_waits_for_the_next_word() -> None:
    tokenizer = CRAFTED["GPT-1"]
    assert pushed(tokenizer, [tokenizer.vocab[token] for token in ("b", "a</w>", "b", "a</w>")], True) == [
        "b",
        "",
        "a b",
        "",
        "a",
    ]


# --- what counts as special


def test_tokens_that_were_added_twice_are_skipped_as_decode_does() -> None:
    backend = byte_level()
    backend.add_tokens([AddedToken("<s>", special=False, normalized=False)])
    backend.add_special_tokens([AddedToken("<tool> é", special=True, normalized=False)])
    tokenizer = Tokenizer(backend)
    ids = [0, 1, tokenizer.vocab["<tool> é"], tokenizer.vocab["hell"]]
    assert tokenizer.special_ids == set(ids[:3])
    assert "".join(pushed(tokenizer, ids, True)) == tokenizer.decode(ids) == "hell"


def test_two_ids_with_the_same_special_token_are_skipped_both() -> None:
    backend = Backend(models.Unigram([("<unk>", 0.0), ("<s>", -1.0), ("<s>", -2.0), ("a", -1.0)], unk_id=0))
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<s>"])
    tokenizer = Tokenizer(backend)
    assert "".join(pushed(tokenizer, [1, 2, 3], True)) == tokenizer.decode([1, 2, 3]) == "a"


# --- spaces between special tokens


@pytest.mark.parametrize("name", ["WordPiece", "no decoder"])
def test_no_spaces_between_neighbouring_special_tokens_if_asked(name: str) -> None:
    tokenizer = CRAFTED[name]
    a, bos = tokenizer.vocab["a"], tokenizer.vocab["<s>"]
    ids = [bos, bos, a, bos, bos, bos, a]
    assert "".join(pushed(tokenizer, ids, False)) == tokenizer.decode(ids, False) == "<s> <s> a <s> <s> <s> a"
    assert pushed(tokenizer, ids, False, tight=True) == ["<s>", "<s>", " a", " <s>", "<s>", "<s>", " a", ""]
    # What is not shown has no spaces.
    assert "".join(pushed(tokenizer, ids, True, tight=True)) == tokenizer.decode(ids) == "a a"


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece", "metaspace", "Llama 2, Mistral, Phi-3"])
@EXACT
@given(data=st.data())
def test_spaces_between_special_tokens_change_nothing_where_there_are_none(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    special = st.sampled_from(sorted(tokenizer._added))
    ids = data.draw(st.lists(special | st.integers(0, tokenizer.vocab_size - 1), max_size=12))
    skip = data.draw(st.booleans())
    assert "".join(pushed(tokenizer, ids, skip, tight=True)) == tokenizer.decode(ids, skip)


# --- refused


@pytest.mark.parametrize(
    ("decoder", "detail"),
    [
        (decoders.CTC(), r"\(CTC\) .*\"type\": \"CTC\""),
        (decoders.Sequence([FUSE, decoders.Strip(" ", 0, 1)]), r"\(Fuse, Strip\) .*\"stop\": 1"),
        (decoders.Replace(Regex("a+"), "b"), r"\(Replace\) .*\"Regex\": \"a\+\""),
        (decoders.Replace("", "b"), r"\(Replace\)"),
        (decoders.BPEDecoder(suffix=""), r"\(BPEDecoder\)"),
        (decoders.Sequence([FUSE, decoders.Replace("ab", "c")]), r"\(Fuse, Replace\) .*\"String\": \"ab\""),
        (decoders.Sequence([decoders.ByteLevel(), decoders.Metaspace()]), r"\(ByteLevel, Metaspace\) .*\"Metaspace\""),
        (decoders.Sequence([FUSE, BYTES]), r"\(Fuse, ByteFallback\) .*\"ByteFallback\""),
    ],
)
def test_decoders_that_cannot_be_run_token_by_token_are_refused(decoder: Any, detail: str) -> None:
    backend = byte_level()
    backend.decoder = decoder
    with pytest.raises(UnsupportedModel, match=rf"the tokenizer's decoder {detail}") as caught:
        Tokenizer(backend)
    assert "cannot be run token by token" in str(caught.value)


# --- cost


def test_a_token_costs_the_same_wherever_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(sentencepiece())
    monkeypatch.setattr(tokenizer, "decode", None)  # what came before is never decoded again
    seen: list[int] = []
    original = tokenizer.token
    monkeypatch.setattr(tokenizer, "token", lambda index: seen.append(index) or original(index))
    ids = [*tokenizer.encode("hello 😀") * 50]
    detokenizer = tokenizer.detokenizer(skip_special_tokens=False)
    texts = [detokenizer.push(index) for index in ids]
    assert seen == ids and max(map(len, texts)) < 10


# --- the real thing


@pytest.mark.smollm2
@EXACT
@given(ids=st.lists(st.integers(0, 49_153), max_size=60), skip=st.booleans(), tight=st.booleans())
def test_smollm2_any_ids(smollm2_files: LoadedFiles, ids: list[int], skip: bool, tight: bool) -> None:
    tokenizer = smollm2_files.tokenizer
    assert "".join(pushed(tokenizer, ids, skip, tight)) == tokenizer.decode(ids, skip)


@pytest.mark.smollm2
@EXACT
@given(text=st.text(max_size=40))
def test_smollm2_any_text(smollm2_files: LoadedFiles, text: str) -> None:
    tokenizer = smollm2_files.tokenizer
    ids = tokenizer.encode(text)
    # Some bytes of rare characters have no token, so not every text survives.
    assert "".join(pushed(tokenizer, ids, False)) == tokenizer.decode(ids, False)


# --- behind a prompt


def continued(tokenizer: Tokenizer, prompt: list[int], output: list[int]) -> str:
    return "".join(pushed(tokenizer, output, skip=True, after=prompt))


@pytest.mark.parametrize("name", TOKENIZERS)
@EXACT
@given(data=st.data())
@pytest.mark.thinned(2)
def test_what_follows_a_prompt_is_the_rest_of_the_whole_text(name: str, data: st.DataObject) -> None:
    """Where the prompt's own text is a beginning of the whole text, the output is exactly what comes behind it."""
    tokenizer = TOKENIZERS[name]
    ids = st.lists(st.sampled_from(sorted(tokenizer.vocab.values())), max_size=6)
    prompt, output = data.draw(ids), data.draw(ids)
    whole, before = tokenizer.decode(prompt + output), tokenizer.decode(prompt)
    if whole.startswith(before):
        assert continued(tokenizer, prompt, output) == whole[len(before) :]


def test_a_continuation_keeps_its_first_space() -> None:
    tokenizer = Tokenizer(sentencepiece())
    hell = tokenizer.vocab["▁hell"]
    newline = tokenizer.vocab["<0x0A>"]
    assert continued(tokenizer, [], [hell, hell]) == "hell hell"
    assert continued(tokenizer, [hell], [hell, hell]) == " hell hell"
    assert continued(tokenizer, [hell, newline], [hell]) == " hell", "the prompt's newline is not part of the answer"
    assert continued(tokenizer, [tokenizer.vocab["<s>"]], [hell]) == "hell", "special tokens have no text"


def test_a_character_begun_by_the_prompt_is_shown_whole() -> None:
    tokenizer = Tokenizer(byte_level())
    first, second = (tokenizer.vocab[letter] for letter in "Ã©")  # the bytes of é
    assert continued(tokenizer, [first], [second]) == "é"
