"""The one seam between the commands and the engine: tests put a stand-in here."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass, fields
from importlib import import_module
from typing import TYPE_CHECKING, Any

import outpace
from outpace.cli.options import engine_config, speculative_config
from outpace.cli.progress import Progress
from outpace.cli.streams import say
from outpace.config import EngineConfig
from outpace.params import SamplingParams, SpeculationParams

if TYPE_CHECKING:
    from outpace.doctor.report import Examination
    from outpace.engine.outputs import StreamChunk
    from outpace.llm import LLM

__all__ = ["Backend", "has_chat_template", "open_llm", "print_config", "stream"]


def _real_llm(*args: Any, **options: Any) -> LLM:
    return outpace.LLM(*args, **options)


def _local_models() -> Sequence[str]:
    # Imported when asked for: it brings torch with it.
    return [str(model) for model in import_module("outpace.models.resolve").find_local_models()]


def _examine(*args: Any, **options: Any) -> Examination:
    found: Examination = import_module("outpace.doctor.examine").examine(*args, **options)
    return found


@dataclass(frozen=True)
class Backend:
    """What commands need from the rest of outpace.

    Args:
        llm: makes an engine front; called as `LLM` is.
        local_models: what `--model` takes for each model on this machine, smallest first.
        examine: looks at this machine; called as `doctor.examine.examine` is.
    """

    llm: Callable[..., LLM] = _real_llm
    local_models: Callable[[], Sequence[str]] = _local_models
    examine: Callable[..., Examination] = _examine


def open_llm(
    backend: Backend, arguments: argparse.Namespace, config: EngineConfig | None = None, *, announce: bool = False
) -> LLM:
    """Builds the engine the options ask for, with progress on standard error.

    Args:
        config: the engine's settings, if they are not simply those of the options.
        announce: say what was built, when it is.

    Raises:
        OutpaceError: settings, model or memory do not allow it.
    """
    settings = config or engine_config(arguments)
    speculative = speculative_config(arguments)
    with Progress() as progress:
        llm = backend.llm(settings, speculative=speculative, front="cli", notify=progress.say, progress=progress.report)
    if announce:
        say(llm.banner())
    return llm


def has_chat_template(llm: LLM) -> bool:
    """The model was made for messages."""
    return llm.tokenizer.has_chat_template


def stream(
    llm: LLM,
    prompt: str | list[dict[str, str]],
    params: SamplingParams,
    speculation: SpeculationParams | None = None,
) -> Generator[StreamChunk, None, None]:
    """`LLM.stream` as a generator that begins with the first chunk asked for; closing it ends the request."""
    yield from llm.stream(prompt, params, speculation)


def print_config(llm: LLM, params: SamplingParams) -> None:
    """Prints every setting in force as JSON on standard output: the engine's, and sampling as this call resolves it."""
    config = llm.describe()
    always = ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "stop")
    given = {
        item.name: getattr(params, item.name)
        for item in fields(params)
        if item.name in always or getattr(params, item.name) != item.default
    }
    config["sampling"] = {
        **config.get("sampling", {}),
        **{name: value for name, value in given.items() if value is not None},
    }
    print(json.dumps(config, indent=2, default=asdict))
