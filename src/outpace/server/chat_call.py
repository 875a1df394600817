"""A chat request, from its body to what the engine computes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from outpace.async_llm import Prepared
from outpace.errors import OutpaceError
from outpace.params import SamplingParams
from outpace.server.answers import AnswerReader
from outpace.server.envelope import Envelope, blame, log_prompt
from outpace.server.errors import ApiError
from outpace.server.messages import normalised, template_variables
from outpace.server.reasoning import make_splitter
from outpace.server.requests import ChatRequest
from outpace.server.served import Served
from outpace.server.tools import ToolPlan, plan_tools
from outpace.server.usage import num_speculative_tokens

__all__ = ["ChatCall", "prepare_chat"]

_TAIL = 32
"""Tokens at the end of a prompt among which a template may have opened the reasoning."""


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A chat request, ready for the engine.

    Args:
        served: the model.
        body: the request.
        envelope: of its answer.
        prepared: for the engine.
        plan: what its tools mean.
        prompt_tail: text of the prompt's end; None where reasoning is not told from content.
        echoed: text before the answer.
        most: draft tokens a step.
    """

    served: Served
    body: ChatRequest
    envelope: Envelope
    prepared: Prepared
    plan: ToolPlan
    prompt_tail: str | None
    echoed: str
    most: int

    def reader(self, *, whole: bool) -> AnswerReader:
        """A fresh reader for one choice; see `ToolPlan.parser`."""
        name = self.served.reasoning_format
        splitter = None if name is None or self.prompt_tail is None else make_splitter(name, self.prompt_tail)
        return AnswerReader(splitter, self.plan.parser(whole=whole))

    def finish_reason(self, reason: str, has_calls: bool) -> Any:
        """As OpenAI has it: calls end an answer for a reason of their own, unless it was cut off."""
        return "tool_calls" if has_calls and reason == "stop" else reason


async def prepare_chat(served: Served, body: ChatRequest, tenant: str) -> ChatCall:
    """Checks and encodes a request of a tenant.

    Raises:
        ApiError: it is not possible.
    """
    envelope = Envelope.of(served, "chatcmpl", body.request_id)
    log_prompt(served, envelope, body.messages)
    messages = normalised(body.messages, served.template)
    speculation = body.speculation()
    params = body.sampling(served.settings.seed)
    for index, message in enumerate(messages):
        served.check_length(f"messages[{index}].content", message["content"], params)
    try:
        plan = plan_tools(body.tools, body.tool_choice, body.parallel_tool_calls, format_name=served.tool_format)
    except OutpaceError as error:
        raise blame(error, body, "tools") from error
    try:
        params = _with_plan(params, plan, body)
        prepared = await served.llm.prepare(
            messages, params, speculation, template=chat_variables(served, body), tools=plan.shown, tenant=tenant
        )
    except OutpaceError as error:
        raise blame(error, body, "messages") from error
    # A grammar holds from the first token on, so there is no reasoning before it.
    tail = None if params.structured_outputs else prepared.prompt_token_ids[-_TAIL:]
    return ChatCall(
        served=served,
        body=body,
        envelope=envelope,
        prepared=prepared,
        plan=plan,
        prompt_tail=None if tail is None else served.llm.tokenizer.decode(tail, skip_special_tokens=False),
        echoed=messages[-1]["content"] if body.echo and messages[-1]["role"] == "assistant" else "",
        most=num_speculative_tokens(served.llm.built, speculation),
    )


def chat_variables(served: Served, body: ChatRequest) -> dict[str, Any]:
    """What the chat template is rendered with.

    Raises:
        ApiError: 400.
    """
    opens_turn = not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt
    own: dict[str, Any] = {"add_generation_prompt": opens_turn}
    if body.continue_final_message:
        own["continue_final_message"] = True
    some = {"reasoning_effort": body.reasoning_effort, "documents": body.documents}
    return template_variables(served.template, body.chat_template_kwargs, some, own)


def _with_plan(params: SamplingParams, plan: ToolPlan, body: ChatRequest) -> SamplingParams:
    """With what the tools ask of the text."""
    if not plan.reads_calls:
        return params
    if params.structured_outputs is not None:
        name = "structured_outputs" if body.response_format is None else "response_format"
        message = f"{name} is not possible with tools: the text would have to be both; send tool_choice 'none'"
        raise ApiError(400, message, param=name)
    structure = plan.structured_outputs
    # Markers of calls may be special tokens.
    return replace(params, structured_outputs=structure, skip_special_tokens=False)
