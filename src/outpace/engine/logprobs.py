"""How likely tokens were, for requests that ask: of the output after verification, of the prompt while it is computed.

Values are of the model's raw logits (`logprobs_mode` "raw_logprobs"), or after everything the parameters do to them
("processed_logprobs"; greedy decoding has no temperature or filters, so there only the rules apply).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from outpace.engine.outputs import Logprob, TokenLogprobs
from outpace.engine.pack import Block
from outpace.engine.verifying import choices_of
from outpace.errors import OutpaceError
from outpace.sampling.choose import NO_TOKEN, fault_of, processed, top_indices
from outpace.sampling.law import log_law
from outpace.types import Choice, Verdict

__all__ = ["output_logprobs", "prompt_logprobs"]

_Text = Callable[[int], str]


def output_logprobs(block: Block, verdict: Verdict, logits: torch.Tensor, text: _Text) -> list[TokenLogprobs] | None:
    """Of each accepted token and the bonus token, in order; None if the request wants none.

    To be called before the tokens are committed: the rules of a row count from the committed text.

    Args:
        block: the verified block.
        verdict: on it.
        logits: [N, V] of the step.
        text: of a token alone.

    Raises:
        OutpaceError: the logits are not numbers, or a rule failed.
    """
    wanted = block.turn.request.params.logprobs
    if wanted is None:
        return None
    tokens = [block.draft.ids[node] for node in verdict.accepted]
    if verdict.bonus != NO_TOKEN:
        tokens.append(verdict.bonus)
    rows = [0, *(1 + node for node in verdict.accepted)]
    choices = choices_of(block)
    return [
        _token_logprobs(_values(logits[block.choice_rows[row]], choices[row]), token, wanted, text)
        for token, row in zip(tokens, rows, strict=False)
    ]


def prompt_logprobs(block: Block, logits: torch.Tensor, text: _Text) -> list[TokenLogprobs]:
    """Of the prompt tokens that follow this block's prompt rows, in order.

    Raises:
        OutpaceError: the logits are not numbers.
    """
    request = block.turn.request
    wanted = request.params.prompt_logprobs
    if wanted is None:
        return []
    first = len(request.prompt_logprobs)
    return [
        _token_logprobs(_log_softmax(_numpy(logits[row])), request.token_ids[first + i], wanted, text)
        for i, row in enumerate(block.prompt_rows)
    ]


def _values(row: torch.Tensor, choice: Choice) -> NDArray[np.float64]:
    """[V] log probabilities of one row."""
    if choice.params.logprobs_mode == "raw_logprobs":
        return _log_softmax(_numpy(row))
    values = processed(_numpy(row), choice)
    return _log_softmax(values) if choice.params.temperature == 0 else log_law(values, choice)


def _numpy(row: torch.Tensor) -> NDArray[np.float32]:
    values: NDArray[np.float32] = row.detach().to("cpu", torch.float32).numpy()
    return values


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    best = float(logits.max())
    if not math.isfinite(best):
        raise OutpaceError(f"no log probabilities: the logits have {fault_of(best)}; check the weights")
    shifted = logits.astype(np.float64) - best
    total = float(np.exp(shifted).sum())
    shifted -= np.log(total)
    return shifted


def _token_logprobs(values: NDArray[np.float64], token: int, count: int, text: _Text) -> TokenLogprobs:
    """The token, then the `count` most likely ones (-1: all of them)."""
    most = values.size if count < 0 else min(count, values.size)
    best: Sequence[int] = ()
    if most:
        top = top_indices(values, most)
        best = top[np.lexsort((top, -values[top]))].tolist()
    found = {token: Logprob(float(values[token]), _rank(values, token), text(token))}
    for rank, other in enumerate(best, 1):
        found.setdefault(other, Logprob(float(values[other]), rank, text(other)))
    return found


def _rank(values: NDArray[np.float64], token: int) -> int:
    value = values[token]
    return 1 + int((values > value).sum()) + int((values[:token] == value).sum())
