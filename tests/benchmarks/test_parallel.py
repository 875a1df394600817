"""benchmarks/parallel.py: a head whose later steps know nothing of the text drafted before, and the whole program."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from outpace.train.data.document import Document
from outpace.train.data.packing import pack_documents
from outpace.train.data.shards import write_data
from outpace.train.kinds.eagle3 import Eagle3Options, thinned
from tests.train.tiny import World, random_windows, save_target

AUX = (1, 2, 3)


@pytest.fixture
def parallel() -> ModuleType:
    return importlib.import_module("parallel")


@torch.no_grad()
def test_later_guesses_depend_on_the_text_before_the_draft_alone(parallel: ModuleType, tmp_path: Path) -> None:
    world = World(save_target(tmp_path / "tiny"))
    torch.manual_seed(0)
    kind = parallel.Parallel(world.material, torch.arange(100), Eagle3Options(unroll=3))
    texts = [5, 90, 33, 70, 12, 51, 8, 30], [5, 90, 33, 70, 41, 42, 43, 44]
    found = []
    for text in texts:
        batch = world.batch(pack_documents([Document.text(text)], len(text)), *AUX)
        starts = thinned(kind._teacher(batch)[1], 3, 1.0)
        found.append([states[2] for states in kind._states(batch, starts)])  # a draft behind the fourth token
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found[0][1], found[0][2])


def test_the_table(
    parallel: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_target(tmp_path / "tiny")
    world = World(model)
    write_data(
        tmp_path / "data",
        random_windows(3, 32, 200),
        random_windows(2, 32, 200, 1),
        random_windows(1, 32, 200, 2),
        world.identity,
        ["made"],
    )
    command = ["parallel.py", "--model", str(model), "--data", str(tmp_path / "data"), "--out", str(tmp_path / "out"),
               "--steps", "2", "--repeats", "2", "--draft-vocab", "99", "--threads", "1",
               "--quantization", "none"]  # fmt: skip
    monkeypatch.setattr(sys, "argv", command)
    threads = torch.get_num_threads()
    parallel.main()
    torch.set_num_threads(threads)
    rows = table(capsys.readouterr().out)
    assert [row[:2] for row in rows] == [
        [name, str(length)] for name in ("serial", "parallel") for length in (1, 2, 3, 4)
    ]
    for row in rows:
        assert 1 <= float(row[3]) <= 1 + int(row[1])
        assert float(row[4]) > 0 < float(row[5])
        assert row[6].endswith("x")
    parallel.main()
    torch.set_num_threads(threads)
    again = capsys.readouterr().out
    assert "step 1/2" not in again, "heads that are there are not trained again"
    assert [row[:4] for row in table(again)] == [row[:4] for row in rows]


def table(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith(("| serial", "| parallel"))]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def test_gains_by_hand(parallel: ModuleType) -> None:
    """A half is kept, then a fifth: 1.5 and 1.6 tokens; a plain step of 10 ms against 12 + 3 and 14 + 6."""
    found = parallel.gains([0.5, 0.2], [10.0, 12.0, 14.0], [3.0, 6.0])
    assert found == [pytest.approx((1.5, 1.0)), pytest.approx((1.6, 0.8))]
