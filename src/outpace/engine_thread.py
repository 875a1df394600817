"""The thread that steps an engine for the coroutines of one event loop.

Nobody else touches the engine. What is asked for comes through a queue, read between two steps and waited for when
there is nothing to do; what a step brings goes back in one call into the event loop, whatever the number of requests.
So a step never waits for the event loop, nor the event loop for a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from outpace.decisions import ControlReport
from outpace.engine.engine import Engine
from outpace.engine.outputs import RequestOutput, StepOutput, StreamChunk
from outpace.engine.request import Request
from outpace.errors import OutpaceError, RequestCutOff, RequestFailed, Unavailable
from outpace.step_report import FinishedRequest, Load, StepBooks, StepReport

__all__ = ["EngineThread", "Job"]

T = TypeVar("T")

log = logging.getLogger(__name__)

_SMOOTHING = 0.2
"""Share of the newest request in the mean time a request takes."""

_CONTROL_INTERVAL = 0.5
"""Seconds between two looks at what drafts brought."""


@dataclass(slots=True, eq=False)
class Job:
    """What one caller asked for: the choices of one request, and where their chunks go.

    Args:
        choices: prepared requests, one for each choice.
        prompt: the text they were asked with, if it was text.
        mail: chunks, and an error if it fails; nothing comes after the last chunk or an error. The event loop's.
        arrived: `time.perf_counter` when it was queued.
        going_on: ids of the choices that have not ended. The engine thread's.
    """

    choices: Sequence[Request]
    prompt: str | None
    mail: asyncio.Queue[StreamChunk | OutpaceError] = field(default_factory=asyncio.Queue)
    arrived: float = field(default_factory=time.perf_counter)
    going_on: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the event loop may know of the engine: replaced as a whole, so it always fits together.

    Args:
        load: after the last step.
        received: choices the thread has taken from its queue so far.
        seconds_per_request: how long a request has a place, on average; None before the first one.
        control: what drafts brought so far, at most half a second old while there is work.
    """

    load: Load
    received: int = 0
    seconds_per_request: float | None = None
    control: ControlReport | None = None


class _LoopGone(Exception):
    """The event loop was closed: nobody is left to answer."""


