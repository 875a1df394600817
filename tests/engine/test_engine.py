"""Ends of generation, bad input, aborts, faults and books of the engine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from outpace.drafters.draft_model import DraftModelDrafter
from outpace.drafters.ngram import NgramDrafter
from outpace.errors import InvalidParameter, InvalidPrompt, OutpaceError
from outpace.params import SamplingParams, SpeculationParams
from outpace.protocols import Cache
from outpace.types import Ask, Draft, ForwardResult, Pack, Resume

from .fakes import HistoryModel, IdDetokenizer, ScriptedDrafter, TokenCache, oracle_drafter
from .harness import GREEDY, WARM, Job, make_engine, plain, run

V = 24


def oracle_run(model: HistoryModel, job: Job, k: int, eos: frozenset[int] = frozenset()) -> object:
    """Runs a job with a drafter that knows the endless plain text, so that every end falls inside a block."""
    endless = Job(job.prompt, replace(job.params, max_tokens=80, ignore_eos=True))
    text = job.prompt + plain(model, endless)
    engine = make_engine(model, TokenCache(), {"oracle": oracle_drafter(lambda tokens: text)}, k=k, eos=sorted(eos))
    (result,) = run(engine, [job])
    return result


@pytest.mark.parametrize("k", [1, 2, 5, 8])
@pytest.mark.parametrize("at", range(1, 12))
def test_eos_inside_a_block(k: int, at: int) -> None:
    model = HistoryModel(V, order=3)
    job = Job([1, 2], replace(WARM, max_tokens=40))
    text = plain(model, job)
    eos = frozenset({text[at], V - 1})
    result = oracle_run(model, job, k, eos)
    end = next(i for i, token in enumerate(text) if token in eos)
    completion = result.outputs[0]
    assert completion.token_ids == text[: end + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    detokenizer = IdDetokenizer()
    assert completion.text == "".join(detokenizer.push(token) for token in text[:end])
    assert result.stats.accepted_tokens <= result.stats.draft_tokens


@pytest.mark.parametrize("k", [1, 4, 8])
def test_stop_ids_stop_strings_and_ignored_eos(k: int) -> None:
    model = HistoryModel(V, order=3)
    base = replace(WARM, max_tokens=40)
    text = plain(model, Job([1, 2], base))
    end = next(i for i, token in enumerate(text) if i > 4 and token not in text[:i])
    stop_id = oracle_run(model, Job([1, 2], replace(base, stop_token_ids=(text[end],))), k).outputs[0]
    assert (stop_id.token_ids, stop_id.stop_reason) == (text[: end + 1], text[end])
    # A stop string over the boundary of two tokens: the second one completes it and stays in the ids.
    spelled = [IdDetokenizer().push(token) for token in text]
    word = spelled[end - 1][-2:] + spelled[end][:2]
    by_string = oracle_run(model, Job([1, 2], replace(base, stop=word)), k).outputs[0]
    assert (by_string.token_ids, by_string.stop_reason) == (text[: end + 1], word)
    assert by_string.text == "".join(spelled[:end])[:-2]
    ignoring = oracle_run(model, Job([1, 2], replace(base, ignore_eos=True)), k, frozenset(text)).outputs[0]
    assert (ignoring.token_ids, ignoring.finish_reason) == (text, "length")


@pytest.mark.parametrize("k", [1, 3, 8])
def test_a_stop_beats_length_in_the_same_block(k: int) -> None:
    model = HistoryModel(V, order=3)
    text = plain(model, Job([1, 2], replace(GREEDY, max_tokens=6)))
    job = Job([1, 2], replace(GREEDY, max_tokens=6, stop_token_ids=(text[5],)))
    completion = oracle_run(model, job, k).outputs[0]
    first = text.index(text[5])
    assert completion.token_ids == text[: first + 1]
    assert completion.finish_reason == "stop"


def test_the_context_limit_ends_generation() -> None:
    model = HistoryModel(V)
    cache = TokenCache(capacity=50)
    engine = make_engine(model, cache, {"ngram": NgramDrafter(1, 4)}, k=8)
    job = Job(list(range(20)), replace(GREEDY, max_tokens=None))
    (result,) = run(engine, [job])
    assert len(result.outputs[0].token_ids) == 30
    assert result.outputs[0].finish_reason == "length"


def test_max_tokens_one_drafts_nothing() -> None:
    asked: list[Ask] = []
    drafter = ScriptedDrafter("spy", lambda ask: asked.append(ask) or Draft())  # type: ignore[func-returns-value]
    engine = make_engine(HistoryModel(V), TokenCache(), {"spy": drafter})
    (result,) = run(engine, [Job([1], replace(GREEDY, max_tokens=1))])
    assert len(result.outputs[0].token_ids) == 1
    assert asked == []
    assert (result.stats.acceptance_rate, result.stats.mean_acceptance_length, result.stats.per_position) == (None,) * 3


def test_a_draft_model_with_a_shorter_context_stops_drafting_there() -> None:
    model = HistoryModel(V)
    drafter = DraftModelDrafter(HistoryModel(V), TokenCache(capacity=30), max_model_len=30)
    job = Job([1, 2], replace(WARM, max_tokens=80))
    (result,) = run(make_engine(model, TokenCache(), {"draft_model": drafter}, k=4), [job])
    assert result.outputs[0].token_ids == plain(model, job)
    # All of the first 30 positions are drafted and accepted, none after them.
    assert result.stats.acceptance_rate == 1.0
    assert 20 <= result.stats.accepted_tokens <= 29


def test_a_full_draft_cache_means_plain_decoding() -> None:
    model = HistoryModel(V)
    drafter = DraftModelDrafter(HistoryModel(V), TokenCache(num_lanes=1, max_rows=20), max_model_len=512)
    jobs = [Job([1, 2], replace(WARM, max_tokens=40)), Job([3], replace(WARM, max_tokens=40))]
    for job, result in zip(jobs, run(make_engine(model, TokenCache(), {"draft_model": drafter}), jobs), strict=True):
        assert result.outputs[0].token_ids == plain(model, job)


def test_a_long_draft_prefill_is_spread_over_steps() -> None:
    """The draft model's own prefill spends what is left of the row budget, while the target goes on plainly."""
    draft = HistoryModel(V)
    drafter = DraftModelDrafter(draft, TokenCache(), max_model_len=512)
    job = Job([i % V for i in range(300)], replace(GREEDY, max_tokens=60))
    (result,) = run(make_engine(HistoryModel(V), TokenCache(), {"draft_model": drafter}, rows=64), [job])
    assert max(draft.rows_per_call) <= 64
    assert result.stats.accepted_tokens > 20


