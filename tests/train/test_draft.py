"""Draft models: transformers' own numbers, layers at even distances, checkpoints that anybody opens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from outpace import LLM, SamplingParams
from outpace.errors import InvalidParameter
from outpace.models.config import DecoderConfig
from outpace.train.acceptance import Tally
from outpace.train.kinds.draft import Draft, DraftOptions, chosen_layers
from outpace.train.modules.small_model import SmallModel
from tests.models.tiny_models import VARIANTS, reference_model
from tests.train.tiny import ENGINE, World, random_windows


@pytest.mark.thinned(3)
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_states_are_those_of_transformers(variant: str) -> None:
    """Two texts in one window, each as if alone; windows of attention included."""
    reference = reference_model(variant)
    model = SmallModel(DecoderConfig.from_hf(reference.config.to_dict()))
    state = {name: tensor for name, tensor in reference.state_dict().items() if name in model.state_dict()}
    model.load_state_dict(state)
    ids = torch.randint(97, (1, 50), generator=torch.Generator().manual_seed(1))
    pieces = torch.tensor([[0] * 30 + [1] * 20])
    positions = torch.tensor([[*range(30), *range(20)]])
    with torch.no_grad():
        found = model(ids, positions, pieces) @ model.head.T
        expected = torch.cat([reference(ids[:, :30]).logits, reference(ids[:, 30:]).logits], 1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-4)


def test_layers_at_even_distances() -> None:
    assert chosen_layers(DraftOptions(layers=4), 10) == (0, 3, 6, 9)
    assert chosen_layers(DraftOptions(layers=2), 30) == (0, 29)
    assert chosen_layers(DraftOptions(layers=1), 30) == (0,)
    assert chosen_layers(DraftOptions(), 30) == (0, 5, 10, 14, 19, 24, 29)
    assert len(set(chosen_layers(DraftOptions(layers=29), 30))) == 29
    for count in (0, 30):
        with pytest.raises(InvalidParameter, match=f"layers={count} is not possible: it must be in 1 to 29"):
            chosen_layers(DraftOptions(layers=count), 30)


def train_a_little(kind: Draft, world: World, steps: int) -> list[float]:
    batch = world.batch(random_windows(2, 24, 200))
    trained = [item for item in kind.module.parameters() if item.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=2e-3)
    losses = []
    for _ in range(steps):
        optimiser.zero_grad()
        loss = kind.loss(batch)
        loss.value.backward()
        optimiser.step()
        losses.append(loss.value.item())
    return losses


@pytest.mark.parametrize("options", [{}, {"from_scratch": True}, {"train_embedding": True}])
def test_it_learns_and_only_what_it_is_to(world: World, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    kind = Draft(world.material, DraftOptions(layers=2, **options))
    before = {name: tensor.clone() for name, tensor in kind.module.state_dict().items()}
    first_layer = torch.equal(
        before["model.layers.1.mlp.up_proj.weight"], world.material.weight("model.layers.3.mlp.up_proj.weight")
    )
    assert first_layer is not options.get("from_scratch", False)
    losses = train_a_little(kind, world, 25)
    assert losses[-1] < 0.8 * losses[0]
    same = {name for name, tensor in kind.module.state_dict().items() if torch.equal(tensor, before[name])}
    assert same == (set() if "train_embedding" in options else {"model.embed_tokens.weight", "lm_head.weight"})


def test_all_layers_would_be_the_target_itself(world: World) -> None:
    """With nothing left out acceptance is 1: labels and shifts are right."""
    kind = Draft(world.material, DraftOptions(layers=3))
    whole = SmallModel(world.shape)
    whole.load_state_dict({name: world.material.weight(name) for name in whole.state_dict()})
    kind._model = whole
    tally = Tally(4)
    tally.add(kind.chains(world.batch(random_windows(2, 24, 200)))["draft"])
    result = tally.result()
    assert result.rate == 1.0
    assert result.sampled == pytest.approx((1.0,) * 4, abs=1e-4)


def test_what_is_saved_is_an_ordinary_checkpoint(world: World, target_folder: Path, tmp_path: Path) -> None:
    kind = Draft(world.material, DraftOptions(layers=2))
    train_a_little(kind, world, 10)
    served = json.loads(kind.save(tmp_path / "draft")["draft"])
    assert served == {"method": "draft_model", "model": str(tmp_path / "draft")}
    config = transformers.AutoConfig.from_pretrained(tmp_path / "draft")
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.load_state_dict(load_file(tmp_path / "draft" / "model.safetensors"))
    windows = random_windows(2, 24, 200)
    ids = windows.ids[1:, :4]
    with torch.no_grad():
        expected = model(ids).logits
        found = kind._model(ids, torch.arange(4).unsqueeze(0), torch.zeros_like(ids)) @ kind._model.head.T
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    params = SamplingParams(temperature=0, max_tokens=40)
    plain = LLM(str(target_folder), "none", **ENGINE).generate("some text", params)[0]
    fast = LLM(str(target_folder), {**served, "num_speculative_tokens": 3}, speculative_control="fixed", **ENGINE)
    output = fast.generate("some text", params)[0]
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    assert output.stats.draft_tokens > 0
