"""The EAGLE-3 drafter with a head that is exact, so that any row fed with another token, feature or place shows.

The target's next token follows from its last two. A state says which token stands at which position; a row of the head
has the token after it and the state, which is all that a perfect guess takes, and puts out the next position's state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

import outpace.drafters.head_rows as head_rows
from outpace.drafters.feature_head import FeatureHeadDrafter
from outpace.params import SamplingParams
from outpace.sampling.choose import choose_rows
from outpace.sampling.law import law_rows
from outpace.types import Ask, Draft, ForwardResult, Observation, Pack, Segment
from tests.engine.chaos import ChaosController
from tests.engine.fakes import FREE, HistoryModel, TokenCache
from tests.engine.harness import GREEDY, HOT, WARM, Job, make_engine, mixed_jobs, plain, run

V = 24
BASE = 1000
"""What positions and tokens stay below: a row of the cache is written as one number of three digits to this base."""


class StatefulModel(HistoryModel):
    """Tells its states, [position, token], at layers 1 to 3."""

    def forward(self, pack: Pack, cache: TokenCache) -> ForwardResult:  # type: ignore[override]
        result = super().forward(pack, cache)
        states = torch.stack([pack.positions, pack.ids], 1).float()
        return replace(result, aux={layer: states * layer for layer in pack.aux_layers})


class ExactHead:
    """Guesses as the target chooses, and checks every row it is given.

    Args:
        unknown: tokens it never guesses.
    """

    aux_layers = (1, 2, 3)
    vocab_size = V
    weight_bytes = 0

    def __init__(self, unknown: Sequence[int] = ()) -> None:
        self.unknown = list(unknown)
        self.calls: list[int] = []
        self._model = HistoryModel(V)

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        assert torch.equal(states[:, 2:4], 2 * states[:, :2]) and torch.equal(states[:, 4:], 3 * states[:, :2])
        return states[:, :2]

    def forward(
        self,
        ids: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        segments: Sequence[Segment],
        wanted: torch.Tensor,
        cache: TokenCache,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.append(len(ids))
        assert torch.equal(features[:, 0].long(), positions), "a feature of another position"
        before = features[:, 1].long().tolist()
        for segment in segments:
            for row in range(segment.begin, segment.end):
                slot, branch = segment.first_slot + row - segment.begin, row - segment.begin - segment.num_straight
                number = (int(positions[row]) * BASE + before[row]) * BASE + int(ids[row])
                cache.write(segment.lane, slot, number)
                seen = range(slot + 1) if branch < 0 else [*range(segment.fork), *segment.paths[branch]]
                self._check([cache.tokens[segment.lane][each] for each in seen])
        logits = np.stack([self._model.logits([token, int(row)]) for token, row in zip(before, ids, strict=True)])
        logits[:, self.unknown] = -np.inf
        outputs = torch.stack([positions + 1, ids], 1).float()
        return torch.from_numpy(logits)[wanted], outputs[wanted]

    def _check(self, numbers: list[int]) -> None:
        """What a row sees must be one text in order, though positions may be missing."""
        assert FREE not in numbers
        rows = [(number // BASE**2, number // BASE % BASE, number % BASE) for number in numbers]
        for (position, _, following), (later, token, _) in pairwise(rows):
            assert position < later
            assert later > position + 1 or following == token, "rows of two texts"


def drafter_of(head: ExactHead | None = None, *, rows: int = 4096, width: int = 1) -> FeatureHeadDrafter:
    return FeatureHeadDrafter("eagle3", head or ExactHead(), TokenCache(max_rows=rows), tree_width=width)


@pytest.mark.parametrize("way", ["roomy", "chunks", "preempting"])
@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_every_draft_token_is_accepted(k: int, batch: int, way: str) -> None:
    jobs = mixed_jobs(batch, V, seed=batch)
    longest = max(len(job.prompt) for job in jobs) + 40
    cache = TokenCache(max_rows=longest + 30 if way == "preempting" else 4096)
    engine = make_engine(StatefulModel(V), cache, {"eagle3": drafter_of()}, k=k, rows=13 if way == "chunks" else 512)
    results = run(engine, jobs)
    for job, result in zip(jobs, results, strict=True):
        assert result.outputs[0].token_ids == plain(HistoryModel(V), job)
        assert result.stats.acceptance_rate == 1.0
    if way == "roomy":
        assert max(result.stats.steps for result in results) <= -(-39 // (k + 1)) + 1
    if way == "preempting" and batch == 8:
        assert sum(result.stats.preemptions for result in results) > 0


@pytest.mark.parametrize("k", [2, 5, 9])
@pytest.mark.parametrize("batch", [1, 8])
def test_trees_hold_what_a_chain_would(k: int, batch: int) -> None:
    jobs = mixed_jobs(batch, V, seed=batch)
    head = ExactHead()
    results = run(make_engine(StatefulModel(V), TokenCache(), {"eagle3": drafter_of(head, width=3)}, k=k), jobs)
    for job, result in zip(jobs, results, strict=True):
        assert result.outputs[0].token_ids == plain(HistoryModel(V), job)
    assert sum(result.stats.accepted_tokens for result in results) > 15 * batch


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_a_head_that_is_asked_now_and_then(seed: int, width: int) -> None:
    """Its drafts are cut or given up, and it falls behind; what it is told in between it computes later."""
    jobs = mixed_jobs(8, V, seed=seed)
    engine = make_engine(
        StatefulModel(V),
        TokenCache(max_rows=400),
        {"eagle3": drafter_of(rows=500, width=width)},
        k=5,
        rows=40,
        controller=ChaosController(seed),
    )
    for job, result in zip(jobs, run(engine, jobs), strict=True):
        assert result.outputs[0].token_ids == plain(HistoryModel(V), job)
        assert width > 1 or result.stats.acceptance_rate in (None, 1.0)


def test_tokens_it_does_not_know_end_no_draft() -> None:
    jobs = mixed_jobs(8, V, seed=3)
    results = run(make_engine(StatefulModel(V), TokenCache(), {"eagle3": drafter_of(ExactHead([2, 5, 11]))}), jobs)
    for job, result in zip(jobs, results, strict=True):
        assert result.outputs[0].token_ids == plain(HistoryModel(V), job)
    drafted = sum(result.stats.draft_tokens for result in results)
    assert 0.3 * drafted < sum(result.stats.accepted_tokens for result in results) < drafted


# Texts that begin alike.


def test_a_conversation_goes_on_from_what_the_head_knew() -> None:
    """Of the first turn only rows of its last step are missing; they are what the target told nobody."""
    first = [i * 5 % V for i in range(200)]
    answer = plain(HistoryModel(V), Job(first, GREEDY))
    second = [*first, *answer, 7, 8, 9]
    head, cache = ExactHead(), TokenCache()
    drafter = FeatureHeadDrafter("eagle3", head, cache)
    jobs = [Job(first, GREEDY), Job(second, WARM, arrives=60)]
    results = run(make_engine(StatefulModel(V), TokenCache(), {"eagle3": drafter}), jobs)
    assert results[1].num_cached_tokens == len(first) + len(answer) - 1
    assert [result.stats.acceptance_rate for result in results] == [1.0, 1.0]
    assert sum(head.calls) < 400, "the common text was computed twice"
    (kept,) = drafter._kept.values()
    assert len(second) - 5 < kept.num_rows < len(second) + 40
    assert cache.free_rows == 4096 - kept.num_rows


@pytest.mark.parametrize("prefixes", [True, False])
def test_choices_of_one_prompt_share_what_the_head_knows(prefixes: bool) -> None:
    prompt = [i * 7 % V for i in range(100)]
    head = ExactHead()
    jobs = [Job(prompt, replace(HOT, seed=9), number=number) for number in range(6)]
    drafters = {"eagle3": drafter_of(head)}
    results = run(make_engine(StatefulModel(V), TokenCache(), drafters, prefixes=prefixes), jobs)
    for job, result in zip(jobs, results, strict=True):
        assert result.outputs[0].token_ids == plain(HistoryModel(V), job)
        assert result.stats.acceptance_rate == 1.0
    assert prefixes == all(result.num_cached_tokens for result in results[1:])


def test_kept_rows_make_room_for_running_requests() -> None:
    """Lanes and rows of requests that are gone are taken when there are no others."""
    jobs = [Job([at, *([3] * 60)], replace(GREEDY, seed=at), arrives=20 * at) for at in range(12)]
    cache = TokenCache(num_lanes=2, max_rows=160)
    engine = make_engine(
        StatefulModel(V), TokenCache(), {"eagle3": FeatureHeadDrafter("eagle3", ExactHead(), cache)}, seqs=2
    )
    for result in run(engine, jobs):
        assert result.stats.acceptance_rate == 1.0 and result.stats.accepted_tokens > 20
    cache.check_integrity()


# One request by hand.


def states_of(tokens: Sequence[int], first: int, end: int) -> dict[int, torch.Tensor]:
    states = torch.tensor([[at, tokens[at]] for at in range(first, end)]).float().view(-1, 2)
    return {layer: layer * states for layer in (1, 2, 3)}


def tell(drafter: FeatureHeadDrafter, tokens: Sequence[int], first: int) -> None:
    end = len(tokens) - 1
    drafter.observe([Observation(0, tokens, 1, Draft(), (), first, states_of(tokens, first, end))])


def ask_for(tokens: Sequence[int], **fields: object) -> Ask:
    return replace(Ask(0, tokens, 3, GREEDY, seed=0, number=0, lane=0), **fields)


def test_rows_of_drafts_go_and_true_ones_come() -> None:
    """Six tokens, then three drafted, of which one is kept: computed again are that one and the bonus token's."""
    head, cache = ExactHead(), TokenCache()
    drafter = FeatureHeadDrafter("eagle3", head, cache)
    tokens = [5, 3, 8, 1, 1, 2]
    drafter.start(0, tokens, 6)
    tell(drafter, tokens, 0)
    assert drafter.rows_behind(0, 6) == 4
    (draft,) = drafter.propose([ask_for(tokens)], 100)
    assert len(draft) == 3 and head.calls[:3] == [5, 1, 1]
    assert cache.tokens[0][:5] == [(at * BASE + tokens[at]) * BASE + tokens[at + 1] for at in range(5)]
    assert cache.tokens[0][5:7] != [FREE, FREE] and cache.tokens[0][7] == FREE, "the last draft token was fed"
    tokens = [*tokens, draft.ids[0], 20]
    tell(drafter, tokens, 5)
    assert cache.tokens[0][5] == FREE
    assert drafter.rows_behind(0, 8) == 1
    drafter.propose([ask_for(tokens)], 100)
    assert head.calls[3] == 2
    assert cache.tokens[0][6] == (6 * BASE + tokens[6]) * BASE + 20
    drafter.release(0)
    assert cache.free_rows == 4096


