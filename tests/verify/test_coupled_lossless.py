"""Speculation off = on, token for token, for any draft; and the check catches engines that get it wrong.

The "model" is a pure function from a history to logits, so nothing but choosing and verifying can go wrong here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pytest
import torch

from outpace.params import SamplingParams
from outpace.sampling.choose import choose_rows
from outpace.types import Choice, Draft, Verdict
from outpace.verify.clean import clean_draft
from outpace.verify.coupled import verify

V = 6
LENGTH = 60
PROMPT = (1, 2, 3)

Drafter = Callable[[tuple[int, ...], random.Random], Draft]
Verifier = Callable[[Draft, Sequence[int]], Verdict]


@lru_cache(maxsize=20_000)
def model(history: tuple[int, ...]) -> np.ndarray:
    """[V] logits that depend on the last three tokens, and on how many came before."""
    seed = [token + 1 for token in history[-3:]] + [len(history)]
    return (np.random.default_rng(seed).standard_normal(V) * 2).astype(np.float32)


@dataclass(frozen=True)
class Request:
    params: SamplingParams
    seed: int

    def choices(self, positions: Sequence[int]) -> list[Choice]:
        return [Choice(self.params, self.seed, position) for position in positions]


def next_tokens(histories: Sequence[tuple[int, ...]], request: Request, positions: Sequence[int]) -> list[int]:
    logits = torch.from_numpy(np.stack([model(history) for history in histories]))
    return choose_rows(logits, request.choices(positions))


def plain(request: Request) -> tuple[int, ...]:
    tokens = PROMPT
    while len(tokens) < LENGTH:
        tokens += tuple(next_tokens([tokens], request, [len(tokens)]))
    return tokens


def histories_of(tokens: tuple[int, ...], draft: Draft) -> list[tuple[int, ...]]:
    """The history of the last committed token, then of every node."""
    histories = [tokens]
    for token, parent in zip(draft.ids, draft.parents, strict=True):
        histories.append((*histories[1 + parent], token))
    return histories


@dataclass
class Engine:
    """The smallest speculative engine. Its parts can be replaced by wrong ones."""

    verifier: Verifier = verify
    rollback: int = 0  # accepted tokens that are lost
    from_step: bool = False  # positions counted from the start of the step

    drafted: int = 0
    accepted: int = 0
    steps: int = 0

    def run(self, request: Request, drafter: Drafter) -> tuple[int, ...]:
        rng = random.Random(request.seed)
        tokens = PROMPT
        while len(tokens) < LENGTH:
            draft = clean_draft(drafter(tokens, rng), vocab_size=V, limit=8)
            histories = histories_of(tokens, draft)
            positions = [len(history) - (len(tokens) if self.from_step else 0) for history in histories]
            verdict = self.verifier(draft, next_tokens(histories, request, positions))
            kept = [draft.ids[node] for node in verdict.accepted]
            tokens += (*kept[: max(0, len(kept) - self.rollback)], verdict.bonus)
            self.drafted += len(draft)
            self.accepted += len(verdict.accepted)
            self.steps += 1
        return tokens[:LENGTH]


def right_until(reach: int, request: Request) -> Drafter:
    """Knows the text to come, and is wrong after `reach` tokens."""
    text = plain(request)

    def draft(tokens: tuple[int, ...], rng: random.Random) -> Draft:
        known = text[len(tokens) : len(tokens) + reach]
        wrong = [(text[len(tokens) + reach] + 1) % V] if len(tokens) + reach < LENGTH else []
        return Draft.chain([*known, *wrong], "oracle")

    return draft


def random_chain(tokens: tuple[int, ...], rng: random.Random) -> Draft:
    return Draft.chain([rng.randrange(V) for _ in range(rng.randrange(9))], "dice")


def guessing_chain(tokens: tuple[int, ...], rng: random.Random) -> Draft:
    """The model's own likeliest tokens, some replaced: accepted now and then, deep enough to matter."""
    ids: list[int] = []
    for _ in range(6):
        best = int(model((*tokens, *ids)).argmax())
        ids.append(best if rng.random() < 0.8 else rng.randrange(V))
    return Draft.chain(ids, "guess")


