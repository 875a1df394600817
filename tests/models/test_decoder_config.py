"""Reading config.json: every spelling of it, and refusals by name."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import transformers

from outpace.errors import CheckpointError, UnsupportedModel
from outpace.models.config import DecoderConfig, RopeConfig, expected_tensors, is_redundant
from outpace.models.mtp_config import mtp_tensors
from outpace.models.rope import RopeTable, interleaved, inverse_frequencies
from tests.models.tiny_models import VARIANTS, reference_model, tiny_weights

BASE = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 2048,
}


def read(**changes):
    return DecoderConfig.from_hf({**BASE, **changes})


class TestSizes:
    def test_defaults_and_derived(self):
        config = read()
        assert (config.num_kv_heads, config.head_dim) == (4, 16)
        assert (config.rms_norm_eps, config.tie_word_embeddings) == (1e-6, False)
        assert config.windows == (None, None, None)

    def test_explicit(self):
        config = read(num_key_value_heads=2, head_dim=32, rms_norm_eps=1e-5, tie_word_embeddings=True)
        assert (config.num_kv_heads, config.head_dim) == (2, 32)
        assert (config.rms_norm_eps, config.tie_word_embeddings) == (1e-5, True)

    @pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings"])
    def test_a_missing_size_is_named(self, key):
        with pytest.raises(CheckpointError, match=key):
            DecoderConfig.from_hf({name: value for name, value in BASE.items() if name != key})

    @pytest.mark.parametrize("value", [0, -4, 1.5, "64", True])
    def test_a_size_that_is_none(self, value):
        with pytest.raises(CheckpointError, match="hidden_size="):
            read(hidden_size=value)

    def test_heads_that_do_not_divide(self):
        with pytest.raises(CheckpointError, match=r"num_attention_heads=4, num_key_value_heads=3"):
            read(num_key_value_heads=3)

    def test_odd_head_dim(self):
        with pytest.raises(CheckpointError, match="head_dim=15"):
            read(head_dim=15)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0}


class TestDamage:
    @pytest.mark.parametrize(
        ("changes", "key"),
        [
            ({"rms_norm_eps": "a"}, "rms_norm_eps='a'"),
            ({"rms_norm_eps": None}, "rms_norm_eps=None"),
            ({"rms_norm_eps": -1e-6}, "rms_norm_eps=-1e-06"),
            ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
            ({"rms_norm_eps": float("inf")}, "rms_norm_eps=inf"),
            ({"rms_norm_eps": 10**400}, "rms_norm_eps=1000"),
            ({"rms_norm_eps": True}, "rms_norm_eps=True"),
            ({"rope_scaling": "x"}, "rope_scaling or rope_parameters='x'"),
            ({"rope_parameters": [1]}, r"rope_scaling or rope_parameters=\[1\]"),
            ({"rope_scaling": {"type": "linear", "factor": "two"}}, "factor='two'"),
            ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor=0"),
            ({"rope_scaling": {"type": "yarn", "mscale": "x"}}, "mscale='x'"),
            ({"rope_scaling": {"type": "yarn", "truncate": "no"}}, "truncate='no'"),
            ({"rope_scaling": {"type": "yarn", "attention_factor": []}}, r"attention_factor=\[\]"),
            ({"rope_scaling": {**LLAMA3, "original_max_position_embeddings": "8k"}}, "original_max_position_.*='8k'"),
            ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4}}, r"low_freq_factor=4\.0, high_freq_factor=4\.0"),
            ({"rope_theta": -1}, "rope_theta=-1"),
            ({"rope_theta": "1e4"}, "rope_theta='1e4'"),
            ({"model_type": "mistral", "sliding_window": "a"}, "sliding_window='a'"),
            ({"model_type": "mistral", "sliding_window": 0}, "sliding_window=0"),
            ({"model_type": "qwen2", "use_sliding_window": "yes"}, "use_sliding_window='yes'"),
            ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 1.5}, r"sliding_window=1\.5"),
            ({"model_type": "qwen2", "max_window_layers": "all"}, "max_window_layers='all'"),
            ({"model_type": "qwen2", "layer_types": 3}, "layer_types=3"),
            ({"model_type": "qwen2", "layer_types": [["full_attention"]] * 3}, "layer_types="),
            ({"architectures": 5}, "architectures=5"),
            ({"architectures": "LlamaForCausalLM"}, "architectures='LlamaForCausalLM'"),
            ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false'"),
            ({"attention_bias": 1}, "attention_bias=1"),
            ({"mlp_bias": "no"}, "mlp_bias='no'"),
        ],
    )
    def test_a_value_that_cannot_be_names_file_and_key(self, changes, key):
        with pytest.raises(CheckpointError, match=f"^/models/m/config.json says {key}"):
            DecoderConfig.from_hf({**BASE, **changes}, "/models/m/config.json")


class TestRope:
    @pytest.mark.parametrize(
        "spelling",
        [
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
            {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}},
        ],
    )
    def test_old_and_new_spelling(self, spelling):
        rope = read(**spelling).rope
        assert rope == RopeConfig(theta=5e5, type="linear", factor=4.0, original_max_positions=2048)

    def test_the_old_spelling_wins_as_in_transformers(self):
        both = {
            "rope_theta": 7e3,
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            "rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
        }
        assert read(**both).rope == RopeConfig(theta=7e3, type="linear", factor=2.0, original_max_positions=2048)
        theirs = transformers.LlamaConfig(**both).rope_parameters
        assert (theirs["factor"], theirs["rope_theta"]) == (2.0, 7e3)

    def test_default(self):
        assert read().rope == RopeConfig(theta=1e4, original_max_positions=2048)
        assert read(rope_scaling=None, rope_theta=1e6).rope.theta == 1e6

    @pytest.mark.parametrize("kind", ["dynamic", "longrope", "su"])
    def test_other_types_are_refused_by_name(self, kind):
        with pytest.raises(UnsupportedModel, match=rf"rope type '{kind}'.*default, linear, llama3, yarn"):
            read(rope_scaling={"rope_type": kind, "factor": 2.0})

    def test_partial_rotation_is_refused(self):
        with pytest.raises(UnsupportedModel, match=r"partial_rotary_factor=0.5"):
            read(partial_rotary_factor=0.5)

    def test_scaling_without_a_factor(self):
        with pytest.raises(CheckpointError, match=r"'llama3' without a 'factor'"):
            read(rope_scaling={"rope_type": "llama3"})

    @pytest.mark.parametrize(
        "parameters",
        [
            {"rope_type": "linear", "factor": 3.0},
            {
                "rope_type": "llama3",
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 256,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "truncate": False},
            {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 256,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "mscale": 0.7,
                "mscale_all_dim": 1.2,
            },
            {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 256,
                "attention_factor": 1.25,
            },
        ],
        ids=lambda parameters: "-".join(map(str, parameters.values())),
    )
    def test_frequencies_are_those_of_transformers(self, parameters):
        settings = {**BASE, "rope_parameters": {"rope_theta": 1e4, **parameters}}
        config = transformers.LlamaConfig(**{k: v for k, v in settings.items() if k != "model_type"})
        wanted, factor = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config)
        found, scale = inverse_frequencies(DecoderConfig.from_hf(settings).rope, 16)
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
        assert scale == pytest.approx(factor, rel=1e-12)

    def test_table_does_not_depend_on_how_it_grew(self):
        rope = read().rope
        at_once, by_steps = RopeTable(rope, 16), RopeTable(rope, 16)
        positions = torch.tensor([0, 255, 256, 257, 700, 1999])
        for position in positions:
            by_steps.at(position[None])
        assert torch.equal(at_once.at(positions), by_steps.at(positions))
        angle = 1999 * 1e4 ** (-2 / 16)
        torch.testing.assert_close(
            at_once.at(torch.tensor([1999]))[0, 0, 1].item(),
            complex(
                torch.polar(torch.tensor(1.0, dtype=torch.float64), torch.tensor(angle, dtype=torch.float64)).item()
            ),
            rtol=0,
            atol=2e-4,
        )

    def test_interleaving_puts_partners_side_by_side(self):
        assert interleaved(torch.arange(12), 6).tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


class TestArchitectures:
    def test_biases_and_norms(self):
        assert not read().qkv_bias and not read(model_type="mistral", attention_bias=True).qkv_bias
        llama = read(attention_bias=True, mlp_bias=True)
        assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias, llama.qk_norm) == (True, True, True, False)
        qwen2 = read(model_type="qwen2")
        assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.mlp_bias, qwen2.qk_norm) == (True, False, False, False)
        qwen3 = read(model_type="qwen3")
        assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.mlp_bias, qwen3.qk_norm) == (False, False, False, True)

    def test_mimo_is_qwen2_with_a_layer_behind(self):
        """As its files say: no attention_bias is read, and few keys differ."""
        mimo = read(model_type="mimo", num_nextn_predict_layers=1, attention_bias=False)
        assert dataclasses.replace(mimo, model_type="qwen2", mtp_layers=0) == read(model_type="qwen2")
        assert mimo.mtp_layers == 1 and expected_tensors(mimo) == expected_tensors(read(model_type="qwen2"))
        assert read(model_type="mimo").mtp_layers == read(num_nextn_predict_layers=3).mtp_layers == 0
        assert len(mtp_tensors(mimo)) == 16 and mtp_tensors(read(model_type="mimo")) == {}
        assert mtp_tensors(mimo)["model.mtp_layers.0.input_proj.weight"] == (mimo.hidden_size, 2 * mimo.hidden_size)
        for wrong in (-1, 1.0, "1", True):
            with pytest.raises(CheckpointError, match="num_nextn_predict_layers="):
                read(model_type="mimo", num_nextn_predict_layers=wrong)

    def test_windows(self):
        assert read(sliding_window=64).windows == (None,) * 3  # Llama has none
        assert read(model_type="mistral", sliding_window=64).windows == (64,) * 3
        assert read(model_type="mistral", sliding_window=None).windows == (None,) * 3
        qwen = {"model_type": "qwen2", "sliding_window": 64, "max_window_layers": 2}
        assert read(**qwen).windows == (None,) * 3
        assert read(**qwen, use_sliding_window=True).windows == (None, None, 64)
        types = ["sliding_attention", "full_attention", "sliding_attention"]
        assert read(**qwen, use_sliding_window=True, layer_types=types).windows == (64, None, 64)
        with pytest.raises(UnsupportedModel, match="chunked_attention"):
            read(**qwen, layer_types=["chunked_attention"] * 3)
        with pytest.raises(CheckpointError, match="2 layer_types"):
            read(**qwen, layer_types=["full_attention"] * 2)

    def test_others_are_refused_by_name(self):
        with pytest.raises(UnsupportedModel, match=r"'gpt2' .*GPT2LMHeadModel.*llama, mistral, qwen2, qwen3"):
            read(model_type="gpt2", architectures=["GPT2LMHeadModel"])
        with pytest.raises(UnsupportedModel, match="'none'"):
            DecoderConfig.from_hf({})
        with pytest.raises(UnsupportedModel, match="hidden_act='gelu'"):
            read(hidden_act="gelu")
        with pytest.raises(UnsupportedModel, match="'gptq'"):
            read(quantization_config={"quant_method": "gptq"})

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_expected_tensors_are_those_of_transformers(self, variant):
        model = reference_model(variant)
        config = DecoderConfig.from_hf(model.config.to_dict())
        assert expected_tensors(config) == tiny_weights(model).shapes

    def test_redundant_tensors(self):
        tied, untied = read(tie_word_embeddings=True), read()
        assert is_redundant(tied, "lm_head.weight") and not is_redundant(untied, "lm_head.weight")
        assert is_redundant(untied, "model.layers.0.self_attn.rotary_emb.inv_freq")
        assert not is_redundant(untied, "model.layers.0.self_attn.q_proj.weight")
