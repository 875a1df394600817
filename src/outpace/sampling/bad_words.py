"""Words that must not appear in the output, as the token sequences that spell them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from outpace.errors import InvalidParameter
from outpace.protocols import Vocabulary
from outpace.sampling.stage import NEVER, Floats, History

__all__ = ["BadSequences", "encode_bad_words"]


def encode_bad_words(words: Iterable[str], vocabulary: Vocabulary) -> list[tuple[int, ...]]:
    """The token sequences that spell these words, at the start of a text and after a space.

    Space in front of a word makes no difference.

    The form after a space counts only if it begins with another token and has the same length: otherwise it contains
    the first, or is spelled in a way that says something else too. A word of white space has no such form.

    Raises:
        InvalidParameter: a word has no tokens.
    """
    sequences = []
    for word in words:
        bare = word.lstrip()
        plain = tuple(vocabulary.encode(bare or word))
        if not plain:
            raise InvalidParameter(f"bad_words: {word!r} is not possible: it has no tokens; give text that has some")
        sequences.append(plain)
        if bare:
            spaced = tuple(vocabulary.encode(" " + bare))
            if len(spaced) == len(plain) and spaced[0] != plain[0]:
                sequences.append(spaced)
    # What contains an id that does not exist can never be written.
    return [each for each in sequences if all(0 <= token < vocabulary.size for token in each)]


class BadSequences:
    """Bans the last token of a sequence where the output (not the prompt) ends with the tokens before it.

    Args:
        sequences: of at least two tokens.
    """

    name = "bad_words"

    def __init__(self, sequences: Iterable[Sequence[int]]) -> None:
        self._by_last: dict[int, list[tuple[list[int], int]]] = defaultdict(list)
        self._longest = 1
        for sequence in sequences:
            *before, banned = sequence
            self._by_last[before[-1]].append((before, banned))
            self._longest = max(self._longest, len(before))

    def apply(self, values: Floats, history: History) -> None:
        tail = history.output_tail(self._longest)
        if not tail:
            return
        for before, banned in self._by_last.get(tail[-1], ()):
            if tail[-len(before) :] == before:
                values[banned] = NEVER
