"""benchmarks/identity.py: what it plans, finds and prints, with engines that answer as they are told."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from outpace import LLM, RequestOutput, SamplingParams, SpeculationParams
from outpace.engine.outputs import CompletionOutput, RequestStats
from outpace.models.load import load_files
from tests.models.gguf_files import write_gguf

FOLDER = Path(__file__).parents[2] / "benchmarks"
PLAIN = SpeculationParams(enabled=False)
MAX_TOKENS = 4


@pytest.fixture
def identity(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("identity")


@pytest.fixture
def prompts(identity: ModuleType) -> list[Any]:
    return [identity.Prompt(f"p{n}", seed=n, token_ids=[n] * (n + 1), max_tokens=MAX_TOKENS) for n in range(5)]


class Answers:
    """Stands in for an LLM: answers the prompt [n, n, ...] with tokens n, n + 1, ..., or with what `change` says."""

    def __init__(self, change: Callable[[int, list[int]], list[int]] = lambda seed, ids: ids) -> None:
        self.change = change
        self.asked: list[tuple[list[list[int]], SpeculationParams]] = []

    def generate(
        self, prompts: list[list[int]], params: Sequence[SamplingParams], speculation: SpeculationParams
    ) -> list[RequestOutput]:
        self.asked.append((prompts, speculation))
        outputs = []
        for ids, each in zip(prompts, params, strict=True):
            assert (each.seed, each.max_tokens) == (ids[0], MAX_TOKENS)
            answer = self.change(ids[0], list(range(ids[0], ids[0] + MAX_TOKENS)))
            stats = RequestStats(draft_tokens=3, accepted_tokens=1, preemptions=2)
            outputs.append(RequestOutput(0, None, ids, [CompletionOutput(0, "", answer, "length")], stats))
        return outputs


@pytest.mark.parametrize(
    ("plain", "other", "at"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2, 3], [1, 5, 3], 1),
        ([1, 2, 3], [1, 2], 2),
        ([1], [1, 0], 1),
        ([], [], None),
        ([], [0], 0),
    ],
)
def test_first_difference(identity: ModuleType, plain: list[int], other: list[int], at: int | None) -> None:
    assert identity.first_difference(plain, other) == at


def test_tasks_take_turns_and_none_is_lost(identity: ModuleType) -> None:
    assert identity.interleave(["a", "a", "a", "b", "c", "c"]) == [0, 3, 4, 1, 5, 2]


def test_drafters(identity: ModuleType) -> None:
    found = identity.parse_drafters(["ngram=2,5", "self:26=4", "draft=3"], "some/folder=1")
    assert [(one.name, one.word, one.k) for one in found] == [
        ("ngram", "ngram", 2),
        ("ngram", "ngram", 5),
        ("self:26", "self:26", 4),
        ("draft", "some/folder=1", 3),
    ]
    assert [one.speculation for one in found[1:]] == [
        SpeculationParams(method="ngram", num_speculative_tokens=5),
        SpeculationParams(method="early_exit", num_speculative_tokens=4),
        SpeculationParams(method="draft_model", num_speculative_tokens=3),
    ]


@pytest.mark.parametrize("word", ["ngram", "ngram=", "ngram=0", "ngram=2,", "ngram=x"])
def test_a_drafter_without_a_draft_length_is_refused(identity: ModuleType, word: str) -> None:
    with pytest.raises(ValueError, match="NAME=K"):
        identity.parse_drafters([word], "draft")


def test_plan(identity: ModuleType, prompts: list[Any]) -> None:
    drafters = identity.parse_drafters(["ngram=2", "self:1=3"], "")
    setups = identity.plan(prompts, drafters, requests=3, batches=[1, 2], temperatures=[0.0, 0.5], chunks=[512, 64])
    # 9 tokens: the longest request, whose prompt has 5 and whose answer 4.
    assert [(setup.chunk, setup.cache_tokens) for setup in setups] == [(512, None), (64, None), (512, 9)]
    assert [len(setup.cases) for setup in setups] == [8, 8, 4]
    assert {case.batch for case in setups[2].cases} == {2}
    cases = [case for setup in setups for case in setup.cases]
    assert len({(case.drafter, case.batch, case.temperature) for case in setups[0].cases}) == 8
    assert {(case.batch, len(case.prompts)) for case in cases} == {(1, 3), (2, 4)}, "batches are full"
    taken = [prompt.seed for case in cases for prompt in case.prompts]
    assert taken == [number % 5 for number in range(len(taken))], "each case goes on where the one before ended"


def test_one_at_a_time_shares_no_cache(identity: ModuleType, prompts: list[Any]) -> None:
    (setup,) = identity.plan(
        prompts,
        identity.parse_drafters(["ngram=2"], ""),
        requests=1,
        batches=[1],
        temperatures=[0.0],
        chunks=[64],
    )
    assert setup.cache_tokens is None


def make_case(identity: ModuleType, prompts: Sequence[Any], batch: int) -> tuple[Any, Any]:
    (drafter,) = identity.parse_drafters(["ngram=2"], "")
    case = identity.Case(drafter, batch, 0.5, tuple(prompts))
    return identity.Setup(64, 9, (case,)), case


def test_plain_answers_come_one_at_a_time_without_speculation(identity: ModuleType, prompts: list[Any]) -> None:
    llm = Answers()
    plain = identity.answer_plainly(llm, [(prompts[0], 0.0), (prompts[1], 0.5)])
    assert plain == {("p0", 0.0): [0, 1, 2, 3], ("p1", 0.5): [1, 2, 3, 4]}
    assert llm.asked == [([[0]], PLAIN), ([[1, 1]], PLAIN)]


def test_equal_answers_are_counted(identity: ModuleType, prompts: list[Any]) -> None:
    llm = Answers()
    plain = identity.answer_plainly(llm, [(prompt, 0.5) for prompt in prompts])
    llm.asked.clear()
    setup, case = make_case(identity, prompts, batch=2)
    row = identity.run_case(llm, "model", setup, case, plain)
    assert [len(together) for together, _ in llm.asked] == [2, 2, 1]
    assert {speculation for _, speculation in llm.asked} == {case.drafter.speculation}
    assert (row.requests, row.tokens, row.drafted, row.accepted, row.preempted) == (5, 20, 15, 5, 10)
    assert row.differing == ()
    assert row.line() == "| model | ngram | 2 | 2 | 64 | 9 | 0.5 | 5 | 20 | 15 | 5 | 10 | 0.333 | 0 |"


def test_one_token_that_differs_is_found_and_named(identity: ModuleType, prompts: list[Any]) -> None:
    plain = identity.answer_plainly(Answers(), [(prompt, 0.5) for prompt in prompts])
    setup, case = make_case(identity, prompts, batch=2)
    wrong = Answers(lambda seed, ids: [*ids[:2], 99, *ids[3:]] if seed == 3 else ids[:-1] if seed == 4 else ids)
    row = identity.run_case(wrong, "model", setup, case, plain)
    assert row.differing == (
        identity.Difference("p3", 3, position=2, plain=5, speculative=99, neighbours=("p2", "p3")),
        identity.Difference("p4", 4, position=3, plain=7, speculative=None, neighbours=("p4",)),
    )
    assert row.line().endswith("| 2: p3 at 2, p4 at 3 |")


def test_totals(identity: ModuleType) -> None:
    difference = identity.Difference("p", 0, 1, 2, 3, ("p",))
    counts = {"requests": 2, "tokens": 10, "drafted": 4, "accepted": 1, "preempted": 1}
    rows = [
        identity.Row("model", "ngram", k=2, **counts),
        identity.Row("model", "draft", k=2, **{**counts, "drafted": 0, "accepted": 0}),
        identity.Row("model", "ngram", k=5, **counts, differing=(difference,)),
    ]
    ngram, draft, everything = identity.totals(rows)
    assert (ngram.requests, ngram.tokens, ngram.drafted, ngram.accepted, ngram.preempted) == (4, 20, 8, 2, 2)
    assert ngram.differing == everything.differing == (difference,) and draft.differing == ()
    assert draft.line() == "| model | all draft | - | - | - | - | - | 2 | 10 | 0 | 0 | 1 | - | 0 |"
    assert everything.line() == "| model | all | - | - | - | - | - | 6 | 30 | 8 | 2 | 3 | 0.250 | 1: p at 1 |"


@pytest.mark.parametrize("text", ["0", "-1", "x", ""])
def test_counts_that_would_compare_nothing_are_refused(
    identity: ModuleType, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        identity.parse_arguments([f"--requests={text}"])
    assert "at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("fault", [False, True])
def test_exit_code_and_saved_table_of_a_tiny_model(
    identity: ModuleType,
    fault: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "tiny.gguf")
    messages = [{"role": "user", "content": "hello, hello, hello"}]
    line = {"id": "greeting", "task": "chat", "messages": messages, "max_tokens": 50}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(line) + "\n")
    if fault:
        monkeypatch.setattr(LLM, "generate", misread(LLM.generate))
    options = ["--max-tokens", "6", "--batches", "2", "--requests", "2", "--drafters", "ngram=2", "self:1=2", "draft=2"]
    files = [str(tmp_path / "prompts.jsonl"), "--model", str(tmp_path / "tiny.gguf"), "--json", str(tmp_path / "out")]
    assert identity.main([*files, *options]) == fault
    saved = json.loads((tmp_path / "out").read_text())
    assert saved["totals"][-1] == {**saved["totals"][-1], "drafter": "all", "requests": 36}
    assert len(saved["table"]) == 18 and sum(row["tokens"] for row in saved["table"]) == saved["totals"][-1]["tokens"]
    drafted = {row["drafter"]: row["drafted"] for row in saved["totals"]}
    assert drafted["all self:1"] > 0 and drafted["all draft"] > 0
    assert len(saved["settings"]) == 4 and "torch" in saved["machine"]
    assert len(saved["totals"][-1]["differing"]) == 12 * fault
    printed = capsys.readouterr().out
    assert f"tokens compared, {12 * fault} of 36 requests differ" in printed
    assert printed.count("| tiny | ") == 22


def misread(generate: Callable[..., list[RequestOutput]]) -> Callable[..., list[RequestOutput]]:
    """An engine whose n-gram drafter changes the last token."""

    def changed(llm: LLM, prompts: Any, params: Any, speculation: SpeculationParams) -> list[RequestOutput]:
        outputs = generate(llm, prompts, params, speculation)
        if speculation.method == "ngram":
            for output in outputs:
                output.outputs[0].token_ids[-1] += 1
        return outputs

    return changed


def test_the_shallow_copy_is_a_model_without_the_last_layers(
    identity: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setitem(identity.LAYERS_LEFT_OUT, "draft", 1)
    files = load_files(str(tmp_path / "tiny.gguf"))
    layers = files.checked_shape().num_layers
    copy = load_files(str(identity.write_shallow(files, tmp_path)))
    assert copy.checked_shape().num_layers == layers - 1 > 0
    assert len(copy.checkpoint.shapes) < len(files.checkpoint.shapes)
