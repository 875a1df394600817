"""A server to put under load: started here, or running already; what it says about itself."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx
from prometheus_client.parser import text_string_to_metric_families

_LOADING_SECONDS = 1200.0
_ENDING_SECONDS = 60.0
_READY = re.compile(r"ready at (https?://\S+): (.*)")
_GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


@dataclass(frozen=True)
class Server:
    """Where requests go.

    Args:
        url: its address.
        description: what it said when it was ready.
        pid: of its process; None if it was not started here.
    """

    url: str
    description: str
    pid: int | None = None

    def resident_bytes(self) -> int | None:
        """Memory that its process holds now; None where that cannot be seen."""
        return None if self.pid is None else resident_bytes(Path(f"/proc/{self.pid}/status"))


def resident_bytes(status: Path) -> int | None:
    """VmRSS of a process; None on systems without such files."""
    if not status.is_file():
        return None
    found = re.search(r"^VmRSS:\s+(\d+) kB$", status.read_text(), re.MULTILINE)
    return None if found is None else 1024 * int(found[1])


@contextmanager
def started(options: Sequence[str], say: Callable[[str], None]) -> Iterator[Server]:
    """`outpace serve` with these options on a free port, until the block is left.

    Raises:
        RuntimeError: it ended, or was not ready in time; with its last words.
    """
    command = [sys.executable, "-m", "outpace", "serve", "--port", "0", *options]
    say(f"starting: {' '.join(command[2:])}")
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    assert process.stderr is not None
    lines: deque[str] = deque(maxlen=50)
    ready = threading.Event()
    reader = threading.Thread(target=_read, args=(process.stderr, lines, ready), daemon=True)
    reader.start()
    try:
        yield _wait_until_ready(process, lines, ready)
    finally:
        process.terminate()
        try:
            process.wait(_ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join()
        process.stderr.close()


def _read(stream: IO[str], lines: deque[str], ready: threading.Event) -> None:
    for line in stream:
        lines.append(line.rstrip())
        if _READY.search(line):
            ready.set()
    ready.set()  # it has ended


def _wait_until_ready(process: subprocess.Popen[str], lines: deque[str], ready: threading.Event) -> Server:
    in_time = ready.wait(_LOADING_SECONDS)
    found = next((match for line in list(lines) if (match := _READY.search(line))), None)
    if found is None:
        what = "the server ended" if in_time else f"the server was not ready after {_LOADING_SECONDS:.0f} s"
        raise RuntimeError(f"{what}: {' '.join(lines) or 'it said nothing'}")
    return Server(found[1], found[2], process.pid)


async def read_gauges(client: httpx.AsyncClient) -> dict[str, float]:
    """Running and waiting requests and the used share of the cache, by the names they have at /metrics.

    Raises:
        RuntimeError: it does not say.
    """
    answer = await client.get("/metrics")
    if answer.status_code != 200:
        raise RuntimeError(f"/metrics answers {answer.status_code}: {answer.text[:200]}")
    found = {
        sample.name.removeprefix("vllm:"): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
        if sample.name in _GAUGES
    }
    if len(found) < len(_GAUGES):
        raise RuntimeError(f"/metrics has {sorted(found)} only, of {', '.join(_GAUGES)}")
    return found


async def settled_gauges(client: httpx.AsyncClient, seconds: float) -> dict[str, float]:
    """The gauges once all are 0, or as they are after so many seconds."""
    end = time.monotonic() + seconds
    while True:
        found = await read_gauges(client)
        if not any(found.values()) or time.monotonic() > end:
            return found
        await asyncio.sleep(0.05)
