"""A trained EAGLE-3 head, exported, in vLLM: the same texts and as much accepted as here.

Needs vLLM's CPU build: `python benchmarks/engines/environments.py --only vllm`, which puts it into `.engines` of the
checkout; OUTPACE_TEST_ENGINES names another folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from engines.client import Worker
from engines.environments import DEFAULT_FOLDER, python_of
from engines.protocol import Prompt, Settings

from outpace.cli.main import main
from outpace.train.data.packing import Windows
from outpace.train.kinds.eagle3 import Eagle3, Eagle3Options
from tests.train.serving import own_words, served
from tests.train.tiny import World, save_target

ENGINES = Path(os.environ.get("OUTPACE_TEST_ENGINES", DEFAULT_FOLDER)).expanduser()
PYTHON = python_of(ENGINES, "vllm")
CHAIN, ANSWERS, SAID = 4, 4, 160
SECONDS = 600.0
"""A limit, reached only if it hangs: loading takes a minute on a busy machine."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON.exists(),
        reason=f"{PYTHON} is not there: benchmarks/engines/environments.py --only vllm makes it, 3 GB",
    ),
]


@dataclass(frozen=True)
class Spoken:
    """What vLLM said to all prompts.

    Args:
        token_ids: of every answer.
        drafted: draft tokens verified.
        accepted: draft tokens kept.
    """

    token_ids: list[list[int]]
    drafted: int
    accepted: int


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose attention heads are of a size that vLLM has kernels for."""
    return save_target(tmp_path_factory.mktemp("vllm") / "target", dim=32)


@pytest.fixture(scope="module")
def words(folder: Path) -> Windows:
    return own_words(World(folder), folder, ANSWERS, SAID)


@pytest.fixture(scope="module")
def plain(folder: Path, words: Windows) -> Spoken:
    return spoken(folder, None, words.ids[:, :3].tolist(), folder.parent / "plain.log")


def spoken(folder: Path, head: Path | None, prompts: Sequence[Sequence[int]], log: Path) -> Spoken:
    """Has vLLM answer prompts one after the other."""
    variant = "plain" if head is None else "eagle3"
    options = {"dtype": "float32", "eager": "yes"}
    draft = None if head is None else str(head)
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    settings = Settings(str(folder), draft, variant, options, 1, 1024, CHAIN, [], vocab, str(log.parent))
    with Worker(PYTHON, "engines.vllm_worker", threads=1, log=log) as worker:
        worker.load(settings, SECONDS)
        answers = [worker.generate(Prompt(list(each), SAID, True), SECONDS)[0] for each in prompts]
    drafted, accepted = (sum(getattr(each, name) or 0 for each in answers) for name in ("drafted", "accepted"))
    return Spoken([each.token_ids for each in answers], drafted, accepted)


def trained(folder: Path, words: Windows, share: float, out: Path) -> None:
    """A head that is often right and often wrong, for a vocabulary of a share of what is said."""
    world = World(folder, loss="kl")
    said = torch.unique(words.ids[words.labels])
    ids = torch.arange(world.material.vocab_size) if share == 1.0 else said[: int(len(said) * share)]
    torch.manual_seed(1)
    kind = Eagle3(world.material, ids, Eagle3Options(row_share=1.0))
    batch = world.batch(words, 1, 2, 3)
    optimiser = torch.optim.AdamW(kind.module.parameters(), lr=3e-3)
    for _ in range(60):
        optimiser.zero_grad()
        kind.loss(batch).value.backward()
        optimiser.step()
    kind.save(out)


@pytest.mark.parametrize("share", [1.0, 0.9], ids=["whole vocabulary", "a part of it"])
def test_as_much_is_accepted_as_here(folder: Path, words: Windows, plain: Spoken, share: float, tmp_path: Path) -> None:
    trained(folder, words, share, tmp_path / "head")
    exported = tmp_path / "exported"
    assert main(["export", "--to", "vllm", str(tmp_path / "head"), str(exported)]) == 0
    assert json.loads((exported / "config.json").read_text())["speculators_model_type"] == "eagle3"
    there = spoken(folder, exported, words.ids[:, :3].tolist(), tmp_path / "vllm.log")
    drafted, accepted, drafts = served(folder, {"method": "eagle3", "model": str(exported)}, words, CHAIN)
    print(f"vLLM {there.accepted} of {there.drafted}, here {accepted} of {drafted} in {drafts} drafts")
    assert there.token_ids == plain.token_ids == words.ids[:, 3:].tolist()
    assert 0.1 < accepted / drafted < 0.95  # neither always nor never, or the test says nothing
    # vLLM drafts as far beyond the end of an answer as anywhere, which is not done here.
    assert there.accepted / there.drafted == pytest.approx(accepted / drafted, abs=0.02)
