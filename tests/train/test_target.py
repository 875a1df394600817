"""The teacher's states are those it serves with, text by text, computed or read back from disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outpace.errors import CheckpointError, OutpaceError
from outpace.train.data.packing import Windows
from outpace.train.states import StoredStates, stored_bytes
from outpace.train.target import Batch
from outpace.train.teacher import PartOfHead, SubsetTeacher, WholeTeacher
from tests.models.tiny_models import lanes, pack_of
from tests.train.tiny import EXIT, HIDDEN, LAYERS, World, random_windows


def alone(world: World, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """States at EXIT and logits of a text by itself, as the engine computes them."""
    cache = lanes(world.model, 1, len(ids))
    result = world.model.forward(pack_of((0, 0, ids), aux_layers=(EXIT,)), cache)
    return result.aux[EXIT], result.logits


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_every_piece_has_the_bits_it_has_alone(target_folder: Path, quantization: str) -> None:
    world = World(target_folder, quantization)
    windows = random_windows(2, 24, 200)
    batch = world.batch(windows, EXIT)
    for row in range(2):
        for piece in range(3):
            at = (windows.pieces[row] == piece).nonzero().squeeze(1)
            if not len(at):
                continue
            states, logits = alone(world, windows.ids[row, at].tolist())
            assert torch.equal(batch.aux[EXIT][row, at], states)
            assert torch.equal(batch.logits(row * 24 + at), logits)
    assert batch.aux[EXIT][0, -3:].abs().sum() == 0  # filling
    assert batch.target.seconds > 0


def test_states_may_take_part_in_gradients(world: World) -> None:
    batch = world.batch(random_windows(1, 12, 200), EXIT)
    weight = torch.ones(HIDDEN, requires_grad=True)
    (batch.aux[EXIT] * weight).sum().backward()
    assert weight.grad is not None


def test_teachers_of_all_and_of_some_tokens(world: World) -> None:
    windows = random_windows(2, 12, 200)
    batch = world.batch(windows)
    rows = windows.counted.flatten().nonzero().squeeze(1)
    whole = WholeTeacher(batch, rows, shared=True)
    p, best = whole(2, 5)
    assert torch.equal(p, batch.logits(rows[2:5]).softmax(-1))
    assert torch.equal(best, batch.logits(rows[2:5]).argmax(-1))
    assert whole(2, 5)[0] is p
    ids = torch.unique(torch.cat((torch.arange(0, 100, 3), best[:1])))
    subset = SubsetTeacher(batch, rows, ids, part_of_head(world, ids))
    part, place = subset.of(rows[[4, 2]])(0, 2)
    assert torch.equal(part, p[[2, 0]][:, ids])
    expected = [ids.tolist().index(token) if token in ids.tolist() else -1 for token in best[[2, 0]].tolist()]
    assert place.tolist() == expected


def part_of_head(world: World, ids: torch.Tensor) -> PartOfHead:
    weight = world.material.weight
    return PartOfHead(weight("model.norm.weight"), world.shape.rms_norm_eps, weight("lm_head.weight")[ids])


@pytest.mark.parametrize(("kind", "tolerance"), [("fp16", 2e-3), ("int8", 0.05)])
def test_what_was_said_before_teaches_the_same(world: World, tmp_path: Path, kind: str, tolerance: float) -> None:
    """Part of the vocabulary, from stored states and sums, against the whole of it computed anew."""
    windows = random_windows(3, 12, 200)
    states = stored(world, tmp_path, kind)
    states.make(windows, lambda *_: None)
    which = torch.tensor([2, 0])
    again = Batch(windows[which], states.states(windows[which], which), world.target(EXIT),
                  states.said(windows[which], which))  # fmt: skip
    exact = world.batch(windows[which], EXIT)
    rows = again.windows.counted.flatten().nonzero().squeeze(1)
    ids = torch.arange(1, 265, 2)
    expected = exact.logits(rows).softmax(-1)
    p, best = SubsetTeacher(again, rows, ids, part_of_head(world, ids)).of(rows)(0, len(rows))
    assert (p - expected[:, ids]).abs().max() < tolerance
    likeliest = expected.argmax(-1)
    assert torch.equal(best, torch.where(likeliest % 2 == 1, likeliest // 2, -1))


def test_kinds_share_stored_states(world: World, tmp_path: Path) -> None:
    """Another layer is added to what there is, and the layers behind it do not run for it."""
    windows = random_windows(2, 12, 200)
    first, second = world.target(EXIT), world.target(1)
    StoredStates(tmp_path, "train", "fp16", first, world.identity).make(windows, lambda *_: None)
    (place,) = tmp_path.iterdir()
    before = {path.name: path.stat().st_mtime_ns for path in place.glob("*.safetensors")}
    ran: list[list[int]] = []
    states = second.states

    def counted(windows: Windows, which: torch.Tensor, layers: list[int]) -> dict[int, torch.Tensor]:
        ran.append(layers)
        return states(windows, which, layers)

    second.states = counted  # type: ignore[assignment,method-assign]
    shared = StoredStates(tmp_path, "train", "fp16", second, world.identity)
    shared.make(windows, lambda *_: None)
    assert ran == [[1]]
    after = {path.name: path.stat().st_mtime_ns for path in place.glob("*.safetensors")}
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == {"L01-00000.safetensors"}
    which = torch.tensor([1])
    assert shared.states(windows[which], which).keys() == {1, LAYERS}


def stored(world: World, folder: Path, kind: str) -> StoredStates:
    return StoredStates(folder, "train", kind, world.target(EXIT), world.identity)


@pytest.mark.parametrize(("kind", "tolerance"), [("fp16", 1e-3), ("int8", 1e-2)])
def test_stored_states_are_the_same_up_to_rounding(world: World, tmp_path: Path, kind: str, tolerance: float) -> None:
    windows = random_windows(19, 12, 200)  # three files
    steps: list[tuple[int, int]] = []
    states = stored(world, tmp_path, kind)
    states.make(windows, lambda *step: steps.append(step))
    assert steps == [(8, 19), (16, 19), (19, 19)]
    which = torch.tensor([18, 0, 9])
    found = states.states(windows[which], which)
    exact = world.target(EXIT).states(windows[which], which)
    assert found.keys() == exact.keys() == {EXIT, LAYERS}
    for layer, rows in found.items():
        assert (rows - exact[layer]).abs().max() < tolerance * exact[layer].abs().max()
    size = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    assert size == pytest.approx(stored_bytes(kind, 19 * 12, 2, HIDDEN), rel=0.1)


def test_stored_states_are_made_once_and_beside_those_of_other_texts(world: World, tmp_path: Path) -> None:
    windows = random_windows(9, 12, 200)
    stored(world, tmp_path, "fp16").make(windows, lambda *_: None)
    (place,) = tmp_path.iterdir()
    first = {path.name: path.stat().st_mtime_ns for path in place.glob("*.safetensors")}
    (place / "L02-00001.safetensors").unlink()  # as if it had been stopped there
    stored(world, tmp_path, "fp16").make(windows, lambda *_: None)
    second = {path.name: path.stat().st_mtime_ns for path in place.glob("*.safetensors")}
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == ["L02-00001.safetensors"]
    other = random_windows(9, 12, 200, seed=1)
    states = stored(world, tmp_path, "fp16")
    states.make(other, lambda *_: None)
    which = torch.tensor([3])
    exact = world.target(EXIT).states(other[which], which)[EXIT]
    assert (states.states(other[which], which)[EXIT] - exact).abs().max() < 1e-2
    assert {path.name: path.stat().st_mtime_ns for path in place.glob("*.safetensors")} == second


def test_runs_with_other_numbers_or_precision_do_not_meet(world: World, target_folder: Path, tmp_path: Path) -> None:
    """One reads while the others write: each has its own, and the right, states."""
    windows = random_windows(3, 12, 200)
    which = torch.tensor([2])
    kinds = {kind: stored(world, tmp_path, kind) for kind in ("fp16", "int8")}
    kinds["fp16"].make(windows, lambda *_: None)
    before = kinds["fp16"].states(windows[which], which)[EXIT]
    kinds["int8"].make(windows, lambda *_: None)
    rounded = World(target_folder, "int8")
    other = StoredStates(tmp_path, "train", "fp16", rounded.target(EXIT), rounded.identity)
    other.make(windows, lambda *_: None)
    assert torch.equal(kinds["fp16"].states(windows[which], which)[EXIT], before)
    exact = rounded.target(EXIT).states(windows[which], which)[EXIT]
    assert (other.states(windows[which], which)[EXIT] - exact).abs().max() < 1e-3 * exact.abs().max()
    assert len(list(tmp_path.iterdir())) == 3


def test_damaged_states_are_named(world: World, tmp_path: Path) -> None:
    windows = random_windows(2, 12, 200)
    stored(world, tmp_path, "fp16").make(windows, lambda *_: None)
    (path,) = tmp_path.glob("*/L02-00000.safetensors")
    path.write_bytes(path.read_bytes()[:100])
    states = stored(world, tmp_path, "fp16")
    states.make(windows, lambda *_: None)
    with pytest.raises(CheckpointError, match=r"L02-00000.safetensors is missing or damaged"):
        states.states(windows, torch.tensor([0]))


def test_a_folder_that_cannot_be_made(world: World, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutpaceError, match="cannot be made"):
        stored(world, tmp_path / "file" / "states", "fp16")
