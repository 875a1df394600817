"""Windows of six tokens, checked by hand: pieces, places, labels, and which rows count."""

from __future__ import annotations

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


def test_a_text_goes_on_in_the_next_window_from_position_zero() -> None:
    windows = pack_documents([Document.text(range(10, 14)), Document.text(range(20, 34))], 10)
    assert windows.ids.tolist() == [[*range(10, 14), *range(20, 26)], [*range(26, 34), 0, 0]]
    assert windows.pieces.tolist() == [[0] * 4 + [1] * 6, [0] * 8 + [NOTHING] * 2]
    assert windows.positions.tolist() == [[*range(4), *range(6)], [*range(8), 0, 1]]
    assert windows.counted.tolist() == [[True] * 3 + [False] + [True] * 5 + [False], [True] * 7 + [False] * 3]


def test_windows_without_a_token_to_predict_are_left_out() -> None:
    prompts = [Document([1, 2, 3, 4], [False] * 4), Document.text([5, 6, 7, 8])]
    assert pack_documents(prompts, 4).ids.tolist() == [[5, 6, 7, 8]]
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