class EngineThread:
    """Runs an engine in a thread of its own until it is stopped, or a fault leaves the engine unusable.

    Args:
        engine: without work, and used by nobody else from now on.
        loop: the event loop of all callers.
        listeners: called with the report of every step, in this thread; may grow. One that raises is reported once,
            and harms nothing.
    """

    def __init__(
        self, engine: Engine, loop: asyncio.AbstractEventLoop, listeners: Sequence[Callable[[StepReport], None]]
    ) -> None:
        self._engine = engine
        self._loop = loop
        self._listeners = listeners
        self._warned: set[int] = set()
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._gate = threading.Lock()
        self._ended: str | None = None
        self._open: set[Job] = set()  # all whose callers wait for mail, those in the queue included
        self._calls: set[Future[Any]] = set()
        self._jobs: dict[int, tuple[Job, Request]] = {}
        self._books = StepBooks(engine.free_rows)
        self._finished: list[FinishedRequest] = []
        self._left: list[Job] = []
        self._idle_steps = 0
        self._received = 0
        self._mean: float | None = None
        self._control, self._control_at = engine.steering.controller.report(), 0.0
        self.snapshot = Snapshot(self._books.load(engine.free_rows), control=self._control)
        # As a daemon it does not hold up an interpreter that ends without `stop`; who starts it has to see to that.
        self._thread = threading.Thread(target=self._run, name="outpace-engine", daemon=True)
        self._thread.start()

    # For other threads.

    @property
    def ended(self) -> str | None:
        """Why no further requests are taken; None while they are."""
        return self._ended

    def submit(self, job: Job) -> None:
        """Queues a job.

        Raises:
            Unavailable: the thread has ended.
        """
        with self._gate:
            if self._ended is not None:
                raise Unavailable(self._ended)
            self._open.add(job)
            self._commands.put(partial(self._admit, job))

    def abort(self, job: Job) -> None:
        """Ends a job before the next step. One that has ended is left alone."""
        self._commands.put(partial(self._give_up, job))

    def call(self, work: Callable[[Engine], T]) -> Future[T]:
        """Does something with the engine before its next step, in its thread: it should be quick.

        Raises:
            Unavailable: the thread has ended. The future raises it too, if it ends before.
        """
        future: Future[T] = Future()

        def do() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work(self._engine))
                except Exception as error:  # the caller's, and no reason to end anybody's request
                    future.set_exception(error)

        with self._gate:
            if self._ended is not None:
                raise Unavailable(self._ended)
            self._calls.add(future)
            self._commands.put(do)
        future.add_done_callback(self._calls.discard)
        return future

    def stop(self) -> None:
        """Ends the thread after the step it is in; jobs that are not finished fail. Does not wait."""
        self._commands.put(None)

    def join(self) -> None:
        """Waits until the thread has ended; returns at once in the thread itself."""
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # In the thread.

    def _run(self) -> None:
        reason = "the engine was closed"
        error_type: type[RequestFailed] = RequestCutOff
        try:
            while self._take_commands():
                if self._engine.has_work:
                    self._step()
        except _LoopGone:
            log.warning("the event loop was closed before the engine: its requests were ended")
        except BaseException as error:  # whatever it is, nobody may go on waiting for this thread
            reason = f"the engine was stopped by a fault ({_described(error)}): start it again"
            error_type = RequestFailed
            log.exception("the engine was stopped by a fault")
        self._end(reason, error_type)

    def _take_commands(self) -> bool:
        """Does what was asked for since the last step, waiting if there is no work. False if it is to stop."""
        wait = not self._engine.has_work
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                break
            if command is None:
                return False
            command()
            wait = False
        if self._left:
            self._book(0.0, (), ())
        return True

    def _admit(self, job: Job) -> None:
        self._received += len(job.choices)
        for request in job.choices:
            job.going_on.add(request.id)
            self._jobs[request.id] = (job, request)
            self._books.add(request, job.arrived)
            self._engine.submit(request)

    def _step(self) -> None:
        began = time.perf_counter()
        events: list[tuple[Job, StreamChunk | OutpaceError]] = []
        try:
            outputs = self._engine.step()
            self._idle_steps = 0 if outputs else self._idle_steps + 1
            if self._idle_steps > 1:
                # Once is possible: a request that pushed itself out comes back in the next step.
                raise RuntimeError("two steps in a row computed nothing")
        except BaseException as error:  # a processor of a caller may raise anything
            self._fail_step(error)
            outputs = []
        for output in outputs:
            self._sort(output, events)
        self._book(time.perf_counter() - began, outputs, events)

    def _sort(self, step: StepOutput, events: list[tuple[Job, StreamChunk | OutpaceError]]) -> None:
        """Turns what a step brought to one choice into mail for its job."""
        found = self._jobs.get(step.request_id)
        if found is None:  # another choice has failed in this step, and the job with it
            return
        job, request = found
        if request.error is not None:
            self._retire(job, None)
            events.append((job, RequestFailed(request.error)))
            return
        output = None
        if step.finish_reason:
            job.going_on.remove(request.id)
            if not job.going_on:
                output = RequestOutput.joined([self._engine.take(choice.id) for choice in job.choices], job.prompt)
                self._retire(job, output)
        if step.pieces or step.prefill or step.finish_reason:
            events.append((job, StreamChunk.of(step, request.number, output, request.stop_reason)))

    def _fail_step(self, error: BaseException) -> None:
        """Ends the requests a failed step was working on, at least one, so that its cause cannot come back for ever.

        Raises:
            AssertionError: the engine's books no longer agree; then nothing can be computed any more.
        """
        log.error("a step failed; the requests in it are ended, the others go on", exc_info=error)
        self._idle_steps = 0
        jobs = {id(job): job for job, _ in (self._jobs[request.id] for request in self._books.took_part())}
        message = f"the engine failed while it was computing this request: {_described(error)}"
        self._send([(job, RequestFailed(message)) for job in jobs.values()])
        for job in jobs.values():
            self._retire(job, None)
        self._engine.check_integrity()

    def _give_up(self, job: Job) -> None:
        if job.going_on:
            self._retire(job, None)

    def _retire(self, job: Job, output: RequestOutput | None) -> None:
        """Takes a job out of all books: it is complete (`output`), has failed, or is given up."""
        for request in job.choices:
            self._engine.abort(request.id)  # ignores those that were taken
            self._jobs.pop(request.id, None)
        job.going_on.clear()
        finished = FinishedRequest.of(output, job.choices, job.prompt, job.arrived)
        self._finished.append(finished)
        self._left.append(job)
        if output is not None:
            seconds = finished.total_seconds - (finished.queue_seconds or 0.0)
            self._mean = seconds if self._mean is None else self._mean + _SMOOTHING * (seconds - self._mean)

    def _book(
        self, seconds: float, outputs: Sequence[StepOutput], events: Sequence[tuple[Job, StreamChunk | OutpaceError]]
    ) -> None:
        """Books what happened, and tells the listeners, then the callers.

        In this order, so that a caller who has its last chunk finds its place free and itself in the numbers.
        """
        left, self._left = self._left, []
        finished, self._finished = self._finished, []
        leaving = [request for job in left for request in job.choices]
        prefix_cache = (self._engine.prefix_cache_queries, self._engine.prefix_cache_hits)
        report = self._books.step(seconds, outputs, finished, leaving, self._engine.free_rows, prefix_cache)
        if seconds or not self._engine.has_work:  # requests that were only just admitted do not count as waiting yet
            self.snapshot = Snapshot(report.load, self._received, self._mean, self._control_report())
        for listener in tuple(self._listeners):
            try:
                listener(report)
            except Exception:  # code of others: it must not end anybody's request
                if id(listener) not in self._warned:
                    self._warned.add(id(listener))
                    log.exception("a listener to steps failed; further failures of it are not reported")
        if events:
            self._send(events)
        self._open.difference_update(left)

    def _control_report(self) -> ControlReport:
        now = time.perf_counter()
        if now - self._control_at >= _CONTROL_INTERVAL or not self._engine.has_work:
            self._control, self._control_at = self._engine.steering.controller.report(), now
        return self._control

    def _send(self, events: Sequence[tuple[Job, StreamChunk | OutpaceError]]) -> None:
        try:
            self._loop.call_soon_threadsafe(_deliver, events)
        except RuntimeError as error:
            if self._loop.is_closed():
                raise _LoopGone from error
            raise

    def _end(self, reason: str, error_type: type[RequestFailed]) -> None:
        """Takes nothing more, and lets nobody wait: all jobs fail, those still in the queue too."""
        with self._gate:
            self._ended = reason
        for call in list(self._calls):
            if call.set_running_or_notify_cancel():
                call.set_exception(Unavailable(reason))
        jobs = list(self._open)
        with contextlib.suppress(_LoopGone):
            self._send([(job, error_type(reason)) for job in jobs])
        try:
            for job in jobs:
                self._retire(job, None)
            self._book(0.0, (), ())
        except Exception:  # after a fault the engine's books may be damaged; the callers know already
            log.exception("the engine could not be cleared")


def _deliver(events: Sequence[tuple[Job, StreamChunk | OutpaceError]]) -> None:
    """Runs in the event loop."""
    for job, item in events:
        job.mail.put_nowait(item)


def _described(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
