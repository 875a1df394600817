"""Lays the turns of a step out as one flat pack for the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outpace.engine.scheduler import Turn
from outpace.types import Draft, Pack, Segment

__all__ = ["Block", "build_pack"]


@dataclass(frozen=True, slots=True)
class Block:
    """A turn with its draft, and where its rows lie.

    Args:
        turn: whose rows.
        draft: verified in this step; empty in plain decoding and in the middle of a prefill.
        begin: its first row in the pack.
        num_choices: rows whose logits are wanted: the last committed token and every draft token, or 0.
    """

    turn: Turn
    draft: Draft
    begin: int
    num_choices: int

    @property
    def num_rows(self) -> int:
        return self.turn.num_tokens + len(self.draft)


def build_pack(turns: Sequence[Turn], drafts: Sequence[Draft], aux_layers: tuple[int, ...]) -> tuple[Pack, list[Block]]:
    """Concatenates committed tokens and draft chains, request after request.

    Kept states are used only where they join at one layer; another layer's rows are simply computed again.
    """
    ids: list[int] = []
    positions: list[int] = []
    segments: list[Segment] = []
    logits_rows: list[int] = []
    resume_rows: list[int] = []
    resume_hidden: list[torch.Tensor] = []
    resume_layer = 0
    blocks: list[Block] = []
    for turn, draft in zip(turns, drafts, strict=True):
        request, begin, start = turn.request, len(ids), turn.request.num_computed
        assert request.lane is not None
        ids += request.token_ids[start : start + turn.num_tokens]
        ids += draft.ids
        end = len(ids)
        positions += range(start, start + end - begin)
        segments.append(Segment(request.lane, begin, end, start))
        num_choices = 1 + len(draft) if turn.reaches_end else 0
        logits_rows += range(end - num_choices, end)
        resume = draft.resume
        if resume is not None and turn.num_tokens == 1 and resume_layer in (0, resume.layer):
            resume_layer = resume.layer
            resume_rows += range(begin, begin + resume.hidden.shape[0])
            resume_hidden.append(resume.hidden)
        blocks.append(Block(turn, draft, begin, num_choices))
    pack = Pack(
        ids=torch.tensor(ids),
        positions=torch.tensor(positions),
        segments=tuple(segments),
        logits_rows=torch.tensor(logits_rows, dtype=torch.int64),
        aux_layers=aux_layers,
        resume_layer=resume_layer,
        resume_rows=torch.tensor(resume_rows) if resume_rows else None,
        resume_hidden=torch.cat(resume_hidden) if resume_hidden else None,
    )
    return pack, blocks