def test_prefill_advances_while_others_decode_with_long_drafts() -> None:
    model = HistoryModel(V)
    job = Job([1], replace(GREEDY, max_tokens=200))
    text = job.prompt + plain(model, job)
    engine = make_engine(model, TokenCache(), {"oracle": oracle_drafter(lambda tokens: text)}, k=8, rows=10, seqs=2)
    late = Job([2] * 30, replace(GREEDY, max_tokens=2), SpeculationParams(enabled=False), arrives=1)
    results = run(engine, [job, late])
    assert results[0].outputs[0].token_ids == text[1:]
    assert results[1].stats.steps < results[0].stats.steps
    assert max(model.rows_per_call) <= 10


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "empty"), ([1] * 512, "at most 511"), ([V], "vocabulary"), ([-1], "vocabulary")],
)
def test_bad_prompts(prompt: list[int], message: str) -> None:
    engine = make_engine(HistoryModel(V), TokenCache(), {})
    with pytest.raises(InvalidPrompt, match=message):
        engine.prepare(prompt, GREEDY)
    assert not engine.has_work


def test_an_unknown_drafter_is_named() -> None:
    engine = make_engine(HistoryModel(V), TokenCache(), {"ngram": NgramDrafter()})
    with pytest.raises(InvalidParameter, match=r"'magic'.*ngram"):
        engine.prepare([1], GREEDY, SpeculationParams(method="magic"))


def test_a_request_whose_logits_are_nan_ends_alone() -> None:
    model = HistoryModel(V, broken=lambda history: history[0] == 7 and len(history) > 12)
    jobs = [Job([1], GREEDY), Job([7], WARM), Job([2], WARM)]
    engine = make_engine(model, TokenCache(), {"ngram": NgramDrafter(1, 4)})
    ids = [engine.submit(engine.prepare(job.prompt, job.params)) for job in jobs]
    finished = set()
    while len(finished) < 3:
        finished |= {o.request_id for o in engine.step() if o.finish_reason}
        engine.check_integrity()
    with pytest.raises(OutpaceError):
        engine.take(ids[1])
    for index in (0, 2):
        assert engine.take(ids[index]).outputs[0].token_ids == plain(model, jobs[index])
    assert engine.free_rows == 4096


def test_abort_frees_everything_at_any_moment() -> None:
    model = HistoryModel(V)
    drafters = {"draft_model": DraftModelDrafter(HistoryModel(V), TokenCache(), max_model_len=512)}
    engine = make_engine(model, TokenCache(), drafters, rows=20, seqs=2)
    ids = [engine.submit(engine.prepare([i] * 30, GREEDY)) for i in range(4)]
    engine.step()
    engine.abort(ids[0])  # in the middle of its prefill
    engine.abort(ids[3])  # waiting
    engine.abort(99)  # unknown: nothing happens
    while engine.has_work:
        for output in engine.step():
            if output.finish_reason:
                assert engine.take(output.request_id).outputs[0].token_ids == plain(
                    model, Job([output.request_id] * 30, GREEDY)
                )
        engine.check_integrity()
    assert engine.free_rows == 4096
    assert drafters["draft_model"].memory_bytes == 0


