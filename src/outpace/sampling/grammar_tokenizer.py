"""What llguidance has to know about a model's tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import numpy as np
from llguidance import LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray
from tokenizers import Tokenizer

from outpace.errors import InvalidParameter

__all__ = ["GrammarTokenizer"]

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class GrammarTokenizer:
    """A tokenizer as grammars see it: every token is a piece of text, except those that are none.

    Args:
        tokenizer_json: the tokenizer, as text of a `tokenizer.json`.
        vocab_size: V, width of the masks.
        eos_ids: ids that end a text.

    Raises:
        InvalidParameter: a tokenizer whose tokens are not pieces of text that only have to be put together.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_ids: Iterable[int]) -> None:
        plan: dict[str, Any] = json.loads(tokenizer_json)
        added = {token["id"]: token for token in plan.get("added_tokens") or ()}
        special = [index for index, token in added.items() if token["special"]]
        no_text = [*special, *_use_byte_fallback(plan)]
        eos = np.array(sorted(index for index in set(eos_ids) if 0 <= index < vocab_size), dtype=np.int64)
        self.is_eos = np.zeros(vocab_size, dtype=bool)
        self.is_eos[eos] = True
        self.is_text = ~self.is_eos
        self.is_text[[index for index in no_text if index < vocab_size]] = False
        known = max([vocab_size - 1, *added, *_vocabulary_ids(plan)]) + 1
        hidden = _without_special_texts(plan, {index: added[index]["content"] for index in special})
        # what llguidance takes for EOS is never output: any token that is no text will do
        stand_in = min(special, default=int(eos[0]) if len(eos) else None)
        used = hidden
        backend = _build(hidden, known, stand_in)
        if backend is None:
            used, backend = plan, _build(plan, known, stand_in)
        if backend is None:
            raise InvalidParameter(
                "structured_outputs need a tokenizer whose tokens put together are the text (byte-level or "
                "SentencePiece); this model's is neither: ask without structured_outputs"
            )
        written = [index for index in added if index not in special and backend.is_special_token(index)]
        self.backend = _with_texts(backend, used, {index: added[index]["content"] for index in written}, special)

    @property
    def vocab_size(self) -> int:
        return len(self.is_text)

    def text_mask(self, bits: bytes) -> NDArray[np.bool_]:
        """[V] tokens of llguidance's mask, a bit each, that are text."""
        mask = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=self.vocab_size, bitorder="little")
        return mask.view(np.bool_) & self.is_text


def _build(plan: dict[str, Any], size: int, eos: int | None) -> LLTokenizer | None:
    try:
        return LLTokenizer(json.dumps(plan, separators=(",", ":")), n_vocab=size, eos_token=eos)
    except ValueError:  # a decoder it does not know, or a model that does not load
        return None


def _with_texts(backend: LLTokenizer, plan: dict[str, Any], texts: dict[int, str], special: list[int]) -> LLTokenizer:
    """The same tokens, of which these too are pieces of text.

    llguidance takes every added token that looks like <tool_call> for a special one, but the models that have such a
    token write it: a text that must contain "<tool_call>" could not be written at all.
    """
    if not texts:
        return backend
    tokens = [backend.decode_bytes([index]) for index in range(backend.vocab_size)]
    for index, text in texts.items():
        tokens[index] = text.encode()
    wrapper = TokenizerWrapper(_Splitter(Tokenizer.from_str(json.dumps(plan)), tokens, special, backend.eos_token))
    return LLTokenizer(wrapper, n_vocab=backend.vocab_size, eos_token=backend.eos_token)


class _Splitter:
    """What llguidance asks of a tokenizer whose tokens are given as bytes.

    Args:
        tokenizer: splits texts.
        tokens: the bytes of every id.
        special: ids that are no text.
        eos: the id that llguidance takes for EOS.
    """

    def __init__(self, tokenizer: Tokenizer, tokens: list[bytes], special: list[int], eos: int) -> None:
        self.eos_token_id = eos
        self.bos_token_id = None
        self.tokens = tokens
        self.special_token_ids = special
        self._tokenizer = tokenizer
        # SentencePiece puts a blank in front of a text, but not behind something else
        self._before = "" if b"".join(map(tokens.__getitem__, self._split("a"))) == b"a" else "\x02"

    def __call__(self, text: str | bytes) -> list[int]:
        words = text.decode() if isinstance(text, bytes) else text
        return self._split(self._before + words)[len(self._split(self._before)) :]

    def _split(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def _vocabulary_ids(plan: dict[str, Any]) -> Iterable[int]:
    vocabulary = plan["model"].get("vocab", ())
    return vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))


def _use_byte_fallback(plan: dict[str, Any]) -> list[int]:
    """Turns a Metaspace decoder into steps that llguidance knows. Returns ids that it then takes for bytes, wrongly."""
    decoder = plan.get("decoder")
    if decoder is None or decoder["type"] != "Metaspace":
        return []
    replace = {"type": "Replace", "pattern": {"String": decoder["replacement"]}, "content": " "}
    plan["decoder"] = {"type": "Sequence", "decoders": [replace, {"type": "ByteFallback"}, {"type": "Fuse"}]}
    vocabulary = plan["model"]["vocab"]
    pairs = vocabulary.items() if isinstance(vocabulary, dict) else ((row[0], i) for i, row in enumerate(vocabulary))
    return [index for token, index in pairs if _BYTE.fullmatch(token)]


def _without_special_texts(plan: dict[str, Any], special: dict[int, str]) -> dict[str, Any]:
    """The same tokenizer with other names for its special tokens.

    A text that has to contain "</s>" is made of ordinary tokens, since no special token may be output; llguidance would
    split it into the special one.
    """
    names = {text: f"\ue000{index}\ue000" for index, text in special.items()}
    added = [{**token, "content": names.get(token["content"], token["content"])} for token in plan["added_tokens"]]
    model = {**plan["model"]}
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(token, token): index for token, index in vocabulary.items()}
    elif vocabulary is not None:
        model["vocab"] = [[names.get(token, token), score] for token, score in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return {**plan, "added_tokens": added, "model": model, "post_processor": None}
