"""From sources to a folder of windows: what `outpace train data` does."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

from outpace.errors import BadInput
from outpace.llm import LLM
from outpace.models.files import format_bytes
from outpace.models.load import LoadedFiles
from outpace.source import Notify, Progress
from outpace.train.data.answers import answer_prompts
from outpace.train.data.document import Document, chat_document
from outpace.train.data.holding_out import split_documents
from outpace.train.data.packing import pack_documents
from outpace.train.data.shards import BYTES_PER_TOKEN, TrainingData, write_data
from outpace.train.data.sources import Conversation, read_prompts, read_records, read_texts
from outpace.train.data.talks import talks_of
from outpace.train.identity import Identity
from outpace.train.settings import DataSettings
from outpace.train.writing import make_folder

__all__ = ["DataPlan", "prepare_data"]


@dataclass(frozen=True, slots=True)
class DataPlan:
    """What to make data of.

    Args:
        prompts: sources of prompts that the target answers.
        text: sources of text taken as it is.
        records: files of what a model has said already.
        settings: how much of it, and how.
    """

    prompts: Sequence[str]
    text: Sequence[str]
    records: Sequence[str]
    settings: DataSettings


@dataclass(frozen=True, slots=True)
class Tools:
    """What preparing needs from the rest of outpace.

    Args:
        files: the target's.
        identity: who it is.
        llm: makes the target with its engine, when answers are wanted.
        notify: takes a line for people.
        progress: takes (what, done, total).
        precision: in which it answers, where that is not the one it is served in: then its answers are others.
    """

    files: LoadedFiles
    identity: Identity
    llm: Callable[[], LLM]
    notify: Notify
    progress: Progress
    precision: str = ""


def prepare_data(plan: DataPlan, folder: Path, tools: Tools) -> TrainingData:
    """Reads the sources, lets the target answer, packs and writes.

    Raises:
        BadInput: no source, one that is not there, prompts for a model without a chat template, or too little text.
        OutpaceError: the folder cannot be written.
    """
    if not (plan.prompts or plan.text or plan.records):
        raise BadInput("no usable text: name --prompts (builtin, say), --text (stdlib, say) or --records")
    private = bool(plan.records)  # they are private themselves, see `outpace serve --record`
    make_folder(folder, private=private)
    settings = plan.settings
    conversations = list(read_prompts(plan.prompts, settings.max_prompts, settings.seed))
    tools.notify(_estimate(len(conversations), plan))
    documents = [
        *_answered(conversations, folder, settings, tools),
        *_recorded(plan, tools),
        *_texts(plan, tools),
    ]
    known = tools.files.tokenizer.vocab_size
    for document in documents:
        if max(document.ids, default=0) >= known:
            raise BadInput(f"token id {max(document.ids)} is not one of the {known} ids that {tools.files.label} knows")
    sides = split_documents(documents, tools.files.tokenizer.decode, settings.validation, settings.seed)
    train, choosing, judging = (
        pack_documents(side, settings.window) for side in (sides.train, sides.choosing, sides.judging)
    )
    sources = [*plan.prompts, *plan.text, *plan.records]
    return write_data(folder, train, choosing, judging, tools.identity, sources, private=private)


def _estimate(conversations: int, plan: DataPlan) -> str:
    settings = plan.settings
    answers = conversations * settings.max_tokens
    text = settings.max_text_tokens if plan.text else 0
    recorded = settings.max_record_tokens if plan.records else 0
    size = format_bytes(BYTES_PER_TOKEN * (2 * answers + recorded + text))
    parts = (
        (plan.prompts, f"{conversations} prompts with at most {answers:,} tokens of answers"),
        (plan.records, f"at most {recorded:,} tokens of recorded answers and their prompts"),
        (plan.text, f"at most {text:,} tokens of text"),
    )
    return f"data: {', '.join(words for asked, words in parts if asked)}; up to about {size} on disk"


def _answered(
    conversations: Sequence[Conversation], folder: Path, settings: DataSettings, tools: Tools
) -> Iterator[Document]:
    """Conversations with the target's own answer, or with theirs where that is wanted."""
    if not conversations:
        return
    tokenizer = tools.files.tokenizer
    if not tokenizer.has_chat_template:
        raise BadInput(
            f"{tokenizer.label} has no chat template, so it answers no prompts: train on plain text (--text)"
        )
    asked: list[Conversation] = []
    refused: list[BadInput] = []
    for conversation in conversations:
        has_answer = conversation[-1]["role"] == "assistant"
        prompt = conversation[:-1] if has_answer else conversation
        try:
            if has_answer and settings.keep_answers:
                yield chat_document(tokenizer, conversation, tools.files.eos_ids)
            elif prompt:
                # Rendered here only to see that it can be: hours of answers must not end at one that cannot.
                tokenizer.render_chat(prompt, add_generation_prompt=True)
                asked.append(prompt)
        except BadInput as error:
            refused.append(error)
    if len(refused) == len(conversations):
        raise refused[0]
    if refused:
        tools.notify(
            f"{len(refused)} of {len(conversations)} conversations are left out, the first because: {refused[0]}"
        )
    report = partial(tools.progress, "answering prompts")
    whose = tools.identity.weights + tools.precision
    answers = answer_prompts(tools.llm, asked, folder, settings, whose, report)
    yield from (Document.answer(*answer) for answer in answers)


def _recorded(plan: DataPlan, tools: Tools) -> Iterator[Document]:
    """Answers given before, until there are tokens enough."""
    most, window = plan.settings.max_record_tokens, plan.settings.window
    tokens = long = 0
    said: list[tuple[array[int], array[int]]] = []
    records = (read_records(source, tools.identity, tools.notify) for source in plan.records)
    for prompt, answer in chain.from_iterable(records):
        if tokens >= most:
            tools.notify(f"{most:,} tokens of recorded answers are enough (--max-record-tokens): the rest is left")
            break
        size = len(prompt) + len(answer)
        tokens, long = tokens + size, long + (size > window)
        tools.progress("reading answers", min(tokens, most), most)
        said.append((array("i", prompt), array("i", answer)))
    tools.progress("reading answers", most, most)
    talks = talks_of([prompt for prompt, _ in said])
    yield from (Document.answer(*each, window, talk) for each, talk in zip(said, talks, strict=True))
    if long:
        tools.notify(
            f"{long} of {len(said)} recorded answers lose the beginning of their prompt: --window {window} is short"
        )


def _texts(plan: DataPlan, tools: Tools) -> Iterator[Document]:
    """Texts until there are tokens enough; of a long one at most a tenth of them, so that no single one rules."""
    most = plan.settings.max_text_tokens
    tokens, longest = 0, max(plan.settings.window, most // 10)
    for text in read_texts(plan.text, plan.settings.seed):
        if tokens >= most:
            return
        ids = tools.files.tokenizer.encode(text[: 8 * longest])[: min(longest, most - tokens)]
        tokens += len(ids)
        tools.progress("reading text", tokens, most)
        yield Document.text(ids)
