"""A tensor that is not what C takes it for never gets there."""

from __future__ import annotations

import pytest
import torch

from outpace.models.native.linear import NativeLinear
from outpace.models.native.matrix import PackedMatrices, Stored
from outpace.models.native.pointers import address_of
from outpace.models.native.structures import Format, Source
from outpace.types import Segment
from tests.models.tiny_models import lanes, tiny_decoder

GOOD = torch.ones(4, 6)
WIDTH = 72  # of the tiny decoder


def test_a_tensor_that_fits_gives_its_address() -> None:
    assert address_of(GOOD, torch.float32) == GOOD.data_ptr()
    assert address_of(GOOD[1:], torch.float32, (3, 6)) == GOOD.data_ptr() + 24
    assert address_of(torch.empty(0, dtype=torch.int64), torch.int64) == 0


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (GOOD.bfloat16(), "torch.bfloat16 of shape [4, 6] on cpu"),
        (GOOD.double(), "torch.float64"),
        (GOOD.int(), "torch.int32"),
        (GOOD.to("meta"), "on meta"),
        (GOOD.T, "in another order"),
        (GOOD[:, :3], "with gaps"),
        (GOOD[:2], "float32 of shape [4, 6] on cpu"),
        (GOOD.flatten(), "torch.float32 of shape [24]"),
    ],
)
def test_another_is_refused_in_words(tensor: torch.Tensor, said: str) -> None:
    with pytest.raises(ValueError, match=r"is not possible: the kernels take torch\.float32") as error:
        address_of(tensor, torch.float32, (4, 6))
    assert said in str(error.value)


BAD_ROWS = [
    torch.ones(2, WIDTH, dtype=torch.bfloat16),
    torch.ones(2, WIDTH, dtype=torch.float64),
    torch.ones(2, WIDTH, device="meta"),
    torch.ones(2, WIDTH - 1),
    torch.ones(2, WIDTH + 1),
]


@pytest.mark.parametrize("rows", BAD_ROWS, ids=lambda rows: f"{rows.dtype} {rows.device} {rows.shape[1]}")
def test_rows_are_looked_at_before_layers_head_and_products(rows: torch.Tensor) -> None:
    decoder = tiny_decoder("llama")
    cache = lanes(decoder, 1, 8)
    with pytest.raises(ValueError, match="the kernels take"):
        decoder.run_layers(rows, torch.arange(2), (Segment(0, 0, 2, 0),), 0, 1, cache)
    with pytest.raises(ValueError, match="the kernels take"):
        decoder.logits(rows)
    for int8 in (False, True):
        with pytest.raises(ValueError, match="the kernels take"):
            NativeLinear(torch.ones(8, WIDTH), int8=int8)(rows, 1)


def test_rotary_factors_and_ids_are_looked_at() -> None:
    decoder = tiny_decoder("llama")
    cache = lanes(decoder, 1, 8)
    segments, rows = (Segment(0, 0, 2, 0),), torch.ones(2, WIDTH)
    rope = decoder.rope.at(torch.arange(2))
    for wrong in (rope[:1], rope.to(torch.complex128), rope[..., 1:]):
        with pytest.raises(ValueError, match=r"the kernels take torch\.complex64"):
            decoder.layers.run(rows, wrong, segments, 0, 1, cache, {}, None)
    with pytest.raises(ValueError, match=r"the kernels take torch\.int64"):
        decoder.layers.run(rows, rope, segments, 0, 1, cache, {}, torch.zeros(1, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"the kernels take torch\.int64"):
        decoder.embed(torch.zeros(2, dtype=torch.int32))


def test_weights_are_looked_at_before_they_are_packed() -> None:
    with pytest.raises(ValueError, match=r"torch\.float64 of shape \[8, 64\]"):
        NativeLinear(torch.ones(8, 64, dtype=torch.float64), int8=True)
    stored = Stored(Source.F32, torch.ones(8, 64), 8, 64)
    with pytest.raises(ValueError, match=r"float32 of shape \[8\]"):
        PackedMatrices([(stored, Format.F32, torch.ones(900))])
