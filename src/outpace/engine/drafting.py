"""The draft station: every drafter is asked once a step for all of its requests, and told what became of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from outpace.engine.pack import Block
from outpace.engine.request import Request
from outpace.engine.scheduler import Turn
from outpace.errors import InvalidParameter
from outpace.params import SpeculationParams
from outpace.protocols import Drafter
from outpace.types import Ask, Draft, ForwardResult, Observation
from outpace.verify.clean import clean_draft, principal_chain

__all__ = ["DraftPlan", "Drafting"]

_NO_DRAFT = Draft()


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """How one request is drafted for.

    Args:
        drafter: by name; None for plain decoding.
        num_speculative_tokens: most draft tokens a step.
        before_first_token: whether the drafter may be asked before there is a first token.
        verification: the rule its drafts are verified by.
    """

    drafter: str | None = None
    num_speculative_tokens: int = 0
    before_first_token: bool = False
    verification: str = "coupled"


class Drafting:
    """The loaded drafters, by name.

    Args:
        drafters: the first is the default of a request that names none. May be empty.
        num_speculative_tokens: per drafter name, most draft tokens a step unless the request says less or more.
        vocab_size: ids from here on do not exist.
        verification: per drafter name, the rule its drafts are verified by; "coupled" where none is named.
    """

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        num_speculative_tokens: Mapping[str, int],
        vocab_size: int,
        verification: Mapping[str, str],
    ) -> None:
        self.drafters = dict(drafters)
        self._num_speculative_tokens = dict(num_speculative_tokens)
        self._vocab_size = vocab_size
        self._verification = dict(verification)
        self._started: set[int] = set()
        self.aux_layers = tuple(sorted({layer for d in self.drafters.values() for layer in d.needs.aux_layers}))

    @property
    def memory_bytes(self) -> int:
        return sum(drafter.memory_bytes for drafter in self.drafters.values())

    def plan(self, speculation: SpeculationParams) -> DraftPlan:
        """How a request that asks for this is drafted for.

        Raises:
            InvalidParameter: no such drafter is loaded.
        """
        if speculation.method is not None and speculation.method not in self.drafters:
            raise InvalidParameter(
                f"speculation method {speculation.method!r} is not loaded; loaded: {', '.join(self.drafters) or 'none'}"
            )
        name = speculation.method or next(iter(self.drafters), None)
        if name is None or not speculation.enabled:
            return DraftPlan()
        wanted = speculation.num_speculative_tokens
        most = self._num_speculative_tokens[name] if wanted is None else wanted
        if most == 0:
            return DraftPlan()
        early = not self.drafters[name].needs.computes
        return DraftPlan(name, most, early, self._verification.get(name, "coupled"))

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
            if not turn.num_draft_tokens:
                continue
            assert turn.request.drafter is not None
            forced = _forced(turn)
            if forced:
                drafts[index] = self._legal(forced, turn)
            else:
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
        """A chain of real ids, no longer than asked, with nothing behind one that ends the text or is not allowed.

        A token that was drawn may be left out only for what was known before it was drawn, or rejection sampling is
        biased; so the first one that is not allowed stays there, and is rejected. Drafts without probabilities do not
        depend on that noise, so it goes.
        """
        request = turn.request
        assert request.drafter is not None
        if draft.resume is not None and not self.drafters[request.drafter].needs.target_rows:
            draft = replace(draft, resume=None)
        draft = principal_chain(clean_draft(draft, vocab_size=self._vocab_size, limit=len(draft.ids)))
        limit = min(turn.num_draft_tokens, len(draft))
        if request.rules is not None:
            drawn = request.verification != "coupled" and draft.probabilities is not None
            limit = min(limit, request.rules.count_legal(draft.ids[:limit]) + drawn)
        limit = next((end for end, token in enumerate(draft.ids[:limit], 1) if token in request.stop_ids), limit)
        return draft if len(draft) <= limit else clean_draft(draft, vocab_size=self._vocab_size, limit=limit)


def _forced(turn: Turn) -> Draft:
    """The text that a grammar prescribes next, as a draft."""
    rules = turn.request.rules
    return _NO_DRAFT if rules is None else Draft.chain(rules.forced(turn.num_draft_tokens), "grammar")


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
        rules=request.rules,
        coupled=request.verification == "coupled",
    )
