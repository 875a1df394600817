"""Hidden states, logits and cache rows of a position have the same bits in every pack."""

from __future__ import annotations

import pytest
import torch

from outpace.kv.cache import KEY_BLOCK
from outpace.models import blocks
from outpace.models.decoder import RowPath
from tests.models.rows import LENGTH, assert_same_bits, compute
from tests.models.tiny_models import PRECISIONS, tiny_decoder


@pytest.mark.parametrize("quantization", PRECISIONS)
@pytest.mark.parametrize("variant", ["llama", "llama-biases", "qwen2-window", "qwen3", "mistral-window"])
@pytest.mark.usefixtures("one_thread")
@pytest.mark.thinned(4)
def test_in_blocks_chunks_one_pass_and_beside_neighbours(variant, quantization):
    decoder = tiny_decoder(variant, quantization)
    alone = compute(decoder, [1], LENGTH)
    assert all(part.isfinite().all() for part in alone)
    assert_same_bits(compute(decoder, [LENGTH], LENGTH), alone)
    assert_same_bits(compute(decoder, [97], LENGTH), alone)
    assert_same_bits(compute(decoder, list(range(1, 18)), LENGTH), alone)
    # blocks that end before, at and after the edges of the key blocks
    assert_same_bits(compute(decoder, [KEY_BLOCK - 1, 1, 1, 2, KEY_BLOCK - 3, 5], LENGTH, neighbours=True), alone)
    assert_same_bits(compute(decoder, [2, 5, 3, 8], LENGTH, neighbours=True), alone)


@pytest.mark.parametrize("quantization", PRECISIONS)
def test_with_any_number_of_threads(quantization):
    decoder = tiny_decoder("llama-biases", quantization)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(compute(decoder, [1], 12))
            found.append(compute(decoder, [12], 12))
            found.append(compute(decoder, [5], 12, neighbours=True))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert_same_bits(other, found[0])


class TestElementwiseKernels:
    """Torch splits large elementwise work between threads; three of them would cut inside a row and change its bits."""

    @pytest.fixture(autouse=True)
    def three_threads(self, one_thread):
        torch.set_num_threads(3)

    def test_gate(self):
        gate_up = torch.randn(331, 2 * 1000)
        alone = torch.cat([blocks._gated(row, 1000) for row in torch.split(gate_up, 1)])
        for rows in (32, 33, 100, 131, 230, 331):
            assert torch.equal(blocks._gated(gate_up[:rows], 1000), alone[:rows])
        wanted = torch.nn.functional.silu(gate_up[:, :1000].double()) * gate_up[:, 1000:].double()
        torch.testing.assert_close(alone.double(), wanted, rtol=1e-5, atol=1e-6)

    def test_rotation(self):
        heads, angles = torch.randn(331, 14, 64, dtype=torch.complex64), torch.randn(331, 1, 64, dtype=torch.complex64)
        alone = torch.cat([blocks._rotated(heads[i : i + 1], angles[i : i + 1]) for i in range(331)])
        for rows in (36, 37, 97, 131, 230, 331):
            assert torch.equal(blocks._rotated(heads[:rows], angles[:rows]), alone[:rows])
        torch.testing.assert_close(alone, heads * angles, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("path", "quantization"),
    [(RowPath.ROW_ATTENTION, "torch none"), (RowPath.SINGLE_ROWS, "torch none"), (RowPath.SINGLE_ROWS, "none")],
)
@pytest.mark.usefixtures("one_thread")
def test_slower_paths_compute_the_same_model(path, quantization):
    decoder = tiny_decoder("qwen2-window", quantization)
    wanted = compute(decoder, [40], 40)
    decoder.row_path = path
    alone, chunked = compute(decoder, [1], 40), compute(decoder, [17], 40)
    assert_same_bits(chunked, alone)
    for one, other in zip(alone, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * other.abs().max().item())
