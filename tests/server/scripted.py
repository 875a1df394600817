"""An AsyncLLM whose model answers every prompt from a script, over the real tokenizer, engine and grammars."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from outpace.async_llm import AsyncLLM
from outpace.build import Built
from outpace.config import SpeculativeConfig
from outpace.drafters.ngram import NgramDrafter
from outpace.engine.engine import Engine
from outpace.models.tokenizer import Tokenizer, TokenizerSettings
from outpace.models.vocabulary import ModelVocabulary
from outpace.protocols import Drafter
from outpace.sampling.grammar import GrammarCompiler
from tests.asynchronous import HeldModel, built_of
from tests.engine.fakes import TokenCache
from tests.models.tiny_tokenizers import byte_level

BOS, EOS = 0, 1
CAPACITY = 1200
"""Tokens of the context; bytes are tokens here."""
TEMPLATE = (
    "{% if tools %}tools: {{ tools | length }}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.tool_calls }}\n{% endfor %}"
    "{{ mood }}{% if add_generation_prompt %}assistant: {% endif %}"
)
HERMES = TEMPLATE + "{# <tool_call> #}"
"""The same for a model that calls tools."""
THINKING = TEMPLATE + "{# </think> #}"
"""The same for a model that reasons first."""


class AnsweringModel(HeldModel):
    """After every prompt it is sure of `answer`, then of EOS; other tokens are a little likely, so that drafts matter.

    Args:
        tokenizer: of the answer.
        answer: its text, or (text of the prompt) -> its text.
    """

    def __init__(self, tokenizer: Tokenizer, answer: str | Callable[[str], str]) -> None:
        super().__init__(tokenizer.vocab_size)
        self._tokenizer = tokenizer
        self.answer = answer
        self.prompts: list[list[int]] = []

    def logits(self, history: Sequence[int]) -> np.ndarray:
        prompt = max((p for p in self.prompts if list(history[: len(p)]) == p), key=len, default=list(history))
        text = self.answer if isinstance(self.answer, str) else self.answer(self._tokenizer.decode(prompt))
        script = [*self._tokenizer.encode(text), EOS]
        values = np.linspace(0, -1, self.vocab_size, dtype=np.float32)
        place = len(history) - len(prompt)
        values[script[place] if place < len(script) else EOS] = 12.0
        return values


class Scripted(AsyncLLM):
    """Remembers the prompts it is given for its model, which has to know where answers begin."""

    model: AnsweringModel

    async def prepare(self, *args: object, **options: object):  # type: ignore[no-untyped-def,override]
        prepared = await super().prepare(*args, **options)  # type: ignore[arg-type]
        self.model.prompts.append(prepared.prompt_token_ids)
        return prepared


def scripted(
    answer: str | Callable[[str], str] = "Hello, world.",
    template: str | None = TEMPLATE,
    *,
    drafts: bool = True,
    seqs: int = 8,
    max_waiting: int = 256,
    bos: bool = False,
    reuse: bool = False,
) -> Scripted:
    """An AsyncLLM that was not started; with `drafts` an n-gram drafter of up to 4 tokens; `reuse`s prefixes or not."""
    templates = {} if template is None else {"default": template}
    tokenizer = Tokenizer(byte_level(bos=bos), TokenizerSettings({"eos_token": "</s>"}, templates), "scripted")
    model = AnsweringModel(tokenizer, answer)
    cache = TokenCache(num_lanes=seqs, capacity=CAPACITY, max_rows=seqs * CAPACITY)
    compiler = GrammarCompiler(tokenizer.to_json(), tokenizer.vocab_size, frozenset({EOS}))
    drafters: dict[str, Drafter] = {"ngram": NgramDrafter(1, 4)} if drafts else {}
    engine = Engine(
        model,
        cache,
        drafters,
        vocabulary=ModelVocabulary(tokenizer, tokenizer.vocab_size, compiler.compile),
        eos_ids=frozenset({EOS}),
        max_model_len=CAPACITY,
        num_speculative_tokens=dict.fromkeys(drafters, 4),
        max_num_seqs=seqs,
        max_num_batched_tokens=512,
        max_logprobs=20,
        enable_prefix_caching=reuse,
    )
    llm = Scripted(_built(engine, tokenizer, seqs, drafts), max_waiting=max_waiting)
    llm.model = model
    return llm


def _built(engine: Engine, tokenizer: Tokenizer, seqs: int, drafts: bool) -> Built:
    built = built_of(engine, seqs)
    speculative = (SpeculativeConfig(method="ngram", num_speculative_tokens=4),) if drafts else ()
    config = replace(built.config, model="org/scripted", max_model_len=CAPACITY)
    defaults = replace(built.defaults, max_tokens=None, temperature=0.0)
    return replace(built, tokenizer=tokenizer, config=config, defaults=defaults, speculative=speculative)
