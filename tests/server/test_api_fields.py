"""Every field of OpenAI's and vLLM's requests is honoured, ignored or refused, and docs/serving.md says which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outpace.server.errors import ApiError
from outpace.server.fields_page import tables, with_tables
from outpace.server.reading import read_request
from outpace.server.requests import ChatRequest, CompletionRequest, GenerationRequest, sampling_names

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
BOTH = {
    "model", "frequency_penalty", "logit_bias", "logprobs", "max_tokens", "n", "presence_penalty", "response_format",
    "seed", "stop", "stream", "stream_options", "temperature", "top_p", "thinking_token_budget", "user",
    "use_beam_search", "top_k", "min_p", "repetition_penalty", "watermarking", "length_penalty", "stop_token_ids",
    "include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens", "spaces_between_special_tokens",
    "truncate_prompt_tokens", "truncation_side", "prompt_logprobs", "logprob_token_ids", "allowed_token_ids",
    "bad_words", "echo", "add_special_tokens", "structured_outputs", "priority", "request_id", "session_id",
    "return_tokens_as_token_ids", "return_token_ids", "routed_experts_prompt_start", "return_token_offsets",
    "return_mm_kwargs", "cache_salt", "kv_transfer_params", "ec_transfer_params", "vllm_xargs", "repetition_detection",
    "stream_interval", "best_of", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "guided_decoding_backend", "guided_whitespace_pattern", "logits_processors",
}  # fmt: skip
CHAT_ALONE = {
    "messages", "top_logprobs", "max_completion_tokens", "tools", "tool_choice", "reasoning_effort",
    "include_reasoning", "parallel_tool_calls", "add_generation_prompt", "continue_final_message", "documents",
    "chat_template", "chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs", "return_prompt_text",
    "audio", "function_call", "functions", "metadata", "modalities", "moderation", "prediction", "prompt_cache_key",
    "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "service_tier", "store", "verbosity",
    "web_search_options",
}  # fmt: skip
KNOWN = {ChatRequest: BOTH | CHAT_ALONE, CompletionRequest: BOTH | {"prompt", "suffix", "prompt_embeds"}}
"""Fields of OpenAI's and vLLM's requests, old and new."""
NEEDED: dict[type[GenerationRequest], dict[str, Any]] = {
    ChatRequest: {"messages": [{"role": "user", "content": "a"}]},
    CompletionRequest: {"prompt": "a"},
}
BODIES = [ChatRequest, CompletionRequest]


@pytest.mark.parametrize("body", BODIES)
def test_every_field_is_classified_once(body: type[GenerationRequest]) -> None:
    classes = [list(body.model_fields), sampling_names(body), list(body._ignored), list(body._refused)]
    names = [name for names in classes for name in names]
    assert len(names) == len(set(names))
    assert not KNOWN[body] - set(names)


@pytest.mark.parametrize("body", BODIES)
def test_ignored_and_neutral_values_make_the_same_request(body: type[GenerationRequest]) -> None:
    plain = read_request(body, NEEDED[body])
    for name in body._ignored:
        for value in ({"a": 1}, "x", 5, True, None):
            assert read_request(body, {**NEEDED[body], name: value}).sampling(1) == plain.sampling(1)
    for name, refusal in body._refused.items():
        for value in (*refusal.neutral, None):
            changed = read_request(body, {**NEEDED[body], name: value})
            assert (changed, changed.sampling(1)) == (plain, plain.sampling(1))


@pytest.mark.parametrize("body", BODIES)
def test_refused_fields_are_named_with_a_way_out(body: type[GenerationRequest]) -> None:
    for name, refusal in body._refused.items():
        with pytest.raises(ApiError) as caught:
            read_request(body, {**NEEDED[body], name: {"some": "thing"}})
        assert (caught.value.status, caught.value.param) == (400, name)
        assert refusal.reason in caught.value.message


def test_sampling_parameters_reach_the_engine() -> None:
    given: dict[str, Any] = {
        "n": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3, "presence_penalty": 1.0,
        "frequency_penalty": -1.0, "repetition_penalty": 1.5, "logit_bias": {5: 1.0}, "allowed_token_ids": (1, 2),
        "bad_words": ("x",), "min_tokens": 2, "max_tokens": 9, "stop": ("y",), "stop_token_ids": (7,),
        "include_stop_str_in_output": True, "ignore_eos": True, "prompt_logprobs": 3,
        "logprobs_mode": "processed_logprobs", "skip_special_tokens": False, "spaces_between_special_tokens": False,
        "truncate_prompt_tokens": 4,
    }  # fmt: skip
    assert (
        set(given) | {"structured_outputs"}
        == set(sampling_names(ChatRequest))
        == set(sampling_names(CompletionRequest))
    )
    for body in BODIES:
        params = read_request(body, {**NEEDED[body], **given}).sampling(99)
        assert {name: getattr(params, name) for name in given} == given
        assert params.logprobs is None
        without = read_request(body, {**NEEDED[body], "structured_outputs": {"regex": "a"}}).sampling(99)
        assert without.seed == 99
        assert without.structured_outputs is not None


def test_the_page_is_up_to_date() -> None:
    page = PAGE.read_text("utf-8")
    assert with_tables(page) == page, "run: python -m outpace.server.fields_page docs/serving.md"
    for body in BODIES:
        for name in [*body.model_fields, *sampling_names(body), *body._ignored]:
            assert f"`{name}`" in tables()


def test_a_page_without_a_place_for_the_tables_is_left_alone() -> None:
    with pytest.raises(ValueError, match="no lines"):
        with_tables("# Serving\n")
