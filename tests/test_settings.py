"""Settings of an engine: what is possible is taken in any spelling, the rest refused with the value and the range."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outpace.config import EngineConfig, SpeculativeConfig
from outpace.errors import InvalidParameter
from outpace.params import SamplingDefaults, SamplingParams, SpeculationParams


def test_defaults_fill_only_what_is_missing() -> None:
    defaults = SamplingDefaults(temperature=0.7, top_p=0.8, top_k=20, max_tokens=512)
    resolved = SamplingParams(temperature=0.0, top_k=0).resolved(defaults)
    assert (resolved.temperature, resolved.top_p, resolved.top_k, resolved.max_tokens) == (0.0, 0.8, 0, 512)


@pytest.mark.parametrize("value", [-1, 65, 1.5, "5", True])
def test_draft_lengths_have_a_limit(value: Any) -> None:
    with pytest.raises(InvalidParameter, match="0 \\(off\\) to 64"):
        SpeculationParams(num_speculative_tokens=value)
    with pytest.raises(InvalidParameter, match="0 \\(off\\) to 64"):
        SpeculativeConfig(num_speculative_tokens=value)


@pytest.mark.parametrize(
    ("written", "method", "model", "exit_layer"),
    [
        ("auto", "auto", None, None),
        ("suffix", "suffix", None, None),
        ({"prompt_lookup_max": 4}, "ngram", None, None),
        ({"method": "auto", "model": "some/draft"}, "auto", "some/draft", None),
        ("ngram", "ngram", None, None),
        ("[ngram]", "ngram", None, None),
        ("none", "none", None, None),
        (None, "none", None, None),
        ("self", "early_exit", None, None),
        ("self:20", "early_exit", None, 20),
        ("Qwen/Qwen2.5-0.5B", "draft_model", "Qwen/Qwen2.5-0.5B", None),
        ({"method": "ngram", "model": "[ngram]", "prompt-lookup-max": 4}, "ngram", None, None),
        ({"model": "some/draft", "num_speculative_tokens": 3}, "draft_model", "some/draft", None),
        ({"model": "self:9"}, "early_exit", None, 9),
        ({"method": "draft_model", "model": "ngram"}, "draft_model", "ngram", None),
        ("someone/EAGLE3-Llama-3.1-8B", "eagle3", "someone/EAGLE3-Llama-3.1-8B", None),
        ({"model": "a-eagle3-head", "num_speculative_tokens": 3}, "eagle3", "a-eagle3-head", None),
        ({"method": "eagle3", "model": "some/head"}, "eagle3", "some/head", None),
        ("mtp", "mtp", None, None),
        ({"method": "mtp"}, "mtp", None, None),
        ({"method": "mtp", "model": "some/checkpoint", "quantization": "int8"}, "mtp", "some/checkpoint", None),
    ],
)
def test_what_users_write(written: Any, method: str, model: str | None, exit_layer: int | None) -> None:
    config = SpeculativeConfig.parse(written)
    assert (config.method, config.model, config.exit_layer) == (method, model, exit_layer)
    assert SpeculativeConfig.parse(config) is config


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("self:x", "self:20"),
        ("self:²", "self:20"),
        ("self:0", "exit_layer=0"),
        (5, "5"),
        (True, "True"),
        ({"methode": "ngram"}, "methode"),
        ({"method": "magic"}, "magic"),
        ({"method": "draft_model"}, "needs a model"),
        ({"method": "draft_model", "model": "x/EAGLE3-y"}, "is an EAGLE-3 head: it goes with method 'eagle3'"),
        ({"method": "eagle3", "model": "some/head", "exit_layer": 3}, "goes with method 'early_exit'"),
        ({"method": "ngram", "model": "some/draft"}, "goes with method 'draft_model'"),
        ({"method": "ngram", "exit_layer": 3}, "goes with method 'early_exit'"),
        ({"method": "draft_model", "model": "m", "adapter": "a"}, "goes with method 'early_exit'"),
        ({"model": "self:20", "exit_layer": 10}, "contradict"),
        ({"method": "early_exit", "exit_layer": 2.5}, "exit_layer=2.5"),
        ({"method": "early_exit", "exit_layer": "3"}, "exit_layer='3'"),
        ({"method": "ngram", "prompt_lookup_min": "a"}, "prompt_lookup_min"),
        ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 4}, "prompt_lookup_min=5"),
        ({"method": "ngram", "prompt_lookup_max": 33}, "prompt_lookup_max=33"),
        ({"method": "suffix", "tree_width": 9}, "tree_width=9.*1 to 8"),
        ({"method": "suffix", "tree_width": 0}, "tree_width=0"),
        ({"method": "ngram", "tree_width": 2}, "tree_width=2 goes with method auto or suffix or draft_model"),
        ({"model": "m", "tree_width": 2, "rejection_sample_method": "block"}, "chains"),
    ],
)
def test_impossible_drafters_are_named(written: Any, message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        SpeculativeConfig.parse(written)


def test_a_folder_with_a_head_says_the_method(tmp_path: Path) -> None:
    """Of a folder it is the config that counts, not the name."""
    for name, config, method in (
        ("llama-head", {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 100}, "eagle3"),
        ("speculator", {"speculators_model_type": "eagle3"}, "eagle3"),
        ("other", {"speculators_model_type": "dflash", "draft_vocab_size": 100}, "draft_model"),
        ("eagle3-tuned-llama", {"architectures": ["LlamaForCausalLM"]}, "draft_model"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        assert SpeculativeConfig.parse(str(tmp_path / name)).method == method
        both = SpeculativeConfig.parse({"method": "auto", "model": str(tmp_path / name)}).parts(adaptive=True)
        assert [part.method for part in both] == ["suffix", method]
    (tmp_path / "speculator/config.json").write_text("[1")
    assert SpeculativeConfig.parse(str(tmp_path / "speculator")).method == "draft_model"


def test_branches_are_for_the_drafters_that_make_them() -> None:
    widths = {
        part.method: part.tree_width
        for model in ("some/draft", "self:9", "some/eagle3")
        for part in SpeculativeConfig.parse({"method": "auto", "model": model, "tree_width": 3}).parts(adaptive=True)
    }
    assert widths == {"suffix": 3, "draft_model": 3, "early_exit": 3, "eagle3": 3}


@pytest.mark.parametrize("adaptive", [True, False])
def test_a_head_that_comes_with_the_target_drafts_where_nobody_named_another(adaptive: bool) -> None:
    pool = {"suffix_decoding_max_cached_requests": 100, "suffix_pool_file": "pool"}
    for written, found in (
        ("auto", ["suffix", "mtp"]),
        ({"method": "auto", "tree_width": 2, **pool}, ["suffix", "mtp"]),
        ({"method": "auto", "model": "some/draft", **pool}, ["suffix", "draft_model"]),
        ({"method": "auto", "model": "self:3", **pool}, ["suffix", "early_exit"]),
        ({"method": "auto", "model": "ngram"}, ["suffix"]),
        ("suffix", ["suffix"]),
        ("none", []),
    ):
        config = SpeculativeConfig.parse(written)
        assert [part.method for part in config.parts(adaptive=adaptive, own="mtp")] == found
        without = [part.method for part in config.parts(adaptive=adaptive)]
        assert without == [method for method in found if method != "mtp"]


@pytest.mark.parametrize("control", ["adaptive", "fixed"])
def test_a_width_that_nobody_chose_is_chosen_step_by_step_or_none(control: str) -> None:
    config = SpeculativeConfig.parse({"method": "auto", "model": "some/draft"})
    assert config.tree_width is None
    for part in config.parts(adaptive=control == "adaptive"):
        assert part.width_on(takes_trees=True) == (3 if control == "adaptive" else 1)
        assert part.width_on(takes_trees=False) == 1
    chains = SpeculativeConfig.parse({"model": "some/draft", "rejection_sample_method": "standard"})
    assert [part.width_on(takes_trees=True) for part in chains.parts(adaptive=True)] == [1]
    (lookup,) = SpeculativeConfig.parse("ngram").parts(adaptive=True)
    assert lookup.width_on(takes_trees=True) == 1


def test_the_shortest_ngram_follows_the_longest() -> None:
    assert SpeculativeConfig(prompt_lookup_max=1).prompt_lookup_min == 1
    assert SpeculativeConfig().prompt_lookup_min == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", ""),
        ("model", 123),
        ("quantization", "int3"),
        ("max_num_seqs", "8"),
        ("max_num_seqs", 2.5),
        ("max_model_len", 0),
        ("cache_tokens", float("nan")),
        ("threads", -1),
        ("threads", 100_000),
        ("allow_pickle", "yes"),
    ],
)
def test_impossible_settings_are_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidParameter, match=name):
        EngineConfig(**{name: value})