def test_what_is_missing_is_computed_as_the_budget_allows() -> None:
    head = ExactHead()
    drafter = drafter_of(head)
    tokens = [at % V for at in range(31)]
    drafter.start(0, tokens, 31)
    tell(drafter, tokens, 0)
    behind = []
    for _ in range(3):
        behind.append(drafter.rows_behind(0, 31))
        (draft,) = drafter.propose([ask_for(tokens)], 12)
    assert behind == [29, 17, 5]
    assert head.calls == [12, 12, 6, 1, 1] and len(draft) == 3
    assert drafter.propose([ask_for(tokens)], 12) == [Draft()], "nothing new to begin from"


def test_states_that_wait_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_rows, "_MOST_WAITING", 20)
    head, cache = ExactHead(), TokenCache()
    drafter = FeatureHeadDrafter("eagle3", head, cache)
    tokens = [at % V for at in range(61)]
    drafter.start(0, tokens, 61)
    for end in (16, 31, 46, 61):
        tell(drafter, tokens[:end], max(0, end - 16))
    assert drafter.rows_behind(0, 61) == 19
    assert drafter.memory_bytes == 20 * 6 * 4
    (draft,) = drafter.propose([ask_for(tokens)], 100)
    assert head.calls[0] == 20 and len(draft) == 3
    assert cache.tokens[0][0] == (40 * BASE + tokens[40]) * BASE + tokens[41]


