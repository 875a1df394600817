"""llama.cpp's own server, over HTTP on this machine. Variants: plain, ngram (ngram-simple), draft.

Options: server, the path of its program; ngram_size, to look up n-grams of that length and draft as many tokens as
everybody. Standard library only.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from engines.protocol import Answer, NotExposed, Prompt, Recorder, Settings, serve

_START_SECONDS = 300.0


class LlamaServerEngine:
    """`protocol.Engine`."""

    def __init__(self, settings: Settings) -> None:
        program = Path(settings.options["server"])
        self.notes: list[str] = []
        self._url = f"http://127.0.0.1:{_free_port()}"
        libraries = {"LD_LIBRARY_PATH": f"{program.parent}:{os.environ.get('LD_LIBRARY_PATH', '')}"}
        environment = {**os.environ, **libraries}
        self._process = subprocess.Popen(
            [str(program), *self._arguments(settings)], stdout=sys.stderr, stderr=sys.stderr, env=environment
        )
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise
        said = subprocess.run([str(program), "--version"], capture_output=True, text=True, env=environment)
        lines = [line for line in (said.stdout + said.stderr).splitlines() if line.startswith("version")]
        self.versions = {"llama.cpp server": lines[0].partition(":")[2].strip() if lines else "?"}

    def generate(self, prompt: Prompt) -> Answer:
        body = {
            "prompt": prompt.token_ids,
            "n_predict": prompt.max_tokens,
            "ignore_eos": prompt.ignore_eos,
            "temperature": 0.0,
            "samplers": ["top_k"],
            "top_k": 1,
            "cache_prompt": False,  # else rows shared with the prompt before are not computed again
            "return_tokens": True,
            "stream": True,
        }
        recorder = Recorder()
        timings: dict[str, Any] = {}
        for event in self._stream("/completion", body):
            recorder.add(event.get("tokens", []))
            timings = event.get("timings", timings)
        drafted, accepted = timings.get("draft_n"), timings.get("draft_n_accepted")
        return recorder.answer(drafted=drafted, accepted=accepted)

    def score(self, texts: Sequence[Sequence[int]]) -> Iterator[Any]:
        raise NotExposed("the server hands out no logits of a prompt")

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _arguments(self, settings: Settings) -> list[str]:
        threads, context = str(settings.threads), str(settings.context)
        plain = ["--model", settings.target, "--ctx-size", context, "--parallel", "1", "--no-webui"]
        plain += ["--threads", threads, "--threads-batch", threads, "--host", "127.0.0.1"]
        plain += ["--port", self._url.rpartition(":")[2], "--cache-ram", "0"]
        if settings.variant == "plain":
            return plain
        if settings.variant == "ngram":
            size = settings.options.get("ngram_size")
            if size is None:
                self.notes.append("ngram-simple with its defaults: n-grams of 12, up to 48 draft tokens")
                return [*plain, "--spec-type", "ngram-simple"]
            self.notes.append(f"ngram-simple with n-grams of {size}, up to {settings.draft_tokens} draft tokens")
            own = ["--spec-ngram-simple-size-n", size, "--spec-ngram-simple-size-m", str(settings.draft_tokens)]
            return [*plain, "--spec-type", "ngram-simple", *own]
        if settings.variant == "draft":
            assert settings.draft is not None
            draft = ["--spec-type", "draft-simple", "--model-draft", settings.draft]
            return [*plain, *draft, "--spec-draft-n-max", str(settings.draft_tokens)]
        raise ValueError(f"variant={settings.variant!r} is not one of plain, ngram, draft")

    def _wait_until_ready(self) -> None:
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended with status {self._process.returncode}")
            try:
                with urllib.request.urlopen(self._url + "/health", timeout=5) as reply:
                    if reply.status == 200:
                        return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                pass  # it is still loading
            time.sleep(0.2)
        raise RuntimeError(f"the server was not ready within {_START_SECONDS:.0f} s")

    def _stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Events of a streamed answer (server-sent events, `data: {...}`)."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=3600) as reply:
            for line in reply:
                if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                    yield json.loads(line[6:])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    serve(LlamaServerEngine)
