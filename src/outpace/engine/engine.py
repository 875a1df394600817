"""The step loop.

    schedule -> draft -> pack -> forward -> verify -> logprobs -> commit -> emit

The engine knows ports, not classes: a model, a cache, and drafters by name (`outpace.protocols`). Rows are reserved
before drafting, so no draft is cut afterwards; drafting comes first in a step, so what the last step committed has
been shown before anybody waits for a guess. What belongs here is the order of the stations and the books of a
request; how a station works belongs to the station.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from outpace.control.fixed import FixedController
from outpace.engine.drafting import Drafting
from outpace.engine.logprobs import output_logprobs, prompt_logprobs
from outpace.engine.outputs import RequestOutput, StepOutput, TokenLogprobs
from outpace.engine.pack import Block, build_pack
from outpace.engine.prefixes import Prefixes
from outpace.engine.preparing import Preparing
from outpace.engine.request import Request, result_of
from outpace.engine.scheduler import Scheduler
from outpace.engine.steering import Steering
from outpace.engine.verifying import Verified, verify_blocks
from outpace.errors import InvalidParameter, OutpaceError, RequestFailed
from outpace.params import SamplingParams, SpeculationParams
from outpace.protocols import Cache, Controller, Drafter, TargetModel, Vocabulary
from outpace.types import ForwardResult

__all__ = ["Engine"]


class Engine:
    """Runs many requests step by step, each with its own drafter, draft length and sampling parameters.

    Not for use from several threads at once.

    Args:
        model: the target.
        cache: its cache; the engine is its only user beside drafters that work on target rows.
        drafters: by name, in order of preference; a request that names none is drafted for by all that go together
            (see `Drafting.plan`). May be empty.
        vocabulary: what the tokens mean.
        eos_ids: ids that end generation unless a request ignores them.
        max_model_len: most tokens of a request, prompt and output.
        num_speculative_tokens: per drafter name, most draft tokens a step unless the request says less or more.
        verification: per drafter name, the rule its drafts are verified by: "coupled" (also where none is named),
            "standard" or "block".
        disable_by_batch_size: per drafter name, most running requests beside which it is asked; no limit where none
            is named.
        controller: says how much is drafted; None: as much as is possible.
        max_num_seqs: most requests side by side; further ones wait.
        max_num_batched_tokens: most rows a step.
        max_logprobs: most log probabilities a token that a request may ask for; -1 for no limit.
        enable_prefix_caching: whether rows of requests that have gone are kept for those that begin with the same
            tokens; only for a model whose weights never change.
        weight_bytes: memory of the target's weights, for the statistics.
        before_step: called before every step.
    """

    def __init__(
        self,
        model: TargetModel,
        cache: Cache,
        drafters: Mapping[str, Drafter],
        *,
        vocabulary: Vocabulary,
        eos_ids: Iterable[int],
        max_model_len: int,
        num_speculative_tokens: Mapping[str, int],
        verification: Mapping[str, str] | None = None,
        disable_by_batch_size: Mapping[str, int] | None = None,
        controller: Controller | None = None,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 512,
        max_logprobs: int = -1,
        enable_prefix_caching: bool = False,
        weight_bytes: int = 0,
        before_step: Callable[[], None] = lambda: None,
    ) -> None:
        self.model = model
        self.cache = cache
        self.drafting = Drafting(
            drafters, num_speculative_tokens, model.vocab_size, verification or {}, trees=model.takes_trees
        )
        self.steering = Steering(
            self.drafting, controller or FixedController(), disable_by_batch_size or {}, torch.get_num_threads
        )
        self._vocabulary = vocabulary
        self._preparing = Preparing(
            vocabulary,
            self.drafting,
            eos_ids=frozenset(eos_ids),
            max_logprobs=max_logprobs,
            max_len=min(max_model_len, cache.capacity, cache.free_rows),  # one request always fits
        )
        self._weight_bytes = weight_bytes
        self._before_step = before_step
        self._num_rows = cache.free_rows
        self._prefixes = Prefixes(cache, enabled=enable_prefix_caching, every_row=self.drafting.every_row)
        self._scheduler = Scheduler(
            cache,
            self._prefixes,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            limits=self.steering,
        )
        self._requests: dict[int, Request] = {}
        self._ids = itertools.count()
        self._seconds: dict[str, float] = {}
        self._stepping = False
        self._committing: Request | None = None
        self._outbox: list[StepOutput] = []  # outlives a step that is interrupted

    # Requests come and go between steps.

    def prepare(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        speculation: SpeculationParams | None = None,
        *,
        number: int = 0,
        tenant: str = "",
    ) -> Request:
        """Checks what is asked for and makes a request of it; nothing is queued yet.

        Args:
            prompt_token_ids: at least one id.
            params: resolved (no None among temperature, top_p and top_k). Its n is the caller's business.
            speculation: None follows the engine.
            number: which of the caller's n choices this is.
            tenant: whose it is: drafts for one tenant never come from the outputs of another.

        Raises:
            InvalidPrompt: empty, too long, or with an id outside the vocabulary.
            InvalidParameter: an unknown drafter, an id outside the vocabulary, or a contradiction.
        """
        return self._preparing.request(next(self._ids), prompt_token_ids, params, speculation, number, tenant)

    def submit(self, request: Request) -> int:
        """Queues a prepared request. Returns its id."""
        self._requests[request.id] = request
        self._scheduler.add(request)
        return request.id

    def abort(self, request_id: int) -> None:
        """Ends a request at once; it gives no further output. Unknown or finished ids are ignored."""
        request = self._requests.pop(request_id, None)
        if request is None or request.finish_reason is not None:
            return
        if self._scheduler.remove(request):
            self.drafting.release(request)
        self.steering.release(request)

    def replace_drafter(self, name: str, drafter: Drafter, relative_cost: float | None = None) -> None:
        """Puts another drafter in the place of a loaded one, between two steps.

        Running requests that it drafts for get a place anew in the next step: with the rows that were computed for
        them, or computing them again where the new drafter observes states, of which it has seen none: kept rows of
        others are given up as well then, for whoever reused them would be drafted for blindly. No token changes.

        The old drafter is let go of, and what was learnt of it is forgotten.

        Args:
            name: of the old one.
            drafter: the new one, which nobody else uses.
            relative_cost: of its pass over the target's, a first guess.

        Raises:
            InvalidParameter: no such drafter is loaded.
            OutpaceError: a step is under way.
        """
        if self._stepping:
            raise OutpaceError("the engine is in the middle of a step: a drafter is replaced between two")
        if name not in self.drafting.drafters:
            loaded = ", ".join(self.drafting.drafters) or "none"
            raise InvalidParameter(f"drafter {name!r} cannot be replaced: loaded are {loaded}")
        drafted = [request for request in self._scheduler.running if name in request.plan.drafters]
        self._scheduler.recompute(drafted)
        for request in drafted:
            self.drafting.release(request)
        if drafter.needs.aux_layers:
            self._prefixes.clear()
        self.drafting.drafters[name] = drafter
        self._prefixes.observed_by(self.drafting.every_row)
        self.steering.controller.forget(name, relative_cost)

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
            raise RequestFailed(request.error)
        return result_of(request)

    # The step.

    def step(self) -> list[StepOutput]:
        """Computes one pass of the target and returns what it added to each request; empty if there is none.

        If anything is raised on the way (an interrupt, say), nobody stays half-computed: running requests give up their
        rows and are computed again by the next step; one that was just taking in its tokens ends with an error.

        Raises:
            OutpaceError: a step is under way: a logits processor must not generate with the engine that calls it.
        """
        if self._stepping:
            raise OutpaceError("the engine is in the middle of a step: a logits processor cannot generate with it")
        self._stepping = True
        self._seconds = {}
        began = time.perf_counter()
        try:
            self._before_step()
            blocks = self._advance()
        except BaseException:
            self._recover()
            raise
        finally:
            self._stepping = False
        self._emit(blocks, began)
        self.steering.observe(blocks, time.perf_counter() - began)
        outputs, self._outbox = self._outbox, []
        return outputs

    def _recover(self) -> None:
        """After a step that was cut off: who was taking in tokens ends, who had ended is reported, the others go on."""
        self.steering.abandon()
        torn, self._committing = self._committing, None
        if torn is not None:
            torn.fail("interrupted while its tokens were taken in: ask again")
        for request in self._scheduler.recompute_all():
            self.drafting.release(request)
        for request in self._requests.values():
            if request.finish_reason and not request.reported:
                self._scheduler.remove(request)
                self.steering.release(request)
                self._report(request, None)

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
            drafts = self.steering.propose(plan.turns, plan.free_rows, len(self._scheduler.running))
        with self._station("pack"):
            pack, blocks = build_pack(plan.turns, drafts, self.drafting.aux_layers)
        with self._station("forward"):
            result = self.model.forward(pack, self.cache)
        with self._station("verify"):
            verified = verify_blocks(blocks, result.logits)
        with self._station("logprobs"):
            logprobs = self._logprobs(blocks, verified, result.logits)
        with self._station("commit"):
            self.steering.verified(blocks, [None if found is None else found.verdict for found in verified])
            self._commit(blocks, verified, logprobs, result)
        return blocks

    def _logprobs(
        self, blocks: Sequence[Block], verified: Sequence[Verified | None], logits: torch.Tensor
    ) -> list[list[TokenLogprobs] | None]:
        """Of the tokens each block is about to commit, where asked for; those of prompts are booked right away."""
        text = self._vocabulary.token_text
        logprobs: list[list[TokenLogprobs] | None] = [None] * len(blocks)
        for index, (block, found) in enumerate(zip(blocks, verified, strict=True)):
            request = block.turn.request
            try:
                request.prompt_logprobs += prompt_logprobs(block, logits, text)
                if found is not None:
                    logprobs[index] = output_logprobs(block, found.verdict, logits, text)
            except OutpaceError as error:
                request.fail(str(error))
        return logprobs

    def _commit(
        self,
        blocks: Sequence[Block],
        verified: Sequence[Verified | None],
        logprobs: Sequence[list[TokenLogprobs] | None],
        result: ForwardResult,
    ) -> None:
        """Appends what was kept, ends requests, rolls the cache back, and tells the drafters."""
        going_on: list[tuple[Block, int, tuple[int, ...]]] = []
        for block, found, likely in zip(blocks, verified, logprobs, strict=True):
            request = block.turn.request
            before = len(request.token_ids)
            self._committing = request
            accepted = () if found is None or request.error is not None else _append(block, found, likely)
            self._committing = None
            self._keep_rows(request, request.num_computed + block.turn.num_tokens, accepted)
            drafter, draft = self.steering.drafter_of(request), block.draft
            request.stats.count(drafter, len(draft), len(accepted), draft.depth)
            if request.finish_reason:
                request.stats.memory = self.memory()
                self._scheduler.remove(request)
                self.drafting.release(request)
                continue
            assert request.lane is not None
            self.cache.truncate(request.lane, request.num_computed)
            going_on.append((block, len(request.token_ids) - before, accepted))
        self.drafting.observe(going_on, result)

    def _keep_rows(self, request: Request, first: int, accepted: tuple[int, ...]) -> None:
        """Books what was computed; of a draft, whose rows begin at `first`, the path kept moves to the front."""
        if accepted and accepted[-1] >= len(accepted):
            assert request.lane is not None
            self.cache.compact(request.lane, first, [first + node for node in accepted])
        request.num_computed = first + len(accepted)

    def _emit(self, blocks: Sequence[Block], began: float) -> None:
        """Books times and puts out the text that can be shown."""
        now = time.perf_counter()
        for block in blocks:
            request, stats = block.turn.request, block.turn.request.stats
            stats.steps += 1
            for station, seconds in self._seconds.items():
                stats.station_seconds[station] = stats.station_seconds.get(station, 0.0) + seconds
            if request.first_step_at is None:
                request.first_step_at = began
            if request.num_output_tokens == 0:
                self._report(request, (request.num_computed, request.num_prompt_tokens))
                continue
            if request.first_token_at is None:
                request.first_token_at = now
                stats.prefill_seconds = now - request.first_step_at
                stats.decode_tokens = -request.num_output_tokens
            if request.finish_reason:
                stats.decode_seconds = now - request.first_token_at
                stats.decode_tokens += request.num_output_tokens
            self._report(request, None)

    def _report(self, request: Request, prefill: tuple[int, int] | None) -> None:
        ended = request.finish_reason is not None
        request.reported = ended
        self._outbox.append(StepOutput(request.id, request.text.release(final=ended), prefill, request.finish_reason))

    # Books.

    @property
    def free_rows(self) -> int:
        """Rows of the cache that no running request holds: free ones and those of kept prefixes."""
        return self.cache.free_rows + self._prefixes.num_rows

    @property
    def prefix_cache_queries(self) -> int:
        """Prompt tokens so far of requests that were allowed to reuse rows, each request counted once."""
        return self._prefixes.queries

    @property
    def prefix_cache_hits(self) -> int:
        """Those of them whose rows had been computed for another request."""
        return self._prefixes.hits

    def clear_prefixes(self) -> None:
        """Gives up all kept rows; running requests go on."""
        self._prefixes.clear()

    def memory(self) -> dict[str, int]:
        """Bytes held by the target's weights, the drafters (weights, caches, indices) and the target's cache.

        The last includes kept prefixes.
        """
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
        self._prefixes.check_integrity(self._scheduler.running)
        if not self._scheduler.running:
            assert self.free_rows == self._num_rows, (self.free_rows, self._num_rows)

    @contextmanager
    def _station(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._seconds[name] = time.perf_counter() - began


def _append(block: Block, found: Verified, logprobs: Sequence[TokenLogprobs] | None) -> tuple[int, ...]:
    """Commits the accepted path and the bonus token, up to an end inside the block. Returns the nodes kept."""
    request, draft, verdict = block.turn.request, block.draft, found.verdict
    likely = iter(logprobs or ())
    for count, node in enumerate(verdict.accepted, 1):
        if request.append(draft.ids[node], draft.sources[node], next(likely, None)):
            return verdict.accepted[:count]
    if found.error is not None:
        request.fail(found.error)
    else:
        request.append(verdict.bonus, None, next(likely, None))
    return verdict.accepted
