"""Penalties for tokens that have been seen: repetition, frequency and presence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from outpace.params import SamplingParams
from outpace.sampling.stage import Floats, History

__all__ = ["Penalties"]


class Penalties:
    """Lowers (or raises) the logits of tokens seen before, elementwise in float32.

    First repetition, for tokens of prompt and output: a logit above 0 is divided by the penalty, another multiplied.
    Then frequency, times the number of times that the token stands in the output, is subtracted; then presence, for
    every token of the output.
    """

    def __init__(self, params: SamplingParams, prompt_token_ids: Iterable[int]) -> None:
        self._repetition = np.float32(1 if params.repetition_penalty is None else params.repetition_penalty)
        self._frequency = np.float32(params.frequency_penalty)
        self._presence = np.float32(params.presence_penalty)
        self._tally = _Tally(prompt_token_ids if self._repetition != 1 else ())
        used = {
            "repetition_penalty": self._repetition != 1,
            "frequency_penalty": self._frequency != 0,
            "presence_penalty": self._presence != 0,
        }
        self.name = " and ".join(name for name, is_used in used.items() if is_used)

    @property
    def change_any(self) -> bool:
        return bool(self.name)

    def commit(self, token_id: int) -> None:
        """This token is part of the output from now on."""
        self._tally.add(token_id)

    def apply(self, values: Floats, history: History) -> None:
        ids, counts = self._tally.with_path(history.path)
        if not ids.size:
            return
        seen = values[ids]
        with np.errstate(over="ignore"):  # huge logits: -inf is a token that cannot come, +inf is refused by the choice
            if self._repetition != 1:
                seen = np.where(seen > 0, seen / self._repetition, seen * self._repetition)
            if self._frequency != 0:
                seen -= self._frequency * counts
            if self._presence != 0:
                seen -= self._presence * (counts > 0)
        values[ids] = seen


class _Tally:
    """Distinct tokens seen so far and how often each stands in the output, kept as arrays that grow by doubling."""

    def __init__(self, prompt_token_ids: Iterable[int]) -> None:
        distinct = list(dict.fromkeys(prompt_token_ids))
        self._row = {token: row for row, token in enumerate(distinct)}
        self._ids: NDArray[np.intp] = np.array(distinct, np.intp)
        self._counts = np.zeros(len(distinct), np.float32)

    def add(self, token_id: int) -> None:
        row = self._row.get(token_id)
        if row is None:
            row = self._row[token_id] = len(self._row)
            if row >= self._ids.size:
                self._grow()
            self._ids[row] = token_id
        self._counts[row] += 1

    def with_path(self, path: Sequence[int]) -> tuple[NDArray[np.intp], Floats]:
        """[n] distinct ids and [n] counts, the draft tokens of `path` included. To be read only."""
        size = len(self._row)
        ids, counts = self._ids[:size], self._counts[:size]
        if not path:
            return ids, counts
        counts = counts.copy()
        new = []
        for token, times in Counter(path).items():
            row = self._row.get(token)
            if row is None:
                new.append((token, times))
            else:
                counts[row] += times
        if new:
            ids = np.concatenate([ids, np.array([token for token, _ in new], np.intp)])
            counts = np.concatenate([counts, np.array([times for _, times in new], np.float32)])
        return ids, counts

    def _grow(self) -> None:
        more = max(64, self._ids.size)
        self._ids = np.concatenate([self._ids, np.zeros(more, np.intp)])
        self._counts = np.concatenate([self._counts, np.zeros(more, np.float32)])
