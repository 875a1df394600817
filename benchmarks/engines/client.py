"""Starts a worker in its own environment, asks it, and ends it with all it started."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engines.processes import cpu_seconds_of_tree, machine_cpu_seconds
from engines.protocol import Answer, Prompt, Settings, parse

__all__ = ["Worker", "WorkerFailed"]

_START = Path(__file__).resolve().parent / "start.py"


class WorkerFailed(Exception):
    """A worker died, was too slow, or said why it cannot; the text is one line."""


class Worker:
    """One engine in one way of speculating, in a process of its own. Use it as a context manager.

    Args:
        python: the interpreter of its environment.
        module: the worker, as `engines.outpace_worker`.
        threads: CPU threads; told to the libraries that read it at start-up.
        log: what it prints goes to the end of this file.
        environment: further environment variables.
    """

    def __init__(
        self, python: Path, module: str, *, threads: int, log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
        own = {name: str(threads) for name in names}
        fixed = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._log = log.open("a", encoding="utf-8")
        self._log_path = log
        self._log_begin = self._log.tell()
        self._process = subprocess.Popen(
            [str(python), str(_START), module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **own, **fixed, **(environment or {})},
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._process.stdout, selectors.EVENT_READ)
        self._buffer = b""

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def load(self, settings: Settings, timeout: float) -> dict[str, Any]:
        """Loads the engine. Returns load_seconds, versions, notes and memory.

        Raises:
            WorkerFailed: it cannot.
        """
        return self._ask({"kind": "load", **asdict(settings)}, timeout)

    def generate(self, prompt: Prompt, timeout: float) -> tuple[Answer, dict[str, int], float]:
        """Answers a prompt. Returns the answer, memory in bytes, and how many cores others used meanwhile.

        Raises:
            WorkerFailed: it cannot, or not in time.
        """
        clock = (time.perf_counter(), machine_cpu_seconds(), cpu_seconds_of_tree(self._process.pid))
        reply = self._ask({"kind": "generate", **asdict(prompt)}, timeout)
        wall = time.perf_counter() - clock[0]
        others = machine_cpu_seconds() - clock[1] - (cpu_seconds_of_tree(self._process.pid) - clock[2])
        return parse(Answer, reply), reply["memory"], max(0.0, others / wall)

    def score(self, texts: Sequence[Sequence[int]], path: Path, timeout: float) -> None:
        """Has the logits of texts written to `path`, a .npy file of [tokens, vocabulary] float32.

        Raises:
            WorkerFailed: it cannot, or hands out no logits.
        """
        self._ask({"kind": "score", "texts": [list(text) for text in texts], "path": str(path)}, timeout)

    def close(self) -> None:
        """Ends the worker and all it started."""
        if self._process.poll() is None:
            try:
                self._ask({"kind": "close"}, timeout=20.0)
                self._process.wait(timeout=10.0)
            except (WorkerFailed, subprocess.TimeoutExpired) as error:
                self._log.write(f"did not end by itself: {error}\n")
        with suppress(ProcessLookupError):  # all of it has ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                with suppress(BrokenPipeError):  # it can be told no more
                    stream.close()
        self._selector.close()

    def _ask(self, request: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerFailed(self._how_it_ended()) from None
        reply: dict[str, Any] = json.loads(self._read_line(time.monotonic() + timeout, timeout))
        if not reply["ok"]:
            raise WorkerFailed(reply["error"])
        return reply

    def _read_line(self, deadline: float, timeout: float) -> bytes:
        assert self._process.stdout is not None
        while b"\n" not in self._buffer:
            if not self._selector.select(max(0.0, deadline - time.monotonic())):
                raise WorkerFailed(f"no answer within {timeout:.0f} s")
            piece = os.read(self._process.stdout.fileno(), 1 << 20)
            if not piece:
                raise WorkerFailed(self._how_it_ended())
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _how_it_ended(self) -> str:
        code = self._process.wait()
        self._log.flush()
        with self._log_path.open("rb") as file:
            file.seek(self._log_begin)
            lines = file.read().decode(errors="replace").strip().splitlines()
        return f"the worker ended with status {code}: {lines[-1][:300] if lines else 'it printed nothing'}"
