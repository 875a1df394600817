"""The ports of the engine: it sees drafters, models and caches only through these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from outpace.decisions import Allotment, ControlReport, Offer, Selection, StepFacts, Wish
from outpace.structured import StructuredOutputs
from outpace.types import Ask, Draft, ForwardResult, Observation, Pack, Segment

__all__ = [
    "Cache",
    "Controller",
    "Detokenizer",
    "Drafter",
    "DrafterNeeds",
    "ExitAdapter",
    "FeatureHead",
    "Grammar",
    "LayeredModel",
    "TargetModel",
    "Vocabulary",
]


class Detokenizer(Protocol):
    """Turns the token ids of one request into text, append-only."""

    def push(self, token_id: int) -> str:
        """The text this token completes; empty while a character is unfinished."""
        ...

    def flush(self) -> str:
        """What is left at the end."""
        ...


class Grammar(Protocol):
    """Follows one request's output through the grammar it has to obey.

    It stands behind the tokens consumed so far and can go back. Tokens that end a sequence (EOS) are allowed exactly
    where the text may end.
    """

    @property
    def ended(self) -> bool:
        """Whether the text is complete and no token but EOS may follow, or EOS has come."""
        ...

    def mask(self) -> NDArray[np.bool_]:
        """[V] which tokens may come next."""
        ...

    def consume(self, token_id: int) -> bool:
        """Goes one token on. False, and no change, if it may not come next."""
        ...

    def rollback(self, count: int) -> None:
        """Goes `count` consumed tokens back."""
        ...

    def count_legal(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens may come next, in order. Does not move."""
        ...

    def forced(self, most: int) -> list[int]:
        """The first `most` tokens, or fewer, of the text that has to come next, as the tokenizer would split it.

        May be empty, and may go on with tokens that `consume` would refuse. Does not move.
        """
        ...


class Vocabulary(Protocol):
    """What the engine has to know about tokens."""

    @property
    def size(self) -> int:
        """Ids from here on do not exist."""
        ...

    @property
    def missing_ids(self) -> Sequence[int]:
        """Ids below `size` that no token has: rows of the model's head that mean nothing."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a piece of text, with nothing added in front or behind."""
        ...

    def token_text(self, token_id: int) -> str:
        """Text of one token alone; part of a character shows as U+FFFD."""
        ...

    def detokenizer(
        self, *, skip_special_tokens: bool, spaces_between_special_tokens: bool, after: Sequence[int]
    ) -> Detokenizer:
        """A fresh one for one request, whose text follows the tokens `after` (the end of its prompt)."""
        ...

    def grammar(self, structured_outputs: StructuredOutputs) -> Grammar:
        """A fresh grammar at its beginning.

        Raises:
            InvalidParameter: the schema, expression or grammar is not possible; says what is wrong with it.
        """
        ...


class Cache(Protocol):
    """Key and value rows of many requests. A request holds one lane; its row i is that lane's slot i."""

    @property
    def capacity(self) -> int:
        """Rows in a lane."""
        ...

    @property
    def free_rows(self) -> int:
        """Rows of the budget that no lane has reserved."""
        ...

    @property
    def bytes_in_use(self) -> int:
        """Memory committed to reserved rows, in bytes."""
        ...

    def allocate(self) -> int | None:
        """A free lane with no rows, or None when all are taken."""
        ...

    def reserve(self, lane: int, rows: int) -> bool:
        """Makes rows [0, rows) of a lane usable. False, and no change, if the budget does not allow it."""
        ...

    def truncate(self, lane: int, rows: int) -> None:
        """Gives back every row from `rows` on, in O(1); the rows below keep their contents."""
        ...

    def trim(self, lane: int) -> None:
        """Gives the memory behind a lane's reserved rows back to the system; what was written there is gone."""
        ...

    def copy(self, source: int, target: int, rows: int) -> None:
        """Writes rows [0, rows) of one lane, in every layer, to another; both have reserved them."""
        ...

    def compact(self, lane: int, first: int, slots: Sequence[int]) -> None:
        """Moves rows `slots`, ascending, to first, first + 1, ... of the same lane; rows behind are to be truncated."""
        ...

    def release(self, lane: int) -> None:
        """Gives the whole lane back, and its memory to the system."""
        ...

    def check_integrity(self) -> None:
        """Raises AssertionError if the books do not balance."""
        ...