@pytest.mark.parametrize("params", [HOT, WARM, GREEDY], ids=["hot", "warm", "greedy"])
@pytest.mark.parametrize("coupled", [True, False])
def test_tokens_are_drawn_from_laws_over_the_draft_vocabulary(params: SamplingParams, coupled: bool) -> None:
    drafter = drafter_of(ExactHead([2, 5, 11]))
    tokens = [5, 3, 8, 1]
    drafter.start(0, tokens, 4)
    tell(drafter, tokens, 0)
    ask = ask_for(tokens, params=params, coupled=coupled, num_draft_tokens=6)
    (draft,) = drafter.propose([ask], 100)
    text, rows = list(tokens), []
    for token in draft.ids:
        logits = HistoryModel(V).logits(text).copy()
        logits[[2, 5, 11]] = -np.inf
        rows.append(torch.from_numpy(logits))
        text.append(token)
    choices = [ask.choice(draft.ids[:at]) for at in range(6)]
    assert list(draft.ids) == choose_rows(torch.stack(rows), choices)
    assert draft.confidence is not None and all(0 < each <= 1 for each in draft.confidence)
    if coupled:
        assert draft.probabilities is None
        return
    assert draft.probabilities is not None
    assert np.array_equal(draft.probabilities.numpy(), law_rows(torch.stack(rows), choices).rows)
    assert not draft.probabilities[:, [2, 5, 11]].any()


