"""What the engine and its controller tell each other about drafts: wishes, offers, allotments, and what came of them.

    wishes -> ceilings -> (free drafts) -> offers -> allotments -> (computed drafts) -> offers -> kept -> step facts

A *free* drafter only looks things up; a *computing* one runs rows of a model, so asking it has a price.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = [
    "GRAMMAR",
    "Allotment",
    "ControlReport",
    "DraftCall",
    "DrafterReport",
    "Offer",
    "Selection",
    "StepFacts",
    "VerifiedOffer",
    "Wish",
]

GRAMMAR = "grammar"
"""Who offers the text that a grammar prescribes; not a drafter that could be chosen."""

Selection = int | tuple[int, ...]
"""What of a draft is verified: its first n tokens, or these of a draft with branches, ascending, with their parents."""


@dataclass(frozen=True, slots=True)
class Wish:
    """One decoding request before anything is drafted for it.

    Args:
        request_id: unique in the engine.
        most: most draft tokens in this step: the setting, what is left of the text, and the rows that can be had.
        free: name of its free drafter, which is asked before `allot`; None if it has none.
        computing: names of its computing drafters that can draft for it, each with the rows it has to compute before.
        remaining: most tokens still to come.
        widths: of the drafters that can branch for it, the most continuations of a token; of the others it is 1.
        limits: of drafters that may draft less than `most`, how much.
    """

    request_id: int
    most: int
    free: str | None
    computing: Mapping[str, int]
    remaining: int
    widths: Mapping[str, int] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)

    def most_of(self, drafter: str) -> int:
        """Most tokens of a draft of this drafter."""
        return min(self.most, self.limits.get(drafter, self.most))


@dataclass(frozen=True, slots=True)
class Offer:
    """A draft at hand, before it is verified. Its first n tokens are a draft too, whatever n.

    Args:
        request_id: whose.
        drafter: who made it.
        num_tokens: its length, branches included; 0 if there is none.
        confidence: of every token, the drafter's own estimate that it is kept if the ones before it are, 0 to 1; None
            if it has none. Not calibrated.
        fixed: it must not be cut for what its tokens are (they were drawn to be verified by rejection sampling).
        parents: of a draft with branches, the index of the token before each, -1 for the committed text; a token comes
            after its parent. None for a chain.
    """

    request_id: int
    drafter: str
    num_tokens: int
    confidence: tuple[float, ...] | None = None
    fixed: bool = False
    parents: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Allotment:
    """What is done for one request in this step.

    Args:
        keep: what of the offer at hand is verified.
        drafter: the computing drafter that is asked instead; `keep` is 0 then. None: nobody is asked.
        num_tokens: how many tokens it is asked for, branches included.
        width: most continuations of a token, no more than the wish allows; 1 for a chain.
        stop_below: it may stop as soon as the product of its confidences, as `Controller.calibrated` sees them, falls
            below this; 0 for never.
    """

    keep: Selection = 0
    drafter: str | None = None
    num_tokens: int = 0
    width: int = 1
    stop_below: float = 0.0


@dataclass(frozen=True, slots=True)
class DraftCall:
    """What one call of a computing drafter cost.

    Args:
        drafter: its name.
        num_requests: that it drafted for.
        num_rounds: tokens on the longest path of a draft. Of chains these are the passes of its model; a tree may take
            more or fewer, which is learnt as what free drafts cost (`num_wide`).
        catch_up_rows: rows it computed of what was committed before.
        seconds: of the call.
        num_wide: of the requests, those whose drafts were free to branch.
    """

    drafter: str
    num_requests: int
    num_rounds: int
    catch_up_rows: int
    seconds: float
    num_wide: int = 0


@dataclass(frozen=True, slots=True)
class VerifiedOffer:
    """What became of the draft of one request.

    Args:
        offer: as it was verified, cut.
        num_accepted: tokens that verification kept, also those behind the end of a text. The one after them, if there
            is one, was rejected.
        whole: the draft as it was made, if it had branches, before anybody cut it; None for a chain.
        followed: the tokens of `whole` that the text went along, from the root on, verified or not.
    """

    offer: Offer
    num_accepted: int
    whole: Offer | None = None
    followed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What one step did and took.

    Args:
        threads: that computed it.
        prefill_rows: rows of prompts, and of requests that are computed again.
        decoding: ids of the requests that were decoding, one row each and at least one token, drafted for or not.
        drafts: of those that had a draft verified.
        calls: of computing drafters.
        seconds: of the whole step without the calls: choosing and verifying included.
    """

    threads: int
    prefill_rows: int
    decoding: Sequence[int]
    drafts: Sequence[VerifiedOffer]
    calls: Sequence[DraftCall] = field(default_factory=tuple)
    seconds: float = 0.0

    @property
    def rows(self) -> int:
        """Rows of the target."""
        return self.prefill_rows + len(self.decoding) + sum(seen.offer.num_tokens for seen in self.drafts)


@dataclass(frozen=True, slots=True)
class DrafterReport:
    """What one drafter brought and cost since the start. Predictions are those made when it was decided to draft.

    Args:
        drafter: its name.
        drafts: that were verified.
        tokens: in them.
        expected_accepted: tokens that were expected to be kept.
        accepted: tokens that were.
        drafting_seconds: in its calls; 0 for one that only looks things up.
        verifying_seconds: of the steps with its drafts, beyond what they would have taken without drafts.
        expected_gain: tokens per second over the plain rate, as predicted for the steps with its drafts; None if
            there were none.
        gain: the same as it came; the plain rate is still a prediction.
        off: why nothing of it was verified when that was decided last, in one sentence with numbers; None if something
            was, or nobody could have asked it lately. It stays when nothing runs any more.
    """

    drafter: str
    drafts: int
    tokens: int
    expected_accepted: float
    accepted: int
    drafting_seconds: float
    verifying_seconds: float
    expected_gain: float | None
    gain: float | None
    off: str | None


@dataclass(frozen=True, slots=True)
class ControlReport:
    """What a controller did since the start.

    Args:
        drafters: by name.
        steps: with decoding requests.
        seconds: of these steps, drafting included.
        probing_seconds: of these, the price of trying again what seemed not to pay, as predicted.
        expected_tokens: of the steps without prompt rows, as it was predicted when they were planned.
        expected_seconds: the same, drafting included.
        plain_tokens: that plain steps instead of these would have brought.
        plain_seconds: that they would have taken, as predicted.
    """

    drafters: Mapping[str, DrafterReport]
    steps: int
    seconds: float
    probing_seconds: float
    expected_tokens: float = 0.0
    expected_seconds: float = 0.0
    plain_tokens: int = 0
    plain_seconds: float = 0.0

    def expected_gain_since(self, before: ControlReport) -> float | None:
        """Tokens per second over the plain rate, as predicted step by step since an earlier report; None if no step."""
        seconds = self.expected_seconds - before.expected_seconds
        plain = self.plain_seconds - before.plain_seconds
        if not seconds or not plain:
            return None
        rate = (self.expected_tokens - before.expected_tokens) / seconds
        return rate / ((self.plain_tokens - before.plain_tokens) / plain)
