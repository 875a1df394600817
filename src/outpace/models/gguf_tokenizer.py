"""The tokenizer inside a GGUF file, rebuilt as the one the model was trained with.

A GGUF names its pre-tokenizer in a word (`tokenizer.ggml.pre`); the normaliser, the splitting and the decoder that
belong to the word are those of the original `tokenizer.json` of that family. A word that is not known is refused: a
wrong split gives a model text it was never trained on, and nobody would notice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from outpace.errors import CheckpointError, UnsupportedModel
from outpace.models.gguf_file import GgufFile

__all__ = ["build_tokenizer", "tokenizer_config"]

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPLIT = _QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _ByteLevel:
    """How a family of byte-level BPE tokenizers treats text before the merges.

    Args:
        split: makes the pre-tokenizer.
        compose: text is brought to Unicode's composed form (NFC) first.
        whole_words: a word that is in the vocabulary is taken whole, whatever the merges say.
        add_bos: a BOS token comes first unless the file says otherwise.
    """

    split: Callable[[], pre_tokenizers.PreTokenizer]
    compose: bool = False
    whole_words: bool = False
    add_bos: bool = False


def _by_regex(pattern: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    def make() -> pre_tokenizers.PreTokenizer:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return make


def _like_gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _like_gpt2()])


_LLAMA3 = _ByteLevel(_by_regex(_LLAMA3_SPLIT), whole_words=True, add_bos=True)
_FAMILIES = {
    "gpt-2": _ByteLevel(_like_gpt2),
    "smollm": _ByteLevel(_single_digits),
    "starcoder": _ByteLevel(_single_digits),
    "refact": _ByteLevel(_single_digits),
    "qwen2": _ByteLevel(_by_regex(_QWEN2_SPLIT), compose=True),
    "deepseek-r1-qwen": _ByteLevel(_by_regex(_QWEN2_SPLIT), compose=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "tekken": _ByteLevel(_by_regex(_TEKKEN_SPLIT), whole_words=True, add_bos=True),
}


def build_tokenizer(file: GgufFile) -> Tokenizer:
    """The tokenizer of a GGUF file: byte-level BPE (`gpt2`) or SentencePiece BPE (`llama`).

    Raises:
        UnsupportedModel: another kind of tokenizer or an unknown pre-tokenizer.
        CheckpointError: the vocabulary is missing or contradicts itself.
    """
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise CheckpointError(f"{file.path} has no tokenizer.ggml.tokens: a GGUF without a vocabulary cannot be used")
    kinds = file.metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if len(kinds) != len(tokens):
        raise CheckpointError(f"{file.path}: {len(tokens)} tokens but {len(kinds)} token types: a damaged vocabulary")
    # Converters fill a padded embedding with tokens that stand for nothing.
    real = [i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if not _is_padding(i, token, kind)]
    vocabulary = {tokens[index]: index for index in real}
    model = file.metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        tokenizer = _build_byte_level(file, vocabulary)
    elif model == "llama":
        tokenizer = _build_sentencepiece(file, vocabulary, kinds)
    else:
        raise UnsupportedModel(f"{file.path} has a tokenizer of kind {model!r}; gpt2 and llama can be read")
    for special in (True, False):
        wanted = (_UNKNOWN, _CONTROL) if special else (_USER_DEFINED,)
        added = [AddedToken(tokens[i], special=special, normalized=False) for i in real if kinds[i] in wanted]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    bos = _token(file, "bos_token_id")
    if _adds_bos(file) and bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, vocabulary[bos])]
        )
    return tokenizer


def tokenizer_config(file: GgufFile) -> dict[str, Any]:
    """The `tokenizer_config.json` that belongs to `build_tokenizer`: named tokens, chat template."""
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    named = {name: _token(file, key) for name, key in _NAMED.items()}
    config.update({name: token for name, token in named.items() if token is not None})
    template = file.metadata.get("tokenizer.chat_template")
    if template:
        config["chat_template"] = template
    return config


def _is_padding(index: int, token: str, kind: int) -> bool:
    return kind == _UNUSED and token == f"[PAD{index}]"


def _token(file: GgufFile, key: str) -> str | None:
    index = file.metadata.get(f"tokenizer.ggml.{key}")
    tokens: list[str] = file.metadata["tokenizer.ggml.tokens"]
    return tokens[index] if index is not None and 0 <= index < len(tokens) else None


def _adds_bos(file: GgufFile) -> bool:
    family = _FAMILIES.get(file.metadata.get("tokenizer.ggml.pre", ""))
    usual = family.add_bos if family else file.metadata.get("tokenizer.ggml.model") == "llama"
    return bool(file.metadata.get("tokenizer.ggml.add_bos_token", usual))


def _build_byte_level(file: GgufFile, vocabulary: dict[str, int]) -> Tokenizer:
    word = file.metadata.get("tokenizer.ggml.pre")
    family = _FAMILIES.get(word or "")
    if family is None:
        raise UnsupportedModel(
            f"{file.path} splits text by {word!r}, which outpace does not know (known: {', '.join(_FAMILIES)}); "
            "take the model's safetensors folder instead"
        )
    pairs = [tuple(merge.split(" ", 1)) for merge in file.metadata.get("tokenizer.ggml.merges", [])]
    merges = [(pair[0], pair[1]) for pair in pairs if len(pair) == 2]
    if len(merges) != len(pairs) or not merges:
        raise CheckpointError(f"{file.path}: tokenizer.ggml.merges are missing or damaged")
    tokenizer = Tokenizer(_make_bpe(file, vocab=vocabulary, merges=merges, ignore_merges=family.whole_words))
    if family.compose:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = family.split()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _build_sentencepiece(file: GgufFile, vocabulary: dict[str, int], kinds: list[int]) -> Tokenizer:
    scores = file.metadata.get("tokenizer.ggml.scores") or []
    if len(scores) != len(kinds):
        raise CheckpointError(f"{file.path}: {len(kinds)} tokens but {len(scores)} scores: a damaged vocabulary")
    unknown = _token(file, "unknown_token_id") or next((t for t, i in vocabulary.items() if kinds[i] == _UNKNOWN), None)
    normal = {token: index for token, index in vocabulary.items() if kinds[index] == _NORMAL}
    merges = _merges_by_score(normal, scores)
    model = _make_bpe(file, vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    prefixed = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *spaces] if prefixed else spaces)
    steps: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    return tokenizer


def _merges_by_score(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the pair whose result scores highest; as a list of merges, best first."""
    merges = []
    for token, index in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                merges.append((-scores[index], index, vocabulary[left], left, right))
    return [(left, right) for *_, left, right in sorted(merges)]


def _make_bpe(file: GgufFile, **settings: Any) -> models.BPE:
    try:
        return models.BPE(**settings)
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{file.path}: vocabulary and merges do not fit together ({error})") from error