@pytest.mark.parametrize("gone", [False, True], ids=["running", "gone"])
@pytest.mark.parametrize("common", [40, 60, 99])
def test_rows_of_a_text_that_goes_on_otherwise(common: int, gone: bool) -> None:
    """The row of the last common position was made with the other text's next token: it is not taken over."""
    head, cache = ExactHead(), TokenCache()
    drafter = FeatureHeadDrafter("eagle3", head, cache)
    first = [at % V for at in range(100)]
    second = [*first[:common], *([23] * 10)]
    drafter.start(0, first, 100)
    tell(drafter, first, 0)
    drafter.propose([ask_for(first)], 200)
    if gone:
        drafter.release(0)
    drafter.start(1, second, len(second))
    drafter.observe([Observation(1, second, 1, Draft(), (), common, states_of(second, common, len(second) - 1))])
    (draft,) = drafter.propose([ask_for(second, request_id=1)], 200)
    assert len(draft) == 3
    rows = [number // BASE**2 for number in cache.tokens[1] if number != FREE]
    assert rows[: common + 8] == [*range(common - 1), *range(common, common + 9)]


def test_what_is_to_be_taken_over_is_not_given_up_for_it() -> None:
    head, cache = ExactHead(), TokenCache(max_rows=150)
    drafter = FeatureHeadDrafter("eagle3", head, cache)
    tokens = [at % V for at in range(110)]
    drafter.start(0, tokens[:100], 100)
    tell(drafter, tokens[:100], 0)
    drafter.propose([ask_for(tokens[:100])], 200)
    drafter.release(0)
    drafter.start(1, tokens, 110)
    drafter.observe([Observation(1, tokens, 1, Draft(), (), 100, states_of(tokens, 100, 109))])
    assert drafter.rows_behind(1, 110) == 8, "there was no room for a copy"
    (draft,) = drafter.propose([ask_for(tokens, request_id=1)], 200)
    assert len(draft) == 3
    drafter.release(1)
    cache.check_integrity()


def test_of_a_request_that_is_gone_few_states_wait() -> None:
    """Rows are kept; states, which are large, only as far as they may soon become rows, and none without any row."""
    cache = TokenCache()
    drafter = FeatureHeadDrafter("eagle3", ExactHead(), cache)
    tokens = [at % V for at in range(400)]
    for request, drafts in ((0, False), (1, True)):
        drafter.start(request, tokens[:100], 100)
        told = Observation(request, tokens[:100], 1, Draft(), (), 0, states_of(tokens, 0, 99))
        drafter.observe([told])
        if drafts:
            drafter.propose([ask_for(tokens[:100], request_id=request)], 200)
        later = Observation(request, tokens, 1, Draft(), (), 99, states_of(tokens, 99, 399))
        drafter.observe([later])
        drafter.release(request)
    assert drafter.memory_bytes == cache.bytes_in_use + 64 * 6 * 4
    assert cache.free_rows == 4096 - 99
    drafter.start(2, tokens, 400)
    drafter.observe([Observation(2, tokens, 1, Draft(), (), 390, states_of(tokens, 390, 399))])
    assert drafter.rows_behind(2, 400) == 64 + 9 - 1
    (draft,) = drafter.propose([ask_for(tokens, request_id=2)], 200)
    assert len(draft) == 3


def test_no_lane_no_room_no_draft() -> None:
    cache = TokenCache(num_lanes=1, max_rows=9)
    drafter = FeatureHeadDrafter("eagle3", ExactHead(), cache)
    tokens = [1, 2, 3, 4]
    for request in (0, 1):
        drafter.start(request, tokens, 4)
    tell(drafter, tokens, 0)
    assert drafter.rows_behind(0, 4) == 2 and drafter.rows_behind(1, 4) is None
    asks = [ask_for(tokens, num_draft_tokens=8), ask_for(tokens, request_id=1), ask_for(tokens, num_draft_tokens=7)]
    assert [len(draft) for draft in drafter.propose(asks[:2], 9)] == [0, 0]
    assert [len(draft) for draft in drafter.propose(asks[2:], 9)] == [7]
    drafter.release(1)
    drafter.release(0)
