"""From token ids to text, token by token, at a cost that does not grow with the text.

A tokenizer's decoder is a short pipeline over all tokens at once. The two that causal language models use can be run
token by token with a few bytes of state, and then give exactly what decoding everything at once gives:

* byte-level (GPT-2's alphabet): every token is bytes, the text is their UTF-8;
* SentencePiece: pieces with `▁` for a space, and `<0x0A>` for bytes without a piece. A run of byte tokens is text only
  if the whole run is valid UTF-8 (else each byte is shown as U+FFFD), so it is held back until it ends.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from tokenizers import Tokenizer as Backend

from outpace.errors import UnsupportedModel

__all__ = ["TextStream", "stream_maker"]

_REPLACEMENT = "\ufffd"


class TextStream(Protocol):
    """Text of one token sequence as it grows."""

    def push(self, token: str) -> str:
        """New text that this token completes; empty while a character is unfinished."""
        ...

    def flush(self) -> str:
        """Ends the sequence: what was held back."""
        ...


def stream_maker(backend: Backend) -> Callable[[], TextStream]:
    """Reads a tokenizer's decoder and returns what makes a fresh stream for it.

    Raises:
        UnsupportedModel: naming a decoder that cannot be run token by token.
    """
    if backend.decoder is None:
        return _Words
    decoder: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    if decoder["type"] == "ByteLevel":
        return _ByteLevel
    plan = _PiecePlan.read(decoder)
    return lambda: _Pieces(plan)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's letters for the 256 bytes: printable ones stand for themselves, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    letters.update({chr(0x100 + number): byte for number, byte in enumerate(others)})
    return letters


_BYTES = _byte_alphabet()


class _ByteLevel:
    """Tokens in GPT-2's byte alphabet; a token with any other letter (an added one) stands for its own UTF-8."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: str) -> str:
        try:
            data = bytes(_BYTES[letter] for letter in token)
        except KeyError:
            data = token.encode()
        return self._utf8.decode(data)

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _Words:
    """No decoder: tokens are words, with a space between."""

    def __init__(self) -> None:
        self._first = True

    def push(self, token: str) -> str:
        text = token if self._first else " " + token
        self._first = False
        return text

    def flush(self) -> str:
        return ""


@dataclass(frozen=True, slots=True)
class _PiecePlan:
    """What a SentencePiece decoder does.

    Args:
        replace: (from, to) in each token, in order.
        byte_fallback: `<0x0A>` is a byte.
        strip: (letter, most) taken from the beginning of the text.
        metaspace: this letter is a space, and nothing in the first token (if `drop_first`).
        drop_first: see metaspace.
    """

    replace: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    strip: tuple[str, int] = ("", 0)
    metaspace: str = ""
    drop_first: bool = False

    @classmethod
    def read(cls, decoder: dict[str, Any]) -> _PiecePlan:
        if decoder["type"] == "Metaspace":
            return cls(metaspace=decoder["replacement"], drop_first=decoder.get("prepend_scheme") != "never")
        steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        replace: list[tuple[str, str]] = []
        strip, fallback, stage = ("", 0), False, 0
        for step in steps:
            kind = step["type"]
            pattern = step.get("pattern", {}).get("String")
            if kind == "Replace" and pattern and stage == 0:
                replace.append((pattern, step["content"]))
            elif kind == "ByteFallback" and stage == 0:
                fallback, stage = True, 1
            elif kind == "Fuse" and stage < 2:
                stage = 2
            elif kind == "Strip" and stage == 2 and step["stop"] == 0:
                strip, stage = (step["content"], step["start"]), 3
            else:
                names = ", ".join(str(item["type"]) for item in steps)
                raise UnsupportedModel(f"the tokenizer's decoder ({names}) cannot be run token by token")
        return cls(replace=tuple(replace), byte_fallback=fallback, strip=strip)


class _Pieces:
    """SentencePiece tokens."""

    def __init__(self, plan: _PiecePlan) -> None:
        self._plan = plan
        self._run = bytearray()
        self._to_strip = plan.strip[1]
        self._first = True

    def push(self, token: str) -> str:
        for pattern, content in self._plan.replace:
            token = token.replace(pattern, content)
        if self._plan.metaspace:
            space = "" if self._first and self._plan.drop_first else " "
            token = token.replace(self._plan.metaspace, space)
        self._first = False
        byte = _byte_value(token) if self._plan.byte_fallback else None
        if byte is not None:
            self._run.append(byte)
            return ""
        return self._strip(self._end_run() + token)

    def flush(self) -> str:
        return self._strip(self._end_run())

    def _end_run(self) -> str:
        if not self._run:
            return ""
        run, self._run = bytes(self._run), bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return _REPLACEMENT * len(run)

    def _strip(self, text: str) -> str:
        letter = self._plan.strip[0]
        while text and self._to_strip:
            if text[0] != letter:
                self._to_strip = 0
                break
            text = text[1:]
            self._to_strip -= 1
        return text


def _byte_value(token: str) -> int | None:
    if len(token) != 6 or not token.startswith("<0x") or token[5] != ">":
        return None
    try:
        return int(token[3:5], 16)
    except ValueError:
        return None
