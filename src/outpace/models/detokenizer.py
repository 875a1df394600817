"""From token ids to text, token by token, at a cost that does not grow with the text.

A tokenizer's decoder is a short pipeline of steps, each from a list of tokens to a list of tokens; what the last one
gives is joined. The steps that causal language models use can be run token by token with a little state, and then give
exactly what decoding everything at once gives:

* byte-level (GPT-2's alphabet): every token is bytes, the text is their UTF-8;
* SentencePiece: pieces with `▁` for a space, and `<0x0A>` for bytes without a piece. A run of byte tokens is text only
  if the whole run is valid UTF-8 (else each byte is shown as U+FFFD), so it is held back until it ends;
* words: WordPiece, end-of-word suffixes, or no decoder at all.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer as Backend

from outpace.errors import UnsupportedModel

__all__ = ["TextStream", "stream_maker"]

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x(\+[0-9A-Fa-f]|[0-9A-Fa-f]{2})>")  # the sign is a quirk of the number reader in Rust


class _Step(Protocol):
    """One step of a decoder, fed token by token."""

    def push(self, token: str) -> Sequence[str]:
        """What the step can hand on now."""
        ...

    def flush(self) -> Sequence[str]:
        """What it held back, at the end."""
        ...


class TextStream:
    """Text of one token sequence as it grows.

    Args:
        steps: fresh ones, in order.
    """

    def __init__(self, steps: Sequence[_Step]) -> None:
        self._steps = steps

    def push(self, token: str) -> str:
        """New text that this token completes; empty while a character is unfinished."""
        return "".join(self._run([token], self._steps))

    def flush(self) -> str:
        """Ends the sequence: what was held back."""
        held: Sequence[str] = ()
        for step in self._steps:
            held = [*self._run(held, [step]), *step.flush()]
        return "".join(held)

    @staticmethod
    def _run(tokens: Sequence[str], steps: Sequence[_Step]) -> Sequence[str]:
        for step in steps:
            tokens = step.push(tokens[0]) if len(tokens) == 1 else [out for token in tokens for out in step.push(token)]
        return tokens


def stream_maker(backend: Backend) -> Callable[[], TextStream]:
    """Reads a tokenizer's decoder and returns what makes a fresh stream for it.

    Raises:
        UnsupportedModel: naming a decoder that cannot be run token by token.
    """
    if backend.decoder is None:
        return lambda: TextStream([_Words()])
    steps = list(_flat(json.loads(backend.decoder.__getstate__())))
    makers: list[Callable[[], _Step]] = []
    joined = False  # from Fuse on there is one token, the whole text, of which the steps get parts
    for step in steps:
        maker = _maker(step, joined)
        if maker is None:
            names, detail = ", ".join(str(item["type"]) for item in steps), json.dumps(step, ensure_ascii=False)
            raise UnsupportedModel(f"the tokenizer's decoder ({names}) cannot be run token by token, for {detail}")
        makers.append(maker)
        joined = joined or step["type"] in ("Fuse", "ByteLevel")
    return lambda: TextStream([maker() for maker in makers])


def _flat(decoder: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if decoder["type"] != "Sequence":
        yield decoder
        return
    for step in decoder["decoders"]:
        yield from _flat(step)


def _maker(step: Mapping[str, Any], joined: bool) -> Callable[[], _Step] | None:
    """What makes a step of a decoder, None for one that cannot be run token by token.

    Args:
        step: as in `tokenizer.json`.
        joined: it works on the whole text, not on tokens.
    """
    kind = step["type"]
    if kind == "Fuse":
        return _Same
    if kind == "Replace":
        pattern, content = step["pattern"].get("String"), step["content"]
        return (lambda: _Replace(pattern, content)) if pattern and (not joined or len(pattern) == 1) else None
    if kind == "Strip" and not step["stop"]:
        letter, count = step["content"], step["start"]
        return (lambda: _StripText(letter, count)) if joined else (lambda: _StripTokens(letter, count))
    if joined:
        return None
    if kind == "ByteLevel":
        return _ByteLevel
    if kind == "ByteFallback":
        return _ByteFallback
    if kind == "Metaspace":
        return lambda: _Metaspace(step["replacement"], step.get("prepend_scheme") != "never")
    if kind == "WordPiece":
        return lambda: _WordPiece(step["prefix"], step["cleanup"])
    if kind == "BPEDecoder" and step["suffix"]:
        return lambda: _WordEnds(step["suffix"])
    return None


class _Same:
    """Hands on what comes; the base of steps that hold nothing back."""

    def push(self, token: str) -> Sequence[str]:
        return (token,)

    def flush(self) -> Sequence[str]:
        return ()


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

    def push(self, token: str) -> Sequence[str]:
        try:
            data = bytes(_BYTES[letter] for letter in token)
        except KeyError:
            data = token.encode()
        return (self._utf8.decode(data),)

    def flush(self) -> Sequence[str]:
        return (self._utf8.decode(b"", final=True),)


class _ByteFallback:
    """`<0x0A>` is a byte; a run of bytes is text if all of it is."""

    def __init__(self) -> None:
        self._run = bytearray()

    def push(self, token: str) -> Sequence[str]:
        byte = _BYTE_TOKEN.fullmatch(token)
        if byte is None:
            return (*self.flush(), token)
        self._run.append(int(byte[1], 16))
        return ()

    def flush(self) -> Sequence[str]:
        run, self._run = bytes(self._run), bytearray()
        try:
            return (run.decode(),) if run else ()
        except UnicodeDecodeError:
            return [_REPLACEMENT] * len(run)


class _Replace(_Same):
    """Writes one string for another in each token."""

    def __init__(self, pattern: str, content: str) -> None:
        self._pattern, self._content = pattern, content

    def push(self, token: str) -> Sequence[str]:
        return (token.replace(self._pattern, self._content),)


class _StripTokens(_Same):
    """Takes up to `count` of a letter from the beginning of each token."""

    def __init__(self, letter: str, count: int) -> None:
        self._letter, self._count = letter, count

    def push(self, token: str) -> Sequence[str]:
        return (_without_leading(token, self._letter, self._count),)


class _StripText(_Same):
    """Takes up to `count` of a letter from the beginning of the text."""

    def __init__(self, letter: str, count: int) -> None:
        self._letter, self._left = letter, count

    def push(self, token: str) -> Sequence[str]:
        rest = _without_leading(token, self._letter, self._left)
        self._left = 0 if rest else self._left - len(token)
        return (rest,)


class _Metaspace(_Same):
    """A letter stands for a space, and for nothing in the first token (if `drop_first`)."""

    def __init__(self, letter: str, drop_first: bool) -> None:
        self._letter = letter
        self._space = "" if drop_first else " "

    def push(self, token: str) -> Sequence[str]:
        text = token.replace(self._letter, self._space)
        self._space = " "
        return (text,)


class _Words(_Same):
    """Tokens are words, with a space between."""

    def __init__(self) -> None:
        self._space = ""

    def push(self, token: str) -> Sequence[str]:
        text = self._space + token
        self._space = " "
        return (text,)


class _WordPiece(_Same):
    """Tokens are words, or with a prefix (`##`) parts of the word before; spaces are tidied up within a token."""

    _TIDY = (
        (" .", "."),
        (" ?", "?"),
        (" !", "!"),
        (" ,", ","),
        (" ' ", "'"),
        (" n't", "n't"),
        (" 'm", "'m"),
        (" do not", " don't"),
        (" 's", "'s"),
        (" 've", "'ve"),
        (" 're", "'re"),
    )

    def __init__(self, prefix: str, tidy: bool) -> None:
        self._prefix, self._tidy = prefix, self._TIDY if tidy else ()
        self._first = True

    def push(self, token: str) -> Sequence[str]:
        if not self._first:
            token = token[len(self._prefix) :] if token.startswith(self._prefix) else " " + token
        self._first = False
        for loose, tight in self._tidy:
            token = token.replace(loose, tight)
        return (token,)


class _WordEnds:
    """A suffix (`</w>`) is a space, and nothing in the last token, so a token that has one waits for the next."""

    def __init__(self, suffix: str) -> None:
        self._suffix = suffix
        self._held: str | None = None

    def push(self, token: str) -> Sequence[str]:
        before = () if self._held is None else (self._held.replace(self._suffix, " "),)
        self._held = token if self._suffix in token else None
        return before if self._held is not None else (*before, token)

    def flush(self) -> Sequence[str]:
        held, self._held = self._held, None
        return () if held is None else (held.replace(self._suffix, ""),)


def _without_leading(text: str, letter: str, most: int) -> str:
    start = 0
    while start < min(most, len(text)) and text[start] == letter:
        start += 1
    return text[start:]
