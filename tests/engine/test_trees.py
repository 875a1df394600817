"""Drafts with branches: the same tokens whatever their shape, the path kept to its leaf, the books right."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

import outpace.engine.engine as engine_module
import outpace.engine.pack as pack_module
import outpace.engine.verifying as verifying_module
from outpace.control.fixed import FixedController
from outpace.decisions import Allotment, Offer, StepFacts, Wish
from outpace.drafters.draft_model import DraftModelDrafter
from outpace.params import SamplingParams
from outpace.structured import StructuredOutputs
from outpace.types import Ask, Choice, Draft, Segment

from ..trees import chain_of, depths_of
from .chaos import ChaosController
from .fakes import HistoryModel, ScriptedDrafter, TokenCache, bush_drafter
from .harness import GREEDY, HOT, WARM, Job, make_engine, mixed_jobs, plain, run

V = 24


def next_texts(model: HistoryModel, jobs: Sequence[Job]) -> Callable[[Sequence[int]], list[int]]:
    texts = [job.prompt + plain(model, job) for job in jobs]
    return lambda tokens: next((text for text in texts if text[: len(tokens)] == list(tokens)), [])


def tree_drafter(errors: float = 0.3, width: int = 3) -> DraftModelDrafter:
    return DraftModelDrafter(HistoryModel(V, errors=errors), TokenCache(), max_model_len=512, tree_width=width)


def identical(k: int = 6, accepted: int = 0) -> bool:
    """A small identity run with trees that are right in part: whether it finds them harmless."""
    model = HistoryModel(V, order=3)
    jobs = mixed_jobs(4, V, seed=2)
    drafter = bush_drafter(V, next_texts(model, jobs))
    try:
        results = run(make_engine(model, TokenCache(), {"bush": drafter}, k=k), jobs)
    except AssertionError:
        return False
    assert sum(result.stats.accepted_tokens for result in results) >= accepted
    return all(result.outputs[0].token_ids == plain(model, job) for job, result in zip(jobs, results, strict=True))


@pytest.mark.parametrize("preempt", [False, True], ids=["roomy", "preempting"])
@pytest.mark.parametrize("rows", [512, 13], ids=["one pass", "chunks"])
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_trees_that_are_cut_and_given_up_change_no_token(batch: int, rows: int, preempt: bool) -> None:
    model = HistoryModel(V, order=3)
    jobs = mixed_jobs(batch, V, seed=batch)
    longest = max(len(job.prompt) for job in jobs) + 40
    cache = TokenCache(max_rows=longest + 30 if preempt else 4096)
    drafters = {"bush": bush_drafter(V, next_texts(model, jobs)), "draft_model": tree_drafter()}
    controller = ChaosController(batch)
    engine = make_engine(model, cache, drafters, k=10, rows=rows, controller=controller)
    results = run(engine, jobs)
    for job, result in zip(jobs, results, strict=True):
        assert result.outputs[0].token_ids == plain(model, job)
    branched = [seen for facts in controller.facts for seen in facts.drafts if seen.offer.parents is not None]
    assert branched and any(seen.num_accepted for seen in branched)
    for seen in branched:
        parents = seen.offer.parents
        assert parents is not None and len(parents) == seen.offer.num_tokens
        assert all(-1 <= parent < node for node, parent in enumerate(parents))
    assert controller.widths == {1, 2, 3}, "as wide as it was told"
    cut = [seen for facts in controller.facts for seen in facts.drafts if seen.whole is not None]
    assert any(len(seen.followed) > seen.num_accepted for seen in cut), "the text went along what was not verified"
    for seen in cut:
        assert seen.whole is not None and seen.whole.parents is not None
        assert seen.whole.num_tokens >= seen.offer.num_tokens
        assert not seen.followed or chain_of(seen.whole.parents, seen.followed[-1]) == list(seen.followed)
        assert seen.num_accepted <= len(seen.followed) <= seen.num_accepted + 1


def two_wide(chain: Sequence[int], right_first: bool) -> Draft:
    """Every right token with a wrong sibling, which has a child."""
    ids: list[int] = []
    parents: list[int] = []
    at = -1
    for token in chain:
        first = len(ids)
        ids += [token, (token + 1) % V, token] if right_first else [(token + 1) % V, token, token]
        parents += [at, at, first + right_first]
        at = first + (not right_first)
    return Draft(tuple(ids), tuple(parents), ("x",) * len(ids))


@pytest.mark.parametrize("right_first", [True, False])
@pytest.mark.parametrize("params", [GREEDY, WARM, HOT], ids=["greedy", "warm", "hot"])
def test_a_right_token_among_siblings_is_kept_to_the_leaf(params: SamplingParams, right_first: bool) -> None:
    model = HistoryModel(V)
    jobs = [Job([index, 2, 3], replace(params, max_tokens=40)) for index in range(3)]
    text_of = next_texts(model, jobs)

    def script(ask: Ask) -> Draft:
        start = len(ask.token_ids)
        chain = text_of(ask.token_ids)[start : start + ask.num_draft_tokens // 3]
        return two_wide(chain, right_first)

    engine = make_engine(model, TokenCache(), {"x": ScriptedDrafter("x", script)}, k=12)
    results = run(engine, jobs)
    for job, result in zip(jobs, results, strict=True):
        assert result.outputs[0].token_ids == plain(model, job)
        assert result.stats.accepted_tokens * 3 == result.stats.draft_tokens
        first, *_, behind_the_last_right = result.stats.per_position or [0.0]
        assert (first, behind_the_last_right, len(result.stats.accepted_at)) == (1.0, 0.0, 5)
    # Four tokens and the bonus a pass, until fewer than twelve rows may follow.
    assert len(model.rows_per_call) <= 40 / 5 + 3


def test_the_target_as_its_own_tree_is_kept_as_deep_as_it_goes() -> None:
    """Its first child is right at every node, and the nodes come in order of their chances."""
    jobs = [Job([i, 3], replace(params, max_tokens=200)) for i in range(3) for params in (GREEDY, WARM, HOT)]
    results = run(make_engine(HistoryModel(V), TokenCache(), {"tree": tree_drafter(0.0)}, k=8), jobs)
    for job, result in zip(jobs, results, strict=True):
        assert result.outputs[0].token_ids == plain(HistoryModel(V), job)
        assert result.stats.per_position is not None and result.stats.per_position[0] == 1.0
        assert result.stats.mean_acceptance_length is not None and result.stats.mean_acceptance_length > 3


class Watching(FixedController):
    """Remembers what was offered and verified."""

    def __init__(self, most: int = 99) -> None:
        self.most = most
        self.offers: list[Offer] = []
        self.facts: list[StepFacts] = []

    def keep(self, offers: Sequence[Offer], other_rows: int, other_decoding: int = 0) -> list[int]:
        self.offers += offers
        return [min(self.most, offer.num_tokens) for offer in offers]

    def observe(self, facts: StepFacts) -> None:
        self.facts.append(facts)


def test_nodes_come_in_order_of_their_chances_so_that_a_prefix_is_the_best_subtree() -> None:
    model, controller = HistoryModel(V), Watching(most=3)
    jobs = [Job([i, 3], WARM) for i in range(4)]
    results = run(make_engine(model, TokenCache(), {"tree": tree_drafter()}, k=8, controller=controller), jobs)
    for job, result in zip(jobs, results, strict=True):
        assert result.outputs[0].token_ids == plain(model, job)
    assert 8 in {offer.num_tokens for offer in controller.offers}
    for offer in controller.offers:
        parents = offer.parents or tuple(range(-1, offer.num_tokens - 1))
        assert offer.confidence is not None
        survival: list[float] = []
        for parent, chance in zip(parents, offer.confidence, strict=True):
            survival.append(chance * (survival[parent] if parent >= 0 else 1.0))
        assert survival == sorted(survival, reverse=True)
    verified = [seen.offer for facts in controller.facts for seen in facts.drafts]
    assert {offer.num_tokens for offer in verified} <= {1, 2, 3}
    calls = [call for facts in controller.facts for call in facts.calls]
    assert max(call.num_rounds for call in calls) <= 8


@pytest.mark.parametrize("verification", ["coupled", "standard", "block"])
def test_rejection_sampling_takes_trees_or_chains(verification: str) -> None:
    """Its laws are tested elsewhere; greedily there is one right text. Block verification sees chains only."""
    model, controller = HistoryModel(V), Watching()
    jobs = [replace(job, params=GREEDY) for job in mixed_jobs(5, V, seed=1)]
    drafters = {"bush": bush_drafter(V, next_texts(model, jobs))}
    engine = make_engine(model, TokenCache(), drafters, k=8, controller=controller, verification=verification)
    for job, result in zip(jobs, run(engine, jobs), strict=True):
        assert result.outputs[0].token_ids == plain(model, job)
    branched = [seen for facts in controller.facts for seen in facts.drafts if seen.offer.parents is not None]
    assert bool(branched) == (verification != "block")


def test_a_target_that_takes_no_trees_gets_chains() -> None:
    model, controller = HistoryModel(V), Watching()
    model.takes_trees = False
    jobs = mixed_jobs(3, V, seed=4)
    drafters = {"bush": bush_drafter(V, next_texts(model, jobs))}
    engine = make_engine(model, TokenCache(), drafters, k=8, controller=controller)
    for job, result in zip(jobs, run(engine, jobs), strict=True):
        assert result.outputs[0].token_ids == plain(model, job)
    assert all(seen.offer.parents is None for facts in controller.facts for seen in facts.drafts)


def offered(job: Job, draft: Draft, *, eos: Sequence[int] = (), k: int = 12) -> Draft:
    """What of a draft for the second token of a job is verified."""
    engine = make_engine(HistoryModel(V), TokenCache(), {"x": ScriptedDrafter("x", lambda ask: draft)}, k=k, eos=eos)
    seen: list[Draft] = []
    verify = verifying_module.verify_blocks

    def watch(blocks: Sequence[pack_module.Block], logits: object) -> object:
        seen.extend(block.draft for block in blocks)
        return verify(blocks, logits)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "verify_blocks", watch)
        run(engine, [job])
    return seen[0]


def test_what_hangs_below_a_stop_token_goes() -> None:
    job = Job([1, 2], replace(GREEDY, max_tokens=30, stop_token_ids=(7,)))
    draft = Draft((7, 3, 5, 7, 4, 9), (-1, -1, 0, 1, 3, 1), tuple("abcdef"))
    kept = offered(job, draft, eos=(9,))
    assert (kept.ids, kept.parents, kept.sources) == ((7, 3, 7, 9), (-1, -1, 1, 1), ("a", "b", "d", "f"))


def test_tokens_held_back_by_min_tokens_go_with_what_hangs_below() -> None:
    job = Job([1, 2], replace(GREEDY, max_tokens=30, min_tokens=2, stop_token_ids=(7,)))
    draft = Draft((7, 3, 5, 7, 4, 7), (-1, -1, 0, 1, 1, 4), tuple("abcdef"))
    kept = offered(job, draft)
    assert (kept.ids, kept.parents) == ((3, 4, 7), (-1, 0, 1))


def test_paths_that_a_grammar_refuses_go_and_the_others_stay() -> None:
    """A grammar is asked for every path on its own."""
    job = Job([1, 2], replace(GREEDY, max_tokens=8, structured_outputs=StructuredOutputs(regex="a grammar")))
    engine = make_engine(HistoryModel(V), TokenCache(), {}, eos=(0,))
    source = random.Random(1)
    checked = 0
    for _ in range(200):
        request = engine.prepare(job.prompt, job.params)
        assert request.rules is not None
        parents = [max(-1, node - source.randint(1, 3)) for node in range(9)]
        ids = [source.randrange(V) for _ in parents]
        for node, parent in enumerate(parents):
            before = [ids[each] for each in chain_of(parents, parent)] if parent >= 0 else []
            legal = [token for token in range(V) if request.rules.count_legal([*before, token]) == len(before) + 1]
            if legal and source.random() < 0.8:
                ids[node] = source.choice(legal)
        draft = Draft(tuple(ids), tuple(parents), ("x",) * 9)
        kept = engine.drafting._legal(draft, request, 9)
        wanted = []
        for node in range(9):
            path = [ids[each] for each in chain_of(parents, node)]
            ended = any(token in request.stop_ids for token in path[:-1])
            if request.rules.count_legal(path) == len(path) and not ended:
                wanted.append(path)
        found = [[kept.ids[each] for each in chain_of(kept.parents, node)] for node in range(len(kept))]
        assert found == wanted
        checked += 0 < len(wanted) < 9
    assert checked > 50


# Faults planted on purpose.


def test_without_a_fault_the_check_passes() -> None:
    assert identical(accepted=40)


def test_a_slot_used_as_a_position_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise and penalties of the wrong position, in the choice of a row."""
    real = verifying_module.choices_of

    def by_row(block: pack_module.Block) -> list[Choice]:
        first = len(block.turn.request.token_ids)
        return [replace(choice, position=first + row) for row, choice in enumerate(real(block))]

    monkeypatch.setattr(verifying_module, "choices_of", by_row)
    assert not identical()


