"""The serving MTP head against its definition: logits, states fed back, kernels, trees, and drafts."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from outpace.drafters.feature_head import FeatureHeadDrafter
from outpace.kv.cache import KvCache
from outpace.models.decoder import Decoder
from outpace.models.mtp import MtpHead
from outpace.models.mtp_config import layer_tensors, mtp_layer
from outpace.params import SamplingParams
from outpace.sampling.choose import choose_rows
from outpace.sampling.law import law_rows
from outpace.types import Ask, Draft, Observation, Pack, Segment
from tests.engine.harness import GREEDY, HOT, WARM
from tests.models.tiny_models import SIZES, DictWeights, precision

from .plain_mtp import PlainMtp, last_states, shape, target_weights, tiny_target, tiny_tensors

V, H = SIZES["vocab_size"], SIZES["hidden_size"]
TEXT = [(at * at * 7 + 3 * at + 1) % V for at in range(24)]
ROWS = len(TEXT) - 1


@functools.cache
def head(words: str = "none") -> MtpHead:
    model = Decoder(shape(), target_weights(), precision=precision(words))
    return MtpHead(model, mtp_layer(shape()), DictWeights(tiny_tensors()))


def lane_of(cache: KvCache, rows: int) -> int:
    lane = cache.allocate()
    assert lane is not None and cache.reserve(lane, rows)
    return lane


@functools.cache
def served_states(words: str) -> torch.Tensor:
    """[len(TEXT), H] what the drafter is told of the text."""
    model = head(words)._target
    cache = model.new_cache(1, 64, 64)
    (layer,) = head(words).aux_layers
    segment = Segment(lane_of(cache, len(TEXT)), 0, len(TEXT), 0)
    pack = Pack(torch.tensor(TEXT), torch.arange(len(TEXT)), (segment,), torch.tensor([3]), aux_layers=(layer,))
    return model.forward(pack, cache).aux[layer]


def served(words: str, pieces: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and outputs of every row of the text, in pieces of these sizes."""
    found, begin = [], 0
    cache = head(words).new_cache(2, 64, 128)
    lane_of(cache, 1)  # another's
    lane, ids = lane_of(cache, ROWS), torch.tensor(TEXT[1:])
    for size in pieces:
        rows = slice(begin, begin + size)
        features = head(words).fuse(served_states(words)[rows])
        segment = Segment(lane, 0, size, begin)
        places = torch.arange(ROWS)[rows]
        found.append(head(words).forward(ids[rows], features, places, [segment], torch.arange(size), cache))
        begin += size
    return torch.cat([logits for logits, _ in found]), torch.cat([outputs for _, outputs in found])


@torch.no_grad()
def expected() -> tuple[torch.Tensor, torch.Tensor]:
    target = tiny_target()
    states = last_states(target, TEXT)[:-1]
    return PlainMtp(target, tiny_tensors()).rows(torch.tensor(TEXT[1:]), states, torch.arange(ROWS))


@pytest.mark.parametrize("words", ["none", "torch none"])
def test_logits_and_outputs_are_those_of_the_definition(words: str) -> None:
    logits, outputs = served(words, (5, 1, ROWS - 6))
    want_logits, want_outputs = expected()
    assert torch.allclose(logits.double(), want_logits, atol=2e-4, rtol=1e-4)
    assert torch.allclose(outputs.double(), want_outputs, atol=2e-4, rtol=1e-4)
    assert want_logits.std() > 0.5, "logits that say nothing prove nothing"


def test_the_state_is_the_one_before_the_final_norm() -> None:
    """Norm behind norm is nearly norm: only numbers tell the one from the other."""
    target = tiny_target()
    states = last_states(target, TEXT)
    assert torch.allclose(served_states("none").double(), states, atol=1e-4)
    with torch.no_grad():
        normed = target.model.norm(states)[:-1]
        plain = PlainMtp(target, tiny_tensors())
        wrong, _ = plain.rows(torch.tensor(TEXT[1:]), normed, torch.arange(ROWS))
    assert (wrong - expected()[0]).std() > 0.02


def test_only_distances_count() -> None:
    """Whether a row is placed at its state or at its token makes no difference."""
    target = tiny_target()
    with torch.no_grad():
        states = last_states(target, TEXT)[:-1]
        moved, _ = PlainMtp(target, tiny_tensors()).rows(torch.tensor(TEXT[1:]), states, torch.arange(1, ROWS + 1))
    assert torch.allclose(moved, expected()[0], atol=1e-5)


@pytest.mark.parametrize("words", ["none", "int8", "int4", "torch none", "torch int8"])
def test_a_row_does_not_depend_on_the_pieces(words: str) -> None:
    whole, pieces = served(words, (ROWS,)), served(words, (1, 4, ROWS - 5))
    assert torch.equal(whole[0], pieces[0])
    assert torch.equal(whole[1], pieces[1])


