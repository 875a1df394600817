"""Stand-ins at the ports: a model that is a pure function of history, a cache that catches stale rows, odd drafters."""

from __future__ import annotations

import functools
import random
import zlib
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from outpace.protocols import Cache, DrafterNeeds, Grammar
from outpace.structured import StructuredOutputs
from outpace.types import Ask, Draft, ForwardResult, Observation, Pack

from ..trees import depths_of, random_parents
from .toy_grammar import ToyGrammar

FREE = -1


class TokenCache:
    """Keeps the token of every row instead of keys and values; rows given back are wiped, so that reading one shows."""

    def __init__(self, *, num_lanes: int = 8, capacity: int = 512, max_rows: int = 4096) -> None:
        self.capacity = capacity
        self.tokens = [[FREE] * capacity for _ in range(num_lanes)]
        self._max_rows = max_rows
        self._reserved: dict[int, int] = {}
        self._free = list(range(num_lanes))

    @property
    def free_rows(self) -> int:
        return self._max_rows - sum(self._reserved.values())

    @property
    def bytes_in_use(self) -> int:
        return 8 * sum(self._reserved.values())

    def allocate(self) -> int | None:
        if not self._free:
            return None
        lane = self._free.pop(0)
        self._reserved[lane] = 0
        return lane

    def reserve(self, lane: int, rows: int) -> bool:
        assert rows <= self.capacity
        if rows - self._reserved[lane] > self.free_rows:
            return False
        self._reserved[lane] = max(rows, self._reserved[lane])
        return True

    def truncate(self, lane: int, rows: int) -> None:
        assert rows <= self._reserved[lane]
        self.tokens[lane][rows : self._reserved[lane]] = [FREE] * (self._reserved[lane] - rows)
        self._reserved[lane] = rows

    def release(self, lane: int) -> None:
        self.truncate(lane, 0)
        del self._reserved[lane]
        self._free = sorted([*self._free, lane])

    def trim(self, lane: int) -> None:
        assert set(self.tokens[lane][self._reserved[lane] :]) <= {FREE}

    def copy(self, source: int, target: int, rows: int) -> None:
        assert 0 <= rows <= min(self._reserved[source], self._reserved[target])
        assert FREE not in self.tokens[source][:rows], f"lane {source} has rows that were never computed"
        self.tokens[target][:rows] = self.tokens[source][:rows]

    def compact(self, lane: int, first: int, slots: Sequence[int]) -> None:
        assert all(first + place <= slot < self._reserved[lane] for place, slot in enumerate(slots))
        assert sorted(set(slots)) == list(slots)
        kept = [self.tokens[lane][slot] for slot in slots]
        assert FREE not in kept, f"lane {lane} has rows that were never computed"
        self.tokens[lane][first : first + len(slots)] = kept

    def write(self, lane: int, slot: int, token: int) -> None:
        assert slot < self._reserved[lane], f"row {slot} of lane {lane} was not reserved"
        self.tokens[lane][slot] = token

    def check_integrity(self) -> None:
        assert self.free_rows >= 0
        assert not set(self._free) & set(self._reserved)
        assert len(self._free) + len(self._reserved) == len(self.tokens)
        for lane in self._free:
            assert set(self.tokens[lane]) == {FREE}


@functools.cache
def _hashed_logits(history: tuple[int, ...], vocab_size: int, errors: float) -> np.ndarray:
    key = zlib.crc32(np.array(history, dtype=np.int64).tobytes())
    values = np.random.default_rng(key).normal(size=vocab_size) * 3
    if np.random.default_rng(key + 1).random() < errors:
        values = np.random.default_rng(key + 2).normal(size=vocab_size) * 3
    return values.astype(np.float32)


