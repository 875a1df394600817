"""`outpace generate`: what goes to which stream, in which form, and what errors look like."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import pytest

from outpace.cli.main import main
from outpace.decisions import ControlReport, DrafterReport
from outpace.errors import CheckpointError, InvalidPrompt, ModelNotFound, OutOfMemory, UnsupportedModel
from tests.cli.stand_in import BANNER, WORDS, Script, StandIn

TEXT = "".join(WORDS)


def test_stats_say_what_the_controller_found(outpace) -> None:
    on = DrafterReport("suffix", 5, 20, 11.5, 12, 0.0, 0.25, 1.5, 1.75, None)
    one = DrafterReport("ngram", 1, 1, 0.6, 1, 0.0, 0.0, 1.5, 1.5, None)
    off = DrafterReport("draft_model", 0, 0, 0.0, 0, 0.5, 0.0, None, None, "draft_model brings 0.8 tokens for 1.3 ms")
    control = ControlReport({"suffix": on, "ngram": one, "draft_model": off}, 9, 1.0, 0.0)
    result = outpace("generate", "Hi", "--stats", llm=StandIn(Script(control=control)))
    lines = result.err.splitlines()
    assert (
        "suffix: 1.75x of plain decoding (expected 1.50x) in its steps; 12 tokens kept (expected 12); "
        "0.000 s drafting, 0.250 s more verifying"
    ) in lines
    assert any(line.startswith("ngram: ") and " 1 token kept (expected 1)" in line for line in lines)
    assert "off now: draft_model brings 0.8 tokens for 1.3 ms" in lines


def test_text_alone_goes_to_standard_output_and_the_banner_comes_first(outpace) -> None:
    result = outpace("generate", "Hi")
    assert (result.code, result.out) == (0, TEXT + "\n")
    lines = result.err.splitlines()
    assert lines[0] == "a note from loading"
    assert lines[1] == "loading layers ..."
    assert lines[2].startswith("loading layers: done in ")
    assert lines[3:] == [BANNER]


def test_json_is_one_object_with_exactly_these_keys(outpace) -> None:
    result = outpace("generate", "Hi", "--json", script=Script(accepted=(1, 0), drafted=2))
    record = json.loads(result.out)
    assert result.out.count("\n") == 1
    assert list(record) == ["text", "token_ids", "finish_reason", "stats"]
    assert (record["text"], record["token_ids"]) == (TEXT, list(range(100, 108)))
    assert record["finish_reason"] == "length"
    stats = record["stats"]
    # 7 tokens after the first in steps of 2, 1, 2, 1, 1: the last has no room for its draft's token.
    assert stats["steps"] == 7
    assert (stats["drafts"], stats["draft_tokens"], stats["accepted_tokens"]) == (5, 10, 2)
    assert stats["acceptance_rate"] == pytest.approx(0.2)
    assert stats["mean_acceptance_length"] == pytest.approx(1.4)
    assert stats["per_position"] == pytest.approx([0.4, 0.0])
    assert (stats["prefill_seconds"], stats["decode_seconds"]) == (0.5, 5.0)
    assert stats["station_seconds"] == {"forward": 0.25}
    assert stats["memory"] == {"target": 98_000_000, "drafter": 0, "cache": 2_000_000}


def test_rates_are_null_when_nothing_was_drafted(outpace) -> None:
    stats = json.loads(outpace("generate", "Hi", "--json", script=Script(drafted=0)).out)["stats"]
    assert (stats["drafts"], stats["draft_tokens"], stats["accepted_tokens"]) == (0, 0, 0)
    assert [stats[name] for name in ("acceptance_rate", "mean_acceptance_length", "per_position")] == [None] * 3


def test_stats_are_for_people_and_go_to_standard_error(outpace) -> None:
    result = outpace("generate", "Hi", "--stats")
    assert result.out == TEXT + "\n"
    shown = result.err.partition(BANNER)[2]
    assert "decoding: 7 tokens in 5.00 s, 1.4 tokens/s" in shown
    assert "2 of 10 draft tokens accepted (20 %) in 5 drafts over 7 steps; mean acceptance length 1.40" in shown
    assert "accepted by position: 40 % 0 %" in shown
    assert "memory: target 98 MB, drafter 0 MB, cache 2 MB" in shown


def test_stats_without_drafts_say_so(outpace) -> None:
    assert "nothing drafted in 9 steps" in outpace("generate", "Hi", "--stats", script=Script(drafted=0)).err


@pytest.mark.parametrize(
    ("flags", "template", "as_chat"),
    [([], True, True), ([], False, False), (["--no-chat"], True, False), (["--chat"], False, True)],
)
def test_the_prompt_is_a_message_where_the_model_has_a_template(outpace, flags, template, as_chat) -> None:
    result = outpace("generate", "Hi", *flags, llm=StandIn(Script(), chat_template=template))
    assert result.llm.requests[0][0] == ([{"role": "user", "content": "Hi"}] if as_chat else "Hi")


def test_a_dash_reads_standard_input_without_its_last_line_break(outpace, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines\n"))
    assert outpace("generate", "--no-chat", "-").llm.requests[0][0] == "two\nlines"


def test_standard_input_that_is_not_text(outpace, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe\xfd"), encoding="utf-8"))
    result = outpace("generate", "-")
    assert (result.code, result.err) == (2, "outpace: the prompt is not valid UTF-8 text\n")


@pytest.mark.parametrize(
    ("prompt", "words"), [([], "a prompt is missing"), ([""], "the prompt is empty"), (["\udcff"], "not valid UTF-8")]
)
def test_a_bad_prompt_is_refused_before_the_model_is_loaded(outpace, prompt, words) -> None:
    result = outpace("generate", *prompt)
    assert (result.code, result.out, result.llm.opened) == (2, "", [])
    assert words in result.err
    assert len(result.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (ModelNotFound("no model goes by 'm'"), 2),
        (InvalidPrompt("the prompt has 9000 tokens, the model takes 8192"), 2),
        (CheckpointError("m/model.safetensors: tensor 'w' is missing"), 1),
        (UnsupportedModel("architecture 'X' is not one that outpace runs"), 1),
        (OutOfMemory("m needs 40 GB, 20 GB are free"), 1),
        (PermissionError(13, "Permission denied", "/cache"), 1),
    ],
)
def test_an_error_is_one_line_and_its_exit_code(outpace, fault, code) -> None:
    for llm in (StandIn(Script(), open_faults={"m": fault}), StandIn(Script(fault=fault))):
        result = outpace("generate", "Hi", "--model", "m", llm=llm)
        assert (result.code, result.out) == (code, "")
        assert result.err.splitlines()[-1] == f"outpace: {fault}"
        assert "Traceback" not in result.err


def test_a_fault_of_outpace_says_so_and_shows_its_trace_only_on_request(outpace, monkeypatch) -> None:
    monkeypatch.delenv("OUTPACE_DEBUG", raising=False)
    script = Script(fault=ZeroDivisionError("half\na row"))
    result = outpace("generate", "Hi", script=script)
    assert result.code == 1
    assert result.err.splitlines()[-2:] == [
        "outpace: this is a bug in outpace (ZeroDivisionError: half)",
        "Set OUTPACE_DEBUG=1 to see where it happened.",
    ]
    monkeypatch.setenv("OUTPACE_DEBUG", "1")
    assert "Traceback (most recent call last)" in outpace("generate", "Hi", script=script).err


def test_interrupted(outpace) -> None:
    result = outpace("generate", "Hi", script=Script(fault=KeyboardInterrupt()))
    assert (result.code, result.llm.closed) == (130, 1)
    assert "Traceback" not in result.err


def test_a_reader_that_goes_away_ends_the_request_quietly() -> None:
    program = (
        "import sys; from outpace.cli.main import main; from outpace.cli.backend import Backend; "
        "from tests.cli.stand_in import Script, StandIn; llm = StandIn(Script(words=['word '] * 100_000)); "
        "code = main(['generate', 'Hi'], Backend(llm=llm)); print(code, llm.closed, file=sys.stderr); sys.exit(code)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    ) as child:
        assert child.stdout and child.stderr
        assert child.stdout.read(5) == "word "
        child.stdout.close()
        notes = child.stderr.read()
    assert child.returncode == 141
    assert notes.splitlines()[-2:] == [BANNER, "141 1"]


def test_characters_the_terminal_lacks_become_question_marks(monkeypatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    from outpace.cli.backend import Backend

    assert main(["generate", "Hi"], Backend(llm=StandIn(Script(words=["é", "!"])))) == 0
    assert raw.getvalue() == b"?!\n"
