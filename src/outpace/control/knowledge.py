"""All that is learnt: costs of the target and of drafters, what drafts are worth, and each request's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from outpace.control.acceptance import FIRST_GUESS, Correction, DrafterAcceptance
from outpace.control.branches import Ranked, ranked
from outpace.control.costs import DraftCosts, TargetCosts
from outpace.control.floor import Limits, limits
from outpace.control.probing import Pace
from outpace.control.requests import Requests
from outpace.control.row_costs import NATIVE_SHAPE
from outpace.control.silence import Silence
from outpace.control.widths import BranchGain
from outpace.decisions import Offer

__all__ = ["FEW_DRAFTS", "FLOOR", "ControlSettings", "Knowledge"]

FEW_DRAFTS = 3
"""As many tell what a drafter is worth, and whether it means what it says."""

FLOOR = 0.98
"""Share of its plain rate that every request of a batch keeps, if nobody says."""

_LONGEST_PACE = 8.0  # steps between two tries of branches


@dataclass(frozen=True, slots=True)
class ControlSettings:
    """First guesses and limits.

    Args:
        shape: (rows, seconds relative to any common unit) pairs with rising rows: the first guess of what a step of the
            target costs.
        relative_costs: by computing drafter, its pass for one request over the target's, such as the ratio of the bytes
            of their weights. Where none is named, its first call asks for one token.
        first_guesses: by drafter, the chance that a draft token is kept, before any was seen; `FIRST_GUESS` where none
            is named.
        margin: by how much tokens per second with drafts must beat those without, relative.
        floor: share of its plain rate that every request of a batch keeps, however much others gain; 0: no such limit.
        horizon: what it costs a drafter to catch up with a request is spread over no more tokens to come than this
            and the tokens that have come.
    """

    shape: Sequence[tuple[float, float]] = NATIVE_SHAPE
    relative_costs: Mapping[str, float] = field(default_factory=dict)
    first_guesses: Mapping[str, float] = field(default_factory=dict)
    margin: float = 0.01
    floor: float = FLOOR
    horizon: int = 64


class Knowledge:
    """Everything by name, made when it is first asked for."""

    def __init__(self, settings: ControlSettings) -> None:
        self.settings = settings
        self.target = TargetCosts(settings.shape)
        self.draft_costs: dict[str, DraftCosts] = {}
        self.acceptances: dict[str, DrafterAcceptance] = {}
        self.branches: dict[str, BranchGain] = {}
        self._branch_paces: dict[str, Pace] = {}
        self._silences: dict[str, Silence] = {}
        self.requests = Requests()

    def forget(self, drafter: str, relative_cost: float | None) -> None:
        """Another drafter goes by this name; `relative_cost` is the first guess of its cost, if there is one."""
        costs = {name: cost for name, cost in self.settings.relative_costs.items() if name != drafter}
        if relative_cost is not None:
            costs[drafter] = relative_cost
        self.settings = replace(self.settings, relative_costs=costs)
        self.draft_costs.pop(drafter, None)
        self.acceptances.pop(drafter, None)
        self.branches.pop(drafter, None)
        self._branch_paces.pop(drafter, None)
        self._silences.pop(drafter, None)
        self.requests.forget(drafter)

    def costs(self, drafter: str) -> DraftCosts:
        found = self.draft_costs.get(drafter)
        if found is None:
            found = self.draft_costs[drafter] = self.new_costs(drafter)
        return found

    def new_costs(self, drafter: str, *, row: float | None = None, num_calls: int = 0) -> DraftCosts:
        """Those of a drafter that was not timed in this run; `row` and `num_calls` are of another run."""
        relative = self.settings.relative_costs.get(drafter)
        return DraftCosts(relative, self.settings.shape, row=row, num_calls=num_calls)

    def acceptance(self, drafter: str) -> DrafterAcceptance:
        found = self.acceptances.get(drafter)
        if found is None:
            found = self.acceptances[drafter] = self.new_acceptance(drafter)
        return found

    def new_acceptance(self, drafter: str) -> DrafterAcceptance:
        """That of a drafter of which nothing was verified."""
        return DrafterAcceptance(self.settings.first_guesses.get(drafter, FIRST_GUESS))

    def branches_of(self, drafter: str) -> BranchGain:
        found = self.branches.get(drafter)
        if found is None:
            found = self.branches[drafter] = BranchGain()
        return found

    def branch_pace(self, drafter: str) -> Pace:
        """When branches are tried next where they do not seem to pay."""
        found = self._branch_paces.get(drafter)
        if found is None:
            found = self._branch_paces[drafter] = Pace(1.0, 0, longest=_LONGEST_PACE)
        return found

    def branch_gain(self, request_id: int, drafter: str, decoding: int) -> float | None:
        """Tokens that branches bring a draft of this request, what they cost deducted; None if that is not known."""
        own = self.requests[request_id].branches.get(drafter)
        found = None if own is None else own.expected(decoding)
        return self.branches_of(drafter).expected(decoding) if found is None else found

    def own(self, request_id: int, drafter: str) -> Correction:
        """How a request differs for a drafter."""
        found = self.requests.known_correction(request_id, drafter)
        if found is not None:
            return found
        return self.requests[request_id].correction(drafter, self.acceptance(drafter).correction)

    def asked(self, request_id: int, drafter: str, found: bool) -> None:
        """A computing drafter that was up to date found something, or nothing."""
        shared = self._silences.get(drafter)
        if shared is None:
            if found:
                return
            shared = self._silences[drafter] = Silence(self.acceptance(drafter).num_drafts)
        shared.add(found)
        own = self.requests[request_id].silences
        if not found and drafter not in own:
            own[drafter] = Silence()
        if drafter in own:
            own[drafter].add(found)

    def speaks(self, request_id: int, drafter: str) -> float:
        """The chance that a computing drafter which is asked finds anything."""
        shared = self._silences.get(drafter)
        if shared is None:
            return 1.0
        own, guess = self.requests[request_id].silences.get(drafter), shared.share()
        return 1.0 - (guess if own is None else own.share(guess))

    def longest(self, drafter: str) -> int:
        """Most tokens a draft while the drafter is new: hopes are high then, and one token tells as much as five."""
        return 1 + self.acceptance(drafter).num_drafts

    def is_known(self, drafter: str) -> bool:
        """Whether a computing drafter was called and enough of its drafts were seen to believe what they say."""
        return self.costs(drafter).num_calls > 0 and self.acceptance(drafter).num_drafts >= FEW_DRAFTS

    def ranked(self, offer: Offer) -> Ranked:
        """The tokens of a draft at hand; of one that was drawn, before anybody knew what was drawn."""
        acceptance, own = self.acceptance(offer.drafter), self.own(offer.request_id, offer.drafter)
        if offer.parents is not None:
            return ranked(acceptance, own, offer)
        if offer.fixed:
            survival = acceptance.average_survival(offer.num_tokens, own)
        else:
            survival = acceptance.survival(offer.num_tokens, offer.confidence, own)
        return Ranked(survival, None, survival)

    def survival(self, offer: Offer, most: int) -> list[float]:
        """The chances of the best of them that they are kept, and all before them on their path."""
        return self.ranked(offer).survival[:most]

    def limits(self, ids: Sequence[int], decoding: int, plain: float) -> Limits | None:
        """How long a step of these requests may take, `decoding` in all; without drafts it takes `plain` seconds."""
        return limits(self.requests, ids, decoding, plain, self.settings.floor)

    def step_seconds(self, base: int, prompt_rows: int, count: int) -> list[float]:
        """[1 + count] seconds of a step with 0, 1, ... draft tokens beside `base` rows.

        Prompt rows have to be computed anyway: of a step with some, only what drafts add to it counts, beside a step of
        the decoding requests alone.
        """
        now = self.target.now
        table = now.table(base, count + 1)
        if prompt_rows:
            shift = now.seconds(max(1, base - prompt_rows)) - table[0]
            table = [seconds + shift for seconds in table]
        return table
