"""What benchmarks/identity.py compares: prompts, drafters, which engine answers which of them, how many at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from outpace import SamplingParams, SpeculationParams
from outpace.config import SpeculativeConfig

DRAFT = "draft"
"""Stands for the draft model where drafters are named."""


@dataclass(frozen=True)
class Prompt:
    """One line of the file: its number there is its seed."""

    id: str
    seed: int
    token_ids: list[int]
    max_tokens: int

    @property
    def most_tokens(self) -> int:
        return len(self.token_ids) + self.max_tokens

    def params(self, temperature: float) -> SamplingParams:
        return SamplingParams(temperature=temperature, seed=self.seed, max_tokens=self.max_tokens)


@dataclass(frozen=True)
class Drafter:
    """A drafter with one draft length. `word` is what SpeculativeConfig.parse reads."""

    name: str
    word: str
    k: int

    @property
    def speculation(self) -> SpeculationParams:
        method = SpeculativeConfig.parse(self.word).method
        return SpeculationParams(method=method, num_speculative_tokens=self.k)


@dataclass(frozen=True)
class Case:
    """One row of the table, before it is computed."""

    drafter: Drafter
    batch: int
    temperature: float
    prompts: tuple[Prompt, ...]


@dataclass(frozen=True)
class Setup:
    """One engine: rows a step, tokens its cache holds (None: enough for all), and what it is asked."""

    chunk: int
    cache_tokens: int | None
    cases: tuple[Case, ...]


def interleave(tasks: Sequence[str]) -> list[int]:
    """Indices in an order that takes one of each task in turn."""
    by_task: dict[str, list[int]] = {}
    for index, task in enumerate(tasks):
        by_task.setdefault(task, []).append(index)
    return [index for turn in zip_longest(*by_task.values()) for index in turn if index is not None]


def parse_drafters(words: Sequence[str], draft: str) -> list[Drafter]:
    """`ngram=2,5` -> two drafters; the name `draft` is replaced by the model.

    Raises:
        ValueError: a word of another form.
    """
    found = []
    for word in words:
        name, sign, lengths = word.rpartition("=")
        if not sign or not all(part.isdecimal() and int(part) for part in lengths.split(",")):
            raise ValueError(f"drafter {word!r} is not possible: write NAME=K,K,... with K at least 1, as ngram=2,5")
        found += [Drafter(name, draft if name == DRAFT else name, int(part)) for part in lengths.split(",")]
    return found


def plan(
    prompts: Sequence[Prompt],
    drafters: Sequence[Drafter],
    *,
    requests: int,
    batches: Sequence[int],
    temperatures: Sequence[float],
    chunks: Sequence[int],
) -> list[Setup]:
    """Every case by the engine it runs on. Each takes the prompts that follow those of the case before it.

    The last engine recomputes: of its cache the longest request alone takes all, and the largest batch shares it.
    """
    taken = 0

    def cases(batches: Sequence[int]) -> Iterator[Case]:
        nonlocal taken
        for drafter in drafters:
            for batch in batches:
                count = -(-requests // batch) * batch
                for temperature in temperatures:
                    chosen = (prompts[(taken + index) % len(prompts)] for index in range(count))
                    yield Case(drafter, batch, temperature, tuple(chosen))
                    taken += count

    longest = max(prompt.most_tokens for prompt in prompts)
    setups = [Setup(chunk, None, tuple(cases(batches))) for chunk in chunks]
    if max(batches) > 1:
        setups.append(Setup(chunks[0], longest, tuple(cases([max(batches)]))))
    return setups
