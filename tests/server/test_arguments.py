"""The server's command line: what it comes to, what contradicts itself, and what vLLM's flags mean here."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from outpace.config import EngineConfig, SpeculativeConfig
from outpace.errors import BadInput, InvalidParameter
from outpace.server.arguments import Resolved, resolve
from outpace.server.settings import ServerSettings
from outpace.server.vllm_flags import FLAGS, SHORT
from outpace.server.vllm_speculation import IGNORED_KEYS, REFUSED_KEYS


def read(*words: str, **environment: str) -> Resolved:
    return resolve(words, environment)


def drafter(*words: str) -> SpeculativeConfig:
    (found,) = read(*words).speculative
    return found


def test_nothing_given() -> None:
    found = read()
    assert found.engine == EngineConfig()
    assert found.speculative == [SpeculativeConfig()]
    assert found.server == ServerSettings(served_model_names=(EngineConfig().model,))
    assert (found.warnings, found.print_config) == ([], False)


def test_every_option_of_the_engine_reaches_its_field() -> None:
    found = read(
        "m", "-q", "int4", "--dtype", "bfloat16", "--kernels", "native", "--max-model-len", "100",
        "--max-num-seqs", "3", "--max-num-batched-tokens", "64", "--max-logprobs", "5",
        "--cache-tokens", "900", "--no-enable-prefix-caching", "--threads", "1",
        "--trust-remote-code", "--allow-pickle", "--speculative-control", "fixed", "--speculative-floor", "0.5",
    ).engine  # fmt: skip
    assert found == EngineConfig(
        "m", "int4", "bfloat16", "native", 100, 3, 64, 5, 900, False, 1, True, True, "fixed", 0.5
    )
    assert all(getattr(found, item.name) != item.default for item in fields(EngineConfig))


def test_every_option_of_the_server_reaches_its_field(tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages }}")
    found = read(
        "--model=m", "--host", "::1", "--port", "0", "--api-key", "a", "b", "--served-model-name", "x", "y",
        "--allowed-origins", '["https://a.example"]', "--max-waiting", "0", "--max-body-bytes", "1K", "--log-prompts",
        "--chat-template", str(template), "--seed", "-7", "--tool-call-parser", "hermes", "--reasoning-parser",
        "deepseek_r1", "--drain-seconds", "2.5", "--root-path", "/p", "--enable-log-requests", "--generation-config",
        "vllm", "--override-generation-config", '{"temperature": 0.5, "max_new_tokens": 7}',
        "--record", str(tmp_path / "r"), "--record-max-bytes", "2m", "--swap-drafters-from", str(tmp_path),
    ).server  # fmt: skip
    assert found == ServerSettings(
        record=str(tmp_path / "r"),
        record_max_bytes=2_000_000,
        swap_drafters_from=str(tmp_path),
        host="::1",
        port=0,
        api_keys=("a", "b"),
        served_model_names=("x", "y"),
        allowed_origins=("https://a.example",),
        max_waiting=0,
        max_body_bytes=1024,
        log_prompts=True,
        chat_template="{{ messages }}",
        seed=-7,
        tool_call_parser="hermes",
        reasoning_parser="deepseek_r1",
        drain_seconds=2.5,
        root_path="/p",
        log_requests=True,
        generation_config="vllm",
        override_generation_config={"temperature": 0.5, "max_tokens": 7},
    )
    default = ServerSettings()
    assert all(getattr(found, item.name) != getattr(default, item.name) for item in fields(ServerSettings))


DRAFT_5 = SpeculativeConfig(method="draft_model", model="d/small", num_speculative_tokens=5)
HEAD_2 = SpeculativeConfig(method="eagle3", model="d/head", num_speculative_tokens=2)
MTP_1 = SpeculativeConfig(method="mtp", num_speculative_tokens=1)
NGRAM_5_4 = SpeculativeConfig(method="ngram", num_speculative_tokens=5, prompt_lookup_max=4)
PUBLISHED = [
    # A draft model: the flags of the first generation, the JSON of the second, the flags of the third.
    ("--model t/large --speculative-model d/small --num-speculative-tokens 5", DRAFT_5),
    (
        "--host 0.0.0.0 --port 8000 --model t/large --seed 42 -tp 1 --speculative_model d/small "
        "--use-v2-block-manager --num_speculative_tokens 5 --gpu_memory_utilization 0.8",
        DRAFT_5,
    ),
    (
        "--host 0.0.0.0 --port 8000 --model t/large --seed 42 -tp 1 --gpu_memory_utilization 0.8 --speculative_config "
        '{"model":"d/small","num_speculative_tokens":5}',
        DRAFT_5,
    ),
    (
        "t/large --host 0.0.0.0 --port 8000 --seed 42 -tp 1 --max_model_len 2048 --gpu_memory_utilization 0.8 "
        '--speculative_config {"model":"d/small","num_speculative_tokens":5,"method":"draft_model"}',
        DRAFT_5,
    ),
    ("t/large --spec-method draft_model --spec-model d/small --spec-tokens 5", DRAFT_5),
    # Prompt lookup.
    (
        "t/large --speculative-model [ngram] --num-speculative-tokens 5 --ngram-prompt-lookup-max 4",
        NGRAM_5_4,
    ),
    (
        "t/large --speculative-model [ngram] --num-speculative-tokens 5 --ngram-prompt-lookup-max 4 "
        "--ngram-prompt-lookup-min 1 --tensor-parallel-size 1 --max-model-len 4096 --dtype half",
        replace(NGRAM_5_4, prompt_lookup_min=1),
    ),
    (
        't/large --speculative-config {"method":"ngram","num_speculative_tokens":5,"prompt_lookup_max":4}',
        NGRAM_5_4,
    ),
    (
        't/large --speculative-config {"model":"ngram","num-speculative-tokens":5,"prompt-lookup-max":4}',
        NGRAM_5_4,
    ),
    (
        "t/large -sc.method ngram -sc.num_speculative_tokens 5 --speculative-config.prompt-lookup-max=4",
        NGRAM_5_4,
    ),
    ("t/large --spec-method ngram_gpu --spec-tokens 5 --ngram_prompt_lookup_max 4", NGRAM_5_4),
    # Switched off beside many requests, and the rule written out.
    (
        "t/large --speculative-model d/small --num-speculative-tokens 5 --speculative-disable-by-batch-size 4",
        replace(DRAFT_5, disable_by_batch_size=4),
    ),
    (
        't/large --speculative-config {"model":"d/small","num_speculative_tokens":5,"disable_by_batch_size":4}',
        replace(DRAFT_5, disable_by_batch_size=4),
    ),
    (
        "t/large --speculative-model d/small --num-speculative-tokens 5 --spec-decoding-acceptance-method "
        "rejection_sampler --speculative-draft-tensor-parallel-size 1 --disable-logprobs-during-spec-decoding false",
        DRAFT_5,
    ),
    (
        't/large --speculative-config {"model":"d/small","num_speculative_tokens":5,"acceptance_method":'
        '"rejection_sampler","draft_tensor_parallel_size":1,"max_model_len":2048}',
        DRAFT_5,
    ),
    (
        't/large -sc {"model":"d/small","num_speculative_tokens":5,"rejection_sample_method":"block"}',
        replace(DRAFT_5, rejection_sample_method="block"),
    ),
    (
        't/large -sc {"model":"d/small","num_speculative_tokens":5,"rejection_sample_method":"probabilistic"}',
        replace(DRAFT_5, rejection_sample_method="standard"),
    ),
    ('t/large -sc {"model":"d/small","num_speculative_tokens":5,"rejection_sample_method":"strict"}', DRAFT_5),
    ('t/large -sc {"method":"eagle3","model":"d/head","num_speculative_tokens":2}', HEAD_2),
    ('t/large -sc {"method":"mtp","num_speculative_tokens":1}', MTP_1),
    ('t/large -sc {"method":"mimo_mtp","num_speculative_tokens":1}', MTP_1),
    ('t/large -sc {"method":"deepseek_mtp","num_speculative_tokens":1,"disable_padded_drafter_batch":true}', MTP_1),
    ("t/large --spec-method mtp --spec-tokens 1", MTP_1),
    ("t/large --speculative-model mtp --spec-tokens 1", MTP_1),
    ('t/large -sc {"model":"d/EAGLE3-head","num_speculative_tokens":2}', replace(HEAD_2, model="d/EAGLE3-head")),
]


@pytest.mark.parametrize(("line", "expected"), PUBLISHED)
def test_published_command_lines(line: str, expected: SpeculativeConfig) -> None:
    found = read(*line.split())
    assert found.speculative == [expected]
    assert (found.engine.model, found.server.served_model_names) == ("t/large", ("t/large",))
    assert found.server.seed == (42 if "--seed" in line else None)


def test_the_classic_line_has_nothing_to_warn_of() -> None:
    assert read("--model", "A", "--speculative-model", "B", "--num-speculative-tokens", "5").warnings == []


@pytest.mark.parametrize("method", ["eagle", "medusa", "mlp_speculator", "dflash"])
def test_methods_that_are_not_there_are_refused_with_those_that_are(method: str) -> None:
    with pytest.raises(
        InvalidParameter, match=rf"method='{method}' is not known; possible: auto, suffix, ngram, draft_model"
    ):
        read("t", "--speculative-config", json.dumps({"method": method, "model": "d", "num_speculative_tokens": 2}))


CONTRADICTIONS = [
    "--num-speculative-tokens 5 --spec-tokens 4",
    '--num-speculative-tokens 5 --speculative-config {"num_speculative_tokens":4}',
    "--speculative-model a --spec-model b",
    '--speculative-model [ngram] --speculative-config {"method":"draft_model"}',
    "--spec-method early_exit --spec-model ngram",
    '--ngram-prompt-lookup-max 4 --speculative-config {"prompt-lookup-max":5}',
    "m --model n",
    '--speculative-config {"acceptance_method":"rejection_sampler","rejection_sample_method":"block"}',
    '--spec-decoding-acceptance-method rejection_sampler -sc {"rejection_sample_method":"block"}',
]


@pytest.mark.parametrize("line", CONTRADICTIONS)
def test_generations_may_not_contradict_each_other(line: str) -> None:
    with pytest.raises(InvalidParameter, match="contradict each other"):
        read(*line.split())


def test_generations_may_agree() -> None:
    line = 'm --model m --speculative-model d --spec-tokens 3 -sc {"num_speculative_tokens":3,"model":"d"}'
    assert drafter(*line.split()) == SpeculativeConfig(method="draft_model", model="d", num_speculative_tokens=3)


LOSSY = [
    "--spec-decoding-acceptance-method typical_acceptance_sampler",
    "--typical-acceptance-sampler-posterior-threshold 0.2",
    "--typical-acceptance-sampler-posterior-alpha 0.4",
    '--speculative-config {"acceptance_method":"typical_acceptance_sampler"}',
    '--speculative-config {"posterior_threshold":0.5}',
    '--speculative-config {"rejection_sample_method":"synthetic"}',
    '--speculative-config {"rejection_sample_method":"fly"}',
    '--speculative-config {"synthetic_acceptance_rates":[0.5]}',
    '--speculative-config {"fly_window_size":3}',
]


@pytest.mark.parametrize("line", LOSSY)
def test_rules_that_change_the_text_are_refused(line: str) -> None:
    with pytest.raises(InvalidParameter, match="chang"):
        read(*line.split())


REFUSED = {
    "--enable-lora": "merge",
    "--lora-modules a=b c=d": "merge",
    "--kv-cache-dtype fp8": "rounding",
    '--rope-scaling {"rope_type":"yarn"}': "config.json",
    "--rope-theta 10000": "config.json",
    '--hf-overrides {"num_hidden_layers":2}': "config.json",
    "--revision abc": "main revision",
    "--tokenizer other": "own tokenizer",
    "--ssl-keyfile k": "proxy",
    "--device cuda": "CPU",
    "--task embed": "generates text",
    "--scheduling-policy priority": "order of arrival",
    "--logits-processors a.b": "no code",
    '--default-chat-template-kwargs {"enable_thinking":false}': "chat_template_kwargs",
    "--return-tokens-as-token-ids": "text",
    '--structured-outputs-config {"disable_any_whitespace":true}': "structured outputs",
    '--allowed-methods ["GET"]': "methods",
    '--speculative-config {"tensor_parallel_size":2}': "draft_tensor_parallel_size",
    '--speculative-config {"use_heterogeneous_vocab":true}': "vocabulary",
    '--speculative-config {"revision":"v2"}': "main revision",
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_would_change_answers_is_refused_with_a_reason(line: str) -> None:
    with pytest.raises(InvalidParameter, match=REFUSED[line]) as caught:
        read(*line.split())
    assert line.split()[0] in str(caught.value)


HARMLESS = [
    "--kv-cache-dtype auto --revision main --tokenizer m --device cpu --task generate --scheduling-policy fcfs",
    '--hf-overrides {} --load-format safetensors --runner generate --tokenizer-mode auto --allowed-methods ["*"]',
    '--no-enable-lora --typical-acceptance-sampler-posterior-alpha 0.3 --structured-outputs-config {"backend":"auto"}',
    '--speculative-config {"revision":"main","use_heterogeneous_vocab":false,"synthetic_acceptance_rate":null}',
]


@pytest.mark.parametrize("line", HARMLESS)
def test_refused_flags_pass_where_they_change_nothing(line: str) -> None:
    found = read("m", *line.split())
    assert found.engine == EngineConfig("m")
    assert found.speculative == [SpeculativeConfig()]
    assert found.warnings == [], "outpace does as they say, so there is nothing to tell"


def test_what_has_no_meaning_here_is_named_in_one_warning() -> None:
    line = (
        "m --gpu-memory-utilization 0.9 --enforce-eager --use_v2_block_manager -tp 1 --swap-space=4 -pp 2 -O3 "
        "--no-use-tqdm-on-load --enable-chunked-prefill=False --enable-auto-tool-choice --disable-log-requests "
        '--compilation-config.level 3 --cuda-graph-sizes 1 2 --speculative-config {"enforce_eager":true}'
    )
    found = read(*line.split())
    assert found.warnings == [
        "ignored, because answers do not depend on them here: --gpu-memory-utilization, --enforce-eager, "
        "--use-v2-block-manager, --tensor-parallel-size, --swap-space, --pipeline-parallel-size 2 (there is one device "
        "here, and the text does not depend on it), --optimization-level, "
        "--use-tqdm-on-load, --compilation-config, --cuda-graph-sizes, --speculative-config 'enforce_eager'"
    ]


def test_every_flag_of_the_table_is_read_with_hyphens_and_with_underscores() -> None:
    for name, flag in FLAGS.items():
        value = {"nothing": [], "one": ["1"], "many": ["1", "2"]}[flag.takes]
        for words in (["--" + name, *value], ["--" + name.replace("-", "_"), *value]):
            said = "true" if flag.takes == "nothing" else " ".join(value)
            if flag.refuses(said):
                with pytest.raises(InvalidParameter, match=f"--{name}.* is not possible: "):
                    read(*words)
            else:
                assert len(read(*words).warnings) == (not flag.silent and flag.refusal is None), name


def test_every_short_name_is_one_of_a_flag() -> None:
    for short, name in SHORT.items():
        value = {"--speculative-config": "{}", "--quantization": "int8"}.get(name, "1")
        assert read(short, value) == read(name, value)


def test_every_json_key_is_known() -> None:
    for key in IGNORED_KEYS:
        found = read("--speculative-config", json.dumps({key.replace("_", "-"): 1}))
        assert found.speculative == [SpeculativeConfig()]
        assert f"--speculative-config '{key}'" in found.warnings[0].replace("-", "_").replace("__", "--").replace(
            "speculative_config", "speculative-config"
        )
    for key in REFUSED_KEYS:
        with pytest.raises(InvalidParameter, match="is not possible"):
            read("--speculative-config", json.dumps({key: "x"}))
    assert not IGNORED_KEYS & {item.name for item in fields(SpeculativeConfig)}


WRONG = {
    "--gpu-memory-utilisation 1": "did you mean --gpu-memory-utilization",
    "--num-speculativ-tokens 5": "did you mean --num-speculative-tokens",
    "--utterly-new": "--utterly-new is not known",
    "a b": "'b' is one word too many",
    "--port 70000": "from 0 to 65535",
    "--port x": "invalid int value: 'x'",
    "--max-waiting -1": "at least 0",
    "--max-model-len 4x": "invalid count value: '4x'",
    "--max-model-len 0": "max_model_len=0 is not possible",
    "--dtype fp8": "possible: auto, float32, float16, bfloat16",
    "--quantization awq": "possible: auto, file, int8, int4, none",
    "--speculative-config {": "is not JSON",
    "--speculative-config []": "must be a JSON object",
    '--speculative-config {"num_speculative_token":3}': "did you mean num_speculative_tokens",
    "--num-speculative-tokens 65": "0 \\(off\\) to 64",
    "--speculative-disable-by-batch-size 0": "at least 1",
    "--spec-method draft_model": "needs a model",
    "--chat-template no-such-file": "cannot be read: No such file",
    '--hf-overrides {"use_cache":false}': "config.json",
    "--tool-call-parser hermos": "hermos.*hermes",
    "--reasoning-parser x": "'x'",
    "--generation-config /some/where": "auto .* or vllm",
    '--override-generation-config {"temperature":-1}': "temperature=-1",
    '--override-generation-config {"typical_p":1}': "has no 'typical_p'",
    '--allowed-origins ["a",3]': "list of texts",
    "--allowed-origins [a": "is not JSON",
    "--enforce-eager=maybe": "true or false",
    "--config no-such-file": "cannot be read: No such file",
    "-sc.method": "needs a value",
}


@pytest.mark.parametrize("line", WRONG)
def test_bad_options_say_what_would_work(line: str) -> None:
    with pytest.raises(BadInput, match=WRONG[line]):
        read(*line.split())


@pytest.mark.parametrize("key", ["--api-key=", "--speculative-model="])
def test_empty_values(key: str) -> None:
    with pytest.raises(InvalidParameter, match="''"):
        read(key)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("4096", 4096), ("4k", 4000), ("4K", 4096), ("25.6k", 25600), ("1m", 10**6), ("auto", None), ("-1", None)],
)
def test_lengths_as_people_write_them(text: str, expected: int | None) -> None:
    assert read("--max-model-len", text).engine.max_model_len == expected


def test_names_of_vllm_for_precisions() -> None:
    assert [read("--dtype", name).engine.dtype for name in ("half", "float", "auto")] == ["float16", "float32", "auto"]
    assert read("-q", "gguf").engine.quantization == "file"


def test_keys_of_the_environment() -> None:
    assert read(VLLM_API_KEY="v").server.api_keys == ("v",)
    assert read(VLLM_API_KEY="v", OUTPACE_API_KEY="o").server.api_keys == ("o",)
    assert read("--api-key", "a", VLLM_API_KEY="v").server.api_keys == ("a",)
    assert read(OUTPACE_API_KEY="").server.api_keys == ()


def test_an_open_address_without_a_key_is_warned_of() -> None:
    assert "--api-key" in read("--host", "0.0.0.0").warnings[0]
    for words in (["--host", "0.0.0.0", "--api-key", "k"], ["--host", "localhost"], ["--host", "127.0.0.2"]):
        assert read(*words).warnings == []


def test_a_template_may_be_given_as_text() -> None:
    assert read("--chat-template", "{{ messages[0].content }}").server.chat_template == "{{ messages[0].content }}"


@pytest.mark.parametrize(
    ("text", "expected"), [("*", ("*",)), ('["*"]', ("*",)), ("[]", ()), ("http://a", ("http://a",))]
)
def test_origins(text: str, expected: tuple[str, ...]) -> None:
    assert read("--allowed-origins", text).server.allowed_origins == expected


def test_the_model_may_stand_anywhere() -> None:
    for line in ("m --port 1 --seed 2", "--port 1 m --seed 2", "--port 1 --seed 2 m", "--enforce-eager m --seed 2"):
        assert read(*line.split()).engine.model == "m"


def test_a_config_file_stands_below_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "model: m\nport: 9000\napi-key: [a, b]\nenforce_eager: true\nenable-lora: false\nseed:\n"
        "speculative-config:\n  method: ngram\n  num_speculative_tokens: 7\nallowed-origins: ['*']\n"
        "trust-remote-code: false\nprint-config: false\n"
    )
    found = read("--config", str(path))
    assert found.engine == EngineConfig("m")
    assert found.server == ServerSettings(
        port=9000, api_keys=("a", "b"), allowed_origins=("*",), served_model_names=("m",)
    )
    assert found.speculative == [SpeculativeConfig(method="ngram", num_speculative_tokens=7)]
    assert found.print_config is False
    assert "--enforce-eager" in found.warnings[0]
    above = read("n", "--config", str(path), "--port", "1", "--spec-tokens", "2", "--trust-remote-code")
    assert (above.engine.model, above.server.port, above.engine.trust_remote_code) == ("n", 1, True)
    assert above.speculative == [SpeculativeConfig(method="ngram", num_speculative_tokens=2)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "is not YAML"),
        ("- a", "must be a mapping"),
        ("prot: 1", "did you mean --port"),
        ("port: {}", "invalid int"),
    ],
)
def test_bad_config_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(BadInput, match=message):
        read("--config", str(path))


def test_keys_do_not_show_in_what_is_printed() -> None:
    shown = json.dumps(read("m", "--api-key", "secret", "--print-config").as_dict())
    assert "secret" not in shown
    assert json.loads(shown)["engine"]["model"] == "m"
    assert json.loads(shown)["server"]["api_keys"] == ["***"]


def test_the_page_has_every_flag_and_key() -> None:
    page = (Path(__file__).parents[2] / "docs/from-vllm.md").read_text(encoding="utf-8")
    names = [*("--" + name for name in FLAGS), *IGNORED_KEYS, *REFUSED_KEYS]
    assert [name for name in names if f"`{name}`" not in page] == []
    reasons = [flag.refusal for flag in FLAGS.values()] + [reason for reason, _ in REFUSED_KEYS.values()]
    assert [reason for reason in reasons if reason and f"| {reason} |" not in page] == []
