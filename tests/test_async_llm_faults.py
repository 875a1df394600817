"""The asynchronous front when callers leave, requests and steps fail, and the end comes."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

import pytest
import torch

from outpace import AsyncLLM, OutpaceError, RequestCutOff, RequestFailed, Unavailable
from outpace.drafters.ngram import NgramDrafter
from outpace.step_report import FinishedRequest, StepReport
from outpace.types import Draft, Observation
from tests.asynchronous import (
    LONGEST_WAIT,
    VOCAB,
    HeldModel,
    accepted,
    check_nothing_left,
    complete,
    make_llm,
    run,
    settled,
)
from tests.engine.fakes import HistoryModel, ScriptedDrafter, TokenCache
from tests.engine.harness import GREEDY, WARM, Job, plain

LONG = replace(GREEDY, max_tokens=400)


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "outpace-engine"]


async def computes(llm: AsyncLLM, model: HistoryModel, prompt: list[int]) -> None:
    """The engine answers, and rightly."""
    assert (await complete(llm, prompt, WARM)).outputs[0].token_ids == plain(model, Job(prompt, WARM))


async def leave(llm: AsyncLLM, source: random.Random) -> None:
    """Asks for something and leaves at a random moment, in one of the ways there are."""
    n = source.choice([1, 1, 2, 5])
    prepared = await llm.prepare([source.randrange(24)] * source.randrange(1, 90), replace(LONG, n=n))
    way = source.randrange(4)
    if way == 0:
        task = asyncio.create_task(llm.complete(prepared))
        for _ in range(source.randrange(60)):
            await asyncio.sleep(source.choice([0, 0, 0.001]))
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        return
    most = source.randrange(1, 30)
    if way == 1:  # left without a word: the generator is closed when it is collected
        async for _ in llm.stream(prepared):
            most -= 1
            if not most:
                break
        return
    async with aclosing(llm.stream(prepared)) as chunks:
        async for _ in chunks:
            most -= 1
            if not most:
                if way == 2:
                    raise ConnectionResetError
                break


def test_two_hundred_who_leave_at_random_moments_leave_nothing() -> None:
    async def main() -> None:
        finished: list[FinishedRequest] = []
        model = HistoryModel(24)
        drafter = ScriptedDrafter("script", lambda ask: Draft.chain(list(ask.token_ids[: ask.num_draft_tokens]), "x"))
        cache = TokenCache(max_rows=900)
        async with make_llm(model, {"script": drafter}, cache=cache, seqs=6, rows=40, max_waiting=2000) as llm:
            llm.on_step(lambda report: finished.extend(report.finished))
            results = await asyncio.gather(
                *(leave(llm, random.Random(seed)) for seed in range(200)),
                *(computes(llm, model, [n, n + 1]) for n in range(10)),
                return_exceptions=True,
            )
            unexpected = [r for r in results if r is not None and not isinstance(r, ConnectionResetError)]
            assert unexpected == []
            del results
            gc.collect()
            await asyncio.sleep(0)
            await settled(llm)
            assert not drafter.alive and drafter.observed > 0
            reasons = [each.outputs[0].finish_reason for each in finished]
            assert reasons.count("length") >= 10
            assert reasons.count("abort") > 100

    run(main())


@pytest.mark.parametrize("way", ["close", "cancel"])
def test_who_leaves_during_a_step_is_gone_in_the_next(way: str) -> None:
    async def main() -> None:
        model = HeldModel()
        async with make_llm(model) as llm:
            model.hold()
            stays = asyncio.create_task(complete(llm, [1, 2], WARM))
            await model.entered()
            chunks = llm.stream(await llm.prepare([3] * 9, LONG))
            leaves = asyncio.ensure_future(anext(chunks))
            await accepted(llm, 2)
            model.go()
            await model.entered()  # the second step, of both
            assert [len(lanes) for lanes in model.lanes] == [1, 2]
            if way == "cancel":
                leaves.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await leaves
            else:
                model.go()
                assert (await leaves).prefill is None
                await model.entered()
                await chunks.aclose()
            steps = len(model.lanes)
            model.let_go()
            model.go(2)
            assert (await stays).outputs[0].token_ids == plain(model, Job([1, 2], WARM))
            assert {tuple(lanes) for lanes in model.lanes[steps:]} == {(0,)}
            await settled(llm)

    run(main())


def test_the_only_one_leaves() -> None:
    async def main() -> None:
        reports: list[StepReport] = []
        model = HeldModel()
        async with make_llm(model) as llm:
            llm.on_step(reports.append)
            async with aclosing(llm.stream(await llm.prepare([1], LONG))) as chunks:
                await anext(chunks)
                model.hold()
            model.let_go()
            await settled(llm)
            (ended,) = reports[-1].finished
            assert ended.outputs[0].finish_reason == "abort"
            assert (ended.queue_seconds or 0) <= (ended.first_token_seconds or 0) <= ended.total_seconds

    run(main())


def test_leaving_while_still_waiting() -> None:
    async def main() -> None:
        model = HeldModel()
        async with make_llm(model, seqs=1) as llm:
            model.hold()
            stays = asyncio.create_task(complete(llm, [1], GREEDY))
            await model.entered()
            waits = asyncio.create_task(complete(llm, [2], GREEDY))
            await accepted(llm, 2)
            waits.cancel()
            model.let_go()
            await stays
            await settled(llm)
            assert model.lanes == [[0]] * 40

    run(main())


@pytest.mark.parametrize("n", [1, 3])
def test_a_request_that_fails_fails_alone(n: int) -> None:
    model = HistoryModel(VOCAB)
    firsts = [plain(model, Job([1, 2], WARM, number=number))[0] for number in range(n)]
    assert len(set(firsts)) == n

    def fails(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        """In the last of the choices alone."""
        if len(output_ids) == 5 and output_ids[0] == firsts[-1]:
            raise ZeroDivisionError("five")
        return logits

    async def main() -> None:
        finished: list[FinishedRequest] = []
        async with make_llm(model, {"ngram": NgramDrafter(1, 4)}) as llm:
            llm.on_step(lambda report: finished.extend(report.finished))
            others = [asyncio.create_task(computes(llm, model, [1, other])) for other in range(4)]
            with pytest.raises(RequestFailed, match="fails failed at position 7: ZeroDivisionError: five"):
                await complete(llm, [1, 2], replace(WARM, n=n, logits_processors=(fails,)))
            await asyncio.gather(*others)
            await settled(llm)
            (failed,) = [each for each in finished if each.outputs[0].finish_reason != "length"]
            assert [choice.finish_reason for choice in failed.outputs] == ["abort"] * (n - 1) + ["error"]
            assert len(failed.outputs[-1].token_ids) == 5

    run(main())


def test_a_step_that_fails_ends_the_requests_in_it_and_no_others() -> None:
    """Also when it fails whenever one of them is there: it must not come back for ever."""

    async def main() -> None:
        model = HeldModel(fails=lambda ids: MemoryError("no room\nfor this") if 13 in ids else None)
        finished: list[FinishedRequest] = []
        drafter = ScriptedDrafter("script", lambda ask: Draft.chain([7], "x"))
        async with make_llm(model, {"script": drafter}, seqs=2) as llm:
            llm.on_step(lambda report: finished.extend(report.finished))
            model.hold()
            prompts = [[1], [13, 13], [2], [4, 13], [3]]
            tasks = [asyncio.create_task(complete(llm, prompt, WARM)) for prompt in prompts]
            await model.entered()
            model.let_go()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            message = "the engine failed while it was computing this request: MemoryError: no room"
            # Two places: the first request shared its step with the second one, which failed, so it ended too.
            failed = [isinstance(result, RequestFailed) and str(result) == message for result in results]
            assert failed[1] and failed[3]
            assert 2 <= sum(failed) <= 4
            for prompt, result in zip(prompts, results, strict=True):
                if not isinstance(result, BaseException):
                    assert result.outputs[0].token_ids == plain(HistoryModel(VOCAB, 3), Job(prompt, WARM))
            model.fails = lambda ids: None
            await computes(llm, model, [13])
            await settled(llm)
            assert not drafter.alive and llm.failure is None
            reasons = [each.outputs[0].finish_reason for each in finished]
            assert (reasons.count("abort"), reasons.count("length")) == (sum(failed), 6 - sum(failed))

    run(main())


@pytest.mark.parametrize("error", [RuntimeError("wrong"), SystemExit(3), KeyboardInterrupt()])
def test_any_kind_of_fault_ends_no_more_than_requests(error: BaseException) -> None:
    async def main() -> None:
        model = HeldModel()
        model.fails = lambda ids: error if 13 in ids else None
        async with make_llm(model) as llm:
            with pytest.raises(RequestFailed, match=type(error).__name__):
                await complete(llm, [13], GREEDY)
            await computes(llm, model, [1])
            await settled(llm)

    run(main())


def test_a_fault_before_anything_was_computed_ends_everybody() -> None:
    async def main() -> None:
        model = HistoryModel(VOCAB)
        llm = make_llm(model, seqs=1)
        faults = [OSError("the thread governor"), OSError("again")]

        def before_step() -> None:
            if faults:
                raise faults.pop()

        llm.built.engine._before_step = before_step
        async with llm:
            tasks = [asyncio.create_task(complete(llm, [n], GREEDY)) for n in range(3)]
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert any(isinstance(result, RequestFailed) for result in results)
            while faults:
                with pytest.raises(RequestFailed):
                    await complete(llm, [1], GREEDY)
            await computes(llm, model, [1])
            await settled(llm)

    run(main())


def test_a_fault_behind_the_end_of_a_request_does_not_touch_it() -> None:
    """The request has its last token, but the step does not live to hand it out: the next one does."""

    async def main() -> None:
        drafter = ScriptedDrafter("script", lambda ask: Draft())
        model = HistoryModel(VOCAB)
        async with make_llm(model, {"script": drafter}, seqs=2) as llm:
            observe, torn = drafter.observe, []

            def tears(observations: Sequence[Observation]) -> None:
                if len(observations) == 1 and not torn:  # the other one has ended in this step
                    torn.append(True)
                    raise OSError("torn")
                observe(observations)

            drafter.observe = tears  # type: ignore[method-assign]
            both = [await llm.prepare([n], replace(GREEDY, max_tokens=most)) for n, most in enumerate((3, 9))]
            ends, goes_on = (asyncio.create_task(llm.complete(each)) for each in both)
            waits = asyncio.create_task(computes(llm, model, [7]))
            assert (await ends).outputs[0].token_ids == plain(model, Job([0], GREEDY))[:3]
            with pytest.raises(RequestFailed, match="OSError: torn"):
                await goes_on
            await waits
            await settled(llm)
            assert not drafter.alive and torn

    run(main())


def test_a_fault_that_nobody_is_left_to_answer_for_ends_nobody() -> None:
    """All who were in the step have their last token, and those who wait were not in it."""

    async def main() -> None:
        model = HeldModel()
        drafter = ScriptedDrafter("script", lambda ask: Draft())
        release, torn = drafter.release, []

        def tears(request_id: int) -> None:
            release(request_id)
            if not torn:
                torn.append(True)
                raise OSError("torn")

        drafter.release = tears  # type: ignore[method-assign]
        async with make_llm(model, {"script": drafter}, seqs=1) as llm:
            model.hold()
            ends = asyncio.create_task(computes(llm, model, [1]))
            await model.entered()
            waits = asyncio.create_task(computes(llm, model, [2]))
            await accepted(llm, 2)
            model.let_go()
            await asyncio.gather(ends, waits)
            await settled(llm)
            assert torn and not drafter.alive

    run(main())


def test_a_choice_that_ended_in_a_step_that_failed_goes_with_its_siblings() -> None:
    async def main() -> None:
        drafter = ScriptedDrafter("script", lambda ask: Draft())
        model = HistoryModel(VOCAB)
        firsts = [plain(model, Job([1], WARM, number=number))[0] for number in range(2)]
        assert firsts[0] != firsts[1]
        async with make_llm(model, {"script": drafter}) as llm:
            observe, torn = drafter.observe, []

            def tears(observations: Sequence[Observation]) -> None:
                if len(observations) == 2 and not torn:  # of three: one has ended in this step
                    torn.append(True)
                    raise OSError("torn")
                observe(observations)

            drafter.observe = tears  # type: ignore[method-assign]
            prepared = await llm.prepare([1], replace(WARM, n=3, stop_token_ids=(firsts[0],)))
            with pytest.raises(RequestFailed, match="OSError: torn"):
                await llm.complete(prepared)
            await computes(llm, model, [7])
            await settled(llm)
            assert llm.failure is None and torn

    run(main())


def test_a_fault_between_two_steps_ends_those_who_run_and_not_those_who_wait() -> None:
    async def main() -> None:
        model = HeldModel()
        async with make_llm(model, seqs=1) as llm:
            faults: list[OSError] = []

            def before_step() -> None:
                if faults:
                    raise faults.pop()

            llm.built.engine._before_step = before_step
            model.hold()
            runs = asyncio.create_task(complete(llm, [1], GREEDY))
            await model.entered()
            waits = asyncio.create_task(computes(llm, model, [2]))
            await accepted(llm, 2)
            faults.append(OSError("the thread governor"))
            model.let_go()
            with pytest.raises(RequestFailed, match="the thread governor"):
                await runs
            await waits
            await settled(llm)

    run(main())


def test_an_engine_that_computes_nothing_is_no_endless_loop() -> None:
    async def main() -> None:
        llm = make_llm(HistoryModel(VOCAB))
        step = llm.built.engine.step
        llm.built.engine.step = list  # type: ignore[method-assign]
        async with llm:
            with pytest.raises(RequestFailed, match="two steps in a row computed nothing"):
                await complete(llm, [1], GREEDY)
            llm.built.engine.step = step  # type: ignore[method-assign]
            await computes(llm, HistoryModel(VOCAB), [1])
            await settled(llm)

    run(main())


def test_an_engine_damaged_by_a_fault_says_so_to_everybody() -> None:
    async def main() -> None:
        model = HeldModel(fails=lambda ids: RuntimeError("torn"))

        def damaged() -> None:
            raise AssertionError("rows are missing")

        async with make_llm(model, seqs=1) as llm:
            llm.built.engine.cache.check_integrity = damaged  # type: ignore[method-assign]
            model.hold()
            tasks = [asyncio.create_task(complete(llm, [n], GREEDY)) for n in range(4)]
            await model.entered()
            await accepted(llm, 4)
            model.let_go()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(result) for result in results] == [RequestFailed] * 4
            assert str(results[0]).endswith("RuntimeError: torn")
            stopped = "the engine was stopped by a fault (AssertionError: rows are missing): start it again"
            assert [str(result) for result in results[1:]] == [stopped] * 3
            assert llm.failure == stopped
            with pytest.raises(Unavailable, match="rows are missing"):
                await complete(llm, [1], GREEDY)
        assert not engine_threads()

    run(main())


def test_draining_finishes_what_was_accepted() -> None:
    async def main() -> None:
        model = HeldModel()
        async with make_llm(model, seqs=1) as llm:
            prepared = await llm.prepare([5], GREEDY)
            model.hold()
            tasks = [asyncio.create_task(complete(llm, [n], GREEDY)) for n in range(3)]
            await model.entered()
            await accepted(llm, 3)
            await llm.drain(0.01)
            assert not any(task.done() for task in tasks)
            with pytest.raises(Unavailable, match="shutting down"):
                await llm.complete(prepared)
            with pytest.raises(Unavailable, match="shutting down"):
                await llm.prepare([5], GREEDY)
            assert llm.failure == "the engine is shutting down: no new requests are taken"
            model.let_go()
            await llm.drain(LONGEST_WAIT)
            assert all(task.done() for task in tasks)
            for n, task in enumerate(tasks):
                assert task.result().outputs[0].token_ids == plain(model, Job([n], GREEDY))
            await llm.drain(0)
            await settled(llm)

    run(main())


def test_closing_ends_what_is_left_and_joins_the_thread() -> None:
    async def main() -> None:
        finished: list[FinishedRequest] = []
        model = HeldModel()
        llm = make_llm(model, seqs=1)
        llm.on_step(lambda report: finished.extend(report.finished))
        assert llm.load().running == 0 and llm.failure == "the engine was not started"
        await llm.start()
        assert llm.failure is None and len(engine_threads()) == 1
        model.hold()
        tasks = [asyncio.create_task(complete(llm, [n], LONG)) for n in range(3)]
        await model.entered()
        await accepted(llm, 3)
        closing = asyncio.create_task(llm.close())
        while llm.failure is None:
            await asyncio.sleep(0)
        model.let_go()  # the step it is in ends when the thread has been told to stop
        await closing
        assert not engine_threads()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [str(result) for result in results] == ["the engine was closed"] * 3
        assert {type(result) for result in results} == {RequestCutOff}
        check_nothing_left(llm)
        await llm.close()
        with pytest.raises(Unavailable, match="the engine was closed"):
            await llm.prepare([1], GREEDY)
        with pytest.raises(OutpaceError, match="started before"):
            await llm.start()

    run(main())


def test_what_is_used_wrongly_is_refused() -> None:
    model = HistoryModel(VOCAB)

    async def elsewhere(llm: AsyncLLM, prepared: Any) -> None:
        for call in (llm.complete(prepared), llm.drain(1), llm.close()):
            with pytest.raises(OutpaceError, match="another event loop"):
                await call

    async def main() -> None:
        llm = make_llm(model)
        prepared = await llm.prepare([1], GREEDY)
        with pytest.raises(Unavailable, match="not started"):
            await llm.complete(prepared)
        async with llm, make_llm(model) as other:
            with pytest.raises(OutpaceError, match="started before"):
                await llm.start()
            with pytest.raises(OutpaceError, match="another AsyncLLM"):
                await other.complete(prepared)
            await asyncio.to_thread(asyncio.run, elsewhere(llm, prepared))
            assert (await llm.complete(prepared)).outputs[0].token_ids == plain(model, Job([1], GREEDY))
            with pytest.raises(OutpaceError, match="queued before"):
                await llm.complete(prepared)
            await settled(llm)

    run(main())


def test_an_interrupt_closes_cleanly() -> None:
    llm = make_llm(HistoryModel(VOCAB))
    reports: list[StepReport] = []

    def interrupt(report: StepReport) -> None:
        reports.append(report)
        if len(reports) == 5:
            os.kill(os.getpid(), signal.SIGINT)

    async def main() -> None:
        llm.on_step(interrupt)
        async with llm:
            await asyncio.gather(complete(llm, [1], LONG), complete(llm, [2], LONG))

    with pytest.raises(KeyboardInterrupt):
        run(main())
    assert not engine_threads()
    check_nothing_left(llm)


def test_a_forgotten_one_leaves_no_thread_behind() -> None:
    async def main() -> None:
        llm = make_llm(HistoryModel(VOCAB))
        await llm.start()
        await complete(llm, [1], GREEDY)
        assert len(engine_threads()) == 1

    run(main())
    gc.collect()
    assert not engine_threads()


def test_an_interpreter_ends_although_nobody_closed() -> None:
    """Neither an engine that waits nor one that computes holds it up, nor breaks anything on the way out."""
    program = """
import asyncio
from tests.asynchronous import VOCAB, complete, make_llm
from tests.engine.fakes import HistoryModel
from tests.engine.harness import GREEDY

waits, computes = make_llm(HistoryModel(VOCAB)), make_llm(HistoryModel(VOCAB))

async def main():
    await waits.start()
    await complete(waits, [1], GREEDY)
    await computes.start()
    await anext(computes.stream(await computes.prepare([1], GREEDY)))

asyncio.run(main())
print("end")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LONGEST_WAIT)
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr
    assert "Traceback" not in done.stderr