def test_positions_that_count_slots_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = pack_module._segment

    def straight(*args: object) -> Segment:
        segment = real(*args)  # type: ignore[arg-type]
        return replace(segment, paths=())

    monkeypatch.setattr(pack_module, "_segment", straight)
    assert not identical()


@pytest.mark.parametrize("shift", [-1, 1])
def test_compaction_off_by_one_is_noticed(shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = TokenCache.compact

    def shifted(self: TokenCache, lane: int, first: int, slots: Sequence[int]) -> None:
        last = self._reserved[lane] - 1
        real(self, lane, first, sorted({min(max(slot + shift, first + i), last) for i, slot in enumerate(slots)}))

    monkeypatch.setattr(TokenCache, "compact", shifted)
    assert not identical()


def test_no_compaction_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TokenCache, "compact", lambda *args: None)
    assert not identical()


def test_a_row_that_sees_a_sibling_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slot before a node's own, be it its parent or not."""
    real = pack_module._segment

    def seeing(*args: object) -> Segment:
        segment = real(*args)  # type: ignore[arg-type]
        paths = tuple((*path[:-2], path[-1] - 1, path[-1]) if len(path) > 1 else path for path in segment.paths)
        return replace(segment, paths=paths)

    monkeypatch.setattr(pack_module, "_segment", seeing)
    assert not identical()


