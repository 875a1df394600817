"""The target's own answers to prompts, kept line by line: a drafter has to guess what its target says.

Each finished answer is a line of `answers.jsonl`: {"key", "prompt_token_ids", "token_ids"}, where `key` stands for
prompt and parameters, so that a run that was stopped goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from outpace.errors import BadInput, OutpaceError
from outpace.llm import LLM
from outpace.params import SamplingParams
from outpace.train.data.sources import Conversation
from outpace.train.settings import DataSettings

__all__ = ["ANSWERS", "answer_prompts", "read_answers"]

ANSWERS = "answers.jsonl"
_BATCHES_AT_ONCE = 4
"""Handed over together, so that a short answer's place is taken at once; what a crash loses at most."""


def answer_prompts(
    llm: Callable[[], LLM],
    conversations: Sequence[Conversation],
    folder: Path,
    settings: DataSettings,
    target: str,
    progress: Callable[[int, int], None],
) -> Iterator[tuple[list[int], list[int]]]:
    """(prompt ids, answer ids) of the conversations; what the file knows is not asked again.

    A prompt that fills the model's whole context has no answer and is left out.

    Args:
        llm: makes the target with its engine, when first needed.
        conversations: each ends where an answer is wanted.
        folder: where `answers.jsonl` is.
        settings: of the data.
        target: what tells this model from others: its answers are its own.
        progress: takes (answers there are, all).

    Raises:
        BadInput: the model has no chat template, or takes no such message.
        OutpaceError: the file cannot be written.
    """
    path = folder / ANSWERS
    known = read_answers(path)
    keys = [_key(conversation, settings, target) for conversation in conversations]
    missing = [number for number, key in enumerate(keys) if key not in known]
    progress(len(keys) - len(missing), len(keys))
    model = llm() if missing else None
    at_once = _BATCHES_AT_ONCE * settings.batch
    for begin in range(0, len(missing), at_once):
        assert model is not None
        part = missing[begin : begin + at_once]
        answers = _answers(model, {number: conversations[number] for number in part}, settings)
        for number, answer in answers.items():
            known[keys[number]] = answer
            _append(path, keys[number], answer)
        progress(len(keys) - len(missing) + begin + len(part), len(keys))
    for key in keys:
        if key in known:
            yield known[key]


def read_answers(path: Path) -> dict[str, tuple[list[int], list[int]]]:
    """{key: (prompt ids, answer ids)}; a last line that was cut off while it was written does not count.

    Raises:
        BadInput: another line is damaged; names file and line.
    """
    found: dict[str, tuple[list[int], list[int]]] = {}
    if not path.is_file():
        return found
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            value = json.loads(line)
            found[value["key"]] = (value["prompt_token_ids"], value["token_ids"])
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                continue
            raise BadInput(
                f"{path}, line {number} is damaged ({error}): take it out, the answer is made again"
            ) from error
    return found


def _answers(
    model: LLM, conversations: Mapping[int, Conversation], settings: DataSettings
) -> dict[int, tuple[list[int], list[int]]]:
    limit = model.describe()["engine"]["max_model_len"]
    prompts: dict[int, list[int]] = {}
    params = []
    for number, conversation in conversations.items():
        ids = model.encode_chat([dict(message) for message in conversation])
        room = min(settings.max_tokens, limit - len(ids))
        if room >= 1:
            prompts[number] = ids
            # Of one seed all prompts would get the same noise, and the same words wherever they hesitate alike.
            seed = settings.seed ^ int.from_bytes(hashlib.sha256(repr(ids).encode()).digest()[:7], "big")
            params.append(SamplingParams(temperature=settings.temperature, max_tokens=room, seed=seed))
    outputs = model.generate(list(prompts.values()), params)
    return {
        number: (ids, list(output.outputs[0].token_ids))
        for (number, ids), output in zip(prompts.items(), outputs, strict=True)
    }


def _key(conversation: Conversation, settings: DataSettings, target: str) -> str:
    what = [target, list(map(dict, conversation)), settings.max_tokens, settings.temperature, settings.seed]
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:24]


def _append(path: Path, key: str, answer: tuple[list[int], list[int]]) -> None:
    """Adds a line; after a crash the file may end in half a line, which is first cut off."""
    line = json.dumps({"key": key, "prompt_token_ids": answer[0], "token_ids": answer[1]})
    try:
        with path.open("ab+") as file:
            size = file.seek(0, os.SEEK_END)
            if size:
                file.seek(size - 1)
                if file.read(1) != b"\n":
                    file.seek(0)
                    file.truncate(file.read().rfind(b"\n") + 1)
            file.write(line.encode() + b"\n")
    except OSError as error:
        raise OutpaceError(
            f"{path} cannot be written: {error.strerror}; {path} keeps the answers so far, the same command goes on"
        ) from error
