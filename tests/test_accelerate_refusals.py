"""`accelerate` and its `generate` refuse by name what they cannot honour, and go on working afterwards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from transformers import GenerationConfig

import outpace
from outpace import InvalidParameter, InvalidPrompt, OutpaceError, UnsupportedModel, VocabularyMismatch
from tests.accelerating import VOCAB, accelerated, noisy_model, padded_batch, tiny_model, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:Using the model-agnostic default `max_length`")

REFUSED: dict[str, Any] = {
    "num_beams": 4,
    "penalty_alpha": 0.6,
    "dola_layers": "high",
    "guidance_scale": 1.5,
    "diversity_penalty": 0.5,
    "num_beam_groups": 2,
    "constraints": [object()],
    "force_words_ids": [[3]],
    "token_healing": True,
    "use_mtp": True,
    "assistant_early_exit": 1,
    "assistant_ensemble_weight": 0.5,
    "is_assistant": True,
    "output_attentions": True,
    "output_hidden_states": True,
    "use_cache": False,
    "cache_implementation": "static",
    "cache_config": {"backend": "quanto"},
    "prefill_chunk_size": 16,
    "max_matching_ngram_size": 3,
    "num_assistant_tokens": 4,
    "assistant_confidence_threshold": 0.1,
    "watermarking_config": transformers.SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=3),
    "synced_gpus": True,
    "assistant_model": "a model",
    "assistant_tokenizer": "a tokenizer",
    "negative_prompt_ids": torch.tensor([[5]]),
    "negative_prompt_attention_mask": torch.tensor([[1]]),
    "custom_generate": "somebody/else",
    "past_key_values": (),
    "cache": (),
    "inputs_embeds": torch.zeros(1, 2, 32),
    "position_ids": torch.tensor([[0, 1]]),
    "token_type_ids": torch.tensor([[0, 0]]),
    "max_new_token": 4,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidParameter, match=rf"\b{name}\b"):
        accelerated().generate(torch.tensor([[5, 6]]), **{name: REFUSED[name]})


def test_every_setting_of_a_generation_config_is_honoured_or_known() -> None:
    """A setting that a later transformers adds has to be looked at before it is let pass."""
    from outpace.accelerated import refusals

    honoured = {
        *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time", "stop_strings", "do_sample"),
        *("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"),
        *("repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
        *("bad_words_ids", "renormalize_logits", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values"),
        *("exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens", "sequence_bias"),
        *("watermarking_config", "num_return_sequences", "output_scores", "output_logits", "return_dict_in_generate"),
        *("pad_token_id", "bos_token_id", "eos_token_id", "prompt_lookup_num_tokens"),
    }
    without_effect = {"early_stopping", "length_penalty", "disable_compile", "decoder_start_token_id"}
    about_the_file = {"transformers_version"}
    known = honoured | without_effect | about_the_file | set(refusals._CHANGES_TEXT) | set(refusals._CHANGES_TIME)
    assert {name for name in vars(GenerationConfig()) if not name.startswith("_")} <= known


def test_neutral_values_pass() -> None:
    neutral = {
        "num_beams": 1,
        "guidance_scale": 1.0,
        "use_cache": True,
        "synced_gpus": False,
        "past_key_values": None,
        "position_ids": None,
        "penalty_alpha": 0.0,
        "output_attentions": False,
        "num_assistant_tokens": 20,
        "trust_remote_code": None,
    }
    prompts = padded_batch()
    expected = tiny_model().generate(**prompts, max_new_tokens=5)
    assert torch.equal(accelerated().generate(**prompts, max_new_tokens=5, **neutral), expected)


def test_the_models_own_ways_of_computing_pass() -> None:
    model = copy.deepcopy(tiny_model())
    model.generation_config.cache_implementation = "static"
    model.generation_config.use_cache = False
    fast = outpace.accelerate(model)
    prompts = padded_batch()
    expected = tiny_model().generate(**prompts, max_new_tokens=5)
    assert torch.equal(fast.generate(**prompts, max_new_tokens=5), expected)
    with pytest.raises(InvalidParameter, match="cache_implementation"):
        fast.generate(**prompts, max_new_tokens=5, cache_implementation="offloaded")
    model.generation_config.num_beams = 3
    with pytest.raises(InvalidParameter, match="num_beams=3"):
        fast.generate(**prompts, max_new_tokens=5)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"temperature": -1.0, "do_sample": True}, "temperature"),
        ({"temperature": 0.0, "do_sample": True}, "temperature"),
        ({"top_p": 1.5, "do_sample": True}, "top_p"),
        ({"top_k": -3, "do_sample": True}, "top_k"),
        ({"repetition_penalty": -2.0}, "penalty"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_length": 2}, "max_length"),
        ({"num_return_sequences": 2}, "num_return_sequences"),
        ({"bad_words_ids": [[-4]]}, "bad_words_ids"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"seed": True}, "seed=True"),
        ({"max_new_tokens": 255}, "at most 254"),
        ({"generation_config": GenerationConfig(nonsense=1)}, "nonsense"),
        ({"input_ids": torch.tensor([[7]])}, "input_ids"),
        ({"attention_mask": torch.ones(1, 3)}, "attention_mask"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_impossible_values(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidParameter, match=named):
        accelerated().generate(torch.tensor([[5, 6]]), **arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"inputs": [[5, 6]]}, "list"),
        ({"inputs": torch.tensor([5, 6])}, r"shape \[2\]"),
        ({"inputs": torch.tensor([[5.0, 6.0]])}, "float32"),
        ({"inputs": torch.zeros(1, 0, dtype=torch.int64)}, "empty"),
        ({"inputs": torch.tensor([[5, VOCAB]])}, str(VOCAB)),
        ({"inputs": torch.tensor([[5, 6, 7]]), "attention_mask": torch.tensor([[1, 1, 0]])}, "left"),
        ({"inputs": torch.tensor([[5, 6, 7]]), "attention_mask": torch.tensor([[1, 0, 1]])}, "left"),
        ({"inputs": torch.tensor([[5, 6, 7]]), "attention_mask": torch.tensor([[0, 0, 0]])}, "left"),
    ],
)
def test_prompts_that_cannot_be_continued(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidPrompt, match=said):
        accelerated().generate(max_new_tokens=3, **arguments)


def test_a_refused_call_draws_nothing_from_torch() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with pytest.raises(InvalidParameter):
        accelerated().generate(torch.tensor([[5, 6]]), do_sample=True, top_p=-1.0)
    accelerated().generate(torch.tensor([[5, 6]]), max_new_tokens=3)
    assert torch.equal(torch.get_rng_state(), before)


def test_only_one_sequence_is_streamed() -> None:
    streamer = transformers.TextStreamer(tokenizer())
    with pytest.raises(InvalidParameter, match="streamer"):
        accelerated().generate(**padded_batch(), max_new_tokens=3, streamer=streamer)


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(InvalidParameter, match="tokenizer"):
        outpace.accelerate(tiny_model()).generate(torch.tensor([[5, 6]]), max_new_tokens=3, stop_strings="a")


def test_prompt_lookup_has_to_be_loaded() -> None:
    with pytest.raises(InvalidParameter, match="prompt_lookup_num_tokens=3"):
        accelerated("llama", "none").generate(torch.tensor([[5, 6]]), max_new_tokens=3, prompt_lookup_num_tokens=3)


def test_a_processor_that_fails_is_the_cause_and_costs_nobody_else() -> None:
    fast = accelerated()

    def failing(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] == 15:
            raise KeyError("no such word")
        return scores

    with pytest.raises(OutpaceError, match="no such word") as caught:
        fast.generate(**padded_batch(), max_new_tokens=20, logits_processor=[failing])
    assert isinstance(caught.value.__cause__, KeyError)
    prompts = padded_batch()
    expected = tiny_model().generate(**prompts, max_new_tokens=20)
    assert torch.equal(fast.generate(**prompts, max_new_tokens=20), expected)
    fast._parts.engine.check_integrity()
    assert not fast._parts.engine.has_work


def test_generate_inside_generate() -> None:
    fast = accelerated()

    class Caller:
        def put(self, value: torch.Tensor) -> None:
            fast.generate(value.reshape(1, -1), max_new_tokens=2)

        def end(self) -> None:
            return None

    with pytest.raises(OutpaceError, match="inside"):
        fast.generate(torch.tensor([[5, 6]]), max_new_tokens=3, streamer=Caller())
    assert fast.generate(torch.tensor([[5, 6]]), max_new_tokens=3).shape == (1, 5)


def test_models_that_cannot_be_accelerated() -> None:
    with pytest.raises(UnsupportedModel, match="Linear"):
        outpace.accelerate(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    config = tiny_model().config
    with torch.device("meta"):
        nowhere = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedModel, match="meta"):
        outpace.accelerate(nowhere)

    class Own(transformers.LlamaForCausalLM):  # type: ignore[misc]
        def generate(self, *args: Any, **kwargs: Any) -> None:
            return None

    with pytest.raises(UnsupportedModel, match="generate of its own"):
        outpace.accelerate(Own(tiny_model().config))
    mamba = transformers.AutoConfig.for_model("mamba", hidden_size=16, num_hidden_layers=1, vocab_size=VOCAB)
    with pytest.raises(UnsupportedModel, match="mamba"):
        outpace.accelerate(transformers.AutoModelForCausalLM.from_config(mamba).eval())


def test_training_mode_is_refused_while_it_lasts() -> None:
    model = copy.deepcopy(tiny_model())
    fast = outpace.accelerate(model)
    model.train()
    with pytest.raises(UnsupportedModel, match="training mode"):
        fast.generate(torch.tensor([[5, 6]]), max_new_tokens=3)
    model.eval()
    assert fast.generate(torch.tensor([[5, 6]]), max_new_tokens=3).shape == (1, 5)


def test_settings_of_accelerate() -> None:
    model = tiny_model()
    with pytest.raises(InvalidParameter, match="'quantization'"):
        outpace.accelerate(model, quantization="int8")
    with pytest.raises(InvalidParameter, match="early_exit"):
        outpace.accelerate(model, speculative_config="self:1")
    with pytest.raises(InvalidParameter, match="suffix_pool_file='pool'"):
        pool = {"method": "auto", "suffix_decoding_max_cached_requests": 9, "suffix_pool_file": "pool"}
        outpace.accelerate(model, speculative_config=pool)
    with pytest.raises(InvalidParameter, match="contradict"):
        outpace.accelerate(model, speculative_config="ngram", assistant_model=noisy_model())
    with pytest.raises(InvalidParameter, match="max_model_len=9999"):
        outpace.accelerate(model, max_model_len=9999)
    other = transformers.AutoConfig.for_model("gpt2", n_embd=16, n_head=2, n_layer=1, vocab_size=VOCAB - 1)
    draft = transformers.AutoModelForCausalLM.from_config(other).eval()
    with pytest.raises(VocabularyMismatch, match=str(VOCAB - 1)):
        outpace.accelerate(model, assistant_model=draft)
