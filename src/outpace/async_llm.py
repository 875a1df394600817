"""The asynchronous front: one thread steps the engine, coroutines feed it and read from it.

llm = AsyncLLM(build(EngineConfig(model="smollm2-135m"), [SpeculativeConfig()]))
async with llm:
    prepared = await llm.prepare("Once upon a time", SamplingParams(max_tokens=64))
    async with aclosing(llm.stream(prepared)) as chunks:
        async for chunk in chunks:
            print(chunk.text, end="")
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from outpace.build import Built
from outpace.config import SpeculativeConfig
from outpace.decisions import ControlReport
from outpace.engine.engine import Engine
from outpace.engine.outputs import RequestOutput, StreamChunk
from outpace.engine.request import Request
from outpace.engine_thread import EngineThread, Job
from outpace.errors import InvalidParameter, OutpaceError, QueueFull, Unavailable
from outpace.models.tokenizer import Tokenizer
from outpace.params import SamplingParams, SpeculationParams
from outpace.prompts import Messages, encode_prompt, is_conversation, prepare_choices
from outpace.step_report import FinishedRequest, Load, StepReport, VerifiedDraft

__all__ = ["AsyncLLM", "FinishedRequest", "Load", "Prepared", "StepReport", "VerifiedDraft"]

_PREPARING_THREADS = 2
"""Two, so that one very long prompt does not hold up the others; no more, because they take time from the steps."""
_OF_ENGINE = ("num_speculative_tokens", "rejection_sample_method", "disable_by_batch_size", "tree_width")
"""Settings of drafters that the engine goes by, so that another drafter does not change them."""
_SHORTEST_RETRY, _LONGEST_RETRY = 1.0, 60.0
"""Seconds."""


@dataclass(slots=True, eq=False)
class Prepared:
    """A request that was checked and encoded, to be streamed or completed once.

    Args:
        prompt_token_ids: as they will be computed, after truncation.
        num_choices: how many answers were asked for.
    """

    prompt_token_ids: list[int]
    num_choices: int
    _requests: list[Request] = field(repr=False)
    _prompt: str | None = field(repr=False)
    _owner: AsyncLLM = field(repr=False)
    _queued: bool = False


class AsyncLLM:
    """Answers many callers of one event loop with one engine.

    Args:
        built: an engine that nobody else uses, with its tokenizer and defaults.
        max_waiting: most choices that may wait for a place; a request that would be one more is refused.

    Raises:
        InvalidParameter: max_waiting is negative.
    """

    def __init__(self, built: Built, *, max_waiting: int = 256) -> None:
        if max_waiting < 0:
            raise InvalidParameter(f"max_waiting={max_waiting} is not possible: it must be at least 0")
        self.built = built
        self.tokenizer: Tokenizer = built.tokenizer
        self._max_waiting = max_waiting
        self._listeners: list[Callable[[StepReport], None]] = []
        self._pool = ThreadPoolExecutor(_PREPARING_THREADS, thread_name_prefix="outpace-prepare")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: EngineThread | None = None
        self._kept = False
        self._refusal: str | None = None
        self._sent = 0
        self._open_streams = 0
        self._no_streams = asyncio.Event()

    @property
    def sampling_defaults(self) -> SamplingParams:
        """What parameters left at None mean here."""
        return SamplingParams().resolved(self.built.defaults)

    @property
    def failure(self) -> str | None:
        """Why no requests are taken (not started, draining, closed, stopped by a fault); None while they are."""
        if self._refusal is not None:
            return self._refusal
        return "the engine was not started" if self._thread is None else self._thread.ended

    # Life.

    async def start(self) -> None:
        """Starts the thread that steps the engine. All calls are to come from the event loop that runs this one.

        Raises:
            OutpaceError: it was started before, also if it was closed since.
        """
        if self._thread is not None or self._refusal is not None:
            raise OutpaceError("this AsyncLLM was started before: it can be started once, make another one")
        self._loop = asyncio.get_running_loop()
        self._thread = EngineThread(self.built.engine, self._loop, self._listeners)
        # Whoever forgets to close it, or is interrupted on the way, leaves no thread behind when the interpreter ends.
        weakref.finalize(self, _stop, self._thread)

    async def drain(self, seconds: float) -> None:
        """Takes no new requests, and waits until those accepted are answered, or so many seconds have passed."""
        self._check_loop()
        self._refusal = self._refusal or "the engine is shutting down: no new requests are taken"
        with suppress(asyncio.TimeoutError):
            if self._open_streams:
                await asyncio.wait_for(self._no_streams.wait(), seconds)

    async def close(self) -> None:
        """Ends the thread after the step it is in. Streams that are not finished raise. Closing again does nothing."""
        if self._thread is not None:
            self._check_loop()
        self._refusal = "the engine was closed"
        self._pool.shutdown(wait=False)
        if self._thread is not None:
            self._thread.stop()
            await asyncio.to_thread(self._thread.join)
            if not self._kept:
                self._kept = True
                await asyncio.to_thread(self.built.close)

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    # Requests.

    async def prepare(
        self,
        prompt: str | Sequence[int] | Messages,
        params: SamplingParams | None = None,
        speculation: SpeculationParams | None = None,
        *,
        template: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tenant: str = "",
    ) -> Prepared:
        """Encodes and checks a request in a thread of its own; nothing is queued.

        Args:
            prompt: text, token ids, or the messages of a conversation, which go through the chat template.
            params: None takes the defaults.
            speculation: None follows the engine.
            template: what the chat template takes, as `add_generation_prompt` or `enable_thinking`.
            tools: functions that the model may call, for the chat template.
            tenant: whose request it is: what one tenant was answered never drafts for another.

        Raises:
            BadInput: the prompt or a parameter is not possible.
            Unavailable: the engine was closed.
        """
        if self._refusal is not None:
            raise Unavailable(self._refusal)
        work = (prompt, params, speculation, template, tools, tenant)
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._prepare, *work)

    async def stream(self, prepared: Prepared) -> AsyncGenerator[StreamChunk, None]:
        """Yields what each step brings, all choices side by side; the last chunk has the whole output.

        The request is queued when the first chunk is asked for. Leaving early (`aclose`, best by `contextlib.aclosing`,
        or cancelling the task) ends it before the next step.

        Raises:
            QueueFull: too many wait already.
            Unavailable: the engine was not started, is draining, closed, or was stopped by a fault.
            RequestCutOff: the engine was closed before the request was complete.
            RequestFailed: the request failed inside the engine.
            OutpaceError: it was queued before, is another AsyncLLM's, or this is another event loop.
        """
        thread, job = self._queue(prepared)
        self._open_streams += 1
        self._no_streams.clear()
        try:
            while True:
                item = await job.mail.get()
                if isinstance(item, OutpaceError):
                    raise item
                yield item
                if item.output is not None:
                    return
        finally:
            thread.abort(job)  # ignored if it has ended
            self._open_streams -= 1
            if not self._open_streams:
                self._no_streams.set()

    async def complete(self, prepared: Prepared) -> RequestOutput:
        """The whole output. Cancelling the task ends the request before the next step. Raises what `stream` raises."""
        async with aclosing(self.stream(prepared)) as chunks:
            async for chunk in chunks:
                if chunk.output is not None:
                    return chunk.output
        raise AssertionError("a stream ended without an output")

    # Drafters.

    async def replace_drafter(self, settings: SpeculativeConfig) -> None:
        """Loads a drafter in a thread of its own, then puts it in the place of the loaded one of the same method.

        Running requests go on with it and keep their tokens. If anything is raised, the old one drafts on.

        Args:
            settings: of the new drafter. How many tokens it drafts, by which rule they are verified, how wide its trees
                are and with how many requests it is asked are the engine's settings, and stay those of the old one.

        Raises:
            OutpaceError: no drafter of this method is loaded, or the new one cannot be read, does not fit this model,
                or would not fit into memory.
            Unavailable: the engine was not started, or has ended.
        """
        self._check_loop()
        thread, make = self._thread, self.built.make_drafter
        if thread is None or self.failure is not None:
            raise Unavailable(self.failure or "the engine was not started: await start() first")
        loaded = {item.method: item for item in self.built.speculative}
        if make is None or settings.method not in loaded:
            raise InvalidParameter(
                f"no drafter of method {settings.method!r} is loaded that could be replaced; loaded: "
                f"{', '.join(loaded) or 'none'}"
            )
        old = loaded[settings.method]
        settings = replace(settings, **{name: getattr(old, name) for name in _OF_ENGINE})
        new = await asyncio.to_thread(make, settings)

        def put_in_place(engine: Engine) -> None:
            engine.replace_drafter(settings.method, new.drafter, new.relative_cost)
            self.built = self.built.with_drafter(new.settings)

        await asyncio.wrap_future(thread.call(put_in_place))

    # Numbers.

    async def memory(self) -> dict[str, int]:
        """Bytes that target, drafters and cache hold, after the step that is under way; see `Engine.memory`.

        Raises:
            Unavailable: the engine was not started, or has ended.
        """
        if self._thread is None:
            raise Unavailable("the engine was not started: await start() first")
        return await asyncio.wrap_future(self._thread.call(Engine.memory))

    def load(self) -> Load:
        """How busy the engine is, as of the last step; may be called from any thread."""
        if self._thread is None:
            return Load(cache_tokens=self.built.engine.free_rows)
        seen = self._thread.snapshot
        if self._thread.ended is not None:
            return seen.load
        return replace(seen.load, waiting=seen.load.waiting + self._sent - seen.received)

    def control(self) -> ControlReport:
        """What drafts brought so far, and who is not asked for them; may be called from any thread."""
        seen = None if self._thread is None else self._thread.snapshot.control
        return self.built.engine.steering.controller.report() if seen is None else seen

    def on_step(self, listener: Callable[[StepReport], None]) -> None:
        """From now on calls `listener` with the report of every step, in the engine's thread: it should be quick."""
        self._listeners.append(listener)

    # Inside.

    def _prepare(
        self,
        prompt: str | Sequence[int] | Messages,
        params: SamplingParams | None,
        speculation: SpeculationParams | None,
        template: Mapping[str, Any] | None,
        tools: Sequence[Mapping[str, Any]] | None,
        tenant: str,
    ) -> Prepared:
        if is_conversation(prompt):
            ids = self._encode_chat(prompt, template or {}, tools)  # type: ignore[arg-type]
        elif template or tools:
            raise InvalidParameter("a chat template and tools go with messages, not with a plain prompt")
        else:
            ids = encode_prompt(self.tokenizer, prompt)
        most = self._max_waiting + self.built.config.max_num_seqs
        if isinstance(params, SamplingParams) and params.n > most:
            raise InvalidParameter(
                f"n={params.n} is not possible: at most {most} choices can be computed or wait at a time here"
            )
        requests = prepare_choices(self.built, ids, params, speculation, tenant)
        text = prompt if isinstance(prompt, str) else None
        return Prepared(list(requests[0].token_ids), len(requests), requests, text, self)

    def _encode_chat(
        self, messages: Messages, template: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] | None
    ) -> list[int]:
        taken = sorted({"messages", "self", "tools"} & template.keys())
        if taken:
            raise InvalidParameter(f"{taken[0]!r} is not possible among the chat template's own parameters")
        extra = {**template, **({"tools": list(tools)} if tools else {})}
        return self.tokenizer.encode_chat(messages, **extra)

    def _queue(self, prepared: Prepared) -> tuple[EngineThread, Job]:
        """Hands a request to the engine's thread."""
        if prepared._owner is not self:
            raise OutpaceError("the request was prepared by another AsyncLLM: prepare it here")
        if prepared._queued:
            raise OutpaceError("the request was queued before: prepare it again")
        self._check_loop()
        thread = self._thread
        if self._refusal is not None or thread is None:
            raise Unavailable(self._refusal or "the engine was not started: await start() first")
        self._check_room(thread, prepared.num_choices)
        job = Job(prepared._requests, prepared._prompt)
        thread.submit(job)
        prepared._queued = True
        self._sent += prepared.num_choices
        return thread, job

    def _check_loop(self) -> None:
        if self._loop is not None and asyncio.get_running_loop() is not self._loop:
            raise OutpaceError("this AsyncLLM was started in another event loop: make one for each")

    def _check_room(self, thread: EngineThread, num_choices: int) -> None:
        """A place that is free now counts, if nobody waits for it: a request that can run at once never waits."""
        seen, load = thread.snapshot, self.load()
        places = self.built.config.max_num_seqs
        free = 0 if seen.load.waiting else max(0, places - load.running)
        waiting = load.waiting + num_choices - free
        if waiting > self._max_waiting:
            raise QueueFull(
                f"{waiting} requests would wait with this one, and at most {self._max_waiting} may: ask again later",
                retry_after=min(_LONGEST_RETRY, max(_SHORTEST_RETRY, (seen.seconds_per_request or 0.0) / places)),
            )


def _stop(thread: EngineThread) -> None:
    thread.stop()
    thread.join()