class TargetModel(Protocol):
    """A causal language model over a cache of its own kind, which implements `Cache`."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits: ids the tokenizer knows; padded ids are cut off."""
        ...

    @property
    def takes_trees(self) -> bool:
        """Whether segments may have paths: a row then has the bits it has where its path is all there is."""
        ...

    def forward(self, pack: Pack, cache: Any) -> ForwardResult:
        """Computes a pack once and writes its rows to the cache."""
        ...


class LayeredModel(TargetModel, Protocol):
    """A target that can run some of its layers alone. The three parts in a row are `forward`, bit for bit."""

    @property
    def num_layers(self) -> int: ...

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """[R] int64 ids -> [R, H] hidden states entering layer 0."""
        ...

    def run_layers(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        segments: Sequence[Segment],
        begin: int,
        end: int,
        cache: Any,
    ) -> torch.Tensor:
        """[R, H] states entering layer `begin` -> [R, H] states entering layer `end`; writes these layers' rows."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, H] states leaving the last layer -> [N, V] float32: final norm and output head."""
        ...


class ExitAdapter(Protocol):
    """A small trained network at an early exit: one block with a cache of its own, a norm, and the target's head."""

    @property
    def exit_layer(self) -> int:
        """The layer whose entering states it was trained on."""
        ...

    @property
    def weight_bytes(self) -> int: ...

    @property
    def cache(self) -> Cache: ...

    def logits(
        self, hidden: torch.Tensor, positions: torch.Tensor, segments: Sequence[Segment], wanted: torch.Tensor
    ) -> torch.Tensor:
        """[R, H] states at the exit -> [N, V] float32 logits of the `wanted` [N] rows; writes rows to its cache."""
        ...


