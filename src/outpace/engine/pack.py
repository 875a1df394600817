"""Lays the turns of a step out as one flat pack for the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outpace.engine.scheduler import Turn
from outpace.types import Draft, Pack, Resume, Segment

__all__ = ["Block", "build_pack"]


@dataclass(frozen=True, slots=True)
class Block:
    """A turn with its draft, and where its rows lie.

    Args:
        turn: whose rows.
        draft: verified in this step; empty in plain decoding and in the middle of a prefill.
        begin: its first row in the pack.
        prompt_rows: rows of the logits that say how likely the next prompt tokens were, if the request asks for that.
        choice_rows: rows of the logits after the last committed token and after every draft token, or none.
    """

    turn: Turn
    draft: Draft
    begin: int
    prompt_rows: range
    choice_rows: range

    @property
    def num_choices(self) -> int:
        return len(self.choice_rows)

    @property
    def num_rows(self) -> int:
        return self.turn.num_tokens + len(self.draft)


def build_pack(turns: Sequence[Turn], drafts: Sequence[Draft], aux_layers: tuple[int, ...]) -> tuple[Pack, list[Block]]:
    """Concatenates committed tokens and drafts, request after request.

    A draft token's row goes to the slot behind the one before it; its position is its depth in the draft.

    Kept states are used only where they join at one layer, and only where no states below it are wanted, which such
    rows do not have; others are simply computed again.
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
        segment = _segment(request.lane, begin, start, turn.num_tokens, draft)
        positions += range(start, start + segment.num_straight)
        positions += [segment.fork + len(path) - 1 for path in segment.paths]
        segments.append(segment)
        prompt_rows = _prompt_positions(turn)
        choice_rows = range(end - len(draft) - 1, end) if turn.reaches_end else range(0)
        first_logits = len(logits_rows)
        logits_rows += [begin + position - start for position in prompt_rows]
        logits_rows += choice_rows
        resume = draft.resume
        if resume is not None and turn.num_tokens == 1 and _joins(resume, resume_layer, aux_layers):
            resume_layer = resume.layer
            resume_rows += range(begin, begin + resume.hidden.shape[0])
            resume_hidden.append(resume.hidden)
        first_choice = first_logits + len(prompt_rows)
        blocks.append(
            Block(
                turn,
                draft,
                begin,
                prompt_rows=range(first_logits, first_choice),
                choice_rows=range(first_choice, len(logits_rows)),
            )
        )
    pack = Pack(
        ids=torch.tensor(ids, dtype=torch.int64, device="cpu"),
        positions=torch.tensor(positions, dtype=torch.int64, device="cpu"),
        segments=tuple(segments),
        logits_rows=torch.tensor(logits_rows, dtype=torch.int64, device="cpu"),
        aux_layers=aux_layers,
        resume_layer=resume_layer,
        resume_rows=torch.tensor(resume_rows, dtype=torch.int64, device="cpu") if resume_rows else None,
        resume_hidden=torch.cat(resume_hidden) if resume_hidden else None,
    )
    return pack, blocks


def _joins(resume: Resume, resume_layer: int, aux_layers: tuple[int, ...]) -> bool:
    """Whether kept states can be used beside others that join at `resume_layer` (0: there are none)."""
    return resume_layer in (0, resume.layer) and all(layer >= resume.layer for layer in aux_layers)


def _segment(lane: int, begin: int, start: int, num_tokens: int, draft: Draft) -> Segment:
    """Committed tokens from position `start` on, then the draft; nodes that do not follow the one before have paths."""
    end, fork = begin + num_tokens + len(draft), start + num_tokens
    if draft.is_chain:
        return Segment(lane, begin, end, start)
    straight = next(node for node, parent in enumerate(draft.parents) if parent != node - 1)
    paths = tuple(tuple(fork + node for node in path) for path in draft.paths[straight:])
    return Segment(lane, begin, end, start, fork, paths)


def _prompt_positions(turn: Turn) -> range:
    """Positions of this turn that are followed by a prompt token whose log probability is still wanted."""
    request = turn.request
    if request.params.prompt_logprobs is None:
        return range(0)
    first = max(request.num_computed, len(request.prompt_logprobs) - 1)
    return range(first, max(first, min(request.num_computed + turn.num_tokens, request.num_prompt_tokens - 1)))
