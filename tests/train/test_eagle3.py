"""EAGLE-3 heads: unrolled training is what a chain would see, labels by hand, the file, and what is learnt."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outpace.errors import InvalidParameter
from outpace.heads import Eagle3Config, open_eagle3
from outpace.train.acceptance import Tally
from outpace.train.data.document import Document
from outpace.train.data.packing import Windows, pack_documents
from outpace.train.kinds.eagle3 import Eagle3, Eagle3Options, _as_if_normed, aux_layers, thinned
from outpace.train.modules.eagle3 import Eagle3Head
from outpace.train.rounding import rounded
from outpace.train.vocabulary import draft_vocabulary
from tests.train.serving import own_words, served
from tests.train.tiny import LAYERS, World, random_windows

AUX = (1, 2, 3)


def make(world: World, *, ids: torch.Tensor | None = None, **options: object) -> Eagle3:
    every = torch.arange(world.material.vocab_size)
    return Eagle3(world.material, every if ids is None else ids, Eagle3Options(**options))  # type: ignore[arg-type]


def drafted_plainly(world: World, kind: Eagle3, ids: list[int], known: int, steps: int) -> list[torch.Tensor]:
    """States for the output head of a chain behind `ids[:known]`, row by row as the formulas say, without any trick.

    Rows 0 .. known - 2 have true features; each further row has what the row before it put out.
    """
    head = kind.module
    assert isinstance(head, Eagle3Head)
    layer, attention = head.midlayer, head.midlayer.self_attn
    windows = pack_documents([Document.text(ids)], len(ids))
    batch = world.batch(windows, *AUX)
    aux = torch.cat([batch.aux[number][0] for number in AUX], -1)
    features = list(head.fc(aux[: known - 1]))
    found = []
    for step in range(steps):
        rows = known - 1 + step
        stream = torch.stack(features)
        embedded = world.model.embed(torch.tensor(ids[1 : rows + 1])).clone()
        both = torch.cat((layer.input_layernorm(embedded), layer.hidden_norm(stream)), -1)
        turn = head.turn(torch.arange(rows).unsqueeze(0))
        query, (key, value) = attention.queries(both.unsqueeze(0), turn), attention.keys(both.unsqueeze(0), turn)
        key, value = (item.repeat_interleave(world.shape.num_heads // world.shape.num_kv_heads, 1)
                      for item in (key, value))  # fmt: skip
        scores = query[:, :, -1:] @ key.transpose(-1, -2) / world.shape.head_dim**0.5
        mixed = scores.softmax(-1) @ value
        out = stream[-1] + attention.join(mixed)[0, 0]
        out = out + layer.mlp(layer.post_attention_layernorm(out))
        features.append(out)
        found.append(head.norm(out))
    return found


@torch.no_grad()
def test_unrolling_is_a_chain_from_every_row_at_once(world: World) -> None:
    """Two pieces in one window: at each row and step, the state of a chain drafted there alone."""
    kind = make(world, unroll=4)
    ids = [[5, 90, 33, 70, 12, 51, 8], [200, 14, 66, 31, 77, 9, 120, 42]]
    windows = pack_documents([Document.text(part) for part in ids], 15)
    batch = world.batch(windows, *AUX)
    _, rows = kind._teacher(batch)
    starts = thinned(rows, 4, 1.0)
    states = kind._states(batch, starts)
    begin, compared = 0, 0
    for part in ids:
        for known in range(2, len(part)):  # a chain behind token known - 1 begins with row known - 2
            steps = min(4, len(part) - known)
            plain = drafted_plainly(world, kind, part, known, steps)
            for step in range(steps):
                found = states[step][int((starts[step] == begin + known - 1).nonzero())]
                compared += 1
                torch.testing.assert_close(found, plain[step], rtol=1e-4, atol=1e-4)
        begin += len(part)
    assert compared == sum(map(len, starts)) == 5 + 4 + 3 + 2 + 6 + 5 + 4 + 3


def test_later_tokens_are_learnt_at_fewer_places() -> None:
    """Each step's among those of the step before, and the last tokens of a text left out as the text ends."""
    rows = torch.cat((torch.arange(1, 4000), torch.arange(4010, 8000)))
    torch.manual_seed(5)
    chosen = thinned(rows, 5, 0.6)
    for step, share in enumerate((1, 0.6, 0.36, 0.25, 0.25)):
        assert len(chosen[step]) / len(rows) == pytest.approx(share, abs=0.03)
        assert torch.isin(chosen[step], chosen[max(0, step - 1)]).all()
        assert chosen[step].max() <= 7999 - step
        assert not torch.isin(torch.arange(4000 - step, 4010), chosen[step]).any()
    torch.manual_seed(5)
    assert all(map(torch.equal, chosen, thinned(rows, 5, 0.6)))
    assert [part.tolist() for part in thinned(torch.tensor([3, 4, 7]), 3, 1.0)] == [[3, 4, 7], [3], []]
    assert [part.tolist() for part in thinned(torch.tensor([], dtype=torch.int64), 2, 0.6)] == [[], []]


