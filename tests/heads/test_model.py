"""The serving head against its formulas: parity of logits and features, kernels, trees, shared embeddings and heads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from outpace.heads import Eagle3Config, token_ids_of
from outpace.kv.cache import KvCache
from outpace.models.decoder import Decoder
from outpace.models.eagle3 import Eagle3Head
from outpace.types import Segment
from tests.end_to_end.tiny import target, tensors
from tests.models.tiny_models import SIZES, DictWeights, precision

from . import plain_head
from .test_files import CONFIGS
from .tiny_heads import tiny_config, tiny_tensors

V = SIZES["vocab_size"]
ROWS = 12


def load(
    config: Eagle3Config, own: dict[str, torch.Tensor], words: str = "none", *, model: Decoder | None = None
) -> Eagle3Head:
    weights = DictWeights({name: each for name, each in own.items() if name != "d2t"})
    return Eagle3Head(
        model or target(words),
        config,
        weights,
        token_ids=token_ids_of(own["d2t"]) if "d2t" in own else None,
        target_weights=DictWeights(tensors()),
        precision=precision(words),
    )


def inputs(config: Eagle3Config) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, states of the target, positions; the first is not 0."""
    generator = torch.Generator().manual_seed(8)
    states = torch.randn(ROWS, config.num_aux * config.target_hidden_size, generator=generator)
    return torch.randint(V, (ROWS,), generator=generator), states, torch.arange(5, 5 + ROWS)


def lane_of(cache: KvCache, rows: int) -> int:
    lane = cache.allocate()
    assert lane is not None and cache.reserve(lane, rows)
    return lane


