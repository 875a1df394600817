"""Layers on the native kernels: a row's bits in every format and pack, states on the way, kept rows, refusals."""

from __future__ import annotations

import dataclasses

import gguf
import pytest
import torch

from outpace.models.config import DecoderConfig
from outpace.models.decoder import Decoder
from outpace.models.native.layers import NativeEmbedding, NativeHead, NativeLayers
from outpace.models.stored import QuantizedBlocks
from outpace.types import Segment
from tests.models.native.kinds import random_blocks
from tests.models.rows import LENGTH, assert_same_bits, compute
from tests.models.tiny_models import DictWeights, lanes, pack_of, precision, random_ids, reference_model, tiny_weights

FORMATS = ("float32", "float16", "bfloat16", "int8", "int4", "file")
each_format = pytest.mark.parametrize("name", FORMATS)
KINDS = ("Q4_0", "Q5_0", "Q8_0", "Q4_1", "Q5_0", "Q4_0", "Q8_0")
"""Of a layer's seven matrices, so that several formats share the same rows."""


class BlockWeights(DictWeights):
    """A checkpoint whose matrices of whole blocks are stored as a GGUF file would."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self._blocks: dict[str, QuantizedBlocks] = {}
        matrices = [name for name, tensor in tensors.items() if tensor.dim() == 2 and tensor.shape[1] % 32 == 0]
        for number, name in enumerate(matrices):
            kind = KINDS[number % len(KINDS)]
            data = gguf.quants.quantize(tensors[name].numpy(), gguf.GGMLQuantizationType[kind])
            rows, columns = tensors[name].shape
            self._blocks[name] = QuantizedBlocks(kind, (rows, columns), torch.from_numpy(data))
        assert len(self._blocks) == len([t for t in tensors.values() if t.dim() == 2])

    def blocks(self, name: str) -> QuantizedBlocks | None:
        return self._blocks.get(name) or super().blocks(name)


def decoder_in(name: str, variant: str = "llama-biases", **changes: int) -> Decoder:
    if name == "file":
        changes = {"hidden_size": 96, "intermediate_size": 160, **changes}
    model = reference_model(variant, **changes)
    weights = tiny_weights(model)
    if name == "file":
        weights = BlockWeights({key: weights.get(key) for key in weights.shapes})
    return Decoder(DecoderConfig.from_hf(model.config.to_dict()), weights, precision=precision(name))


@pytest.mark.parametrize("variant", ["llama-biases", "qwen2-window", "qwen3-biases"])
@each_format
@pytest.mark.thinned(2)
def test_a_row_has_the_same_bits_in_every_pack(name: str, variant: str) -> None:
    decoder = decoder_in(name, variant)
    alone = compute(decoder, [1], LENGTH)
    assert all(part.isfinite().all() for part in alone)
    for sizes in ([*range(1, 17)], [7], [64], [512], [LENGTH]):
        assert_same_bits(compute(decoder, sizes, LENGTH), alone)
    for sizes in ([1, 16, 2, 9], [63, 1, 1, 64, 127]):
        assert_same_bits(compute(decoder, sizes, LENGTH, neighbours=True), alone)
    torch.set_num_threads(2)
    for sizes, neighbours in (([300], True), ([5, 8, 40], False)):
        assert_same_bits(compute(decoder, sizes, LENGTH, neighbours=neighbours), alone)


@each_format
def test_widths_beyond_one_task_and_one_kept_scratch(name: str) -> None:
    """Gating in several parts, products in several tasks, and more scratch than is kept between calls."""
    decoder = decoder_in(name, "llama", hidden_size=192, intermediate_size=3200, num_hidden_layers=1)
    ids, rows = random_ids(96), []
    for size in (1, 5, 96):
        cache = lanes(decoder, 1, 96)
        packs = [pack_of((0, at, ids[at : at + size])) for at in range(0, 96, size)]
        rows.append(torch.cat([decoder.forward(pack, cache).logits for pack in packs]))
    torch.set_num_threads(2)
    rows.append(decoder.forward(pack_of((0, 0, ids)), lanes(decoder, 1, 96)).logits)
    assert all(torch.equal(other, rows[0]) for other in rows)


class Run:
    """A decoder's layers over 30 rows of one request and 9 of another, an empty segment between them."""

    def __init__(self, name: str = "int8") -> None:
        self.decoder = decoder_in(name)
        assert isinstance(self.decoder.layers, NativeLayers)
        self.layers = self.decoder.layers
        self.pack = pack_of((0, 0, random_ids(30)), (2, 4, []), (1, 0, random_ids(9, 5)))
        self.hidden = self.decoder.embed(self.pack.ids)
        self.cache = lanes(self.decoder, 3, 40)

    def __call__(
        self, begin: int = 0, end: int = 4, aux: tuple[int, ...] = (), keep: list[int] | None = None
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        none = torch.empty(0, 1, 6, dtype=torch.complex64)
        rope = self.decoder.rope.at(self.pack.positions) if len(self.hidden) else none
        states = {layer: torch.empty(0) for layer in aux}
        rows = None if keep is None else torch.tensor(keep, dtype=torch.long)
        result = self.layers.run(self.hidden, rope, self.pack.segments, begin, end, self.cache, states, rows)
        return result, states

    def written(self) -> torch.Tensor:
        return torch.cat([pool(layer) for layer in range(4) for pool in (self.cache.keys, self.cache.values)])


@each_format
@pytest.mark.parametrize("keep", [[], [0], [38], [29, 30], [0, 3, 4, 17, 30, 38], list(range(39))], ids=str)
def test_kept_rows_are_those_of_all_and_everything_is_written(name: str, keep: list[int]) -> None:
    everything, some = Run(name), Run(name)
    wanted, _ = everything()
    found, states = some(keep=keep, aux=(0, 3))
    assert torch.equal(found, wanted[keep])
    assert torch.equal(some.written(), everything.written())
    assert torch.equal(states[0], some.hidden)
    assert states[3].shape == wanted.shape and torch.equal(states[3], everything(0, 3)[0])


def test_states_on_the_way_are_those_that_stopping_there_gives() -> None:
    run = Run()
    whole, states = run(aux=(0, 1, 2, 3, 4))
    assert torch.equal(states[0], run.hidden) and torch.equal(states[4], whole)
    for layer in (1, 2, 3):
        part, _ = Run()(0, layer)
        assert torch.equal(part, states[layer])
    _, outside = run(1, 2, aux=(0, 1, 2, 4))
    assert outside[0].numel() == outside[4].numel() == 0 and len(outside[1]) == len(outside[2]) == 39


@pytest.mark.parametrize("layer", [0, 2, 4])
def test_no_layers_leave_everything_as_it_is(layer: int) -> None:
    run = Run()
    result, states = run(layer, layer, aux=(layer,))
    assert torch.equal(result, run.hidden) and torch.equal(states[layer], run.hidden)
    assert result.data_ptr() != run.hidden.data_ptr()
    assert not run.written().any()


@pytest.mark.parametrize("keep", [[], [3, 7, 30]], ids=str)
def test_no_layers_hand_out_the_kept_rows(keep: list[int]) -> None:
    run = Run()
    assert torch.equal(run(2, 2, keep=keep)[0], run.hidden[keep])


def test_the_states_given_are_not_changed() -> None:
    run = Run()
    before = run.hidden.clone()
    run(keep=[5])
    assert torch.equal(run.hidden, before)


def test_no_rows() -> None:
    run = Run()
    run.hidden, run.pack = run.hidden[:0], dataclasses.replace(run.pack, positions=torch.arange(0), segments=())
    result, states = run(aux=(1,))
    assert result.shape == states[1].shape == (0, 72)


@each_format
def test_a_row_that_is_no_number_stays_in_its_request(name: str) -> None:
    clean, spoilt = Run(name), Run(name)
    wanted, _ = clean()
    spoilt.hidden = spoilt.hidden.clone()
    spoilt.hidden[33, 7] = float("nan")
    found, _ = spoilt()
    good = [row for row in range(39) if row < 33]
    assert torch.equal(found[good], wanted[good])
    assert not found[33:].isfinite().any(1).any()


@pytest.mark.parametrize("kept", [None, [2]], ids=str)
def test_slots_that_are_not_reserved_are_refused(kept: list[int] | None) -> None:
    run = Run()
    run.cache.truncate(1, 8)
    with pytest.raises(ValueError, match=r"ends beyond the 8 reserved rows of its lane"):
        run(keep=kept)
    assert not run.written().any()
    run.cache.release(1)
    with pytest.raises(ValueError, match="lane 1 is not allocated"):
        run(keep=kept)


def test_a_cache_of_another_model_is_refused() -> None:
    run = Run()
    for change in ({"num_key_value_heads": 3}, {"head_dim": 16}, {"num_hidden_layers": 3}):
        model = reference_model("llama", **change)
        other = Decoder(DecoderConfig.from_hf(model.config.to_dict()), tiny_weights(model), precision=precision("int8"))
        run.cache = lanes(other, 3, 40)
        with pytest.raises(ValueError, match=r"a cache of \d heads of \d+ in \d layers does not serve 2 of 12 in 4"):
            run()


def test_two_caches_in_turn() -> None:
    first, run = Run(), Run()
    wanted, _ = first()
    for _ in range(2):
        assert torch.equal(run()[0], wanted)
        run.cache = lanes(run.decoder, 3, 64)
    assert not run.written().any()


@each_format
def test_logits_one_by_one_and_together(name: str) -> None:
    decoder = decoder_in(name)
    states = torch.randn(70, decoder.hidden_size, generator=torch.Generator().manual_seed(1))
    assert isinstance(decoder.head, NativeHead)
    together = decoder.head.logits(states)
    assert together.shape == (70, 97)
    assert torch.equal(torch.cat([decoder.head.logits(row) for row in torch.split(states, 1)]), together)
    assert torch.equal(decoder.head.logits(states.T.contiguous().T), together)
    torch.set_num_threads(2)
    assert torch.equal(decoder.head.logits(states), together)
    other = decoder.head.with_norm(torch.full((decoder.hidden_size,), 2.0))
    assert other.weight_bytes == decoder.head.weight_bytes and not torch.equal(other.logits(states), together)


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q8_0"])
def test_an_embedding_stays_as_it_is_stored(kind: str) -> None:
    blocks = QuantizedBlocks(kind, (20, 256), torch.from_numpy(random_blocks(kind, 20, 256)))

    class Weights(DictWeights):
        def blocks(self, name: str) -> QuantizedBlocks | None:
            return blocks

    embedding = NativeEmbedding(Weights({}), "e")
    assert embedding.weight_bytes == 0  # it stays in the file
    ids = torch.tensor([[3, 0], [19, 1], [3, 2]])[:, 0]  # not side by side
    torch.testing.assert_close(embedding.rows(ids), blocks.dequantize()[ids], rtol=1e-6, atol=1e-9)


def test_a_segment_says_where_its_rows_go() -> None:
    run = Run()
    run.hidden = run.hidden[:3]
    run.pack = dataclasses.replace(run.pack, positions=torch.arange(5, 8), segments=(Segment(2, 0, 3, 5),))
    run()
    heads = run.cache.num_kv_heads
    for layer in range(4):
        for pool in (run.cache.keys(layer), run.cache.values(layer)):
            used = pool.view(3, heads, -1, 12).any(-1)
            assert used[2, :, 5:8].all() and used.sum() == 3 * heads
