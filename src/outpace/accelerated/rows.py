"""The rows of one call on their way through the engine: processed logits, ends, and what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from transformers import LogitsProcessorList

from outpace.accelerated.arguments import GenerateCall
from outpace.engine.engine import Engine
from outpace.engine.request import Request
from outpace.errors import OutpaceError
from outpace.params import SamplingDefaults

__all__ = ["Row", "RowScores", "run_rows"]


class RowScores:
    """Logits processors of transformers as one of the engine's: a pure function of a row's history and logits.

    Args:
        prompt: [1, L] with its padding, as the processors are to see it.
        processors: to be applied in order.
        keeps: keep logits and processed scores of every position. A position is computed again until its token is
            committed, each time with the history that is then valid, so what was kept last is right.
    """

    def __init__(self, prompt: torch.Tensor, processors: LogitsProcessorList, *, keeps: bool) -> None:
        self.logits: dict[int, torch.Tensor] = {}
        self.scores: dict[int, torch.Tensor] = {}
        self.error: Exception | None = None
        self._prompt = prompt
        self._processors = processors
        self._keeps = keeps

    @property
    def needed(self) -> bool:
        """Whether it does anything."""
        return self._keeps or len(self._processors) > 0

    def __call__(self, prompt_ids: Sequence[int], output_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """[V] logits -> [V] scores. The prompt is known already, padding included."""
        ids = torch.cat([self._prompt, torch.tensor([list(output_ids)], dtype=torch.int64, device="cpu")], dim=1)
        raw = logits.clone() if self._keeps else logits
        try:
            scores: torch.Tensor = _alone(self._processors(ids, logits[None]))
        except Exception as error:
            self.error = error  # what the engine raises for it will name it as its cause
            raise
        if self._keeps:
            self.logits[len(output_ids)], self.scores[len(output_ids)] = raw, scores.clone()
        return scores


@dataclass(slots=True)
class Row:
    """One sequence.

    Args:
        request: its request in the engine.
        processing: what is done to its logits.
        checked: output tokens that have been looked at.
        end: output tokens of the finished sequence; None while it is not known.
    """

    request: Request
    processing: RowScores
    checked: int = 0
    end: int | None = None

    @property
    def output_ids(self) -> list[int]:
        """Tokens so far; may be more than `end`, since a step brings several."""
        return self.request.token_ids[self.request.num_prompt_tokens :]


def run_rows(engine: Engine, call: GenerateCall) -> list[Row]:
    """Generates every row of a call, side by side, and streams the only one if that is wanted.

    Raises:
        BadInput: a prompt is not possible; nothing is generated then.
        OutpaceError: a row failed inside the engine.
    """
    rows = [_prepared(engine, call, index) for index in range(call.num_rows)]
    try:
        for row in rows:
            engine.submit(row.request)
        if call.streamer is not None:
            call.streamer.put(call.input_ids)
        while not _all_ended(rows, call.has_eos):
            if not engine.step():
                raise OutpaceError("generation was interrupted: call generate again")
            for index, row in enumerate(rows):
                _look_at(engine, call, index, row)
    finally:
        for row in rows:
            engine.abort(row.request.id)
    if call.streamer is not None:
        call.streamer.end()
    if not call.has_eos:
        _even_out(rows)
    return rows


def _prepared(engine: Engine, call: GenerateCall, index: int) -> Row:
    config = call.config
    keeps = bool(config.return_dict_in_generate and (config.output_scores or config.output_logits))
    processing = RowScores(call.prompt(index), call.row_processors(index), keeps=keeps)
    params = replace(
        call.sampling,
        max_tokens=call.max_new_tokens,
        stop_token_ids=sorted(call.stop_ids),
        ignore_eos=True,
        skip_special_tokens=False,
        logits_processors=(processing,) if processing.needed else (),
    ).resolved(SamplingDefaults())
    return Row(engine.prepare(call.prompt_token_ids(index), params, call.speculation, number=index), processing)


def _look_at(engine: Engine, call: GenerateCall, index: int, row: Row) -> None:
    """Looks at each new token of a row: does the sequence end with it, and who wants to see it."""
    request = row.request
    if request.error is not None:
        raise OutpaceError(request.error) from row.processing.error
    output = row.output_ids
    while row.checked < len(output) and row.end is None:
        row.checked += 1
        if call.streamer is not None:
            call.streamer.put(torch.tensor(output[row.checked - 1 : row.checked], dtype=torch.int64, device="cpu"))
        if len(call.criteria) and _criteria_met(call, index, row, output[: row.checked]):
            row.end = row.checked
    if row.end is None and request.finish_reason is not None:
        row.end = len(output)
    if row.end is not None and call.has_eos:
        engine.abort(request.id)


def _criteria_met(call: GenerateCall, index: int, row: Row, output: list[int]) -> bool:
    """Asks the stopping criteria about one sequence alone, as after every token."""
    ids = torch.cat([call.prompt(index), torch.tensor([output], dtype=torch.int64, device="cpu")], dim=1)
    wanted = call.config.return_dict_in_generate and call.config.output_scores
    scores = tuple(row.processing.scores[at][None] for at in range(len(output))) if wanted else None
    return bool(_alone(call.criteria(ids, scores)))


def _alone(results: torch.Tensor) -> torch.Tensor:
    """What processors or criteria say of the one sequence they were shown.

    Raises:
        ValueError: they speak of several, as code does that knows the batch.
    """
    if results.dim() == 0 or len(results) != 1:
        raise ValueError(
            f"a result of shape {list(results.shape)} for one sequence: processors and criteria see sequences one at a "
            "time here, and must not know the batch"
        )
    return results[0]


def _all_ended(rows: Sequence[Row], has_eos: bool) -> bool:
    """Whether every end is known and every row reaches as far as it has to; see `_even_out`."""
    ends = [row.end for row in rows if row.end is not None]
    return len(ends) == len(rows) and (has_eos or all(len(row.output_ids) >= max(ends) for row in rows))


def _even_out(rows: Sequence[Row]) -> None:
    """Makes all rows end where the last one does.

    Without an end of sequence token, transformers lets a sequence whose criterion is met go on until all have met
    theirs.
    """
    last = max(row.end or 0 for row in rows)
    for row in rows:
        row.end = last