def served(head: Eagle3Head, pieces: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """All rows, in pieces of these sizes."""
    ids, states, positions = inputs(head.config)
    cache = head.new_cache(2, 32, 64)
    lane_of(cache, 1)  # another's
    lane, found, begin = lane_of(cache, ROWS), [], 0
    for size in pieces:
        rows = slice(begin, begin + size)
        features = head.fuse(states[rows])
        segment = Segment(lane, 0, size, begin)
        found.append(head.forward(ids[rows], features, positions[rows], [segment], torch.arange(size), cache))
        begin += size
    return torch.cat([logits for logits, _ in found]), torch.cat([features for _, features in found])


def expected(config: Eagle3Config, own: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    ids, states, positions = inputs(config)
    wide = {name: each.double() for name, each in own.items()}
    token_ids = token_ids_of(own["d2t"]) if "d2t" in own else torch.arange(V)
    if config.shares_target_head:
        wide["lm_head.weight"] = tensors()["lm_head.weight"][token_ids].double()
    embedded = wide.get("embed_tokens.weight", tensors()["model.embed_tokens.weight"].double())[ids]
    features = plain_head.fuse(config, wide, states.double())
    seen = torch.ones(ROWS, ROWS, dtype=torch.bool).tril()
    logits, output = plain_head.run(config, wide, embedded, features, positions, seen)
    found = torch.full((ROWS, V), -torch.inf, dtype=torch.float64)
    found[:, token_ids] = logits
    return found, output


@pytest.mark.parametrize("words", ["none", "torch none"])
@pytest.mark.parametrize("name", [*CONFIGS, "own embeddings", "narrower", "whole shared head"])
def test_logits_and_features_are_those_of_the_formulas(name: str, words: str) -> None:
    extra = {
        "own embeddings": tiny_config(),
        "narrower": tiny_config(layer={"hidden_size": 48}),
        "whole shared head": tiny_config(V, shares_target_head=True),
    }
    config = {**CONFIGS, **extra}[name]
    own = tiny_tensors(config, embedding=name in ("own embeddings", "narrower"))
    head = load(config, own, words)
    logits, features = served(head, (5, 1, 6))
    want_logits, want_features = expected(config, own)
    assert torch.equal(logits.isinf(), want_logits.isinf())
    known = ~want_logits.isinf()
    assert torch.allclose(logits[known].double(), want_logits[known], atol=2e-4, rtol=1e-4)
    assert torch.allclose(features.double(), want_features, atol=2e-4, rtol=1e-4)
    assert want_logits[known].std() > 0.5, "logits that say nothing prove nothing"


@pytest.mark.parametrize("words", ["none", "int8", "int4", "torch none", "torch int8"])
def test_a_row_does_not_depend_on_the_pieces(words: str) -> None:
    head = load(tiny_config(), tiny_tensors(tiny_config()), words)
    whole, pieces = served(head, (ROWS,)), served(head, (1, 4, 7))
    assert torch.equal(whole[0], pieces[0])
    assert torch.equal(whole[1], pieces[1])


@pytest.mark.parametrize(("words", "error"), [("int8", 0.03), ("int4", 0.4), ("torch int8", 0.3)])
def test_rounded_weights_stay_near(words: str, error: float) -> None:
    config = tiny_config(V)
    own = tiny_tensors(config)
    logits, _ = served(load(config, own, words), (ROWS,))
    want, _ = expected(config, own)
    assert (logits - want).std() < error * want.std()


@pytest.mark.parametrize("words", ["none", "torch none"])
def test_a_tree_has_the_logits_of_its_paths(words: str) -> None:
    """Six rows of text, then a tree of four: two children, a grandchild of each."""
    config = tiny_config()
    head = load(config, tiny_tensors(config), words)
    ids, states, _ = inputs(config)
    parents = [-1, -1, 0, 1]
    paths = [(0,), (1,), (0, 2), (1, 3)]
    cache = head.new_cache(3, 32, 96)
    features = head.fuse(states)
    lane = lane_of(cache, 10)
    positions = torch.tensor([0, 1, 2, 3, 4, 5, 6, 6, 7, 7])
    tree = Segment(lane, 0, 10, 0, 6, tuple(tuple(6 + node for node in path) for path in paths))
    found, _ = head.forward(ids[:10], features[:10], positions, [tree], torch.arange(10), cache)
    for node, path in enumerate(paths):
        rows = [*range(6), *(6 + each for each in path)]
        alone = lane_of(cache, len(rows))
        where, segment = torch.arange(len(rows)), [Segment(alone, 0, len(rows), 0)]
        chain, _ = head.forward(ids[rows], features[rows], where, segment, where[-1:], cache)
        assert torch.equal(chain[0], found[6 + node]), parents
        cache.release(alone)


def test_rows_of_the_target_that_are_shared_take_no_second_copy() -> None:
    own = tiny_tensors(tiny_config(V, shares_target_head=True))
    shared = load(tiny_config(V, shares_target_head=True), own)
    stored = load(tiny_config(V), {**own, "lm_head.weight": tensors()["lm_head.weight"]})
    matrix = target("none").head.weight_bytes
    assert shared.weight_bytes == stored.weight_bytes - matrix
    assert shared.bytes_per_token == stored.bytes_per_token
    assert torch.equal(served(shared, (ROWS,))[0], served(stored, (ROWS,))[0])


def test_a_norm_of_another_epsilon_is_the_heads_own() -> None:
    config = tiny_config(V, layer={"rms_norm_eps": 0.5}, shares_target_head=True)
    own = tiny_tensors(config)
    logits, _ = served(load(config, own), (ROWS,))
    assert torch.allclose(logits.double(), expected(config, own)[0], atol=2e-4, rtol=1e-4)


def test_ids_that_no_token_has_are_never_guessed() -> None:
    """The head was trained on padded ids too; the target's tokenizer knows fewer."""
    config = tiny_config()
    own = tiny_tensors(config)
    cut = Decoder(target("none").config, DictWeights(tensors()), precision=precision("none"), vocab_size=80)
    whole, _ = served(load(config, own), (ROWS,))
    found, _ = served(load(config, own, model=cut), (ROWS,))
    assert torch.equal(found, whole[:, :80])
    assert not whole[:, 80:].isinf().all()


def test_a_window_of_wanted_rows() -> None:
    head = load(tiny_config(), tiny_tensors(tiny_config()))
    ids, states, positions = inputs(head.config)
    whole, features = served(head, (ROWS,))
    cache = head.new_cache(1, 32, 32)
    segment = [Segment(lane_of(cache, ROWS), 0, ROWS, 0)]
    some, output = head.forward(ids, head.fuse(states), positions, segment, torch.tensor([3, 11]), cache)
    assert torch.equal(some, whole[[3, 11]]) and torch.equal(output, features[[3, 11]])
    none, _ = head.forward(ids, head.fuse(states), positions, segment, torch.tensor([], dtype=torch.int64), cache)
    assert none.shape == (0, V)


def test_layers_that_the_target_has_not() -> None:
    config = replace(tiny_config(), aux_layers=(1, 2, 4))
    with pytest.raises(Exception, match=r"layers \[1, 2, 4\]; of a target with 4 layers"):
        load(config, tiny_tensors(config))
