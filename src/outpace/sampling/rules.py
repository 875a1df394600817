"""What one request's parameters do to logits before temperature and filters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outpace.params import SamplingParams
from outpace.protocols import Vocabulary

__all__ = ["LogitsRules", "compile_rules"]


class LogitsRules:
    """The rules of one request (`outpace.types.Rules`)."""

    def __call__(self, logits: NDArray[np.float32], path: Sequence[int]) -> NDArray[np.float32]:
        raise NotImplementedError

    def commit(self, token_id: int) -> bool:
        """The text goes on by one token. True if a grammar has ended with it."""
        raise NotImplementedError

    def count_legal(self, token_ids: Sequence[int]) -> int:
        """How many draft tokens may come next, in order; nothing follows one that ends a grammar."""
        raise NotImplementedError

    def forced(self) -> list[int]:
        """Tokens of the text that a grammar prescribes next; empty without one."""
        raise NotImplementedError


def compile_rules(
    params: SamplingParams, vocabulary: Vocabulary, stop_ids: frozenset[int], prompt_token_ids: Sequence[int]
) -> LogitsRules | None:
    """The rules of a request that starts with these prompt tokens, or None if its logits are taken as they are.

    Args:
        params: resolved.
        vocabulary: of the model.
        stop_ids: EOS (whether ignored or not) and the caller's stop ids, which min_tokens holds back.
        prompt_token_ids: seen by the repetition penalty and by logits processors.

    Raises:
        InvalidParameter: an id outside the vocabulary, a list that leaves nothing, or an impossible grammar.
    """
    raise NotImplementedError
