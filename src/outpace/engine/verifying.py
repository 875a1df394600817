"""The verify station: what of every draft is kept, and the target's own token after it.

The rules themselves live in `outpace.verify`. The coupled rule asks for the target's choice at every row, the two of
rejection sampling for its law; a row that gives neither costs its request nothing unless the walk ends there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from outpace.engine.pack import Block
from outpace.sampling.choose import choose_each
from outpace.sampling.law import law_rows
from outpace.types import Choice, Verdict
from outpace.verify import block as block_rule
from outpace.verify import coupled, standard
from outpace.verify.noise import StepNoise

__all__ = ["Verified", "choices_of", "verify_blocks"]


@dataclass(frozen=True, slots=True)
class Verified:
    """A verdict; `error` says why it has no bonus token (which is NO_TOKEN then)."""

    verdict: Verdict
    error: str | None = None


def verify_blocks(blocks: Sequence[Block], logits: torch.Tensor) -> list[Verified | None]:
    """The verdict on each block's draft, by the rule of its request; None in the middle of a prefill.

    Args:
        blocks: of the step, in row order.
        logits: [N, V] of the step; a block's rows are its `choice_rows`.
    """
    verified: list[Verified | None] = [None] * len(blocks)
    together = [i for i, b in enumerate(blocks) if b.num_choices and b.turn.request.plan.verification == "coupled"]
    for index, found in zip(together, _coupled([blocks[i] for i in together], logits), strict=True):
        verified[index] = found
    for index, block in enumerate(blocks):
        if block.num_choices and verified[index] is None:
            verified[index] = _by_law(block, logits)
    return verified


def choices_of(block: Block) -> list[Choice]:
    """How the target chooses after the last committed token and after each draft token, [num_choices].

    Node histories are known before the walk: the committed text, then the draft tokens on the way to the row.
    """
    request, draft = block.turn.request, block.draft
    if not block.num_choices:
        return []
    first, ruled = len(request.token_ids), request.rules is not None
    nodes: list[Sequence[int]] = [(), *draft.paths]
    return [
        Choice(
            request.params,
            request.seed,
            first + len(path),
            request.number,
            request.rules,
            tuple(draft.ids[node] for node in path) if ruled else (),
        )
        for path in nodes
    ]


def _coupled(blocks: Sequence[Block], logits: torch.Tensor) -> Iterator[Verified]:
    """One batched choice for all rows; then the walks only compare integers."""
    rows = [row for block in blocks for row in block.choice_rows]
    chosen = choose_each(_rows(logits, rows), [choice for block in blocks for choice in choices_of(block)])
    begin = 0
    for block in blocks:
        tokens = chosen.tokens[begin : begin + block.num_choices]
        verdict = coupled.verify(block.draft, tokens)
        yield Verified(verdict, chosen.errors.get(begin + _last_row(verdict)))
        begin += block.num_choices


def _by_law(block: Block, logits: torch.Tensor) -> Verified:
    """Rejection sampling, on laws."""
    request = block.turn.request
    laws = law_rows(_rows(logits, block.choice_rows), choices_of(block))
    noise = StepNoise(request.seed, request.number, len(request.token_ids))
    rule = standard.verify if request.plan.verification == "standard" else block_rule.verify
    verdict = rule(block.draft, laws.rows, noise)
    return Verified(verdict, laws.errors.get(_last_row(verdict)))


def _last_row(verdict: Verdict) -> int:
    """Of a block: where the walk ended and the bonus token comes from."""
    return 1 + verdict.accepted[-1] if verdict.accepted else 0


def _rows(logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """These rows; a view where they are all or lie together, for copying a row of a large vocabulary costs time."""
    if not rows or rows[-1] - rows[0] + 1 == len(rows):
        return logits[rows[0] : rows[-1] + 1] if rows else logits[:0]
    return logits[list(rows)]
