"""The models in the forms that engines read, each made once from the GGUF file, and the prompts as token ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engines.contenders import Contender
from engines.dequantised import write_dequantised
from engines.rewrite_gguf import rewrite, unreadable_types
from outpace.models.files import fingerprint
from outpace.models.load import load_files

__all__ = ["EncodedPrompt", "ModelFiles", "Tokens", "choose_prompts", "parse_tasks", "score_texts"]

_SCORED_TOKENS = 700
_SCORED_PER_TEXT = 180


@dataclass(frozen=True)
class ModelFiles:
    """One comparison's models.

    Args:
        target: GGUF file.
        draft: GGUF file, or None.
        scratch: folder for the forms made of them.
        notify: told in a line what is written.
    """

    target: Path
    draft: Path | None
    scratch: Path
    notify: Callable[[str], None] = print

    def paths(self, contender: Contender) -> tuple[str, str | None]:
        """Target and draft in the form that a contender reads; the draft only where it drafts with it."""
        draft = self.draft if contender.method == "draft" else None
        return str(self._form(self.target, contender.form)), None if draft is None else str(
            self._form(draft, contender.form)
        )

    def _form(self, path: Path, form: str) -> Path:
        if form == "gguf":
            return path
        self.scratch.mkdir(parents=True, exist_ok=True)
        stem = f"{path.stem}-{fingerprint(path)[:12]}"
        if form == "dequantised":
            folder = self.scratch / f"{stem}-dequantised"
            write_dequantised(path, folder, self.notify)
            return folder
        if form == "readable":
            types = unreadable_types(path)
            if not types:
                return path
            target = self.scratch / f"{stem}-readable.gguf"
            if not target.is_file():
                self.notify(f"{path.name} holds {', '.join(types)}, which OpenVINO does not read: rewriting in Q8_0")
                rewrite(path, target)
            return target
        raise ValueError(f"form={form!r} is not one of gguf, readable, dequantised")


@dataclass(frozen=True)
class EncodedPrompt:
    """One prompt, as every engine gets it.

    Args:
        name: its id in the file.
        task: what kind it is.
        token_ids: under the model's chat template, ending where the answer begins.
    """

    name: str
    task: str
    token_ids: list[int]


@dataclass(frozen=True)
class Tokens:
    """Prompts encoded once, by outpace's tokenizer.

    Args:
        prompts: in the order in which they are asked.
        eos_ids: ids that end an answer.
        vocab_size: ids the tokenizer knows.
    """

    prompts: list[EncodedPrompt]
    eos_ids: list[int]
    vocab_size: int

    @classmethod
    def encode(cls, target: Path, chosen: Sequence[Mapping[str, object]], notify: Callable[[str], None]) -> Tokens:
        """Encodes prompts as read from a .jsonl file."""
        files = load_files(str(target), notify=notify)
        tokenizer = files.tokenizer
        prompts = [
            EncodedPrompt(str(one["id"]), str(one["task"]), tokenizer.encode_chat(one["messages"]))  # type: ignore[arg-type]
            for one in chosen
        ]
        return cls(prompts, sorted(files.eos_ids), tokenizer.vocab_size)


def parse_tasks(text: str) -> dict[str, int | None]:
    """`code_edit=10,chat=2,math` -> how many prompts of each task; None is all.

    Raises:
        ValueError: no number, or none above 0.
    """
    found: dict[str, int | None] = {}
    for item in text.split(","):
        task, equals, count = item.strip().partition("=")
        if not task or (equals and (not count.isascii() or not count.isdigit() or int(count) < 1)):
            raise ValueError(f"{item!r} is not a task or task=count, as in code_edit=10,chat=2,math")
        found[task] = int(count) if equals else None
    return found


def choose_prompts(files: Sequence[Path], tasks: Mapping[str, int | None]) -> list[dict[str, object]]:
    """Prompts of the tasks, the first ones of each, taking turns: so that a run cut short has some of every task.

    Args:
        files: .jsonl; a task's prompts come from the first of them that has any.
        tasks: how many of each.

    Raises:
        ValueError: no file has such a task, or not so many prompts of it.
    """
    queues: dict[str, list[dict[str, object]]] = {}
    for file in files:
        prompts = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        for task in {str(prompt["task"]) for prompt in prompts} - set(queues):
            queues[task] = [prompt for prompt in prompts if prompt["task"] == task]
    for task, count in tasks.items():
        if task not in queues:
            raise ValueError(f"no task is called {task!r}; known: {', '.join(sorted(queues))}")
        if count is not None and count > len(queues[task]):
            raise ValueError(f"{task}={count} is not possible: there are {len(queues[task])} prompts of it")
    chosen = {task: queues[task][:count] for task, count in tasks.items()}
    longest = max((len(queue) for queue in chosen.values()), default=0)
    return [queue[turn] for turn in range(longest) for queue in chosen.values() if turn < len(queue)]


def score_texts(prompts: Sequence[EncodedPrompt]) -> list[list[int]]:
    """Token ids over which logits are compared: the beginnings of prompts of different tasks, some 700 tokens."""
    texts: list[list[int]] = []
    left = _SCORED_TOKENS
    for prompt in prompts:  # they take turns, so the first are of different tasks
        text = prompt.token_ids[: min(_SCORED_PER_TEXT, left)]
        if len(text) > 1:
            texts.append(text)
            left -= len(text)
    return texts
