"""Starting and ending the server, in processes of their own as users have them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import httpx
import pytest

from outpace.errors import InvalidParameter, OutpaceError
from outpace.params import SamplingDefaults
from outpace.server import main as server_main
from outpace.server import serving
from outpace.server.arguments import resolve
from outpace.server.main import bind, main
from tests.server.tiny_folder import save_tiny_model

PATIENCE = 120.0
"""Seconds after which a process hangs."""
OPTIONS = ("--quantization", "none", "--kernels", "torch", "--threads", "1", "--cache-tokens", "20000", "--port", "0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@dataclass
class Process:
    """A server and what it has said so far."""

    popen: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first line that has it."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            for line in list(self.lines):
                if match := re.search(pattern, line):
                    return match
            assert self.popen.poll() is None, self.lines
            time.sleep(0.05)
        raise AssertionError(f"no {pattern} in {self.lines}")

    def address(self) -> str:
        return self.wait_for(r"ready at (http://127\.0\.0\.1:\d+)")[1]

    def end(self) -> int:
        return self.popen.wait(PATIENCE)


@contextmanager
def started(*arguments: str, module: str = "outpace") -> Iterator[Process]:
    words = ["serve", *arguments] if module == "outpace" else arguments
    popen = subprocess.Popen(
        [sys.executable, "-m", module, *words],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    process = Process(popen)
    reader = threading.Thread(target=_read, args=(popen.stderr, process.lines), daemon=True)
    reader.start()
    try:
        yield process
    finally:
        popen.kill()
        popen.wait()
        reader.join()
        assert popen.stderr is not None
        popen.stderr.close()


def _read(stream: IO[str], lines: list[str]) -> None:
    lines.extend(iter(stream.readline, ""))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "outpace", "serve", *arguments], capture_output=True, text=True, timeout=PATIENCE
    )


def tokens_of(response: httpx.Response, on_first: Any = lambda: None) -> int:
    """Chunks with text of a streamed completion; calls `on_first` after the first."""
    count = 0
    for line in response.iter_lines():
        if line == "data: [DONE]":
            return count
        if line.startswith("data: ") and json.loads(line[6:]).get("choices"):
            count += 1
            if count == 1:
                on_first()
    raise AssertionError("the stream broke off")


def completion(max_tokens: int) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "hello", "max_tokens": max_tokens, "stream": True, "ignore_eos": True}


def test_a_server_from_start_to_end(folder: Path, tmp_path: Path) -> None:
    """Ready line, an answer, a second server at the same address, and a signal while an answer is on its way.

    That answer is complete, so it is recorded.
    """
    arguments = ("--model", str(folder), "--served-model-name", "tiny", "--num-speculative-tokens", "3", "-tp", "1")
    with started(*arguments, "--record", str(tmp_path / "records"), *OPTIONS, module="outpace.server") as process:
        address = process.address()
        ready = next(line for line in process.lines if "ready at" in line)
        for part in (
            folder.name,
            "drafter suffix, at most 3 tokens",
            "memory: model",
            "cache of at most 20000 tokens (",
        ):
            assert part in ready
        assert sum("--tensor-parallel-size" in line for line in process.lines) == 1
        assert any("loading" in line for line in process.lines)
        assert [item["id"] for item in httpx.get(f"{address}/v1/models").json()["data"]] == ["tiny"]
        second = run(str(folder), "--port", address.rpartition(":")[2])
        assert (second.returncode, second.stdout) == (1, "")
        assert "is taken by another program" in second.stderr
        half_sent = socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])))
        half_sent.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n")
        half_sent.sendall(b"Content-Length: 50\r\n\r\n{")
        with httpx.stream("POST", f"{address}/v1/completions", json=completion(100), timeout=PATIENCE) as response:
            assert response.status_code == 200
            assert tokens_of(response, lambda: process.popen.send_signal(signal.SIGTERM)) > 20
        with half_sent:
            assert half_sent.recv(100) == b""  # it is not waited for: nothing could come of it
        assert process.end() == 0
        assert any("1 request may go on for 30 s" in line for line in process.lines)
        assert any(f"answers are recorded in {tmp_path / 'records'}, at most 1 GB" in line for line in process.lines)
        [file] = (tmp_path / "records").iterdir()
        header, answer = map(json.loads, file.read_text().splitlines())
        assert (header["target"]["model"], len(answer["token_ids"])) == (folder.name, 100)
        assert not any("Traceback" in line for line in process.lines)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{address}/v1/models")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_it_at_once(folder: Path, number: int) -> None:
    with started(str(folder), "--served-model-name", "tiny", *OPTIONS) as process:
        address = process.address()
        with httpx.stream("POST", f"{address}/v1/completions", json=completion(6000), timeout=PATIENCE) as response:
            lines = response.iter_lines()
            next(lines)
            process.popen.send_signal(number)
            process.wait_for("may go on")
            next(lines)
            process.popen.send_signal(number)
            assert process.end() == 1
            with pytest.raises(httpx.HTTPError):
                list(lines)


@pytest.mark.slow
def test_answers_that_take_longer_than_the_time_to_drain_are_cut(folder: Path) -> None:
    with started(str(folder), "--served-model-name", "tiny", "--drain-seconds", "1", *OPTIONS) as process:
        address = process.address()
        with httpx.stream("POST", f"{address}/v1/completions", json=completion(8000), timeout=PATIENCE) as response:
            lines = response.iter_lines()
            next(lines)
            process.popen.send_signal(signal.SIGTERM)
            *_, last = (line for line in lines if line)
            assert json.loads(last.removeprefix("data: "))["error"]["message"].startswith("the server is stopping")
            assert process.end() == 0
        assert not any("Traceback" in line for line in process.lines)


@pytest.mark.slow
def test_a_signal_while_the_model_loads(folder: Path) -> None:
    with started(str(folder), *OPTIONS, "--host", "0.0.0.0") as process:
        process.wait_for("--api-key asks for a key")
        process.popen.send_signal(signal.SIGTERM)
        assert process.end() == 0
        assert not any("Traceback" in line for line in process.lines)


WITHOUT_TORCH = {
    "--help": (0, "speculation:"),
    "m --print-config --speculative-model d --num-speculative-tokens 2": (0, '"method": "draft_model"'),
    "--num-speculative-tokens 99": (2, "0 (off) to 64"),
    "--no-such-flag": (2, "is not known"),
    "--enable-lora": (2, "merge the adapter"),
    "--host no.such.host.invalid": (2, "--host"),
}


@pytest.mark.parametrize("line", WITHOUT_TORCH)
def test_it_answers_without_torch(line: str) -> None:
    code = (
        "import sys; from outpace.cli.main import main; code = main(['serve', *sys.argv[1:]]);"
        "sys.exit(99 if {'torch', 'transformers', 'fastapi'} & set(sys.modules) else code)"
    )
    done = subprocess.run([sys.executable, "-c", code, *line.split()], capture_output=True, text=True, timeout=PATIENCE)
    expected, text = WITHOUT_TORCH[line]
    assert (done.returncode, text in done.stdout + done.stderr) == (expected, True), done.stderr
    assert "Traceback" not in done.stderr


def test_a_chat_template_that_cannot_be_read_is_told_before_the_model_loads(folder: Path, tmp_path: Path) -> None:
    template = tmp_path / "broken.jinja"
    template.write_text("{{ messages[0].content }}\n{% if messages")
    done = run(str(folder), *OPTIONS, "--chat-template", str(template))
    assert (done.returncode, done.stdout) == (2, "")
    assert "--chat-template cannot be read: line 2: " in done.stderr
    assert "loading" not in done.stderr and "Traceback" not in done.stderr


def test_print_config_is_json_with_everything_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["m", "--print-config", "--spec-tokens", "2", "--enforce-eager"], nullcontext) == 0  # type: ignore[arg-type]
    shown = json.loads(capsys.readouterr().out)
    assert shown["speculative"][0]["num_speculative_tokens"] == 2
    assert shown["engine"]["model"] == shown["server"]["served_model_names"][0] == "m"
    assert len(shown["warnings"]) == 1


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_main, "find_spec", lambda name: None if name == "fastapi" else object())
    with pytest.raises(OutpaceError, match=r"needs fastapi: pip install 'outpace\[server\]'"):
        main(["m"], nullcontext)  # type: ignore[arg-type]


@dataclass
class FakeBuilt:
    """What `build_engine` changes of an engine."""

    defaults: SamplingDefaults


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", SamplingDefaults(temperature=0.3, top_k=7)),
        ("--generation-config vllm", SamplingDefaults()),
        ("--override-generation-config.top_p 0.5", SamplingDefaults(temperature=0.3, top_k=7, top_p=0.5)),
        (
            '--generation-config vllm --override-generation-config {"temperature":0,"max_new_tokens":5}',
            SamplingDefaults(temperature=0, max_tokens=5),
        ),
    ],
)
def test_sampling_defaults(line: str, expected: SamplingDefaults, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the model's, unless the settings say otherwise."""
    model = SamplingDefaults(temperature=0.3, top_k=7)
    monkeypatch.setattr(serving, "build", lambda *args, **options: FakeBuilt(model))
    built = serving.build_engine(resolve(line.split()), print, print)
    assert built.defaults == expected


def test_an_address_can_be_bound_once() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(OutpaceError, match=f"127.0.0.1:{port} is taken") as caught:
            bind("127.0.0.1", port)
        assert caught.value.exit_code == 1
        socket.create_connection(("127.0.0.1", port)).close()
    with bind("127.0.0.1", port) as again:
        assert again.getsockname()[1] == port


def test_an_address_of_another_machine() -> None:
    with pytest.raises(InvalidParameter, match="is no address of this machine"):
        bind("192.0.2.1", 0)
