"""Answers that are recorded: which ones, what stands in the files, how much of it, and what a bad disk does."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import stat
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from outpace.engine.outputs import CompletionOutput, RequestOutput, RequestStats
from outpace.errors import InvalidParameter
from outpace.server.arguments import resolve
from outpace.server.recording import Recorder, check_folder
from outpace.server.settings import ServerSettings
from tests.asynchronous import LONGEST_WAIT, run
from tests.server.calling import CHAT, COMPLETIONS, USER, client_of, post, refused, stream
from tests.server.scripted import scripted

HEADER = {"outpace_records": 1, "target": {"model": "me"}}


def recorder_in(folder: Path, max_bytes: int = 10**6) -> Recorder:
    check_folder(folder)
    return Recorder(folder, max_bytes, lambda: HEADER)


def output(answer: list[int], reason: str = "stop", prompt: tuple[int, ...] = (1, 2)) -> RequestOutput:
    return RequestOutput(0, None, list(prompt), [CompletionOutput(0, "", answer, reason)], RequestStats())


def lines_in(folder: Path) -> list[Any]:
    """All lines of all files, in order."""
    files = sorted(folder.glob("*.jsonl"))
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


def answers_in(folder: Path) -> list[list[int]]:
    return [line["token_ids"] for line in lines_in(folder) if "token_ids" in line]


def wait_until(recorder: Recorder, written: int, lost: int = 0) -> None:
    end = time.monotonic() + LONGEST_WAIT
    while (counts := recorder.counts()).written < written or sum(counts.lost.values()) < lost:
        assert time.monotonic() < end, counts
        time.sleep(0.005)


def test_answers_of_both_endpoints_are_recorded_and_others_are_not(tmp_path: Path) -> None:
    """Streamed or not; not those of `store: false`, of prompts that are only scored, and of clients that went away."""

    async def main() -> list[dict[str, Any]]:
        llm, expected = scripted("Hello"), []
        recorder = recorder_in(tmp_path / "here")
        async with client_of(llm, recorder=recorder) as client:
            for path, body in ((CHAT, {"messages": USER}), (COMPLETIONS, {"prompt": ["a", "b"], "max_tokens": 9})):
                for more in ({}, {"n": 2}, {"store": True}):
                    found = await post(client, path, **body, **more, return_token_ids=True)
                    whole = [choice["token_ids"] for choice in found["choices"]]
                    assert all(len(ids) > 3 for ids in whole)
                    expected += whole
                await post(client, path, **body, store=False)
                await stream(client, path, **body, store=False)
                await stream(client, path, **body)
                expected += whole  # the same once more
            await post(client, COMPLETIONS, prompt="a", echo=True, max_tokens=0, logprobs=0)
            llm.model.hold()
            gone = asyncio.ensure_future(client.post(CHAT, json={"messages": USER}))
            await llm.model.entered()
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
            llm.model.let_go()
            wait_until(recorder, len(expected))
            metrics = (await client.get("/metrics")).text
        recorder.close(LONGEST_WAIT)
        assert f'outpace:recorded_answers_total{{engine="0",model_name="org/scripted"}} {len(expected)}.0' in metrics
        assert sorted(answers_in(tmp_path / "here")) == sorted(expected)
        return lines_in(tmp_path / "here")

    lines = run(main())
    assert lines[0] == HEADER
    assert all(set(line) == {"prompt_token_ids", "token_ids"} and line["prompt_token_ids"] for line in lines[1:])


def test_nothing_is_recorded_unless_asked_for() -> None:
    async def main() -> None:
        async with client_of(scripted("ok"), ServerSettings()) as client:
            await post(client, CHAT, messages=USER)
            assert "recorded_answers" not in (await client.get("/metrics")).text
            error = await refused(client, CHAT, messages=USER, store="no")
            assert error["param"] == "store"

    run(main())


def test_answers_that_failed_or_were_given_up_are_left_out(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    for reason in ("stop", "abort", "length", "error"):
        recorder.record(output([ord(reason[0])], reason))
    recorder.record(output([]))
    recorder.close(LONGEST_WAIT)
    assert answers_in(tmp_path) == [[ord("s")], [ord("l")]]


def test_files_are_their_owners_and_rotate_within_the_limit(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "records"
    recorder = recorder_in(folder, 20_000)
    for number in range(2000):
        recorder.record(output([number, 0, 0, 0, 0, 0]))
    recorder.close(LONGEST_WAIT)
    files = sorted(folder.iterdir())
    sizes = [path.stat().st_size for path in files]
    assert 17_000 < sum(sizes) <= 20_000 and max(sizes) <= 2500 and len(files) >= 8
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert all(json.loads(path.read_text().splitlines()[0]) == HEADER for path in files)
    kept = [answer[0] for answer in answers_in(folder)]
    assert kept == list(range(kept[0], 2000)) and len(kept) > 200
    counts = recorder.counts()
    assert (counts.written, counts.num_bytes) == (2000, sum(sizes))


def test_a_new_recorder_goes_on_within_the_limit_of_the_old_files(tmp_path: Path) -> None:
    for round_number in range(3):
        recorder = recorder_in(tmp_path, 20_000)
        for number in range(400):
            recorder.record(output([round_number, number]))
        recorder.close(LONGEST_WAIT)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 20_000
    assert answers_in(tmp_path)[-1] == [2, 399]


def test_files_that_no_server_wrote_are_nobodys_to_delete(tmp_path: Path) -> None:
    """Of any name: without the first line of a server's, or with it under a name that none gives."""
    mine = {
        "answers-mine.jsonl": '{"prompt": "x"}\n' * 3000,
        "answers-20200101T000000.000000-1-000001.jsonl": '{"prompt": "x"}\n' * 3000,
        "answers-0-kept-by-hand.jsonl": json.dumps(HEADER) + "\n" + '{"prompt_token_ids":[1],"token_ids":[2]}\n' * 900,
    }
    for name, text in mine.items():
        (tmp_path / name).write_text(text)
    recorder = recorder_in(tmp_path, 20_000)
    for number in range(1000):
        recorder.record(output([number]))
    recorder.close(LONGEST_WAIT)
    assert {name: (tmp_path / name).read_text() for name in mine} == mine
    own = [path for path in tmp_path.iterdir() if path.name not in mine]
    size = sum(path.stat().st_size for path in own)
    assert 15_000 < size <= 20_000
    assert recorder.counts().num_bytes == size
    assert answers_in(tmp_path)[-1] != [0]
    assert recorder.counts().written == 1000