class HistoryModel:
    """Logits are a hash of the last few tokens in the cache, so any stale, missing or misplaced row changes the text.

    Args:
        vocab_size: V.
        order: tokens of history that matter; few, so that patterns come back and drafts can be right.
        errors: share of histories at which the logits are another model's, for drafts that are sometimes wrong.
        broken: (history) -> True where the logits are NaN.
    """

    def __init__(
        self,
        vocab_size: int = 24,
        order: int = 2,
        errors: float = 0.0,
        broken: Callable[[Sequence[int]], bool] = lambda history: False,
    ) -> None:
        self.vocab_size = vocab_size
        self.order = order
        self.errors = errors
        self.broken = broken
        self.takes_trees = True
        self.rows_per_call: list[int] = []

    def logits(self, history: Sequence[int]) -> np.ndarray:
        if self.broken(history):
            return np.full(self.vocab_size, np.nan, dtype=np.float32)
        return _hashed_logits(tuple(history[-self.order :]), self.vocab_size, self.errors)

    def forward(self, pack: Pack, cache: Cache) -> ForwardResult:
        assert isinstance(cache, TokenCache)
        self.rows_per_call.append(pack.num_rows)
        wanted = set(pack.logits_rows.tolist())
        ids, positions = pack.ids.tolist(), pack.positions.tolist()
        logits = []
        for segment in pack.segments:
            for row in range(segment.begin, segment.end):
                slot, branch = segment.first_slot + row - segment.begin, row - segment.begin - segment.num_straight
                seen = range(slot + 1) if branch < 0 else [*range(segment.fork), *segment.paths[branch]]
                assert positions[row] == len(seen) - 1 and seen[-1] == slot
                cache.write(segment.lane, slot, ids[row])
                if row in wanted:
                    history = [cache.tokens[segment.lane][each] for each in seen]
                    assert FREE not in history, f"row {row} sees rows that were never computed"
                    logits.append(self.logits(history))
        return ForwardResult(torch.from_numpy(np.array(logits, dtype=np.float32).reshape(-1, self.vocab_size)))


class ConstantModel(HistoryModel):
    """The same logits everywhere, so that what parameters do to them can be worked out by hand."""

    def __init__(self, logits: Sequence[float]) -> None:
        super().__init__(vocab_size=len(logits))
        self._constant = np.array(logits, np.float32)

    def logits(self, history: Sequence[int]) -> np.ndarray:
        return self._constant


class ScriptedDrafter:
    """Proposes what a function says; checks that the engine keeps to the protocol."""

    needs = DrafterNeeds()
    memory_bytes = 0

    def __init__(self, name: str, script: Callable[[Ask], Draft]) -> None:
        self.name = name
        self.script = script
        self.alive: dict[int, list[int]] = {}
        self.observed = 0
        self.tenants: list[str] = []

    def start(self, request_id: int, token_ids: Sequence[int], num_prompt_tokens: int, *, tenant: str = "") -> None:
        assert request_id not in self.alive
        self.tenants.append(tenant)
        self.alive[request_id] = list(token_ids)

    def observe(self, observations: Sequence[Observation]) -> None:
        for seen in observations:
            known = self.alive[seen.request_id]
            assert list(seen.token_ids[: len(known)]) == known
            assert len(seen.token_ids) == len(known) + seen.num_new_tokens
            if seen.num_new_tokens:
                assert seen.num_new_tokens == seen.num_accepted + 1
                assert list(seen.token_ids[len(known) : -1]) == [seen.draft.ids[node] for node in seen.accepted]
                assert [seen.draft.parents[node] for node in seen.accepted] == [-1, *seen.accepted][:-1]
            self.alive[seen.request_id] = list(seen.token_ids)
            self.observed += 1

    def rows_behind(self, request_id: int, num_tokens: int) -> int | None:
        assert len(self.alive[request_id]) == num_tokens
        return 0

    def propose(self, asks: Sequence[Ask], row_budget: int) -> list[Draft]:
        for ask in asks:
            assert self.alive[ask.request_id] == list(ask.token_ids)
            assert ask.num_draft_tokens >= 1
        return [self.script(ask) for ask in asks]

    def release(self, request_id: int) -> None:
        del self.alive[request_id]


def random_drafter(vocab_size: int, seed: int = 0) -> ScriptedDrafter:
    """Right by chance only."""
    source = random.Random(seed)

    def script(ask: Ask) -> Draft:
        return Draft.chain([source.randrange(vocab_size) for _ in range(source.randint(0, ask.num_draft_tokens))], "x")

    return ScriptedDrafter("random", script)


