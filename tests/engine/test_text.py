"""Text of a request: stop strings wherever they fall, and streams that never show what is taken back."""

from __future__ import annotations

import itertools

import pytest

from outpace.engine.text import TextBuilder


class Spelled:
    """Token i is the i-th string; `tail` comes out at the end."""

    def __init__(self, words: list[str], tail: str = "") -> None:
        self.words, self.tail = words, tail

    def push(self, token_id: int) -> str:
        return self.words[token_id]

    def flush(self) -> str:
        return self.tail


def stream(words: list[str], stop: list[str], tail: str = "") -> tuple[str, list[str], str | None]:
    """(final text, what was shown after each token, the stop string found)."""
    text = TextBuilder(Spelled(words, tail), stop)
    shown = []
    found = None
    for index in range(len(words)):
        found = text.push(index, None)
        shown.append("".join(p.text for p in text.release(final=False)))
        if found is not None:
            break
    if found is None:
        found = text.finish()
    shown.append("".join(p.text for p in text.release(final=True)))
    return text.text, shown, found


@pytest.mark.parametrize(
    ("words", "stop", "text", "found"),
    [
        (["ab", "cd", "ef"], ["cd"], "ab", "cd"),  # one token
        (["ab", "cd", "ef"], ["bc"], "a", "bc"),  # across two
        (["ab", "cd", "ef"], ["bcde"], "a", "bcde"),  # across three
        (["abcdef"], ["cd"], "ab", "cd"),  # inside one
        (["abcdef"], ["ef", "bc"], "a", "bc"),  # the earliest end wins, whatever the order given
        (["abc"], ["bc", "abc"], "", "abc"),  # same end: the longer one, which began earlier
        (["ab", "a", "b", "c"], ["abc"], "ab", "abc"),  # a false start before the real one
        (["ab", "", "c"], ["abc"], "", "abc"),  # an unfinished character in between
        (["xx"], ["y"], "xx", None),
        ([], ["y"], "", None),
    ],
)
def test_stop_strings(words: list[str], stop: list[str], text: str, found: str | None) -> None:
    final, shown, stopped = stream(words, stop)
    assert (final, stopped) == (text, found)
    assert "".join(shown) == text


def test_what_may_become_a_stop_string_is_held_back_and_shown_when_it_does_not() -> None:
    _, shown, _ = stream(["one", " st", "ep"], [" stop"])
    assert shown == ["one", "", " step", ""]


def test_without_stop_strings_everything_is_shown_at_once() -> None:
    assert stream(["a", "b"], [])[1] == ["a", "b", ""]


def test_the_tail_of_the_detokenizer_belongs_to_the_last_piece_and_can_complete_a_stop() -> None:
    text = TextBuilder(Spelled(["a", "b"], tail="c"), ["bc"])
    text.push(0, None)
    text.push(1, "prompt")
    assert text.finish() == "bc"
    assert [(p.text, p.token_id, p.source) for p in text.release(final=True)] == [("a", 0, None), ("", 1, "prompt")]


def test_every_split_of_a_text_stops_at_the_same_place() -> None:
    text, stop = "xxababcabx", ["abc", "bx"]
    for cuts in itertools.chain.from_iterable(itertools.combinations(range(1, len(text)), n) for n in range(4)):
        words = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        final, shown, found = stream(words, stop)
        assert (final, found) == ("xxab", "abc")
        assert "".join(shown) == final
