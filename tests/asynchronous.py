"""An AsyncLLM over stand-ins, whose steps a test can hold and release one by one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from outpace.async_llm import AsyncLLM
from outpace.build import Built
from outpace.config import EngineConfig
from outpace.engine.engine import Engine
from outpace.engine.outputs import RequestOutput, StreamChunk
from outpace.models.decoder import RowPath
from outpace.models.probe import ProbeReport
from outpace.models.tokenizer import Tokenizer, TokenizerSettings
from outpace.params import SamplingDefaults, SamplingParams, SpeculationParams
from outpace.protocols import Cache, Drafter
from outpace.types import ForwardResult, Pack
from tests.engine.fakes import HistoryModel, TokenCache
from tests.engine.harness import make_engine
from tests.models.tiny_tokenizers import byte_level

T = TypeVar("T")
VOCAB = 300
"""More than the tokenizer has, so that encoded text can be computed."""
LONGEST_WAIT = 60.0
"""Seconds after which a test that waits for ever fails instead."""
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}{{ tools | length }}{% endif %}{{ mood }}"


class HeldModel(HistoryModel):
    """Can be held inside a step, and can be told to fail in one.

    Args:
        fails: (tokens of the pack) -> what to raise, or None.
    """

    def __init__(
        self, vocab_size: int = VOCAB, fails: Callable[[list[int]], BaseException | None] | None = None
    ) -> None:
        super().__init__(vocab_size, order=3)
        self.fails = fails or (lambda ids: None)
        self.free = threading.Semaphore(0)
        self.held = False
        self.inside = threading.Semaphore(0)
        self.lanes: list[list[int]] = []

    def hold(self) -> None:
        """From the next step on, every step waits for `go`."""
        self.held = True

    def go(self, steps: int = 1) -> None:
        """Lets so many steps be computed."""
        self.free.release(steps)

    def let_go(self) -> None:
        """No step waits any more."""
        self.held = False
        self.free.release()

    async def entered(self) -> None:
        """Waits until a further step is being computed (and held)."""
        assert await asyncio.to_thread(self.inside.acquire, timeout=LONGEST_WAIT)

    def forward(self, pack: Pack, cache: Cache) -> ForwardResult:
        self.lanes.append([segment.lane for segment in pack.segments])
        if self.held:
            self.inside.release()
            assert self.free.acquire(timeout=LONGEST_WAIT)
        error = self.fails(pack.ids.tolist())
        if error is not None:
            raise error
        return super().forward(pack, cache)


def built_of(engine: Engine, seqs: int = 8) -> Built:
    """Stand-ins in the place of what `build` makes."""
    return Built(
        engine=engine,
        tokenizer=Tokenizer(byte_level(), TokenizerSettings(templates={"default": TEMPLATE})),
        defaults=SamplingDefaults(max_tokens=20),
        config=EngineConfig(model="stand-in", max_num_seqs=seqs),
        speculative=(),
        label="stand-in",
        parameters=1,
        bytes_per_token=1,
        linear="none",
        probe=ProbeReport(RowPath.BLOCKS, True, {}, 0, 1, 0.0, b""),
    )


def make_llm(
    model: HistoryModel,
    drafters: Mapping[str, Drafter] | None = None,
    *,
    cache: TokenCache | None = None,
    seqs: int = 8,
    rows: int = 512,
    max_waiting: int = 256,
) -> AsyncLLM:
    """An AsyncLLM that was not started."""
    engine = make_engine(model, cache or TokenCache(), drafters or {}, seqs=seqs, rows=rows)
    return AsyncLLM(built_of(engine, seqs), max_waiting=max_waiting)


def run(main: Coroutine[Any, Any, T]) -> T:
    """asyncio.run, but never for ever, and without a task beside the one that runs `main`."""

    async def bounded() -> T:
        task = asyncio.current_task()
        assert task is not None
        alarm = asyncio.get_running_loop().call_later(LONGEST_WAIT, task.cancel)
        try:
            return await main
        finally:
            alarm.cancel()

    return asyncio.run(bounded())


async def complete(
    llm: AsyncLLM,
    prompt: str | Sequence[int],
    params: SamplingParams | None = None,
    speculation: SpeculationParams | None = None,
) -> RequestOutput:
    return await llm.complete(await llm.prepare(prompt, params, speculation))


async def collect(
    llm: AsyncLLM,
    prompt: str | Sequence[int],
    params: SamplingParams | None = None,
    speculation: SpeculationParams | None = None,
) -> list[StreamChunk]:
    prepared = await llm.prepare(prompt, params, speculation)
    async with aclosing(llm.stream(prepared)) as chunks:
        return [chunk async for chunk in chunks]


async def accepted(llm: AsyncLLM, count: int) -> None:
    """Waits until so many requests have been taken in and have not ended."""
    while llm.load().running + llm.load().waiting != count:
        await asyncio.sleep(0)


async def settled(llm: AsyncLLM) -> None:
    """Waits until the engine has nothing to do, then looks for anything left behind."""
    assert llm._thread is not None
    while llm.load().running or llm.load().waiting or llm.built.engine.has_work or llm._thread._open:
        await asyncio.sleep(0.002)
    check_nothing_left(llm)
    assert not asyncio.all_tasks() - {asyncio.current_task()}


def check_nothing_left(llm: AsyncLLM) -> None:
    """No requests, rows, jobs or mail of anybody."""
    engine, thread = llm.built.engine, llm._thread
    assert thread is not None
    engine.check_integrity()
    assert not engine.has_work
    load = llm.load()
    assert (load.running, load.waiting, load.cache_usage) == (0, 0, 0.0)
    assert engine.free_rows == load.cache_tokens
    assert not thread._open and not thread._jobs and not thread._books._seen
    assert llm._open_streams == 0
