"""The asynchronous front: the same answers as the blocking one, places in the queue, and its numbers."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outpace import LLM, AsyncLLM, InvalidParameter, InvalidPrompt, QueueFull, SamplingParams, SpeculationParams
from outpace.drafters.ngram import NgramDrafter
from outpace.engine.outputs import RequestOutput, StreamChunk
from outpace.step_report import StepReport
from tests.asynchronous import VOCAB, HeldModel, accepted, collect, complete, make_llm, run, settled
from tests.engine.fakes import HistoryModel, TokenCache
from tests.engine.harness import GREEDY, HOT, WARM, Job, plain
from tests.test_build import OPTIONS, write_model

REQUESTS: list[tuple[Any, dict[str, Any], dict[str, Any] | None]] = [
    ("hello he", {"temperature": 0.0, "max_tokens": 30}, None),
    ("hello", {"temperature": 0.9, "seed": 3, "n": 3, "max_tokens": 12}, None),
    ([5, 6, 7, 5, 6], {"temperature": 1.2, "seed": 9, "top_k": 20, "logprobs": 2, "max_tokens": 9}, None),
    ("a b a b a", {"temperature": 0.0, "repetition_penalty": 1.3, "max_tokens": 25}, {"enabled": False}),
    ("hell", {"temperature": 0.7, "seed": 1, "n": 2, "stop": ["e", "l"], "max_tokens": 40}, {"method": "ngram"}),
    ("x", {"temperature": 0.0, "structured_outputs": {"regex": "(he|ll|o)+"}, "max_tokens": 14}, None),
    ("hello " * 7, {"temperature": 1.0, "seed": 4, "min_p": 0.1, "prompt_logprobs": 1, "max_tokens": 5}, None),
    ("he", {"temperature": 1.0, "seed": 5, "bad_words": ["e"], "logit_bias": {40: 3.0}}, {"num_speculative_tokens": 1}),
]


def facts(output: RequestOutput) -> tuple[Any, ...]:
    """All of an output that does not tell what else was going on."""
    return (output.prompt, output.prompt_token_ids, output.outputs, output.prompt_logprobs)


def asked(index: int) -> tuple[Any, SamplingParams, SpeculationParams | None]:
    prompt, params, speculation = REQUESTS[index]
    return (
        prompt,
        SamplingParams.from_mapping(params),
        None if speculation is None else SpeculationParams(**speculation),
    )


def check_stream(chunks: list[StreamChunk]) -> RequestOutput:
    """What was streamed is what came out. Returns the output."""
    output = chunks[-1].output
    assert output is not None
    assert all(chunk.output is None for chunk in chunks[:-1])
    for choice in output.outputs:
        mine = [chunk for chunk in chunks if chunk.index == choice.index]
        assert "".join(chunk.text for chunk in mine) == choice.text
        assert [token for chunk in mine for token in chunk.token_ids] == choice.token_ids
        assert [chunk.finished for chunk in mine] == [False] * (len(mine) - 1) + [True]
        assert (mine[-1].finish_reason, mine[-1].stop_reason) == (choice.finish_reason, choice.stop_reason)
        assert {(chunk.finish_reason, chunk.stop_reason) for chunk in mine[:-1]} <= {(None, None)}
    return output


def test_many_at_once_get_what_each_gets_alone(tmp_path: Path) -> None:
    blocking = LLM(write_model(tmp_path / "target"), ["ngram", "self:1"], **{**OPTIONS, "cache_tokens": 400})
    wanted = [facts(blocking.generate(prompt, params, how)[0]) for prompt, params, how in map(asked, range(8))]

    async def ask(llm: AsyncLLM, index: int, delay: int) -> None:
        for _ in range(delay):
            await asyncio.sleep(0)
        chunks = await collect(llm, *asked(index))
        assert facts(check_stream(chunks)) == wanted[index]

    async def main() -> None:
        source = random.Random(1)
        async with AsyncLLM(blocking._built) as llm:
            await asyncio.gather(*(ask(llm, index % 8, source.randrange(200)) for index in range(40)))
            await settled(llm)
            assert llm.sampling_defaults == blocking.sampling_defaults

    run(main())
    assert facts(blocking.generate(*asked(1))[0]) == wanted[1]


def test_conversations_go_through_the_template() -> None:
    async def main() -> None:
        async with make_llm(HistoryModel(VOCAB)) as llm:
            messages = [{"role": "user", "content": "he"}, {"role": "user", "content": "llo"}]
            prepared = await llm.prepare(messages, GREEDY, template={"mood": "!"}, tools=[{"type": "function"}] * 2)
            assert prepared.prompt_token_ids == llm.tokenizer.encode("hello2!")
            assert (await llm.complete(prepared)).prompt is None
            assert (await llm.prepare(messages, GREEDY)).prompt_token_ids == llm.tokenizer.encode("hello")
            for name in ("messages", "self", "tools"):
                with pytest.raises(InvalidParameter, match=name):
                    await llm.prepare(messages, GREEDY, template={name: 1})
            with pytest.raises(InvalidParameter, match="go with messages"):
                await llm.prepare("text", GREEDY, template={"mood": 1})

    run(main())


def test_what_is_not_possible_is_said_before_anything_is_queued() -> None:
    async def main() -> None:
        async with make_llm(HistoryModel(VOCAB), max_waiting=3, seqs=2) as llm:
            for prompt, params, error in [
                ([], GREEDY, InvalidPrompt),
                ([VOCAB], GREEDY, InvalidPrompt),
                (b"bytes", GREEDY, InvalidPrompt),
                ("he", {"temperature": 0}, InvalidParameter),
                ("he", replace(GREEDY, n=6), InvalidParameter),
            ]:
                with pytest.raises(error):
                    await llm.prepare(prompt, params)  # type: ignore[arg-type]
            assert (await llm.prepare("he", replace(GREEDY, n=5))).num_choices == 5
            assert llm.load() == replace(llm.load(), running=0, waiting=0, steps=0)
            await settled(llm)
        with pytest.raises(InvalidParameter, match="max_waiting=-1"):
            make_llm(HistoryModel(VOCAB), max_waiting=-1)

    run(main())


def test_prepared_in_several_threads_at_once() -> None:
    """Ids stay unique, and no request gets anything of another."""

    async def main() -> None:
        async with make_llm(HistoryModel(VOCAB), {"ngram": NgramDrafter(1, 4)}) as llm:
            texts = ["".join(letters) * 3 for letters in itertools.product("ehlo ", repeat=3)]
            prepared = await asyncio.gather(*(llm.prepare(text, replace(GREEDY, stop=("e", text))) for text in texts))
            ids = [request.id for each in prepared for request in each._requests]
            assert len(set(ids)) == len(texts) == 125
            for text, each in zip(texts, prepared, strict=True):
                assert each.prompt_token_ids == llm.tokenizer.encode(text)

    run(main())


def test_the_event_loop_runs_during_a_step_and_steps_run_beside_a_busy_event_loop() -> None:
    async def main() -> None:
        model = HeldModel()
        async with make_llm(model) as llm:
            model.hold()
            task = asyncio.create_task(complete(llm, [1, 2], GREEDY))
            await model.entered()
            # The step is being computed. Meanwhile:
            assert llm.load().waiting == 1
            prepared = await llm.prepare("hello", GREEDY)
            assert prepared.prompt_token_ids == llm.tokenizer.encode("hello")
            assert len(model.lanes) == 1 and not task.done()
            # And now the event loop does not come back until all 40 steps are done.
            done = threading.Event()
            llm.on_step(lambda report: done.set() if report.finished else None)
            model.let_go()
            assert done.wait(60)
            assert not task.done()
            assert (await task).outputs[0].token_ids == plain(model, Job([1, 2], GREEDY))

    run(main())


def test_nobody_is_busy_when_there_is_nothing_to_do() -> None:
    async def main() -> None:
        looks = 0

        class Watched(type(llm.built.engine)):  # type: ignore[misc]
            @property
            def has_work(self) -> bool:
                nonlocal looks
                looks += 1
                return bool(self._requests)

        llm.built.engine.__class__ = Watched
        async with llm:
            await complete(llm, [1, 2], GREEDY)
            await asyncio.sleep(0.05)  # the abort that follows every stream has been looked at
            before = looks
            await asyncio.sleep(0.2)
            assert looks == before

    llm = make_llm(HistoryModel(VOCAB))
    run(main())


def test_a_full_queue() -> None:
    async def main() -> None:
        model = HeldModel()
        async with make_llm(model, seqs=1, max_waiting=3) as llm:
            model.hold()
            first = asyncio.create_task(complete(llm, [1], GREEDY))
            await model.entered()
            waiting = [asyncio.create_task(complete(llm, [2], replace(GREEDY, n=n))) for n in (1, 2)]
            await accepted(llm, 4)
            prepared = await llm.prepare([3], GREEDY)
            with pytest.raises(QueueFull, match="4 requests would wait with this one, and at most 3 may") as full:
                await llm.complete(prepared)
            assert 1 <= full.value.retry_after <= 60
            model.let_go()
            await asyncio.gather(first, *waiting)
            assert (await llm.complete(prepared)).outputs[0].token_ids == plain(model, Job([3], GREEDY))
            assert llm._thread.snapshot.seconds_per_request * 1e9 >= 1  # type: ignore[union-attr,operator]
            await settled(llm)

    run(main())


def test_a_request_that_can_run_at_once_does_not_wait() -> None:
    async def main() -> None:
        model = HeldModel()
        async with make_llm(model, seqs=2, max_waiting=0) as llm:
            model.hold()
            both = [asyncio.create_task(complete(llm, [n], GREEDY)) for n in (1, 2)]
            await model.entered()
            await accepted(llm, 2)
            with pytest.raises(QueueFull):
                await complete(llm, [3], GREEDY)
            with pytest.raises(InvalidParameter, match="at most 2"):
                await complete(llm, [3], replace(GREEDY, n=3))
            model.let_go()
            await asyncio.gather(*both)
            assert (await complete(llm, [3], replace(GREEDY, n=2))).outputs[1].index == 1

    run(main())


@pytest.mark.parametrize(("rows", "max_rows"), [(512, 4096), (16, 4096), (24, 130)], ids=["", "chunks", "preemption"])
def test_reports_of_steps_add_up(rows: int, max_rows: int) -> None:
    async def main() -> None:
        model = HistoryModel(24)
        reports: list[StepReport] = []
        cache = TokenCache(capacity=120, max_rows=max_rows)
        async with make_llm(model, {"ngram": NgramDrafter(1, 4)}, cache=cache, seqs=5, rows=rows) as llm:
            llm.on_step(reports.append)
            jobs = [Job([n % 24] * 20, replace((GREEDY, WARM, HOT)[n % 3], n=1 + n % 2)) for n in range(9)]
            outputs = await asyncio.gather(*(complete(llm, job.prompt, job.params) for job in jobs))
            await settled(llm)
            steps = [report for report in reports if report.rows]
            if max_rows == 130:  # rows found again after a preemption are counted, as they are documented to be
                assert len(steps) == len(model.rows_per_call)
                assert all(report.rows >= rows for report, rows in zip(steps, model.rows_per_call, strict=True))
            else:
                assert [report.rows for report in steps] == model.rows_per_call
            choices = sum(job.params.n for job in jobs)
            assert sum(report.prompt_tokens for report in steps) == 20 * choices
            generated = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
            assert sum(report.generated_tokens for report in steps) == generated
            assert sum(len(report.first_token_seconds) for report in steps) == choices
            stats = [output.stats for output in outputs]
            drafts = [draft for report in steps for draft in report.drafts]
            assert {draft.drafter for draft in drafts} == {"ngram"}
            assert len(drafts) == sum(each.drafts for each in stats)
            assert sum(draft.num_draft_tokens for draft in drafts) == sum(each.draft_tokens for each in stats)
            assert sum(draft.num_accepted for draft in drafts) == sum(each.accepted_tokens for each in stats) > 0
            finished = [each for report in steps for each in report.finished]
            assert sorted(map(repr, map(facts, finished))) == sorted(map(repr, map(facts, outputs)))
            for each in finished:
                assert each.queue_seconds is not None and each.first_token_seconds is not None
                assert 0 <= each.queue_seconds <= each.first_token_seconds <= each.total_seconds
            preemptions = sum(each.preemptions for each in stats)
            assert llm.load().preemptions == sum(report.preemptions for report in steps) == preemptions
            assert (preemptions > 0) == (max_rows == 130)
            assert llm.load().steps == len(steps)
            assert max(report.load.running for report in steps) <= 5
            assert max(report.load.cache_usage for report in steps) <= 1

    run(main())


def test_a_listener_that_fails_breaks_nothing_and_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        calls: list[StepReport] = []

        def fails(report: StepReport) -> None:
            raise ValueError("no metrics today")

        model = HistoryModel(VOCAB)
        async with make_llm(model) as llm:
            llm.on_step(fails)
            llm.on_step(calls.append)
            output = await complete(llm, [1, 2], GREEDY)
            assert output.outputs[0].token_ids == plain(model, Job([1, 2], GREEDY))
            await settled(llm)
            assert len(calls) == 40
        assert [record.message for record in caplog.records].count(
            "a listener to steps failed; further failures of it are not reported"
        ) == 1

    run(main())


def test_chunks_of_several_choices_come_side_by_side() -> None:
    async def main() -> None:
        async with make_llm(HistoryModel(VOCAB)) as llm:
            prepared = await llm.prepare([1, 2], replace(WARM, n=3))
            assert prepared.num_choices == 3
            async with aclosing(llm.stream(prepared)) as stream:
                chunks = [chunk async for chunk in stream]
            check_stream(chunks)
            assert [chunk.index for chunk in chunks] == [0, 1, 2] * 40

    run(main())
