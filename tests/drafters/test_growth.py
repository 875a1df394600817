"""What a drafter says of its tokens, and when it stops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from outpace.drafters.draft_model import DraftModelDrafter
from outpace.params import SamplingDefaults, SamplingParams
from outpace.types import Ask, Draft
from tests.engine.fakes import HistoryModel, TokenCache

V = 12
PROMPT = [1, 2, 3, 4]


def ask_for(**options: object) -> Ask:
    params = SamplingParams(temperature=0.8, seed=5).resolved(SamplingDefaults())
    ask = Ask(request_id=0, token_ids=PROMPT, num_draft_tokens=6, params=params, seed=5, number=0, lane=0)
    return replace(ask, **options)  # type: ignore[arg-type]


def draft_for(ask: Ask) -> Draft:
    drafter = DraftModelDrafter(HistoryModel(V), TokenCache(), max_model_len=64)
    drafter.start(0, PROMPT, len(PROMPT))
    (draft,) = drafter.propose([ask], row_budget=100)
    return draft


def test_confidence_is_the_probability_before_temperature_and_filters() -> None:
    model, draft, history = HistoryModel(V), draft_for(ask_for()), list(PROMPT)
    assert len(draft) == 6 and draft.confidence is not None
    for token, confidence in zip(draft.ids, draft.confidence, strict=True):
        logits = model.logits(history).astype(np.float64)
        assert confidence == pytest.approx(np.exp(logits[token]) / np.exp(logits).sum(), rel=1e-5)
        history.append(token)


def test_a_draft_stops_with_the_token_that_makes_it_too_unlikely() -> None:
    asked: list[tuple[int, float]] = []

    def chance(position: int, confidence: float, before: Sequence[float]) -> float:
        asked.append((position, confidence))
        return 0.6

    whole = draft_for(ask_for())
    for stop_below, length in ((0.61, 1), (0.6, 2), (0.3, 3), (0.01, 6), (0.0, 6)):
        asked.clear()
        draft = draft_for(ask_for(stop_below=stop_below, chance=chance))
        assert draft.ids == whole.ids[:length]
        assert draft.confidence is not None and asked == list(enumerate(draft.confidence))


def test_nothing_is_drafted_behind_the_end_of_a_text() -> None:
    whole, model = draft_for(ask_for()), HistoryModel(V)
    assert len(set(whole.ids[:3])) == 3
    drafter = DraftModelDrafter(model, TokenCache(), max_model_len=64)
    drafter.start(0, PROMPT, len(PROMPT))
    (draft,) = drafter.propose([ask_for(stop_ids=frozenset({whole.ids[2]}))], row_budget=100)
    assert draft.ids == whole.ids[:3]
    assert model.rows_per_call == [4, 1, 1], "and no pass is spent on it"
