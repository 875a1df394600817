"""Runs a load test of `outpace serve`; `--help` has what it measures and how. See `load_options.py`."""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import httpx
from load_clients import CHAT, COMPLETIONS, Answer, Loop, Request, ask, closed_loop, new_client
from load_library import load_library, measure_overhead
from load_mixed import plan_cases, run_mixed
from load_options import parse
from load_prefill import gaps_beside_prefill
from load_report import differing, draw, load_row, render
from load_server import Server, started
from machine import describe_machine

from outpace.cli.progress import Progress

_HERE = Path(__file__).resolve().parent
_STREAM_TOKENS = 2000
"""Of running streams beside a long prompt: they are to go on until it is computed."""
_PACKAGES = ("outpace", "fastapi", "uvicorn", "httpx")

Prompt = Mapping[str, Any]


class LoadTest:
    """One run against one server.

    Args:
        args: the command line.
        server: that is asked.
        client: of it.
        progress: is told how far it is.
    """

    def __init__(self, args: argparse.Namespace, server: Server, client: httpx.AsyncClient, progress: Progress) -> None:
        self._args = args
        self._server = server
        self._client = client
        self._progress = progress
        self._prompts = read_prompts(args.prompts)
        settings = (
            "model",
            "url",
            "clients",
            "requests",
            "rounds",
            "max_tokens",
            "long_prompt",
            "streams",
            "mixed",
            "seed",
        )
        self.run: dict[str, Any] = {
            "machine": describe_machine(),
            "versions": ", ".join(f"{name} {version(name)}" for name in _PACKAGES),
            "revision": _revision(),
            "began": time.strftime("%Y-%m-%d %H:%M"),
            "server": server.description,
            "settings": {
                **{name: getattr(args, name) for name in settings},
                "server_options": " ".join(args.options) or "none",
            },
            "notes": [],
        }

    async def measure(self) -> None:
        """The parts that were asked for; `run` has what is done if one fails."""
        await self._warm_up()
        if self._args.mixed:
            await self._mixed()
            return
        for name in self._args.parts:
            await {"load": self._load, "prefill": self._prefill, "overhead": self._overhead}[name]()

    async def _warm_up(self) -> None:
        for enabled in (False, True):
            answer = await ask(self._client, self._request(self._prompts[0], enabled, 8))
            if answer.error:
                raise RuntimeError(f"the server does not answer: {answer.status or ''} {answer.error}")

    async def _load(self) -> None:
        rows: list[dict[str, Any]] = []
        texts: list[tuple[str, Answer]] = []
        for clients in self._args.clients:
            loops: dict[bool, list[Loop[Prompt]]] = {False: [], True: []}
            for number in range(self._args.rounds):
                for enabled in (False, True) if number % 2 == 0 else (True, False):
                    loop = await self._round(clients, enabled, number)
                    loops[enabled].append(loop)
                    texts += [(prompt["id"], answer) for prompt, answer in loop.done]
            rows += [load_row(clients, enabled, found) for enabled, found in loops.items()]
            self.run.update(load=rows, differing=differing(texts))

    async def _round(self, clients: int, enabled: bool, number: int) -> Loop[Prompt]:
        total = max(self._args.requests, 2 * clients)
        name = f"{clients} clients, {'drafts' if enabled else 'plain'}, round {number + 1}"
        work = list(islice(cycle(self._prompts), total))
        return await closed_loop(
            work,
            clients,
            lambda prompt: ask(self._client, self._request(prompt, enabled, self._args.max_tokens)),
            counter(lambda done: self._progress.report(name, done, total)),
        )

    def _request(self, prompt: Prompt, enabled: bool, max_tokens: int, **more: Any) -> Request:
        body = {"messages": prompt["messages"], "temperature": 0, "max_tokens": max_tokens, "stream": True}
        return Request(CHAT, {**body, "speculative": {"enabled": enabled}, **more})

    async def _prefill(self) -> None:
        ids = await self._long_prompt()
        prompts = list(islice(cycle(self._prompts), self._args.streams))
        self.run["prefill"] = []
        for enabled in (False, True):
            streams = [self._request(prompt, enabled, _STREAM_TOKENS, ignore_eos=True) for prompt in prompts]
            body = {"prompt": ids, "temperature": 0, "max_tokens": 8, "ignore_eos": True, "stream": True}
            found = await gaps_beside_prefill(self._client, streams, Request(COMPLETIONS, body))
            self.run["prefill"].append({"speculative": enabled, "prompt_tokens": len(ids), **found})
            self._progress.report("streams beside a long prompt", 1 + enabled, 2)

    async def _long_prompt(self) -> list[int]:
        """Token ids of the benchmark's own prompts, one behind the other."""
        text = "\n\n".join(prompt["messages"][-1]["content"] for prompt in self._prompts)
        ids: list[int] = []
        while len(ids) < self._args.long_prompt:
            answer = await self._client.post("/tokenize", json={"prompt": text})
            if answer.status_code != 200:
                raise RuntimeError(f"/tokenize answers {answer.status_code}: {answer.text[:200]}")
            ids, text = answer.json()["tokens"], f"{text}\n\n{text}"
        return ids[: self._args.long_prompt]

    async def _overhead(self) -> None:
        if self._args.url is not None:
            self.run["notes"].append(
                "Overhead over the library: not measured, because the server was started elsewhere."
            )
            return
        llm = load_library(self._args.options, self._progress.say)
        prompts = self._prompts[: self._args.requests]
        self.run["overhead"] = await measure_overhead(
            self._client, llm, prompts, self._args.max_tokens, self._progress.report
        )

    async def _mixed(self) -> None:
        args = self._args
        cases = plan_cases(args.mixed, self._prompts, args.max_tokens, args.seed, greedy_only=args.greedy_only)
        clients = max(args.clients)
        self.run["mixed"] = await run_mixed(self._server, self._client, cases, clients, self._progress.report)


