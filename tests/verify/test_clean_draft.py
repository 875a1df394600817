"""Whatever a drafter returns, what is verified is well formed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outpace.types import Draft, Resume
from outpace.verify.clean import clean_draft, principal_chain

V = 10


def draft(ids: Any, parents: Any, sources: Any = None, **fields: Any) -> Draft:
    return Draft(ids=ids, parents=parents, sources=("s",) * len(ids) if sources is None else sources, **fields)


def shape(cleaned: Draft) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return cleaned.ids, cleaned.parents


@pytest.mark.parametrize(
    ("ids", "parents", "limit", "expected"),
    [
        ((1, 2, 3), (-1, 0, 1), 9, ((1, 2, 3), (-1, 0, 1))),
        ((1, 2, 3), (-1, 0, 1), 2, ((1, 2), (-1, 0))),
        ((1, 2, 3), (-1, 0, 1), 0, ((), ())),
        ((1, 2, 3), (-1, 0, 1), -1, ((), ())),
        ((1, 10, 3), (-1, 0, 1), 9, ((1,), (-1,))),  # illegal id, and what hangs on it
        ((-1, 2, 3), (-1, 0, 1), 9, ((), ())),
        ((0, 9), (-1, 0), 9, ((0, 9), (-1, 0))),
        ((1, 99, 3, 4), (-1, -1, 0, 2), 9, ((1, 3, 4), (-1, 0, 1))),  # parents are counted anew
        ((1, 99, 3, 4), (-1, -1, 1, 0), 2, ((1, 4), (-1, 0))),  # the limit counts what is kept
        ((1, 2, 3), (-1, 2, 0), 9, ((1, 3), (-1, 0))),  # parent not before the child
        ((1, 2), (-1, 1), 9, ((1,), (-1,))),  # its own parent
        ((1, 2), (-2, -1), 9, ((2,), (-1,))),
        ((1, 2, 3), (-1, 0), 9, ((1, 2), (-1, 0))),  # lengths that disagree
        ((1,), (-1, 0, 1), 9, ((1,), (-1,))),
        ((1, "2", 3.0, None, True), (-1,) * 5, 9, ((1,), (-1,))),
        ((1, 2, 3), (-1, None, 0.0), 9, ((1,), (-1,))),
        ([1, 2], [-1, 0], 9, ((1, 2), (-1, 0))),
        ((np.int64(1), torch.tensor(2)), (np.int32(-1), torch.tensor(0)), 9, ((1, 2), (-1, 0))),
        (torch.tensor([1, 2]), np.array([-1, 0]), 9, ((1, 2), (-1, 0))),
        ((2**70, 3), (-1, -1), 9, ((3,), (-1,))),
    ],
)
def test_nodes_that_stay(ids: Any, parents: Any, limit: int, expected: Any) -> None:
    cleaned = clean_draft(draft(ids, parents), vocab_size=V, limit=limit)
    assert shape(cleaned) == expected
    assert all(type(value) is int for value in cleaned.ids + cleaned.parents)
    assert len(cleaned.sources) == len(cleaned)


@pytest.mark.parametrize("nothing", [None, 3, "abc", b"ab", torch.tensor(4), object()])
def test_fields_that_are_no_sequences(nothing: Any) -> None:
    assert clean_draft(nothing, vocab_size=V, limit=4) == Draft()
    assert clean_draft(Draft(nothing, nothing, nothing), vocab_size=V, limit=4) == Draft()
    cleaned = clean_draft(Draft((1,), (-1,), nothing, confidence=nothing), vocab_size=V, limit=4)
    assert cleaned == Draft((1,), (-1,), ("unknown",))


def test_sources_follow_their_nodes() -> None:
    cleaned = clean_draft(draft((1, 99, 3), (-1, -1, 0), ("a", "b", "c")), vocab_size=V, limit=4)
    assert cleaned.sources == ("a", "c")
    short = clean_draft(draft((1, 2), (-1, 0), ("a",)), vocab_size=V, limit=4)
    assert short.sources == ("a", "unknown")


def test_probabilities_follow_their_nodes() -> None:
    rows = torch.rand(3, V)
    cleaned = clean_draft(draft((1, 99, 3), (-1, -1, 0), probabilities=rows), vocab_size=V, limit=4)
    assert cleaned.probabilities is not None and torch.equal(cleaned.probabilities, rows[[0, 2]])
    cut = clean_draft(draft((1, 2, 3), (-1, 0, 1), probabilities=rows), vocab_size=V, limit=1)
    assert cut.probabilities is not None and torch.equal(cut.probabilities, rows[:1])


@pytest.mark.parametrize("bad", [torch.rand(2, V), torch.rand(3, V + 1), torch.rand(3), [[0.1] * V] * 3, 0.5])
def test_probabilities_that_do_not_fit_are_dropped(bad: Any) -> None:
    cleaned = clean_draft(draft((1, 2, 3), (-1, 0, 1), probabilities=bad), vocab_size=V, limit=4)
    assert cleaned.probabilities is None and shape(cleaned) == ((1, 2, 3), (-1, 0, 1))


@pytest.mark.parametrize(
    ("confidence", "expected"),
    [
        ((0.5, 0.6, 0.7), (0.5, 0.7)),
        ([0.5, 9.0, 1.5], (0.5, 1.0)),
        ((-0.1, 0.0, 1), (0.0, 1.0)),
        (np.array([0.25, 0.5, 0.75], dtype=np.float32), (0.25, 0.75)),
        ((math.inf, 0.1, 0.2), (1.0, 0.2)),
        ((0.5, math.nan, 0.7), (0.5, 0.7)),
        ((0.5, 0.6, math.nan), None),
        ((0.5, 0.6), None),
        ((0.5, 0.6, "x"), None),
        (None, None),
    ],
)
def test_confidence_follows_its_nodes_or_goes(confidence: Any, expected: Any) -> None:
    cleaned = clean_draft(draft((1, 99, 3), (-1, -1, 0), confidence=confidence), vocab_size=V, limit=4)
    assert cleaned.confidence == expected


@pytest.mark.parametrize(
    ("ids", "parents", "limit", "states", "kept"),
    [
        ((1, 2, 3), (-1, 0, 1), 9, 4, 4),
        ((1, 2, 3), (-1, 0, 1), 9, 3, 3),
        ((1, 2, 3), (-1, 0, 1), 9, 9, 4),  # more states than rows
        ((1, 2, 3), (-1, 0, 1), 1, 4, 2),
        ((1, 2, 3), (-1, 0, 1), 0, 4, 1),  # the last committed token keeps its state
        ((1, 99, 3), (-1, 0, 1), 9, 4, 2),
        ((1, 99, 3), (-1, 0, 0), 9, 4, 2),  # the third node moves up to another cache slot
        ((99, 2), (-1, -1), 9, 3, 1),
    ],
)
def test_states_stay_for_the_rows_that_do_not_move(ids: Any, parents: Any, limit: int, states: int, kept: int) -> None:
    hidden = torch.rand(states, 6)
    cleaned = clean_draft(draft(ids, parents, resume=Resume(3, hidden)), vocab_size=V, limit=limit)
    assert cleaned.resume is not None and cleaned.resume.layer == 3
    assert torch.equal(cleaned.resume.hidden, hidden[:kept])


@pytest.mark.parametrize(
    "bad", [Resume(0, torch.rand(2, 3)), Resume(2, torch.rand(0, 3)), Resume(2, torch.rand(3)), (3, torch.rand(2, 3))]
)
def test_states_that_make_no_sense_are_dropped(bad: Any) -> None:
    assert clean_draft(draft((1,), (-1,), resume=bad), vocab_size=V, limit=4).resume is None


ANYTHING = st.one_of(st.integers(-3, 12), st.none(), st.floats(), st.text(max_size=2), st.booleans())


@settings(max_examples=120, deadline=None, database=None, derandomize=True)
@given(
    ids=st.lists(st.one_of(st.integers(0, 9), ANYTHING), max_size=12),
    parents=st.lists(st.one_of(st.integers(-1, 5), ANYTHING), max_size=12),
    sources=st.lists(st.text(max_size=3), max_size=12),
    confidence=st.one_of(st.none(), st.lists(ANYTHING, max_size=12)),
    rows=st.integers(0, 12),
    limit=st.integers(-1, 12),
)
def test_promises_of_a_draft_hold_for_any_content(
    ids: list[Any], parents: list[Any], sources: list[str], confidence: Any, rows: int, limit: int
) -> None:
    dirty = draft(ids, parents, sources, confidence=confidence, probabilities=torch.zeros(rows, V))
    cleaned = clean_draft(dirty, vocab_size=V, limit=limit)
    n = len(cleaned)
    assert n <= max(limit, 0) and len(cleaned.parents) == len(cleaned.sources) == n
    assert all(0 <= token < V for token in cleaned.ids)
    assert all(-1 <= parent < node for node, parent in enumerate(cleaned.parents))
    assert cleaned.confidence is None or (len(cleaned.confidence) == n and all(0 <= c <= 1 for c in cleaned.confidence))
    assert cleaned.probabilities is None or cleaned.probabilities.shape == (n, V)
    chain = principal_chain(cleaned)
    assert chain.parents == tuple(range(-1, len(chain) - 1))


def test_a_clean_draft_is_left_as_it_is() -> None:
    clean = draft((1, 2, 3), (-1, -1, 0), ("a", "b", "c"), confidence=(0.1, 0.2, 0.3))
    assert clean_draft(clean, vocab_size=V, limit=3) == clean


@pytest.mark.parametrize(
    ("ids", "parents", "nodes"),
    [
        ((), (), ()),
        ((1, 2, 3), (-1, 0, 1), (0, 1, 2)),
        ((1, 2, 3, 4), (-1, -1, 0, 1), (0, 2)),
        ((1, 2, 3, 4, 5), (-1, 0, 0, 1, 2), (0, 1, 3)),
        ((1, 2, 3), (-1, -1, 1), (0,)),  # a leaf comes first, and is followed
    ],
)
def test_principal_chain_takes_first_children(ids: Any, parents: Any, nodes: tuple[int, ...]) -> None:
    n = len(ids)
    rows, hidden = torch.rand(n, V), torch.rand(n + 1, 4)
    whole = draft(ids, parents, [str(i) for i in ids], probabilities=rows, confidence=[i / 9 for i in ids])
    chain = principal_chain(Draft(**{**fields_of(whole), "resume": Resume(2, hidden)}))
    assert chain.ids == tuple(ids[node] for node in nodes)
    assert chain.parents == tuple(range(-1, len(nodes) - 1))
    assert list(chain.sources) == [str(token) for token in chain.ids]
    assert chain.probabilities is not None and torch.equal(chain.probabilities, rows[list(nodes)])
    assert chain.confidence is not None and list(chain.confidence) == [token / 9 for token in chain.ids]
    unmoved = next((place for place, node in enumerate(nodes) if place != node), len(nodes))
    assert chain.resume is not None and torch.equal(chain.resume.hidden, hidden[: 1 + unmoved])


def fields_of(whole: Draft) -> dict[str, Any]:
    return {name: getattr(whole, name) for name in Draft.__dataclass_fields__}
