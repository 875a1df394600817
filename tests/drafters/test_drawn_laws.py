"""Drafters that draw: with the target's noise under the coupled rule, else with their own, stating the law of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from outpace.drafters.draft_model import DraftModelDrafter
from outpace.params import SamplingParams
from outpace.sampling.choose import choose_rows
from outpace.sampling.law import law_rows
from outpace.sampling.noise import key_of
from outpace.types import Ask, Draft, Pack, Purpose, Segment
from tests.end_to_end.tiny import CAPACITY, EXIT_LAYER, VOCAB, make_drafter, target
from tests.engine.fakes import HistoryModel, TokenCache

V = 24
PARAMS = [
    SamplingParams(temperature=1.0, top_p=1.0, top_k=0),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=9),
    SamplingParams(temperature=0.0, top_p=1.0, top_k=0),
]


def ask_for(request_id: int, tokens: Sequence[int], **fields: object) -> Ask:
    ask = Ask(request_id, tokens, 4, PARAMS[0], seed=3, number=request_id, lane=request_id)
    return replace(ask, **fields)


def propose(asks: Sequence[Ask], model: HistoryModel) -> list[Draft]:
    drafter = DraftModelDrafter(model, TokenCache(), max_model_len=512)
    for ask in asks:
        drafter.start(ask.request_id, ask.token_ids, len(ask.token_ids))
    return drafter.propose(asks, 512)


def expected(ask: Ask, model: HistoryModel, count: int) -> tuple[list[int], np.ndarray]:
    """Tokens drawn one by one from the whole history, and the law of each."""
    ids: list[int] = []
    laws = []
    for _ in range(count):
        logits = torch.from_numpy(model.logits([*ask.token_ids, *ids]))[None]
        laws.append(law_rows(logits, [ask.choice(ids)]).rows[0])
        ids += choose_rows(logits, [ask.choice(ids)])
    return ids, np.stack(laws)


def never_the_same_again(logits: np.ndarray, path: Sequence[int]) -> np.ndarray:
    changed = logits.copy()
    changed[list(path)] = -np.inf
    return changed


@pytest.mark.parametrize("params", PARAMS, ids=["plain", "filtered", "greedy"])
@pytest.mark.parametrize("rules", [None, never_the_same_again], ids=["free", "rules"])
def test_a_batch_of_both_kinds(params: SamplingParams, rules: object) -> None:
    model = HistoryModel(V)
    asks = [
        ask_for(i, [1, 2, 3 + i], coupled=i % 2 == 0, params=params, rules=rules, num_draft_tokens=6 - i)
        for i in range(4)
    ]
    for ask, draft in zip(asks, propose(asks, model), strict=True):
        ids, laws = expected(ask, model, ask.num_draft_tokens)
        assert draft.ids == tuple(ids)
        if rules is not None:
            assert len(set(ids)) == len(ids)
        if ask.coupled:
            assert draft.probabilities is None
            continue
        assert draft.probabilities is not None
        assert np.array_equal(draft.probabilities.numpy(), laws)
        assert (draft.probabilities[range(len(ids)), ids] > 0).all()


def test_noise_is_the_targets_or_of_its_own() -> None:
    coupled, own = ask_for(0, [1, 2]), ask_for(0, [1, 2], coupled=False)
    assert coupled.choice([5]).purpose == Purpose.CHOOSE
    assert own.choice([5]).purpose == Purpose.DRAFT
    later = ask_for(0, [1, 2, 5], coupled=False)
    assert own.choice([5]).position == later.choice([]).position
    assert key_of(own.choice([5])) != key_of(later.choice([]))  # another step draws afresh
    assert key_of(coupled.choice([5])) == key_of(ask_for(0, [1, 2, 5]).choice([]))


@pytest.mark.parametrize("coupled", [True, False])
def test_a_row_without_a_choice_ends_its_own_draft_only(coupled: bool) -> None:
    whole = HistoryModel(V)
    asks = [ask_for(i, [1, 2, 3 + i], coupled=coupled) for i in range(3)]
    ids = [expected(ask, whole, 4)[0] for ask in asks]
    bad = [[*asks[0].token_ids], [*asks[2].token_ids, *ids[2][:2]]]
    drafts = propose(asks, HistoryModel(V, broken=lambda history: list(history) in bad))
    assert [draft.ids for draft in drafts] == [(), tuple(ids[1]), tuple(ids[2][:2])]
    if not coupled:
        shapes = [None if draft.probabilities is None else tuple(draft.probabilities.shape) for draft in drafts]
        assert shapes == [None, (4, V), (2, V)]


@pytest.mark.parametrize("coupled", [True, False])
def test_early_exit_states_the_law_of_its_exit(coupled: bool) -> None:
    model = target("none")
    tokens = [5, 6, 7, 8]
    cache = model.new_cache(1, CAPACITY, CAPACITY)
    drafter = make_drafter("early_exit", "none", cache)
    lane = cache.allocate()
    assert lane is not None and cache.reserve(lane, 16)
    ids, positions = torch.tensor(tokens[:-1]), torch.arange(3)
    model.forward(Pack(ids, positions, (Segment(lane, 0, 3, 0),), torch.tensor([2])), cache)
    drafter.start(0, tokens, len(tokens))
    ask = ask_for(0, tokens, lane=lane, coupled=coupled)
    (draft,) = drafter.propose([ask], 16)
    assert len(draft) == 4
    logits = exit_logits([*tokens, *draft.ids])[len(tokens) - 1 : -1]
    choices = [ask.choice(draft.ids[:i]) for i in range(4)]
    assert list(draft.ids) == choose_rows(logits, choices)
    if coupled:
        assert draft.probabilities is None
    else:
        assert draft.probabilities is not None and draft.probabilities.shape == (4, VOCAB)
        assert np.array_equal(draft.probabilities.numpy(), law_rows(logits, choices).rows)
    assert draft.resume is not None and draft.resume.hidden.shape[0] == 4


def exit_logits(tokens: Sequence[int]) -> torch.Tensor:
    """[n, V] what the exit says after every token, in one pass on a cache of its own."""
    model = target("none")
    cache = model.new_cache(1, CAPACITY, CAPACITY)
    lane = cache.allocate()
    assert lane is not None and cache.reserve(lane, len(tokens))
    positions = torch.arange(len(tokens))
    hidden = model.embed(torch.tensor(tokens))
    segments = [Segment(lane, 0, len(tokens), 0)]
    return model.logits(model.run_layers(hidden, positions, segments, 0, EXIT_LAYER, cache))
