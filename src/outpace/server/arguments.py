"""What a command line of the server comes to. Never imports torch."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from outpace.config import EngineConfig, SpeculativeConfig
from outpace.errors import InvalidParameter
from outpace.params import SamplingDefaults, SamplingParams
from outpace.server.command_line import words_of_file
from outpace.server.options import build_parser
from outpace.server.reasoning import check_reasoning
from outpace.server.settings import ServerSettings
from outpace.server.tools import check_format
from outpace.server.vllm_flags import FLAGS
from outpace.server.vllm_speculation import Said, by_key, speculative_config

__all__ = ["Resolved", "build_parser", "resolve"]

_KEY_VARIABLES = ("OUTPACE_API_KEY", "VLLM_API_KEY")
_LOOPBACK = ("127.", "::1", "localhost")
_LIMITS = {
    "port": (0, 65535),
    "max_waiting": (0, None),
    "max_body_bytes": (1, None),
    "drain_seconds": (0, None),
    "record_max_bytes": (10**6, None),
}
"""{setting: (least, most)}"""


class Resolved(NamedTuple):
    """What a command line comes to.

    Args:
        engine: settings of the engine.
        speculative: of its drafters.
        server: of the server itself.
        warnings: notes for people.
        print_config: only this is to be shown.
    """

    engine: EngineConfig
    speculative: list[SpeculativeConfig]
    server: ServerSettings
    warnings: list[str]
    print_config: bool

    def as_dict(self) -> dict[str, Any]:
        """JSON-able. Keys of the API are secret, so only their number shows."""
        server = {**_fields_of(self.server), "api_keys": ["***" for _ in self.server.api_keys]}
        drafters = [_fields_of(config) for config in self.speculative]
        return {
            "engine": _fields_of(self.engine),
            "speculative": drafters,
            "server": server,
            "warnings": self.warnings,
        }


def resolve(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> Resolved:
    """The settings that words on the command line come to.

    Args:
        argv: without the program's name and the command.
        environment: where API keys are found if the command line has none.

    Raises:
        BadInput: naming the option, the value and what is possible.
        SystemExit: after `--help`.
    """
    parser = build_parser()
    given = parser.read(argv)
    # What a file says holds where the command line is silent.
    below = parser.read(words_of_file(given.config, parser)) if hasattr(given, "config") else argparse.Namespace()
    options = {**_options(below), **_options(given)}
    ignored = _let_pass({**dict(getattr(below, "foreign", ())), **dict(getattr(given, "foreign", ()))})
    engine = EngineConfig(**_for(EngineConfig, options))
    drafter, more = speculative_config({**_said(below), **_said(given)})
    _check_tokenizer(options, engine)
    server = _server_settings(options, engine, environment)
    warnings = []
    if ignored or more:
        warnings.append(f"ignored, because answers do not depend on them here: {', '.join([*ignored, *more])}")
    if not server.api_keys and not server.host.startswith(_LOOPBACK):
        warnings.append(f"whoever reaches {server.host}:{server.port} may use this server: --api-key asks for a key")
    return Resolved(engine, [drafter], server, warnings, options.get("print_config", False))


def _options(given: argparse.Namespace) -> dict[str, Any]:
    """The options given, the model under its own name.

    Raises:
        InvalidParameter: two models were given.
    """
    options = dict(vars(given))
    tag = options.pop("model_tag", None)
    if tag is not None and options.setdefault("model", tag) != tag:
        raise InvalidParameter(f"{tag!r} and --model {options['model']!r} contradict each other: give one model")
    return options


def _let_pass(foreign: Mapping[str, str]) -> list[str]:
    """The flags of vLLM that are ignored, for people.

    Raises:
        InvalidParameter: one of them cannot be ignored.
    """
    ignored = []
    for name, value in foreign.items():
        flag = FLAGS[name]
        said = f"--{name}" if flag.takes == "nothing" else f"--{name} {value}"
        if flag.refuses(value):
            raise InvalidParameter(f"{said} is not possible: {flag.refusal}")
        if flag.note is not None and not flag.harmless(value):
            ignored.append(f"{said} ({flag.note})")
        elif (
            not flag.silent and flag.refusal is None
        ):  # of a flag with a refusal, the value is what outpace does anyway
            ignored.append(f"--{name}")
    return ignored


def _said(given: argparse.Namespace) -> dict[str, Said]:
    return by_key(getattr(given, "said", ()))


def _check_tokenizer(options: Mapping[str, Any], engine: EngineConfig) -> None:
    name = options.get("tokenizer")
    if name not in (None, engine.model):
        raise InvalidParameter(
            f"--tokenizer {name!r} is not possible: a model is read with its own tokenizer; leave it out, or give "
            f"{engine.model!r}"
        )


# Settings of the server.


def _server_settings(
    options: Mapping[str, Any], engine: EngineConfig, environment: Mapping[str, str]
) -> ServerSettings:
    """Those given, checked.

    Raises:
        BadInput: naming the option, the value and what is possible.
    """
    found = _for(ServerSettings, options)
    for name, (least, most) in _LIMITS.items():
        value = found.get(name, least)
        if not least <= value or (most is not None and value > most):
            valid = f"at least {least}" if most is None else f"from {least} to {most}"
            raise InvalidParameter(f"--{name.replace('_', '-')} {value} is not possible: it must be {valid}")
    if "seed" in found:
        SamplingParams(seed=found["seed"])
    if "tool_call_parser" in found:
        check_format(found["tool_call_parser"])
    if "reasoning_parser" in found:
        check_reasoning(found["reasoning_parser"])
    keys = options.get("api_key") or [key for key in map(environment.get, _KEY_VARIABLES) if key][:1]
    if any(not key for key in keys):
        raise InvalidParameter("--api-key '' is not possible: a key has at least one character")
    return ServerSettings(
        **{
            **found,
            "api_keys": tuple(keys),
            "served_model_names": tuple(options.get("served_model_name") or [engine.model]),
            "allowed_origins": _origins(options.get("allowed_origins")),
            "chat_template": _template(options.get("chat_template")),
            "log_requests": options.get("enable_log_requests", False),
            "generation_config": _generation_config(options.get("generation_config", "auto")),
            "override_generation_config": _overrides(options.get("override_generation_config") or {}),
            "record": _absolute(options.get("record")),
            "swap_drafters_from": _folder("--swap-drafters-from", options.get("swap_drafters_from")),
        }
    )


def _origins(text: str | None) -> tuple[str, ...]:
    """Of a JSON list, or of one origin as it is."""
    if text is None:
        return ()
    if not text.lstrip().startswith("["):
        return (text,)
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InvalidParameter(f"--allowed-origins {text!r} is not JSON ({error})") from None
    if not all(isinstance(item, str) and item for item in found):
        raise InvalidParameter(f"--allowed-origins {text!r} is not possible: it must be a list of texts")
    return tuple(found)


def _template(given: str | None) -> str | None:
    """The text of a template: of a file of this name, or the text itself, which has a brace somewhere.

    Raises:
        InvalidParameter: it is neither, or the file cannot be read.
    """
    if given is None:
        return None
    if "{" in given or "\n" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise InvalidParameter(f"--chat-template {given!r} cannot be read: {reason}") from None


def _absolute(folder: str | None) -> str | None:
    """A folder as it is called wherever one stands."""
    return None if folder is None else str(Path(folder).expanduser().absolute())


def _folder(flag: str, given: str | None) -> str | None:
    """A folder that is there.

    Raises:
        InvalidParameter: it is not.
    """
    folder = _absolute(given)
    if folder is not None and not Path(folder).is_dir():
        raise InvalidParameter(f"{flag} {given!r} is not possible: there is no such folder")
    return folder


def _generation_config(given: str) -> str:
    if given not in ("auto", "vllm"):
        raise InvalidParameter(
            f"--generation-config {given!r} is not possible: auto (the model's own) or vllm (neutral); "
            "--override-generation-config sets single values"
        )
    return given


def _overrides(given: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling defaults by the names of `SamplingDefaults`; `max_new_tokens` is max_tokens.

    Raises:
        InvalidParameter: a name or a value is not possible.
    """
    known = [item.name for item in fields(SamplingDefaults)]
    found = {"max_tokens" if name == "max_new_tokens" else name: item for name, item in given.items()}
    unknown = sorted(set(found) - set(known))
    if unknown:
        raise InvalidParameter(f"--override-generation-config has no {unknown[0]!r}: known are {', '.join(known)}")
    checked = SamplingParams(**found)
    return {name: getattr(checked, name) for name in found}


def _for(config: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are fields of a configuration."""
    return {item.name: options[item.name] for item in fields(config) if item.name in options}


def _fields_of(config: Any) -> dict[str, Any]:
    return {item.name: getattr(config, item.name) for item in fields(config)}
