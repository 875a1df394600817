"""The step loop.

    schedule -> draft -> pack -> forward -> choose -> verify -> commit -> emit

The engine knows ports, not classes: a model, a cache, and drafters by name (`outpace.protocols`). Rows are reserved
before drafting, so no draft is cut afterwards; drafting comes first in a step, so what the last step committed has
been shown before anybody waits for a guess. What belongs here is the order of the stations and the books of a
request; how a station works belongs to the station.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from outpace.engine.choosing import NO_TOKEN, choose_blocks
from outpace.engine.drafting import Drafting
from outpace.engine.outputs import CompletionOutput, RequestOutput, StepOutput
from outpace.engine.pack import Block, build_pack
from outpace.engine.request import Request
from outpace.engine.scheduler import Scheduler
from outpace.engine.text import Detokenizer, TextBuilder
from outpace.errors import InvalidPrompt, OutpaceError
from outpace.params import SamplingParams, SpeculationParams
from outpace.protocols import Cache, Drafter, TargetModel
from outpace.types import Draft, ForwardResult, Verdict
from outpace.verify.coupled import verify

__all__ = ["Engine"]


class Engine:
    """Runs many requests step by step, each with its own drafter, draft length and sampling parameters.

    Not for use from several threads at once.

    Args:
        model: the target.
        cache: its cache; the engine is its only user beside drafters that work on target rows.
        drafters: by name; the first is the default of a request that names none. May be empty.
        detokenizer: makes a fresh one per request.
        eos_ids: ids that end generation unless a request ignores them.
        max_model_len: most tokens of a request, prompt and output.
        num_speculative_tokens: per drafter name, most draft tokens a step unless the request says less or more.
        max_num_seqs: most requests side by side; further ones wait.
        max_num_batched_tokens: most rows a step.
        weight_bytes: memory of the target's weights, for the statistics.
        before_step: called before every step.
    """

    def __init__(
        self,
        model: TargetModel,
        cache: Cache,
        drafters: Mapping[str, Drafter],
        *,
        detokenizer: Callable[[bool], Detokenizer],
        eos_ids: Iterable[int],
        max_model_len: int,
        num_speculative_tokens: Mapping[str, int],
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 512,
        weight_bytes: int = 0,
        before_step: Callable[[], None] = lambda: None,
    ) -> None:
        self.model = model
        self.cache = cache
        self.drafting = Drafting(drafters, num_speculative_tokens, model.vocab_size)
        self._max_len = min(max_model_len, cache.capacity, cache.free_rows)  # one request always fits
        self._detokenizer = detokenizer
        self._eos_ids = frozenset(eos_ids)
        self._weight_bytes = weight_bytes
        self._before_step = before_step
        self._scheduler = Scheduler(cache, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
        self._requests: dict[int, Request] = {}
        self._ids = itertools.count()
        self._seconds: dict[str, float] = {}

    # Requests come and go between steps.

    def prepare(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        speculation: SpeculationParams | None = None,
        *,
        number: int = 0,
    ) -> Request:
        """Checks what is asked for and makes a request of it; nothing is queued yet.

        Args:
            prompt_token_ids: at least one id.
            params: resolved (no None among temperature, top_p and top_k).
            speculation: None follows the engine.
            number: which of the caller's n choices this is.

        Raises:
            InvalidPrompt: empty, too long, or with an id outside the vocabulary.
            InvalidParameter: an unknown drafter.
        """
        self._check_prompt(prompt_token_ids)
        limit = self._max_len
        if params.max_tokens is not None:
            limit = min(limit, len(prompt_token_ids) + params.max_tokens)
        drafter, most, early = self.drafting.choose(speculation or SpeculationParams())
        return Request(
            id=next(self._ids),
            token_ids=list(prompt_token_ids),
            num_prompt_tokens=len(prompt_token_ids),
            params=params,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            number=number,
            stop_ids=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_ids),
            max_total_tokens=limit,
            drafter=drafter,
            num_speculative_tokens=most,
            drafts_before_first_token=early,
            text=TextBuilder(self._detokenizer(params.skip_special_tokens), params.stop),
        )

    def submit(self, request: Request) -> int:
        """Queues a prepared request. Returns its id."""
        self._requests[request.id] = request
        self._scheduler.add(request)
        return request.id

    def abort(self, request_id: int) -> None:
        """Ends a request at once; it gives no further output. Unknown or finished ids are ignored."""
        request = self._requests.pop(request_id, None)
        if request is not None and request.finish_reason is None and self._scheduler.remove(request):
            self.drafting.release(request)

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def take(self, request_id: int) -> RequestOutput:
        """The finished request's output, once; `step` has reported its finish reason before.

        Raises:
            OutpaceError: the request failed inside the engine; the others were not touched.
        """
        request = self._requests.pop(request_id)
        assert request.finish_reason is not None, f"request {request_id} has not finished"
        if request.error is not None:
            raise OutpaceError(request.error)
        prompt = request.token_ids[: request.num_prompt_tokens]
        completion = CompletionOutput(
            index=request.number,
            text=request.text.text,
            token_ids=request.token_ids[request.num_prompt_tokens :],
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
        )
        return RequestOutput(request.id, None, prompt, [completion], request.stats)

    # The step.

    def step(self) -> list[StepOutput]:
        """Computes one pass of the target and returns what it added to each request; empty if there is none.

        If anything is raised on the way (an interrupt, say), nobody stays half-computed: running requests give up their
        rows and are computed again by the next step.
        """
        self._before_step()
        self._seconds = {}
        began = time.perf_counter()
        try:
            blocks = self._advance()
        except BaseException:
            for request in self._scheduler.recompute_all():
                self.drafting.release(request)
            raise
        return self._emit(blocks, began)

    def _advance(self) -> list[Block]:
        """The stations of a step, in order."""
        with self._station("schedule"):
            plan = self._scheduler.schedule()
            for request in plan.preempted:
                self.drafting.release(request)
            for request in plan.admitted:
                self.drafting.start(request)
        if not plan.turns:
            return []
        with self._station("draft"):
            drafts = self.drafting.propose(plan.turns, plan.free_rows)
        with self._station("pack"):
            pack, blocks = build_pack(plan.turns, drafts, self.drafting.aux_layers)
        with self._station("forward"):
            result = self.model.forward(pack, self.cache)
        with self._station("choose"):
            chosen = choose_blocks(blocks, result.logits)
        with self._station("verify"):
            verdicts = [verify(b.draft, own) if own else None for b, own in zip(blocks, chosen, strict=True)]
        with self._station("commit"):
            self._commit(blocks, verdicts, result)
        return blocks

    def _commit(self, blocks: Sequence[Block], verdicts: Sequence[Verdict | None], result: ForwardResult) -> None:
        """Appends what was kept, ends requests, rolls the cache back, and tells the drafters."""
        going_on: list[tuple[Block, int, int]] = []
        for block, verdict in zip(blocks, verdicts, strict=True):
            request = block.turn.request
            before = len(request.token_ids)
            num_accepted = 0 if verdict is None else _append(request, block.draft, verdict)
            request.num_computed += block.turn.num_tokens + num_accepted
            request.stats.count_draft(len(block.draft), num_accepted)
            if request.finish_reason:
                request.stats.memory = self.memory()
                self._scheduler.remove(request)
                self.drafting.release(request)
                continue
            assert request.lane is not None
            self.cache.truncate(request.lane, request.num_computed)
            going_on.append((block, len(request.token_ids) - before, num_accepted))
        self.drafting.observe(going_on, result)

    def _emit(self, blocks: Sequence[Block], began: float) -> list[StepOutput]:
        """Books times and hands out the text that can be shown."""
        now = time.perf_counter()
        outputs: list[StepOutput] = []
        for block in blocks:
            request, stats = block.turn.request, block.turn.request.stats
            stats.steps += 1
            for station, seconds in self._seconds.items():
                stats.station_seconds[station] = stats.station_seconds.get(station, 0.0) + seconds
            if request.first_step_at is None:
                request.first_step_at = began
            if request.num_output_tokens == 0:
                done = (request.num_computed, request.num_prompt_tokens)
                outputs.append(StepOutput(request.id, (), done, request.finish_reason))
                continue
            if request.first_token_at is None:
                request.first_token_at = now
                stats.prefill_seconds = now - request.first_step_at
                stats.decode_tokens = -request.num_output_tokens
            if request.finish_reason:
                stats.decode_seconds = now - request.first_token_at
                stats.decode_tokens += request.num_output_tokens
            pieces = request.text.release(final=request.finish_reason is not None)
            outputs.append(StepOutput(request.id, pieces, None, request.finish_reason))
        return outputs

    # Books.

    def memory(self) -> dict[str, int]:
        """Bytes held by the target's weights, the drafters (weights, caches, indices) and the target's cache."""
        return {
            "target": self._weight_bytes,
            "drafter": self.drafting.memory_bytes,
            "cache": self.cache.bytes_in_use,
        }

    def check_integrity(self) -> None:
        """Raises AssertionError if requests, lanes and rows do not agree. For tests, and cheap enough to run idle."""
        self.cache.check_integrity()
        lanes = [request.lane for request in self._scheduler.running]
        assert len(set(lanes)) == len(lanes) and None not in lanes, lanes
        for request in self._scheduler.running:
            assert 0 <= request.num_computed < len(request.token_ids), request

    @contextmanager
    def _station(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._seconds[name] = time.perf_counter() - began

    def _check_prompt(self, prompt_token_ids: Sequence[int]) -> None:
        if not prompt_token_ids:
            raise InvalidPrompt("the prompt is empty: it must have at least one token")
        if len(prompt_token_ids) >= self._max_len:
            raise InvalidPrompt(
                f"the prompt has {len(prompt_token_ids)} tokens and the context holds {self._max_len}, output "
                f"included: shorten it to at most {self._max_len - 1} tokens"
            )
        worst = max(prompt_token_ids, key=lambda i: abs(i - self.model.vocab_size / 2))
        if not 0 <= worst < self.model.vocab_size:
            raise InvalidPrompt(
                f"token id {worst} is not in the vocabulary: ids go from 0 to {self.model.vocab_size - 1}"
            )


def _append(request: Request, draft: Draft, verdict: Verdict) -> int:
    """Commits the accepted path and the bonus token, up to an end inside the block. Returns accepted tokens kept."""
    for count, node in enumerate(verdict.accepted, 1):
        if request.append(draft.ids[node], draft.sources[node]):
            return count
    if verdict.bonus == NO_TOKEN:
        request.fail(f"the logits at position {len(request.token_ids)} are not numbers, so no token can be chosen")
    else:
        request.append(verdict.bonus, None)
    return len(verdict.accepted)
