"""Runs requests through an engine of stand-ins and against plain decoding done the slow, obvious way."""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from outpace.engine.engine import Engine
from outpace.engine.outputs import Piece, RequestOutput, StepOutput
from outpace.errors import OutpaceError
from outpace.params import SamplingDefaults, SamplingParams, SpeculationParams
from outpace.protocols import Controller, Drafter
from outpace.sampling.choose import choose_rows
from outpace.types import Choice

from .fakes import FREE, HistoryModel, IdVocabulary, TokenCache

GREEDY = SamplingParams(temperature=0.0, max_tokens=40).resolved(SamplingDefaults())
WARM = SamplingParams(temperature=0.9, top_p=0.95, seed=11, max_tokens=40).resolved(SamplingDefaults())
HOT = SamplingParams(temperature=1.5, top_k=9, min_p=0.01, seed=-3, max_tokens=40).resolved(SamplingDefaults())


@dataclass
class Job:
    """One request and when it arrives."""

    prompt: list[int]
    params: SamplingParams
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
    arrives: int = 0
    number: int = 0


def plain(model: HistoryModel, job: Job, eos: frozenset[int] = frozenset()) -> list[int]:
    """Token by token from the whole history: no engine, no cache."""
    assert not model.errors
    return list(_plain(model.vocab_size, model.order, tuple(job.prompt), job.params, job.number, eos))


@functools.cache
def _plain(
    vocab_size: int, order: int, prompt: tuple[int, ...], params: SamplingParams, number: int, eos: frozenset[int]
) -> list[int]:
    model, job, history = HistoryModel(vocab_size, order), Job(list(prompt), params, number=number), list(prompt)
    assert params.max_tokens is not None
    for _ in range(job.params.max_tokens):
        logits = torch.from_numpy(model.logits(history))[None]
        (token,) = choose_rows(logits, [Choice(job.params, job.params.seed or 0, len(history), job.number)])
        history.append(token)
        if token in eos and not job.params.ignore_eos:
            break
    return history[len(job.prompt) :]


def make_engine(
    model: HistoryModel,
    cache: TokenCache,
    drafters: Mapping[str, Drafter],
    *,
    k: int = 4,
    rows: int = 512,
    seqs: int = 8,
    eos: Sequence[int] = (),
    verification: str = "coupled",
    missing: Sequence[int] = (),
    prefixes: bool = True,
    controller: Controller | None = None,
) -> Engine:
    """An engine of stand-ins; `verification` is the rule of all drafters, `prefixes` whether rows are reused."""
    return Engine(
        model,
        cache,
        drafters,
        vocabulary=IdVocabulary(model.vocab_size, missing_ids=missing, eos_ids=eos),
        verification={name: verification for name in drafters},
        eos_ids=eos,
        max_model_len=cache.capacity,
        num_speculative_tokens={name: k for name in drafters},
        max_num_seqs=seqs,
        max_num_batched_tokens=rows,
        enable_prefix_caching=prefixes,
        controller=controller,
    )


def run(engine: Engine, jobs: Sequence[Job]) -> list[RequestOutput]:
    """Runs all jobs, checking the books after every step and what is streamed.

    Raises:
        OutpaceError: one of them failed.
    """
    results = []
    for result in run_all(engine, jobs):
        if isinstance(result, OutpaceError):
            raise result
        results.append(result)
    return results


def run_all(engine: Engine, jobs: Sequence[Job]) -> list[RequestOutput | OutpaceError]:
    """`run` where jobs may fail: what each has come to."""
    ids: dict[int, int] = {}
    pieces: dict[int, list[Piece]] = {}
    done: dict[int, RequestOutput | OutpaceError] = {}
    absent = list(range(len(jobs)))
    step = 0
    while len(done) < len(jobs):
        for index in [each for each in absent if jobs[each].arrives <= step]:
            job = jobs[index]
            request_id = engine.submit(engine.prepare(job.prompt, job.params, job.speculation, number=job.number))
            absent.remove(index)
            ids[request_id] = index
            pieces[request_id] = []
        for output in engine.step():
            pieces[output.request_id] += output.pieces
            if output.finish_reason:
                done[ids[output.request_id]] = _taken(engine, output, pieces[output.request_id])
            elif output.pieces:
                assert any(piece.text for piece in output.pieces), "a delta without text"
        engine.check_integrity()
        check_rows(engine)
        step += 1
        assert step < 20_000, "the engine does not come to an end"
    assert not engine.has_work
    for drafter in engine.drafting.drafters.values():
        alive = getattr(drafter, "alive", getattr(drafter, "_states", getattr(drafter, "_indices", {})))
        assert not alive, f"{drafter.name} still holds requests"
    return [done[index] for index in range(len(jobs))]


def check_rows(engine: Engine) -> None:
    """A cache of tokens holds those of every running request, as far as they are computed, and nothing else."""
    if not isinstance(engine.cache, TokenCache):
        return
    for request in engine._scheduler.running:
        assert request.lane is not None
        held = [token for token in engine.cache.tokens[request.lane] if token != FREE]
        assert held == request.token_ids[: request.num_computed]


def _taken(engine: Engine, last: StepOutput, pieces: Sequence[Piece]) -> RequestOutput | OutpaceError:
    """The result, which is what was streamed."""
    try:
        result = engine.take(last.request_id)
    except OutpaceError as error:
        assert last.finish_reason == "error"
        return error
    (completion,) = result.outputs
    assert completion.finish_reason == last.finish_reason
    assert "".join(piece.text for piece in pieces) == completion.text
    assert [piece.token_id for piece in pieces] == completion.token_ids
    if completion.logprobs is not None:
        assert [piece.logprobs for piece in pieces] == completion.logprobs
    return result


def mixed_jobs(
    count: int, vocab_size: int, seed: int, params: Sequence[SamplingParams] = (GREEDY, WARM, HOT)
) -> list[Job]:
    """Prompts of mixed lengths, arriving over some steps, with parameters in turn."""
    source = random.Random(seed)
    jobs = []
    for index in range(count):
        prompt = [source.randrange(vocab_size) for _ in range(source.choice([1, 2, 3, 9, 30, 61]))]
        jobs.append(Job(prompt, params[index % len(params)], arrives=source.choice([0, 0, 1, 5])))
    return jobs