def random_tree(tokens: tuple[int, ...], rng: random.Random) -> Draft:
    """Bushy, with repeated siblings."""
    parents = tuple(rng.randrange(max(-1, node - 3), node) for node in range(8))
    return Draft(tuple(rng.randrange(V) for _ in parents), parents, ("dice",) * 8)


def illegal(tokens: tuple[int, ...], rng: random.Random) -> Draft:
    ids = tuple(rng.choice([-1, V, V + 50, *range(V)]) for _ in range(12))
    return Draft(ids, tuple(rng.randrange(-2, node + 2) for node in range(12)), ("junk",) * 5)


def nothing(tokens: tuple[int, ...], rng: random.Random) -> Draft:
    return Draft()


KINDS = [
    SamplingParams(temperature=0.0, top_p=1.0, top_k=0),
    SamplingParams(temperature=1.0, top_p=1.0, top_k=0),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=4),
    SamplingParams(temperature=1.5, top_p=0.95, top_k=0, min_p=0.02),
]
DRAFTERS = [random_chain, guessing_chain, random_tree, illegal, nothing]


@pytest.mark.parametrize("kind", KINDS, ids=["greedy", "plain", "filtered", "hot"])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.thinned(2)
def test_any_draft_gives_the_plain_text(drafter: Drafter, kind: SamplingParams) -> None:
    engine = Engine()
    for seed in range(8):
        request = Request(kind, seed)
        assert engine.run(request, drafter) == plain(request)
    if drafter is nothing:
        assert engine.drafted == 0
    else:  # both outcomes happen, else nothing was tested
        assert 0.03 * engine.drafted < engine.accepted < engine.drafted


@pytest.mark.parametrize("kind", KINDS, ids=["greedy", "plain", "filtered", "hot"])
@pytest.mark.parametrize("reach", [0, 1, 2, 4, 7])
def test_knowing_the_text_saves_exactly_the_steps_it_should(reach: int, kind: SamplingParams) -> None:
    request, engine = Request(kind, 3), Engine()
    assert engine.run(request, right_until(reach, request)) == plain(request)
    assert engine.steps == -(-(LENGTH - len(PROMPT)) // (reach + 1))


def test_different_seeds_give_different_text() -> None:
    assert len({plain(Request(KINDS[1], seed)) for seed in range(20)}) == 20


def accept_all(draft: Draft, chosen: Sequence[int]) -> Verdict:
    path: list[int] = []
    for node, parent in enumerate(draft.parents):
        if parent == (path[-1] if path else -1):
            path.append(node)
    return Verdict(tuple(path), chosen[1 + path[-1] if path else 0])


def row_before(draft: Draft, chosen: Sequence[int]) -> Verdict:
    """Takes the bonus from the row before the one it belongs to."""
    verdict = verify(draft, chosen)
    return Verdict(verdict.accepted, chosen[verdict.accepted[-1]] if verdict.accepted else chosen[0])


def ignores_branches(draft: Draft, chosen: Sequence[int]) -> Verdict:
    """Reads a tree as if it were a chain."""
    return verify(Draft.chain(draft.ids, "x"), chosen)


@pytest.mark.parametrize(
    ("mutant", "drafter", "kind"),
    [
        (lambda: Engine(verifier=accept_all), guessing_chain, KINDS[0]),
        (lambda: Engine(verifier=accept_all), guessing_chain, KINDS[1]),
        (lambda: Engine(verifier=row_before), guessing_chain, KINDS[0]),
        (lambda: Engine(verifier=row_before), guessing_chain, KINDS[1]),
        (lambda: Engine(verifier=ignores_branches), random_tree, KINDS[1]),
        (lambda: Engine(rollback=1), guessing_chain, KINDS[0]),
        (lambda: Engine(rollback=1), guessing_chain, KINDS[1]),
        (lambda: Engine(from_step=True), guessing_chain, KINDS[1]),
    ],
    ids=["all", "all-1", "row", "row-1", "branches", "rollback", "rollback-1", "position"],
)
def test_a_wrong_engine_is_caught(mutant: Callable[[], Engine], drafter: Drafter, kind: SamplingParams) -> None:
    requests = [Request(kind, seed) for seed in range(8)]
    assert any(mutant().run(request, drafter) != plain(request) for request in requests)