def test_histories_by_row_instead_of_by_path_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A walk that takes the token of the row before."""
    real = verifying_module.coupled.verify
    monkeypatch.setattr(
        verifying_module.coupled, "verify", lambda draft, chosen: real(draft, [chosen[0], *chosen[:-1]])
    )
    assert not identical()


class Forgetful(TokenCache):
    """Keeps the rows that come first, whatever path was accepted."""

    def compact(self, lane: int, first: int, slots: Sequence[int]) -> None:
        pass


@pytest.mark.parametrize("cache", [TokenCache, Forgetful])
def test_a_draft_cache_that_keeps_the_wrong_branch_is_noticed(cache: type[TokenCache]) -> None:
    """The text stays right; the target itself grows trees whose first token is right, behind the right rows."""
    jobs = [Job([i, 3], replace(WARM, max_tokens=80)) for i in range(3)]
    drafter = DraftModelDrafter(HistoryModel(V, order=3), cache(), max_model_len=512, tree_width=3)
    results = run(make_engine(HistoryModel(V, order=3), TokenCache(), {"tree": drafter}, k=8), jobs)
    firsts = []
    for job, result in zip(jobs, results, strict=True):
        assert result.outputs[0].token_ids == plain(HistoryModel(V, order=3), job)
        assert result.stats.per_position is not None
        firsts.append(result.stats.per_position[0])
    assert (min(firsts) == 1.0) == (cache is TokenCache)


def test_depths_of_drafts() -> None:
    draft = Draft((1, 2, 3, 4), (-1, 0, -1, 1), ("x",) * 4)
    assert draft.depth == 3 and draft.paths == [(0,), (0, 1), (2,), (0, 1, 3)] and not draft.is_chain
    assert depths_of(draft.parents) == [0, 1, 0, 2]
    assert Draft().is_chain and Draft().depth == 0


@pytest.mark.parametrize("width", [1, 2, 3])
def test_a_drafter_is_as_wide_as_it_is_asked_to_be(width: int) -> None:
    class Narrow(Watching):
        def allot(
            self, wishes: Sequence[Wish], offers: Sequence[Offer | None], other_rows: int, other_decoding: int = 0
        ) -> list[Allotment]:
            assert all(wish.widths == {"draft_model": 3} for wish in wishes)
            return [Allotment(drafter="draft_model", num_tokens=wish.most, width=width) for wish in wishes]

    controller = Narrow()
    jobs = [Job([i, 3], WARM) for i in range(3)]
    engine = make_engine(HistoryModel(V), TokenCache(), {"draft_model": tree_drafter()}, k=8, controller=controller)
    for job, result in zip(jobs, run(engine, jobs), strict=True):
        assert result.outputs[0].token_ids == plain(HistoryModel(V), job)
    parents = [offer.parents or tuple(range(-1, offer.num_tokens - 1)) for offer in controller.offers]
    assert max(Counter(each).most_common(1)[0][1] for each in parents) == width
    calls = [call for facts in controller.facts for call in facts.calls]
    assert all(call.num_wide == (call.num_requests if width > 1 else 0) for call in calls)


def test_drafts_for_rejection_sampling_are_never_asked_to_branch() -> None:
    for verification in ("standard", "block"):
        drafters = {"draft_model": tree_drafter()}
        engine = make_engine(HistoryModel(V), TokenCache(), drafters, verification=verification)
        assert not engine.prepare([1, 2], WARM).plan.widths
