"""The command line on real weights: the same words with speculation on and off, and errors only real files make."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import outpace as package
from outpace.cli.backend import Backend
from outpace.cli.main import main

pytestmark = pytest.mark.smollm2

PROMPT = "Day 1: oak, elm, ash, yew. Day 2: oak, elm, ash, yew. Day 3: oak, elm,"
SAMPLINGS = [
    ["--temperature", "0"],
    *(["--temperature", "1", "--top-p", "0.95", "--seed", str(seed)] for seed in (1, 3)),
]


@pytest.fixture(scope="module")
def backend(smollm2_path: Path) -> Backend:
    """The real engine, built once for each way to speculate, on one thread: two stall while others use the cores."""

    @functools.cache
    def build(config: package.EngineConfig, speculative: package.SpeculativeConfig) -> package.LLM:
        return package.LLM(config, speculative=speculative, front="cli")

    def llm(config: package.EngineConfig, *, speculative: Any, **_: Any) -> package.LLM:
        return build(replace(config, threads=1), speculative)

    return Backend(llm=llm)


@pytest.fixture
def generate(backend: Backend, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Runs `outpace generate --json` and returns its object."""

    def call(*arguments: str) -> dict[str, Any]:
        assert main(["generate", "--no-chat", "--json", "--max-tokens", "16", *arguments], backend) == 0
        record: dict[str, Any] = json.loads(capsys.readouterr().out)
        return record

    return call


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=" ".join)
@pytest.mark.parametrize("drafter", ["ngram", "self:26"])
def test_speculation_changes_no_token(generate, drafter: str, sampling: list[str]) -> None:
    plain = generate(PROMPT, "--speculative-model", "none", *sampling)
    always = ["--speculative-control", "fixed", "--num-speculative-tokens", "2"]
    speculative = generate(PROMPT, "--speculative-model", drafter, *always, *sampling)
    assert speculative["token_ids"] == plain["token_ids"]
    assert speculative["text"] == plain["text"]
    assert plain["stats"]["acceptance_rate"] is None
    # Both outcomes were met, and often enough for the equality above to prove something.
    assert 0.2 < speculative["stats"]["acceptance_rate"] < 1


def test_streamed_text_is_the_text_of_the_json(generate, backend, capsys) -> None:
    assert main(["generate", "--no-chat", "--max-tokens", "16", PROMPT], backend) == 0
    assert capsys.readouterr().out == generate(PROMPT)["text"] + "\n"


def test_a_prompt_longer_than_the_context(backend, capsys) -> None:
    code = main(["generate", "--max-model-len", "64", "word " * 100], backend)
    shown = capsys.readouterr()
    assert (code, shown.out) == (2, "")
    assert "64" in shown.err
    assert len(shown.err.partition("outpace: ")[2].splitlines()) <= 2


def test_a_model_that_is_nowhere(capsys, tmp_path) -> None:
    code = main(["generate", "Hi", "--model", str(tmp_path / "no such model")])
    shown = capsys.readouterr()
    assert (code, shown.out) == (2, "")
    assert "no such model" in shown.err


def test_a_folder_without_config(capsys, tmp_path) -> None:
    (tmp_path / "notes.txt").write_text("nothing here")
    code = main(["generate", "Hi", "--model", str(tmp_path)])
    shown = capsys.readouterr()
    assert (code, shown.out) == (2, "")
    assert "config.json" in shown.err
    assert len(shown.err.splitlines()) <= 2
