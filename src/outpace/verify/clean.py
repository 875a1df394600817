"""Drafts as the engine can use them: whatever a drafter returns, what is left is well formed."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from numbers import Real

import numpy as np
import torch

from outpace.types import Draft, Resume

__all__ = ["clean_draft", "principal_chain", "subtree"]

_UNKNOWN = "unknown"


def clean_draft(draft: Draft, *, vocab_size: int, limit: int) -> Draft:
    """What of a drafter's proposal can be verified. Never raises, whatever the draft holds.

    Nodes go whose id is no integer in [0, vocab_size), whose parent is not an earlier node or -1, or whose parent
    went. Of the rest the first `limit` stay. Sources that are missing become "unknown"; probabilities and confidence
    that do not fit the ids are dropped, which costs acceptance at most. Kept states stay for the rows before the first
    node that went, because later rows move up to other cache slots.

    Args:
        draft: from a drafter, perhaps malformed.
        vocab_size: V of the target.
        limit: the most nodes wanted.

    Returns:
        A draft whose fields keep every promise of `Draft`.
    """
    if not isinstance(draft, Draft):
        return Draft()
    edges = list(zip(_items(draft.ids), _items(draft.parents), strict=False))
    nodes: list[int] = []
    tokens: list[int] = []
    parents: list[int] = []
    place: dict[int, int] = {-1: -1}
    for node, (raw_id, raw_parent) in enumerate(edges):
        if len(nodes) >= limit:
            break
        token, parent = _integer(raw_id), _integer(raw_parent)
        if token is None or not 0 <= token < vocab_size or parent is None or parent not in place:
            continue
        place[node] = len(nodes)
        nodes.append(node)
        tokens.append(token)
        parents.append(place[parent])
    probabilities = draft.probabilities
    if isinstance(probabilities, torch.Tensor) and probabilities.shape[1:] != (vocab_size,):
        probabilities = None
    sources = _items(draft.sources)
    return Draft(
        ids=tuple(tokens),
        parents=tuple(parents),
        sources=tuple(str(sources[node]) if node < len(sources) else _UNKNOWN for node in nodes),
        probabilities=_rows_of(probabilities, nodes, len(edges)),
        confidence=_confidence_of(draft.confidence, nodes, len(edges)),
        resume=_resume_of(draft.resume, nodes),
    )


def principal_chain(draft: Draft) -> Draft:
    """The first child at every level of a clean draft, for models that verify chains only."""
    chain: list[int] = []
    for node, parent in enumerate(draft.parents):
        if parent == (chain[-1] if chain else -1):
            chain.append(node)
    return subtree(draft, chain)


def subtree(draft: Draft, nodes: Sequence[int]) -> Draft:
    """These nodes of a clean draft, ascending, the parent of each among them."""
    if len(nodes) == len(draft):
        return draft
    place = {-1: -1, **{node: index for index, node in enumerate(nodes)}}
    return Draft(
        ids=tuple(draft.ids[node] for node in nodes),
        parents=tuple(place[draft.parents[node]] for node in nodes),
        sources=tuple(draft.sources[node] for node in nodes),
        probabilities=_rows_of(draft.probabilities, nodes, len(draft)),
        confidence=_confidence_of(draft.confidence, nodes, len(draft)),
        resume=_resume_of(draft.resume, nodes),
    )


def _items(field: object) -> Sequence[object]:
    if isinstance(field, (tuple, list)):
        return field
    if isinstance(field, Iterable) and not isinstance(field, (str, bytes)):
        scalar = isinstance(field, (torch.Tensor, np.ndarray)) and field.ndim == 0
        return () if scalar else tuple(field)
    return ()


def _integer(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


def _rows_of(rows: object, nodes: Sequence[int], total: int) -> torch.Tensor | None:
    if not isinstance(rows, torch.Tensor) or rows.ndim != 2 or rows.shape[0] != total:
        return None
    return rows if len(nodes) == total else rows[list(nodes)]


def _confidence_of(confidence: object, nodes: Sequence[int], total: int) -> tuple[float, ...] | None:
    values = _items(confidence)
    if confidence is None or len(values) != total:
        return None
    chances: list[float] = []
    for node in nodes:
        value = values[node]
        if not isinstance(value, Real) or math.isnan(value):
            return None
        chances.append(min(max(float(value), 0.0), 1.0))
    return tuple(chances)


def _resume_of(resume: object, nodes: Sequence[int]) -> Resume | None:
    if not isinstance(resume, Resume):
        return None
    hidden, layer = resume.hidden, _integer(resume.layer)
    if layer is None or layer < 1 or not isinstance(hidden, torch.Tensor) or hidden.ndim != 2 or not hidden.shape[0]:
        return None
    unmoved = next((place for place, node in enumerate(nodes) if place != node), len(nodes))
    return Resume(layer=layer, hidden=hidden[: 1 + unmoved])
