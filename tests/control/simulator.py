"""An engine without a model: the clock is simulated, tokens are kept by true chances, and both are seeded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from outpace.decisions import Allotment, DraftCall, Offer, Selection, StepFacts, VerifiedOffer, Wish

from .forest import ALIKE, Tree, best_tree, grow

NATIVE = ((1, 1.0), (2, 1.08), (3, 1.15), (4, 1.25), (5, 1.35), (8, 1.7), (16, 2.7), (32, 4.7), (512, 70.0))
TORCH = ((1, 1.0), (2, 1.9), (3, 2.6), (5, 3.4), (8, 3.8), (16, 4.5), (32, 7.0), (512, 90.0))


def table(pairs: Sequence[tuple[float, float]], unit: float = 0.01) -> Callable[[int], float]:
    """Seconds by rows, linear between the pairs."""
    rows, costs = zip(*pairs, strict=True)
    values = unit * np.interp(np.arange(0, 1025), rows, costs)
    return lambda count: float(values[count])


@dataclass
class TrueDrafter:
    """What a drafter is really like.

    Args:
        chance: (request id, position) -> that a token is kept if those before it are.
        round_seconds: (requests) -> of one token each; None if it only looks things up.
        row_seconds: of a row of catching up.
        informative: whether it says which tokens will be kept.
        overstated: whether what it says is too high.
        stops: whether it obeys `stop_below`.
        rate: share of the asks to which it has something to say.
        ranks: () -> chances that the second, third, ... candidate is right if those before it are wrong; None if there
            is only one.
        wide: a pass where drafts may branch, over one of chains.
    """

    chance: Callable[[int, int], float]
    round_seconds: Callable[[int], float] | None = None
    row_seconds: float = 0.0
    informative: bool = False
    overstated: bool = False
    stops: bool = False
    rate: float = 1.0
    ranks: Callable[[], Sequence[float]] | None = None
    wide: float = 1.1

    @property
    def width(self) -> int:
        return 1 if self.ranks is None else 1 + len(self.ranks())


@dataclass
class Step:
    """What happened. `expected` tokens and `exact` seconds are without chance and noise; `branches` are draft tokens
    that were verified beside a sibling; `wide` requests had a computed draft that was free to branch."""

    tokens: int
    expected: float
    seconds: float
    exact: float
    drafted: int
    requests: int
    probe: bool
    branches: int = 0
    wide: int = 0


@dataclass
class Simulation:
    """Runs a controller.

    Args:
        controller: under test.
        drafters: by name.
        seconds: (rows) -> true seconds of a step.
        most: num_speculative_tokens.
        noise: relative, of every measured time.
        stalls: chance of a step that takes 50 times as long.
        informed: true chances of the tokens of the draft under way, by (request, position).
    """

    controller: Any
    drafters: dict[str, TrueDrafter]
    seconds: Callable[[int], float]
    most: int = 5
    noise: float = 0.07
    stalls: float = 0.003
    seed: int = 0
    threads: int = 2
    clock: float = 0.0
    behind: dict[tuple[int, str], int] = field(default_factory=dict)
    history: list[Step] = field(default_factory=list)
    calls: list[DraftCall] = field(default_factory=list)
    probing: float = 0.0
    last_tokens: dict[int, int] = field(default_factory=dict)
    true_chances: dict[tuple[int, str], list[float]] = field(default_factory=dict)
    trees: dict[tuple[int, str], Tree] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def _measured(self, seconds: float) -> float:
        stall = 50.0 if self.rng.random() < self.stalls else 1.0
        return seconds * float(np.exp(self.noise * self.rng.normal())) * stall

    def _draft(self, request: int, name: str, count: int, stop_below: float, width: int = 1) -> tuple[Offer, int]:
        """A draft, and the rounds it took."""
        drafter = self.drafters[name]
        self.trees.pop((request, name), None)
        if width > 1 and self.rng.random() <= drafter.rate:
            tree = self.trees[request, name] = grow(self, drafter, request, name, count, stop_below, width)
            return tree.offer(request, name), tree.passes
        if self.rng.random() > drafter.rate:
            self.true_chances[request, name] = []
            return Offer(request, name, 0), 0
        chances, confidence, product = [], [], 1.0
        for position in range(count):
            chance = drafter.chance(request, position)
            said = chance if drafter.ranks is None else ALIKE[0]
            if drafter.informative and 0.0 < chance < 1.0:
                chance = said = float(self.rng.beta(1.5 * chance, 1.5 * (1 - chance)))
            if drafter.overstated:
                said = said**0.4
            chances.append(chance)
            confidence.append(said)
            if drafter.stops:
                product *= self.controller.calibrated(request, name, position, said)
                if product < stop_below:
                    break
        self.true_chances[request, name] = chances
        speaks = drafter.informative or drafter.ranks is not None
        return Offer(request, name, len(chances), tuple(confidence) if speaks else None), len(chances)

    def step(self, requests: Sequence[int], prompt_rows: int = 0, remaining: int = 10_000, plain: int = 0) -> Step:
        """One step of these requests, beside rows of prompts and `plain` requests without drafters."""
        free = [name for name, drafter in self.drafters.items() if drafter.round_seconds is None]
        computing = [name for name, drafter in self.drafters.items() if drafter.round_seconds is not None]
        wishes = [
            Wish(
                request_id=request,
                most=self.most,
                free=free[0] if free else None,
                computing={name: self.behind.setdefault((request, name), 40) for name in computing},
                remaining=remaining,
                widths={name: drafter.width for name, drafter in self.drafters.items() if drafter.width > 1},
            )
            for request in requests
        ]
        others = prompt_rows + plain
        limits = self.controller.ceilings(wishes, others, plain)
        assert all(0 <= limit <= self.most for limit in limits)
        wishes = [
            Wish(w.request_id, limit, w.free, w.computing, w.remaining, w.widths)
            for w, limit in zip(wishes, limits, strict=True)
        ]
        offers: list[Offer | None] = []
        for wish in wishes:
            offer = None
            if wish.free is not None and wish.most:
                width = self.controller.width(wish, len(requests) + plain) if wish.free in wish.widths else 1
                offer = self._draft(wish.request_id, wish.free, wish.most, 0.0, width)[0]
            offers.append(offer if offer is not None and offer.num_tokens else None)
        allotments = self.controller.allot(wishes, offers, others, plain)
        hand = self._at_hand(wishes, offers, allotments)
        calls, exact_calls = self._calls(wishes, allotments, hand)
        kept: Sequence[Selection] = [offer.num_tokens for offer in hand]
        if calls:
            kept = self.controller.keep(hand, others + len(requests) - len(hand), plain + len(requests) - len(hand))
        return self._verify(requests, hand, kept, calls, exact_calls, prompt_rows, plain)

    def _at_hand(
        self, wishes: Sequence[Wish], offers: Sequence[Offer | None], allotments: Sequence[Allotment]
    ) -> list[Offer]:
        hand = []
        for wish, offer, allotment in zip(wishes, offers, allotments, strict=True):
            assert allotment.drafter is None or allotment.keep == 0
            assert allotment.num_tokens <= wish.most
            if allotment.keep:
                assert offer is not None
                if offer.parents is not None:
                    tree = self.trees[offer.request_id, offer.drafter]
                    tree.cut(allotment.keep)
                    hand.append(tree.offer(offer.request_id, offer.drafter))
                    continue
                assert isinstance(allotment.keep, int) and allotment.keep <= offer.num_tokens
                confidence = None if offer.confidence is None else offer.confidence[: allotment.keep]
                hand.append(Offer(offer.request_id, offer.drafter, allotment.keep, confidence, offer.fixed))
        return hand

    def _calls(
        self, wishes: Sequence[Wish], allotments: Sequence[Allotment], hand: list[Offer]
    ) -> tuple[list[DraftCall], float]:
        calls, total = [], 0.0
        for name in {a.drafter: None for a in allotments if a.drafter is not None}:
            true = self.drafters[name]
            asked = [(w, a) for w, a in zip(wishes, allotments, strict=True) if a.drafter == name]
            rounds, exact = 0, 0.0
            rows = sum(self.behind[w.request_id, name] for w, _ in asked)
            lengths = []
            for wish, allotment in asked:
                assert allotment.num_tokens >= 1
                assert 1 <= allotment.width <= true.width
                offer, length = self._draft(
                    wish.request_id, name, allotment.num_tokens, allotment.stop_below, allotment.width
                )
                lengths.append(length)
                self.behind[wish.request_id, name] = 0
                if offer.num_tokens:
                    hand.append(offer)
            rounds = max(lengths)
            assert true.round_seconds is not None
            wide = sum(allotment.width > 1 for _, allotment in asked)
            for place in range(rounds):
                one = true.round_seconds(sum(length > place for length in lengths))
                exact += one * (true.wide if wide else 1.0)
            exact += rows * true.row_seconds
            calls.append(DraftCall(name, len(asked), rounds, rows, self._measured(exact), wide))
            total += exact
        return calls, total

    def _verify(
        self,
        requests: Sequence[int],
        hand: Sequence[Offer],
        kept: Sequence[Selection],
        calls: Sequence[DraftCall],
        exact_calls: float,
        prompt_rows: int,
        plain: int,
    ) -> Step:
        seen, expected = [], float(len(requests) + plain)
        tokens = {request: 1 for request in requests}
        branches = 0
        for offer, count in zip(hand, kept, strict=True):
            if not count:
                continue
            if offer.parents is not None:
                tree = self.trees[offer.request_id, offer.drafter]
                tree.cut(count)
                expected += sum(tree.survival)
                outcome = tree.verified(self.rng, offer.request_id, offer.drafter)
                seen.append(outcome)
                tokens[offer.request_id] += outcome.num_accepted
                branches += tree.num_branches
                continue
            assert isinstance(count, int)
            assert count <= offer.num_tokens
            chances = self.true_chances[offer.request_id, offer.drafter][:count]
            expected += float(np.cumprod(chances).sum())
            accepted = next((i for i, c in enumerate(chances) if self.rng.random() >= c), count)
            confidence = None if offer.confidence is None else offer.confidence[:count]
            seen.append(VerifiedOffer(Offer(offer.request_id, offer.drafter, count, confidence, offer.fixed), accepted))
            tokens[offer.request_id] += accepted
        decoding = [*requests, *range(-plain, 0)]
        spent_probing = self.controller.report().probing_seconds
        probed, self.probing = spent_probing > self.probing, spent_probing
        drafted = sum(one.offer.num_tokens for one in seen)
        exact = self.seconds(prompt_rows + len(decoding) + drafted)
        self.calls += calls
        facts = StepFacts(self.threads, prompt_rows, decoding, seen, calls, self._measured(exact))
        self.controller.observe(facts)
        for (request, name), rows in self.behind.items():
            if request in tokens:
                asked = any(call.drafter == name for call in calls) and rows == 0
                self.behind[request, name] = 1 if asked else rows + tokens[request]
        spent = exact + exact_calls
        self.clock += spent
        made = sum(tokens.values()) + plain
        measured = facts.seconds + sum(call.seconds for call in calls)
        wide = sum(call.num_wide for call in calls)
        record = Step(made, expected, measured, spent, drafted, len(decoding), probed, branches, wide)
        self.last_tokens = tokens
        self.history.append(record)
        return record

    def run(self, requests: Sequence[int], steps: int, **how: int) -> float:
        """Expected tokens per second of so many steps."""
        done = [self.step(requests, **how) for _ in range(steps)]
        return sum(step.expected for step in done) / sum(step.exact for step in done)


def share_lost(some: Sequence[Step], whole: Sequence[Step], rate: float) -> float:
    """What some steps took beyond what their tokens take at a rate, over the time of the whole."""
    return sum(step.exact - step.expected / rate for step in some) / sum(step.exact for step in whole)


def best_rate(
    seconds: Callable[[int], float],
    requests: Sequence[int],
    drafters: dict[str, TrueDrafter],
    most: int = 5,
) -> float:
    """Tokens per second of the best fixed choice: a drafter, a length, and how many of the requests get it."""
    batch = len(requests)
    best = batch / seconds(batch)
    for drafter in drafters.values():
        chances = {r: [drafter.chance(r, position) for position in range(most)] for r in requests}
        survival = {r: np.cumprod(chances[r]) for r in requests}
        if drafter.ranks is not None:
            best = max(best, best_tree(seconds, drafter, requests, most))
        if drafter.round_seconds is None:
            every = sorted((float(a) for r in requests for a in survival[r]), reverse=True)
            for count in range(len(every) + 1):
                best = max(best, (batch + sum(every[:count])) / seconds(batch + count))
            continue
        for length in range(1, most + 1):
            gains = sorted((float(survival[r][:length].sum()) for r in requests), reverse=True)
            for many in range(1, batch + 1):
                total = seconds(batch + many * length) + length * drafter.round_seconds(many)
                total += many * drafter.row_seconds
                best = max(best, (batch + sum(gains[:many])) / total)
    return best