@pytest.mark.parametrize(("words", "error"), [("int8", 0.05), ("int4", 0.6), ("torch int8", 0.4)])
def test_rounded_weights_stay_near(words: str, error: float) -> None:
    """On the states of a target that is not rounded."""
    want, _ = expected()
    cache = head(words).new_cache(1, 64, 64)
    segment = [Segment(lane_of(cache, ROWS), 0, ROWS, 0)]
    ids, states = torch.tensor(TEXT[1:]), served_states("none")[:-1]
    found, _ = head(words).forward(ids, states, torch.arange(ROWS), segment, torch.arange(ROWS), cache)
    assert (found - want).std() < error * want.std()


@pytest.mark.parametrize("words", ["none", "torch none"])
def test_a_tree_has_the_logits_of_its_paths(words: str) -> None:
    """Six rows of text, then a tree of four: two children, a grandchild of each."""
    ids, states = torch.tensor(TEXT[1:]), served_states(words)
    paths = [(0,), (1,), (0, 2), (1, 3)]
    cache = head(words).new_cache(2, 32, 64)
    lane = lane_of(cache, 10)
    positions = torch.tensor([0, 1, 2, 3, 4, 5, 6, 6, 7, 7])
    tree = Segment(lane, 0, 10, 0, 6, tuple(tuple(6 + node for node in path) for path in paths))
    found, _ = head(words).forward(ids[:10], states[:10], positions, [tree], torch.arange(10), cache)
    for node, path in enumerate(paths):
        rows = [*range(6), *(6 + each for each in path)]
        alone = lane_of(cache, len(rows))
        where, segment = torch.arange(len(rows)), [Segment(alone, 0, len(rows), 0)]
        chain, _ = head(words).forward(ids[rows], states[rows], where, segment, where[-1:], cache)
        assert torch.equal(chain[0], found[6 + node])
        cache.release(alone)


def test_a_window_of_wanted_rows() -> None:
    whole, outputs = served("none", (ROWS,))
    cache = head().new_cache(1, 32, 32)
    segment = [Segment(lane_of(cache, ROWS), 0, ROWS, 0)]
    ids, states = torch.tensor(TEXT[1:]), served_states("none")[:-1]
    some, output = head().forward(ids, states, torch.arange(ROWS), segment, torch.tensor([3, 11]), cache)
    assert torch.equal(some, whole[[3, 11]]) and torch.equal(output, outputs[[3, 11]])
    none, _ = head().forward(ids, states, torch.arange(ROWS), segment, torch.tensor([], dtype=torch.int64), cache)
    assert none.shape == (0, V)


def test_embeddings_and_output_head_are_the_targets() -> None:
    one, matrix = head(), head()._target.head.weight_bytes
    norms = 3 * 2 * 4 * H
    assert one.weight_bytes == one._enter.weight_bytes + one._layers.weight_bytes + norms
    assert one.bytes_per_token == one.weight_bytes + matrix
    assert layer_tensors(shape()) == {name: tuple(each.shape) for name, each in tiny_tensors().items()}


# What a drafter makes of it.


def propose(words: str, params: SamplingParams, *, coupled: bool = True, width: int = 1) -> tuple[Ask, Draft]:
    """Six tokens behind the text."""
    drafter = FeatureHeadDrafter("mtp", head(words), head(words).new_cache(2, 64, 128), tree_width=width)
    assert drafter.needs.aux_layers == (SIZES["num_hidden_layers"],)
    drafter.start(0, TEXT, len(TEXT))
    told = {SIZES["num_hidden_layers"]: served_states(words)[:-1]}
    drafter.observe([Observation(0, TEXT, 1, Draft(), (), 0, told)])
    ask = Ask(0, TEXT, 6, params, seed=3, number=0, lane=0, coupled=coupled)
    (draft,) = drafter.propose([ask], 100)
    return ask, draft


@pytest.mark.parametrize("words", ["none", "torch none"])
@pytest.mark.parametrize("params", [HOT, WARM, GREEDY], ids=["hot", "warm", "greedy"])
@pytest.mark.parametrize("coupled", [True, False])
def test_draft_tokens_are_drawn_from_the_laws_of_the_definition(
    params: SamplingParams, coupled: bool, words: str
) -> None:
    """One layer, applied again for every further token, on its own output behind its norm."""
    ask, draft = propose(words, params, coupled=coupled)
    assert len(draft) == 6 and draft.is_chain
    with torch.no_grad():
        logits = PlainMtp(tiny_target(), tiny_tensors()).chain(TEXT, draft.ids).float()
    choices = [ask.choice(draft.ids[:at]) for at in range(6)]
    assert list(draft.ids) == choose_rows(logits, choices)
    assert (draft.probabilities is None) == coupled
    if draft.probabilities is not None:
        assert np.allclose(draft.probabilities.numpy(), law_rows(logits, choices).rows, atol=1e-4)


def test_trees_begin_with_what_a_chain_would_say() -> None:
    _, chain = propose("none", GREEDY)
    _, tree = propose("none", GREEDY, width=3)
    assert not tree.is_chain
    assert tree.ids[0] == chain.ids[0]
