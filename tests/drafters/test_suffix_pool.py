"""The pool of past outputs: its bounds, what goes first, matches against a search, and the file it is kept in."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from outpace.drafters.suffix_pool import LONGEST_MATCH, OutputPool, PoolMatcher
from outpace.errors import CheckpointError, InvalidParameter, OutpaceError, VocabularyMismatch


def find(pool: OutputPool, tokens: Sequence[int], tenant: str = "") -> int:
    """Tokens of the match."""
    match = PoolMatcher(pool, tenant).find(tokens)
    return 0 if match is None else match.length


def search(outputs: Sequence[Sequence[int]], tokens: Sequence[int]) -> int:
    for length in range(len(tokens), 0, -1):
        piece = list(tokens[len(tokens) - length :])
        for output in outputs:
            if any(list(output[at : at + length]) == piece for at in range(len(output) - length + 1)):
                return length
    return 0


OUTPUTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), max_size=6)


@settings(max_examples=200, deadline=None)
@given(OUTPUTS, st.lists(st.integers(0, 3), min_size=1, max_size=30), OUTPUTS)
def test_matches_are_those_of_a_search_while_text_and_pool_grow(
    outputs: list[list[int]], tokens: list[int], later: list[list[int]]
) -> None:
    pool = OutputPool(max_tokens=200, max_outputs=64)  # segments of 25: several of them
    for output in outputs:
        pool.add("", output)
    matcher, kept = PoolMatcher(pool, ""), list(outputs)
    for end in range(1, len(tokens) + 1):
        if later and end % 4 == 0:
            kept.append(later.pop())
            pool.add("", kept[-1])
        match = matcher.find(tokens[:end])
        assert (match.length if match else 0) == search(kept, tokens[:end])


def test_matches_of_a_long_text_are_exact_up_to_the_longest_and_grow_beyond() -> None:
    pool = OutputPool()
    output = list(range(1000, 1200))
    pool.add("", output)
    text = [5] * 300 + output[:150]
    matcher = PoolMatcher(pool, "")
    for end, length in ((320, 20), (450, LONGEST_MATCH), (450, LONGEST_MATCH)):
        match = matcher.find(text[:end])
        assert match is not None and match.length == length
    text.append(output[150])
    match = matcher.find(text)
    assert match is not None and match.length == LONGEST_MATCH + 1


def test_bounds_hold_and_the_least_recently_used_goes() -> None:
    pool = OutputPool(max_tokens=160, max_outputs=100)  # segments of 20
    outputs = [[100 * number + place for place in range(19)] for number in range(20)]
    for number, output in enumerate(outputs):
        pool.add("ab"[number % 2], output)
        assert pool.num_tokens <= 160
        match = PoolMatcher(pool, "a").find(outputs[0])
        assert match is not None and match.length == 19, number
        pool.touch(match.segment)  # drafted from
    assert pool.num_outputs == 8
    kept = [number for number, output in enumerate(outputs) if find(pool, output, "ab"[number % 2]) == 19]
    assert kept == [0, *range(13, 20)]


def test_outputs_are_bounded_too() -> None:
    pool = OutputPool(max_tokens=10_000, max_outputs=8)
    for number in range(30):
        pool.add("", [number, number + 1])
        assert pool.num_outputs <= 8
    assert find(pool, [29, 30]) == 2 and find(pool, [1, 2]) == 0


def test_the_end_of_an_output_that_is_too_long_is_kept() -> None:
    pool = OutputPool(max_tokens=160)
    pool.add("", range(1000, 1100))
    assert pool.num_tokens == 20
    assert find(pool, [1098, 1099]) == 2 and find(pool, [1079, 1080]) == 0


def test_an_output_enters_once() -> None:
    pool = OutputPool(max_tokens=160)
    pool.add("", [1, 2, 3])
    pool.add("", list(range(10, 29)))
    pool.add("", [])
    for _ in range(50):
        pool.add("", [1, 2, 3])
    assert (pool.num_outputs, pool.num_tokens) == (2, 24)
    pool.add("other", [1, 2, 3])
    assert pool.num_outputs == 3


@pytest.mark.parametrize("bounds", [{"max_tokens": 63}, {"max_outputs": 7}, {"max_tokens": -1}])
def test_bounds_that_are_too_small_are_refused(bounds: dict[str, int]) -> None:
    with pytest.raises(InvalidParameter, match="at least"):
        OutputPool(**bounds)


def filled() -> OutputPool:
    pool = OutputPool(max_tokens=160)
    pool.add("a secret key", [1, 2, 3])
    for number in range(4):
        pool.add("", [10 * number + place for place in range(4, 15)])
    return pool


class TestFile:
    def test_what_was_saved_is_there_again(self, tmp_path: Path) -> None:
        path = tmp_path / "pool"
        filled().save(path, "v")
        pool = OutputPool(max_tokens=160)
        pool.load(path, "v")
        assert (pool.num_outputs, pool.num_tokens) == (filled().num_outputs, filled().num_tokens)
        assert find(pool, [1, 2, 3], "a secret key") == 3 and find(pool, [1, 2, 3]) == 0
        assert find(pool, list(range(34, 45))) == 11
        pool.add("", [34, 35])
        pool.save(path, "v")  # over the old file
        again = OutputPool(max_tokens=160)
        again.load(path, "v")
        assert again.num_outputs == pool.num_outputs == 6

    def test_a_smaller_pool_keeps_what_was_used_last(self, tmp_path: Path) -> None:
        old = OutputPool(max_tokens=1600)
        for number in range(100):
            old.add(str(number), [number] * 9)
        old.touch(old.segments("3")[0])
        old.save(tmp_path / "pool", "v")
        pool = OutputPool(max_tokens=80)
        pool.load(tmp_path / "pool", "v")
        assert [n for n in range(100) if find(pool, [n] * 9, str(n))] == [3, *range(93, 100)]

    def test_an_empty_pool(self, tmp_path: Path) -> None:
        OutputPool().save(tmp_path / "pool", "v")
        pool = OutputPool()
        pool.load(tmp_path / "pool", "v")
        assert pool.num_outputs == 0

    def test_it_is_private(self, tmp_path: Path) -> None:
        path = tmp_path / "pool"
        filled().save(path, "v")
        assert path.stat().st_mode & 0o077 == 0
        assert b"a secret key" not in path.read_bytes()

    def test_another_vocabulary_is_refused(self, tmp_path: Path) -> None:
        filled().save(tmp_path / "pool", "this")
        with pytest.raises(VocabularyMismatch, match=r"'this'.*'that'"):
            OutputPool().load(tmp_path / "pool", "that")

    def test_no_damage_goes_unseen(self, tmp_path: Path) -> None:
        path = tmp_path / "pool"
        filled().save(path, "v")
        data = path.read_bytes()
        for at in range(len(data)):
            path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            pool = OutputPool()
            with pytest.raises(OutpaceError, match="pool"):
                pool.load(path, "v")
            assert pool.num_outputs == 0
        for size in (0, 1, 7, 8, 100, len(data) - 1):
            path.write_bytes(data[:size])
            with pytest.raises(CheckpointError, match="damaged"):
                OutputPool().load(path, "v")

    def test_other_files_are_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "pool"
        path.write_text("a" * 1000)
        with pytest.raises(CheckpointError, match="no pool of outputs"):
            OutputPool().load(path, "v")
        save_file({"weight": np.zeros(4, np.float32)}, path)
        with pytest.raises(CheckpointError, match="name another file"):
            OutputPool().load(path, "v")
        with pytest.raises(FileNotFoundError):
            OutputPool().load(tmp_path / "none", "v")

    def test_a_write_that_fails_leaves_the_old_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "pool"
        filled().save(path, "v")
        data = path.read_bytes()

        def full(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            OutputPool().save(path, "v")
        assert path.read_bytes() == data
        assert [file.name for file in tmp_path.iterdir()] == ["pool"]