def test_abort_after_the_end_is_ignored() -> None:
    engine = make_engine(HistoryModel(V), TokenCache(), {"ngram": NgramDrafter(1, 4)})
    request_id = engine.submit(engine.prepare([1], replace(GREEDY, max_tokens=2)))
    while not any(output.finish_reason for output in engine.step()):
        pass
    engine.abort(request_id)
    engine.abort(request_id)
    assert not engine.has_work
    engine.check_integrity()


@pytest.mark.parametrize(("seqs", "k"), [(8, 5), (2, 4)])
def test_a_draft_model_drafts_when_drafts_fill_the_row_budget(seqs: int, k: int) -> None:
    """Rows granted to a drafter that is behind are its own to catch up with; else it stays behind for good."""
    drafter = DraftModelDrafter(HistoryModel(V), TokenCache(), max_model_len=512)
    jobs = [Job([i, 3], replace(WARM, max_tokens=60)) for i in range(seqs)]
    engine = make_engine(HistoryModel(V), TokenCache(), {"draft_model": drafter}, k=k, rows=seqs * (k + 1), seqs=seqs)
    for result in run(engine, jobs):
        assert result.stats.steps <= 60 / (k + 1) + 4


def test_a_broken_row_behind_a_rejected_draft_token_harms_nobody() -> None:
    """NaN after a token that plain decoding never reaches is not a reason to end the request."""
    plain_model = HistoryModel(V)
    job = Job([1], GREEDY)
    text = plain(plain_model, job)
    bad = next(token for token in range(V) if token not in text)
    model = HistoryModel(V, broken=lambda history: history[-1] == bad)
    drafter = ScriptedDrafter("bad", lambda ask: Draft.chain([bad] * ask.num_draft_tokens, "x"))
    (result,) = run(make_engine(model, TokenCache(), {"bad": drafter}), [job])
    assert result.outputs[0].token_ids == text


def test_a_failed_step_leaves_nobody_half_computed() -> None:
    """An interrupt in the middle of a forward pass: every request goes on as if nothing had been."""
    model = HistoryModel(V)
    jobs = [Job([i, 3], WARM) for i in range(3)]
    drafters = {
        "draft_model": DraftModelDrafter(HistoryModel(V, errors=0.2), TokenCache(), max_model_len=512),
        "ngram": NgramDrafter(1, 4),
    }
    engine = make_engine(model, TokenCache(), drafters)
    ids = [
        engine.submit(engine.prepare(job.prompt, job.params, SpeculationParams(method=method)))
        for job, method in zip(jobs, ["draft_model", "ngram", "draft_model"], strict=True)
    ]
    forward, calls = model.forward, 0

    def interrupted(pack: Pack, cache: Cache) -> ForwardResult:
        nonlocal calls
        calls += 1
        result = forward(pack, cache)
        if calls % 4 == 3:
            raise KeyboardInterrupt
        return result

    model.forward = interrupted  # type: ignore[method-assign]
    finished: set[int] = set()
    while len(finished) < 3:
        try:
            finished |= {output.request_id for output in engine.step() if output.finish_reason}
        except KeyboardInterrupt:
            assert engine.free_rows == 4096
        engine.check_integrity()
    for request_id, job in zip(ids, jobs, strict=True):
        assert engine.take(request_id).outputs[0].token_ids == plain(HistoryModel(V), job)


def test_drafts_never_cost_another_request_its_place() -> None:
    """Plain decoding of these jobs fits the cache; long drafts must not push anybody out of it."""
    jobs = [Job([i] * 30, replace(WARM, max_tokens=6)) for i in range(8)]
    for k in (0, 16, 64):
        drafter = ScriptedDrafter("x", lambda ask: Draft.chain([0] * ask.num_draft_tokens, "x"))
        engine = make_engine(HistoryModel(V), TokenCache(max_rows=8 * 36), {"x": drafter}, k=k)
        assert sum(result.stats.preemptions for result in run(engine, jobs)) == 0


def test_a_drafter_that_computes_waits_for_the_first_token() -> None:
    draft = HistoryModel(V)
    drafter = DraftModelDrafter(draft, TokenCache(), max_model_len=512)
    engine = make_engine(HistoryModel(V), TokenCache(), {"draft_model": drafter})
    engine.submit(engine.prepare([1], GREEDY))
    engine.step()
    assert draft.rows_per_call == []
    engine.step()
    assert draft.rows_per_call


def test_kept_states_are_taken_only_from_drafters_that_work_on_target_rows() -> None:
    model = HistoryModel(V)
    job = Job([1], GREEDY)
    drafter = ScriptedDrafter("x", lambda ask: Draft.chain([0], "x", resume=Resume(99, torch.zeros(1, 3))))
    (result,) = run(make_engine(model, TokenCache(), {"x": drafter}), [job])
    assert result.outputs[0].token_ids == plain(model, job)


