"""Plain decoding done the slow, obvious way: no engine, no cache, no batch, no rules that remember anything.

Every token is chosen from the whole history, and everything that a request may ask for is worked out again from the
start. What is shared with the product is the noise and the choice itself, `sampling/reference.py`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outpace.engine.outputs import RequestOutput, TokenLogprobs
from outpace.params import SamplingParams
from outpace.sampling.reference import choose_reference, filtered_law
from outpace.types import Choice

from .fakes import HistoryModel, IdVocabulary
from .harness import Job

__all__ = ["Expected", "Oracle"]

Entry = dict[int, tuple[float, int, str]]
"""Of one token: (log probability, rank, text) by id, the token itself first, then the others asked for by rank."""


@dataclass(frozen=True)
class Expected:
    """What a request has to give."""

    prompt: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    stop_reason: str | int | None
    logprobs: list[Entry] | None
    prompt_logprobs: list[Entry | None] | None

    def check(self, output: RequestOutput, *, ids_only: bool = False) -> None:
        """Raises AssertionError at the first difference."""
        (completion,) = output.outputs
        assert output.prompt_token_ids == self.prompt
        assert completion.token_ids == self.token_ids
        if ids_only:
            return
        assert completion.text == self.text
        assert (completion.finish_reason, completion.stop_reason) == (self.finish_reason, self.stop_reason)
        assert (completion.logprobs is None) == (self.logprobs is None)
        assert (output.prompt_logprobs is None) == (self.prompt_logprobs is None)
        if self.logprobs is not None and completion.logprobs is not None:
            _same_logprobs(completion.logprobs, self.logprobs)
            own = [entry[token][0] for entry, token in zip(self.logprobs, self.token_ids, strict=True)]
            assert completion.cumulative_logprob is not None
            assert math.isclose(completion.cumulative_logprob, sum(own), abs_tol=1e-3)
        if self.prompt_logprobs is not None and output.prompt_logprobs is not None:
            _same_logprobs(output.prompt_logprobs, self.prompt_logprobs)


def _same_logprobs(got: Sequence[TokenLogprobs | None], expected: Sequence[Entry | None]) -> None:
    assert len(got) == len(expected)
    for place, (found, wanted) in enumerate(zip(got, expected, strict=True)):
        assert (found is None) == (wanted is None), place
        if found is None or wanted is None:
            continue
        assert list(found) == list(wanted), place
        for token, (value, rank, text) in wanted.items():
            assert (found[token].rank, found[token].decoded_token) == (rank, text), (place, token)
            assert found[token].logprob == value or abs(found[token].logprob - value) < 1e-4, (place, token)


@dataclass(frozen=True)
class Oracle:
    """Args:
    model: the target.
    eos: ids that end a text.
    max_len: most tokens of prompt and output.
    missing: ids without a token.
    """

    model: HistoryModel
    eos: frozenset[int] = frozenset()
    max_len: int = 512
    missing: frozenset[int] = frozenset()

    @property
    def vocabulary(self) -> IdVocabulary:
        return IdVocabulary(self.model.vocab_size, missing_ids=sorted(self.missing), eos_ids=self.eos)

    def decode(self, job: Job, forced: Sequence[int] | None = None) -> Expected:
        """What this job has to give; with `forced`, if these are the tokens that are drawn.

        Raises:
            AssertionError: a forced token cannot be drawn, or the text ends before them or goes on behind them.
        """
        params, prompt = job.params, self.truncated(job)
        output: list[int] = []
        logprobs: list[Entry] = []
        text, finish, stop = "", None, None
        while finish is None:
            raw = self.model.logits(prompt + output)
            values = self.processed(raw, params, prompt, output)
            token = choose_reference(values, Choice(params, params.seed or 0, len(prompt + output), job.number))
            if forced is not None:
                assert len(output) < len(forced), f"the text does not end with {forced}"
                token = forced[len(output)]
                assert token in _possible(values, params), f"token {token} after {output}"
            if params.logprobs is not None:
                row = raw.tolist() if params.logprobs_mode == "raw_logprobs" else None
                all_values = _log_softmax(row) if row is not None else _processed_logprobs(values, params)
                logprobs.append(self._entry(all_values, token, params.logprobs))
            output.append(token)
            text, finish, stop = self._end(params, prompt, output, text)
        assert forced is None or output == list(forced)
        return Expected(
            prompt=prompt,
            token_ids=output,
            text=text,
            finish_reason=finish,
            stop_reason=stop,
            logprobs=None if params.logprobs is None else logprobs,
            prompt_logprobs=self._prompt_logprobs(params, prompt),
        )

    def truncated(self, job: Job) -> list[int]:
        most = job.params.truncate_prompt_tokens
        if most == -1:
            most = self.max_len - (job.params.max_tokens or 1)
        return list(job.prompt) if most is None else list(job.prompt)[-most:]

    def processed(
        self, raw: np.ndarray, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
    ) -> list[float]:
        """[V] logits after all rules, float32 values."""
        values = [np.float32(value) for value in raw]
        never = np.float32(-math.inf)
        banned = set(self.missing) | self._bad_ids(params, output)
        if params.allowed_token_ids is not None:
            banned |= set(range(len(values))) - set(params.allowed_token_ids)
        if params.structured_outputs is not None:
            grammar = self.vocabulary.grammar(params.structured_outputs)
            assert all(grammar.consume(token) for token in output)
            banned |= set(np.flatnonzero(~grammar.mask()).tolist())
        if len(output) < params.min_tokens:
            banned |= self.eos | set(params.stop_token_ids)
        for token, bias in (params.logit_bias or {}).items():
            values[token] += np.float32(bias)
        values = [never if token in banned else value for token, value in enumerate(values)]
        for function in params.logits_processors:
            ids = (list(prompt), list(output)) if len(inspect.signature(function).parameters) == 3 else (list(output),)
            values = [np.float32(v) for v in function(*ids, torch.tensor(np.array(values)))]
        return [float(_penalised(value, token, params, prompt, output)) for token, value in enumerate(values)]

    def _bad_ids(self, params: SamplingParams, output: Sequence[int]) -> set[int]:
        words = [self.vocabulary.encode(word) for word in params.bad_words]
        return {word[-1] for word in words if list(output[len(output) - len(word) + 1 :]) == word[:-1]}

    def _end(
        self, params: SamplingParams, prompt: Sequence[int], output: Sequence[int], before: str
    ) -> tuple[str, str | None, str | int | None]:
        """The text with the newest token, why it ends there, and what stopped it."""
        token = output[-1]
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else self.eos)
        silent = token in stops and not params.include_stop_str_in_output
        text = before + ("" if silent else self.vocabulary.token_text(token))
        if len(output) > params.min_tokens:
            for end in range(len(before) + 1, len(text) + 1):
                found = [stop for stop in params.stop if text[:end].endswith(stop)]
                if found:
                    stop = max(found, key=len)
                    return text[: end if params.include_stop_str_in_output else end - len(stop)], "stop", stop
        if token in stops:
            return text, "stop", token if token in params.stop_token_ids else None
        if params.structured_outputs is not None:
            grammar = self.vocabulary.grammar(params.structured_outputs)
            assert all(grammar.consume(each) for each in output)
            if grammar.ended:
                return text, "stop", None
        full = len(output) == params.max_tokens or len(prompt) + len(output) == self.max_len
        return text, "length" if full else None, None

    def _prompt_logprobs(self, params: SamplingParams, prompt: Sequence[int]) -> list[Entry | None] | None:
        if params.prompt_logprobs is None:
            return None
        entries: list[Entry | None] = [None]
        for place in range(1, len(prompt)):
            values = _log_softmax(self.model.logits(prompt[:place]).tolist())
            entries.append(self._entry(values, prompt[place], params.prompt_logprobs))
        return entries

    def _entry(self, values: Sequence[float], token: int, count: int) -> Entry:
        order = sorted(range(len(values)), key=lambda each: (-values[each], each))
        shown = [token, *order[: len(values) if count == -1 else count]]
        return {each: (values[each], order.index(each) + 1, self.vocabulary.token_text(each)) for each in shown}


def _penalised(
    value: np.float32, token: int, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> np.float32:
    if token in prompt or token in output:
        penalty = np.float32(params.repetition_penalty)
        value = value / penalty if value > 0 else value * penalty
    value = value - np.float32(params.frequency_penalty) * np.float32(output.count(token))
    if token in output:
        value = value - np.float32(params.presence_penalty)
    return value


def _possible(values: Sequence[float], params: SamplingParams) -> Collection[int]:
    """The tokens that may be chosen."""
    if params.temperature == 0:
        return {max(range(len(values)), key=lambda token: (values[token], -token))}
    return [token for token, chance in filtered_law(values, params).items() if chance > 0]


def _log_softmax(row: Sequence[float]) -> list[float]:
    best = max(row)
    total = math.fsum(math.exp(value - best) for value in row)
    return [value - best - math.log(total) for value in row]


def _processed_logprobs(values: Sequence[float], params: SamplingParams) -> list[float]:
    if params.temperature == 0:
        return _log_softmax(values)
    law = filtered_law(values, params)
    return [math.log(law[token]) if law.get(token) else -math.inf for token in range(len(values))]
