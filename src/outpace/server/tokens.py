"""/tokenize and /detokenize, as vLLM's server has them."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field

from outpace.checks import shown
from outpace.errors import OutpaceError
from outpace.server.chat_call import chat_variables
from outpace.server.envelope import read, served_by
from outpace.server.errors import ApiError, as_api_error
from outpace.server.fields import CHAT_REFUSED, Refusal
from outpace.server.messages import normalised
from outpace.server.prompts import encode
from outpace.server.requests import Body, ChatRequest
from outpace.server.served import Served
from outpace.server.tools import check_tools

__all__ = ["DetokenizeRequest", "TokenizeRequest", "detokenize", "tokenize"]


class TokenizeRequest(Body):
    """Body of /tokenize: a prompt, or messages."""

    _ignored: ClassVar = {}
    _refused: ClassVar = {name: CHAT_REFUSED[name] for name in ("chat_template",)} | {
        "mm_processor_kwargs": Refusal("this server reads text only", ({},))
    }
    _path: ClassVar[str] = "/tokenize"

    prompt: str | None = Field(default=None, description="text")
    messages: list[dict[str, Any]] | None = Field(default=None, description="a conversation")
    tools: list[Any] | None = Field(default=None, description="with messages: functions that the model may call")
    add_special_tokens: bool = Field(default=True, description="false: no BOS in front of a prompt")
    add_generation_prompt: bool | None = Field(default=None, description="with messages: begin the assistant's turn")
    continue_final_message: bool = Field(default=False, description="with messages: go on with the last one")
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="variables of the chat template")
    return_token_strs: bool = Field(default=False, description="send the tokens as the vocabulary writes them too")


class DetokenizeRequest(Body):
    """Body of /detokenize."""

    _path: ClassVar[str] = "/detokenize"

    tokens: list[int] = Field(description="token ids")


async def tokenize(request: Request) -> Response:
    """Token ids of a prompt, or of messages under the chat template."""
    served = served_by(request)
    body = await read(request, TokenizeRequest)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "/tokenize needs either prompt or messages", param="prompt")
    try:
        if body.messages is not None:
            ids = await _tokenize_chat(served, body)
        else:
            ids = await encode(served.llm.tokenizer, body.prompt or "", add_special_tokens=body.add_special_tokens)
    except OutpaceError as error:
        raise as_api_error(error, TokenizeRequest.model_fields, "messages" if body.messages else "prompt") from error
    strings = [served.llm.tokenizer.token(index) or "" for index in ids] if body.return_token_strs else None
    return JSONResponse(
        {"count": len(ids), "max_model_len": served.max_model_len, "tokens": ids, "token_strs": strings}
    )


async def _tokenize_chat(served: Served, body: TokenizeRequest) -> list[int]:
    given = {
        "messages": body.messages or [],
        "chat_template_kwargs": body.chat_template_kwargs,
        "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": body.continue_final_message,
    }
    chat = ChatRequest.model_validate(given)
    chat.check()
    check_tools(body.tools)
    variables = chat_variables(served, chat)
    if body.tools:
        variables["tools"] = body.tools
    messages = normalised(chat.messages, served.template)
    return await asyncio.to_thread(lambda: served.llm.tokenizer.encode_chat(messages, **variables))


async def detokenize(request: Request) -> Response:
    """Text of token ids, special tokens included."""
    tokenizer = served_by(request).llm.tokenizer
    body = await read(request, DetokenizeRequest)
    wrong = next((index for index in body.tokens if not 0 <= index < tokenizer.vocab_size), None)
    if wrong is not None:
        message = f"token id {shown(wrong)} is not in the vocabulary: ids go from 0 to {tokenizer.vocab_size - 1}"
        raise ApiError(400, message, param="tokens")
    text = await asyncio.to_thread(tokenizer.decode, body.tokens, False)
    return JSONResponse({"prompt": text})
