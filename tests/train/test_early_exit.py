"""Adapters in training compute what the engine serves, begin as what they should, and learn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from outpace.errors import InvalidParameter
from outpace.models.adapter import BlockAdapter, open_adapter
from outpace.models.config import DecoderConfig
from outpace.train.acceptance import Tally
from outpace.train.data.document import Document
from outpace.train.data.packing import Windows, pack_documents
from outpace.train.kinds.early_exit import EarlyExit, ExitBlock
from outpace.train.modules.layer import Rotary, seen
from outpace.train.rounding import rounded
from outpace.train.states import StoredStates
from outpace.train.target import Batch
from outpace.types import Segment
from tests.models.tiny_models import VARIANTS, DictWeights, reference_model, tiny_decoder, tiny_weights
from tests.train.serving import own_words, served
from tests.train.tiny import EXIT, World, random_windows

NO_WINDOW = [name for name in VARIANTS if "window" not in name]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("variant", NO_WINDOW)
def test_logits_are_those_of_the_serving_side(variant: str) -> None:
    """Two pieces in one window, every architecture, the same weights: the same logits in float32."""
    model = tiny_decoder(variant)
    weights = tiny_weights(reference_model(variant))
    config: DecoderConfig = model.config
    block = ExitBlock(config)
    state = {name: weights.get(_source(name)) for name in block.state_dict()}
    block.load_state_dict(state)

    serving = BlockAdapter(model, DictWeights(state), exit_layer=2, num_lanes=2, capacity=32, max_rows=64)
    hidden = torch.randn(30, config.hidden_size, generator=torch.Generator().manual_seed(2))
    pieces = torch.tensor([[0] * 18 + [1] * 12])
    positions = torch.tensor([*range(18), *range(12)])
    for rows in (18, 12):
        lane = serving.cache.allocate()
        assert lane is not None
        serving.cache.reserve(lane, rows)
    segments = [Segment(0, 0, 18, 0), Segment(1, 18, 30, 0)]
    expected = serving.logits(hidden, positions, segments, torch.arange(30))

    turn = Rotary(config.rope, config.head_dim).at(positions.unsqueeze(0))
    name = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    with torch.no_grad():
        found = block(hidden.unsqueeze(0), turn, seen(pieces))[0] @ weights.get(name).T
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def _source(name: str) -> str:
    return "model.norm.weight" if name == "norm.weight" else name.replace("block.", "model.layers.2.")


def test_an_adapter_begins_as_the_layer_it_is_told_to(world: World) -> None:
    kind = EarlyExit(world.material, [1, 2], init_layer=2)
    own = world.files.checkpoint
    for name, tensor in kind.module.state_dict().items():
        source = _source(name.partition(".")[2])
        assert torch.equal(tensor, own.get(source))
    assert kind.aux_layers == (1, 2)


@pytest.mark.parametrize(
    ("exits", "init", "message"),
    [([0], None, "exit layer 0"), ([4], None, "in 1 to 3"), ([2, 2], None, "each once"), ([], None, "at least one"),
     ([2], 4, "init_layer=4"), ([2], -1, "in 0 to 3")],
)  # fmt: skip
def test_impossible_layers(world: World, exits: list[int], init: int | None, message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        EarlyExit(world.material, exits, init)


def test_several_exits_are_what_each_is_alone(world: World) -> None:
    batch = world.batch(random_windows(2, 20, 200), 1, 3)
    both = EarlyExit(world.material, [1, 3]).loss(batch)
    one, other = (EarlyExit(world.material, [layer]).loss(batch) for layer in (1, 3))
    assert both.value.item() == pytest.approx((one.value.item() + other.value.item()) / 2, rel=1e-5)
    assert both.alpha == pytest.approx((one.alpha + other.alpha) / 2, rel=1e-5)
    assert both.rows == one.rows == other.rows > 20


@pytest.mark.parametrize("stored", [False, True])
def test_a_loss_over_some_tokens_is_that_of_all_in_the_mean(world: World, tmp_path: Path, stored: bool) -> None:
    """Common tokens always, others drawn: loss, acceptance and gradient come out right over many draws."""
    windows = random_windows(2, 20, 200)
    batch = world.batch(windows, EXIT)
    if stored:
        states = StoredStates(tmp_path, "train", "fp16", world.target(EXIT), world.identity)
        states.make(windows, lambda *_: None)
        which = torch.arange(2)
        batch = Batch(windows, states.states(windows, which), batch.target, states.said(windows, which))
    rows = windows.counted.flatten().nonzero().squeeze(1)
    p = world.batch(windows).logits(rows).softmax(-1).mean(0)
    common = p.topk(60).indices.sort().values
    assert 0.9 < p[common].sum() < 0.95  # as in real texts, and the draws have to count

    def measured(kind: EarlyExit) -> torch.Tensor:
        kind.module.zero_grad()
        loss = kind.loss(batch)
        loss.value.backward()
        name = f"exit_{EXIT}.norm.weight"
        return torch.cat((torch.tensor([loss.value.item(), loss.alpha]), kind.module.get_parameter(name).grad))

    expected = measured(EarlyExit(world.material, [EXIT]))
    torch.manual_seed(0)
    kind = EarlyExit(world.material, [EXIT], common=common)
    draws = torch.stack([measured(kind) for _ in range(60)])
    mean = draws.mean(0)
    assert mean[:2].tolist() == pytest.approx(expected[:2].tolist(), rel=0.06)
    assert torch.cosine_similarity(mean[2:], expected[2:], 0) > 0.97
    assert float(mean[2:].norm() / expected[2:].norm()) == pytest.approx(1, abs=0.06)
    assert draws[:, 0].std() > 1e-4


def test_labels_by_hand(world: World) -> None:
    """Six tokens, the last three an answer: rows 2, 3 and 4 count, each against what the target says behind it."""
    windows = pack_documents([Document.answer([10, 20, 30], [40, 50, 60])], 6)
    batch = world.batch(windows, EXIT)
    kind = EarlyExit(world.material, [EXIT])
    loss = kind.loss(batch)
    assert loss.rows == 3
    with torch.no_grad():
        turn = Rotary(world.shape.rope, world.shape.head_dim).at(torch.arange(6).unsqueeze(0))
        block: Any = kind.module.get_submodule(f"exit_{EXIT}")
        out = block(batch.aux[EXIT], turn, torch.ones(6, 6).tril().bool())[0]
        q = (out @ world.material.weight("lm_head.weight").T).softmax(-1)
    p = batch.logits(torch.arange(6)).softmax(-1)
    expected = [float(torch.minimum(p[row], q[row]).sum()) for row in (2, 3, 4)]
    assert loss.alpha == pytest.approx(sum(expected) / 3, rel=1e-4)
    chains = kind.chains(batch)[f"exit {EXIT}"]
    assert chains.alpha[:, 0].tolist() == pytest.approx(expected, rel=1e-4)
    assert chains.follows.tolist() == [False, True, True]
    assert chains.exists.int().tolist() == [[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0]]


def teacher_forced(kind: EarlyExit, world: World, windows: Windows, chain: int) -> Tally:
    tally = Tally(chain)
    tally.add(kind.chains(world.batch(windows, EXIT))[f"exit {EXIT}"])
    return tally


def train_a_little(kind: EarlyExit, world: World, windows: Windows, steps: int) -> list[float]:
    optimiser = torch.optim.AdamW(kind.module.parameters(), lr=3e-3)
    falling = torch.optim.lr_scheduler.LinearLR(optimiser, 1, 0, steps)
    batch = world.batch(windows, EXIT)
    losses = []
    for _ in range(steps):
        optimiser.zero_grad()
        loss = kind.loss(batch).value
        loss.backward()
        optimiser.step()
        falling.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_what_is_measured_in_training_is_what_is_served(target_folder: Path, tmp_path: Path, quantization: str) -> None:
    """An adapter that is often right and often wrong: its acceptance on the target's own words, and in the engine."""
    world = World(target_folder, quantization)
    windows = own_words(world, target_folder, 6, 120)
    kind = EarlyExit(world.material, [EXIT])
    train_a_little(kind, world, windows, 3)
    dtype = torch.float32 if quantization == "none" else torch.bfloat16
    with rounded(kind.module, dtype):
        tally = teacher_forced(kind, world, windows, 4)
    config = json.loads(kind.save(tmp_path, dtype)[f"exit {EXIT}"])
    drafted, accepted, drafts = served(target_folder, config, windows, 4, quantization)
    rate, length = tally.result().rate, tally.result().greedy_length
    assert 0.1 < rate < 0.95  # neither always nor never, or the test says nothing
    assert accepted / drafted == pytest.approx(rate, abs=0.02)
    # Packing the adapter turns a token here and there, and a chain that ends there is shorter.
    assert 1 + accepted / drafts == pytest.approx(length, rel=0.02 if quantization == "none" else 0.05)