@torch.no_grad()
def test_labels_by_hand(world: World) -> None:
    """Six tokens, the last three an answer. The first chain begins behind row 2 and guesses 40, 50 and 60; the target's
    opinion of token i is that of its row i - 1."""
    windows = pack_documents([Document.answer([10, 20, 30], [40, 50, 60])], 6)
    batch = world.batch(windows, *AUX)
    kind = make(world, unroll=2, row_share=1.0)
    chains = kind.chains(batch)["eagle3"]
    assert chains.exists.int().tolist() == [[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0]]
    assert chains.follows.tolist() == [False, True, True]
    p = batch.logits(torch.arange(6)).softmax(-1)
    head = world.material.weight("lm_head.weight")
    for chain, (known, length) in enumerate([(3, 3), (4, 2), (5, 1)]):
        states = drafted_plainly(world, kind, [10, 20, 30, 40, 50, 60], known, length)
        for step, state in enumerate(states):
            q = (state @ head.T).softmax(-1)
            teacher = p[known - 1 + step]
            expected = float(torch.minimum(teacher, q).sum())
            assert chains.alpha[chain, step].item() == pytest.approx(expected, rel=1e-3)
            assert bool(chains.agrees[chain, step]) == bool(teacher.argmax() == q.argmax())
    loss = kind.loss(batch)
    assert loss.rows == 3 + 2  # a row guesses token 1, and two of them token 2 as well
    first, second = chains.alpha[:3, 0], chains.alpha[:2, 1]
    assert loss.alpha == pytest.approx(float(torch.cat((first, second)).mean()), rel=1e-3)


def test_texts_of_which_the_first_token_counts(world: World) -> None:
    """Behind the first token of a piece no chain can be drafted: there is no state before it."""
    windows = pack_documents([Document.text([10, 20, 30, 40, 50])], 5)
    chains = make(world).chains(world.batch(windows, *AUX))["eagle3"]
    assert chains.exists[:, 0].tolist() == [True, True, True]  # behind rows 1, 2 and 3


def test_the_most_frequent_tokens_are_drafted() -> None:
    ids = torch.tensor([[7, 7, 7, 3, 3, 9, 1, 1]])
    labels = torch.tensor([[True, True, True, True, True, True, False, False]])
    windows = Windows(ids, torch.zeros_like(ids), labels)
    assert draft_vocabulary(windows, 2, 12, frozenset()).tolist() == [3, 7]
    assert draft_vocabulary(windows, 3, 12, frozenset({11})).tolist() == [3, 7, 11]
    assert draft_vocabulary(windows, 5, 12, frozenset()).tolist() == [0, 1, 3, 7, 9]
    assert draft_vocabulary(windows, 99, 12, frozenset()).tolist() == list(range(12))


