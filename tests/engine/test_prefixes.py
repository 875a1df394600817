"""Rows of earlier requests: found where they are right, never where they are not, and in nobody's way."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

import outpace.engine.prefixes as prefixes_module
from outpace.common_length import common_length
from outpace.drafters.draft_model import DraftModelDrafter
from outpace.drafters.ngram import NgramDrafter
from outpace.engine.engine import Engine
from outpace.engine.prefixes import SHORTEST, WORTH_WAITING
from outpace.errors import OutpaceError
from outpace.params import SpeculationParams
from outpace.protocols import Cache, Drafter, DrafterNeeds
from outpace.types import Ask, Draft, ForwardResult, Pack

from .fakes import FREE, HistoryModel, ScriptedDrafter, TokenCache, random_drafter
from .harness import GREEDY, HOT, WARM, Job, make_engine, plain, run, run_all

V = 24
SHORT = replace(WARM, max_tokens=6)


def tokens(count: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(V) for _ in range(count)]


def ask(engine: Engine, prompt: list[int], **changes: object) -> tuple[list[int], int]:
    """Runs one request alone, checks it, and returns its text with the prompt, and how much of that was cached."""
    job = Job(prompt, replace(SHORT, **changes))  # type: ignore[arg-type]
    (result,) = run(engine, [job])
    check_kept(engine)
    model = engine.model
    assert isinstance(model, HistoryModel)
    assert result.outputs[0].token_ids == plain(HistoryModel(V, model.order), job)
    return prompt + result.outputs[0].token_ids, result.num_cached_tokens


def kept(engine: Engine) -> list[list[int]]:
    """Tokens of kept rows, least recently used first."""
    return list(engine._prefixes._kept.values())


def check_kept(engine: Engine) -> None:
    """Kept lanes hold the rows of their tokens and nothing else; together with free rows they are all."""
    engine.check_integrity()
    assert isinstance(engine.cache, TokenCache)
    for lane, ids in engine._prefixes._kept.items():
        assert [token for token in engine.cache.tokens[lane] if token != FREE] == ids
    if not engine.has_work:
        assert engine.cache.free_rows + sum(map(len, kept(engine))) == engine.free_rows == engine._num_rows


# What is found.


def test_the_next_turn_computes_what_is_new() -> None:
    model = HistoryModel(V)
    engine = make_engine(model, TokenCache(), {})
    text, cached = ask(engine, tokens(50))
    assert cached == 0
    for turn in range(3):
        before = len(text)
        model.rows_per_call.clear()
        text, cached = ask(engine, text + tokens(7, seed=turn))
        assert cached == before - 1  # the last token of an answer is never computed
        assert model.rows_per_call == [8, *[1] * 5]
    assert len(kept(engine)) == 1


def test_a_prompt_that_is_there_as_a_whole_computes_one_row() -> None:
    model = HistoryModel(V)
    engine = make_engine(model, TokenCache(), {})
    ask(engine, tokens(50))
    model.rows_per_call.clear()
    assert ask(engine, tokens(50))[1] == 49
    assert model.rows_per_call == [1] * 6
    assert ask(engine, tokens(20))[1] == 19
    assert ask(engine, tokens(50), seed=12)[1] == 49
    assert ask(engine, tokens(50), temperature=0.0)[1] == 49


@pytest.mark.parametrize("common", [0, 1, SHORTEST - 1, SHORTEST, 30, 49])
def test_only_what_is_common_is_reused(common: int) -> None:
    engine = make_engine(HistoryModel(V), TokenCache(), {})
    first = tokens(50)
    ask(engine, first)
    other = [*first[:common], (first[common] + 1) % V, *first[common + 1 :]]
    assert ask(engine, other)[1] == (common if common >= SHORTEST else 0)


def test_another_first_token_finds_nothing() -> None:
    engine = make_engine(HistoryModel(V), TokenCache(), {})
    for first in range(8):
        assert ask(engine, [first, *tokens(50)])[1] == 0
    assert (engine.prefix_cache_queries, engine.prefix_cache_hits) == (8 * 51, 0)


def test_a_branch_leaves_the_conversation_it_comes_from() -> None:
    engine = make_engine(HistoryModel(V), TokenCache(), {})
    system = tokens(40)
    first, _ = ask(engine, system + tokens(20, seed=1))
    second, cached = ask(engine, [*system, (first[40] + 1) % V, 2, 3])
    assert cached == 40
    assert ask(engine, [*first, 1, 2])[1] == len(first) - 1
    assert ask(engine, [*second, 1, 2])[1] == len(second) - 1


def test_without_room_for_both_a_branch_takes_the_lane_over() -> None:
    engine = make_engine(HistoryModel(V), TokenCache(max_rows=100, capacity=100), {}, seqs=2)
    first, _ = ask(engine, tokens(60))
    assert ask(engine, tokens(40) + [(first[40] + 1) % V] * 5)[1] == 40
    assert len(kept(engine)) == 1
    engine = make_engine(HistoryModel(V), TokenCache(num_lanes=1), {}, seqs=1)
    ask(engine, tokens(60))
    assert ask(engine, tokens(40) + [(first[40] + 1) % V] * 5)[1] == 40


def test_rows_of_a_running_request_are_copied() -> None:
    model = HistoryModel(V)
    engine = make_engine(model, TokenCache(), {"ngram": NgramDrafter(1, 4)})
    jobs = [Job(tokens(50), WARM), Job([*tokens(40), 1, 2], WARM, arrives=3), Job(tokens(50), HOT, arrives=5)]
    results = run(engine, jobs)
    for job, result in zip(jobs, results, strict=True):
        assert result.outputs[0].token_ids == plain(model, job)
    assert [result.num_cached_tokens for result in results] == [0, 40, 49]
    check_kept(engine)


@pytest.mark.parametrize("rows", [512, 40])
def test_choices_compute_their_prompt_once(rows: int) -> None:
    model = HistoryModel(V)
    prompt = tokens(WORTH_WAITING + 40)
    jobs = [Job(prompt, replace(SHORT, temperature=1.5), number=number) for number in range(4)]
    results = run(make_engine(model, TokenCache(), {}, rows=rows), jobs)
    for job, result in zip(jobs, results, strict=True):
        assert result.outputs[0].token_ids == plain(model, job)
    if rows == 512:
        assert sum(model.rows_per_call) == len(prompt) + 3 + 4 * 5
    else:  # admitted as soon as few enough rows are missing
        assert sum(model.rows_per_call) <= len(prompt) + 3 * WORTH_WAITING + 4 * 5
    assert results[0].num_cached_tokens == 0
    assert all(result.num_cached_tokens > 0 for result in results[1:])


def test_nobody_waits_for_a_few_rows() -> None:
    engine = make_engine(HistoryModel(V), TokenCache(), {})
    for first in range(4):
        engine.submit(engine.prepare([*tokens(WORTH_WAITING - 1), first, 5], GREEDY))
    engine.step()
    assert len(engine._scheduler.running) == 4


# What is not.


def test_prompt_logprobs_are_computed_anew() -> None:
    engine = make_engine(HistoryModel(V), TokenCache(), {})
    (first,) = run(engine, [Job(tokens(50), replace(SHORT, prompt_logprobs=2))])
    (again,) = run(engine, [Job(tokens(50), replace(SHORT, prompt_logprobs=2))])
    assert again.num_cached_tokens == 0
    assert again.prompt_logprobs == first.prompt_logprobs
    assert first.prompt_logprobs is not None and len(first.prompt_logprobs) == 50
    assert (engine.prefix_cache_queries, engine.prefix_cache_hits) == (0, 0)
    assert ask(engine, tokens(50))[1] == 49  # but their rows serve others


def test_a_drafter_that_must_see_every_row_gets_every_row() -> None:
    class Watcher(ScriptedDrafter):
        needs = DrafterNeeds(every_row=True)

    drafters: dict[str, Drafter] = {"watcher": Watcher("watcher", lambda ask: Draft()), "ngram": NgramDrafter()}
    engine = make_engine(HistoryModel(V), TokenCache(), drafters)
    jobs = [Job(tokens(50), SHORT, SpeculationParams(method=method)) for method in ("watcher", "watcher", "ngram")]
    assert [run(engine, [job])[0].num_cached_tokens for job in jobs] == [0, 0, 49]


def test_nothing_is_kept_when_it_is_switched_off() -> None:
    model = HistoryModel(V)
    engine = make_engine(model, TokenCache(), {}, prefixes=False)
    assert [ask(engine, tokens(50))[1] for _ in range(2)] == [0, 0]
    assert engine.cache.free_rows == 4096
    run(engine, [Job(tokens(200), replace(SHORT, seed=i), number=i) for i in range(2)])
    assert model.rows_per_call[-6] == 400


def test_rows_of_a_failed_request_are_not_kept() -> None:
    model = HistoryModel(V, broken=lambda history: len(history) > 52)
    engine = make_engine(model, TokenCache(), {})
    (result,) = run_all(engine, [Job(tokens(50), WARM)])
    assert isinstance(result, OutpaceError)
    assert engine.cache.free_rows == 4096


@pytest.mark.parametrize("k", [1, 4])
def test_rows_of_rejected_drafts_are_not_kept(k: int) -> None:
    engine = make_engine(HistoryModel(V, order=3), TokenCache(), {"random": random_drafter(V)}, k=k)
    text, _ = ask(engine, tokens(30), max_tokens=40)
    assert kept(engine) == [text[:-1]]


def test_an_answer_that_ends_inside_an_accepted_draft_is_kept_to_its_end() -> None:
    model = HistoryModel(V, order=3)
    job = Job(tokens(30), replace(GREEDY, max_tokens=30))
    text = job.prompt + plain(model, job)
    drafter = ScriptedDrafter(
        "oracle", lambda ask: Draft.chain(text[len(ask.token_ids) :][: ask.num_draft_tokens], "x")
    )
    stop = next(token for at, token in enumerate(text[30:]) if at > 3 and token not in text[30 : 30 + at])
    end = text.index(stop, 30) + 1
    for k in (5, 6, 7, 8):
        engine = make_engine(HistoryModel(V, order=3), TokenCache(), {"oracle": drafter}, k=k)
        (result,) = run(engine, [replace(job, params=replace(job.params, stop_token_ids=(stop,)))])
        assert result.outputs[0].token_ids == text[30:end]
        check_kept(engine)
        assert kept(engine) in ([text[: end - 1]], [text[:end]])


# Requests that go in the middle.


@pytest.mark.parametrize("steps", [1, 2])
def test_an_abort_in_the_middle_of_prefill_leaves_what_was_computed(steps: int) -> None:
    engine = make_engine(HistoryModel(V), TokenCache(), {"ngram": NgramDrafter()}, rows=20, seqs=2)
    request_id = engine.submit(engine.prepare(tokens(90), GREEDY))
    for _ in range(steps):
        engine.step()
    engine.abort(request_id)
    check_kept(engine)
    (rows,) = kept(engine)
    assert 0 < len(rows) < 90
    assert ask(engine, tokens(90))[1] == len(rows)


@pytest.mark.parametrize("written", [False, True])
def test_a_step_that_raised_costs_only_its_own_rows(written: bool) -> None:
    model = HistoryModel(V)
    engine = make_engine(model, TokenCache(), {"ngram": NgramDrafter(1, 4)}, rows=40)
    jobs = [Job(tokens(100, seed=i), replace(WARM, max_tokens=20)) for i in range(3)]
    ids = [engine.submit(engine.prepare(job.prompt, job.params)) for job in jobs]
    forward, calls, redone = model.forward, 0, 0

    def interrupted(pack: Pack, cache: Cache) -> ForwardResult:
        nonlocal calls
        calls += 1
        if calls % 3:
            return forward(pack, cache)
        if written:
            forward(pack, cache)
        raise KeyboardInterrupt

    model.forward = interrupted  # type: ignore[method-assign]
    finished: set[int] = set()
    while len(finished) < 3:
        try:
            finished |= {output.request_id for output in engine.step() if output.finish_reason}
        except KeyboardInterrupt:
            assert not engine._scheduler.running
            redone += 1
        check_kept(engine)
    for request_id, job in zip(ids, jobs, strict=True):
        assert engine.take(request_id).outputs[0].token_ids == plain(HistoryModel(V), job)
    assert redone > 3
    # Everything once, and what interrupted steps had computed once more at most.
    assert sum(model.rows_per_call) <= 3 * 120 + 5 * calls + 40 * redone


def test_an_interrupted_copy_loses_no_lane() -> None:
    cache = TokenCache()
    engine = make_engine(HistoryModel(V), cache, {})
    ask(engine, tokens(50))
    copy = cache.copy

    def interrupted(source: int, target: int, rows: int) -> None:
        cache.copy = copy  # type: ignore[method-assign]
        copy(source, target, rows // 2)
        raise KeyboardInterrupt

    cache.copy = interrupted  # type: ignore[method-assign]
    request_id = engine.submit(engine.prepare([*tokens(30), 1, 2], SHORT))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    check_kept(engine)
    while not any(output.finish_reason for output in engine.step()):
        check_kept(engine)
    assert engine.take(request_id).outputs[0].token_ids == plain(HistoryModel(V), Job([*tokens(30), 1, 2], SHORT))
    check_kept(engine)
    engine.clear_prefixes()
    assert [cache.allocate() for _ in range(8)] == list(range(8))


# Room.


def test_the_least_recently_used_lane_goes_first() -> None:
    engine = make_engine(HistoryModel(V), TokenCache(num_lanes=3), {}, seqs=1)
    a, b, c, d = ([first, *tokens(30, seed=first)] for first in range(4))
    for prompt in (a, b, c):
        ask(engine, prompt)
    assert ask(engine, a)[1] == 30  # now b is the oldest
    assert ask(engine, d)[1] == 0
    assert [ids[0] for ids in kept(engine)] == [2, 0, 3]
    assert ask(engine, b)[1] == 0
    assert [ids[0] for ids in kept(engine)] == [0, 3, 1]


def test_rows_go_from_the_end_of_the_oldest() -> None:
    engine = make_engine(HistoryModel(V), TokenCache(max_rows=1000), {})
    for first in range(2):
        ask(engine, [first, *tokens(400)])
    sizes = [len(ids) for ids in kept(engine)]
    assert ask(engine, [2, *tokens(300)])[1] == 0
    assert len(kept(engine)) == 3
    assert 100 < len(kept(engine)[0]) < sizes[0]
    assert len(kept(engine)[1]) == sizes[1]
    left = len(kept(engine)[0])
    assert ask(engine, [0, *tokens(400)])[1] == left


def test_kept_rows_cost_nobody_a_place_or_a_draft() -> None:
    """A cache full of kept rows does as an empty one does: admissions, drafts, steps."""
    jobs = [Job([i, *tokens(60, seed=9)], replace(GREEDY, max_tokens=30)) for i in range(6)]
    texts = [job.prompt + plain(HistoryModel(V), job) for job in jobs]

    def script(ask: Ask) -> Draft:
        text = next(text for text in texts if text[:61] == list(ask.token_ids[:61]))
        return Draft.chain(text[len(ask.token_ids) :][: ask.num_draft_tokens], "x")

    def counts(full: bool) -> list[tuple[int, int, int]]:
        drafter = ScriptedDrafter("oracle", script)
        engine = make_engine(HistoryModel(V), TokenCache(max_rows=6 * 91), {"oracle": drafter}, k=6)
        if full:
            plainly = SpeculationParams(enabled=False)
            for first in range(6, 14):
                run(engine, [Job([first, *tokens(60, seed=first)], SHORT, plainly)])
            assert engine.cache.free_rows < 91
        results = run(engine, jobs)
        check_kept(engine)
        return [(r.stats.steps, r.stats.draft_tokens, r.stats.preemptions) for r in results]

    assert counts(full=True) == counts(full=False)


def test_kept_rows_go_before_anybody_is_preempted() -> None:
    engine = make_engine(HistoryModel(V), TokenCache(max_rows=300), {})
    for first in range(5, 9):
        ask(engine, [first, *tokens(60)])
    jobs = [Job([i, *tokens(40, seed=i)], replace(WARM, max_tokens=55)) for i in range(3)]
    assert sum(result.stats.preemptions for result in run(engine, jobs)) == 0


def test_what_adds_nothing_is_not_kept_twice() -> None:
    engine = make_engine(HistoryModel(V), TokenCache(), {})
    for _ in range(5):
        ask(engine, tokens(50))
    assert len(kept(engine)) == 1
    run(engine, [Job(tokens(50), SHORT) for _ in range(4)])
    assert len(kept(engine)) == 1
    ask(engine, tokens(30), max_tokens=1)
    assert len(kept(engine)) == 1


def test_clearing_gives_all_rows_back_and_leaves_running_requests_alone() -> None:
    model = HistoryModel(V)
    engine = make_engine(model, TokenCache(), {})
    ask(engine, tokens(50))
    engine.submit(engine.prepare([*tokens(50), 1, 2, 3], GREEDY))
    engine.step()
    engine.clear_prefixes()
    engine.check_integrity()
    while not (outputs := engine.step()) or not outputs[0].finish_reason:
        engine.check_integrity()
    job = Job([*tokens(50), 1, 2, 3], GREEDY)
    assert engine.take(outputs[0].request_id).outputs[0].token_ids == plain(model, job)
    engine.clear_prefixes()
    assert engine.cache.free_rows == 4096


def test_statistics_count_prompt_tokens() -> None:
    engine = make_engine(HistoryModel(V), TokenCache(), {})
    ask(engine, tokens(50))
    ask(engine, [*tokens(50), 1, 2])
    assert (engine.prefix_cache_queries, engine.prefix_cache_hits) == (50 + 52, 50)


# Text does not change.


def conversations(count: int, seed: int) -> list[Job]:
    """Requests that begin alike in many ways: the same system prompts, whole prompts, and parts of each other."""
    source = random.Random(seed)
    systems = [tokens(length, seed=length) for length in (3, 30, 90)]
    jobs: list[Job] = []
    for index in range(count):
        prompt = list(source.choice(systems))
        if jobs and source.random() < 0.5:
            other = source.choice(jobs)
            whole = other.prompt + plain(HistoryModel(V, order=3), other)
            prompt = whole[: source.randrange(1, len(whole) + 1)]
        prompt += [source.randrange(V) for _ in range(source.choice([0, 1, 5, 20]))]
        params = replace((GREEDY, WARM, HOT)[index % 3], max_tokens=source.choice([1, 5, 20]))
        jobs.append(Job(prompt[:150], params, arrives=3 * index + source.choice([0, 1, 4]), number=index % 2))
    return jobs


def drafter_named(name: str) -> dict[str, Drafter]:
    if name == "ngram":
        return {name: NgramDrafter(1, 4)}
    if name == "random":
        return {name: random_drafter(V)}
    if name == "draft_model":
        draft = HistoryModel(V, order=3, errors=0.3)
        return {name: DraftModelDrafter(draft, TokenCache(), max_model_len=512)}
    return {}


@pytest.mark.parametrize("name", ["none", "ngram", "random", "draft_model"])
@pytest.mark.parametrize("max_rows", [4096, 260], ids=["roomy", "preempting"])
@pytest.mark.parametrize("rows", [512, 13], ids=["one pass", "chunks"])
@pytest.mark.parametrize("lanes", [8, 3])
@pytest.mark.thinned(3)
def test_text_is_the_same(name: str, max_rows: int, rows: int, lanes: int) -> None:
    model = HistoryModel(V, order=3)
    jobs = conversations(24, seed=lanes)
    engine = make_engine(model, TokenCache(num_lanes=lanes, max_rows=max_rows), drafter_named(name), rows=rows, seqs=3)
    results = run(engine, jobs)
    check_kept(engine)
    for job, result in zip(jobs, results, strict=True):
        assert result.outputs[0].token_ids == plain(model, job)
        assert result.num_cached_tokens < len(job.prompt)
    assert sum(result.num_cached_tokens > 0 for result in results) >= 5
    if max_rows == 4096 and lanes == 8:
        assert engine.prefix_cache_hits > 0.3 * engine.prefix_cache_queries


def same_text() -> bool:
    model = HistoryModel(V, order=3)
    jobs = conversations(24, seed=8)
    try:
        results = run(make_engine(model, TokenCache(), {}, seqs=3), jobs)
    except AssertionError:
        return False
    return all(result.outputs[0].token_ids == plain(model, job) for job, result in zip(jobs, results, strict=True))


def test_planted_faults_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert same_text()
    with monkeypatch.context() as fault:
        fault.setattr(
            prefixes_module, "common_length", lambda a, b, most: min(most, len(a), common_length(a, b, most) + 1)
        )
        assert not same_text()
    with monkeypatch.context() as fault:
        copy = TokenCache.copy
        fault.setattr(TokenCache, "copy", lambda cache, a, b, rows: copy(cache, a, b, rows - 1))
        assert not same_text()
    with monkeypatch.context() as fault:
        fault.setattr(prefixes_module.Prefixes, "_cut", lambda self, lane, rows: self._cache.truncate(lane, rows - 1))
        assert not same_text()


def test_common_length_against_the_obvious() -> None:
    source = random.Random(1)
    for _ in range(300):
        first = [source.randrange(2) for _ in range(source.choice([0, 1, 5, 255, 256, 257, 600, 1024]))]
        second = list(first[: source.randrange(len(first) + 1)]) + [7] * source.choice([0, 1, 300])
        if source.random() < 0.3 and second:
            second[source.randrange(len(second))] = 9
        most = source.choice([0, 1, 256, 300, 2000])
        expected = 0
        while expected < min(most, len(first), len(second)) and first[expected] == second[expected]:
            expected += 1
        assert common_length(first, second, most) == expected
