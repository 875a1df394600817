"""The draft station: every drafter is asked once a step for all of its requests, and told what became of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from outpace.engine.pack import Block
from outpace.engine.request import Request
from outpace.engine.scheduler import Turn
from outpace.errors import InvalidParameter
from outpace.params import SpeculationParams
from outpace.protocols import Drafter
from outpace.types import Ask, Draft, ForwardResult, Observation
from outpace.verify.clean import clean_draft, principal_chain

__all__ = ["Drafting"]

_NO_DRAFT = Draft()


class Drafting:
    """The loaded drafters, by name.

    Args:
        drafters: the first is the default of a request that names none. May be empty.
        num_speculative_tokens: per drafter name, most draft tokens a step unless the request says less or more.
        vocab_size: ids from here on do not exist.
    """

    def __init__(
        self, drafters: Mapping[str, Drafter], num_speculative_tokens: Mapping[str, int], vocab_size: int
    ) -> None:
        self.drafters = dict(drafters)
        self._num_speculative_tokens = dict(num_speculative_tokens)
        self._vocab_size = vocab_size
        self._started: set[int] = set()
        self.aux_layers = tuple(sorted({layer for d in self.drafters.values() for layer in d.needs.aux_layers}))

    @property
    def memory_bytes(self) -> int:
        return sum(drafter.memory_bytes for drafter in self.drafters.values())

    def choose(self, speculation: SpeculationParams) -> tuple[str | None, int, bool]:
        """Which drafter serves a request, its most draft tokens a step, and whether it may come before a first token.

        Raises:
            InvalidParameter: no such drafter is loaded.
        """
        if speculation.method is not None and speculation.method not in self.drafters:
            raise InvalidParameter(
                f"speculation method {speculation.method!r} is not loaded; loaded: {', '.join(self.drafters) or 'none'}"
            )
        name = speculation.method or next(iter(self.drafters), None)
        most = speculation.num_speculative_tokens
        if name is None or not speculation.enabled or most == 0:
            return None, 0, False
        if most is None:
            most = self._num_speculative_tokens[name]
        return (name, most, not self.drafters[name].needs.computes) if most else (None, 0, False)

    def start(self, request: Request) -> None:
        """The request got a lane."""
        if request.drafter is not None:
            self._started.add(request.id)
            self.drafters[request.drafter].start(request.id, request.token_ids, request.num_prompt_tokens)

    def release(self, request: Request) -> None:
        """The request lost its lane. (After an interrupt it may have had no start yet.)"""
        if request.drafter is not None and request.id in self._started:
            self._started.remove(request.id)
            self.drafters[request.drafter].release(request.id)

    def propose(self, turns: Sequence[Turn], free_rows: int) -> list[Draft]:
        """One draft per turn, cut to what is legal and was asked for; empty where none was asked for.

        A drafter that is behind may spend the rows granted to its drafts, which it cannot make yet, and its share of
        the rows that nobody uses.
        """
        drafts = [_NO_DRAFT] * len(turns)
        groups: dict[str, list[int]] = defaultdict(list)
        for index, turn in enumerate(turns):
            if turn.num_draft_tokens:
                assert turn.request.drafter is not None
                groups[turn.request.drafter].append(index)
        for name, indices in groups.items():
            asks = [_ask(turns[index]) for index in indices]
            row_budget = free_rows // len(groups) + sum(ask.num_draft_tokens for ask in asks)
            proposed = self.drafters[name].propose(asks, row_budget)
            for index, draft in zip(indices, proposed, strict=True):
                drafts[index] = self._legal(draft, turns[index])
        return drafts

    def observe(self, committed: Sequence[tuple[Block, int, int]], result: ForwardResult) -> None:
        """Tells each drafter what a step did to its requests.

        Args:
            committed: (block, tokens added, draft tokens accepted) of every request that goes on.
            result: the step's forward pass.
        """
        observations: dict[str, list[Observation]] = defaultdict(list)
        for block, num_new_tokens, num_accepted in committed:
            request = block.turn.request
            if request.drafter is None:
                continue
            rows = slice(block.begin, block.begin + block.turn.num_tokens + num_accepted)
            observations[request.drafter].append(
                Observation(
                    request_id=request.id,
                    token_ids=request.token_ids,
                    num_new_tokens=num_new_tokens,
                    draft=block.draft,
                    num_accepted=num_accepted,
                    first_position=request.num_computed - (rows.stop - rows.start),
                    aux={layer: result.aux[layer][rows] for layer in self.drafters[request.drafter].needs.aux_layers},
                )
            )
        for name, seen in observations.items():
            self.drafters[name].observe(seen)

    def _legal(self, draft: Draft, turn: Turn) -> Draft:
        """A chain of real ids, no longer than asked, with nothing behind a token that ends generation."""
        assert turn.request.drafter is not None
        if draft.resume is not None and not self.drafters[turn.request.drafter].needs.target_rows:
            draft = replace(draft, resume=None)
        draft = principal_chain(clean_draft(draft, vocab_size=self._vocab_size, limit=len(draft.ids)))
        ends = (index + 1 for index, token in enumerate(draft.ids) if token in turn.request.stop_ids)
        limit = min(turn.num_draft_tokens, next(ends, len(draft)))
        return draft if len(draft) <= limit else clean_draft(draft, vocab_size=self._vocab_size, limit=limit)


def _ask(turn: Turn) -> Ask:
    request = turn.request
    assert request.lane is not None
    return Ask(
        request_id=request.id,
        token_ids=request.token_ids,
        num_draft_tokens=turn.num_draft_tokens,
        params=request.params,
        seed=request.seed,
        number=request.number,
        lane=request.lane,
    )