def illegal_drafter(vocab_size: int, seed: int = 0) -> ScriptedDrafter:
    """Too long, ids out of range, broken parents, fields that disagree: everything a bug could return."""
    source = random.Random(seed)

    def script(ask: Ask) -> Draft:
        count = ask.num_draft_tokens + 3
        ids = tuple(source.choice([-5, vocab_size, 10**9, source.randrange(vocab_size)]) for _ in range(count))
        kind = source.randrange(4)
        if kind == 0:
            return Draft.chain(ids, "x")
        if kind == 1:
            return Draft(ids, tuple(source.randrange(-3, count + 2) for _ in ids), ("x",) * count)
        if kind == 2:
            return Draft(ids, (-1,), ())
        return Draft(ids, tuple(source.randrange(-1, i) if i else -1 for i in range(count)), ("x",) * count)

    return ScriptedDrafter("illegal", script)


def bush_drafter(
    vocab_size: int, script_of: Callable[[Sequence[int]], Sequence[int]], seed: int = 0, illegal: float = 0.03
) -> ScriptedDrafter:
    """Trees of every shape: right tokens among wrong siblings, duplicates, ids out of range, more nodes than wanted.

    Args:
        vocab_size: V.
        script_of: committed tokens -> the whole text, or as much of it as is known.
        seed: of the shapes.
        illegal: share of ids out of range.
    """
    source = random.Random(seed)

    def script(ask: Ask) -> Draft:
        start, text = len(ask.token_ids), script_of(ask.token_ids)
        parents = random_parents(source, source.randint(0, ask.num_draft_tokens + 2))
        ids: list[int] = []
        right, depths = {-1}, depths_of(parents)
        for node, parent in enumerate(parents):
            place, siblings = start + depths[node], [ids[each] for each in range(node) if parents[each] == parent]
            token = source.randrange(vocab_size)
            if parent in right and place < len(text) and source.random() < 0.7:
                token = text[place]
                right.add(node)
            elif siblings and source.random() < 0.2:
                token = source.choice(siblings)
            elif source.random() < illegal:
                token = source.choice([-1, vocab_size, 10**9])
            ids.append(token)
        return Draft(tuple(ids), tuple(parents), tuple(f"x{depth}" for depth in depths))

    return ScriptedDrafter("bush", script)


def oracle_drafter(script_of: Callable[[Sequence[int]], Sequence[int]]) -> ScriptedDrafter:
    """Always right: looks the continuation up in the known plain text."""

    def script(ask: Ask) -> Draft:
        text = script_of(ask.token_ids)
        start = len(ask.token_ids)
        return Draft.chain(list(text[start : start + ask.num_draft_tokens]), "oracle")

    return ScriptedDrafter("oracle", script)


class IdDetokenizer:
    """Every token is a letter and its id, so that stop strings can be planted across tokens."""

    def push(self, token_id: int) -> str:
        return f"{chr(97 + token_id % 26)}{token_id} "

    def flush(self) -> str:
        return ""


class IdVocabulary:
    """The vocabulary of `IdDetokenizer`; texts are split into letters, each the id of its place in the alphabet.

    Args:
        size: V.
        missing_ids: ids that no token has.
        eos_ids: where a grammar lets the text end.
    """

    def __init__(self, size: int, *, missing_ids: Sequence[int] = (), eos_ids: Iterable[int] = ()) -> None:
        self.size = size
        self.missing_ids = tuple(missing_ids)
        self._eos_ids = frozenset(eos_ids)

    def encode(self, text: str) -> list[int]:
        return [(ord(letter) - 97) % self.size for letter in text.replace(" ", "")]

    def token_text(self, token_id: int) -> str:
        return IdDetokenizer().push(token_id)

    def detokenizer(
        self, *, skip_special_tokens: bool, spaces_between_special_tokens: bool, after: Sequence[int]
    ) -> IdDetokenizer:
        return IdDetokenizer()

    def grammar(self, structured_outputs: StructuredOutputs) -> Grammar:
        """An automaton that the regular expression names: it is not read."""
        assert structured_outputs.regex is not None
        return ToyGrammar(structured_outputs.regex, self.size, self._eos_ids)
