"""Which format a matrix is computed in."""

from __future__ import annotations

import gguf
import pytest
import torch

from outpace.models.native.matrix import format_of, source_of
from outpace.models.native.structures import Format
from outpace.models.precision import Precision
from outpace.models.stored import block_size

KINDS = [kind.name for kind in gguf.GGMLQuantizationType if block_size(kind.name) is not None]
OWN_FORMAT = {"Q4_0": Format.Q4, "Q4_1": Format.Q4, "Q4_K": Format.Q4, "Q5_0": Format.Q6, "Q6_K": Format.Q6}


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_keep_their_numbers_or_take_eight_bits(kind: str) -> None:
    source = source_of(kind, torch.float16)
    assert format_of(Precision("file"), source, blocks=True) == OWN_FORMAT.get(kind, Format.Q8)
    assert format_of(Precision("none"), source, blocks=True) == Format.F32
    assert format_of(Precision("none", "float16"), source, blocks=True) == Format.F16
    assert format_of(Precision("int8"), source, blocks=True) == Format.Q8
    assert format_of(Precision("int4"), source, blocks=True) == Format.Q4
    assert format_of(Precision("int4"), source, blocks=True, head=True) == OWN_FORMAT.get(kind, Format.Q8)


@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [
        (torch.float64, Format.F32),
        (torch.float32, Format.F32),
        (torch.float16, Format.F16),
        (torch.bfloat16, Format.BF16),
    ],
)
def test_floats_stay_as_stored_unless_told_otherwise(dtype: torch.dtype, wanted: int) -> None:
    source = source_of(None, dtype)
    assert format_of(Precision("none"), source, blocks=False) == wanted
    assert format_of(Precision("file"), source, blocks=False) == wanted
    assert format_of(Precision("none", "bfloat16"), source, blocks=False) == Format.BF16
    assert format_of(Precision("int8"), source, blocks=False) == Format.Q8
    assert format_of(Precision("int4"), source, blocks=False, head=True) == Format.Q8
