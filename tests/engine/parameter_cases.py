"""Every sampling parameter, and some combinations, as jobs with what plain decoding makes of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from outpace.drafters.draft_model import DraftModelDrafter
from outpace.drafters.ngram import NgramDrafter
from outpace.params import SamplingDefaults, SamplingParams
from outpace.protocols import Drafter
from outpace.structured import StructuredOutputs
from outpace.types import Ask, Draft

from .fakes import HistoryModel, ScriptedDrafter, TokenCache, bush_drafter, illegal_drafter, random_drafter
from .harness import Job
from .oracle import Expected, Oracle

V = 24
EOS = frozenset({22})
MAX_LEN = 512
MODEL = HistoryModel(V)
ORACLE = Oracle(MODEL, EOS, MAX_LEN)

Make = Callable[[Job], SamplingParams]


@dataclass(frozen=True)
class Case:
    """One request and what it has to give."""

    name: str
    job: Job
    expected: Expected


def push_away(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """A processor that looks at the whole output, and changes its arguments."""
    for token in set(output_ids):
        logits[token] -= 0.3 * output_ids.count(token)
    logits[len(output_ids) % len(logits)] += 2
    output_ids.clear()
    return logits


def after_prompt(prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """A processor that looks at the prompt too."""
    return logits + torch.linspace(0, float(sum(prompt_ids) % 5), len(logits)) * (len(output_ids) % 2)


def _walk(name: str) -> StructuredOutputs:
    return StructuredOutputs(regex=name)


def _across(job: Job, at: int, **more: Any) -> dict[str, Any]:
    """A stop string over three tokens of the plain text, with some decoys around it."""
    spelled = _spelled(job, **more)
    word = spelled[at][-2:] + spelled[at + 1] + spelled[at + 2][:1]
    return {"stop": ("never", word[:-1] + "#", word, "zz 9"), **more}


def _inside(job: Job, at: int, **more: Any) -> dict[str, Any]:
    """A stop string in the middle of a token."""
    return {"stop": (_spelled(job, **more)[at][:-1],), **more}


def _stop_id(job: Job, at: int, **more: Any) -> dict[str, Any]:
    return {"stop_token_ids": (_ids(job, **more)[at],), **more}


def _ids(job: Job, **more: Any) -> list[int]:
    """The text without ends, so that something can be planted in it."""
    return ORACLE.decode(Job(job.prompt, replace(job.params, ignore_eos=True, **more))).token_ids


def _spelled(job: Job, **more: Any) -> list[str]:
    return [ORACLE.vocabulary.token_text(token) for token in _ids(job, **more)]


_PLAIN: dict[str, Mapping[str, Any]] = {
    "defaults": {},
    "greedy": {"temperature": 0.0},
    "presence": {"presence_penalty": 1.5},
    "presence below 0": {"presence_penalty": -0.7, "temperature": 0.0},
    "frequency": {"frequency_penalty": 0.8},
    "frequency below 0": {"frequency_penalty": -0.4},
    "frequency among few": {"frequency_penalty": 0.8, "allowed_token_ids": (1, 2, 3, 4, 5, 6), "max_tokens": 40},
    "penalties among few": {
        "frequency_penalty": -0.3,
        "presence_penalty": 1.1,
        "repetition_penalty": 1.4,
        "allowed_token_ids": (0, 7, 8, 9, 10),
        "max_tokens": 40,
        "logprobs": 3,
        "logprobs_mode": "processed_logprobs",
    },
    "repetition": {"repetition_penalty": 1.7},
    "repetition below 1": {"repetition_penalty": 0.8, "temperature": 0.0},
    "all penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2, "top_p": 0.9},
    "greedy penalties": {
        "presence_penalty": 0.9,
        "frequency_penalty": 0.7,
        "repetition_penalty": 1.3,
        "temperature": 0.0,
    },
    "bias": {"logit_bias": {3: 4.0, 7: -100.0, 11: 2.5}},
    "bias for eos": {"logit_bias": {22: 12.0}, "min_tokens": 7},
    "allowed": {"allowed_token_ids": (1, 2, 3, 5, 8, 13, 21)},
    "allowed and greedy": {"allowed_token_ids": (4, 6, 9), "temperature": 0.0, "frequency_penalty": 0.5},
    "bad words": {"bad_words": ("c", "ab", "fgh", "x", "kk")},
    "bad words of every pair": {"bad_words": tuple(f"{a}{b}" for a in "abcdefgh" for b in "ijklmnop")},
    "min tokens": {"min_tokens": 9, "stop_token_ids": (1, 3)},
    "min tokens and length": {"min_tokens": 11, "max_tokens": 11},
    "ignore eos": {"ignore_eos": True},
    "ignore eos, min tokens": {"ignore_eos": True, "min_tokens": 6},
    "stop ids": {"stop_token_ids": (0, 4, 9)},
    "stop ids included": {"stop_token_ids": (2, 7, 14), "include_stop_str_in_output": True},
    "stop at a letter": {"stop": ("q1", "2 b")},
    "max tokens 1": {"max_tokens": 1},
    "max tokens 2": {"max_tokens": 2, "ignore_eos": True},
    "max tokens 6": {"max_tokens": 6, "ignore_eos": True},
    "max tokens 11": {"max_tokens": 11, "logprobs": 1, "ignore_eos": True},
    "logprobs 0": {"logprobs": 0},
    "logprobs 3": {"logprobs": 3},
    "logprobs all": {"logprobs": -1, "temperature": 0.0},
    "logprobs processed": {"logprobs": 4, "logprobs_mode": "processed_logprobs", "top_k": 3, "presence_penalty": 0.8},
    "logprobs processed, all": {"logprobs": -1, "logprobs_mode": "processed_logprobs", "top_p": 0.8, "min_p": 0.02},
    "logprobs processed, greedy": {
        "logprobs": 2,
        "logprobs_mode": "processed_logprobs",
        "temperature": 0.0,
        "frequency_penalty": 0.6,
    },
    "prompt logprobs 0": {"prompt_logprobs": 0},
    "prompt logprobs 2": {"prompt_logprobs": 2, "logprobs": 2},
    "prompt logprobs all": {"prompt_logprobs": -1, "temperature": 0.0},
    "top k": {"top_k": 4},
    "top k 1": {"top_k": 1, "presence_penalty": 0.4},
    "top k above V": {"top_k": 1000, "top_p": 0.7},
    "top p": {"top_p": 0.6},
    "tiny top p": {"top_p": 1e-9},
    "min p": {"min_p": 0.1},
    "all filters": {"min_p": 0.01, "top_k": 7, "top_p": 0.85, "temperature": 1.7},
    "cold": {"temperature": 1e-6, "frequency_penalty": 0.3, "logprobs": 1, "logprobs_mode": "processed_logprobs"},
    "hot": {"temperature": 30.0},
    "greedy with filters": {"temperature": 0.0, "top_k": 5, "top_p": 0.2, "min_p": 0.3, "presence_penalty": 0.2},
    "processor": {"logits_processors": (push_away,)},
    "two processors": {"logits_processors": (after_prompt, push_away), "repetition_penalty": 1.1},
    "truncated prompt": {"truncate_prompt_tokens": 2, "prompt_logprobs": 1, "repetition_penalty": 1.4},
    "prompt cut to fit": {"truncate_prompt_tokens": -1},
    "grammar": {"structured_outputs": _walk("first")},
    "grammar, eos ignored": {"structured_outputs": _walk("third"), "ignore_eos": True, "logprobs": 2},
    "grammar, penalties": {
        "structured_outputs": _walk("fourth"),
        "frequency_penalty": 1.0,
        "logprobs": 3,
        "logprobs_mode": "processed_logprobs",
        "logits_processors": (push_away,),
        "min_tokens": 3,
    },
}

_PLANTED: dict[str, Callable[[Job], dict[str, Any]]] = {
    "greedy grammar": lambda job: {"structured_outputs": _walk(f"greedy {job.params.seed}"), "temperature": 0.0},
    "stop inside a token": lambda job: _inside(job, 9),
    "stop inside a token, included": lambda job: _inside(job, 8, include_stop_str_in_output=True),
    "stop over tokens": lambda job: _across(job, 7),
    "stop over tokens, included": lambda job: _across(job, 10, include_stop_str_in_output=True, logprobs=1),
    "stop and min tokens": lambda job: _inside(job, 4, min_tokens=6),
    "stop, penalties, logprobs": lambda job: _across(
        job, 11, presence_penalty=0.6, logprobs=2, logprobs_mode="processed_logprobs", temperature=0.0
    ),
    "stop id late": lambda job: _stop_id(job, 12, frequency_penalty=0.9),
    "stop id and stop string": lambda job: _stop_id(job, 9) | _inside(job, 9) | {"include_stop_str_in_output": True},
    "everything": lambda job: _across(
        job,
        10,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        logit_bias={1: 1.0, 2: -1.0},
        bad_words=("d", "ee"),
        min_tokens=5,
        logits_processors=(after_prompt,),
        top_k=12,
        top_p=0.97,
        min_p=0.001,
        logprobs=5,
        prompt_logprobs=1,
        logprobs_mode="processed_logprobs",
    ),
}

_UNCHANGED = ("defaults", "prompt cut to fit")
"""Cases that are what they would be without their parameters."""

NAMES = (*_PLAIN, *_PLANTED)
DRAFTERS = ("right", "wrong", "random", "oracle", "empty", "illegal", "ngram", "tree", "bush")


@functools.cache
def case(name: str) -> Case:
    """A case by name, with a prompt of its own, so that a text tells whose it is.

    The first of many prompts and seeds whose text is long enough, ends where the case wants it, and is not what it
    would be without the case's parameters: a case in which nothing happens proves nothing.
    """
    index = NAMES.index(name)
    for attempt in range(500):
        more = 600 if name == "prompt cut to fit" else (0, 1, 5, 37)[index % 4]
        prompt = [index % V, index // V, attempt % V, *((attempt + 7 * i) % 11 for i in range(more))]
        params = SamplingParams(temperature=0.9, seed=1000 * index + attempt, max_tokens=20).resolved(
            SamplingDefaults()
        )
        plain = Job(prompt, params, arrives=index % 3)
        changes = _PLAIN[name] if name in _PLAIN else _PLANTED[name](plain)
        job = replace(plain, params=replace(params, **changes))
        found = Case(name, job, ORACLE.decode(job))
        if _is_telling(found, ORACLE.decode(replace(plain, prompt=found.expected.prompt))):
            return found
    raise AssertionError(f"{name}: no prompt shows what its parameters do")


def _is_telling(each: Case, plain: Expected) -> bool:
    params, expected = each.job.params, each.expected
    assert params.max_tokens is not None
    if len(expected.token_ids) < min(8, params.max_tokens):
        return False
    if params.stop and not expected.stop_reason:
        return False
    if (params.stop_token_ids or params.structured_outputs) and expected.finish_reason != "stop":
        return False
    return expected != plain or each.name in _UNCHANGED


def knowing_drafter(cases: Sequence[Case], *, errors: bool = True) -> ScriptedDrafter:
    """Right but for errors planted at every seventh position; what is behind the end, or in other texts, is made up."""
    texts = [each.expected.prompt + each.expected.token_ids for each in cases]

    def script(ask: Ask) -> Draft:
        length = len(ask.token_ids)
        text = next((text for text in texts if text[:length] == list(ask.token_ids)), [])
        known = [*text[length:], *((7 * i) % V for i in range(ask.num_draft_tokens))]
        ids = [(token + (errors and place % 7 == 5)) % V for place, token in enumerate(known, length)]
        return Draft.chain(ids[: ask.num_draft_tokens], "known")

    return ScriptedDrafter("oracle", script)


def bushy_drafter(cases: Sequence[Case], size: int) -> ScriptedDrafter:
    """Trees of every shape through the right texts."""
    texts = [each.expected.prompt + each.expected.token_ids for each in cases]

    def script_of(tokens: Sequence[int]) -> Sequence[int]:
        return next((text for text in texts if text[: len(tokens)] == list(tokens)), [])

    return bush_drafter(size, script_of)


def drafter_for(name: str, cases: Sequence[Case], model: HistoryModel = MODEL) -> Drafter:
    """A fresh drafter by the name it has in `DRAFTERS`."""
    size = model.vocab_size
    if name in ("right", "wrong", "tree"):
        draft = HistoryModel(size, order=model.order, errors=0.0 if name == "right" else 0.7)
        width = 3 if name == "tree" else 1
        return DraftModelDrafter(draft, TokenCache(num_lanes=16), max_model_len=MAX_LEN, tree_width=width)
    makers: dict[str, Callable[[], Drafter]] = {
        "random": lambda: random_drafter(size),
        "illegal": lambda: illegal_drafter(size),
        "empty": lambda: ScriptedDrafter("empty", lambda ask: Draft()),
        "ngram": lambda: NgramDrafter(1, 4),
        "oracle": lambda: knowing_drafter(cases),
        "bush": lambda: bushy_drafter(cases, size),
    }
    return makers[name]()
