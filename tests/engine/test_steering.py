"""Several drafters for one request, and a controller over them: whatever it decides, the tokens are the same."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from outpace.control.fixed import FixedController
from outpace.decisions import Allotment, DraftCall, Offer, StepFacts, Wish
from outpace.drafters.draft_model import DraftModelDrafter
from outpace.drafters.ngram import NgramDrafter
from outpace.engine.engine import Engine
from outpace.engine.scheduler import Turn
from outpace.params import SpeculationParams
from outpace.protocols import Cache, Controller, Drafter
from outpace.types import Ask, Draft, ForwardResult, Pack
from tests.engine.chaos import ChaosController
from tests.engine.fakes import HistoryModel, TokenCache
from tests.engine.harness import GREEDY, WARM, Job, make_engine, mixed_jobs, plain, run

V = 24


def three(model: HistoryModel) -> dict[str, Drafter]:
    """One that looks things up, and two that compute, one of them better than the other."""
    good, bad = (HistoryModel(V, order=model.order, errors=errors) for errors in (0.2, 0.7))
    worse = DraftModelDrafter(bad, TokenCache(), max_model_len=512)
    worse.name = "worse"  # type: ignore[misc]
    return {
        "ngram": NgramDrafter(1, 4),
        "draft_model": DraftModelDrafter(good, TokenCache(), max_model_len=512),
        "worse": worse,
    }


def engine_of(controller: Controller | None, **options: object) -> Engine:
    model = HistoryModel(V)
    return make_engine(model, TokenCache(), three(model), controller=controller, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [512, 13], ids=["one pass", "chunks"])
@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("seed", range(4))
def test_no_decision_changes_a_token(seed: int, batch: int, rows: int) -> None:
    model = HistoryModel(V)
    jobs = mixed_jobs(batch, V, seed=seed)
    longest = max(len(job.prompt) for job in jobs) + 40
    cache = TokenCache(max_rows=longest + 30 if seed == 3 else 4096)  # the last one preempts
    controller = ChaosController(seed)
    engine = make_engine(model, cache, three(model), k=6, rows=rows, controller=controller)
    results = run(engine, jobs)
    for job, result in zip(jobs, results, strict=True):
        assert result.outputs[0].token_ids == plain(model, job)
    assert set(controller.chosen) >= {"ngram", "draft_model", "worse"} or batch == 1
    assert not controller.known, "requests that have gone are not forgotten"
    told = {
        name: (sum(c.draft_tokens for c in found), sum(c.accepted_tokens for c in found))
        for name, found in (
            (name, [r.stats.by_drafter[name] for r in results if name in r.stats.by_drafter]) for name in three(model)
        )
    }
    seen = [draft for facts in controller.facts for draft in facts.drafts]
    for name, (drafted, accepted) in told.items():
        mine = [draft for draft in seen if draft.offer.drafter == name]
        assert sum(draft.offer.num_tokens for draft in mine) == drafted
        assert sum(draft.num_accepted for draft in mine) >= accepted  # a text may end within what was accepted
    assert sum(result.stats.draft_tokens for result in results) == sum(drafted for drafted, _ in told.values())


@pytest.mark.parametrize("verification", ["standard", "block"])
def test_rejection_sampling_under_any_decision_ends_and_keeps_its_books(verification: str) -> None:
    """Its laws are tested elsewhere; here, that what was drawn to be verified is never cut."""
    model = HistoryModel(V)
    jobs = mixed_jobs(5, V, seed=1)
    controller = ChaosController(1)
    engine = make_engine(model, TokenCache(), three(model), k=5, controller=controller, verification=verification)
    drawn: Counter[tuple[str, int]] = Counter()
    propose = engine.drafting.propose

    def watched(name: str, asks: Sequence[Ask], turns: Sequence[Turn], row_budget: int) -> list[Draft]:
        drafts = propose(name, asks, turns, row_budget)
        if name != "ngram":
            assert all(draft.probabilities is not None for draft in drafts if draft)
            drawn.update((name, len(draft)) for draft in drafts if draft)
        return drafts

    engine.drafting.propose = watched  # type: ignore[method-assign]
    for job, result in zip(jobs, run(engine, jobs), strict=True):
        if job.params.temperature == 0:
            assert result.outputs[0].token_ids == plain(model, job)
    offers = [seen.offer for facts in controller.facts for seen in facts.drafts]
    assert all(offer.fixed == (offer.drafter != "ngram") for offer in offers)
    assert Counter((offer.drafter, offer.num_tokens) for offer in offers if offer.fixed) == drawn and len(drawn) > 4


def test_the_free_drafter_goes_first_and_the_others_help_where_it_has_nothing() -> None:
    engine = engine_of(None)
    (result,) = run(engine, [Job([1, 2, 3], replace(GREEDY, max_tokens=60))])
    drafted = {name: counts.drafts for name, counts in result.stats.by_drafter.items()}
    assert set(drafted) == {"ngram", "draft_model"}
    assert sum(drafted.values()) == result.stats.drafts


@pytest.mark.parametrize("method", ["ngram", "draft_model", "worse"])
def test_a_request_that_names_a_drafter_gets_that_alone(method: str) -> None:
    engine = engine_of(None)
    jobs = [Job([1, 2, 3], WARM, SpeculationParams(method=method)), Job([4, 5, 6], WARM)]
    named, _ = run(engine, jobs)
    assert set(named.stats.by_drafter) == {method}


def test_rules_of_verification_are_not_mixed_in_one_request() -> None:
    model = HistoryModel(V)
    engine = make_engine(model, TokenCache(), three(model))
    engine.drafting._verification.update(ngram="coupled", draft_model="block", worse="coupled")
    plan = engine.prepare([1, 2], WARM).plan
    assert (plan.free, plan.computing, plan.verification) == ("ngram", ("worse",), "coupled")
    plan = engine.prepare([1, 2], WARM, SpeculationParams(method="draft_model")).plan
    assert (plan.free, plan.computing, plan.verification) == (None, ("draft_model",), "block")


def test_a_ceiling_of_zero_reserves_nothing_and_asks_nobody() -> None:
    class Off(ChaosController):
        def ceilings(self, wishes: Sequence[Wish], other_rows: int, other_decoding: int = 0) -> list[int]:
            return [0] * len(wishes)

        def allot(
            self, wishes: Sequence[Wish], offers: Sequence[Offer | None], other_rows: int, other_decoding: int = 0
        ) -> list[Allotment]:
            # only requests whose last prompt rows are computed in this step, which had no ceiling
            assert all(offer is None or offer.drafter == "ngram" for offer in offers)
            return [Allotment() for _ in wishes]

    model = HistoryModel(V)
    jobs = mixed_jobs(4, V, seed=2)
    results = run(make_engine(model, TokenCache(), three(model), controller=Off()), jobs)
    for job, result in zip(jobs, results, strict=True):
        assert result.outputs[0].token_ids == plain(model, job)
        assert result.stats.drafts == 0


def test_how_far_a_drafter_is_behind() -> None:
    """A prompt at first; the tokens that others drafted later."""
    behind: list[dict[str, int]] = []

    class Watching(ChaosController):
        def allot(
            self, wishes: Sequence[Wish], offers: Sequence[Offer | None], other_rows: int, other_decoding: int = 0
        ) -> list[Allotment]:
            behind.append(dict(wishes[0].computing))
            return [Allotment(drafter="draft_model" if len(behind) in (3, 4) else None, num_tokens=1) for _ in wishes]

        def keep(self, offers: Sequence[Offer], other_rows: int, other_decoding: int = 0) -> list[int]:
            return [0] * len(offers)

    model = HistoryModel(V)
    engine = make_engine(model, TokenCache(), {"draft_model": three(model)["draft_model"]}, controller=Watching())
    run(engine, [Job(list(range(10)), replace(GREEDY, max_tokens=8))])
    # ten rows of the prompt, one more a step; then caught up, so one row a step is computed as it drafts
    assert [found["draft_model"] for found in behind] == [10, 11, 12, 0, 0, 1]


def test_a_step_that_fails_is_abandoned_before_anything_else_is_decided() -> None:
    told: list[str] = []

    class Listening(FixedController):
        def allot(
            self, wishes: Sequence[Wish], offers: Sequence[Offer | None], other_rows: int, other_decoding: int = 0
        ) -> list[Allotment]:
            told.append("allot")
            return super().allot(wishes, offers, other_rows, other_decoding)

        def observe(self, facts: StepFacts) -> None:
            told.append("observe")
            assert not facts.drafts or told[-2] == "allot"

        def abandon(self) -> None:
            told.append("abandon")

    model = HistoryModel(V)
    engine = make_engine(model, TokenCache(), three(model), controller=Listening())
    request_id = engine.submit(engine.prepare([1, 2, 3], GREEDY))
    forward, calls = model.forward, 0

    def interrupted(pack: Pack, cache: Cache) -> ForwardResult:
        nonlocal calls
        calls += 1
        if calls % 5 == 3:
            raise KeyboardInterrupt
        return forward(pack, cache)

    model.forward = interrupted  # type: ignore[method-assign]
    failed = 0
    while engine.has_work:
        try:
            for output in engine.step():
                if output.finish_reason:
                    assert engine.take(request_id).outputs[0].token_ids == plain(
                        HistoryModel(V), Job([1, 2, 3], GREEDY)
                    )
        except KeyboardInterrupt:
            failed += 1
            assert told[-1] == "abandon"
    assert failed == told.count("abandon") and told.count("allot") > failed > 1


def test_ceilings_are_asked_for_with_the_prompts_of_the_step() -> None:
    """Beside prompts nobody computes drafts, so no rows of the step have to be set aside for them."""
    told: list[tuple[int, int]] = []

    class Listening(FixedController):
        def ceilings(self, wishes: Sequence[Wish], other_rows: int, other_decoding: int = 0) -> list[int]:
            told.append((other_rows, other_decoding))
            return super().ceilings(wishes, other_rows, other_decoding)

    model = HistoryModel(V)
    engine = make_engine(model, TokenCache(), three(model), rows=32, controller=Listening())
    run(engine, [Job([1], replace(GREEDY, max_tokens=30)), Job([2] * 75, replace(GREEDY, max_tokens=2), arrives=3)])
    beside = [rows for rows, decoding in told if rows > decoding]
    assert beside[0] == 31 and len(beside) >= 3, "as much of the prompt as a step can take"
    assert (0, 0) in told


class AlwaysAsking(FixedController):
    """Asks for one token of the draft model wherever it may, which then computes no row of a draft."""

    def __init__(self) -> None:
        super().__init__()
        self.wishes: list[Wish] = []
        self.calls: list[DraftCall] = []

    def allot(
        self, wishes: Sequence[Wish], offers: Sequence[Offer | None], other_rows: int, other_decoding: int = 0
    ) -> list[Allotment]:
        self.wishes += wishes
        return [Allotment(drafter="draft_model", num_tokens=1) if wish.computing else Allotment() for wish in wishes]

    def observe(self, facts: StepFacts) -> None:
        super().observe(facts)
        self.calls += facts.calls


def test_a_drafter_that_cannot_draft_is_not_wished_for_and_what_it_computed_is_what_is_booked() -> None:
    """A draft model with a context of 20 tokens beside a text of 41; a budget of 8 rows a step, so it catches up."""
    draft = HistoryModel(V, errors=0.2)
    drafters: dict[str, Drafter] = {
        "ngram": NgramDrafter(1, 4),
        "draft_model": DraftModelDrafter(draft, TokenCache(), max_model_len=20),
    }
    model, controller = HistoryModel(V), AlwaysAsking()
    engine = make_engine(model, TokenCache(), drafters, rows=9, seqs=2, controller=controller)
    job = Job(list(range(11)), replace(GREEDY, max_tokens=30))
    (result,) = run(engine, [job])
    assert result.outputs[0].token_ids == plain(model, job)
    lengths = [41 - wish.remaining for wish in controller.wishes]
    asked = [length for length, wish in zip(lengths, controller.wishes, strict=True) if wish.computing]
    assert asked and max(asked) <= 20 < max(lengths)
    assert all(wish.free == "ngram" for wish in controller.wishes)
    assert len(controller.calls) == len(asked) == sum(11 < length <= 20 for length in lengths)
    booked = [call.catch_up_rows + call.num_rounds for call in controller.calls]  # a round is the last token's row
    assert booked == draft.rows_per_call and len(booked) >= 3
    assert controller.calls[0].num_rounds == 0 < controller.calls[0].catch_up_rows, "a part of the prompt at first"


def test_requests_for_which_a_drafter_has_no_lane_do_without_it() -> None:
    draft = DraftModelDrafter(HistoryModel(V), TokenCache(num_lanes=1), max_model_len=512)
    model, controller = HistoryModel(V), AlwaysAsking()
    jobs = [Job([1, 2, 3], GREEDY), Job([4, 5, 6], GREEDY)]
    results = run(make_engine(model, TokenCache(), {"draft_model": draft}, controller=controller), jobs)
    assert [result.outputs[0].token_ids for result in results] == [plain(model, job) for job in jobs]
    assert len({wish.request_id for wish in controller.wishes}) == 1 and controller.wishes[0].computing
    assert [result.stats.drafts > 0 for result in results] == [True, False]


class SlowLookups(NgramDrafter):
    """Takes its time."""

    def propose(self, asks: Sequence[Ask], row_budget: int) -> list[Draft]:
        time.sleep(0.02)
        return super().propose(asks, row_budget)


def test_the_time_of_looking_up_is_told_apart_from_that_of_the_model() -> None:
    told: list[StepFacts] = []

    class Listening(FixedController):
        def observe(self, facts: StepFacts) -> None:
            told.append(facts)

    engine = make_engine(HistoryModel(V), TokenCache(), {"ngram": SlowLookups(1, 4)}, controller=Listening())
    began = time.perf_counter()
    run(engine, [Job([1, 2, 3, 1, 2, 3], replace(GREEDY, max_tokens=8))])
    passed = time.perf_counter() - began
    asked = [facts for facts in told if facts.lookups]
    assert asked and told[-1].lookups == 0.0  # the last token is never drafted
    assert all(facts.lookups >= 0.02 for facts in asked)
    assert sum(facts.seconds + facts.lookups for facts in told) <= passed
