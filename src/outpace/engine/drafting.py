"""The loaded drafters: who drafts for which request, what they propose made fit, and what they are told."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from outpace.decisions import GRAMMAR
from outpace.engine.pack import Block
from outpace.engine.plan import DraftPlan
from outpace.engine.request import Request
from outpace.engine.scheduler import Turn
from outpace.errors import InvalidParameter
from outpace.params import SpeculationParams
from outpace.protocols import Drafter
from outpace.types import Ask, Draft, ForwardResult, Observation
from outpace.verify.clean import clean_draft, principal_chain, subtree

__all__ = ["NO_DRAFT", "Drafting", "ask_for", "shortened"]

NO_DRAFT = Draft()


class Drafting:
    """The loaded drafters, by name.

    Args:
        drafters: in order of preference. May be empty.
        num_speculative_tokens: per drafter name, most draft tokens a step unless the request says less or more.
        vocab_size: ids from here on do not exist.
        verification: per drafter name, the rule its drafts are verified by; "coupled" where none is named.
        trees: the target verifies drafts with branches; of each of them one chain is left if not.
    """

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        num_speculative_tokens: Mapping[str, int],
        vocab_size: int,
        verification: Mapping[str, str],
        *,
        trees: bool,
    ) -> None:
        self.drafters = dict(drafters)
        self._num_speculative_tokens = dict(num_speculative_tokens)
        self._vocab_size = vocab_size
        self._verification = dict(verification)
        self._trees = trees
        self._started: set[int] = set()

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Layers of the target whose entering states somebody observes, ascending."""
        return tuple(sorted({layer for d in self.drafters.values() for layer in d.needs.aux_layers}))

    @property
    def every_row(self) -> list[str]:
        """Names of drafters that must observe all rows of a prompt."""
        return [name for name, drafter in self.drafters.items() if drafter.needs.every_row]

    @property
    def memory_bytes(self) -> int:
        return sum(drafter.memory_bytes for drafter in self.drafters.values())

    def plan(self, speculation: SpeculationParams) -> DraftPlan:
        """How a request that asks for this is drafted for: by the drafter it names, else by all that go together.

        Those are the first free one, and the computing ones, as far as they follow the rule of the first of all.

        Raises:
            InvalidParameter: no such drafter is loaded.
        """
        if speculation.method is not None and speculation.method not in self.drafters:
            raise InvalidParameter(
                f"speculation method {speculation.method!r} is not loaded; loaded: {', '.join(self.drafters) or 'none'}"
            )
        names = list(self.drafters) if speculation.method is None else [speculation.method]
        wanted = speculation.num_speculative_tokens
        if not names or not speculation.enabled or wanted == 0:
            return DraftPlan()
        rule = self._rule(names[0])
        names = [name for name in names if self._rule(name) == rule]
        computing = tuple(name for name in names if self.drafters[name].needs.computes)
        free = next((name for name in names if name not in computing), None)
        used = computing if free is None else (free, *computing)
        most = {name: self._num_speculative_tokens[name] if wanted is None else wanted for name in used}
        may_branch = self._trees and rule == "coupled"
        widths = {name: width for name in used if may_branch and (width := self.drafters[name].needs.width) > 1}
        return DraftPlan(free, computing, most, widths, rule)

    def _rule(self, name: str) -> str:
        return self._verification.get(name, "coupled")

    def start(self, request: Request) -> None:
        """The request got a lane."""
        if request.plan.drafters:
            self._started.add(request.id)
        for name in request.plan.drafters:
            self.drafters[name].start(request.id, request.token_ids, request.num_prompt_tokens, tenant=request.tenant)

    def release(self, request: Request) -> None:
        """The request lost its lane. (After an interrupt it may have had no start yet.)"""
        if request.id in self._started:
            self._started.remove(request.id)
            for name in request.plan.drafters:
                self.drafters[name].release(request.id)

    def rows_behind(self, name: str, request: Request) -> int | None:
        """Rows that a drafter has to compute of what is committed before it can draft; None if it cannot."""
        if request.id not in self._started:  # it was admitted in this step
            return len(request.token_ids) - 1
        return self.drafters[name].rows_behind(request.id, len(request.token_ids))

    def propose(self, name: str, asks: Sequence[Ask], turns: Sequence[Turn], row_budget: int) -> list[Draft]:
        """One draft per turn by one drafter, cut to what is legal and was asked for.

        Args:
            name: of the drafter.
            asks: see `ask_for`, one a turn.
            turns: with rows granted to their drafts.
            row_budget: rows a drafter that is behind may compute beside its drafts.
        """
        proposed = self.drafters[name].propose(asks, row_budget)
        takes_states = self.drafters[name].needs.target_rows
        drafts = []
        for draft, ask, turn in zip(proposed, asks, turns, strict=True):
            own = draft if takes_states or draft.resume is None else replace(draft, resume=None)
            drafts.append(self._legal(own, turn.request, ask.num_draft_tokens))
        return drafts

    def forced(self, turn: Turn) -> Draft:
        """The text that a grammar prescribes next, as a draft; empty if there is none."""
        rules, most = turn.request.rules, turn.num_draft_tokens
        ids = [] if rules is None else rules.forced(most)
        return self._legal(Draft.chain(ids, GRAMMAR), turn.request, most) if ids else NO_DRAFT

    def observe(self, committed: Sequence[tuple[Block, int, tuple[int, ...]]], result: ForwardResult) -> None:
        """Tells each drafter what a step did to its requests, whoever drafted.

        Args:
            committed: (block, tokens added, draft nodes accepted) of every request that goes on.
            result: the step's forward pass.
        """
        observations: dict[str, list[Observation]] = defaultdict(list)
        for block, num_new_tokens, accepted in committed:
            request, draft_row = block.turn.request, block.begin + block.turn.num_tokens
            num_rows = block.turn.num_tokens + len(accepted)
            rows: slice | list[int] = slice(block.begin, block.begin + num_rows)
            if accepted != tuple(range(len(accepted))):
                rows = [*range(block.begin, draft_row), *(draft_row + node for node in accepted)]
            for name in request.plan.drafters:
                observations[name].append(
                    Observation(
                        request_id=request.id,
                        token_ids=request.token_ids,
                        num_new_tokens=num_new_tokens,
                        draft=block.draft,
                        accepted=accepted,
                        first_position=request.num_computed - num_rows,
                        aux={layer: result.aux[layer][rows] for layer in self.drafters[name].needs.aux_layers},
                    )
                )
        for name, seen in observations.items():
            self.drafters[name].observe(seen)

    def _legal(self, draft: Draft, request: Request, most: int) -> Draft:
        """Real ids, no more than `most`, with nothing behind one that ends the text or is not allowed.

        A token that was drawn may be left out only for what was known before it was drawn, or rejection sampling is
        biased; so the first one that is not allowed stays there, and is rejected. Drafts without probabilities do not
        depend on that noise, so it goes.
        """
        draft = clean_draft(draft, vocab_size=self._vocab_size, limit=len(draft.ids))
        if not self._trees or request.plan.verification == "block":
            draft = principal_chain(draft)
        drawn = request.plan.verification != "coupled" and draft.probabilities is not None
        if not draft.is_chain:
            return subtree(draft, _legal_nodes(draft, request, drawn)[:most])
        return shortened(draft, _legal_length(draft.ids[:most], request, drawn))


