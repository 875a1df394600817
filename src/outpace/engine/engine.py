"""The step loop.

    schedule -> draft -> pack -> forward -> verify -> commit -> emit

The engine knows ports, not classes: a model, a cache, and drafters by name (`outpace.protocols`). Rows are reserved
before drafting, so no draft is cut afterwards; drafting comes first in a step, so what the last step committed has
been shown before anybody waits for a guess. What belongs here is the order of the stations and the books of a
request; how a station works belongs to the station.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from outpace.engine.outputs import CompletionOutput, RequestOutput, StepOutput
from outpace.engine.pack import Block, build_pack
from outpace.engine.request import Request
from outpace.engine.scheduler import Scheduler, Turn
from outpace.engine.text import Detokenizer, TextBuilder
from outpace.errors import InvalidParameter, InvalidPrompt, OutpaceError
from outpace.params import SamplingParams, SpeculationParams
from outpace.protocols import Cache, Drafter, TargetModel
from outpace.sampling.choose import choose_rows
from outpace.types import Ask, Choice, Draft, ForwardResult, Observation, Verdict
from outpace.verify.clean import clean_draft, principal_chain
from outpace.verify.coupled import verify

__all__ = ["Engine"]

NO_DRAFT = Draft()


class Engine:
    """Runs many requests step by step, each with its own drafter, draft length and sampling parameters.

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
    ) -> None:
        self.model = model
        self.cache = cache
        self.drafters = dict(drafters)
        self.max_model_len = max_model_len
        self._detokenizer = detokenizer
        self._eos_ids = frozenset(eos_ids)
        self._num_speculative_tokens = dict(num_speculative_tokens)
        self._weight_bytes = weight_bytes
        self._aux_layers = tuple(sorted({i for d in self.drafters.values() for i in d.needs.aux_layers}))
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
        speculation = speculation or SpeculationParams()
        self._check_prompt(prompt_token_ids)
        limit = min(self.max_model_len, self.cache.capacity)
        if params.max_tokens is not None:
            limit = min(limit, len(prompt_token_ids) + params.max_tokens)
        drafter = self._drafter_of(speculation)
        most = speculation.num_speculative_tokens
        if most is None:
            most = self._num_speculative_tokens.get(drafter or "", 0)
        return Request(
            id=next(self._ids),
            token_ids=list(prompt_token_ids),
            num_prompt_tokens=len(prompt_token_ids),
            params=params,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            number=number,
            stop_ids=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_ids),
            max_total_tokens=limit,
            drafter=drafter if most else None,
            num_speculative_tokens=most,
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
        if request is not None and self._scheduler.remove(request):
            self._release_drafter(request)

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
        """Computes one pass of the target and returns what it added to each request."""
        self._seconds = {}
        began = time.perf_counter()
        with self._station("schedule"):
            plan = self._scheduler.schedule()
            for request in plan.preempted:
                self._release_drafter(request)
            for request in plan.admitted:
                self._start_drafter(request)
        if not plan.turns:
            return []
        with self._station("draft"):
            drafts = self._draft(plan.turns, plan.free_rows)
        with self._station("pack"):
            pack, blocks = build_pack(plan.turns, drafts, self._aux_layers)
        with self._station("forward"):
            result = self.model.forward(pack, self.cache)
        with self._station("verify"):
            verdicts = self._verify(blocks, result)
        with self._station("commit"):
            self._commit(blocks, verdicts, result)
        return self._emit(blocks, began)

    def _draft(self, turns: Sequence[Turn], free_rows: int) -> list[Draft]:
        """Asks each drafter once for all of its requests; what comes back is cut to what is legal and was asked for.

        A request about to get its first token is asked for without a row budget: a drafter that has to compute
        something first must not delay it.
        """
        drafts = [NO_DRAFT] * len(turns)
        groups: dict[tuple[str, bool], list[int]] = defaultdict(list)
        for index, turn in enumerate(turns):
            if turn.num_draft_tokens:
                assert turn.request.drafter is not None
                groups[turn.request.drafter, turn.num_tokens > 1].append(index)
        for (name, first_token), indices in groups.items():
            drafter = self.drafters[name]
            if first_token and drafter.needs.target_rows:
                continue
            asks = [_ask(turns[index]) for index in indices]
            proposed = drafter.propose(asks, 0 if first_token else free_rows)
            for index, draft in zip(indices, proposed, strict=True):
                drafts[index] = self._legal(draft, turns[index])
        return drafts

    def _legal(self, draft: Draft, turn: Turn) -> Draft:
        """A chain of real ids, no longer than asked, with nothing behind a token that ends generation."""
        vocab_size = self.model.vocab_size
        draft = principal_chain(clean_draft(draft, vocab_size=vocab_size, limit=turn.num_draft_tokens))
        for index, token in enumerate(draft.ids[:-1]):
            if token in turn.request.stop_ids:
                return clean_draft(draft, vocab_size=vocab_size, limit=index + 1)
        return draft

    def _verify(self, blocks: Sequence[Block], result: ForwardResult) -> list[Verdict | None]:
        """The target's own choice at every wanted row, then one walk per draft. None in the middle of a prefill."""
        choices = [choice for block in blocks for choice in _choices(block)]
        try:
            chosen = choose_rows(result.logits, choices)
        except OutpaceError:
            return self._verify_one_by_one(blocks, result)
        verdicts: list[Verdict | None] = []
        at = 0
        for block in blocks:
            own = chosen[at : at + block.num_choices]
            verdicts.append(verify(block.draft, own) if own else None)
            at += block.num_choices
        return verdicts

    def _verify_one_by_one(self, blocks: Sequence[Block], result: ForwardResult) -> list[Verdict | None]:
        """Some row has no valid choice (NaN logits): finds whose, and ends that request alone."""
        verdicts: list[Verdict | None] = []
        at = 0
        for block in blocks:
            logits = result.logits[at : at + block.num_choices]
            at += block.num_choices
            verdict = None
            if block.num_choices:
                try:
                    verdict = verify(block.draft, choose_rows(logits, _choices(block)))
                except OutpaceError as error:
                    block.turn.request.finish_reason, block.turn.request.error = "error", str(error)
            verdicts.append(verdict)
        return verdicts

    def _commit(self, blocks: Sequence[Block], verdicts: Sequence[Verdict | None], result: ForwardResult) -> None:
        """Appends what was kept, ends requests, rolls the cache back, and tells the drafters."""
        observations: dict[str, list[Observation]] = defaultdict(list)
        for block, verdict in zip(blocks, verdicts, strict=True):
            request = block.turn.request
            first_position = request.num_computed
            before = len(request.token_ids)
            num_accepted = 0
            request.num_computed += block.turn.num_tokens
            if verdict is not None:
                num_accepted = _append(request, block.draft, verdict)
                request.num_computed += num_accepted
            request.stats.count_draft(len(block.draft), num_accepted)
            if request.finish_reason:
                request.stats.memory = self.memory()
                self._scheduler.remove(request)
                self._release_drafter(request)
                continue
            assert request.lane is not None
            self.cache.truncate(request.lane, request.num_computed)
            if request.drafter is not None:
                rows = slice(block.begin, block.begin + request.num_computed - first_position)
                needs = self.drafters[request.drafter].needs.aux_layers
                observations[request.drafter].append(
                    Observation(
                        request_id=request.id,
                        token_ids=request.token_ids,
                        num_new_tokens=len(request.token_ids) - before,
                        draft=block.draft,
                        num_accepted=num_accepted,
                        first_position=first_position,
                        aux={layer: result.aux[layer][rows] for layer in needs},
                    )
                )
        for name, seen in observations.items():
            self.drafters[name].observe(seen)

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
            "drafter": sum(d.memory_bytes for d in self.drafters.values()),
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
        limit = min(self.max_model_len, self.cache.capacity)
        if not prompt_token_ids:
            raise InvalidPrompt("the prompt is empty: it must have at least one token")
        if len(prompt_token_ids) >= limit:
            raise InvalidPrompt(
                f"the prompt has {len(prompt_token_ids)} tokens and the context holds {limit}, output included: "
                f"shorten it to at most {limit - 1} tokens"
            )
        worst = max(prompt_token_ids, key=lambda i: abs(i - self.model.vocab_size / 2))
        if not 0 <= worst < self.model.vocab_size:
            raise InvalidPrompt(
                f"token id {worst} is not in the vocabulary: ids go from 0 to {self.model.vocab_size - 1}"
            )

    def _drafter_of(self, speculation: SpeculationParams) -> str | None:
        if not speculation.enabled or (speculation.method is None and not self.drafters):
            return None
        if speculation.method is None:
            return next(iter(self.drafters))
        if speculation.method not in self.drafters:
            raise InvalidParameter(
                f"speculation method {speculation.method!r} is not loaded; loaded: {', '.join(self.drafters) or 'none'}"
            )
        return speculation.method

    def _start_drafter(self, request: Request) -> None:
        if request.drafter is not None:
            self.drafters[request.drafter].start(request.id, request.token_ids, request.num_prompt_tokens)

    def _release_drafter(self, request: Request) -> None:
        if request.drafter is not None:
            self.drafters[request.drafter].release(request.id)


def _ask(turn: Turn) -> Ask:
    request = turn.request
    assert request.lane is not None
    return Ask(
        request_id=request.id,
        token_ids=request.token_ids,
        num_draft_tokens=turn.num_draft_tokens,
        params=request.params,
        seed=request.seed,
        number=request.number,
        lane=request.lane,
    )


def _choices(block: Block) -> list[Choice]:
    """What `choose` needs for the last committed token's row and each draft token's. Chains: depth = index."""
    if not block.num_choices:
        return []
    request = block.turn.request
    first = len(request.token_ids)
    return [Choice(request.params, request.seed, first + i, request.number) for i in range(block.num_choices)]


def _append(request: Request, draft: Draft, verdict: Verdict) -> int:
    """Commits the accepted path and the bonus token, up to an end inside the block. Returns accepted tokens kept."""
    for count, node in enumerate(verdict.accepted, 1):
        if request.append(draft.ids[node], draft.sources[node]):
            return count
    request.append(verdict.bonus, None)
    return len(verdict.accepted)