def test_two_servers_in_one_folder_leave_each_others_current_file(tmp_path: Path) -> None:
    """The quiet one's file is the oldest, and is written to the whole time."""
    quiet, busy = recorder_in(tmp_path, 20_000), recorder_in(tmp_path, 20_000)
    quiet.record(output([1]))
    wait_until(quiet, 1)
    for number in range(2000):
        busy.record(output([number + 10]))
    wait_until(busy, 2000)
    quiet.record(output([2]))
    quiet.close(LONGEST_WAIT)
    found = answers_in(tmp_path)
    assert [answer for answer in found if answer[0] < 10] == [[1], [2]]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 20_000 + 2500
    for number in range(2000):  # one that is no longer written goes as any other
        busy.record(output([number + 10]))
    busy.close(LONGEST_WAIT)
    assert [answer for answer in answers_in(tmp_path) if answer[0] < 10] == []


@pytest.mark.parametrize("move", [True, False])
def test_a_file_that_was_taken_away_is_followed_by_a_new_one(tmp_path: Path, move: bool) -> None:
    recorder = recorder_in(tmp_path / "here")
    recorder.record(output([1]))
    wait_until(recorder, 1)
    [file] = (tmp_path / "here").iterdir()
    if move:
        file.rename(tmp_path / "moved.jsonl")
    else:
        file.unlink()
    recorder.record(output([2]))
    recorder.close(LONGEST_WAIT)
    assert lines_in(tmp_path / "here") == [HEADER, {"prompt_token_ids": [1, 2], "token_ids": [2]}]
    assert recorder.counts().num_bytes == sum(path.stat().st_size for path in (tmp_path / "here").iterdir())