def _legal_length(ids: Sequence[int], request: Request, drawn: bool) -> int:
    """How many of these draft tokens, one after the other, are worth verifying."""
    limit = len(ids)
    if request.rules is not None:
        limit = min(limit, request.rules.count_legal(ids) + drawn)
    return next((end for end, token in enumerate(ids[:limit], 1) if token in request.stop_ids), limit)


def _legal_nodes(draft: Draft, request: Request, drawn: bool) -> list[int]:
    """The same for the nodes of a tree, each path being a chain."""
    legal: set[int] = set()
    inner = set(draft.parents)
    for leaf, path in enumerate(draft.paths):
        if leaf not in inner:
            legal.update(path[: _legal_length([draft.ids[node] for node in path], request, drawn)])
    return sorted(legal)


def shortened(draft: Draft, limit: int) -> Draft:
    """The first `limit` nodes of a clean draft: parents come first, so they are a draft too."""
    if len(draft) <= limit:
        return draft
    if not limit:
        return NO_DRAFT
    resume = draft.resume
    return Draft(
        ids=draft.ids[:limit],
        parents=draft.parents[:limit],
        sources=draft.sources[:limit],
        probabilities=None if draft.probabilities is None else draft.probabilities[:limit],
        confidence=None if draft.confidence is None else draft.confidence[:limit],
        resume=None if resume is None else replace(resume, hidden=resume.hidden[: 1 + limit]),
    )


def ask_for(
    request: Request,
    num_draft_tokens: int,
    *,
    width: int = 1,
    stop_below: float = 0.0,
    chance: Callable[[int, float, Sequence[float]], float] | None = None,
) -> Ask:
    """What a drafter is asked for one request, which has a lane; see `Ask`.

    How long a draft gets may not depend on what was drawn where rejection sampling is to see all of it.
    """
    coupled = request.plan.verification == "coupled"
    assert request.lane is not None
    return Ask(
        request_id=request.id,
        token_ids=request.token_ids,
        num_draft_tokens=num_draft_tokens,
        params=request.params,
        seed=request.seed,
        number=request.number,
        lane=request.lane,
        rules=request.rules,
        coupled=coupled,
        stop_below=stop_below if coupled else 0.0,
        chance=chance if coupled and (stop_below or width > 1) else None,
        width=width,
        stop_ids=request.stop_ids,
    )
