"""What one request's parameters do to logits before temperature and filters.

In this order: ids that do not exist or are not allowed, the grammar, bad words, logit bias and min_tokens, logits
processors, penalties. The definition is `processed_reference` in `reference.py`; here it costs a copy of the row and
work on the few tokens concerned, however long the text is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outpace.errors import InvalidParameter, OutpaceError
from outpace.params import SamplingParams
from outpace.protocols import Vocabulary
from outpace.sampling.bad_words import BadSequences, encode_bad_words
from outpace.sampling.grammar_rule import GrammarRule
from outpace.sampling.penalties import Penalties
from outpace.sampling.processors import Processor
from outpace.sampling.stage import NEVER, Floats, History, Stage
from outpace.sampling.token_rules import LogitBias, MinTokens, TokenBans, check_ids

__all__ = ["LogitsRules", "compile_rules"]


class LogitsRules:
    """The rules of one request (`outpace.types.Rules`), and its output tokens as far as they are committed.

    Args:
        size: ids from here on do not exist.
        prompt_token_ids: of the request.
        bans: tokens that can never come.
        grammar: what the text has to obey, at its beginning.
        min_tokens: which tokens have to wait.
        penalties: with nothing committed.
        stages: all that changes logits, in order; the four above are among them where they change anything.
    """

    def __init__(
        self,
        size: int,
        prompt_token_ids: Sequence[int],
        bans: TokenBans,
        grammar: GrammarRule | None,
        min_tokens: MinTokens | None,
        penalties: Penalties,
        stages: Sequence[Stage],
    ) -> None:
        self._size = size
        self._prompt = tuple(prompt_token_ids)
        self._committed: list[int] = []
        self._bans = bans
        self._grammar = grammar
        self._min_tokens = min_tokens
        self._penalties = penalties
        self._stages = tuple(stages)

    def __call__(self, logits: NDArray[np.float32], path: Sequence[int]) -> NDArray[np.float32]:
        """[V] logits of the row after `path` -> a new [V] array, -inf where a token is not allowed.

        A row behind draft tokens that the grammar refuses is returned as it is: no text ever gets there. A row of a
        draft model whose head is wider or narrower than the vocabulary keeps its width.

        Raises:
            OutpaceError: a logits processor failed, or no token is left.
        """
        if self._grammar is not None and not self._grammar.fits(path):
            return np.array(logits, np.float32)
        if logits.size != self._size:
            return _resized(self(_resized(logits, self._size), path), logits.size)
        values = np.array(logits, np.float32)
        history = History(self._prompt, self._committed, path)
        for stage in self._stages:
            stage.apply(values, history)
        if values.max() == NEVER:
            self._explain(logits, history)
        return values

    def commit(self, token_id: int) -> bool:
        """The text goes on by one token. True if a grammar has ended with it.

        Raises:
            OutpaceError: the grammar does not allow the token here.
        """
        ended = self._grammar is not None and self._grammar.commit(token_id)
        self._penalties.commit(token_id)
        self._committed.append(token_id)
        return ended

    def count_legal(self, token_ids: Sequence[int]) -> int:
        """How many draft tokens may come next, in order; nothing follows one that ends a grammar.

        Bad words of several tokens and logits processors are not looked at.
        """
        legal = 0
        while legal < len(token_ids) and self._may_come(token_ids[legal], len(self._committed) + legal):
            legal += 1
        return legal if self._grammar is None else self._grammar.count_legal(token_ids[:legal])

    def forced(self, most: int) -> list[int]:
        """The first `most` tokens of the text that a grammar prescribes next; empty without one."""
        return [] if self._grammar is None else self._grammar.forced(most)

    def _may_come(self, token_id: int, num_output_tokens: int) -> bool:
        in_time = self._min_tokens is None or self._min_tokens.allows(token_id, num_output_tokens)
        return in_time and self._bans.allows(token_id)

    def _explain(self, logits: Floats, history: History) -> None:
        """Raises OutpaceError with the parameters that took tokens away, if there were any to take."""
        values = np.array(logits, np.float32)
        taking, left = [], np.count_nonzero(values > NEVER)
        for stage in self._stages:
            stage.apply(values, history)
            before, left = left, np.count_nonzero(values > NEVER)
            if left < before and stage.name not in taking:
                taking.append(stage.name)
        if taking:
            raise OutpaceError(
                f"no token is left at position {history.position} (output token {history.num_output_tokens + 1}) after "
                f"{', '.join(taking)}; one of these has to allow more"
            )


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
    size = vocabulary.size
    check_ids("stop_token_ids", params.stop_token_ids, size)
    biases = dict(params.logit_bias or {})
    check_ids("logit_bias", biases, size)
    allowed = params.allowed_token_ids
    allowed = None if allowed is None else check_ids("allowed_token_ids", allowed, size)
    bad = encode_bad_words(params.bad_words, vocabulary)
    bans = TokenBans(size, vocabulary.missing_ids, allowed, [each[0] for each in bad if len(each) == 1])
    min_tokens = _min_tokens(params, bans, sorted(token for token in stop_ids if 0 <= token < size))
    wanted = params.structured_outputs
    grammar = None if wanted is None else GrammarRule(vocabulary.grammar(wanted))
    sequences = [each for each in bad if len(each) > 1]
    penalties = Penalties(params, prompt_token_ids)
    stages: list[Stage | None] = [
        bans if bans.bans_any else None,
        grammar,
        BadSequences(sequences) if sequences else None,
        min_tokens,
        LogitBias(biases) if any(biases.values()) else None,
        *(Processor(each) for each in params.logits_processors),
        penalties if penalties.change_any else None,
    ]
    used = [stage for stage in stages if stage is not None]
    return LogitsRules(size, prompt_token_ids, bans, grammar, min_tokens, penalties, used) if used else None


def _min_tokens(params: SamplingParams, bans: TokenBans, stop_ids: Sequence[int]) -> MinTokens | None:
    if params.min_tokens == 0 or not stop_ids:
        return None
    if not bans.leave_more_than(stop_ids):
        lists = f" that {bans.name} leave" if bans.bans_any else ""
        raise InvalidParameter(
            f"min_tokens={params.min_tokens} is not possible: all tokens{lists} end the text, and it holds those "
            "back; allow another token, or use min_tokens=0"
        )
    return MinTokens(params.min_tokens, stop_ids)


def _resized(values: Floats, size: int) -> Floats:
    """A copy of another width: ids that only one side has cannot come."""
    resized = np.full(size, NEVER, np.float32)
    shared = min(size, values.size)
    resized[:shared] = values[:shared]
    return resized
