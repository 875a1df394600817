"""The report from records made by hand: every number in it can be worked out on paper."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from engines.report import losses, prompt_medians, render, standings, task_medians


def answer(prompt: str, number: int, speed: float | None, first: float, ids: list[int] | None = None) -> dict[str, Any]:
    return {
        "round": number,
        "prompt": prompt,
        "token_ids": [1, 2, 3, 4] if ids is None else ids,
        "first_seconds": first,
        "milliseconds_per_token": speed,
        "whole_milliseconds_per_token": first * 100,
        "passes": 2,
        "drafted": 4,
        "accepted": 1,
        "others_cores": 0.5,
    }


def record(engine: str, variant: str, answers: list[dict[str, Any]], reason: str | None = None) -> dict[str, Any]:
    return {
        "engine": engine,
        "variant": variant,
        "versions": {engine: "1.2"} if answers else {},
        "notes": ["common", f"of {variant}"] if answers else [],
        "load_seconds": [3.0, 5.0] if answers else [],
        "memory": {"resident": 7_000_000, "peak": 9_000_000} if answers else {},
        "quality": {"kl": 0.01234, "median_kl": 0.002, "agreement": 0.975, "positions": 100} if answers else None,
        "reason": reason,
        "answers": answers,
    }


def contenders() -> dict[str, Any]:
    slow = [
        answer("e1", 1, 40.0, 2.0),
        answer("e1", 2, 60.0, 2.0),
        answer("e2", 1, 70.0, 2.0),
        answer("c1", 1, 55.0, 0.5),
    ]
    fast = [answer("e1", 1, 20.0, 2.5), answer("e2", 1, 30.0, 2.5), answer("c1", 1, 60.0, 0.6, [9, 9])]
    other = [answer("e1", 1, 25.0, 1.0), answer("c1", 1, 50.0, 1.0)]
    return {
        "outpace-auto/plain": record("outpace-auto", "plain", slow),
        "outpace-auto/ngram": record("outpace-auto", "ngram", fast),
        "rival/plain": record("rival", "plain", other),
        "rival/ngram-10": record("rival", "ngram-10", [answer("c1", 1, None, 3.0)]),
        "absent/plain": record("absent", "plain", [], "no environment absent"),
    }


@pytest.fixture
def run() -> dict[str, Any]:
    prompts = [("e1", "edit", 100), ("c1", "chat", 20), ("e2", "edit", 300)]
    return {
        "machine": "A Processor",
        "revision": "abc123",
        "began": "2026-01-02 03:04",
        "models": {"target": "big.gguf", "draft": "small.gguf"},
        "settings": {"rounds": 2, "max_tokens": 16, "threads": 2, "draft_tokens": 5, "ignore_eos": False},
        "prompts": [{"name": name, "task": task, "tokens": tokens} for name, task, tokens in prompts],
        "contenders": contenders(),
    }


def test_medians_are_over_rounds_then_prompts(run: dict[str, Any]) -> None:
    plain = run["contenders"]["outpace-auto/plain"]
    assert prompt_medians(plain, "milliseconds_per_token") == {"e1": 50.0, "e2": 70.0, "c1": 55.0}
    assert task_medians(run, plain, "milliseconds_per_token") == {"edit": (60.0, 2), "chat": (55.0, 1)}


def test_answers_without_a_speed_are_left_out(run: dict[str, Any]) -> None:
    assert task_medians(run, run["contenders"]["rival/ngram-10"], "milliseconds_per_token") == {}
    assert task_medians(run, run["contenders"]["rival/ngram-10"], "first_seconds") == {"chat": (3.0, 1)}


def test_losses_name_the_row_that_was_beaten(run: dict[str, Any]) -> None:
    assert losses(run, "milliseconds_per_token") == [
        "edit: rival/plain beats the same method, 2.40 times as fast as outpace-auto/plain",
        "chat: rival/plain beats every row of outpace, 1.10 times as fast as outpace-auto/plain",
    ]
    assert losses(run, "first_seconds") == [
        "edit: rival/plain beats every row of outpace, 2.00 times as fast as outpace-auto/plain"
    ]


def test_several_settings_of_a_method_are_compared_with_that_method(run: dict[str, Any]) -> None:
    run["contenders"]["outpace-auto/draft"] = record("outpace-auto", "draft", [answer("e1", 1, 10.0, 1.0)])
    run["contenders"]["rival/ngram-10"]["answers"] = [answer("e1", 1, 20.0, 9.0)]
    expected = "edit: rival/ngram-10 beats the same method, 1.25 times as fast as outpace-auto/ngram"
    assert expected in losses(run, "milliseconds_per_token")


def test_standings_put_the_fastest_of_both_sides_together(run: dict[str, Any]) -> None:
    assert standings(run, "milliseconds_per_token", ".1f") == [
        "edit: outpace-auto/ngram 25.0, rival/plain 25.0 (1.00 times)",
        "chat: outpace-auto/plain 55.0, rival/plain 50.0 (0.91 times)",
    ]


def test_the_report_has_every_row_and_every_reason(run: dict[str, Any]) -> None:
    text = render(run)
    assert "| outpace-auto/plain | 60.0 | 55.0 |" in text
    assert "| rival/plain | 25.0 (1) | 50.0 |" in text  # one of two edits
    assert "| rival/ngram-10 | - | - |" in text
    assert "| outpace-auto/ngram | 250.0 | 60.0 |" in text  # whole answers
    assert "- absent/plain: no environment absent" in text
    assert "edit 200, chat 20" in text  # median prompt tokens
    assert "- outpace-auto: outpace-auto 1.2; common; plain: of plain; ngram: of ngram" in text
    cost = "| outpace-auto/ngram | 1.67 | 25% | 7 (9) | 4.0 | 0.012 (0.002) | 97.5% | 2 of 3 | 0.50 |"
    assert cost in text  # 4 + 4 + 2 tokens in 6 passes, 3 of 12 accepted, one text differs


def test_a_quality_that_could_not_be_measured_is_said(run: dict[str, Any]) -> None:
    run["contenders"]["rival/plain"]["quality"] = "it hands out no logits"
    text = render(run)
    assert "quality not measured: it hands out no logits" in text


def test_a_run_of_nobody_is_a_report_of_reasons(run: dict[str, Any]) -> None:
    empty = copy.deepcopy(run)
    for name, one in empty["contenders"].items():
        empty["contenders"][name] = record(one["engine"], one["variant"], [], "it rained")
    text = render(empty)
    assert text.count("it rained") == 5 and "outpace was not among the engines measured" in text
