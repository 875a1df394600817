"""The words of vLLM's command line in one form, and a parser that knows every flag of outpace and of vLLM.

Hyphens and underscores are the same, `--flag=value` is `--flag value`, `--flag.key value` is a JSON object, switches
may carry `true` or `false`, and short names are written out. Never imports torch.
"""

from __future__ import annotations

import argparse
import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from outpace.errors import BadInput, InvalidParameter
from outpace.server.vllm_flags import FLAGS, SHORT

__all__ = ["CommandLine", "words_of_file"]


class _Foreign(argparse.Action):
    """Notes a flag of vLLM that is no option of outpace, as (name, value)."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        name = self.option_strings[0][2:]
        if self.nargs == 0:
            value = "false" if option_string != self.option_strings[0] else "true"
        else:
            value = " ".join(values) if isinstance(values, list) else values
        namespace.foreign = [*getattr(namespace, "foreign", ()), (name, value)]


class CommandLine(argparse.ArgumentParser):
    """A parser that raises `BadInput` where argparse prints and exits, and leaves out what was not given."""

    def __init__(self, **options: Any) -> None:
        super().__init__(argument_default=argparse.SUPPRESS, allow_abbrev=False, **options)

    def add_foreign_flags(self) -> None:
        """Adds every flag of vLLM that this parser does not have, without help."""
        for flag in FLAGS.values():
            name = "--" + flag.name
            if flag.takes == "nothing":
                self.add_argument(name, _negated(name), action=_Foreign, nargs=0, help=argparse.SUPPRESS)
            else:
                many = "+" if flag.takes == "many" else None
                self.add_argument(name, action=_Foreign, nargs=many, help=argparse.SUPPRESS)

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """The options in words, and the one word that is no option, if there is one, as `model_tag`.

        Raises:
            BadInput: an option is unknown, or its value is not possible.
            SystemExit: after `--help`.
        """
        options, rest = self.parse_known_args(list(self._in_one_form(words)))
        unknown = next((word for word in rest if word.startswith("-")), None)
        if unknown is not None:
            self._refuse(unknown.partition("=")[0])
        if len(rest) > 1:
            self.error(f"{rest[1]!r} is one word too many: the only one without a flag is the model, {rest[0]!r}")
        if rest:
            options.model_tag = rest[0]
        return options

    def error(self, message: str) -> NoReturn:
        raise BadInput(f"{message}\nSee `{self.prog} --help`.")

    def _refuse(self, flag: str) -> NoReturn:
        close = get_close_matches(flag, list(self._option_string_actions), n=1)
        self.error(f"{flag} is not known" + (f": did you mean {close[0]}?" if close else ""))

    def _in_one_form(self, words: Sequence[str]) -> Iterator[str]:
        rest = deque(words)
        while rest:
            word = rest.popleft()
            if not word.startswith("-") or word in ("-", "--"):
                yield word
                continue
            name, equals, value = word.partition("=")
            name, key = self._full_name(name)
            if key:
                if not equals and not rest:
                    self.error(f"{name}.{key} needs a value")
                yield from (name, json.dumps({key: _json_value(value if equals else rest.popleft())}))
            elif self.is_switch(name):
                if not equals and rest and rest[0].lower() in ("true", "false"):  # as vLLM's were written once
                    value = rest.popleft()
                yield from self._switched(name, value or "true")
            elif name == "--optimization-level" and word[:2] == "-O" and word[2:]:
                yield from (name, word[2:])
            else:
                yield f"{name}={value}" if equals else name

    def _full_name(self, name: str) -> tuple[str, str]:
        """(the flag in full with hyphens, the key behind a dot)"""
        stem, _, key = name.partition(".")
        if stem[:2] == "-O" and stem[2:].isdigit():
            return SHORT["-O"], ""
        stem = SHORT.get(stem, stem)
        flag = "--" + stem[2:].replace("_", "-") if stem.startswith("--") else stem
        return (flag, key) if flag in self._option_string_actions else (name, "")

    def is_switch(self, flag: str) -> bool:
        """Whether it takes no value."""
        action = self._option_string_actions.get(flag)
        return action is not None and action.nargs == 0 and "--help" not in action.option_strings

    def takes_many(self, flag: str) -> bool:
        """Whether it takes any number of values."""
        action = self._option_string_actions.get(flag)
        return action is not None and action.nargs == "+"

    def _switched(self, flag: str, value: str) -> list[str]:
        if value.lower() in ("true", "1"):
            return [flag]
        if value.lower() not in ("false", "0"):
            self.error(f"{flag} {value!r} is not possible: it is a switch, true or false")
        negated = _negated(flag)
        return [negated] if negated in self._option_string_actions else []


def _negated(flag: str) -> str:
    return "--no-" + flag[2:]


def _json_value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def words_of_file(path: str, parser: CommandLine) -> list[str]:
    """The words that stand for a YAML file of `flag: value`, as `--config` takes it.

    Raises:
        BadInput: the file cannot be read, or is no such mapping.
    """
    import yaml  # PyYAML comes with transformers; few call for it, and it loads slowly

    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"--config {path!r} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidParameter(f"--config {path!r} is not YAML: {' '.join(str(error).split())}") from None
    if found is None:
        return []
    if not isinstance(found, dict):
        raise InvalidParameter(f"--config {path!r} must be a mapping of flags to values, such as `port: 8000`")
    return [word for name, value in found.items() for word in _words_of(str(name), value, parser)]


def _words_of(name: str, value: Any, parser: CommandLine) -> Iterable[str]:
    flag = "--" + name.lstrip("-").replace("_", "-")
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"{flag}={str(value).lower()}"]
    if isinstance(value, list) and parser.takes_many(flag):
        return [flag, *map(str, value)]
    return [f"{flag}={json.dumps(value) if isinstance(value, (list, Mapping)) else value}"]
