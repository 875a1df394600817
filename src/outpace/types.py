"""The data that travels between the stations of a step.

    schedule -> draft -> pack -> forward -> verify -> commit -> emit

Names are the field's: the *target* model is the one whose text is wanted; a *drafter* proposes *draft tokens*;
verification keeps the *accepted tokens* and adds the target's own *bonus token* after them. R counts rows (token
positions computed in one pass), H is the hidden size, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from outpace.params import SamplingParams

__all__ = [
    "Ask",
    "Choice",
    "Draft",
    "ForwardResult",
    "Observation",
    "Pack",
    "Purpose",
    "Resume",
    "Rules",
    "Segment",
    "Verdict",
]


class Purpose(IntEnum):
    """What noise is for. Different purposes have independent noise; the numbers never change.

    `CHOOSE` is the target's own choice, which drafters share under the coupled rule. The others belong to the rules of
    rejection sampling: drawing a draft token, accepting it, drawing from the residual, and the bonus token.
    """

    CHOOSE = 1
    DRAFT = 2
    ACCEPT = 3
    RESIDUAL = 4
    BONUS = 5


class Rules(Protocol):
    """What a request's parameters do to logits before temperature and filters, for one row with its own history.

    A pure function of (logits, committed text, path): `path` holds the draft tokens between the committed text and the
    row. The committed text is known to the rules; only the engine moves it on.
    """

    def __call__(self, logits: NDArray[np.float32], path: Sequence[int]) -> NDArray[np.float32]:
        """[V] logits of the row after `path` -> [V], -inf where a token is not allowed. The argument stays as it is.

        Raises:
            OutpaceError: a logits processor of the caller failed, or no token is left.
        """
        ...


@dataclass(frozen=True, slots=True)
class Choice:
    """Everything `choose` needs to know about one row besides its logits.

    Args:
        params: resolved parameters (no None among temperature, top_p, top_k).
        seed: the request's seed, any integer; part of the noise key.
        position: absolute position (prompt and output counted from 0) of the token being chosen.
        number: which of the request's n choices this is; part of the noise key.
        rules: what changes the logits first; None for nothing.
        path: draft tokens between the committed text and this row, for the rules.
        purpose: what the noise is for; part of the noise key.
        origin: for purposes other than CHOOSE, the position of the first token of the step. It is part of the noise
            key: what a step draws for positions that it then gives up says something about why it gave them up, and
            must not be drawn again by the next step.
    """

    params: SamplingParams
    seed: int
    position: int
    number: int = 0
    rules: Rules | None = None
    path: tuple[int, ...] = ()
    purpose: Purpose = Purpose.CHOOSE
    origin: int | None = None


@dataclass(frozen=True, slots=True)
class Resume:
    """Hidden states some rows already have, so that their lower layers need not run again.

    The cache rows of layers [0, layer) of these rows are already written.

    Args:
        layer: the layer these states enter.
        hidden: [n, H], one state a row, in order.
    """

    layer: int
    hidden: torch.Tensor


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed continuations of one request: a tree whose nodes are draft tokens (a chain is the usual case).

    Args:
        ids: [n] token ids, parents before children.
        parents: [n] index of the parent node, -1 for a child of the last committed token; parents[i] < i.
        sources: [n] where each token came from, for people ("prompt", "output", "draft model", ...).
        probabilities: [n, V] distribution each token was drawn from, or None for a point mass.
        confidence: [n] estimated chance of acceptance given that the parent was accepted, or None if unknown.
        resume: states of the *first* rows of the verification block (the last committed token, then nodes in
            order), if the drafter computed them on the target's own cache.
    """

    ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()
    probabilities: torch.Tensor | None = None
    confidence: tuple[float, ...] | None = None
    resume: Resume | None = None

    @classmethod
    def chain(
        cls,
        ids: Sequence[int],
        source: str | Sequence[str],
        *,
        probabilities: torch.Tensor | None = None,
        confidence: Sequence[float] | None = None,
        resume: Resume | None = None,
    ) -> Draft:
        """A draft without branches: each token follows the one before it."""
        sources = (source,) * len(ids) if isinstance(source, str) else tuple(source)
        return cls(
            ids=tuple(ids),
            parents=tuple(range(-1, len(ids) - 1)),
            sources=sources,
            probabilities=probabilities,
            confidence=None if confidence is None else tuple(confidence),
            resume=resume,
        )

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def is_chain(self) -> bool:
        """Whether each token follows the one before it."""
        return self.parents == tuple(range(-1, len(self.parents) - 1))

    @property
    def paths(self) -> list[tuple[int, ...]]:
        """[n] the nodes from the root to each node, itself included."""
        paths: list[tuple[int, ...]] = []
        for node, parent in enumerate(self.parents):
            paths.append((*paths[parent], node) if parent >= 0 else (node,))
        return paths

    @property
    def depth(self) -> int:
        """Tokens on the longest path; 0 for an empty draft."""
        if self.is_chain:
            return len(self.parents)
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 + depths[parent] if parent >= 0 else 1)
        return max(depths, default=0)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request's turn to be drafted for.

    Args:
        request_id: as given to `Drafter.start`.
        token_ids: every committed token, prompt and output; read, never changed or kept by the drafter.
        num_draft_tokens: the most tokens wanted, branches included, at least 1; returning fewer, or none, is fine.
        params: resolved sampling parameters, for drafters that draw with the target's noise.
        seed: the request's seed.
        number: which of its n choices.
        lane: the request's lane in the target's cache. Rows [len(token_ids) - 1, len(token_ids) + num_draft_tokens)
            of it are reserved and may be written below the layer a drafter resumes at.
        rules: the request's rules, for drafters that draw; None for none.
        coupled: draft tokens are to be drawn with the target's own noise. Otherwise they are drawn with noise of their
            own, and the draft has to carry the probabilities they were drawn with.
        stop_below: a draft that is this unlikely to be kept as a whole need not grow further: the product of `chance`
            over its tokens. 0 for never.
        chance: (position in the draft, the drafter's own confidence in the token there, its confidences in the siblings
            before it) -> chance that it is kept if those before it are. In a tree the position is the depth.
        width: most continuations of a token, for drafters that can branch; None: as many as they are made for.
        stop_ids: tokens that end the text: nothing behind one of them is of any use.
    """

    request_id: int
    token_ids: Sequence[int]
    num_draft_tokens: int
    params: SamplingParams
    seed: int
    number: int
    lane: int
    rules: Rules | None = None
    coupled: bool = True
    stop_below: float = 0.0
    chance: Callable[[int, float, Sequence[float]], float] | None = None
    width: int | None = None
    stop_ids: frozenset[int] = frozenset()

    def choice(self, path: Sequence[int]) -> Choice:
        """How the draft token after `path` is drawn, `path` being the draft so far."""
        first = len(self.token_ids)
        return Choice(
            params=self.params,
            seed=self.seed,
            position=first + len(path),
            number=self.number,
            rules=self.rules,
            path=tuple(path) if self.rules is not None else (),
            purpose=Purpose.CHOOSE if self.coupled else Purpose.DRAFT,
            origin=None if self.coupled else first,
        )


@dataclass(frozen=True, slots=True)
class Observation:
    """What one step did to one request, told to its drafter after the commit.

    Args:
        request_id: as given to `Drafter.start`.
        token_ids: every committed token, prompt and output, this step's included; read only.
        num_new_tokens: how many of them this step added (0 in the middle of a prefill).
        draft: what was verified in this step; empty for plain decoding and prefill.
        accepted: which of its nodes were kept, root to leaf.
        first_position: position of the first row of `aux`.
        aux: {layer: [n, H]} hidden states entering that layer at the n positions whose rows stay in the target's cache
            after this step; only the layers the drafter needs.
    """

    request_id: int
    token_ids: Sequence[int]
    num_new_tokens: int
    draft: Draft
    accepted: tuple[int, ...]
    first_position: int
    aux: dict[int, torch.Tensor]

    @property
    def num_accepted(self) -> int:
        """How many of the draft's tokens were kept."""
        return len(self.accepted)


