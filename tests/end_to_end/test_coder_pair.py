"""Qwen2.5-Coder 1.5B with the 0.5B as its draft: a real pair, as GGUF files in the folder OUTPACE_TEST_MODELS.

That folder (by default ~/.cache/outpace-test-models) holds qwen2.5-coder-1.5b-instruct-q4_k_m.gguf and the 0.5B file
of the same naming, as the models' makers publish them.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from outpace import LLM, SamplingParams, SpeculationParams, VocabularyMismatch

pytestmark = [pytest.mark.slow, pytest.mark.coder]

CONVERSATIONS = [
    [{"role": "user", "content": "Write a Python function that says whether a year is a leap year."}],
    [{"role": "user", "content": "Rename x to total:\ndef add(a, b):\n    x = a + b\n    print(x)\n    return x"}],
    [{"role": "user", "content": "What is a good name for a grey cat? Explain."}],
]


def model_file(size: str) -> str:
    folder = Path(os.environ.get("OUTPACE_TEST_MODELS", "~/.cache/outpace-test-models")).expanduser()
    path = folder / f"qwen2.5-coder-{size}-instruct-q4_k_m.gguf"
    if not path.is_file():
        pytest.fail(f"this test needs {path}; OUTPACE_TEST_MODELS names another folder", pytrace=False)
    return str(path)


@pytest.fixture(scope="module")
def llm() -> LLM:
    drafters = [model_file("0.5b"), "ngram", "self:24"]
    return LLM(model_file("1.5b"), drafters, max_model_len=1024, max_num_seqs=3, speculative_control="fixed")


@pytest.mark.parametrize(
    "params",
    [SamplingParams(temperature=0.0, max_tokens=80), SamplingParams(temperature=1.0, seed=3, max_tokens=80)],
    ids=["greedy", "T=1"],
)
def test_same_tokens_for_every_drafter_alone_and_in_a_batch(llm: LLM, params: SamplingParams) -> None:
    plain = [llm.chat(messages, params, SpeculationParams(enabled=False))[0] for messages in CONVERSATIONS]
    for method in ("draft_model", "ngram", "early_exit"):
        together = llm.chat(CONVERSATIONS, params, SpeculationParams(method=method, num_speculative_tokens=4))
        for alone, output in zip(plain, together, strict=True):
            assert output.outputs[0].token_ids == alone.outputs[0].token_ids
        if method == "draft_model":
            drafted, accepted = (
                sum(getattr(o.stats, f) for o in together) for f in ("draft_tokens", "accepted_tokens")
            )
            assert drafted * 0.2 < accepted < drafted


def test_the_pair_shares_a_vocabulary_and_smollm2_is_no_part_of_it(smollm2_path: Path) -> None:
    with pytest.raises(VocabularyMismatch, match="id 0"):
        LLM(model_file("0.5b"), str(smollm2_path), max_model_len=256)