def test_an_adapter_learns_a_text_by_heart(world: World, target_folder: Path, tmp_path: Path) -> None:
    """Acceptance rises to exactly 1 on texts that are learnt, measured and served."""
    windows = own_words(world, target_folder, 3, 60)
    kind = EarlyExit(world.material, [EXIT])
    before = teacher_forced(kind, world, windows, 4).result()
    losses = train_a_little(kind, world, windows, 200)
    after = teacher_forced(kind, world, windows, 4).result()
    assert before.rate < 0.9
    assert (after.rate, after.greedy) == (1.0, (1.0,) * 4)
    assert losses[-1] < 0.5 * losses[0]
    config = json.loads(kind.save(tmp_path)[f"exit {EXIT}"])
    drafted, accepted, _ = served(target_folder, config, windows, 4)
    assert accepted == drafted > 100


def test_a_saved_adapter_opens(world: World, tmp_path: Path) -> None:
    kind = EarlyExit(world.material, [1, 3])
    found = kind.save(tmp_path / "both")
    assert json.loads(found["exit 3"]) == {"method": "early_exit", "adapter": str(tmp_path / "both" / "exit-3")}
    files = open_adapter(str(tmp_path / "both" / "exit-3"), world.shape, None)
    assert files.exit_layer == 3
    for name, tensor in kind.module.get_submodule("exit_3").state_dict().items():
        assert torch.equal(files.weights.get(name), tensor)
    alone = EarlyExit(world.material, [2]).save(tmp_path / "one")
    assert list(alone) == ["exit 2"]
    assert open_adapter(str(tmp_path / "one"), world.shape, 2).exit_layer == 2
