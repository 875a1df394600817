"""The tokenizer inside a GGUF file: the right split for each family, BOS, SentencePiece, control tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer as Backend

from outpace.models.gguf_file import GgufFile
from outpace.models.gguf_tokenizer import build_tokenizer
from tests.models.gguf_files import byte_level_vocabulary, write_gguf
from tests.models.tiny_tokenizers import sentencepiece

KIND = gguf.TokenType


def build(path: Path, **metadata: Any) -> Backend:
    write_gguf(path, metadata={f"tokenizer.ggml.{key}": value for key, value in metadata.items()})
    return build_tokenizer(GgufFile(path))


# Where the original tokenizers of these families cut, before any merge (spaces shown as Ġ, line feeds as Ċ).
SPLITS = {
    "gpt-2": {"I'll pay $2024 now": ["I", "'ll", "Ġpay", "Ġ$", "2024", "Ġnow"], "a\n\n b": ["a", "ĊĊ", "Ġb"]},
    "smollm": {"I'll pay $2024 now": ["I", "'ll", "Ġpay", "Ġ$", "2", "0", "2", "4", "Ġnow"], "a 1": ["a", "Ġ", "1"]},
    "qwen2": {
        "I'LL pay $2024 now": ["I", "'LL", "Ġpay", "Ġ$", "2", "0", "2", "4", "Ġnow"],
        "x(y)\n\n z": ["x", "(y", ")ĊĊ", "Ġz"],
        "e\u0301": ["Ã©"],  # composed first
    },
    "llama-bpe": {"I'LL pay $2024 now": ["I", "'LL", "Ġpay", "Ġ$", "202", "4", "Ġnow"], "e\u0301": ["e", "Ìģ"]},
    "tekken": {"camelCase 2024 x/\n": ["camel", "Case", "Ġ", "2", "0", "2", "4", "Ġx", "/Ċ"]},
}


@pytest.mark.parametrize("word", SPLITS)
def test_text_is_cut_where_the_original_cuts_it(tmp_path: Path, word: str) -> None:
    tokenizer = build(tmp_path / "m.gguf", pre=word)
    for text, pieces in SPLITS[word].items():
        normal = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
        assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normal)] == pieces


def test_whole_words_of_llama3_are_taken_before_merges(tmp_path: Path) -> None:
    tokens, kinds, merges = byte_level_vocabulary()
    tokens[-2:], kinds[-2:] = ["olleh", "ooo"], [int(KIND.NORMAL)] * 2
    whole = build(
        tmp_path / "m.gguf", pre="llama-bpe", tokens=tokens, token_type=kinds, merges=merges, add_bos_token=False
    )
    merged = build(tmp_path / "n.gguf", pre="qwen2", tokens=tokens, token_type=kinds, merges=merges)
    assert whole.encode("olleh").tokens == ["olleh"]
    assert merged.encode("olleh").tokens == ["o", "ll", "e", "h"]


@pytest.mark.parametrize(
    ("pre", "flag", "expected"),
    [("smollm", None, 0), ("qwen2", None, 0), ("llama-bpe", None, 1), ("llama-bpe", False, 0), ("smollm", True, 1)],
)
def test_bos_by_the_flag_or_by_the_family(tmp_path: Path, pre: str, flag: bool | None, expected: int) -> None:
    tokenizer = build(tmp_path / "m.gguf", pre=pre, add_bos_token=flag)
    assert tokenizer.encode("hell").tokens == ["<|im_start|>"] * expected + ["hell"]


def test_control_and_user_defined_tokens_stay_whole_and_only_control_is_special(tmp_path: Path) -> None:
    tokens, kinds, merges = byte_level_vocabulary()
    tokens[-2:], kinds[-2:] = ["<think>", "<|x|>"], [int(KIND.USER_DEFINED), int(KIND.CONTROL)]
    tokenizer = build(tmp_path / "m.gguf", tokens=tokens, token_type=kinds, merges=merges)
    ids = tokenizer.encode("a<think><|x|><|im_end|>").ids
    assert ids == [tokens.index("a"), len(tokens) - 2, len(tokens) - 1, 2]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<think>"


def sentencepiece_metadata(**more: Any) -> dict[str, Any]:
    """The vocabulary of the small SentencePiece tokenizer as a GGUF file would hold it: scores fall with the id."""
    vocabulary = sorted(sentencepiece().get_vocab().items(), key=lambda item: item[1])
    tokens = [token for token, _ in vocabulary]
    kinds = [int(KIND.BYTE if token.startswith("<0x") else KIND.NORMAL) for token in tokens]
    kinds[:3] = [int(KIND.UNKNOWN), int(KIND.CONTROL), int(KIND.CONTROL)]
    scores = [-float(index) for index in range(len(tokens))]
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return {
        "model": "llama",
        "pre": None,
        "tokens": tokens,
        "token_type": kinds,
        "scores": scores,
        "merges": None,
        **ids,
        **more,
    }


TEXTS = ["hello", " hell  hello", "a😀o", "", "naïve é\n", "hell</s>hell", "he llo"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("prefixed", [True, False])
def test_sentencepiece_gives_the_ids_of_the_original(tmp_path: Path, text: str, prefixed: bool) -> None:
    tokenizer = build(tmp_path / "m.gguf", **sentencepiece_metadata(add_space_prefix=prefixed))
    original = sentencepiece(prefixed=prefixed)
    ids = tokenizer.encode(text).ids
    assert ids == [1, *original.encode(text).ids]  # BOS unless the file says otherwise
    assert tokenizer.decode(ids) == original.decode(ids)


def test_sentencepiece_without_bos_when_the_file_says_so(tmp_path: Path) -> None:
    tokenizer = build(tmp_path / "m.gguf", **sentencepiece_metadata(add_bos_token=False))
    assert tokenizer.encode("hell").tokens == ["▁hell"]


def test_sentencepiece_joins_by_score(tmp_path: Path) -> None:
    metadata = sentencepiece_metadata()
    best, other = metadata["tokens"].index("ll"), metadata["tokens"].index("he")
    assert build(tmp_path / "m.gguf", **metadata).encode("hel").tokens[1:] == ["▁", "he", "l"]
    metadata["tokens"] = [*metadata["tokens"], "el"]
    metadata["token_type"] = [*metadata["token_type"], int(KIND.NORMAL)]
    metadata["scores"] = [*metadata["scores"], 5.0]
    assert metadata["scores"][best] < 5.0 and metadata["scores"][other] < 5.0
    assert build(tmp_path / "n.gguf", **metadata).encode("hel").tokens[1:] == ["▁", "h", "el"]