def test_whatever_fails_is_counted_and_said_once_and_the_next_one_is_tried(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = [True]

    def header() -> dict[str, Any]:
        if broken[0]:
            raise RuntimeError("no header today")
        return HEADER

    recorder = Recorder(tmp_path, 10**6, header)
    for number in range(3):
        recorder.record(output([number]))
    wait_until(recorder, 0, lost=3)
    broken[0] = False
    recorder.record(output([7]))
    recorder.close(LONGEST_WAIT)
    assert answers_in(tmp_path) == [[7]]
    assert recorder.counts().lost["disk"] == 3
    assert sum("no header today" in record.message for record in caplog.records) == 1


def test_a_file_that_cannot_be_closed_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, close = recorder_in(tmp_path), os.close
    recorder.record(output([1]))
    wait_until(recorder, 1)

    def failing(file: int) -> None:
        close(file)
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("outpace.server.record_file.RecordFile.close", lambda file: failing(file._file))
        recorder.renew()
        recorder.record(output([2]))
        wait_until(recorder, 1, lost=1)
    recorder.record(output([3]))
    recorder.close(LONGEST_WAIT)
    assert answers_in(tmp_path) == [[1], [3]]


def test_an_answer_longer_than_a_file_is_left_out(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path, 8000)
    recorder.record(output([7] * 2000))
    recorder.record(output([8]))
    recorder.record(output([7] * 2000))
    recorder.close(LONGEST_WAIT)
    assert answers_in(tmp_path) == [[8]]
    assert recorder.counts().lost == {"disk": 0, "queue": 0, "length": 2}


def test_a_changed_header_begins_a_new_file(tmp_path: Path) -> None:
    drafters = ["old"]
    recorder = Recorder(tmp_path, 10**6, lambda: {**HEADER, "drafters": list(drafters)})
    recorder.record(output([1]))
    wait_until(recorder, 1)
    drafters[:] = ["new"]
    recorder.renew()
    recorder.record(output([2]))
    recorder.close(LONGEST_WAIT)
    found = lines_in(tmp_path)
    assert [line.get("drafters") or line["token_ids"] for line in found] == [["old"], [1], ["new"], [2]]


def test_a_full_disk_is_said_once_and_leaves_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk takes half of a line, then nothing; later there is room again."""
    recorder, write = recorder_in(tmp_path), os.write
    recorder.record(output([1]))
    wait_until(recorder, 1)
    room = [10]

    def full(file: int, content: bytes) -> int:
        taken = content[: room[0]]
        if not taken:
            raise OSError(errno.ENOSPC, "No space left on device")
        room[0] -= len(taken)
        return write(file, taken)

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(os, "write", full)
        for number in range(5):
            recorder.record(output([number + 10]))
        wait_until(recorder, 1, lost=5)
    recorder.record(output([2]))
    recorder.close(LONGEST_WAIT)
    assert answers_in(tmp_path) == [[1], [2]]
    assert recorder.counts().lost["disk"] == 5
    [said] = [record.message for record in caplog.records if "cannot be recorded" in record.message]
    assert "No space left" in said and "serving goes on" in said


def test_who_hands_over_never_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that hangs holds the thread, and nobody else; what is too much to wait is left out and counted."""
    hanging, held, write = threading.Event(), threading.Event(), os.write

    def hang(file: int, content: bytes) -> int:
        held.set()
        assert hanging.wait(LONGEST_WAIT)
        return write(file, content)

    recorder = recorder_in(tmp_path)
    monkeypatch.setattr("outpace.server.recording._MOST_WAITING", 100)
    monkeypatch.setattr(os, "write", hang)
    recorder.record(output([0]))
    assert held.wait(LONGEST_WAIT)
    for number in range(50):
        recorder.record(output([number + 1]))
    assert recorder.counts().lost["queue"] == 50 - 100 // 3
    hanging.set()
    recorder.close(LONGEST_WAIT)
    assert answers_in(tmp_path) == [[number] for number in range(1 + 100 // 3)]
    recorder.record(output([99]))  # too late
    assert recorder.counts().lost["queue"] == 50 - 100 // 3 + 1


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidParameter, match=r"--record '.*file' is not possible: (File exists|Not a directory)"):
        check_folder(tmp_path / "file")


def test_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve([], {}).server.record is None
    found = resolve(["--record", "here", "--record-max-bytes", "25m"], {}).server
    assert (found.record, found.record_max_bytes) == (str(tmp_path / "here"), 25_000_000)
    with pytest.raises(InvalidParameter, match="--record-max-bytes 10 is not possible: it must be at least 1000000"):
        resolve(["--record-max-bytes", "10"], {})
