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
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split("|") for line in lines if line.startswith(("| serial", "| parallel"))]
    assert [row[1].strip() for row in rows] == ["serial", "parallel"]
    for row in rows:
        assert 1 <= float(row[2]) <= 5
        assert len(row[3].split(",")) == 4
        assert float(row[4]) > 0
        assert row[5].strip().endswith("x")
