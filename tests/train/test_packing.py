"""Windows of six tokens, checked by hand: pieces, places, labels, and which rows count."""

from __future__ import annotations

import random

import torch

from outpace.train.data.document import Document
from outpace.train.data.packing import NOTHING, Windows, pack_documents
from outpace.train.modules.layer import seen


def test_two_texts_in_windows_of_six() -> None:
    chat = Document.answer([1, 2], [3, 4])
    text = Document.text([5, 6, 7, 8, 9, 10, 11])
    windows = pack_documents([chat, text], 6)
    # Two slots are left behind the chat, too few for a piece of four.
    assert windows.ids.tolist() == [[1, 2, 3, 4, 0, 0], [5, 6, 7, 8, 9, 10]]
    assert windows.pieces.tolist() == [[0, 0, 0, 0, NOTHING, NOTHING], [0] * 6]
    assert windows.labels.tolist() == [[False, False, True, True, False, False], [True] * 6]
    # Row t counts if token t + 1 is to be predicted: 3 is behind 2, 4 behind 3; the last row of a piece has no next.
    assert windows.counted.tolist() == [[False, True, True, False, False, False], [True] * 5 + [False]]
    assert windows.positions.tolist() == [[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 4, 5]]
    assert windows.num_tokens == 10


def test_what_is_longer_than_a_window_goes_on_in_another_from_position_zero() -> None:
    """The rest of the long text shares a window with the short one, whose number comes first."""
    windows = pack_documents([Document.text(range(10, 14)), Document.text(range(20, 34))], 10)
    assert windows.ids.tolist() == [[*range(10, 14), *range(30, 34), 0, 0], [*range(20, 30)]]
    assert windows.pieces.tolist() == [[0] * 4 + [1] * 4 + [NOTHING] * 2, [0] * 10]
    assert windows.positions.tolist() == [[*range(4), *range(4), 0, 1], [*range(10)]]
    assert windows.counted.tolist() == [([True] * 3 + [False]) * 2 + [False] * 2, [True] * 9 + [False]]


def test_the_longest_first_each_where_it_leaves_the_least_room() -> None:
    """By hand: 9 and 7 open windows of 12, 5 fills the second, 4 opens a third, of which 4 and 4 take the rest."""
    lengths = [4, 5, 4, 7, 9, 4]
    windows = pack_documents([Document.text([number] * length) for number, length in enumerate(lengths)], 12)
    assert windows.ids.tolist() == [[0] * 4 + [2] * 4 + [5] * 4, [1] * 5 + [3] * 7, [4] * 9 + [0] * 3]


def test_a_text_that_fits_is_never_cut() -> None:
    """Random lengths: every text whole in one window, at positions from 0, and little room wasted."""
    draw = random.Random(5)
    documents = [Document.answer([n] * draw.randint(1, 20), [n] * draw.randint(1, 44)) for n in range(300)]
    whole = {n: len(item.ids) for n, item in enumerate(documents) if len(item.ids) >= 4}
    windows = pack_documents(documents, 64)
    found: dict[int, int] = {}
    for ids, pieces in zip(windows.ids.tolist(), windows.pieces.tolist(), strict=True):
        for piece in range(max(pieces) + 1):
            inside = [token for token, number in zip(ids, pieces, strict=True) if number == piece]
            assert len(set(inside)) == 1
            assert inside[0] not in found
            found[inside[0]] = len(inside)
    assert found == whole
    assert windows.num_tokens > 0.95 * windows.ids.numel()


def test_pieces_without_a_token_to_predict_are_left_out() -> None:
    """A piece that teaches nothing takes nobody's place, and nothing stands before the first token of a piece."""
    prompts = [
        Document([1, 2, 3, 4], [False] * 4),
        Document.text([5, 6, 7, 8]),
        Document([9] * 4, [True] + [False] * 3),
    ]
    assert pack_documents(prompts, 4).ids.tolist() == [[5, 6, 7, 8]]
    assert pack_documents(prompts, 8).ids.tolist() == [[5, 6, 7, 8, 0, 0, 0, 0]]
    assert len(pack_documents([], 4)) == 0
    assert pack_documents([], 4).width == 4


def test_a_row_sees_its_own_piece_up_to_itself() -> None:
    pieces = torch.tensor([[0, 0, 0, 1, 1, NOTHING]])
    expected = [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0],
                [0, 0, 0, 1, 0, 0], [0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 1]]  # fmt: skip
    assert seen(pieces)[0, 0].int().tolist() == expected
    narrow = [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [0, 1, 1, 0, 0, 0],
              [0, 0, 0, 1, 0, 0], [0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 1]]  # fmt: skip
    assert seen(pieces, 2)[0, 0].int().tolist() == narrow


def test_parts_of_windows_are_windows() -> None:
    windows = pack_documents([Document.text(range(12))], 4)
    part = windows[torch.tensor([2, 0])]
    assert isinstance(part, Windows)
    assert part.ids.tolist() == [[8, 9, 10, 11], [0, 1, 2, 3]]
