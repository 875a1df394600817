"""Ends planted at every place of a verified block: ids, text, log probabilities, counts and rows all end there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from outpace.engine.outputs import RequestOutput
from outpace.params import SamplingDefaults, SamplingParams

from .fakes import HistoryModel, IdDetokenizer, TokenCache, oracle_drafter
from .harness import Job, make_engine, run
from .oracle import Expected, Oracle

V = 48
K = 8
MODEL = HistoryModel(V, order=3)
EOS = 47
BASE = SamplingParams(
    temperature=0.8, seed=0, frequency_penalty=0.4, presence_penalty=2.0, logprobs=2, max_tokens=30, ignore_eos=True
).resolved(SamplingDefaults())
PROMPT = [1, 2, 3]
ENDLESS = Oracle(MODEL, frozenset({EOS})).decode(Job(PROMPT, BASE)).token_ids
SLOTS = range(2 * (K + 1))


def spelled(token: int) -> str:
    return IdDetokenizer().push(token)


def ended(changes: dict[str, Any], *, eos: int = EOS, capacity: int = 512) -> tuple[Expected, RequestOutput]:
    """A job whose drafts go on behind its end, beside two others: what it has to give, and what it gave."""
    job = Job(PROMPT, replace(BASE, **changes))
    neighbours = [Job([9], replace(BASE, seed=8)), Job([4, 4], replace(BASE, temperature=0.0))]
    oracle = Oracle(MODEL, frozenset({eos}), capacity)
    texts = [PROMPT + ENDLESS, *(each.prompt + oracle.decode(each).token_ids for each in neighbours)]
    drafter = oracle_drafter(lambda tokens: next(text for text in texts if text[: len(tokens)] == list(tokens)))
    cache = TokenCache(capacity=capacity)
    engine = make_engine(MODEL, cache, {"oracle": drafter}, k=K, eos=[eos])
    results = run(engine, [job, *neighbours])
    for each, result in zip([job, *neighbours], results, strict=True):
        oracle.decode(each).check(result)
    assert engine.free_rows == 4096
    return oracle.decode(job), results[0]


def check_counts(result: RequestOutput, slot: int) -> None:
    """All drafts were right: each block brings K tokens and a bonus, but for the one that holds the end."""
    stats, full, place = result.stats, *divmod(slot, K + 1)
    assert stats.steps == full + 1
    assert stats.accepted_tokens == full * K + min(place + 1, K)
    assert len(result.outputs[0].token_ids) == slot + 1
    assert stats.accepted_at == [full + (place >= i) for i in range(len(stats.accepted_at))]
    assert stats.accepted_tokens <= stats.draft_tokens <= (full + 1) * K


@pytest.fixture(autouse=True)
def tokens_come_once() -> None:
    """What is planted must not come earlier."""
    assert len({spelled(token)[:2] for token in ENDLESS[: len(SLOTS)]}) == len(SLOTS)
    assert EOS not in ENDLESS[: len(SLOTS)]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.thinned(2)
def test_eos(slot: int, include: bool) -> None:
    expected, result = ended({"ignore_eos": False, "include_stop_str_in_output": include}, eos=ENDLESS[slot])
    assert expected.token_ids == ENDLESS[: slot + 1]
    assert (expected.finish_reason, expected.stop_reason) == ("stop", None)
    check_counts(result, slot)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.thinned(2)
def test_stop_id(slot: int, include: bool) -> None:
    changes = {"stop_token_ids": (ENDLESS[slot], 0), "include_stop_str_in_output": include}
    expected, result = ended(changes)
    assert (expected.finish_reason, expected.stop_reason) == ("stop", ENDLESS[slot])
    assert expected.text.endswith(spelled(ENDLESS[slot])) == include
    check_counts(result, slot)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.thinned(2)
def test_stop_string_inside_a_token(slot: int, include: bool) -> None:
    word = spelled(ENDLESS[slot])[:2]
    expected, result = ended({"stop": ("%", word), "include_stop_str_in_output": include})
    assert expected.token_ids == ENDLESS[: slot + 1]
    assert (expected.finish_reason, expected.stop_reason) == ("stop", word)
    assert expected.text.endswith(word) == include
    check_counts(result, slot)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("slot", SLOTS[2:])
@pytest.mark.thinned(2)
def test_stop_string_over_three_tokens(slot: int, include: bool) -> None:
    """It may begin in one block and end in the next."""
    before, middle, last = map(spelled, ENDLESS[slot - 2 : slot + 1])
    word = before[-3:] + middle + last[0]
    expected, result = ended({"stop": (word + "~", word, middle + "~"), "include_stop_str_in_output": include})
    assert expected.token_ids == ENDLESS[: slot + 1]
    assert expected.stop_reason == word
    check_counts(result, slot)


@pytest.mark.parametrize("slot", SLOTS)
def test_length(slot: int) -> None:
    expected, result = ended({"max_tokens": slot + 1})
    assert (expected.finish_reason, expected.token_ids) == ("length", ENDLESS[: slot + 1])
    assert result.stats.accepted_tokens + result.stats.steps == slot + 1


@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.parametrize("change", ["stop_token_ids", "stop"])
@pytest.mark.thinned(2)
def test_a_stop_beats_length(slot: int, change: str) -> None:
    stop = (ENDLESS[slot],) if change == "stop_token_ids" else (spelled(ENDLESS[slot]),)
    expected, _ = ended({change: stop, "max_tokens": slot + 1})
    assert (expected.finish_reason, expected.stop_reason) == ("stop", stop[0])


@pytest.mark.parametrize("slot", SLOTS)
def test_the_context_ends(slot: int) -> None:
    job = Job(PROMPT, replace(BASE, max_tokens=None))
    drafter = oracle_drafter(lambda tokens: PROMPT + ENDLESS)
    oracle = Oracle(MODEL, frozenset({EOS}), len(PROMPT) + slot + 1)
    engine = make_engine(MODEL, TokenCache(capacity=oracle.max_len), {"oracle": drafter}, k=K, eos=[EOS])
    (result,) = run(engine, [job])
    oracle.decode(job).check(result)
    assert (result.outputs[0].finish_reason, result.outputs[0].token_ids) == ("length", ENDLESS[: slot + 1])


@pytest.mark.parametrize("k", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [0, 1, 5, 8, 9, 12])
def test_min_tokens_counts_tokens_not_steps(k: int, count: int) -> None:
    """EOS is what the model wants most, everywhere: it comes as soon as it may."""
    params = replace(BASE, ignore_eos=False, logit_bias={EOS: 100.0}, min_tokens=count)
    oracle = Oracle(MODEL, frozenset({EOS}))
    free = oracle.decode(Job(PROMPT, replace(params, min_tokens=25))).token_ids
    drafter = oracle_drafter(lambda tokens: PROMPT + free)
    (result,) = run(make_engine(MODEL, TokenCache(), {"oracle": drafter}, k=k, eos=[EOS]), [Job(PROMPT, params)])
    oracle.decode(Job(PROMPT, params)).check(result)
    assert result.outputs[0].token_ids == [*free[:count], EOS]
    assert result.stats.accepted_tokens == count - count // (k + 1)


@pytest.mark.parametrize("k", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [3, 7, 8, 9])
def test_stop_strings_wait_for_min_tokens(k: int, count: int) -> None:
    """Each token of the text would end it; the first behind `count` of them does."""
    words = tuple(spelled(token) for token in ENDLESS[:16])
    params = replace(BASE, stop=words, min_tokens=count)
    drafter = oracle_drafter(lambda tokens: PROMPT + ENDLESS)
    (result,) = run(make_engine(MODEL, TokenCache(), {"oracle": drafter}, k=k, eos=[EOS]), [Job(PROMPT, params)])
    Oracle(MODEL, frozenset({EOS})).decode(Job(PROMPT, params)).check(result)
    assert result.outputs[0].token_ids == ENDLESS[: count + 1]