def test_a_wide_tree_is_cut_to_its_first_chain_before_its_length() -> None:
    """For a target that takes no trees. Breadth first, the second level comes after many siblings; the chain through it
    must survive."""
    model = HistoryModel(V)
    model.takes_trees = False
    job = Job([1], replace(GREEDY, max_tokens=20))
    text = job.prompt + plain(model, job)

    def script(ask: Ask) -> Draft:
        chain = text[len(ask.token_ids) : len(ask.token_ids) + 2]
        if len(chain) < 2 or ask.num_draft_tokens < 2:
            return Draft()
        siblings = [(chain[0] + i) % V for i in range(1, 8)]
        return Draft((chain[0], *siblings, chain[1]), (*[-1] * 8, 0), ("x",) * 9)

    (result,) = run(make_engine(model, TokenCache(), {"x": ScriptedDrafter("x", script)}, k=2), [job])
    assert result.outputs[0].token_ids == text[1:]
    assert result.stats.per_position == [1.0, 1.0]


def test_per_request_draft_length() -> None:
    model = HistoryModel(V)
    job = Job([1], GREEDY)
    text = job.prompt + plain(model, job)
    for length, expected in ((0, 40), (1, 20), (3, 10)):
        engine = make_engine(model, TokenCache(), {"oracle": oracle_drafter(lambda tokens: text)}, k=8)
        (result,) = run(engine, [replace(job, speculation=SpeculationParams(num_speculative_tokens=length))])
        assert result.stats.steps == expected


def test_statistics_follow_their_definitions() -> None:
    """Ten drafts of two tokens, the first token right in all but one, the second never."""
    model = HistoryModel(V)
    job = Job([1], replace(GREEDY, max_tokens=20))
    text = job.prompt + plain(model, job)

    def script(ask: Ask) -> Draft:
        at = len(ask.token_ids)
        if ask.num_draft_tokens < 2:
            return Draft()
        wrong = lambda token: (token + 1) % V  # noqa: E731
        first = text[at] if at > 1 else wrong(text[at])
        return Draft.chain([first, wrong(text[at + 1])], "x")

    (result,) = run(make_engine(model, TokenCache(), {"x": ScriptedDrafter("x", script)}, k=2), [job])
    stats = result.stats
    assert (stats.drafts, stats.draft_tokens, stats.accepted_tokens) == (10, 20, 9)
    assert stats.acceptance_rate == 9 / 20
    assert stats.mean_acceptance_length == 1 + 9 / 10
    assert stats.per_position == [0.9, 0.0]
    assert stats.steps == 11
    assert set(stats.station_seconds) == {"schedule", "draft", "pack", "forward", "verify", "logprobs", "commit"}


def test_unseeded_requests_differ_and_seeded_ones_do_not() -> None:
    engine = make_engine(HistoryModel(V), TokenCache(), {})
    unseeded = SamplingParams(temperature=1.5, top_p=1.0, top_k=0, max_tokens=40)
    a, b, c, d = run(engine, [Job([1], unseeded), Job([1], unseeded), Job([1], WARM), Job([1], WARM)])
    assert a.outputs[0].token_ids != b.outputs[0].token_ids
    assert c.outputs[0].token_ids == d.outputs[0].token_ids


def test_choices_of_one_seed_have_their_own_streams() -> None:
    engine = make_engine(HistoryModel(V), TokenCache(), {})
    hot = replace(WARM, temperature=1.5)
    first, second = run(engine, [Job([1], hot, number=0), Job([1], hot, number=1)])
    assert first.outputs[0].token_ids != second.outputs[0].token_ids
    assert second.outputs[0].token_ids == plain(HistoryModel(V), Job([1], hot, number=1))


def test_a_long_prompt_does_not_hold_up_those_who_wait_for_a_token() -> None:
    """Beside them it is computed in pieces of 128 rows; alone in as many as a step may have."""
    model = HistoryModel(V)
    long = [index % V for index in range(700)]
    run(make_engine(model, TokenCache(capacity=1024), {}), [Job(long, replace(GREEDY, max_tokens=2))])
    assert model.rows_per_call == [512, 188, 1]
    model.rows_per_call.clear()
    jobs = [Job([1, 2], replace(GREEDY, max_tokens=30)), Job(long, replace(GREEDY, max_tokens=2), arrives=2)]
    results = run(make_engine(model, TokenCache(capacity=1024), {}), jobs)
    assert model.rows_per_call[:9] == [2, 1, *[129] * 5, 61, 2]
    for job, result in zip(jobs, results, strict=True):
        assert result.outputs[0].token_ids == plain(model, job)
