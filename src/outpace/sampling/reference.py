"""The definition of `choose` in plain Python: slow, obvious, float64; and of the rules before it, in float32.

`choose.py` has to give the same token for every row; where it cannot decide within its error bounds, it asks here.

Arithmetic, fixed once for both: s = (z - max z) / T in float64; min_p compares s with log(min_p); order is
(z descending, then lowest id); top_p compares running sums of exp(s), added in that order, with top_p times the last of
them; the score is s plus Gumbel noise, and the lowest id wins a tie.

The rules are elementwise float32: every operation on a logit is rounded once, in the order written here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from outpace.params import SamplingParams
from outpace.protocols import Vocabulary
from outpace.sampling.noise import gumbel, key_of
from outpace.sampling.processors import takes_prompt
from outpace.types import Choice

__all__ = ["choose_reference", "filtered_law", "processed_reference", "survivors"]


def choose_reference(logits: Sequence[float], choice: Choice) -> int:
    """The token of one row.

    Args:
        logits: [V] float32 values without NaN or +inf, at least one of them finite; -inf is never chosen. The rules of
            the choice have been applied.
        choice: resolved parameters and the noise key's fields.
    """
    if choice.params.temperature == 0:
        return max(range(len(logits)), key=lambda token: (logits[token], -token))
    key = key_of(choice)
    kept = survivors(logits, choice.params)
    return max(kept, key=lambda token: (kept[token] + gumbel(key, token), -token))


def survivors(logits: Sequence[float], params: SamplingParams) -> dict[int, float]:
    """The tokens that min_p, top_k and top_p leave, in order, each with its scaled logit s (0 for the best).

    Args:
        logits: [V] float32 values, as for `choose_reference`.
        params: resolved, temperature above 0.
    """
    temperature, top_k, top_p = params.temperature, params.top_k, params.top_p
    if temperature is None or top_k is None or top_p is None:
        raise ValueError("temperature, top_k and top_p must be resolved first")
    best = max(logits)
    order = sorted((t for t, z in enumerate(logits) if z > -math.inf), key=lambda t: (-logits[t], t))
    scaled = {token: (logits[token] - best) / temperature for token in order}
    if params.min_p is not None and params.min_p > 0:
        bar = math.log(params.min_p)
        order = [token for token in order if scaled[token] >= bar]
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1:
        mass_up_to = list(accumulate(math.exp(scaled[token]) for token in order))
        goal = top_p * mass_up_to[-1]
        before = [0.0, *mass_up_to]
        order = [token for rank, token in enumerate(order) if before[rank] < goal]
    return {token: scaled[token] for token in order}


def filtered_law(logits: Sequence[float], params: SamplingParams) -> dict[int, float]:
    """The probability of every token that can be chosen, temperature above 0."""
    kept = survivors(logits, params)
    total = math.fsum(math.exp(s) for s in kept.values())
    return {token: math.exp(s) / total for token, s in kept.items()}


def processed_reference(
    logits: Sequence[float],
    params: SamplingParams,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    vocabulary: Vocabulary,
    stop_ids: frozenset[int],
) -> list[float]:
    """The logits of one row after the rules of its request, as `rules.py` has to give them.

    Args:
        logits: [V] float32 values without NaN or +inf.
        params: of the request; its logits processors must not fail.
        prompt_ids: of the request.
        output_ids: everything between the prompt and the row, no matter what of it is committed.
        vocabulary: V tokens.
        stop_ids: held back by min_tokens.

    Returns:
        [V] float32 values; all -inf where `rules.py` raises because no token is left. If the output does not follow
        the grammar, the logits as they are.
    """
    values = [np.float32(z) for z in logits]
    banned = _banned(params, output_ids, vocabulary, stop_ids)
    if banned is None:
        return [float(z) for z in values]
    for token in banned:
        values[token] = np.float32(-np.inf)
    for token, bias in (params.logit_bias or {}).items():
        values[token] += np.float32(bias)
    for function in params.logits_processors:
        ids = (list(prompt_ids), list(output_ids)) if takes_prompt(function) else (list(output_ids),)
        result = function(*ids, torch.tensor(values, dtype=torch.float32, device="cpu"))
        values = [np.float32(-np.inf if z == -np.inf else new) for z, new in zip(values, result.tolist(), strict=True)]
    return [float(_penalised(z, token, params, prompt_ids, output_ids)) for token, z in enumerate(values)]


def _banned(
    params: SamplingParams, output_ids: Sequence[int], vocabulary: Vocabulary, stop_ids: frozenset[int]
) -> set[int] | None:
    """Tokens that must not come next; None if the output has broken the grammar or come to its end."""
    banned = set(vocabulary.missing_ids)
    if params.allowed_token_ids is not None:
        banned |= set(range(vocabulary.size)) - set(params.allowed_token_ids)
    if params.structured_outputs is not None:
        grammar = vocabulary.grammar(params.structured_outputs)
        if not all(grammar.consume(token) for token in output_ids):
            return None
        legal = set(np.flatnonzero(grammar.mask()).tolist())
        if legal or not grammar.ended:
            banned |= set(range(vocabulary.size)) - legal
    for word in params.bad_words:
        plain, spaced = vocabulary.encode(word.lstrip() or word), vocabulary.encode(" " + word.lstrip())
        forms = [plain]
        if word.strip() and len(spaced) == len(plain) and spaced[0] != plain[0]:
            forms.append(spaced)
        for form in forms:
            before = len(form) - 1
            if len(output_ids) >= before and list(output_ids[len(output_ids) - before :]) == form[:-1]:
                banned.add(form[-1])
    if len(output_ids) < params.min_tokens:
        banned |= stop_ids
    return banned


def _penalised(
    value: np.float32, token: int, params: SamplingParams, prompt_ids: Sequence[int], output_ids: Sequence[int]
) -> np.float32:
    count = list(output_ids).count(token)
    if count or token in prompt_ids:
        penalty = np.float32(1 if params.repetition_penalty is None else params.repetition_penalty)
        value = value / penalty if value > 0 else value * penalty
    value = value - np.float32(params.frequency_penalty) * np.float32(count)
    return value - np.float32(params.presence_penalty) if count else value
