"""Adapters on disk: read as written, refused by name when they do not belong to the target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from outpace.errors import CheckpointError, InvalidParameter, ModelNotFound
from outpace.kv.cache import KvCache
from outpace.models.adapter import ADAPTER_TYPE, BlockAdapter, adapter_tensors, open_adapter
from outpace.types import Segment
from tests.end_to_end.tiny import EXIT_LAYER, LAYERS, adapter, target, tensors
from tests.models.tiny_models import SIZES


def write(folder: Path, *, config: dict[str, Any] | None = None, drop: str = "", extra: str = "") -> Path:
    prefix = f"model.layers.{EXIT_LAYER}."
    found = {"block." + n.removeprefix(prefix): t for n, t in tensors().items() if n.startswith(prefix)}
    found["norm.weight"] = tensors()["model.norm.weight"]
    found.pop(drop, None)
    if extra:
        found[extra] = torch.zeros(2)
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous().clone() for name, tensor in found.items()}, folder / "model.safetensors")
    settings = {
        "model_type": ADAPTER_TYPE,
        "exit_layer": EXIT_LAYER,
        "hidden_size": SIZES["hidden_size"],
        "num_hidden_layers": LAYERS,
        **(config or {}),
    }
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def load(folder: Path | str, exit_layer: int | None = None) -> BlockAdapter:
    model = target("none")
    files = open_adapter(str(folder), model.config, exit_layer)
    return BlockAdapter(model, files.weights, exit_layer=files.exit_layer, num_lanes=1, capacity=64, max_rows=64)


def run(found: BlockAdapter) -> torch.Tensor:
    cache = found.cache
    assert isinstance(cache, KvCache)
    lane = cache.allocate()
    assert lane is not None
    assert cache.reserve(lane, 9)
    hidden = torch.randn(9, SIZES["hidden_size"], generator=torch.Generator().manual_seed(1))
    logits = found.logits(hidden, torch.arange(9), [Segment(lane, 0, 9, 0)], torch.arange(9))
    cache.release(lane)
    return logits


def test_a_folder_gives_the_adapter_it_was_made_from(tmp_path: Path) -> None:
    found = load(write(tmp_path / "ad apter"))
    assert found.exit_layer == EXIT_LAYER
    assert torch.equal(run(found), run(adapter("none")))


def test_names_and_shapes_are_those_of_one_layer() -> None:
    shapes = adapter_tensors(target("none").config)
    hidden = SIZES["hidden_size"]
    assert shapes["block.self_attn.q_proj.weight"] == (hidden, hidden)
    assert shapes["block.mlp.down_proj.weight"] == (hidden, SIZES["intermediate_size"])
    assert shapes["norm.weight"] == (hidden,)
    assert len(shapes) == 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drop": "norm.weight"}, "norm.weight"),
        ({"extra": "block.more.weight"}, "block.more.weight"),
        ({"config": {"hidden_size": 64}}, "hidden_size=64"),
        ({"config": {"num_hidden_layers": 30}}, "num_hidden_layers=30"),
        ({"config": {"vocab_size": 5}}, "vocab_size=5"),
        ({"config": {"exit_layer": 4}}, "exit_layer=4"),
        ({"config": {"exit_layer": "2"}}, "exit_layer='2'"),
        ({"config": {"model_type": "llama"}}, "'llama'"),
    ],
)
def test_what_does_not_belong_is_named(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(write(tmp_path, **options))


def test_another_exit_and_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="trained for 2"):
        load(write(tmp_path), exit_layer=3)
    with pytest.raises(ModelNotFound, match="nowhere"):
        load(tmp_path / "nowhere")
