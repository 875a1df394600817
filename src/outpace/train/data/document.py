"""One text as token ids, with those a drafter is trained to predict marked."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outpace.errors import BadInput
from outpace.models.tokenizer import Tokenizer

__all__ = ["Document", "chat_document"]


@dataclass(frozen=True, slots=True)
class Document:
    """A text. Millions of tokens are in memory at once, as plain bytes, an int of Python taking eight times as much.

    Args:
        ids: token ids.
        labels: for each, whether it (1) is one to be predicted or not (0): all of a plain text, the answers of a
            conversation.
        talk: number of the conversation that it is a turn of; None if it stands alone.
    """

    ids: Sequence[int]
    labels: Sequence[int]
    talk: int | None = None

    def __post_init__(self) -> None:
        assert len(self.ids) == len(self.labels)

    @classmethod
    def text(cls, ids: Sequence[int]) -> Document:
        """A plain text: every token counts."""
        return cls(array("i", ids), b"\1" * len(ids))

    @classmethod
    def answer(
        cls, prompt_ids: Sequence[int], answer_ids: Sequence[int], most: int | None = None, talk: int | None = None
    ) -> Document:
        """A prompt and what the model said to it.

        Args:
            prompt_ids: of the prompt.
            answer_ids: of the answer.
            most: where both together are longer than this, the beginning of the prompt is left out, but not its last
                quarter of so many tokens: what an answer follows most closely stands before it.
            talk: see the class.
        """
        if most is not None and len(prompt_ids) + len(answer_ids) > most:
            prompt_ids = prompt_ids[-max(1, most // 4, most - len(answer_ids)) :]
        labels = b"\0" * len(prompt_ids) + b"\1" * len(answer_ids)
        return cls(array("i", [*prompt_ids, *answer_ids]), labels, talk)


def chat_document(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], eos_ids: frozenset[int] = frozenset()
) -> Document:
    """A conversation under the model's chat template; the assistant's words, and the token that ends them, count.

    Where an answer lies is found by rendering the conversation up to it, ready for the answer, and again with it.

    Args:
        tokenizer: the target's.
        messages: {"role": ..., "content": ...} each.
        eos_ids: tokens that end an answer; what the template writes behind them is not counted.

    Raises:
        BadInput: no template, or one that writes earlier messages differently once others follow.
    """
    whole = tokenizer.render_chat(messages, add_generation_prompt=False)
    ids = tokenizer.encode(whole)
    labels = [False] * len(ids)
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = tokenizer.render_chat(messages[:number], add_generation_prompt=True) if number else ""
        until = tokenizer.render_chat(messages[: number + 1], add_generation_prompt=False)
        if not (whole.startswith(until) and until.startswith(before)):
            raise BadInput(
                f"the chat template of {tokenizer.label} writes message {number + 1} differently once others follow, "
                "so that its answers cannot be told from the rest: give conversations that end with their only answer"
            )
        begin = _common_length(tokenizer.encode(before), ids) if before else 0
        end = _common_length(tokenizer.encode(until), ids)
        last = next((at + 1 for at in range(begin, end) if ids[at] in eos_ids), end)
        labels[begin:last] = [True] * (last - begin)
    return Document(array("i", ids), bytes(labels))


def _common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens both begin with: a text cut in the middle may end in another token than the whole."""
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