@dataclass(frozen=True, slots=True)
class Segment:
    """The rows of one request inside a pack.

    Rows [begin, end) of the pack go to cache slots [first_slot, first_slot + end - begin) of `lane`. A row sees the
    slots before `first_slot` and, of its own segment, itself and the rows before it; its position is its slot.

    The last rows may be nodes of a tree that do not lie straight behind the text: such a row sees slots [0, fork) and
    then those of its own path, in this order, and its position is the number of slots before its own.

    Args:
        lane: whose cache rows.
        begin: first row of the pack.
        end: row after the last.
        first_slot: of the first row.
        fork: slots that all paths share, at most the slot of the first row with a path.
        paths: of each of the last rows, the slots it sees from `fork` on, ascending; the last is its own.
    """

    lane: int
    begin: int
    end: int
    first_slot: int
    fork: int = 0
    paths: tuple[tuple[int, ...], ...] = ()

    def __len__(self) -> int:
        return self.end - self.begin

    @property
    def num_straight(self) -> int:
        """Rows before those with a path of their own."""
        return self.end - self.begin - len(self.paths)

    def part(self, first: int, last: int, begin: int) -> Segment:
        """Rows [first, last) of this segment, counted from its own begin, as a segment that begins at row `begin`."""
        straight = self.num_straight
        paths = self.paths[max(0, first - straight) : max(0, last - straight)]
        return Segment(self.lane, begin, begin + last - first, self.first_slot + first, self.fork, paths)

    @property
    def length(self) -> int:
        """Slots in use after this segment is written."""
        return self.first_slot + self.end - self.begin


@dataclass(frozen=True, slots=True)
class Pack:
    """One forward pass, flat: prefill chunks, plain decoding and verification blocks side by side.

    Args:
        ids: [R] int64 token ids.
        positions: [R] int64 absolute positions, for the rotary embedding; not the slots where a segment has paths.
        segments: one per request, in row order, together covering [0, R).
        logits_rows: [N] int64 rows whose logits are wanted, ascending.
        aux_layers: layers whose entering hidden states are wanted, for all rows.
        resume_layer: layer at which kept states join, 0 if there are none.
        resume_rows: [n] int64 rows that have a kept state; the others run from the embedding. Within a segment
            they come first.
        resume_hidden: [n, H] their states entering `resume_layer`.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    segments: tuple[Segment, ...]
    logits_rows: torch.Tensor
    aux_layers: tuple[int, ...] = ()
    resume_layer: int = 0
    resume_rows: torch.Tensor | None = None
    resume_hidden: torch.Tensor | None = None

    @property
    def num_rows(self) -> int:
        return self.ids.shape[0]


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """What a forward pass returns.

    Args:
        logits: [N, V] float32, one row per `Pack.logits_rows`.
        aux: {layer: [R, H]} hidden states entering the layers asked for.
    """

    logits: torch.Tensor
    aux: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of verifying one draft.

    Args:
        accepted: node indices of the kept path, root to leaf.
        bonus: the target's own token after the last kept one.
    """

    accepted: tuple[int, ...]
    bonus: int
