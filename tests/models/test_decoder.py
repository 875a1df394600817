"""The decoder against transformers' own logits, in fp32 on tiny checkpoints of every architecture, on both kernels."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from outpace.errors import CheckpointError, InvalidParameter
from outpace.models.config import DecoderConfig
from outpace.models.decoder import Decoder, RowPath
from outpace.types import Segment
from tests.models.tiny_models import (
    PRECISIONS,
    VARIANTS,
    DictWeights,
    lanes,
    pack_of,
    precision,
    random_ids,
    reference_model,
    tiny_decoder,
    tiny_weights,
)

LENGTH = 70

pytestmark = pytest.mark.usefixtures("one_thread")


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("quantization", ["none", "torch none"])
@pytest.mark.parametrize("variant", VARIANTS)
class TestAgainstTransformers:
    @pytest.fixture
    def case(self, variant, quantization):
        model = reference_model(variant)
        decoder = Decoder(
            DecoderConfig.from_hf(model.config.to_dict()), tiny_weights(model), precision=precision(quantization)
        )
        ids = random_ids(LENGTH, 1), random_ids(LENGTH, 2)
        with torch.no_grad():
            return decoder, ids, [model(torch.tensor([row])).logits[0] for row in ids]

    def test_prefill_in_one_pass(self, case):
        decoder, (ids, _), (wanted, _) = case
        assert_close(decoder.forward(pack_of((0, 0, ids)), lanes(decoder, 1, LENGTH)).logits, wanted)

    def test_chunks_tokens_and_two_requests(self, case):
        decoder, ids, wanted = case
        cache = lanes(decoder, 2, LENGTH)
        found: list[list[torch.Tensor]] = [[], []]
        for begin, end in [(0, 20), (20, 37), *((at, at + 1) for at in range(37, 45)), (45, LENGTH)]:
            parts = [(lane, begin, ids[lane][begin:end]) for lane in (1, 0)]
            logits = decoder.forward(pack_of(*parts), cache).logits
            found[1].append(logits[: end - begin])
            found[0].append(logits[end - begin :])
        for lane in (0, 1):
            assert_close(torch.cat(found[lane]), wanted[lane])

    def test_hidden_states_entering_layers(self, case, variant):
        decoder, (ids, _), (wanted, _) = case
        with torch.no_grad():
            states = reference_model(variant)(torch.tensor([ids]), output_hidden_states=True).hidden_states
        pack = pack_of((0, 0, ids), aux_layers=(0, 1, 3, 4), logits_rows=(5,))
        result = decoder.forward(pack, lanes(decoder, 1, LENGTH))
        for layer in (0, 1, 3):
            assert_close(result.aux[layer], states[layer][0])
        # transformers' last state has been through the final norm already
        assert_close(decoder.logits(result.aux[4]), wanted)


@pytest.mark.parametrize("quantization", PRECISIONS)
@pytest.mark.parametrize("variant", ["llama-biases", "qwen2-window", "qwen3"])
class TestOnlyWantedRows:
    def test_logits_of_some_rows_are_those_of_all(self, variant, quantization):
        decoder = tiny_decoder(variant, quantization)
        parts = ((0, 0, random_ids(30)), (1, 0, random_ids(9, 5)))
        cache, other = lanes(decoder, 2, 40), lanes(decoder, 2, 40)
        everything = decoder.forward(pack_of(*parts), cache).logits
        some = decoder.forward(pack_of(*parts, logits_rows=(29, 30, 38)), other).logits
        assert torch.equal(some, everything[[29, 30, 38]])
        for layer in range(decoder.num_layers):
            assert torch.equal(cache.keys(layer), other.keys(layer))
            assert torch.equal(cache.values(layer), other.values(layer))

    def test_no_logits_still_fill_the_cache(self, variant, quantization):
        decoder = tiny_decoder(variant, quantization)
        ids = random_ids(30)
        cache, other = lanes(decoder, 1, 40), lanes(decoder, 1, 40)
        wanted = decoder.forward(pack_of((0, 0, ids)), cache).logits[20:]
        first = decoder.forward(pack_of((0, 0, ids[:20]), logits_rows=()), other).logits
        assert first.shape == (0, 97)
        assert torch.equal(decoder.forward(pack_of((0, 20, ids[20:])), other).logits, wanted)


class TestHeadAndLimits:
    @pytest.mark.parametrize("quantization", ["none", "torch none"])
    def test_padded_ids_do_not_exist(self, quantization):
        model = reference_model("llama-tied")
        config = DecoderConfig.from_hf(model.config.to_dict())
        full = Decoder(config, tiny_weights(model), precision=precision(quantization))
        cut = Decoder(config, tiny_weights(model), precision=precision(quantization), vocab_size=91)
        pack = pack_of((0, 0, random_ids(12)))
        assert (full.vocab_size, cut.vocab_size) == (97, 91)
        wanted = full.forward(pack, lanes(full, 1, 12)).logits[:, :91]
        assert_close(cut.forward(pack, lanes(cut, 1, 12)).logits, wanted)

    def test_a_tokenizer_with_more_ids_than_embeddings_keeps_the_checkpoints_size(self):
        model = reference_model("llama")
        config = DecoderConfig.from_hf(model.config.to_dict())
        assert Decoder(config, tiny_weights(model), precision=precision("none"), vocab_size=120).vocab_size == 97

    def test_length(self):
        model = reference_model("llama")
        config = DecoderConfig.from_hf(model.config.to_dict())
        assert Decoder(config, tiny_weights(model), precision=precision("none")).max_model_len == 512
        assert Decoder(config, tiny_weights(model), precision=precision("none"), max_model_len=64).max_model_len == 64
        with pytest.raises(InvalidParameter, match=r"max_model_len=513.*512 positions"):
            Decoder(config, tiny_weights(model), precision=precision("none"), max_model_len=513)

    @pytest.mark.parametrize("quantization", ["none", "torch none"])
    def test_missing_tensor_is_named(self, quantization):
        model = reference_model("llama")
        tensors = model.state_dict()
        del tensors["model.layers.2.mlp.up_proj.weight"]
        with pytest.raises(CheckpointError, match=r"model\.layers\.2\.mlp\.up_proj\.weight"):
            config = DecoderConfig.from_hf(model.config.to_dict())
            Decoder(config, DictWeights(tensors), precision=precision(quantization))

    @pytest.mark.parametrize("quantization", ["none", "torch none"])
    def test_progress_and_weight_bytes(self, quantization):
        model = reference_model("llama")
        seen: list[tuple[int, int]] = []
        decoder = Decoder(
            DecoderConfig.from_hf(model.config.to_dict()),
            tiny_weights(model),
            precision=precision(quantization),
            progress=lambda done, total: seen.append((done, total)),
        )
        assert seen == [(1, 5), (2, 5), (3, 5), (4, 5), (5, 5)]  # four layers and the head
        shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        norms, embedding = 9 * 72, 97 * 72
        matrices = [s for name, s in shapes.items() if len(s) == 2 and "embed" not in name]
        if (
            quantization == "none"
        ):  # panels of 8 outputs, whole groups of 32 inputs, a place for each bias; no embedding
            linear = sum(-(-outputs // 8) * 8 * (-(-inputs // 32) * 32 + 1) for outputs, inputs in matrices)
            assert decoder.weight_bytes == 4 * (norms + linear)
        else:  # each norm's weight is kept doubled
            assert decoder.weight_bytes == 4 * (2 * norms + embedding + sum(shape.numel() for shape in matrices))

    @pytest.mark.parametrize("quantization", ["none", "torch none"])
    def test_half_precision_checkpoint_is_widened_exactly(self, quantization):
        model = reference_model("qwen2")
        stored = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
        model.load_state_dict({name: tensor.float() for name, tensor in stored.items()})
        decoder = Decoder(
            DecoderConfig.from_hf(model.config.to_dict()), DictWeights(stored), precision=precision(quantization)
        )
        ids = random_ids(20)
        with torch.no_grad():
            wanted = model(torch.tensor([ids])).logits[0]
        assert_close(decoder.forward(pack_of((0, 0, ids)), lanes(decoder, 1, 20)).logits, wanted)


class TestResume:
    """Rows with kept states skip the lower layers; everything else stays the same to the bit."""

    @pytest.mark.parametrize("path", RowPath)
    @pytest.mark.parametrize("quantization", PRECISIONS)
    @pytest.mark.parametrize("exit_layer", [0, 1, 2, 3, 4])
    @pytest.mark.thinned(3)
    def test_equals_the_full_forward(self, exit_layer, quantization, path):
        decoder = tiny_decoder("qwen2-window", quantization)
        decoder.row_path = path
        prompts, blocks = [random_ids(40, 3), random_ids(17, 4)], [random_ids(5, 5), random_ids(4, 6)]
        chunk = random_ids(6, 8)
        whole, split = lanes(decoder, 3, 50), lanes(decoder, 3, 50)
        for cache in (whole, split):
            decoder.forward(pack_of((0, 0, prompts[0]), (1, 0, prompts[1])), cache)
        parts = ((0, 40, blocks[0]), (2, 0, chunk), (1, 17, blocks[1]))
        pack = pack_of(*parts, aux_layers=(0, 2, exit_layer, 4), logits_rows=(0, 1, 2, 3, 4, 10, 11, 14))
        wanted = decoder.forward(pack, whole)

        # all rows but the last of both blocks have been through the lower layers, one row at a time
        kept: list[torch.Tensor] = []
        for lane, first, ids in ((0, 40, blocks[0][:4]), (1, 17, blocks[1][:3])):
            for i, token in enumerate(ids):
                segment, position = Segment(lane, 0, 1, first + i), torch.tensor([first + i])
                state = decoder.embed(torch.tensor([token]))
                kept.append(decoder.run_layers(state, position, (segment,), 0, exit_layer, split))
        rows = torch.tensor([0, 1, 2, 3, 11, 12, 13])
        resumed = dataclasses.replace(pack, resume_layer=exit_layer, resume_rows=rows, resume_hidden=torch.cat(kept))
        found = decoder.forward(resumed, split)
        assert torch.equal(found.logits, wanted.logits)
        for layer, states in wanted.aux.items():
            expected = states.clone()
            if layer < exit_layer:
                expected[rows] = 0
            assert torch.equal(found.aux[layer], expected), layer
        for layer in range(decoder.num_layers):
            assert torch.equal(whole.keys(layer), split.keys(layer))
            assert torch.equal(whole.values(layer), split.values(layer))

    @pytest.mark.parametrize("quantization", PRECISIONS)
    def test_every_row_kept(self, quantization):
        decoder = tiny_decoder("llama", quantization)
        ids = random_ids(6)
        whole, split = lanes(decoder, 1, 8), lanes(decoder, 1, 8)
        pack = pack_of((0, 0, ids))
        wanted = decoder.forward(pack, whole).logits
        kept = decoder.run_layers(decoder.embed(pack.ids), pack.positions, pack.segments, 0, 2, split)
        resumed = dataclasses.replace(pack, resume_layer=2, resume_rows=torch.arange(6), resume_hidden=kept)
        assert torch.equal(decoder.forward(resumed, split).logits, wanted)

    @pytest.mark.parametrize("rows", [[1, 2], [0, 2], [0, 1, 7]])
    def test_kept_rows_must_come_first_and_exist(self, rows):
        decoder = tiny_decoder("llama")
        pack = dataclasses.replace(
            pack_of((0, 0, random_ids(4))),
            resume_layer=1,
            resume_rows=torch.tensor(rows),
            resume_hidden=torch.zeros(len(rows), 72),
        )
        with pytest.raises(ValueError, match="kept rows"):
            decoder.forward(pack, lanes(decoder, 1, 8))


@pytest.mark.parametrize("quantization", PRECISIONS)
def test_run_layers_hands_out_states_on_the_way(quantization):
    decoder = tiny_decoder("llama", quantization)
    pack = pack_of((0, 0, random_ids(6)), aux_layers=(1, 3))
    wanted = decoder.forward(pack, lanes(decoder, 1, 8)).aux
    aux = {1: torch.empty(0), 3: torch.empty(0)}
    cache = lanes(decoder, 1, 8)
    out = decoder.run_layers(decoder.embed(pack.ids), pack.positions, pack.segments, 0, 3, cache, aux)
    assert torch.equal(aux[1], wanted[1]) and torch.equal(aux[3], wanted[3]) and torch.equal(out, wanted[3])


def test_the_cache_takes_what_the_shape_says():
    decoder = tiny_decoder("qwen3")
    assert decoder.new_cache(1, 10, 10).bytes_per_row == decoder.config.cache_bytes_per_token
