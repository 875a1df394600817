"""Text of a request: stop strings wherever they fall, and streams that never show what is taken back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from outpace.engine.outputs import Logprob, Piece
from outpace.engine.stop_strings import MAX_STOP_CHARACTERS, stop_strings
from outpace.engine.text import TextBuilder
from outpace.errors import InvalidParameter


class Spelled:
    """Token i is the i-th string; `tail` comes out at the end."""

    def __init__(self, words: Sequence[str], tail: str = "") -> None:
        self.words, self.tail = words, tail

    def push(self, token_id: int) -> str:
        return self.words[token_id]

    def flush(self) -> str:
        tail, self.tail = self.tail, ""
        return tail


@dataclass
class Streamed:
    """What came of a text: after how many tokens it ended, and the pieces shown after each block of them."""

    text: str
    found: str | None
    tokens: int
    blocks: list[tuple[Piece, ...]] = field(default_factory=list)

    @property
    def shown(self) -> list[str]:
        return ["".join(piece.text for piece in block) for block in self.blocks]


def stream(
    words: Sequence[str],
    stop: Sequence[str],
    tail: str = "",
    *,
    include_stop: bool = False,
    min_tokens: int = 0,
    block: int = 1,
    stop_token: bool = False,
) -> Streamed:
    """Feeds tokens in blocks as the engine does; with `stop_token` the last of them is a stop token."""
    text = TextBuilder(Spelled(words, tail), stop, include_stop=include_stop, min_tokens=min_tokens)
    blocks, found, tokens = [], None, 0
    for index in range(len(words)):
        tokens += 1
        if stop_token and index == len(words) - 1:
            text.push_stop(index, None)
        else:
            found = text.push(index, None)
        if found is not None or tokens == len(words):
            break
        if tokens % block == 0:
            blocks.append(text.release(final=False))
    if found is None:
        found = text.finish()
    blocks.append(text.release(final=True))
    return Streamed(text.text, found, tokens, blocks)


@pytest.mark.parametrize(
    ("words", "stop", "text", "found"),
    [
        (["ab", "cd", "ef"], ["cd"], "ab", "cd"),  # one token
        (["ab", "cd", "ef"], ["bc"], "a", "bc"),  # across two
        (["ab", "cd", "ef"], ["bcde"], "a", "bcde"),  # across three
        (["abcdef"], ["cd"], "ab", "cd"),  # inside one
        (["abcdef"], ["ef", "bc"], "a", "bc"),  # the earliest end wins, whatever the order given
        (["abc"], ["bc", "abc"], "", "abc"),  # same end: the longer one, which began earlier
        (["ab", "c"], ["abcd", "b"], "a", "b"),  # inside a longer one that does not come
        (["abc"], ["ab", "abc"], "", "ab"),  # the beginning of another: it ends first
        (["xaba", "bac"], ["abac", "ababab"], "xab", "abac"),  # a beginning inside a beginning
        (["ab", "a", "b", "c"], ["abc"], "ab", "abc"),  # a false start before the real one
        (["ab", "", "c"], ["abc"], "", "abc"),  # an unfinished character in between
        (["a\U0001f469\u200d", "\U0001f467b"], ["\u200d\U0001f467"], "a\U0001f469", "\u200d\U0001f467"),
        (["xx"], ["y"], "xx", None),
        ([], ["y"], "", None),
    ],
)
def test_stop_strings(words: list[str], stop: list[str], text: str, found: str | None) -> None:
    for block in (1, 2, 3):
        result = stream(words, stop, block=block)
        assert (result.text, result.found) == (text, found)
        assert "".join(result.shown) == text
        included = stream(words, stop, block=block, include_stop=True)
        assert (included.text, included.found) == (text + (found or ""), found)
        assert "".join(included.shown) == included.text


def test_what_may_become_a_stop_string_is_held_back_and_shown_when_it_does_not() -> None:
    assert stream(["one", " st", "ep", "."], [" stop"]).shown == ["one", "", " step", "."]
    assert stream(["one", " st"], [" stop"]).shown == ["one", " st"]  # nor at the end


def test_without_stop_strings_everything_is_shown_at_once() -> None:
    assert stream(["a", "b", "c"], []).shown == ["a", "b", "c"]


def test_pieces_without_text_wait_for_text_or_the_end() -> None:
    result = stream(["", "a", "", "", "b", "", ""], ["x"])
    ids = [[piece.token_id for piece in block] for block in result.blocks]
    assert ids == [[], [0, 1], [], [], [2, 3, 4], [], [5, 6]]
    # A stop string takes all text of a block: what is left has none, and is still the end.
    assert [[piece.token_id for piece in block] for block in stream(["a", "x"], ["x"]).blocks] == [[0], [1]]


def test_the_tail_of_the_detokenizer_belongs_to_the_last_piece_and_can_complete_a_stop() -> None:
    text = TextBuilder(Spelled(["a", "b"], tail="c"), ["bc"])
    text.push(0, None)
    text.push(1, "prompt")
    assert text.finish() == "bc"
    assert [(p.text, p.token_id, p.source) for p in text.release(final=True)] == [("a", 0, None), ("", 1, "prompt")]
    assert stream(["a", "b"], ["bc"], tail="cd", include_stop=True).text == "abc"


def test_the_text_ends_once() -> None:
    text = TextBuilder(Spelled(["ab", "c"], tail="more"), ["b"])
    assert text.push(0, None) == "b"
    assert text.finish() == text.finish() == "b"
    assert text.text == "a" == "".join(piece.text for piece in text.release(final=True))
    assert text.release(final=True) == ()


def test_a_tail_that_no_piece_can_carry_any_more_is_not_text() -> None:
    text = TextBuilder(Spelled(["a"], tail="\ufffd"), [])
    text.push(0, None)
    assert [piece.text for piece in text.release(final=False)] == ["a"]
    assert text.finish() is None
    assert text.text == "a" and text.release(final=True) == ()


def test_pieces_keep_what_they_were_given() -> None:
    text = TextBuilder(Spelled(["ab", "cd", "</s>"]), ["bc"])
    first, second = {0: Logprob(-0.5, 1, "ab")}, {1: Logprob(-1.5, 2, "cd")}
    text.push(0, None, first)
    text.push(1, "ngram", second)
    assert text.release(final=True) == (Piece("a", 0, None, first), Piece("", 1, "ngram", second))
    text = TextBuilder(Spelled(["ab"]), [])
    text.push_stop(0, "ngram", first)
    assert text.release(final=True) == (Piece("", 0, "ngram", first),)


# --- stop tokens


@pytest.mark.parametrize(("include_stop", "text", "found"), [(False, "ab\ufffd", None), (True, "ab</s>\ufffd", None)])
def test_the_text_of_a_stop_token_counts_only_if_included(include_stop: bool, text: str, found: str | None) -> None:
    result = stream(["ab", "</s>"], ["x"], "\ufffd", include_stop=include_stop, stop_token=True)
    assert (result.text, result.found, "".join(result.shown)) == (text, found, text)


def test_a_stop_string_in_the_text_of_a_stop_token() -> None:
    assert stream(["ab", "</s>"], ["b</"], include_stop=True, stop_token=True).found == "b</"
    assert stream(["ab", "</s>"], ["b</"], include_stop=True, stop_token=True).text == "ab</"
    assert stream(["ab", "</s>"], ["b</"], stop_token=True).found is None


# --- the least number of tokens


@pytest.mark.parametrize(
    ("words", "stop", "min_tokens", "tokens", "text", "found"),
    [
        (["ab", "ab", "xabab", "c"], ["ab"], 0, 1, "", "ab"),
        (["ab", "ab", "xabab", "c"], ["ab"], 1, 2, "ab", "ab"),
        (["ab", "ab", "xabab", "c"], ["ab"], 2, 3, "ababx", "ab"),
        (["ab", "ab", "xabab", "c"], ["ab"], 3, 4, "ababxababc", None),
        (["xa", "b", "y"], ["ab"], 1, 2, "x", "ab"),  # begins early, ends late enough
        (["xab", "a"], ["ab", "ba"], 1, 2, "xa", "ba"),  # overlaps one that was too early
        (["ab", "c"], ["ab", "abc"], 1, 2, "", "abc"),  # goes on from one that was too early
        (["", "ab"], ["ab"], 1, 2, "", "ab"),  # the detokenizer had held its text back
        ([" is", " Lee", ",", " and", " I", "'m", " a", " student"], ["e"], 5, 8, " is Lee, and I'm a stud", "e"),
    ],
)
def test_stop_strings_that_end_too_early_do_not_count(
    words: list[str], stop: list[str], min_tokens: int, tokens: int, text: str, found: str | None
) -> None:
    result = stream(words, stop, min_tokens=min_tokens)
    assert (result.tokens, result.text, result.found) == (tokens, text, found)
    assert "".join(result.shown) == text


@pytest.mark.parametrize(("min_tokens", "found"), [(1, "b</"), (2, None)])
def test_a_stop_token_is_one_of_the_tokens(min_tokens: int, found: str | None) -> None:
    result = stream(["ab", "</s>"], ["b</"], include_stop=True, stop_token=True, min_tokens=min_tokens)
    assert result.found == found


@pytest.mark.parametrize(("min_tokens", "found"), [(0, "ab"), (1, None)])
def test_the_tail_counts_as_the_last_token(min_tokens: int, found: str | None) -> None:
    assert stream(["a"], ["ab"], tail="b", min_tokens=min_tokens).found == found


# --- anything


def oracle(
    words: Sequence[str], tail: str, stop: Sequence[str], include_stop: bool, min_tokens: int
) -> tuple[str, str | None]:
    """(text, stop string) by reading one character after the other."""
    text = ""
    for number, word in enumerate(words, start=1):
        for letter in word + (tail if number == len(words) else ""):
            text += letter
            ended = [item for item in stop if text.endswith(item)]
            if ended and number > min_tokens:
                longest = max(ended, key=len)
                return (text if include_stop else text[: -len(longest)]), longest
    return text, None


WORDS = st.lists(st.text("ab\u0301", max_size=5), max_size=12)
STOPS = st.lists(st.text("ab\u0301", min_size=1, max_size=6), max_size=4)
ANYTHING = settings(max_examples=500, deadline=None, derandomize=True, database=None)


@ANYTHING
@given(WORDS, st.text("ab", max_size=3), STOPS, st.booleans(), st.integers(0, 6), st.integers(1, 5))
@example(["a", "ba"], "b", ["abab"], False, 0, 1)
def test_text_and_stream_are_what_a_reader_of_characters_finds(
    words: list[str], tail: str, stop: list[str], include_stop: bool, min_tokens: int, block: int
) -> None:
    tail = tail if words else ""
    result = stream(words, stop, tail, include_stop=include_stop, min_tokens=min_tokens, block=block)
    assert (result.text, result.found) == oracle(words, tail, stop, include_stop, min_tokens)
    assert "".join(result.shown) == result.text
    assert [piece.token_id for shown in result.blocks for piece in shown] == list(range(result.tokens))
    assert all(shown or not pieces for shown, pieces in zip(result.shown[:-1], result.blocks[:-1], strict=True))


@ANYTHING
@given(WORDS, STOPS, st.integers(0, 12))
def test_nothing_is_held_back_without_need(words: list[str], stop: list[str], min_tokens: int) -> None:
    builder, text, ends, shown = TextBuilder(Spelled(words), stop, min_tokens=min_tokens), "", [0], ""
    for index, word in enumerate(words):
        if builder.push(index, None) is not None:
            return
        text += word
        ends.append(len(text))
        shown += "".join(piece.text for piece in builder.release(final=False))
        tails = [text[start:] for start in range(len(text))]
        claimed = max((len(tail) for tail in tails if any(s != tail and s.startswith(tail) for s in stop)), default=0)
        assert len(shown) == max(end for end in ends if end <= len(text) - claimed)


@ANYTHING
@given(st.text("abc", max_size=30), STOPS, st.data())
def test_every_split_of_a_text_ends_at_the_same_place(text: str, stop: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    words = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    split, whole = stream(words, stop), stream([text], stop)
    assert (split.text, split.found) == (whole.text, whole.found)


# --- cost


def test_every_character_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = ["abcd", "cd", "xyz", "\n\n"]
    automaton, read = stop_strings(tuple(stop)), []
    original = type(automaton).scan
    monkeypatch.setattr(type(automaton), "scan", lambda self, *a, **kw: read.append(a[1]) or original(self, *a, **kw))
    words = ["abc", "x", "", "y"] * 500
    assert stream(words, stop).text == "".join(words) == "".join(read)


def test_many_and_long_stop_strings() -> None:
    many = [f"<{number}>" for number in range(5000)]
    assert stream(["<<", "49", "99", "x><4", "9999>"], many).found is None
    result = stream(["<<", "49", "99", ">x"], many)
    assert (result.text, result.found) == ("<", "<4999>")
    # A text that could be the beginning everywhere: each character is still looked at once or twice.
    long = "a" * 30_000 + "b"
    result = stream([*(["a"] * 40_000), "b"], [long])
    assert (result.text, result.found) == ("a" * 10_000, long)
    assert "".join(result.shown) == result.text


def test_stop_strings_have_room_for_so_many_characters() -> None:
    half = MAX_STOP_CHARACTERS // 2
    assert stream(["xab"], ["a" * half, "b" * half]).text == "xab"
    with pytest.raises(InvalidParameter, match=r"stop has 65537 characters in 3 strings: 65536 in all are possible"):
        TextBuilder(Spelled([]), ["a" * half, "b" * half, "c"])


def test_requests_with_the_same_stop_strings_share_their_automaton_but_no_state() -> None:
    assert stop_strings(("ab",)) is stop_strings(("ab",))
    first, second = TextBuilder(Spelled(["a", "b"]), ["ab"]), TextBuilder(Spelled(["a", "b"]), ["ab"])
    assert [first.push(0, None), second.push(1, None), first.push(1, None)] == [None, None, "ab"]
