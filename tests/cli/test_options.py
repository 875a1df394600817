"""Options: where their help comes from, what they become, and what happens to bad ones."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import fields

import pytest

from outpace import __version__
from outpace.config import QUANTIZATIONS, EngineConfig, SpeculativeConfig, field_help
from outpace.params import SamplingParams, SpeculationParams
from outpace.structured import StructuredOutputs
from tests.cli.stand_in import Script, StandIn

NOT_SAMPLING = ("n", "logprobs", "prompt_logprobs", "logprobs_mode", "logits_processors", "structured_outputs")
"""Parameters that are no option of `chat` and `demo`."""


def test_every_option_reaches_its_setting(outpace) -> None:
    result = outpace(
        "generate", "Hi", "--model", "m", "--quantization", "none", "--dtype", "bfloat16", "--kernels", "native",
        "--max-model-len", "100", "--max-num-seqs", "3",
        "--max-num-batched-tokens", "64", "--max-logprobs", "5",
        "--cache-tokens", "900", "--no-enable-prefix-caching", "--threads", "1", "--trust-remote-code",
        "--allow-pickle", "--speculative-control", "fixed",
        "--speculative-model", "self:7", "--num-speculative-tokens", "4", "--temperature", "0.5",
        "--top-p", "0.9", "--top-k", "40", "--min-p", "0.1", "--seed", "7", "--max-tokens", "3", "--stop", "a",
        "--stop", "b",
    )  # fmt: skip
    assert result.code == 0
    assert result.llm.opened == [
        (
            EngineConfig("m", "none", "bfloat16", "native", 100, 3, 64, 5, 900, False, 1, True, True, "fixed"),
            SpeculativeConfig(method="early_exit", exit_layer=7, num_speculative_tokens=4),
        )
    ]
    params = SamplingParams(
        temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, seed=7, max_tokens=3, stop=("a", "b")
    )  # fmt: skip
    assert result.llm.requests == [([{"role": "user", "content": "Hi"}], params, SpeculationParams())]


EVERY_PARAMETER = {
    "n": (["--n", "2"], 2),
    "temperature": (["--temperature", "0.5"], 0.5),
    "top_p": (["--top-p", "0.5"], 0.5),
    "top_k": (["--top-k", "-1"], -1),
    "min_p": (["--min-p", "0.5"], 0.5),
    "seed": (["--seed", "-7"], -7),
    "presence_penalty": (["--presence-penalty", "-1"], -1.0),
    "frequency_penalty": (["--frequency-penalty", "-1.5"], -1.5),
    "repetition_penalty": (["--repetition_penalty", "1.1"], 1.1),
    "logit_bias": (["--logit-bias", "5=-100", "--logit_bias=7=0.5"], {5: -100.0, 7: 0.5}),
    "allowed_token_ids": (["--allowed-token-ids", "5", "--allowed-token-ids", "7"], (5, 7)),
    "bad_words": (["--bad-words", "a", "--bad-words", "b c"], ("a", "b c")),
    "structured_outputs": (["--choice", "a", "--choice", "b"], StructuredOutputs(choice=("a", "b"))),
    "min_tokens": (["--min-tokens", "3"], 3),
    "max_tokens": (["--max-tokens", "3"], 3),
    "stop": (["--stop", "a"], ("a",)),
    "stop_token_ids": (["--stop-token-ids", "5", "--stop-token-ids=7"], (5, 7)),
    "include_stop_str_in_output": (["--include-stop-str-in-output"], True),
    "ignore_eos": (["--ignore_eos"], True),
    "logprobs": (["--logprobs", "-1"], -1),
    "prompt_logprobs": (["--prompt-logprobs", "0"], 0),
    "logprobs_mode": (["--logprobs-mode", "processed_logprobs"], "processed_logprobs"),
    "skip_special_tokens": (["--no-skip-special-tokens"], False),
    "spaces_between_special_tokens": (["--no_spaces_between_special_tokens"], False),
    "truncate_prompt_tokens": (["--truncate-prompt-tokens", "-1"], -1),
}


def test_every_parameter_has_an_option_in_this_table() -> None:
    assert list(EVERY_PARAMETER) == [item.name for item in fields(SamplingParams) if item.name != "logits_processors"]


@pytest.mark.parametrize("name", EVERY_PARAMETER)
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_every_parameter_has_an_option(outpace, monkeypatch, command: str, name: str) -> None:
    words, value = EVERY_PARAMETER[name]
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n"))
    result = outpace(command, *(["Hi"] if command == "generate" else []), *words)
    if command == "chat" and name in NOT_SAMPLING and name != "structured_outputs":
        assert (result.code, result.llm.opened) == (2, [])
        return
    assert result.code == 0
    assert result.llm.requests[0][1] == SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("flag", "text", "expected"),
    [
        ("--json-schema", '{"type": "object"}', {"json": '{"type": "object"}'}),
        ("--grammar", 'start: "é"\n', {"grammar": 'start: "é"\n'}),
        ("--regex", "a+", {"regex": "a+"}),
        ("--json-object", None, {"json_object": True}),
    ],
)
def test_what_the_answer_looks_like(outpace, tmp_path, flag: str, text: str | None, expected: dict) -> None:
    words = [] if text is None else [text]
    if flag in ("--json-schema", "--grammar"):
        (tmp_path / "file").write_text(text or "", "utf-8")
        words = [str(tmp_path / "file")]
    params = outpace("generate", "Hi", flag, *words).llm.requests[0][1]
    assert params == SamplingParams(structured_outputs=StructuredOutputs(**expected))


def test_a_file_that_is_no_text_is_refused(outpace, tmp_path) -> None:
    (tmp_path / "file").write_bytes(b"\xff\xfe")
    result = outpace("generate", "Hi", "--grammar", str(tmp_path / "file"))
    assert (result.code, result.llm.opened) == (2, [])
    assert "--grammar" in result.err
    assert "not UTF-8" in result.err


def test_options_left_out_leave_settings_alone(outpace) -> None:
    result = outpace("generate", "Hi")
    assert result.llm.opened == [(EngineConfig(), SpeculativeConfig())]
    assert result.llm.requests[0][1] == SamplingParams()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--speculative-model", "auto"], SpeculativeConfig()),
        (["--speculative-model", "ngram"], SpeculativeConfig(method="ngram")),
        (["--speculative-model", "none"], SpeculativeConfig(method="none")),
        (["--speculative-model", "self"], SpeculativeConfig(method="early_exit")),
        (["--speculative-model", "some/draft"], SpeculativeConfig(method="draft_model", model="some/draft")),
        (["--num-speculative-tokens", "0"], SpeculativeConfig(num_speculative_tokens=0)),
        (
            ["--speculative-config", '{"method": "ngram", "prompt_lookup_max": 4}', "--num-speculative-tokens", "2"],
            SpeculativeConfig(method="ngram", prompt_lookup_max=4, num_speculative_tokens=2),
        ),
    ],
)
def test_choosing_a_drafter(outpace, words: list[str], expected: SpeculativeConfig) -> None:
    assert outpace("generate", "Hi", *words).llm.opened[0][1] == expected


def test_underscores_and_hyphens_are_the_same_but_only_in_names(outpace) -> None:
    result = outpace("generate", "--max_tokens=2", "--top_p", "0.5", "--stop=__x_y", "--", "--an_odd_prompt")
    assert result.code == 0
    prompt, params, _ = result.llm.requests[0]
    assert prompt == [{"role": "user", "content": "--an_odd_prompt"}]
    assert params == SamplingParams(max_tokens=2, top_p=0.5, stop=("__x_y",))


@pytest.mark.parametrize("prompt", ["--snake_case is what?", "--a_b=c is what?", "__help", "a --top_p b"])
def test_a_prompt_arrives_as_it_was_written(outpace, prompt: str) -> None:
    assert outpace("generate", "--no-chat", prompt).llm.requests[0][0] == prompt


@pytest.mark.parametrize("prompt", ["--max_tokens", "--top_p=1", "--snake_case"])
def test_after_two_dashes_nothing_is_an_option(outpace, prompt: str) -> None:
    assert outpace("generate", "--no_chat", "--", prompt).llm.requests[0][0] == prompt


@pytest.mark.parametrize("words", [["--stop", "--a_b c"], ["--stop=--a_b c"]])
def test_a_value_arrives_as_it_was_written(outpace, words: list[str]) -> None:
    assert outpace("generate", "Hi", *words).llm.requests[0][1].stop == ("--a_b c",)


def test_every_option_can_be_written_with_underscores(outpace) -> None:
    names = [item.name for item in fields(EngineConfig) if "int" in str(item.type)]
    assert len(names) == 6
    words = [f"--{name}={number}" for number, name in enumerate(names, 1)]
    config = outpace("generate", "Hi", *words).llm.opened[0][0]
    assert [getattr(config, name) for name in names] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("arguments", "program"),
    [
        (["generate", "x", "--bogus"], "outpace generate"),
        (["generate", "x", "y"], "outpace generate"),
        (["chat", "--bogus_one"], "outpace chat"),
        (["--bogus", "demo"], "outpace"),
    ],
)
def test_an_unknown_argument_points_to_the_help_of_its_command(outpace, arguments, program) -> None:
    result = outpace(*arguments)
    assert (result.code, result.out) == (2, "")
    assert result.err.splitlines()[1:] == [f"See `{program} --help`."]
    wrong = next(word for word in arguments[::-1] if word != "demo")
    assert result.err.splitlines()[0] == f"outpace: unrecognized arguments: {wrong}"


@pytest.mark.parametrize("command", ["generate", "chat", "demo"])
def test_help_has_the_text_of_every_field(outpace, command: str) -> None:
    shown = " ".join(outpace(command, "--help").out.split())
    for item in fields(EngineConfig):
        text = field_help(EngineConfig, item.name).partition("None:")[0]
        assert f"--{item.name.replace('_', '-')}" in shown
        assert text in shown
    optional = set() if command == "generate" else set(NOT_SAMPLING)
    for item in fields(SamplingParams):
        expected = item.name not in {"logits_processors", "structured_outputs", *optional}
        assert (item.metadata["meaning"] in shown) == expected, item.name
    for item in fields(StructuredOutputs):
        assert item.name == "choice" or item.metadata["meaning"] in shown
    top_p = "draw only from the smallest set of most likely tokens that together are this probable"
    assert f"{top_p}; a number in (0, 1]; 1 is off" in shown
    assert "None" not in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--temperature", "-1"], ["--temperature=-1.0", "0 (greedy) or more"]),
        (["--temperature", "nan"], ["--temperature=nan", "0 (greedy) or more"]),
        (["--temperature", "warm"], ["--temperature", "'warm'"]),
        (["--top-p", "0"], ["--top-p=0.0", "(0, 1]"]),
        (["--top-p", "1.5"], ["--top-p=1.5", "(0, 1]"]),
        (["--top-k", "-2"], ["--top-k=-2", "off"]),
        (["--min-p", "2"], ["--min-p=2.0", "[0, 1]"]),
        (["--max-tokens", "0"], ["--max-tokens=0", "at least 1"]),
        (["--num-speculative-tokens", "-1"], ["num_speculative_tokens=-1", "0 (off) to 64"]),
        (["--num-speculative-tokens", "65"], ["num_speculative_tokens=65", "0 (off) to 64"]),
        (["--speculative-model", ""], ["--speculative-model ''", "ngram"]),
        (["--speculative-model", "self:x"], ["'self:x'", "self:20"]),
        (["--speculative-config", "{"], ["--speculative-config", "not JSON"]),
        (["--speculative-config", "[1]"], ["must be a JSON object"]),
        (["--speculative-config", '{"depth": 1}'], ["'depth'", "known keys"]),
        (["--speculative-config", "{}", "--speculative-model", "none"], ["not allowed with"]),
        (["--quantization", "int3"], ["quantization='int3'", "auto, file, int8, int4, none"]),
        (["--dtype", "float64"], ["dtype='float64'", "auto, float32, float16, bfloat16"]),
        (["--kernels", "cuda"], ["kernels='cuda'", "auto, native, torch"]),
        (["--max-model-len", "0"], ["max_model_len=0", "at least 1"]),
        (["--threads", "0"], ["threads=0", "1 to"]),
        (["--model", ""], ["model=''", "alias"]),
        (["--stop", ""], ["--stop", "''", "at least one character"]),
        (["--presence-penalty", "-2.5"], ["--presence-penalty=-2.5", "[-2, 2]"]),
        (["--frequency_penalty=3"], ["--frequency-penalty=3.0", "[-2, 2]"]),
        (["--repetition-penalty", "0"], ["--repetition-penalty=0.0", "[0.01, 100]"]),
        (["--logit-bias", "5"], ["--logit-bias", "'5'", "ID=BIAS"]),
        (["--logit-bias", "5=much"], ["--logit-bias", "'5=much'", "ID=BIAS"]),
        (["--logit-bias", "x=1"], ["--logit-bias", "'x'", "token ids"]),
        (["--logit-bias", "5=101"], ["--logit-bias", "101.0", "[-100, 100]"]),
        (["--logit-bias", "5=1", "--logit-bias", "5=2"], ["--logit-bias", "'5=2'", "second bias"]),
        (["--allowed-token-ids", "-1"], ["--allowed-token-ids", "-1", "token ids"]),
        (["--allowed-token-ids", "a"], ["--allowed-token-ids", "'a'"]),
        (["--bad-words", ""], ["--bad-words", "''", "at least one character"]),
        (["--stop-token-ids", "-5"], ["--stop-token-ids", "-5", "token ids"]),
        (["--min-tokens", "-1"], ["--min-tokens=-1", "0 or more"]),
        (["--min-tokens", "5", "--max-tokens", "4"], ["min_tokens=5", "max_tokens=4"]),
        (["--truncate-prompt-tokens", "0"], ["--truncate-prompt-tokens=0", "at least 1, or -1"]),
        (["--regex", ""], ["--regex=''", "at least one character"]),
        (["--choice", "a", "--choice", "a"], ["--choice", "'a' twice"]),
        (["--choice", "a", "--regex", "b"], ["--choice", "--regex", "not allowed with"]),
        (["--json-schema", "/no/such/file"], ["--json-schema '/no/such/file'", "No such file"]),
        (["--json-schema", __file__], ["--json-schema", "is not JSON"]),
        (["--grammar", "/"], ["--grammar '/'", "directory"]),
        (["--grammar", "/dev/null"], ["--grammar /dev/null", "the text of a grammar"]),
        (["--seed", "1e3"], ["--seed", "'1e3'"]),
        (["--frobnicate"], ["--frobnicate"]),
        (["--temp", "1"], ["--temp"]),
    ],
)
@pytest.mark.parametrize("command", ["generate", "chat", "demo"])
def test_a_bad_option_is_two_lines_and_code_2_before_anything_loads(outpace, command, arguments, words) -> None:
    prompt = ["Hi"] if command == "generate" else []
    result = outpace(command, *prompt, *arguments, models=("m",))
    assert (result.code, result.out, result.llm.opened) == (2, "", [])
    assert len(result.err.splitlines()) <= 2
    for word in words:
        assert word in result.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "a command is missing: generate, chat, demo, doctor, export, serve, swap or train"),
        (["frobnicate"], "'frobnicate' is not a command: generate, chat, demo, doctor, export, serve, swap or train"),
        (["genrate", "Hi"], "'genrate' is not a command: did you mean generate?"),
    ],
)
def test_no_command_or_an_unknown_one(outpace, arguments, said) -> None:
    result = outpace(*arguments)
    assert result.code == 2
    assert result.err.splitlines() == [f"outpace: {said}", "See `outpace --help`."]


def test_version(outpace) -> None:
    result = outpace("--version")
    assert (result.code, result.out) == (0, f"outpace {__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "code"), [(["--version"], 0), (["demo", "--help"], 0), (["generate", "Hi", "--top-p", "7"], 2)]
)
def test_help_and_bad_options_come_without_torch(arguments: list[str], code: int) -> None:
    program = (
        "import sys; from outpace.cli.main import main; code = main(sys.argv[1:]); "
        "print([m for m in ('torch', 'transformers') if m in sys.modules], file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == code
    assert done.stderr.splitlines()[-1] == "[]"


def test_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "outpace", "generate", "--max-tokens", "0", "x"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "outpace: --max-tokens=0 is not possible: it must be an integer, at least 1\n"


@pytest.mark.parametrize("command", ["generate", "chat", "demo"])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_every_precision_can_be_asked_for(outpace, command: str, quantization: str) -> None:
    result = outpace(command, "--model", "m", "--quantization", quantization, "--kernels=torch", "--print-config")
    engine = json.loads(result.out)["engine"]
    assert [engine[name] for name in ("quantization", "dtype", "kernels")] == [quantization, "auto", "torch"]


@pytest.mark.parametrize("command", ["generate", "chat", "demo"])
def test_print_config_prints_what_is_in_force_and_ends(outpace, command) -> None:
    result = outpace(
        command, "--print-config", "--model", "m", "--top-p", "0.5", "--seed", "3", "--stop", "x",
        llm=StandIn(Script(fault=AssertionError("nothing may be generated"))),
    )  # fmt: skip
    config = json.loads(result.out)
    assert result.code == 0
    assert config["engine"]["model"] == "m"
    assert config["speculative"] == {"method": "auto"}
    expected = {"temperature": 0.0, "top_p": 0.5, "top_k": 0, "seed": 3, "max_tokens": 512, "stop": ["x"]}
    assert config["sampling"] == expected


@pytest.mark.parametrize("command", ["generate", "chat", "demo"])
def test_print_config_has_every_parameter_that_was_given(outpace, command) -> None:
    result = outpace(
        command, "--print-config", "--model", "m", "--presence-penalty", "1", "--logit-bias", "5=1", "--regex", "a+",
        "--no-skip-special-tokens",
    )  # fmt: skip
    sampling = json.loads(result.out)["sampling"]
    assert sampling["presence_penalty"] == 1.0
    assert sampling["logit_bias"] == {"5": 1.0}
    assert sampling["structured_outputs"]["regex"] == "a+"
    assert sampling["skip_special_tokens"] is False
    assert "frequency_penalty" not in sampling
