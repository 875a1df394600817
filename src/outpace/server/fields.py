"""Fields of requests that outpace does not honour: harmless ones are ignored, the others are refused by name.

What is honoured stands with the requests (`requests.py`) and the sampling parameters (`params.py`). Every field of
OpenAI's API and of vLLM's server is in one of these places; a field in none is an error.
"""

from __future__ import annotations

from collections.abc import Mapping

from outpace.refused import REFUSED, Refusal

__all__ = ["CHAT_IGNORED", "CHAT_REFUSED", "COMPLETION_IGNORED", "COMPLETION_REFUSED", "Refusal"]

_LABELS = "a label for the caller's own books; it changes no answer"
_MEDIA = "it concerns images, audio and video, which are refused themselves"
_RENDERING = "it concerns responses of other endpoints"

_IGNORED: Mapping[str, str] = {
    "user": _LABELS,
    "session_id": _LABELS,
    "return_mm_kwargs": _RENDERING,
    "return_token_offsets": _RENDERING,
    "routed_experts_prompt_start": _RENDERING,
    "stream_interval": "a chunk is a step here; what is sent does not change",
}
CHAT_IGNORED: Mapping[str, str] = {
    **_IGNORED,
    "safety_identifier": _LABELS,
    "metadata": _LABELS,
    "service_tier": "there is one tier",
    "prompt_cache_key": "what was computed for a prompt is found by the prompt itself",
    "prompt_cache_retention": "how long computed prompts are kept is the server's affair",
    "prompt_cache_options": "how long computed prompts are kept is the server's affair",
    "prediction": "a hint that may save time and never changes the answer",
    "add_special_tokens": "the chat template and the tokenizer decide, and BOS comes exactly once",
    "media_io_kwargs": _MEDIA,
    "mm_processor_kwargs": _MEDIA,
}
COMPLETION_IGNORED: Mapping[str, str] = _IGNORED

_TRANSFER = Refusal("caches are not moved between servers", ({},))
_REFUSED: Mapping[str, Refusal] = {
    **REFUSED,
    "logits_processors": Refusal("functions are for Python only; logit_bias and bad_words can be sent", ([],)),
    "priority": Refusal("requests are served in the order in which they come", (0,)),
    "cache_salt": Refusal("computed prompts are not kept apart by a salt: do not count on it"),
    "kv_transfer_params": _TRANSFER,
    "ec_transfer_params": _TRANSFER,
    "vllm_xargs": Refusal("there are no extensions that would read it", ({},)),
    "watermarking": Refusal("answers carry no watermark", (False,)),
    "truncation_side": Refusal("truncate_prompt_tokens keeps the last tokens", ("left",)),
    "logprob_token_ids": Refusal("logprobs go to the most likely tokens; ask for more of them"),
    "repetition_detection": Refusal("use frequency_penalty, presence_penalty or repetition_penalty"),
    "thinking_token_budget": Refusal("reasoning is not cut off; max_tokens counts it", (-1,)),
}
_COMPUTED = frozenset({"max_completion_tokens", "top_logprobs"})
CHAT_REFUSED: Mapping[str, Refusal] = {
    **{name: refusal for name, refusal in _REFUSED.items() if name not in _COMPUTED | {"response_format"}},
    "audio": Refusal("this server answers with text"),
    "modalities": Refusal("this server answers with text", (["text"],)),
    "moderation": Refusal("answers are not moderated"),
    "functions": Refusal("use tools: [{'type': 'function', 'function': {...}}]", ([],)),
    "function_call": Refusal("use tool_choice", ("none",)),
    "verbosity": Refusal("ask for short or long answers in a message", ("medium",)),
    "web_search_options": Refusal("this server does not search"),
    "chat_template": Refusal("templates are programs, and come from the model or from --chat-template alone"),
    "return_prompt_text": Refusal("/tokenize shows what becomes of messages", (False,)),
}
COMPLETION_REFUSED: Mapping[str, Refusal] = {
    **{name: refusal for name, refusal in _REFUSED.items() if name != "response_format"},
    "suffix": Refusal("text is continued, not filled in; write the model's own markers into the prompt", ("",)),
    "prompt_embeds": Refusal("prompts are text or token ids", ([],)),
}
