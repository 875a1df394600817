"""Checkpoints that carry an MTP layer, from files to text: who drafts, what is refused, and that no text changes."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from outpace import LLM, SamplingParams
from outpace.config import EngineConfig
from outpace.errors import CheckpointError, InvalidParameter, OutOfMemory, OutpaceError, UnsupportedModel
from outpace.models import memory
from outpace.source import Source
from tests.heads.mtp_checkpoint import MTP, without_mtp, write_mimo
from tests.models.hf_tiny import tiny_model
from tests.models.tiny_tokenizers import byte_level
from tests.test_build import write_model

OPTIONS: dict[str, Any] = {"quantization": "none", "threads": 1, "cache_tokens": 1024}
PROMPTS = ["hello hello", "abc", "The quick brown fox"]
DRAWN = [SamplingParams(temperature=t, seed=1, max_tokens=40, ignore_eos=True) for t in (0.0, 0.7, 1.0)]
GREEDY = [SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)] * 3


@pytest.fixture(scope="module")
def mimo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mimo(tmp_path_factory.mktemp("models") / "mimo")


@functools.cache
def plain(model: Path, quantization: str, kernels: str, greedy: bool) -> list[list[int]]:
    options = {**OPTIONS, "quantization": quantization, "kernels": kernels}
    found = LLM(str(model), "none", **options).generate(PROMPTS, GREEDY if greedy else DRAWN)
    return [each.outputs[0].token_ids for each in found]


def same_as_plain(
    model: Path, speculative: Any, *, quantization: str = "none", kernels: str = "native", greedy: bool = False
) -> LLM:
    """The engine, whose texts are those of plain decoding, with some draft tokens of the MTP layer kept."""
    options = {**OPTIONS, "quantization": quantization, "kernels": kernels, "speculative_control": "fixed"}
    llm = LLM(str(model), speculative, **options)
    found = llm.generate(PROMPTS, GREEDY if greedy else DRAWN)
    assert [each.outputs[0].token_ids for each in found] == plain(model, quantization, kernels, greedy)
    counts = [each.stats.by_drafter["mtp"] for each in found]
    drafted, kept = sum(each.draft_tokens for each in counts), sum(each.accepted_tokens for each in counts)
    assert 0.15 * drafted < kept < drafted
    return llm


@pytest.mark.parametrize("rule", ["coupled", "standard", "block"])
@pytest.mark.parametrize(
    ("quantization", "kernels"), [("none", "native"), ("int8", "native"), ("int4", "native"), ("int8", "torch")]
)
def test_the_text_is_that_of_plain_decoding(mimo: Path, quantization: str, kernels: str, rule: str) -> None:
    """Drawn texts too where a seed keeps its text; greedy ones under every rule."""
    config = {"method": "mtp", "rejection_sample_method": rule, "num_speculative_tokens": 3}
    same_as_plain(mimo, config, quantization=quantization, kernels=kernels, greedy=rule != "coupled")


def test_words_trees_and_a_precision_of_its_own(mimo: Path) -> None:
    llm = same_as_plain(mimo, "mtp")
    assert "drafter mtp, at most 5 tokens" in llm._built.banner()
    assert llm.memory()["drafter"] > 0
    tree = {"method": "mtp", "tree_width": 3, "num_speculative_tokens": 8}
    assert same_as_plain(mimo, tree)._built.speculative[0].tree_width == 3
    same_as_plain(mimo, {"method": "mtp", "quantization": "int8"})


def methods(model: Path, speculative: Any = "auto", **options: Any) -> list[str]:
    llm = LLM(str(model), speculative, **{**OPTIONS, **options})
    found = llm.generate(PROMPTS, DRAWN)
    assert [each.outputs[0].token_ids for each in found] == plain(model, "none", "native", False)
    return [item.method for item in llm._built.speculative]


def test_auto_drafts_with_it_unless_another_is_named(mimo: Path, tmp_path: Path) -> None:
    assert methods(mimo) == ["suffix", "mtp"]
    assert methods(mimo, {"method": "auto", "num_speculative_tokens": 1}) == ["suffix", "mtp"]
    pool = {"suffix_decoding_max_cached_requests": 10, "suffix_pool_file": str(tmp_path / "pool")}
    assert methods(mimo, {"method": "auto", **pool}) == ["suffix", "mtp"]
    draft = write_model(tmp_path / "draft", num_hidden_layers=1)
    assert methods(mimo, {"method": "auto", "model": str(draft), **pool}) == ["suffix", "draft_model"]
    assert methods(mimo, {"method": "auto", "model": "mtp"}) == ["suffix", "mtp"]


@pytest.mark.parametrize("speculative", ["none", "suffix", "ngram", "self:1", "auto"])
def test_without_it_the_model_is_the_same(mimo: Path, tmp_path: Path, speculative: str) -> None:
    """Its tensors are known and not loaded; a copy that has lost them is a whole model."""
    bare = without_mtp(write_mimo(tmp_path / "bare"))
    one, other = (LLM(str(folder), speculative, **OPTIONS) for folder in (mimo, bare))
    assert one.memory()["target"] == other.memory()["target"]
    assert one._built.parameters == other._built.parameters
    assert plain(bare, "none", "native", False) == plain(mimo, "none", "native", False)
    assert [item.method for item in other._built.speculative if item.method == "mtp"] == []


def test_the_layer_of_another_copy(mimo: Path, tmp_path: Path) -> None:
    """As a GGUF file has it: without the layer, and with an epsilon of 32 bits."""
    bare = without_mtp(write_mimo(tmp_path / "bare", rms_norm_eps=9.999999747378752e-06))
    llm = same_as_plain(bare, {"method": "mtp", "model": str(mimo)})
    assert f"drafter mtp {mimo}" in llm._built.banner()


def test_memory_that_only_the_drafter_takes(mimo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(quantization="none", cache_tokens=1024)
    one, bare = (
        Source.open(str(folder), config, print) for folder in (mimo, without_mtp(write_mimo(tmp_path / "bare")))
    )
    assert one.num_bytes == bare.num_bytes
    free = memory.RESERVE_BYTES + one.num_bytes + one.cache_bytes(config)
    monkeypatch.setattr(memory, "available_bytes", lambda: free)
    LLM(str(mimo), "suffix", **OPTIONS)
    refuse(mimo, OutOfMemory, "mimo with its MTP layer needs")


def refuse(model: Path, error: type[OutpaceError], message: str, speculative: Any = "mtp") -> None:
    """It is refused, and before any weight was loaded."""
    heard: list[str] = []
    with pytest.raises(error, match=message):
        LLM(str(model), speculative, progress=lambda what, *_: heard.append(what), **OPTIONS)
    assert heard == []


def test_tensors_that_are_missing_or_too_many_are_named(tmp_path: Path) -> None:
    name = f"{MTP}self_attn.k_proj.bias"
    lacking = write_mimo(tmp_path / "lacking", tensors={name: None})
    for speculative in ("mtp", "auto"):
        refuse(lacking, CheckpointError, rf"model\.safetensors lacks tensor '{name}' of shape \[32\]", speculative)
    LLM(str(lacking), "suffix", **OPTIONS)
    cut = write_mimo(tmp_path / "cut", tensors={name: torch.zeros(31)})
    refuse(cut, CheckpointError, rf"'{name}' has shape \[31\], config.json asks for \[32\]", "none")
    for more in (f"{MTP}shared_head.weight", "model.mtp_layers.1.input_proj.weight"):
        surplus = write_mimo(tmp_path / more, tensors={more: torch.zeros(3)})
        refuse(surplus, CheckpointError, f"'{more}' has no place in this model", "none")
    unnamed = write_mimo(tmp_path / "unnamed", num_nextn_predict_layers=None)
    refuse(unnamed, CheckpointError, f"'{MTP}.*' has no place in this model", "none")
    refuse(without_mtp(write_mimo(tmp_path / "bare")), CheckpointError, r"holds no tensor model\.mtp_layers\.\*")


def test_checkpoints_that_have_none_or_another_kind(mimo: Path, tmp_path: Path) -> None:
    llama = write_model(tmp_path / "llama")
    refuse(llama, UnsupportedModel, r"llama/config\.json: the checkpoint has no multi-token-prediction layer")
    other = write_model(tmp_path / "other", num_nextn_predict_layers=1)
    refuse(other, UnsupportedModel, "multi-token-prediction layers of model type 'llama' are not supported.*: mimo")
    inner = write_model(tmp_path / "inner", text_config={"mtp_num_hidden_layers": 1})
    refuse(inner, UnsupportedModel, "of model type 'llama' are not supported")
    several = write_mimo(tmp_path / "several", num_nextn_predict_layers=2)
    refuse(several, UnsupportedModel, "num_nextn_predict_layers=2; one layer is run")
    assert methods(several) == ["suffix"]
    damaged = write_mimo(tmp_path / "damaged", num_nextn_predict_layers="1")
    refuse(damaged, CheckpointError, "num_nextn_predict_layers='1'; it must be a whole number", "none")


def test_a_layer_that_goes_with_another_model(mimo: Path, tmp_path: Path) -> None:
    narrow = write_model(tmp_path / "narrow")
    config = {"method": "mtp", "model": str(mimo)}
    refuse(narrow, CheckpointError, "MTP layer goes with a model of hidden_size 64; this one has 32", config)
    near = without_mtp(write_mimo(tmp_path / "near", rms_norm_eps=1e-6))
    refuse(near, CheckpointError, "of rms_norm_eps 1e-05; this one has 1e-06", config)
    refuse(mimo, OutpaceError, "nowhere", {"method": "mtp", "model": str(tmp_path / "nowhere")})
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    refuse(mimo, UnsupportedModel, "MTP layers are read from a folder", {"method": "mtp", "model": str(file)})
    refuse(mimo, InvalidParameter, "exit_layer=1 goes with method 'early_exit'", {"method": "mtp", "exit_layer": 1})


def test_models_on_the_layers_of_transformers(tmp_path: Path) -> None:
    folder = tmp_path / "gpt2"
    tiny_model("gpt2", vocab_size=300).save_pretrained(folder)
    byte_level().save(str(folder / "tokenizer.json"))
    refuse(folder, UnsupportedModel, "method='mtp' is not possible with gpt2.*states cannot be had")
