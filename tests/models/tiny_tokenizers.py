"""Small tokenizers of the two kinds that causal language models use."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors


def byte_level(*, bos: bool = False) -> Tokenizer:
    """Byte-level BPE: `<s>`, `</s>`, the 256 bytes, a few merges, one added token that is not special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "hell"), ("ð", "Ł"), ("ðŁ", "ĺ")]
    vocabulary = {token: index for index, token in enumerate(["<s>", "</s>", *alphabet, *map("".join, merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<s>", "</s>")])
    tokenizer.add_tokens([AddedToken("<tool> é", special=False, normalized=False)])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", vocabulary["<s>"]), ("</s>", vocabulary["</s>"])]
        )
    return tokenizer


def sentencepiece(*, prefixed: bool = True) -> Tokenizer:
    """SentencePiece-like BPE: `▁` for a space, byte fallback, a leading space added and taken away again."""
    specials = ["<unk>", "<s>", "</s>"]
    letters = ["▁", *"abehlo", "é", "\n"]
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("▁", "hell"), ("▁", "▁")]
    tokens = [*specials, *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *map("".join, merges)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace] if prefixed else [replace])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    return tokenizer


def metaspace() -> Tokenizer:
    """SentencePiece-like with the Metaspace pre-tokenizer and decoder."""
    tokenizer = sentencepiece()
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    return tokenizer


def words() -> Tokenizer:
    """Whole words, and no decoder."""
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


MAKERS = {
    "byte-level": byte_level,
    "sentencepiece": sentencepiece,
    "sentencepiece without prefix": lambda: sentencepiece(prefixed=False),
    "metaspace": metaspace,
    "words": words,
}