@pytest.mark.parametrize("train_head", [False, True])
@pytest.mark.parametrize("pruned", [False, True])
def test_the_file_is_what_was_trained(world: World, tmp_path: Path, pruned: bool, train_head: bool) -> None:
    ids = torch.arange(3, 200, 2) if pruned else None
    kind = make(world, ids=ids, train_head=train_head)
    with torch.no_grad():
        for number, parameter in enumerate(kind.module.parameters()):
            parameter.add_(0.01 * number)
    served = kind.save(tmp_path / "head")
    assert json.loads(served["eagle3"]) == {"method": "eagle3", "model": str(tmp_path / "head")}
    files = open_eagle3(str(tmp_path / "head"), world.shape)
    config: Eagle3Config = files.config
    assert config.aux_layers_of(LAYERS) == AUX
    assert (config.shares_target_head, config.norm_before_residual) == (not train_head, False)
    assert config.target_layers == LAYERS
    assert config.draft_vocab_size == (world.material.vocab_size if ids is None else len(ids))
    for name, tensor in kind.module.state_dict().items():
        assert torch.equal(files.weights.get(name), tensor), name
    if ids is not None:
        assert files.token_ids is not None
        assert torch.equal(files.token_ids, ids)


def test_a_draft_vocabulary_is_judged_by_the_whole(world: World) -> None:
    """A token that cannot be drafted is a miss; acceptance is the overlap with the true distribution, not a part's."""
    batch = world.batch(random_windows(2, 20, 170), *AUX)
    whole, part = make(world), make(world, ids=torch.arange(0, 265, 9))
    assert part.loss(batch).alpha < whole.loss(batch).alpha
    rows = (batch.windows.counted & ~batch.windows.starts).flatten().nonzero().squeeze(1)
    sayable = (batch.logits(rows).argmax(-1) % 9 == 0).float().mean()
    chains = part.chains(batch)["eagle3"]
    assert chains.agrees[:, 0].float().mean() <= sayable


@pytest.mark.slow
def test_a_head_learns_a_text_by_heart(target_folder: Path) -> None:
    """Chains of four, every token of them right, from every row of the target's own words."""
    world = World(target_folder, loss="kl")
    generator = torch.Generator().manual_seed(4)
    texts = [torch.randint(200, (12,), generator=generator).tolist() for _ in range(2)]
    for text in texts:  # what the target says, so that the text goes on as the chains do
        for at in range(4, 12):
            windows = pack_documents([Document.text(text[:at])], at)
            text[at] = int(world.batch(windows).logits(torch.tensor([at - 1])).argmax())
    windows = pack_documents([Document.answer(text[:4], text[4:]) for text in texts], 12)
    batch = world.batch(windows, *AUX)
    kind = make(world, unroll=4, row_share=1.0)

    def measured() -> Tally:
        tally = Tally(4)
        tally.add(kind.chains(batch)["eagle3"])
        return tally

    before = measured().result()
    optimiser = torch.optim.AdamW(kind.module.parameters(), lr=3e-3)
    falling = torch.optim.lr_scheduler.LinearLR(optimiser, 1, 0, 170)
    for _ in range(170):
        optimiser.zero_grad()
        kind.loss(batch).value.backward()
        optimiser.step()
        falling.step()
    after = measured().result()
    assert before.rate < 0.5
    assert (after.rate, after.greedy) == (1.0, (1.0,) * 4)


