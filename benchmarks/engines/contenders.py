"""Who is compared: every engine in every way of speculating it has, and what each needs to run."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from engines.environments import LLAMA_BUILD, python_of

__all__ = ["REFERENCE", "Contender", "Places", "all_contenders", "select"]

REFERENCE = "transformers-float32/plain"
"""Whose logits are the reference: float32 arithmetic on the dequantised weights."""


@dataclass(frozen=True)
class Contender:
    """One engine in one way of speculating.

    Args:
        engine: its name, with its precision where it has several.
        variant: plain, ngram, draft, self, or another n-gram setting (`ngram-...`).
        worker: module that runs it, in `engines`.
        environment: folder of its environment; None is the one that runs the comparison.
        form: of the model files: "gguf", "readable" (a GGUF file of the types OpenVINO reads) or "dequantised".
        options: passed on to the worker.
    """

    engine: str
    variant: str
    worker: str
    environment: str | None
    form: str
    options: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.engine}/{self.variant}"

    @property
    def method(self) -> str:
        """The worker's word for the variant: several n-gram settings are one method."""
        return self.variant.partition("-")[0]


@dataclass(frozen=True)
class Places:
    """Where environments and models are.

    Args:
        environments: folder made by `environments.py`.
    """

    environments: Path

    def python(self, contender: Contender) -> Path:
        if contender.environment is None:
            return Path(sys.executable)
        return python_of(self.environments, contender.environment)

    def missing(self, contender: Contender, *, has_draft: bool) -> str | None:
        """Why it cannot be measured, or None."""
        if contender.method == "draft" and not has_draft:
            return "no draft model was given"
        if not self.python(contender).exists():
            name = contender.environment
            return f"no environment {name} in {self.environments}: make it with engines/environments.py --only {name}"
        server = contender.options.get("server")
        if server is not None and not Path(server).exists():
            return f"{server} is not there: build it with engines/environments.py --only llama-cpp"
        return None

    def environment_variables(self, contender: Contender) -> dict[str, str]:
        """What its worker needs in its environment."""
        if contender.environment == "llama-cpp":
            return {"LLAMA_CPP_LIB_PATH": str(self.environments / LLAMA_BUILD)}
        return {}


def all_contenders(quantizations: Sequence[str], places: Places) -> list[Contender]:
    """Everybody, outpace first."""
    found = []
    for quantization in quantizations:
        for variant in ("plain", "ngram", "draft", "self"):
            options = {"quantization": quantization}
            engine = f"outpace-{quantization}"
            found.append(Contender(engine, variant, "outpace_worker", None, "gguf", options))
    server = {"server": str(places.environments / LLAMA_BUILD / "llama-server")}
    short = {**server, "ngram_size": "3"}
    found += [
        Contender("llama-cpp-python", "plain", "llama_cpp_worker", "llama-cpp", "gguf"),
        Contender("llama-cpp-python", "ngram", "llama_cpp_worker", "llama-cpp", "gguf"),
        Contender("llama-cpp-python", "ngram-10", "llama_cpp_worker", "llama-cpp", "gguf", {"draft_tokens": "10"}),
        Contender("llama-server", "plain", "llama_server_worker", None, "gguf", server),
        Contender("llama-server", "ngram", "llama_server_worker", None, "gguf", server),
        Contender("llama-server", "ngram-short", "llama_server_worker", None, "gguf", short),
        Contender("llama-server", "draft", "llama_server_worker", None, "gguf", server),
    ]
    for variant in ("plain", "ngram", "draft"):
        found.append(Contender("openvino", variant, "openvino_worker", "openvino", "readable"))
    for engine, worker in (("transformers", "transformers_worker"), ("vllm", "vllm_worker")):
        for dtype in ("float32", "bfloat16"):
            for variant in ("plain", "ngram", "draft"):
                name = f"{engine}-{dtype}"
                found.append(Contender(name, variant, worker, engine, "dequantised", {"dtype": dtype}))
    return found


def select(contenders: Iterable[Contender], patterns: Sequence[str]) -> list[Contender]:
    """Those that one of the patterns names: the beginning of a name (`llama`, `vllm-bf`), or a glob (`*/ngram`).

    Raises:
        ValueError: a pattern names nobody.
    """
    everybody = list(contenders)
    for pattern in patterns:
        if not any(_matches(contender, pattern) for contender in everybody):
            names = ", ".join(contender.name for contender in everybody)
            raise ValueError(f"{pattern!r} names none of {names}")
    return [one for one in everybody if any(_matches(one, pattern) for pattern in patterns)]


def _matches(contender: Contender, pattern: str) -> bool:
    return contender.name.startswith(pattern) or fnmatchcase(contender.name, pattern)