def counter(report: Callable[[int], None]) -> Callable[[], None]:
    """Calls `report` with 1, 2, 3, ..."""
    done = 0

    def count() -> None:
        nonlocal done
        done += 1
        report(done)

    return count


def read_prompts(path: Path) -> list[Prompt]:
    """Conversations, one of every task after the other, so that the first few are mixed."""
    found: dict[str, list[Prompt]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        prompt = json.loads(line)
        found.setdefault(prompt["task"], []).append(prompt)
    most = max(map(len, found.values()), default=0)
    return [prompts[index] for index in range(most) for prompts in found.values() if index < len(prompts)]


def has_failed(run: Mapping[str, Any]) -> bool:
    """Whether an answer was wrong, or none."""
    return bool(
        run.get("differing")
        or any(row["failed"] for row in run.get("load", []))
        or not all(row["same_text"] for row in run.get("overhead", []))
        or run.get("mixed", {}).get("failures")
    )


def save(run: Mapping[str, Any], path: Path) -> list[Path]:
    """Writes PATH.json, PATH.md and, if there is something to draw, PATH.png. Returns what it wrote."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = [path.with_name(f"{path.name}.{ending}") for ending in ("json", "md", "png")]
    written[0].write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
    written[1].write_text(render(run), encoding="utf-8")
    drawn = bool(run.get("load")) and draw(run["load"], written[2])
    return written if drawn else written[:2]


async def run_against(args: argparse.Namespace, server: Server, progress: Progress) -> dict[str, Any]:
    """All that was asked for; an error is a note in the result, beside what was measured before it."""
    async with new_client(server.url, args.api_key) as client:
        test = LoadTest(args, server, client, progress)
        try:
            await test.measure()
        except (RuntimeError, httpx.HTTPError) as error:
            test.run["notes"].append(f"ENDED EARLY: {error or type(error).__name__}")
            test.run["ended_early"] = True
        return test.run


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints and saves. Returns the exit code."""
    args = parse(sys.argv[1:] if argv is None else argv)
    with Progress() as progress:
        try:
            with _server_of(args, progress.say) as server:
                run = asyncio.run(run_against(args, server, progress))
        except RuntimeError as error:  # the server could not be started
            progress.say(f"load.py: {error}")
            return 1
    print(render(run))
    if args.save is not None:
        print("written: " + ", ".join(map(str, save(run, args.save))))
    return 1 if has_failed(run) or run.get("ended_early") else 0


def _server_of(args: argparse.Namespace, say: Callable[[str], None]) -> AbstractContextManager[Server]:
    if args.url is None:
        return started(args.options, say)
    return nullcontext(Server(args.url.rstrip("/"), f"a server at {args.url}"))


def _revision() -> str:
    """Of the checkout, marked where files differ from it."""
    command = ["git", "-C", str(_HERE), "describe", "--always", "--dirty"]
    found = subprocess.run(command, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
