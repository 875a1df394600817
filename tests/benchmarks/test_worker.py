"""Workers and the client that asks them, over real processes; the numbers in an answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from engines.client import Worker, WorkerFailed
from engines.processes import cpu_seconds_of_tree, machine_cpu_seconds, memory_of_tree, process_tree
from engines.protocol import Answer, Prompt, Recorder, Settings, parse

MODULE = "tests.benchmarks.fake_worker"
ROOT = Path(__file__).resolve().parents[2]


def settings(**options: str) -> Settings:
    return Settings("model", None, "plain", options, 1, 64, 5, [0], 8, "scratch")


def worker(log: Path) -> Worker:
    return Worker(Path(sys.executable), MODULE, threads=1, log=log, environment={"PYTHONPATH": str(ROOT)})


def test_a_worker_loads_answers_and_ends(tmp_path: Path) -> None:
    with worker(tmp_path / "log") as one:
        loaded = one.load(settings(), 60.0)
        answer, memory, others = one.generate(Prompt([5, 6], 3, False), 60.0)
        pid = one._process.pid
    assert loaded["versions"] == {"counting": "1.0", "neighbours": "none"} and loaded["notes"] == ["it counts"]
    assert answer.token_ids == [1, 2, 3] and answer.passes == 1 and answer.drafted is None
    assert 0 < memory["resident"] <= memory["peak"] and others >= 0
    assert process_tree(pid) == []
    assert "an engine's own words" in (tmp_path / "log").read_text()


def test_logits_are_written_as_one_array(tmp_path: Path) -> None:
    with worker(tmp_path / "log") as one:
        one.load(settings(), 60.0)
        one.score([[1, 2], [7]], tmp_path / "logits.npy", 60.0)
    found = np.load(tmp_path / "logits.npy")
    assert found.dtype == np.float32 and found.argmax(-1).tolist() == [1, 2, 7]


@pytest.mark.parametrize(
    ("option", "text"),
    [("die", "ended with status 3: out of luck"), ("sleep", "no answer within 1 s")],
)
def test_a_worker_that_dies_or_hangs_is_told(tmp_path: Path, option: str, text: str) -> None:
    with worker(tmp_path / "log") as one:
        one.load(settings(**{option: "yes"}), 60.0)
        with pytest.raises(WorkerFailed, match=text):
            one.generate(Prompt([5], 3, False), 1.0 if option == "sleep" else 60.0)
        one._process.kill()


def test_what_an_engine_refuses_is_one_line(tmp_path: Path) -> None:
    with worker(tmp_path / "log") as one:
        with pytest.raises(WorkerFailed, match=r"^ValueError: this model$"):
            one.load(settings(refuse="yes"), 60.0)
        one.load(settings(silent="yes"), 60.0)  # and it can be asked again
        with pytest.raises(WorkerFailed, match=r"^no logits here$"):
            one.score([[1]], tmp_path / "logits.npy", 60.0)


def test_an_environment_that_cannot_run_python_says_so(tmp_path: Path) -> None:
    unable = Worker(Path(sys.executable), "no_such_module_here", threads=1, log=tmp_path / "log")
    with unable, pytest.raises(WorkerFailed, match="No module named no_such_module_here"):
        unable.load(settings(), 60.0)


def test_speed_leaves_out_the_prompt_and_what_came_with_it() -> None:
    assert Answer([1, 2, 3, 4, 5], 2.0, 1, 4.0).milliseconds_per_token == 500.0
    assert Answer([1, 2, 3, 4, 5], 2.0, 3, 4.0).milliseconds_per_token == 1000.0
    assert Answer([1, 2], 2.0, 2, 2.0).milliseconds_per_token is None
    assert Answer([1, 2, 3, 4, 5], 2.0, 1, 4.0).whole_milliseconds_per_token == 800.0


def test_a_recorder_notes_the_first_tokens_and_refuses_none() -> None:
    recorder = Recorder()
    recorder.add([])
    with pytest.raises(RuntimeError, match="no token"):
        recorder.answer()
    recorder.add([4, 5])
    recorder.add([6])
    answer = recorder.answer(drafted=7)
    assert (answer.token_ids, answer.first_tokens, answer.drafted) == ([4, 5, 6], 2, 7)
    assert 0 < answer.first_seconds <= answer.total_seconds


def test_messages_are_read_whatever_else_they_carry() -> None:
    assert parse(
        Prompt, {"kind": "generate", **json.loads('{"token_ids": [1], "max_tokens": 2, "ignore_eos": true}')}
    ) == (Prompt([1], 2, True))


def test_a_process_counts_with_what_it_started() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "import time; x = bytearray(64 << 20); print(1, flush=True); time.sleep(60)"],
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdout is not None and child.stdout.readline()
        assert set(process_tree(os.getpid())) >= {os.getpid(), child.pid}
        assert memory_of_tree(child.pid)["resident"] > 64 << 20
        both, own = memory_of_tree(os.getpid())["resident"], memory_of_tree(child.pid)["resident"]
        assert both > own
    finally:
        child.kill()
        child.communicate()
    assert memory_of_tree(child.pid) == {"resident": 0, "peak": 0}


def test_processor_time_of_this_process_is_part_of_the_machines() -> None:
    mine, all_before = cpu_seconds_of_tree(os.getpid()), machine_cpu_seconds()
    end = time.process_time() + 0.2
    while time.process_time() < end:
        sum(range(1000))
    used = cpu_seconds_of_tree(os.getpid()) - mine
    assert used >= 0.15 and machine_cpu_seconds() - all_before >= 0.15
