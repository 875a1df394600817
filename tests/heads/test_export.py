"""`outpace export`: heads taken to other engines, complete and bit for bit, and what cannot be taken there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import outpace.heads.export as heads_export
from outpace.cli.main import main
from outpace.heads import Eagle3Config, Verifier, open_head, save_eagle3
from outpace.models.adapter import ADAPTER_TYPE
from outpace.models.config import expected_tensors
from outpace.models.load import load_files
from outpace.models.resolve import ALIASES, Alias
from tests.models.tiny_models import SIZES
from tests.models.tiny_tokenizers import byte_level

from .test_files import CONFIGS
from .tiny_heads import rewrite, tiny_config, tiny_target, tiny_tensors

V = SIZES["vocab_size"]
NAMED = Verifier("someone/llama", ("LlamaForCausalLM",))
Export = Callable[..., tuple[int, str, str]]


@pytest.fixture
def export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Export:
    """Runs `outpace export HEAD "out"` with more arguments: exit code, standard output, standard error."""

    def call(head: Path | str, engine: str, *more: str) -> tuple[int, str, str]:
        code = main(["export", "--to", engine, str(head), str(tmp_path / "out"), *more])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def write_target(folder: Path, **changes: Any) -> Path:
    shape = tiny_target(**changes)
    generator = torch.Generator().manual_seed(9)
    folder.mkdir()
    tensors = {name: torch.randn(size, generator=generator) for name, size in expected_tensors(shape).items()}
    save_file(tensors, folder / "model.safetensors")
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SIZES, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    byte_level().save(str(folder / "tokenizer.json"))
    return folder


def saved(folder: Path, config: Eagle3Config, **options: Any) -> Path:
    save_eagle3(folder, config, tiny_tensors(config), **options)
    return folder


@pytest.mark.parametrize("layout", ["native", "speculators"])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("name", ["usual", "whole vocabulary", "a norm each", "llama3 rope", "yarn"])
def test_there_and_back_bit_for_bit(name: str, engine: str, layout: str, tmp_path: Path, export: Export) -> None:
    config = CONFIGS[name]
    if config.fc_bias:
        config = tiny_config(fc_norm=True, norm_output=True)
    head = saved(tmp_path / "head", config, layout=layout, verifier=NAMED)
    code, out, err = export(head, engine)
    assert (code, err) == (0, "")
    assert {"vllm": f"vllm serve {tmp_path / 'out'}", "sglang": "--speculative-algorithm EAGLE3"}[engine] in out
    before, after = open_head(head), open_head(tmp_path / "out")
    assert (before.config, before.verifier) == (after.config, after.verifier)
    assert before.weights.shapes == after.weights.shapes
    for each in before.weights.shapes:
        assert torch.equal(before.weights.get(each), after.weights.get(each))
    other = "sglang" if layout == "native" else "vllm"
    if engine != other:
        assert main(["export", "--to", other, str(tmp_path / "out"), str(tmp_path / "back")]) == 0
        for file in ("model.safetensors", "config.json"):
            assert (tmp_path / "back" / file).read_bytes() == (head / file).read_bytes()


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied"])
@pytest.mark.parametrize("draft_vocab", [60, V])
def test_rows_of_the_targets_head_are_written(draft_vocab: int, tied: bool, tmp_path: Path, export: Export) -> None:
    target = write_target(tmp_path / "target", tie_word_embeddings=tied)
    config = tiny_config(draft_vocab, shares_target_head=True)
    head = saved(tmp_path / "head", config)
    code, _, err = export(head, "sglang")
    assert code == 2 and "does not say what model it is for" in err and "--target" in err
    assert export(head, "sglang", "--target", str(target))[0] == 0
    found = open_head(tmp_path / "out")
    assert not found.config.shares_target_head
    rows = load_file(target / "model.safetensors")["model.embed_tokens.weight" if tied else "lm_head.weight"]
    ids = torch.arange(V) if found.token_ids is None else found.token_ids
    assert torch.equal(found.weights.get("lm_head.weight"), rows[ids])
    assert found.verifier == Verifier(str(target), ("LlamaForCausalLM",))
    saved(tmp_path / "named", config, verifier=Verifier(str(target)))
    assert export(tmp_path / "named", "vllm")[0] == 0, "the target that the head names is opened"


def test_the_target_has_a_name_that_others_understand(
    tmp_path: Path, export: Export, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = saved(tmp_path / "head", tiny_config())
    write_target(tmp_path / "target")
    monkeypatch.chdir(tmp_path)
    assert export(head, "vllm", "--target", "target")[0] == 0
    verifier = open_head(tmp_path / "out").verifier
    assert verifier is not None and verifier.name == str(tmp_path / "target")
    monkeypatch.setitem(ALIASES, "tiny", Alias("Tiny", "no-such-package", "someone/tiny"))
    opened = load_files("target")
    monkeypatch.setattr(heads_export, "load_files", lambda *_, **__: opened)
    assert export(head, "vllm", "--target", "tiny")[0] == 0
    verifier = open_head(tmp_path / "out").verifier
    assert verifier is not None and verifier.name == "someone/tiny"


def test_another_target_is_refused(tmp_path: Path, export: Export) -> None:
    target = write_target(tmp_path / "target", hidden_size=96)
    code, _, err = export(saved(tmp_path / "head", tiny_config()), "vllm", "--target", str(target))
    assert code == 1 and "made for a target of hidden size 72; this one has 96" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("engine", "config", "message"),
    [
        ("sglang", tiny_config(norm_before_residual=True), "norm_before_residual"),
        ("sglang", CONFIGS["qwen3"], "of type qwen3, and heads there are llama"),
        ("sglang", CONFIGS["biases"], "layer has biases"),
        ("sglang", CONFIGS["own layers"], "state entering layer 0"),
        ("sglang", CONFIGS["a norm each"], "fc has a bias"),
        ("vllm", CONFIGS["a norm each"], "fc has a bias"),
        ("vllm", tiny_config(layer={"model_type": "qwen2"}), "of type qwen2, and heads there are llama or qwen3"),
    ],
)
def test_what_an_engine_would_run_wrongly(
    engine: str, config: Eagle3Config, message: str, tmp_path: Path, export: Export
) -> None:
    code, _, err = export(saved(tmp_path / "head", config, verifier=NAMED), engine)
    assert code == 2 and f"{engine} cannot run this head" in err and message in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["norms", "qwen3", "biases", "own layers"])
def test_vllm_runs_what_sglang_cannot(name: str, tmp_path: Path, export: Export) -> None:
    head = saved(tmp_path / "head", CONFIGS[name], verifier=NAMED)
    assert export(head, "vllm")[0] == 0
    assert open_head(tmp_path / "out").config == CONFIGS[name]


def test_what_is_no_head(tmp_path: Path, export: Export) -> None:
    head = saved(tmp_path / "head", tiny_config(), verifier=NAMED)
    code, _, err = export(write_target(tmp_path / "model"), "vllm")
    assert code == 2 and "ordinary model" in err and "takes such a draft model as it is" in err
    code, _, err = export(rewrite(head, keys={"model_type": ADAPTER_TYPE}), "vllm")
    assert code == 2 and "adapter of an early exit, which runs in outpace alone" in err
    code, _, err = export(tmp_path / "nowhere", "vllm")
    assert code == 2 and "nowhere" in err
    code, _, err = export(head, "tgi")
    assert code == 2 and "tgi" in err and "sglang" in err


def test_what_lies_in_the_folder_stays(tmp_path: Path, export: Export) -> None:
    head = saved(tmp_path / "head", tiny_config(), verifier=NAMED)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/notes.txt").write_text("mine")
    code, _, err = export(head, "vllm")
    assert code == 2 and "holds notes.txt" in err
    assert [each.name for each in (tmp_path / "out").iterdir()] == ["notes.txt"]