class FeatureHead(Protocol):
    """A small network that guesses the token after next from the next one and a feature of the position before it.

    Of committed text a feature is made of the target's states; while drafting it is what the network put out itself.
    Its row for position i is that of (token i + 1, feature of i).
    """

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Layers of the target whose entering states make a feature."""
        ...

    @property
    def vocab_size(self) -> int:
        """Width of its logits, the target's; -inf for tokens it never guesses."""
        ...

    @property
    def weight_bytes(self) -> int: ...

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """[R, aux layers * Ht] states of the target, side by side -> [R, H] features."""
        ...

    def forward(
        self,
        ids: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        segments: Sequence[Segment],
        wanted: torch.Tensor,
        cache: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes rows and writes them to its cache.

        Args:
            ids: [R] int64, the token after each row's position.
            features: [R, H] of the rows' positions.
            positions: [R] int64.
            segments: where the rows belong in its cache, covering [0, R).
            wanted: [N] int64 rows, ascending, whose guesses are wanted.
            cache: its own.

        Returns:
            [N, V] float32 logits of the token after each row's, and [N, H] its features of the position of that row's.
        """
        ...


@dataclass(frozen=True, slots=True)
class DrafterNeeds:
    """What a drafter wants from the engine.

    Args:
        aux_layers: layers whose entering hidden states it wants to observe, for every kept row.
        computes: it computes rows to draft, so it is not asked before a request has its first token.
        target_rows: it writes to the target's cache rows and returns drafts with `resume`.
        every_row: it must observe all rows of a prompt, so that its requests never begin behind rows that were
            computed for another.
        width: most continuations of a token in its drafts; 1 if they are chains. It takes heed of `Ask.width`.
    """

    aux_layers: tuple[int, ...] = ()
    computes: bool = False
    target_rows: bool = False
    every_row: bool = False
    width: int = 1


class Drafter(Protocol):
    """Proposes tokens. Wrong, illegal, too many or no tokens cost time, never correctness; exceptions are faults.

    Calls for one request come in this order: start, (observe | propose)*, release. A preempted request is released
    and started anew. Lane and cache of the target are named in each `Ask`.
    """

    @property
    def name(self) -> str:
        """The method's name, as in `speculative_config["method"]`."""
        ...

    @property
    def needs(self) -> DrafterNeeds: ...

    @property
    def memory_bytes(self) -> int:
        """Memory this drafter holds beside the target: weights, caches, indices."""
        ...

    def start(self, request_id: int, token_ids: Sequence[int], num_prompt_tokens: int, *, tenant: str = "") -> None:
        """A request begins, or begins again after preemption, with these committed tokens.

        Nothing of a tenant's text may enter drafts for another; "" is a tenant like any other.
        """
        ...

    def observe(self, observations: Sequence[Observation]) -> None:
        """Learns what a step did to the requests it drafts for, prefill included."""
        ...

    def rows_behind(self, request_id: int, num_tokens: int) -> int | None:
        """Rows it would have to compute before it can draft, of a request with so many committed tokens; 0 for one that
        only looks things up, and the row of the last token not counted. None if it cannot draft for it as things are:
        it has no room for the request, say, or a context that has ended; then it is not asked."""
        ...

    def propose(self, asks: Sequence[Ask], row_budget: int) -> Sequence[Draft]:
        """One draft per ask, in order, computing at most `row_budget` rows to catch up with what was committed.

        A drafter that is still behind after that returns empty drafts for the requests concerned. The step may fail
        before anything is observed; then the requests are released.
        """
        ...

    def release(self, request_id: int) -> None:
        """The request is gone; its state is dropped. Unknown ids are an error."""
        ...


class Controller(Protocol):
    """Decides who drafts how much, so that tokens come as fast as they can. What it decides never changes a token.

    In every step with decoding requests: ceilings, width, allot, keep (if somebody computed), observe. A step may end
    early (a fault, nobody to draft for): calls that are left out are no error.
    """

    def ceilings(self, wishes: Sequence[Wish], other_rows: int, other_decoding: int = 0) -> list[int]:
        """Most draft tokens that can pay in this step, 0 to `most`, for every wish.

        Args:
            wishes: of all decoding requests that may be drafted for; each has one row that needs no draft.
            other_rows: rows of the step that are not theirs: prompts, and decoding requests without drafters. As far
                as they are known by now: what they are in the end is told to `allot` and `keep`.
            other_decoding: how many of the other rows are those of decoding requests.
        """
        ...

    def width(self, wish: Wish, decoding: int) -> int:
        """Most continuations of a token in the draft of the free drafter of a wish, which can branch: 1 for a chain.

        Args:
            wish: asked before `allot`.
            decoding: requests that get a token each in this step.
        """
        ...

    def allot(
        self, wishes: Sequence[Wish], offers: Sequence[Offer | None], other_rows: int, other_decoding: int = 0
    ) -> list[Allotment]:
        """What is done for every wish, now that its free drafter has been asked; None where that has nothing.

        Args:
            wishes: as before, with `most` lowered to the rows that could be had; 0 is allowed.
            offers: of the free drafters, one a wish.
            other_rows: rows of the step that are not theirs.
            other_decoding: how many of the other rows are those of decoding requests.
        """
        ...

    def keep(self, offers: Sequence[Offer], other_rows: int, other_decoding: int = 0) -> Sequence[Selection]:
        """What of every draft is verified, now that all are there; 0 for a draft that is not worth it.

        Args:
            offers: every draft at hand, also the ones of free drafters, as `allot` cut them; one a request.
            other_rows: rows of the step that are not theirs, the rows of requests without an offer included.
            other_decoding: how many of the other rows are those of decoding requests.
        """
        ...

    def calibrated(
        self, request_id: int, drafter: str, position: int, confidence: float, before: Sequence[float] = ()
    ) -> float:
        """The chance that a draft token is kept if those before it are, from what the drafter says of it.

        Args:
            request_id: whose draft.
            drafter: who makes it.
            position: of the token in the draft, from 0.
            confidence: the drafter's own estimate, 0 to 1.
            before: the same of the siblings that come before it, the most likely first.
        """
        ...

    def observe(self, facts: StepFacts) -> None:
        """Learns from a step."""
        ...

    def abandon(self) -> None:
        """The step under way failed: what was decided in it comes to nothing, and is not observed."""
        ...

    def release(self, request_id: int) -> None:
        """The request is gone; unknown ids are ignored."""
        ...

    def restart_report(self) -> None:
        """Counts of `report` begin anew; what was learnt stays."""
        ...

    def forget(self, drafter: str, relative_cost: float | None = None) -> None:
        """Another drafter goes by this name from now on: nothing that was learnt of the old one holds for it.

        Args:
            drafter: the name.
            relative_cost: of the new one's pass over the target's, a first guess; None if there is none.
        """
        ...

    def report(self) -> ControlReport:
        """What drafts brought and cost since the start, and why nobody is drafted for where that is so."""
        ...
