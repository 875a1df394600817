"""Command-line options, made from the fields of the settings they fill, and read back into those settings.

The help of an engine or speculation option is the help text of its config field; nothing is written twice. Options of
one request are in `outpace.cli.sampling`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NoReturn

from outpace.config import EngineConfig, SpeculativeConfig, field_help, field_kind
from outpace.errors import BadInput, InvalidParameter

__all__ = [
    "NUMBER_WORDS",
    "Parser",
    "add_engine_options",
    "add_output_options",
    "add_speculation_options",
    "engine_config",
    "flag_of",
    "given_options",
    "speculative_config",
]

NUMBER_WORDS: dict[type, str] = {int: "N", float: "X", str: "NAME"}
"""What stands for a value in the help."""


class Parser(argparse.ArgumentParser):
    """An argument parser that takes `--top_p` for `--top-p`, and raises `BadInput` where argparse prints and exits."""

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        """The same, but nothing may be left over: a command refuses what it does not know under its own name."""
        end = args.index("--") if "--" in args else len(args)
        words = [*map(self._hyphenated, args[:end]), *args[end:]]
        options, rest = super().parse_known_args(words, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return options, rest

    def error(self, message: str) -> NoReturn:
        raise BadInput(f"{message}\nSee `{self.prog} --help`.")

    def _hyphenated(self, word: str) -> str:
        """`--some_option[=value]` with hyphens if this parser has that option; prompts and values stay as they are."""
        name, equals, value = word.partition("=")
        flag = flag_of(name[2:])
        return flag + equals + value if name[:2] == "--" and flag in self._option_string_actions else word


def add_engine_options(
    parser: argparse.ArgumentParser,
    defaults: Mapping[str, str] | None = None,
    only: Collection[str] | None = None,
) -> None:
    """Adds one option for every field of `EngineConfig`.

    Args:
        defaults: {field: what the help says happens without its option}, where that is this command's own affair.
        only: names of the fields, if not all are wanted.
    """
    group = parser.add_argument_group("model and engine")
    for item in fields(EngineConfig):
        if only is not None and item.name not in only:
            continue
        flag, text = flag_of(item.name), _without_none(field_help(EngineConfig, item.name))
        if str(item.type) == "bool":
            action = argparse.BooleanOptionalAction if item.default else "store_true"
            group.add_argument(flag, action=action, default=None, help=text)
            continue
        kind = field_kind(item)
        default = item.default
        if defaults and item.name in defaults:
            text, default = text.partition("; default: ")[0], defaults[item.name]
        shown = text if default is None else f"{text} (default: {default})"
        group.add_argument(flag, type=kind, metavar=NUMBER_WORDS[kind], help=shown)


def add_speculation_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that choose the drafter."""
    group = parser.add_argument_group("speculation")
    which = group.add_mutually_exclusive_group()
    which.add_argument(
        "--speculative-model",
        metavar="WHAT",
        help="auto, suffix, ngram, self or self:E (first E layers of the model), mtp (the checkpoint's own MTP layer), "
        "none, or a draft model or EAGLE-3 head: hub id, folder, GGUF file or alias (default: auto)",
    )
    which.add_argument(
        "--speculative-config",
        metavar="JSON",
        help='all settings of the drafter as one JSON object, such as {"method": "auto", "model": "DRAFT"}; keys: '
        + ", ".join(item.name for item in fields(SpeculativeConfig)),
    )
    text = _without_none(field_help(SpeculativeConfig, "num_speculative_tokens"))
    group.add_argument("--num-speculative-tokens", type=int, metavar="N", help=f"{text}; 0 for none")


def add_output_options(parser: argparse.ArgumentParser, json_help: str, *, only_json: bool = False) -> None:
    """Adds what decides where results go and in which form.

    Args:
        json_help: what `--json` does in this command.
        only_json: the command has no requests with statistics and no configuration to print.
    """
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help=json_help)
    if only_json:
        return
    group.add_argument(
        "--stats", action="store_true", help="say on standard error what speculation did and what it took"
    )
    group.add_argument(
        "--print-config", action="store_true", help="load the model, print every setting in force as JSON, and end"
    )


def engine_config(arguments: argparse.Namespace, **defaults: Any) -> EngineConfig:
    """The engine's settings: the options given, then `defaults`, then those of `EngineConfig`.

    Raises:
        BadInput: naming the value and the valid range.
    """
    return EngineConfig(**{**defaults, **given_options(arguments, [item.name for item in fields(EngineConfig)])})


def speculative_config(arguments: argparse.Namespace) -> SpeculativeConfig:
    """The drafter's settings.

    Raises:
        BadInput: naming the value and what is possible.
    """
    if arguments.speculative_config is not None:
        config = SpeculativeConfig.parse(_json_object("--speculative-config", arguments.speculative_config))
    else:
        word = "auto" if arguments.speculative_model is None else arguments.speculative_model
        if not word.strip():
            raise InvalidParameter(
                "--speculative-model '' is not possible: write auto, suffix, ngram, self, self:E, mtp, none or a model"
            )
        config = SpeculativeConfig.parse(word)
    if arguments.num_speculative_tokens is None:
        return config
    return replace(config, num_speculative_tokens=arguments.num_speculative_tokens)


def flag_of(name: str) -> str:
    """The option that sets a field."""
    return "--" + name.replace("_", "-")


def given_options(arguments: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """{field: value} of the options that were given; not every command has every option."""
    values = {name: getattr(arguments, name, None) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _without_none(text: str) -> str:
    """The same help for people who leave options out where Python callers write None."""
    return text.replace("None: ", "default: ").replace("None ", "left out, it ")


def _json_object(option: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InvalidParameter(f"{option} is not JSON ({error}): {text!r}") from None
    if not isinstance(value, dict):
        raise InvalidParameter(f'{option} must be a JSON object such as {{"method": "ngram"}}, not {text!r}')
    return value
