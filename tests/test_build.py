"""Putting an engine together from folders: what is wrong is said before the target's weights are loaded."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from outpace import LLM, SamplingParams
from outpace.control.making import make_controller
from outpace.errors import (
    CheckpointError,
    InvalidParameter,
    ModelNotFound,
    OutOfMemory,
    UnsupportedModel,
    VocabularyMismatch,
)
from outpace.heads import Eagle3Config, eagle3_tensors, offsets_of, save_eagle3
from outpace.models import memory, selection
from outpace.models.adapter import ADAPTER_TYPE
from outpace.models.config import DecoderConfig, expected_tensors
from tests.models.tiny_tokenizers import byte_level, sentencepiece

SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": 300,
}
OPTIONS: dict[str, Any] = {"quantization": "none", "threads": 1, "cache_tokens": 512}


def write_model(folder: Path, *, tokenizer: Any = None, **changes: Any) -> Path:
    folder.mkdir()
    config = {**SHAPE, **changes}
    generator = torch.Generator().manual_seed(1)
    shapes = expected_tensors(DecoderConfig.from_hf(config))
    save_file(
        {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()},
        str(folder / "model.safetensors"),
    )
    (folder / "config.json").write_text(json.dumps(config))
    (tokenizer or byte_level()).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_model(tmp_path / "target")


def refuse(target: Path, speculative: Any, error: type[Exception], message: str, **options: Any) -> None:
    """It is refused, and before any weight was loaded."""
    progress: list[str] = []
    with pytest.raises(error, match=message):
        LLM(str(target), speculative, progress=lambda what, *_: progress.append(what), **{**OPTIONS, **options})
    assert progress == []


@pytest.mark.parametrize(
    "options",
    [
        {"kernels": "torch"},
        {"kernels": "torch", "quantization": "int8"},
        {"quantization": "int4"},
        {"quantization": "int8"},
        {"quantization": "none"},
        {"quantization": "auto", "dtype": "bfloat16"},
    ],
    ids=lambda options: " ".join(options.values()),
)
def test_models_and_drafts_by_path(target: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    draft = write_model(tmp_path / "draft", num_hidden_layers=1)
    params = SamplingParams(max_tokens=8, temperature=0)

    def tokens(llm: LLM) -> list[int]:
        return llm.generate("he", params)[0].outputs[0].token_ids

    plain = tokens(LLM(target, "none", **{**OPTIONS, **options}))
    assert len(plain) == 8
    for speculative in (draft, {"model": draft}, {"method": "draft_model", "model": str(draft)}, ["ngram", draft]):
        llm = LLM(target, speculative, **{**OPTIONS, **options})
        assert llm.describe()["engine"]["model"] == str(target)
        assert llm.describe()["speculative"][-1]["model"] == str(draft)
        assert tokens(llm) == plain


def test_kernels_and_numbers_that_do_not_go_together(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for quantization in ("int4", "file"):
        message = f"quantization='{quantization}' needs the native kernels; with kernels='torch': int8 or none"
        refuse(target, "none", InvalidParameter, message, kernels="torch", quantization=quantization)
    refuse(target, "none", InvalidParameter, "dtype='float16' needs", kernels="torch", dtype="float16")
    refuse(target, "none", InvalidParameter, "dtype='float16' goes with", quantization="int8", dtype="float16")
    monkeypatch.setattr(selection, "why_unavailable", lambda: "no compiler")
    message = "kernels='native' is not possible: no compiler; use kernels='torch'"
    refuse(target, "none", InvalidParameter, message, kernels="native")
    refuse(target, "none", InvalidParameter, "quantization='int4' needs the native kernels", quantization="int4")
    assert LLM(target, "none", **{**OPTIONS, "quantization": "none"}).describe()["engine"]["kernels"] == "torch"


def test_the_model_is_named_by_whoever_built_it_and_by_no_note(target: Path) -> None:
    notes: list[str] = []
    llm = LLM(str(target), "suffix", notify=notes.append, **OPTIONS)
    assert llm.banner().startswith(f"{target.name}, ")
    assert not [note for note in notes if target.name in note]


def test_loading_and_the_check_of_rows_tell_how_far_they_are(target: Path) -> None:
    heard: list[tuple[str, int, int]] = []
    LLM(target, "none", progress=lambda *report: heard.append(report), **OPTIONS)
    assert list(dict.fromkeys(what for what, _, _ in heard)) == ["loading target", "checking that rows are independent"]
    for name in {what for what, _, _ in heard}:
        done, total = [report[1:] for report in heard if report[0] == name][-1]
        assert done == total > 1


@pytest.mark.parametrize(
    ("speculative", "message"),
    [
        ("self:3", "exit_layer=3 is not possible: it must be in 1 to 2"),
        (["ngram", "self:3"], "exit_layer=3 is not possible"),
    ],
)
def test_exits_beyond_the_model(target: Path, speculative: Any, message: str) -> None:
    refuse(target, speculative, InvalidParameter, message)


def test_exit_of_a_single_layer(tmp_path: Path) -> None:
    single = write_model(tmp_path / "single", num_hidden_layers=1)
    refuse(single, "self", InvalidParameter, "the model has only one layer")


def test_adapter_of_another_model(target: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    speculative = {"method": "early_exit", "adapter": adapter}
    refuse(target, speculative, ModelNotFound, "no adapter there")
    adapter.mkdir()
    config = {"model_type": ADAPTER_TYPE, "exit_layer": 1, "hidden_size": 64, "num_hidden_layers": 3}
    (adapter / "config.json").write_text(json.dumps(config))
    refuse(target, speculative, CheckpointError, "made for hidden_size=64, the target has 32")


def write_head(folder: Path, config: Eagle3Config | None = None) -> Path:
    """A head of random weights for such a model, of which two draft tokens in a hundred are right."""
    layer = DecoderConfig.from_hf({**SHAPE, "num_hidden_layers": 1})
    config = config or Eagle3Config(layer, 32, 200, aux_layers=(0, 1, 2), shares_target_head=True)
    generator = torch.Generator().manual_seed(1)
    shapes = eagle3_tensors(config)
    tensors = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}
    ids = torch.randperm(300, generator=generator)[: config.draft_vocab_size].sort().values
    save_eagle3(folder, config, {**tensors, "d2t": offsets_of(ids)})
    return folder


@pytest.mark.parametrize(("kernels", "quantization"), [("native", "none"), ("native", "int8"), ("torch", "int8")])
def test_a_head_from_its_folder(kernels: str, quantization: str, target: Path, tmp_path: Path) -> None:
    head = write_head(tmp_path / "head")
    options = {**OPTIONS, "kernels": kernels, "quantization": quantization, "speculative_control": "fixed"}
    params = [SamplingParams(temperature=t, seed=1, max_tokens=30, ignore_eos=True) for t in (0.0, 1.0)]
    plain = LLM(str(target), "none", **options).generate(["ab", "abc"], params)
    for config in (str(head), {"method": "eagle3", "model": str(head), "tree_width": 3, "num_speculative_tokens": 4}):
        llm = LLM(str(target), config, **options)
        found = llm.generate(["ab", "abc"], params)
        assert [each.outputs[0].token_ids for each in found] == [each.outputs[0].token_ids for each in plain]
        assert all(each.stats.by_drafter["eagle3"].draft_tokens > 50 for each in found)
        (resolved,) = llm._built.speculative
        assert resolved.method == "eagle3" and llm.memory()["drafter"] > 0
        assert f"drafter eagle3 {head}" in llm._built.banner()
    both = LLM(str(target), {"method": "auto", "model": str(head)}, **options)
    assert [item.method for item in both._built.speculative] == ["suffix", "eagle3"]
    rounded = LLM(str(target), {"model": str(head), "quantization": "int8"}, **options)
    found = rounded.generate(["ab", "abc"], params)
    assert [each.outputs[0].token_ids for each in found] == [each.outputs[0].token_ids for each in plain]


def test_what_was_learnt_of_a_drafter_is_not_known_of_one_that_takes_its_place(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: list[str] = []

    def noting(control: str, costs: Any, folder: Path, key: Callable[[], str], *, floor: float) -> Any:
        assert floor == 0.98
        keys.append(key())
        return make_controller("fixed", costs)

    monkeypatch.setattr("outpace.build.make_controller", noting)
    head, draft = write_head(tmp_path / "head"), write_model(tmp_path / "draft", num_hidden_layers=1)
    for trained in (head, draft):
        for again in range(3):
            LLM(str(target), str(trained), **OPTIONS)
            if again == 1:  # another training writes as many bytes
                (weights,) = trained.glob("*.safetensors")
                weights.write_bytes(weights.read_bytes())
                os.utime(weights, ns=(0, 1 + weights.stat().st_mtime_ns))
    assert keys[0] == keys[1] != keys[2] and keys[3] == keys[4] != keys[5]


def test_heads_that_cannot_be(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(target, {"method": "eagle3", "model": str(tmp_path / "nowhere")}, ModelNotFound, "nowhere")
    refuse(target, {"method": "eagle3", "model": str(target)}, UnsupportedModel, "describes no EAGLE-3 head")
    head = write_head(tmp_path / "head")
    other = write_model(tmp_path / "other", num_hidden_layers=2)
    refuse(other, str(head), CheckpointError, r"head/config\.json: the head reads .* from 0 to 1")
    monkeypatch.setattr(memory, "available_bytes", lambda: memory.RESERVE_BYTES + 600_000)
    refuse(target, str(head), OutOfMemory, "target with head needs")


def test_drafts_that_cannot_be(target: Path, tmp_path: Path) -> None:
    refuse(target, str(tmp_path / "nowhere"), ModelNotFound, "nowhere")
    foreign = write_model(tmp_path / "foreign", tokenizer=sentencepiece())
    refuse(target, str(foreign), VocabularyMismatch, "foreign cannot draft for target")
    damaged = write_model(tmp_path / "damaged")
    (damaged / "config.json").write_text(json.dumps({**SHAPE, "rms_norm_eps": "a"}))
    refuse(target, str(damaged), CheckpointError, r"damaged/config\.json says rms_norm_eps='a'")
    (damaged / "config.json").write_text(json.dumps({**SHAPE, "num_hidden_layers": 4}))
    refuse(target, str(damaged), CheckpointError, r"lacks tensor 'model\.layers\.3")


def test_two_models_that_do_not_fit_together(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = write_model(tmp_path / "draft")
    size = (target / "model.safetensors").stat().st_size
    cache = OPTIONS["cache_tokens"] * DecoderConfig.from_hf(SHAPE).cache_bytes_per_token
    monkeypatch.setattr(memory, "available_bytes", lambda: memory.RESERVE_BYTES + 2 * size + cache)
    refuse(target, str(draft), OutOfMemory, "target with draft needs")


def test_sampling_defaults_and_front(target: Path) -> None:
    refuse(target, "none", InvalidParameter, "front='x' is not possible: cli or api", front="x")
    (target / "generation_config.json").write_text('{"temperature": -3}')
    refuse(target, "none", CheckpointError, r"generation_config\.json: temperature=-3")


@pytest.mark.parametrize(("noise", "copies"), [(0.0, True), (0.1, True), (None, False)])
def test_a_head_that_repeats_the_embedding_counts_once(target: Path, noise: float | None, copies: bool) -> None:
    """GGUF files hold the head of tied models again, quantised on its own."""
    config = DecoderConfig.from_hf(SHAPE)
    tensors = {name: torch.randn(shape) for name, shape in expected_tensors(config).items()}
    if noise is not None:
        embedding = tensors["model.embed_tokens.weight"]
        tensors["lm_head.weight"] = embedding + noise * torch.randn(embedding.shape)
    save_file(tensors, str(target / "model.safetensors"))
    stored = sum(tensor.numel() for tensor in tensors.values())
    assert LLM(target, "none", **OPTIONS)._built.parameters == stored - (300 * 32 if copies else 0)


def test_past_outputs_are_kept_in_a_file(target: Path, tmp_path: Path) -> None:
    """What an engine said drafts for the next one, of the same tokenizer; a file of another one is refused."""
    pool = tmp_path / "pool"
    config = {"method": "suffix", "suffix_decoding_max_cached_requests": 16, "suffix_pool_file": str(pool)}
    params = SamplingParams(temperature=0.9, seed=4, max_tokens=40, ignore_eos=True)
    options = {**OPTIONS, "speculative_control": "fixed"}
    first = LLM(str(target), config, **options)
    assert first.memory()["drafter"] == 0
    said = first.generate("abc", params)[0].outputs[0].token_ids
    first._built.close()
    second = LLM(str(target), config, **options)
    assert second.memory()["drafter"] > 0
    (again,) = second.generate("abd", params)  # another prompt, whose answer need not be the same
    assert (
        again.outputs[0].token_ids
        == LLM(str(target), "none", **OPTIONS).generate("abd", params)[0].outputs[0].token_ids
    )
    (same,) = second.generate("abc", params)
    assert same.outputs[0].token_ids == said
    assert same.stats.accepted_tokens > 20  # nothing in the prompt could have told
    other = write_model(tmp_path / "other", tokenizer=sentencepiece())
    refuse(other, config, VocabularyMismatch, "pool", **options)
    pool.write_bytes(pool.read_bytes()[:-7])
    refuse(target, config, CheckpointError, "pool", **options)
    refuse(
        target, {**config, "suffix_pool_file": str(tmp_path / "no" / "pool")}, InvalidParameter, "no folder", **options
    )
    refuse(target, {"method": "suffix", "suffix_pool_file": str(pool)}, InvalidParameter, "suffix_decoding_max_cached")
