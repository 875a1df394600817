"""From what a caller asks for to a request: checked, with everything compiled that its steps will need."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from outpace.engine.drafting import Drafting
from outpace.engine.request import Request
from outpace.engine.text import TextBuilder
from outpace.errors import InvalidParameter, InvalidPrompt
from outpace.params import SamplingParams, SpeculationParams
from outpace.protocols import Vocabulary
from outpace.sampling.rules import compile_rules

__all__ = ["Preparing"]

_TOKENS_BEFORE_TEXT = 8
"""Of the prompt; enough for any character, and for a token that has text among special ones."""


class Preparing:
    """Makes requests.

    Args:
        vocabulary: what the tokens mean.
        drafting: the loaded drafters.
        eos_ids: ids that end generation unless a request ignores them.
        max_logprobs: most log probabilities a token that a request may ask for; -1 for no limit.
        max_len: most tokens of a request, prompt and output.
    """

    def __init__(
        self, vocabulary: Vocabulary, drafting: Drafting, *, eos_ids: frozenset[int], max_logprobs: int, max_len: int
    ) -> None:
        self._vocabulary = vocabulary
        self._drafting = drafting
        self._eos_ids = eos_ids
        self._max_logprobs = max_logprobs
        self._max_len = max_len

    def request(
        self,
        request_id: int,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        speculation: SpeculationParams | None,
        number: int,
        tenant: str,
    ) -> Request:
        """See `Engine.prepare`."""
        prompt = self._truncated(prompt_token_ids, params)
        self._check_prompt(prompt)
        self._check_logprobs(params)
        limit = self._max_len
        if params.max_tokens is not None:
            limit = min(limit, len(prompt) + params.max_tokens)
        own_stops = frozenset(params.stop_token_ids)
        return Request(
            id=request_id,
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            params=params,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            number=number,
            tenant=tenant,
            stop_ids=own_stops | (frozenset() if params.ignore_eos else self._eos_ids),
            max_total_tokens=limit,
            plan=self._drafting.plan(speculation or SpeculationParams()),
            text=self._text(params, prompt),
            rules=compile_rules(params, self._vocabulary, own_stops | self._eos_ids, prompt),
        )

    def _text(self, params: SamplingParams, prompt: Sequence[int]) -> TextBuilder:
        detokenizer = self._vocabulary.detokenizer(
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
            after=prompt[-_TOKENS_BEFORE_TEXT:],
        )
        return TextBuilder(
            detokenizer, params.stop, include_stop=params.include_stop_str_in_output, min_tokens=params.min_tokens
        )

    def _truncated(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> list[int]:
        """The last tokens of a prompt, as `truncate_prompt_tokens` says; -1: what leaves room for the output."""
        most = params.truncate_prompt_tokens
        if most is None:
            return list(prompt_token_ids)
        if most == -1:
            most = max(1, self._max_len - (params.max_tokens or 1))
        return list(prompt_token_ids[-most:])

    def _check_logprobs(self, params: SamplingParams) -> None:
        """Each costs memory for every token: all of a vocabulary of 50,000 take some 10 MB a token."""
        most = self._max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            wanted = getattr(params, name)
            if wanted is not None and most != -1 and not 0 <= wanted <= most:
                raise InvalidParameter(
                    f"{name}={wanted} is not possible: this engine gives at most {most} a token; start it with "
                    "max_logprobs=-1 for no limit"
                )

    def _check_prompt(self, prompt_token_ids: Sequence[int]) -> None:
        if not prompt_token_ids:
            raise InvalidPrompt("the prompt is empty: it must have at least one token")
        if len(prompt_token_ids) >= self._max_len:
            raise InvalidPrompt(
                f"the prompt has {len(prompt_token_ids)} tokens and the context holds {self._max_len}, output "
                f"included: shorten it to at most {self._max_len - 1} tokens, or set truncate_prompt_tokens"
            )
        size = self._vocabulary.size
        worst = max(prompt_token_ids, key=lambda i: abs(i - size / 2))
        if not 0 <= worst < size:
            raise InvalidPrompt(f"token id {worst} is not in the vocabulary: ids go from 0 to {size - 1}")
