"""Many different requests at once, some of them bad, and clients that leave: does the server stay whole?"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx
from load_clients import CHAT, COMPLETIONS, Answer, Request, ask, closed_loop
from load_server import Server, settled_gauges

LEAVING_SHARE = BAD_SHARE = 0.1
_SETTLING_SECONDS = 30.0
_LONG = "word " * 50_000
"""More tokens than `outpace serve` takes unless it is told to."""


@dataclass(frozen=True)
class Case:
    """One request and what is expected of it.

    Args:
        request: what is sent.
        kind: "good", "leaves" or "bad".
        status: that is to come.
        key: names the answer: requests with the same key have the same text.
        what: for people.
    """

    request: Request
    kind: str
    status: int
    key: tuple[str, ...] = ()
    what: str = ""


def plan_cases(
    count: int, prompts: Sequence[Mapping[str, Any]], max_tokens: int, seed: int, *, greedy_only: bool = False
) -> list[Case]:
    """`count` requests in a random order: a tenth whose clients leave, a tenth bad ones, the rest good ones."""
    draw = random.Random(seed)
    bad = _bad_cases(prompts[0], max_tokens)
    num_leaving, num_bad = round(LEAVING_SHARE * count), round(BAD_SHARE * count)
    cases = [bad[index % len(bad)] for index in range(num_bad)]
    for index in range(count - num_bad):
        case = _good_case(prompts[index % len(prompts)], max_tokens, draw, greedy_only)
        cases.append(_leaving(case, draw.randrange(6)) if index < num_leaving else case)
    draw.shuffle(cases)
    return cases


def _good_case(prompt: Mapping[str, Any], max_tokens: int, draw: random.Random, greedy_only: bool) -> Case:
    sampled = not greedy_only and draw.random() < 0.5
    sampling = {"temperature": 0.8, "seed": 7} if sampled else {"temperature": 0}
    chat = draw.random() < 0.7
    asked = {"messages": prompt["messages"]} if chat else {"prompt": prompt["messages"][-1]["content"]}
    body = {
        **asked,
        **sampling,
        "max_tokens": max_tokens,
        "stream": draw.random() < 0.7,
        "speculative": {"enabled": draw.random() < 0.5},
    }
    path = CHAT if chat else COMPLETIONS
    rule = "seeded" if sampled else "greedy"
    return Case(Request(path, body), "good", 200, (path, prompt["id"], rule), f"{prompt['id']}, {rule}, {path}")


def _leaving(case: Case, leave_after: int) -> Case:
    return replace(case, request=replace(case.request, leave_after=leave_after), kind="leaves")


def _bad_cases(prompt: Mapping[str, Any], max_tokens: int) -> list[Case]:
    good: dict[str, Any] = {"messages": prompt["messages"], "max_tokens": max_tokens}

    def bad(what: str, status: int, request: Request) -> Case:
        return Case(request, "bad", status, what=what)

    return [
        bad("a negative temperature", 400, Request(CHAT, {**good, "temperature": -1})),
        bad("no JSON", 400, Request(CHAT, content=b'{"messages": [')),
        bad("an unknown model", 404, Request(CHAT, {**good, "model": "no-such-model"})),
        bad("a field that nobody knows", 400, Request(CHAT, {**good, "temprature": 0.5, "stream": True})),
        bad("a prompt beyond the context", 400, Request(COMPLETIONS, {"prompt": _LONG, "max_tokens": 1})),
        bad("another content type", 415, Request(CHAT, content=b"Hello", content_type="text/plain")),
        bad("no messages", 400, Request(CHAT, {"max_tokens": 1})),
        bad("a path that is not there", 404, Request("/v1/nothing", good)),
    ]


async def run_mixed(
    server: Server,
    client: httpx.AsyncClient,
    cases: Sequence[Case],
    num_clients: int,
    report: Callable[[str, int, int], None],
) -> dict[str, Any]:
    """Answers every good request alone and plainly first, then all cases side by side.

    Returns:
        counts, `failures` in words (none: the server stayed whole), gauges and memory in bytes.
    """
    solo = await _answer_alone(client, [case for case in cases if case.kind == "good"], report)
    before = server.resident_bytes()
    count = 0

    def counted() -> None:
        nonlocal count
        count += 1
        report("mixed requests", count, len(cases))

    loop = await closed_loop(cases, num_clients, lambda case: ask(client, case.request), counted)
    gauges = await settled_gauges(client, _SETTLING_SECONDS)
    failures = [text for case, answer in loop.done if (text := failure_of(case, answer, solo))]
    failures += [f"{name} is {value:g} when all is over" for name, value in gauges.items() if value]
    return {
        "requests": len(cases),
        "clients": num_clients,
        "kinds": dict(Counter(case.kind for case in cases)),
        "statuses": dict(sorted(Counter(_status(answer) for _, answer in loop.done).items())),
        "compared": sum(case.kind == "good" and answer.error is None for case, answer in loop.done),
        "left_early": sum(answer.left for _, answer in loop.done),
        "failures": failures,
        "gauges": gauges,
        "resident_bytes_before": before,
        "resident_bytes_after": server.resident_bytes(),
    }


async def _answer_alone(
    client: httpx.AsyncClient, cases: Sequence[Case], report: Callable[[str, int, int], None]
) -> dict[tuple[str, ...], Answer]:
    """Every answer that is asked for, computed alone and without drafts."""
    distinct = {case.key: case.request for case in cases}
    found = {}
    for key, request in distinct.items():
        body = {**request.body, "stream": False, "speculative": {"enabled": False}}
        found[key] = await ask(client, Request(request.path, body))
        report("answers computed alone", len(found), len(distinct))
    return found


def failure_of(case: Case, answer: Answer, solo: Mapping[tuple[str, ...], Answer]) -> str | None:
    """What is wrong with an answer, in words; None if it is as expected."""
    if answer.status is not None and answer.status >= 500:
        return f"{case.what}: {answer.status} {answer.error}"
    if case.kind == "leaves" and answer.left:
        return None  # what it heard before is not judged
    if answer.status != case.status:
        return f"{case.what}: {answer.status or 'no answer'} in place of {case.status}: {answer.error}"
    if case.kind == "bad":
        return None
    if answer.error:
        return f"{case.what}: {answer.error}"
    if case.kind == "leaves":
        return None  # it ended before the client went
    alone = solo[case.key]
    if alone.error:
        return f"{case.what}: alone it was not answered: {alone.error}"
    if (alone.text, alone.tokens) != (answer.text, answer.tokens):
        return f"{case.what}: other text than alone: {answer.text!r} in place of {alone.text!r}"
    return None


def _status(answer: Answer) -> str:
    if answer.status is None:
        return "left before one" if answer.left else "no answer"
    return str(answer.status)
