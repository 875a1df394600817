"""The options of `outpace serve`. Those of the engine are made from the fields they fill. Never imports torch."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

from outpace.config import EngineConfig, SpeculativeConfig, field_help, field_kind
from outpace.errors import BadInput
from outpace.server.command_line import CommandLine
from outpace.server.settings import ServerSettings
from outpace.server.vllm_speculation import Said, json_settings

__all__ = ["build_parser"]

_EPILOG = (
    "Flags of `vllm serve`, of its present and past versions, are accepted too, with underscores as well as hyphens. "
    "Those without a meaning here are named in one warning; those that would change answers are refused."
)
_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
_WORDS: dict[type, str] = {int: "N", float: "X", str: "NAME"}
_DTYPES = {"half": "float16", "float": "float32"}
_DEFAULTS = ServerSettings()


def build_parser() -> CommandLine:
    """The parser of `outpace serve`; options that were not given are absent from what it reads."""
    parser = CommandLine(
        prog="outpace serve",
        usage="outpace serve [MODEL] [options]",
        description="Serves a model over OpenAI's HTTP interface.",
        epilog=_EPILOG,
    )
    _add_engine_options(parser)
    _add_speculation_options(parser)
    _add_answer_options(parser)
    _add_server_options(parser)
    _add_output_options(parser)
    parser.add_foreign_flags()
    return parser


def _add_engine_options(parser: CommandLine) -> None:
    group = parser.add_argument_group("model and engine")
    readers: dict[str, Callable[[str], Any]] = {
        "max_model_len": _length,
        "max_num_batched_tokens": _count,
        "dtype": lambda text: _DTYPES.get(text, text),
        "quantization": lambda text: "file" if text == "gguf" else text,
    }
    for item in fields(EngineConfig):
        flag, text = "--" + item.name.replace("_", "-"), _without_none(field_help(EngineConfig, item.name))
        if str(item.type) == "bool":
            group.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
            continue
        kind = field_kind(item)
        shown = text if item.default is None else f"{text} (default: {item.default})"
        reader = readers.get(item.name, kind)
        group.add_argument(flag, type=reader, metavar=_WORDS[kind], help=shown)
    group.add_argument("--tokenizer", metavar="NAME", help="the model's own, which is the only one possible")


def _add_speculation_options(parser: CommandLine) -> None:
    group = parser.add_argument_group("speculation", "Drafts change how long answers take, not what they say.")
    help_of = partial(field_help, SpeculativeConfig)
    say = partial(group.add_argument, action=_Say)
    say(
        "--speculative-model", "--spec-model", const="model", metavar="WHAT",
        help="auto, suffix, ngram, self or self:E (first E layers of the model), mtp (the checkpoint's own MTP layer), "
        "none, or a draft model or EAGLE-3 head: hub id, folder, GGUF file or alias (default: auto)",
    )  # fmt: skip
    say("--spec-method", const="method", metavar="NAME", help=help_of("method"))
    name = "num_speculative_tokens"
    text = f"{_without_none(help_of(name))}; 0 for none"
    say("--num-speculative-tokens", "--spec-tokens", const=name, type=int, metavar="N", help=text)
    name = "prompt_lookup_max"
    text = f"{help_of(name)} (default: {getattr(SpeculativeConfig(), name)})"
    say("--ngram-prompt-lookup-max", const=name, type=int, metavar="N", help=text)
    name = "prompt_lookup_min"
    say("--ngram-prompt-lookup-min", const=name, type=int, metavar="N", help=_without_none(help_of(name)))
    name = "disable_by_batch_size"
    flags = ("--speculative-disable-by-batch-size", "--disable-by-batch-size")
    say(*flags, const=name, type=int, metavar="N", help=_without_none(help_of(name)))
    name = "quantization"
    say("--speculative-model-quantization", const=name, metavar="NAME", help=_without_none(help_of(name)))
    say("--spec-decoding-acceptance-method", const="acceptance_method", help=argparse.SUPPRESS)  # one value is left
    keys = ", ".join(item.name for item in fields(SpeculativeConfig))
    group.add_argument(
        "--speculative-config", action=_SayJson, metavar="JSON",
        help=f"settings of the drafter as a JSON object, also as --speculative-config.KEY VALUE; keys: {keys}",
    )  # fmt: skip


def _add_answer_options(parser: CommandLine) -> None:
    group = parser.add_argument_group("answers")
    add = group.add_argument
    add("--served-model-name", nargs="+", metavar="NAME",
        help="what requests call the model, the first being what answers carry (default: as --model)")  # fmt: skip
    add("--chat-template", metavar="FILE", help="a Jinja template in place of the model's own: a file, or its text")
    add("--tool-call-parser", metavar="NAME", help="format of tool calls (default: recognised by the chat template)")
    add("--reasoning-parser", metavar="NAME", help="format of reasoning (default: recognised by the chat template)")
    add("--seed", type=int, metavar="N", help="seed of requests that give none (default: a new one for each)")
    add("--generation-config", metavar="NAME",
        help="sampling defaults: auto, those of the model's generation config (the default); vllm, temperature 1 and "
        "no filters")  # fmt: skip
    add("--override-generation-config", type=_json_object, metavar="JSON",
        help='sampling defaults above these, such as {"temperature": 0.5}')  # fmt: skip


def _add_server_options(parser: CommandLine) -> None:
    group = parser.add_argument_group("server")
    add, switch = group.add_argument, argparse.BooleanOptionalAction
    add("--host", help=f"address to bind; 0.0.0.0 for all (default: {_DEFAULTS.host})")
    add("--port", type=int, metavar="N", help=f"TCP port to bind, 0 for a free one (default: {_DEFAULTS.port})")
    add("--api-key", nargs="+", metavar="KEY",
        help="keys, one of which requests must carry (default: $OUTPACE_API_KEY, $VLLM_API_KEY, or none)")  # fmt: skip
    add("--allowed-origins", metavar="JSON",
        help='origins whose pages may read answers, such as ["https://a.example"] or * (default: none)')  # fmt: skip
    add("--root-path", metavar="PATH", help="prefix under which a proxy shows this server")
    add("--max-waiting", type=int, metavar="N",
        help=f"most requests that wait; further ones get status 429 (default: {_DEFAULTS.max_waiting})")  # fmt: skip
    add("--max-body-bytes", type=_count, metavar="N",
        help=f"largest request body; larger ones get status 413 (default: {_DEFAULTS.max_body_bytes})")  # fmt: skip
    add("--drain-seconds", "--shutdown-timeout", type=float, metavar="X",
        help=f"how long running requests may go on after SIGTERM (default: {_DEFAULTS.drain_seconds:g})")  # fmt: skip
    add("--enable-log-requests", action=switch, help="log one line for every HTTP request")
    add("--log-prompts", "--enable-log-outputs", action=switch, help="log what is asked and answered")
    add("--record", metavar="DIR",
        help="append prompts and finished answers to files in DIR, for `outpace train --from DIR` (default: nothing is "
        "recorded)")  # fmt: skip
    add("--record-max-bytes", type=_count, metavar="N",
        help=f"most that these files take together; the oldest go (default: {_DEFAULTS.record_max_bytes})")  # fmt: skip
    add(
        "--swap-drafters-from",
        metavar="DIR",
        help="let `outpace swap` put drafters from folders below DIR into the running server (default: it takes none)",
    )
    add("--config", metavar="FILE", help="a YAML file of options; those of the command line override it")


def _add_output_options(parser: CommandLine) -> None:
    group = parser.add_argument_group("output")
    text = "print the settings these options come to as JSON, without loading a model, and end"
    group.add_argument("--print-config", action="store_true", help=text)


class _Say(argparse.Action):
    """Notes a setting of the drafter, whose key is `const`, and the flag it came by."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        flag = option_string or self.option_strings[0]
        self.note(namespace, [(str(self.const), Said(flag, values))])

    def note(self, namespace: argparse.Namespace, said: list[tuple[str, Said]]) -> None:
        """Adds to what was said before."""
        namespace.said = [*getattr(namespace, "said", ()), *said]


class _SayJson(_Say):
    """The same for many settings in one JSON object."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        self.note(namespace, json_settings(self.option_strings[0], values))


# Values.


def _count(text: str) -> int:
    """A count as vLLM reads it: 4096, 4k (thousands), 4K (times 1024), 25.6k.

    Raises:
        ValueError: it is none; argparse says so.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgKMG])", text)
    return int(text) if match is None else int(float(match[1]) * _SUFFIXES[match[2]])


def _length(text: str) -> int | None:
    """The same, or `auto` or -1 for what the model and memory allow."""
    return None if text in ("auto", "-1") else _count(text)


_count.__name__ = _length.__name__ = "count"  # as argparse names it in its message


def _json_object(text: str) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise BadInput(f'{text!r} is no JSON object such as {{"temperature": 0.5}}')
    return found


_json_object.__name__ = "JSON"


def _without_none(text: str) -> str:
    """The same help for people who leave options out where Python callers write None."""
    return text.replace("None: ", "default: ").replace("None ", "left out, it ")