@pytest.mark.parametrize(
    ("pruned", "quantization"), [pytest.param(False, "none", marks=pytest.mark.slow), (True, "none"), (True, "int8")]
)
def test_what_is_measured_in_training_is_what_is_served(
    target_folder: Path, tmp_path: Path, pruned: bool, quantization: str
) -> None:
    """A head that is often right and often wrong: its acceptance on the target's own words, and in the engine.

    In int8 target and head are packed when they are served, and the head is stored in bf16; what is measured is a head
    of bf16 on the states of the packed target.
    """
    world = World(target_folder, quantization, loss="kl")
    windows = own_words(world, target_folder, 6, 60)
    said = torch.unique(windows.ids[windows.labels])
    kind = make(world, ids=said[: len(said) * 9 // 10] if pruned else None, row_share=1.0)
    batch = world.batch(windows, *AUX)
    optimiser = torch.optim.AdamW(kind.module.parameters(), lr=3e-3)
    for _ in range(45):
        optimiser.zero_grad()
        kind.loss(batch).value.backward()
        optimiser.step()
    dtype = torch.float32 if quantization == "none" else torch.bfloat16
    tally = Tally(4)
    with rounded(kind.module, dtype):
        tally.add(kind.chains(batch)["eagle3"])
    config = json.loads(kind.save(tmp_path / "head", dtype)["eagle3"])
    drafted, accepted, drafts = served(target_folder, config, windows, 4, quantization)
    rate, length = tally.result().rate, tally.result().greedy_length
    assert 0.1 < rate < 0.95  # neither always nor never, or the test says nothing
    assert accepted / drafted == pytest.approx(rate, abs=0.02)
    assert 1 + accepted / drafts == pytest.approx(length, rel=0.02)


def test_gradients_reach_every_tensor_and_no_other(world: World) -> None:
    batch = world.batch(random_windows(1, 20, 170), *AUX)
    kind = make(world, train_head=True)
    kind.loss(batch).value.backward()
    for name, parameter in kind.module.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
    assert "lm_head.weight" not in make(world).module.state_dict()


def test_heads_of_targets_with_normed_queries_begin_at_their_length() -> None:
    """The head has no such norm; on inputs as behind a norm its queries are as long as the target's, on average."""
    generator = torch.Generator().manual_seed(3)
    heads, dim, hidden = 3, 8, 40

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    weights = {
        "p.self_attn.q_proj.weight": random(heads * dim, hidden)
        * torch.tensor([0.1, 1.0, 30.0]).repeat_interleave(dim, 0)[:, None],
        "p.self_attn.q_norm.weight": random(dim).abs() + 0.5,
        "p.input_layernorm.weight": random(hidden).abs() + 0.5,
    }
    material: Any = SimpleNamespace(weight=weights.__getitem__, shape=SimpleNamespace(qk_norm=True))
    rows = random(4000, hidden) * weights["p.input_layernorm.weight"]
    there = (rows @ weights["p.self_attn.q_proj.weight"].T).view(-1, heads, dim)
    normed = there / there.square().mean(-1, keepdim=True).sqrt() * weights["p.self_attn.q_norm.weight"]
    found = (rows @ _as_if_normed(material, "p.", "q_proj").T).view(-1, heads, dim)
    lengths = [part.square().mean((0, 2)).sqrt() for part in (normed, found)]
    torch.testing.assert_close(lengths[1], lengths[0], rtol=0.15, atol=0)
    cosine = torch.nn.functional.cosine_similarity(normed, found, -1)
    assert cosine.min() > 0.999
    material.shape.qk_norm = False
    assert torch.equal(_as_if_normed(material, "p.", "q_proj"), weights["p.self_attn.q_proj.weight"])


def test_layers_that_are_read() -> None:
    assert aux_layers(30) == (2, 15, 27)
    assert aux_layers(LAYERS) == AUX
    with pytest.raises(InvalidParameter, match="needs a model of 4 layers, not 3"):
        aux_layers(3)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"unroll": 0}, "unroll=0"), ({"draft_vocab": 1}, "draft_vocab=1"), ({"decay": 0.0}, "decay=0.0"),
     ({"decay": 1.5}, "at most 1"), ({"row_share": 0.0}, "row_share=0.0")],
)  # fmt: skip
def test_impossible_options(options: dict[str, float], message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        Eagle3Options(**options)  # type: ignore[arg-type]
