"""Options of one request, made from the fields of `SamplingParams` and read back into it.

Kind, meaning, range and default of an option are those of its field. A value that is not possible is refused under the
name of its option, before any model is loaded.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from outpace.checks import check_field, shown
from outpace.cli.options import NUMBER_WORDS, flag_of, given_options
from outpace.errors import InvalidParameter
from outpace.params import SamplingDefaults, SamplingParams
from outpace.structured import StructuredOutputs

__all__ = ["add_answer_options", "add_sampling_options", "sampling_params"]

_ANSWER_OPTIONS = ("n", "logprobs", "prompt_logprobs", "logprobs_mode")
"""For commands that print one prompt's answers."""
_NO_OPTION = ("logits_processors", "structured_outputs")
"""Functions cannot be written on a command line; of the other, each field is an option of its own."""
_STRUCTURES = {"json": "--json-schema", "regex": "--regex", "choice": "--choice", "grammar": "--grammar"}
_FILES = ("json", "grammar")
_NUMBERS = {"int": int, "int | None": int, "float": float, "float | None": float}


def add_sampling_options(parser: argparse.ArgumentParser, note: str) -> None:
    """Adds what chooses tokens and ends an answer.

    Args:
        note: what an option left out means for this command.
    """
    group = parser.add_argument_group("sampling", note)
    for item in fields(SamplingParams):
        if item.name not in (*_ANSWER_OPTIONS, *_NO_OPTION):
            _add_option(group, item)
    _add_structures(parser.add_argument_group("structured output").add_mutually_exclusive_group())


def add_answer_options(parser: argparse.ArgumentParser) -> None:
    """Adds what decides how many answers there are and what is said about their tokens."""
    group = parser.add_argument_group("answers")
    for item in fields(SamplingParams):
        if item.name in _ANSWER_OPTIONS:
            _add_option(group, item)


def sampling_params(arguments: argparse.Namespace, **defaults: Any) -> SamplingParams:
    """The request's parameters: the options given, then `defaults`; the rest is left to the model and the front.

    Raises:
        InvalidParameter: naming the option, its value and what would be possible.
    """
    names = [item.name for item in fields(SamplingParams) if item.name not in _NO_OPTION]
    given = given_options(arguments, names)
    if "logit_bias" in given:
        given["logit_bias"] = _biases(given["logit_bias"])
    for name, value in given.items():
        check_field(SamplingParams, name, value, label=flag_of(name))
    return SamplingParams(**{**defaults, **given, "structured_outputs": _structured_outputs(arguments)})


def _add_option(group: Any, item: Field[Any]) -> None:
    flag, kind, text = flag_of(item.name), str(item.type), _help(item)
    if kind == "bool" and item.default:
        flag = flag_of(f"no_{item.name}")
        group.add_argument(flag, dest=item.name, action="store_const", const=False, help=f"do not {text}")
    elif kind == "bool":
        group.add_argument(flag, action="store_const", const=True, help=text)
    elif kind.startswith("Sequence"):
        of_ids = "int" in kind
        word = "ID" if of_ids else "TEXT"
        group.add_argument(flag, action="append", type=int if of_ids else str, metavar=word, help=text)
    elif kind.startswith("Mapping"):
        group.add_argument(flag, action="append", metavar="ID=BIAS", help=text)
    else:
        number = _NUMBERS.get(kind, str)
        group.add_argument(flag, type=number, metavar=NUMBER_WORDS[number], help=text)


def _add_structures(group: Any) -> None:
    meanings = {item.name: item.metadata["meaning"] for item in fields(StructuredOutputs)}
    for name, flag in _STRUCTURES.items():
        if name == "choice":
            text = "a text the answer may be; give all of them, one option each"
            group.add_argument(flag, dest=_dest(name), action="append", metavar="TEXT", help=text)
            continue
        word = "FILE" if name in _FILES else "REGEX"
        text = f"the answer follows {meanings[name]}" + (", read from this file" if name in _FILES else "")
        group.add_argument(flag, dest=_dest(name), metavar=word, help=_escaped(text))
    text = f"the answer is {meanings['json_object']}"
    group.add_argument("--json-object", dest=_dest("json_object"), action="store_true", default=None, help=text)


def _help(item: Field[Any]) -> str:
    told, kind = item.metadata, str(item.type)
    if kind == "bool":
        return _escaped(told["meaning"])
    if kind.startswith("Sequence"):
        return _escaped(f"{told['meaning']}; can be given more than once")
    text = f"{told['meaning']}; {told['valid']}"
    if kind.startswith("Mapping"):
        return _escaped(f"{text}; can be given more than once")
    if item.name in {known.name for known in fields(SamplingDefaults)}:  # the group's note says what is the default
        return _escaped(text)
    default = told["unset"] if item.default is None else item.default
    return _escaped(f"{text} (default: {format(default, 'g') if isinstance(default, float) else default})")


def _escaped(text: str) -> str:
    return text.replace("%", "%%")


def _dest(name: str) -> str:
    return f"structured_{name}"


def _biases(written: Iterable[str]) -> dict[str, float]:
    """{"ID": BIAS} of words ID=BIAS; the rest is left to the parameter's own check."""
    biases: dict[str, float] = {}
    for word in written:
        token_id, _, bias = word.partition("=")
        try:
            value = float(bias)
        except ValueError:
            raise InvalidParameter(
                f"--logit-bias {shown(word)} is not possible: write ID=BIAS, such as 42=-100"
            ) from None
        if token_id in biases:
            raise InvalidParameter(f"--logit-bias {shown(word)} gives token id {token_id} a second bias: give one")
        biases[token_id] = value
    return biases


def _structured_outputs(arguments: argparse.Namespace) -> StructuredOutputs | None:
    given = given_options(arguments, [_dest(item.name) for item in fields(StructuredOutputs)])
    if not given:
        return None
    [(dest, value)] = given.items()  # the group allows one
    name = dest.removeprefix(_dest(""))
    if name == "json_object":
        return StructuredOutputs(json_object=True)
    flag = _STRUCTURES[name]
    if name in _FILES:
        value, flag = _read(flag, value), f"{flag} {value}: its text"
    return StructuredOutputs(**{name: check_field(StructuredOutputs, name, value, label=flag)})


def _read(flag: str, file: str) -> str:
    try:
        return Path(file).read_text("utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InvalidParameter(f"{flag} {shown(file)} cannot be read: {reason}") from None
