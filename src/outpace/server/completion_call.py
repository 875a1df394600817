"""A completion request, from its body to what the engine computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from openai.types import CompletionUsage

from outpace.async_llm import Prepared
from outpace.engine.outputs import RequestOutput
from outpace.errors import OutpaceError
from outpace.params import SamplingParams
from outpace.server.envelope import Envelope, blame, log_prompt
from outpace.server.errors import ApiError
from outpace.server.prompts import encode, prompts_of
from outpace.server.requests import CompletionRequest
from outpace.server.served import Served
from outpace.server.usage import num_speculative_tokens, usage, usage_of

__all__ = ["CompletionCall", "prepare_completion"]

_TOKENS_BEFORE_TEXT = 8
"""Of the prompt, as the engine takes them: enough for any character."""


@dataclass(frozen=True, slots=True)
class CompletionCall:
    """A completion request, ready for the engine.

    Args:
        served: the model.
        body: the request.
        envelope: of its answer.
        prompts: as they came.
        prepared: for the engine, one for each.
        params: how tokens are chosen.
        most: draft tokens a step.
    """

    served: Served
    body: CompletionRequest
    envelope: Envelope
    prompts: Sequence[str | list[int]]
    prepared: Sequence[Prepared]
    params: SamplingParams
    most: int

    def index(self, prompt: int, choice: int) -> int:
        """Which choice of the answer: all of the first prompt come before those of the second."""
        return prompt * self.params.n + choice

    def echoed(self, prompt: int) -> str:
        """Text before the answers to a prompt: the prompt itself, if it was asked for."""
        if not self.body.echo:
            return ""
        given = self.prompts[prompt]
        if isinstance(given, str) and self.params.truncate_prompt_tokens is None:
            return given
        ids = self.prepared[prompt].prompt_token_ids
        return self.served.llm.tokenizer.decode(ids, skip_special_tokens=self.params.skip_special_tokens)

    def offsets(self, ids: Sequence[int], after: Sequence[int], start: int, end: int) -> list[int]:
        """Where the text of each token begins.

        Args:
            ids: the tokens.
            after: tokens before them.
            start: where the text of all of them begins, in characters.
            end: where it ends.
        """
        text = self.served.llm.tokenizer.detokenizer(
            self.params.skip_special_tokens, self.params.spaces_between_special_tokens, after[-_TOKENS_BEFORE_TEXT:]
        )
        offset, found = start, []
        for token in ids:
            found.append(min(offset, end))
            offset += len(text.push(token))
        return found

    def usage_of(self, outputs: Sequence[RequestOutput]) -> CompletionUsage:
        """Counts of tokens; the one that is computed only because the engine has to is none of them."""
        found = usage_of(outputs)
        if not self.body.scores_only:
            return found
        details = found.prompt_tokens_details
        return usage(found.prompt_tokens, 0, (details.cached_tokens if details else None) or 0)


async def prepare_completion(served: Served, body: CompletionRequest, tenant: str) -> CompletionCall:
    """Checks and encodes a request of a tenant.

    Raises:
        ApiError: it is not possible.
    """
    envelope = Envelope.of(served, "cmpl", body.request_id)
    log_prompt(served, envelope, body.prompt)
    prompts = prompts_of(body.prompt)
    params = body.sampling(served.settings.seed)
    speculation = body.speculation()
    _check_number(served, len(prompts) * params.n)
    prepared = []
    for index, prompt in enumerate(prompts):
        param = "prompt" if len(prompts) == 1 else f"prompt[{index}]"
        if isinstance(prompt, str):
            served.check_length(param, prompt, params)
        try:
            if isinstance(prompt, str) and not body.add_special_tokens:
                prompt = await encode(served.llm.tokenizer, prompt, add_special_tokens=False)
            prepared.append(await served.llm.prepare(prompt, params, speculation, tenant=tenant))
        except OutpaceError as error:
            raise blame(error, body, param) from error
    most = num_speculative_tokens(served.llm.built, speculation)
    return CompletionCall(served, body, envelope, prompts, prepared, params, most)


def _check_number(served: Served, choices: int) -> None:
    """All choices of a request are queued at once, so there must be places for them."""
    most = served.settings.max_waiting + served.llm.built.config.max_num_seqs
    if choices > most:
        message = f"prompts times n make {choices} answers, and at most {most} can be computed or wait here: send fewer"
        raise ApiError(400, message, param="prompt")
