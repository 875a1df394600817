"""What `compare.py` and a worker say to each other: JSON objects, one a line, requests on stdin, answers on stdout.

    {"kind": "load", ...Settings}                  -> {"ok": true, "load_seconds", "versions", "notes", "memory"}
    {"kind": "generate", ...Prompt}                -> {"ok": true, ...Answer, "memory"}
    {"kind": "score", "texts": [[id]], "path": p}  -> {"ok": true, "rows"}; logits are written to the file p
    {"kind": "close"}                              -> {"ok": true}, and the worker ends

What fails is answered {"ok": false, "error": one line}; the trace goes to stderr. Standard library only: this file runs
under every engine's own Python. What an engine's libraries print goes to stderr, never between the answers.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Protocol, TextIO, TypeVar

from engines.processes import memory_of_tree

__all__ = ["Answer", "Engine", "NotExposed", "Prompt", "Recorder", "Settings", "parse", "serve"]

Message = TypeVar("Message")


class NotExposed(Exception):
    """The engine has no way to do what was asked; the text says why."""


@dataclass(frozen=True)
class Settings:
    """How a worker loads its engine.

    Args:
        target: the model: a GGUF file, or a folder of dequantised weights.
        draft: the draft model in the same form, or None.
        variant: how to speculate: plain, ngram (prompt lookup), draft, or self.
        options: the engine's own choices by name, as dtype or quantization.
        threads: CPU threads.
        context: most tokens of a prompt and its answer.
        draft_tokens: most draft tokens a step.
        eos_ids: ids that end an answer.
        vocab_size: ids the tokenizer knows; logits beyond are padding.
        scratch: a folder for files of this worker; it outlives the worker.
    """

    target: str
    draft: str | None
    variant: str
    options: dict[str, str]
    threads: int
    context: int
    draft_tokens: int
    eos_ids: list[int]
    vocab_size: int
    scratch: str


@dataclass(frozen=True)
class Prompt:
    """One prompt to answer greedily."""

    token_ids: list[int]
    max_tokens: int
    ignore_eos: bool


@dataclass(frozen=True)
class Answer:
    """What came of it.

    Args:
        token_ids: generated, the one that ended the answer included if the engine gives it.
        first_seconds: from the request to the first tokens.
        first_tokens: how many came then: more than one where a draft was accepted in the first pass.
        total_seconds: from the request to the end.
        passes: times the target was run, the prompt's included; None where the engine does not say.
        drafted: draft tokens verified, or None.
        accepted: draft tokens kept, or None.
    """

    token_ids: list[int]
    first_seconds: float
    first_tokens: int
    total_seconds: float
    passes: int | None = None
    drafted: int | None = None
    accepted: int | None = None

    @property
    def milliseconds_per_token(self) -> float | None:
        """Of decoding alone, the prompt and the tokens that came with it left out; None if nothing followed."""
        rest = len(self.token_ids) - self.first_tokens
        return 1e3 * (self.total_seconds - self.first_seconds) / rest if rest > 0 else None

    @property
    def whole_milliseconds_per_token(self) -> float:
        """Of the whole answer, prompt included."""
        return 1e3 * self.total_seconds / len(self.token_ids)


@dataclass
class Recorder:
    """Notes tokens as they come and when. Made at the moment the request is handed to the engine."""

    began: float = field(default_factory=time.perf_counter)
    token_ids: list[int] = field(default_factory=list)
    first_seconds: float | None = None
    first_tokens: int = 0

    def add(self, token_ids: Iterable[int]) -> None:
        """Books tokens that have just come."""
        new = [int(token_id) for token_id in token_ids]
        if self.first_seconds is None and new:
            self.first_seconds = time.perf_counter() - self.began
            self.first_tokens = len(new)
        self.token_ids += new

    def answer(self, *, passes: int | None = None, drafted: int | None = None, accepted: int | None = None) -> Answer:
        """The answer, ending now.

        Raises:
            RuntimeError: no token came.
        """
        total = time.perf_counter() - self.began
        if self.first_seconds is None:
            raise RuntimeError("the engine returned no token")
        return Answer(self.token_ids, self.first_seconds, self.first_tokens, total, passes, drafted, accepted)


class Engine(Protocol):
    """An engine, loaded."""

    versions: dict[str, str]
    """Version by package, and of what the weights were made into."""
    notes: list[str]
    """What a reader of the numbers should know."""

    def generate(self, prompt: Prompt) -> Answer:
        """Answers greedily."""

    def score(self, texts: Sequence[Sequence[int]]) -> Iterable[Any]:
        """For every text its [tokens, vocabulary] float32 logits; row i follows token i.

        Raises:
            NotExposed: the engine hands out no logits.
        """

    def close(self) -> None:
        """Ends what it started."""


def parse(kind: type[Message], values: dict[str, Any]) -> Message:
    """A dataclass from a JSON object; keys it does not know are left out."""
    known = {item.name for item in fields(kind)}  # type: ignore[arg-type]
    return kind(**{key: value for key, value in values.items() if key in known})


def serve(load: Callable[[Settings], Engine]) -> None:
    """Answers requests until told to close, or until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever the engine prints, from Python or C++
    engine: Engine | None = None
    try:
        for line in sys.stdin:
            request = json.loads(line)
            if request["kind"] == "close":
                break
            try:
                if request["kind"] == "load":
                    engine, reply = _load(load, parse(Settings, request))
                else:
                    assert engine is not None, "the first request must be load"
                    reply = _work(engine, request)
            except Exception as error:  # an engine fails in any way it likes; the comparison lists it and goes on
                traceback.print_exc()
                reply = {"ok": False, "error": one_line(error)}
            _send(answers, reply)
    finally:
        if engine is not None:
            engine.close()
    _send(answers, {"ok": True})


def _load(load: Callable[[Settings], Engine], settings: Settings) -> tuple[Engine, dict[str, Any]]:
    began = time.perf_counter()
    engine = load(settings)
    reply = {"load_seconds": time.perf_counter() - began, "versions": engine.versions, "notes": engine.notes}
    return engine, {"ok": True, **reply, "memory": memory_of_tree(os.getpid())}


def _work(engine: Engine, request: dict[str, Any]) -> dict[str, Any]:
    if request["kind"] == "generate":
        answer = engine.generate(parse(Prompt, request))
        return {"ok": True, **asdict(answer), "memory": memory_of_tree(os.getpid())}
    if request["kind"] == "score":
        return {"ok": True, "rows": _write_logits(engine, request["texts"], request["path"])}
    raise ValueError(f"kind={request['kind']!r} is not known: load, generate, score or close")


def _write_logits(engine: Engine, texts: Sequence[Sequence[int]], path: str) -> int:
    """Logits of all texts, one below the other, as a .npy file; a text at a time is in memory."""
    import numpy as np  # here: workers that only generate need none

    whole, done = None, 0
    for logits in engine.score(texts):
        if whole is None:
            shape = (sum(map(len, texts)), logits.shape[1])
            whole = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=shape)
        whole[done : done + len(logits)] = logits
        done += len(logits)
    if whole is None or done != len(whole):
        raise RuntimeError(f"{done} rows of logits came for {sum(map(len, texts))} tokens")
    whole.flush()
    return done


def one_line(error: Exception) -> str:
    """An exception, its kind and the first line of what it says."""
    lines = str(error).strip().splitlines()
    if isinstance(error, NotExposed) and lines:
        return lines[0]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:300]


def _send(answers: TextIO, reply: dict[str, Any]) -> None:
    answers.write(json.dumps(reply) + "\n")
    answers.flush()
