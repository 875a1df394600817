"""benchmarks/load.py: counts, percentiles, reports, clients that leave; against a scripted model and a real server."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import load
import load_clients
import load_library
import load_mixed
import load_options
import load_prefill
import load_report
import load_server
import pytest
from load_clients import CHAT, COMPLETIONS, Answer, Loop, Request, ask

from tests.asynchronous import run
from tests.server.calling import listening
from tests.server.scripted import Scripted, scripted
from tests.server.tiny_folder import save_tiny_model

pytestmark = pytest.mark.slow

ANSWER = "one two three one two three one two three. "
PROMPTS = [
    {"id": f"{task}-{number}", "task": task, "messages": [{"role": "user", "content": f"Say {task} {number}"}]}
    for task in ("code", "chat")
    for number in (1, 2)
]


def streamed(**more: Any) -> Request:
    body = {"messages": PROMPTS[0]["messages"], "temperature": 0, "max_tokens": 20, "stream": True}
    return Request(CHAT, {**body, **more})


def timed(*arrivals: tuple[float, int], sent: float = 0.0, ended: float | None = None, **more: Any) -> Answer:
    end = arrivals[-1][0] if ended is None else ended
    return Answer(sent=sent, ended=end, status=200, arrivals=list(arrivals), tokens=arrivals[-1][1], **more)


@asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Scripted, str]]:
    llm = scripted(ANSWER * 20, **options)
    async with listening(llm) as url, load_clients.new_client(url) as client:
        yield client, llm, url


# Numbers, by hand.


def test_times_of_an_answer() -> None:
    answer = timed((1.5, 1), (2.0, 4), (4.0, 6), sent=1.0)
    assert answer.first_token_seconds == 0.5
    assert answer.gaps == [0.5, 2.0]
    assert answer.decoding == (2.5, 5)
    assert (Answer().first_token_seconds, Answer().gaps, Answer().decoding) == (None, [], (0.0, 0))


def test_tokens_are_counted_while_all_clients_are_busy() -> None:
    answer = timed((1.0, 1), (2.0, 4), (3.0, 6), ended=3.5)
    answer.tokens = 7  # the end token has no text
    counts = {moment: load_clients.tokens_until(answer, moment) for moment in (0.5, 1.0, 2.5, 3.0, 3.5, 9.0)}
    assert counts == {0.5: 0, 1.0: 1, 2.5: 4, 3.0: 6, 3.5: 7, 9.0: 7}
    loop = Loop([("a", answer), ("b", timed((1.0, 2), (2.5, 3)))], began=0.5, busy_until=2.5)
    assert (loop.busy_tokens, loop.busy_seconds) == (4 + 3, 2.0)


def test_percentiles() -> None:
    assert load_report.percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert load_report.percentile([0.0, 10.0], 95) == pytest.approx(9.5)
    assert load_report.percentile([], 50) is None


def test_a_row_by_hand() -> None:
    one = timed((1.0, 1), (2.0, 4), drafts=2, draft_tokens=8, accepted=2)
    two = timed((3.0, 2), (4.0, 3), (7.0, 5), sent=1.0, drafts=1, draft_tokens=2, accepted=2)
    failed = Answer(status=500, error="broken")
    row = load_report.load_row(2, True, [Loop([("a", one), ("b", two), ("c", failed)], 0.0, 4.0)])
    assert (row["answers"], row["failed"], row["tokens"]) == (2, 1, 9)
    assert row["tokens_per_second"] == (4 + 3) / 4.0
    assert row["first_token_p50"] == 1.5
    assert row["gap_p50"] == 1.0
    assert row["ms_per_token"] == 1e3 * (1 + 4) / (3 + 3)
    assert row["acceptance_rate"] == 0.4
    assert row["mean_acceptance_length"] == 1 + 4 / 3


def test_the_longest_gap_of_an_interval() -> None:
    answers = [timed((0.0, 1), (5.0, 2), (6.0, 3)), timed((5.5, 1), (7.5, 2), (8.0, 3))]
    assert load_prefill.longest_gap(answers, 5.2, 6.5) == 2.0
    assert load_prefill.longest_gap(answers, 4.9, 6.5) == 5.0  # a part of it counts
    assert load_prefill.longest_gap(answers, 7.6, 7.7) == 0.5
    assert load_prefill.longest_gap(answers, 9.0, 9.5) == 0.0


def test_the_server_beside_the_library_by_hand() -> None:
    server = [timed((2.0, 1), (5.0, 4)), timed((1.0, 1), (4.0, 2))]
    library = [timed((1.0, 1), (3.0, 4)), timed((0.5, 1), (1.5, 2))]
    row = load_library.overhead_row(list(zip(server, library, strict=True)), True)
    assert row["server_ms_per_token"] == 1500 and row["library_ms_per_token"] == 750
    assert row["decoding_ratio"] == 2.0 and row["whole_ratio"] == 2.0
    assert row["first_token_more_seconds"] == 0.75
    assert row["same_text"]
    server[1].text = "other"
    assert not load_library.overhead_row(list(zip(server, library, strict=True)), True)["same_text"]


def test_prompts_whose_text_differs() -> None:
    answers = [("a", Answer(text="x")), ("b", Answer(text="y")), ("a", Answer(text="x")), ("b", Answer(text="z"))]
    assert load_report.differing(answers) == ["b"]
    assert load_report.differing([("a", Answer(text="x")), ("a", Answer(error="broken"))]) == []


def test_prompts_are_mixed(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    assert [prompt["id"] for prompt in load.read_prompts(tmp_path / "p.jsonl")] == [
        "code-1",
        "chat-1",
        "code-2",
        "chat-2",
    ]


# Clients of a real socket.


def test_a_stream_is_read_as_it_comes() -> None:
    async def main() -> None:
        async with serving() as (client, _, _):
            answer = await ask(client, streamed())
            whole = await ask(client, streamed(stream=False))
            plain = await ask(client, streamed(speculative={"enabled": False}))
        assert (answer.status, answer.error, answer.left) == (200, None, False)
        assert answer.text == whole.text == plain.text == ANSWER[:20]
        assert answer.tokens == whole.tokens == answer.arrivals[-1][1] == 20
        assert [count for _, count in plain.arrivals] == list(range(1, 21))
        assert answer.accepted and len(answer.arrivals) == 20 - answer.accepted
        assert (answer.drafts, answer.draft_tokens) == (whole.drafts, whole.draft_tokens)
        assert plain.drafts == 0
        assert answer.sent < answer.arrivals[0][0] <= answer.ended

    run(main())


def test_completions_too() -> None:
    async def main() -> None:
        async with serving() as (client, _, _):
            answer = await ask(client, Request(COMPLETIONS, {"prompt": "x", "max_tokens": 9, "stream": True}))
        assert (answer.text, answer.tokens, answer.error) == (ANSWER[:9], 9, None)

    run(main())


@pytest.mark.parametrize("after", [0, 3])
def test_a_client_that_leaves_ends_its_request(after: int) -> None:
    async def main() -> None:
        async with serving() as (client, llm, _):
            request = Request(CHAT, {**streamed().body, "max_tokens": 800}, leave_after=after)
            answer = await ask(client, request)
            assert answer.left and answer.error is None
            assert len(answer.arrivals) == after
            assert not any((await load_server.settled_gauges(client, 20)).values())
            assert llm.load().running == 0

    run(main())


def test_a_client_of_a_whole_answer_leaves_too() -> None:
    async def main() -> None:
        async with serving() as (client, llm, _):
            llm.model.hold()
            answer = await ask(client, Request(CHAT, {**streamed(stream=False).body}, leave_after=1))
            llm.model.let_go()
            assert answer.left and answer.status is None and answer.error is None
            assert not any((await load_server.settled_gauges(client, 20)).values())

    run(main())


def test_errors_are_part_of_the_answer() -> None:
    async def main() -> None:
        async with serving() as (client, llm, _):
            refused = await ask(client, streamed(temperature=-1))
            assert refused.status == 400 and "temperature" in str(refused.error)
            llm.model.fails = lambda ids: ValueError("no more")
            broken = await ask(client, streamed())
            assert broken.error and broken.text == ""
        async with load_clients.new_client("http://127.0.0.1:9") as nobody:
            gone = await ask(nobody, streamed())
            assert gone.status is None and "Connect" in str(gone.error)

    run(main())


def test_a_stream_that_breaks_off_is_an_error() -> None:
    def reply(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, text='data: {"choices": [{"delta": {"content": "a"}}]}\n\n')

    async def main() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(reply), base_url="http://here") as client:
            answer = await ask(client, streamed())
        assert answer.text == "a" and "without [DONE]" in str(answer.error)

    run(main())


def test_clients_ask_in_a_closed_loop() -> None:
    busy: list[int] = []
    running = counted = 0

    async def send(item: int) -> Answer:
        nonlocal running
        running += 1
        busy.append(running)
        await asyncio.sleep(0.001)
        running -= 1
        return Answer(text=str(item))

    def on_answer() -> None:
        nonlocal counted
        counted += 1

    loop = run(load_clients.closed_loop(range(10), 3, send, on_answer))
    assert sorted((item, answer.text) for item, answer in loop.done) == [(n, str(n)) for n in range(10)]
    assert max(busy) == 3 and counted == 10
    assert loop.busy_seconds > 0


def test_gaps_beside_a_long_prompt() -> None:
    async def main() -> None:
        async with serving() as (client, _, _):
            streams = [streamed(max_tokens=700, speculative={"enabled": False})] * 2
            long = Request(COMPLETIONS, {"prompt": [70] * 600, "max_tokens": 2, "stream": True})
            found = await load_prefill.gaps_beside_prefill(client, streams, long)
            assert found["streams"] == 2
            assert found["quiet_seconds"] > 0 and found["prefill_seconds"] > 0 and found["first_token_seconds"] > 0
            assert not any((await load_server.settled_gauges(client, 20)).values())
            with pytest.raises(RuntimeError, match="give them more tokens"):
                await load_prefill.gaps_beside_prefill(client, [streamed(max_tokens=2)], long)
            with pytest.raises(RuntimeError, match=r"a stream was not answered.*temperature"):
                await load_prefill.gaps_beside_prefill(client, [streamed(temperature=-1)], long)

    run(main())


# Mixed requests.


def test_a_plan_has_its_shares() -> None:
    cases = load_mixed.plan_cases(100, PROMPTS, 8, 3)
    kinds = [case.kind for case in cases]
    assert (kinds.count("good"), kinds.count("leaves"), kinds.count("bad")) == (80, 10, 10)
    assert cases == load_mixed.plan_cases(100, PROMPTS, 8, 3) != load_mixed.plan_cases(100, PROMPTS, 8, 4)
    assert {case.status for case in cases if case.kind == "bad"} == {400, 404, 415}
    good = [case.request.body for case in cases if case.kind == "good"]
    for name in ("stream", "speculative", "temperature"):
        assert len({str(body[name]) for body in good}) == 2
    greedy = load_mixed.plan_cases(100, PROMPTS, 8, 3, greedy_only=True)
    assert {case.request.body["temperature"] for case in greedy if case.kind != "bad"} == {0}


def test_mixed_requests_leave_a_server_whole() -> None:
    reports: list[tuple[str, int, int]] = []

    async def main() -> dict[str, Any]:
        async with serving() as (client, _, url):
            cases = load_mixed.plan_cases(80, PROMPTS, 30, 1)
            server = load_server.Server(url, "here", os.getpid())
            return await load_mixed.run_mixed(server, client, cases, 6, lambda *args: reports.append(args))

    found = run(main())
    assert found["failures"] == []
    assert found["kinds"] == {"good": 64, "leaves": 8, "bad": 8}
    assert (found["statuses"]["400"], found["statuses"]["404"], found["statuses"]["415"]) == (5, 2, 1)
    assert sum(found["statuses"].values()) == 80 and found["compared"] == 64
    assert set(found["gauges"].values()) == {0.0}
    assert found["resident_bytes_before"] > 0 and found["resident_bytes_after"] > 0
    assert reports[-1] == ("mixed requests", 80, 80)
    assert "Nothing failed." in load_report.mixed_table(found)


def test_what_counts_as_a_failure() -> None:
    good = load_mixed.Case(streamed(), "good", 200, ("a",), "a prompt")
    bad, leaves = load_mixed.Case(streamed(), "bad", 400, what="bad"), load_mixed.Case(streamed(), "leaves", 200)
    solo = {("a",): Answer(status=200, text="right", tokens=2)}

    def failure(case: load_mixed.Case, **answer: Any) -> str:
        return load_mixed.failure_of(case, Answer(**answer), solo) or ""

    assert not failure(good, status=200, text="right", tokens=2)
    assert "other text than alone: 'wrong'" in failure(good, status=200, text="wrong", tokens=2)
    assert "other text" in failure(good, status=200, text="right", tokens=3)
    assert "429 in place of 200" in failure(good, status=429, error="busy")
    assert "no answer in place of 200" in failure(good, error="ConnectError")
    assert "broke off" in failure(good, status=200, error="broke off")
    assert not failure(bad, status=400)
    assert "200 in place of 400" in failure(bad, status=200)
    assert not failure(leaves, left=True)
    assert not failure(leaves, status=200, text="it was faster", tokens=1)
    assert all("503" in failure(case, status=503, left=True) for case in (good, bad, leaves))
    solo[("a",)].error = "never"
    assert "alone it was not answered" in failure(good, status=200, text="right", tokens=2)


def test_other_texts_and_rows_left_behind_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def stuck(client: httpx.AsyncClient, seconds: float) -> dict[str, float]:
        return {"kv_cache_usage_perc": 0.25, "num_requests_running": 0.0}

    monkeypatch.setattr(load_mixed, "settled_gauges", stuck)
    alone = True

    def switch(what: str, done: int, total: int) -> None:
        nonlocal alone
        alone = what != "answers computed alone"

    async def main() -> dict[str, Any]:
        async with serving() as (client, llm, url):
            llm.model.answer = lambda prompt: "right" if alone else "wrong"
            case = load_mixed.Case(streamed(stream=False), "good", 200, ("a",), "a prompt")
            return await load_mixed.run_mixed(load_server.Server(url, ""), client, [case], 1, switch)

    found = run(main())
    assert len(found["failures"]) == 2
    assert "other text than alone: 'wrong' in place of 'right'" in found["failures"][0]
    assert found["failures"][1] == "kv_cache_usage_perc is 0.25 when all is over"
    assert load.has_failed({"mixed": found})
    assert "FAILED: a prompt" in load_report.mixed_table(found) and "- -> - MB" in load_report.mixed_table(found)


# Reports.


def report_of(**more: Any) -> dict[str, Any]:
    loop = Loop([("a", timed((1.0, 1), (2.0, 3), drafts=1, draft_tokens=4, accepted=1))], 0.0, 2.0)
    slow = Loop([("a", timed((2.0, 1), (4.0, 3)))], 0.0, 4.0)
    rows = [load_report.load_row(4, False, [slow]), load_report.load_row(4, True, [loop])]
    head = {"machine": "a machine", "versions": "outpace 1", "revision": "abc", "began": "today", "server": "a model"}
    return {**head, "settings": {"rounds": 1}, "load": rows, "differing": [], "notes": ["A note."], **more}


def test_the_report_by_hand() -> None:
    text = load_report.render(report_of())
    assert "a machine\n\noutpace 1, revision abc, today\n\na model\n\nSettings: rounds 1" in text
    assert "| 4 | plain | 0.8 | 1.00 | 2000.0 | 2000.0 | 2000.0 | 2000.0 | 1000.0 | - | - | 0 |" in text
    assert "| 4 | drafts | 1.5 | 2.00 | 1000.0 | 1000.0 | 1000.0 | 1000.0 | 500.0 | 0.25 | 2.00 | 0 |" in text
    assert "never differed" in text and text.endswith("A note.\n")
    assert "DIFFERED for a, b" in load_report.render(report_of(differing=["a", "b"]))
    assert load.has_failed(report_of(differing=["a"])) and not load.has_failed(report_of())


def test_a_failed_answer_fails_the_run() -> None:
    loop = Loop([("a", Answer(status=500, error="broken"))], 0.0, 1.0)
    rows = [load_report.load_row(1, False, [loop])]
    assert load.has_failed(report_of(load=rows))
    assert "| 1 | plain | 0.0 | - | - | - | - | - | - | - | - | 1 |" in load_report.load_table(rows)


def test_saving_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    written = load.save(report_of(), tmp_path / "new" / "run.1")
    assert [path.name for path in written] == ["run.1.json", "run.1.md"]
    assert json.loads(written[0].read_text()) == report_of()
    assert written[1].read_text() == load_report.render(report_of())


def test_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    written = load.save(report_of(), tmp_path / "run")
    assert written[2].read_bytes().startswith(b"\x89PNG")


# The command line, and a whole run.


def test_options_of_the_server_stand_behind_two_dashes() -> None:
    args = load_options.parse(["--model", "m", "--threads", "1", "--clients", "1,8", "--", "--max-num-seqs", "3"])
    own = ["--no-enable-prefix-caching", "--model", "m", "--threads", "1"]
    assert args.options == [*own, "--max-num-seqs", "3"]
    assert args.clients == [1, 8] and args.parts == ["load", "prefill", "overhead"]
    assert load_options.parse(["--url", "http://h:1"]).options == []


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--clients", "0"], "at least 1"),
        (["--parts", "load,lunch"], "'lunch' is not possible: parts are load, prefill, overhead"),
        (["--url", "http://h:1", "--", "--seed", "1"], "leave out --threads and the options"),
        (["--prompts", "/nowhere"], "is not there"),
    ],
)
def test_bad_options(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load_options.parse(words)
    assert ended.value.code == 2 and text in capsys.readouterr().err


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_options.parse(["--help"])
    said = capsys.readouterr().out
    for name in (
        "--model",
        "--threads",
        "--url",
        "--clients",
        "--mixed",
        "--save",
        "--parts",
        "options of outpace serve",
    ):
        assert name in said


def test_resident_bytes(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("Name:\tpython\nVmHWM:\t    2000 kB\nVmRSS:\t    1000 kB\n")
    assert load_server.resident_bytes(tmp_path / "status") == 1_024_000
    assert load_server.resident_bytes(tmp_path / "none") is None
    assert load_server.Server("http://h", "").resident_bytes() is None


def test_a_server_that_does_not_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert load.main(["--model", "/nowhere/at/all"]) == 1
    assert "the server ended" in capsys.readouterr().err


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    (folder / "p.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    return folder


def words_for(folder: Path) -> tuple[list[str], list[str]]:
    options = ["--quantization", "none", "--kernels", "torch", "--cache-tokens", "20000"]
    return ["--model", str(folder), "--threads", "1", f"--prompts={folder / 'p.jsonl'}", "--max-tokens=12"], options


def test_a_whole_run(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, options = words_for(tiny)
    more = ["--clients=1,3", "--requests=4", "--rounds=2", "--streams=2", "--long-prompt=700", f"--save={tmp_path}/r"]
    assert load.main([*words, *more, "--", *options]) == 0
    saved = json.loads((tmp_path / "r.json").read_text())
    assert [(row["clients"], row["speculative"], row["answers"]) for row in saved["load"]] == [
        (1, False, 8),
        (1, True, 8),
        (3, False, 12),
        (3, True, 12),
    ]
    for row in saved["load"]:
        assert row["failed"] == 0 and row["tokens"] == 12 * row["answers"] and row["cached_tokens"] == 0
        assert row["tokens_per_second"] > 0 and 0 < row["first_token_p50"] <= row["first_token_p95"]
    assert saved["differing"] == []
    assert [found["prompt_tokens"] for found in saved["prefill"]] == [700, 700]
    assert [found["streams"] for found in saved["prefill"]] == [2, 2]
    assert all(row["same_text"] and row["prompts"] == 4 and row["whole_ratio"] > 0 for row in saved["overhead"])
    said = capsys.readouterr()
    assert (tmp_path / "r.md").read_text() in said.out
    assert "3 clients, drafts, round 2" in said.err


def test_a_whole_mixed_run(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, options = words_for(tiny)
    assert load.main([*words, "--clients=4", "--mixed=40", "--", *options]) == 0
    said = capsys.readouterr().out
    assert "40 mixed requests (" in said and "Nothing failed." in said
    assert "num_requests_running 0, num_requests_waiting 0, kv_cache_usage_perc 0" in said


def test_a_server_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> dict[str, Any]:
        async with serving() as (_, _, url):
            words = [
                "--url",
                url,
                "--clients=2",
                "--requests=4",
                "--rounds=1",
                "--max-tokens=9",
                "--parts=load,overhead",
            ]
            args = load_options.parse(words)
            with load.Progress() as progress:
                return await load.run_against(args, load_server.Server(url, "elsewhere"), progress)

    found = run(main())
    assert "not measured" in found["notes"][0] and "overhead" not in found
    assert [row["answers"] for row in found["load"]] == [4, 4]
    assert found["load"][1]["acceptance_rate"] > 0


def test_a_run_that_ends_early_keeps_what_it_has() -> None:
    async def main() -> dict[str, Any]:
        async with serving() as (_, _, url):
            args = load_options.parse(["--url", url, "--clients=1", "--requests=2", "--rounds=1", "--long-prompt=1300"])
            with load.Progress() as progress:
                return await load.run_against(args, load_server.Server(url, "elsewhere"), progress)

    found = run(main())
    assert found["load"] and found["ended_early"]
    assert "ENDED EARLY: " in found["notes"][0] and "not answered" in found["notes"][0]
