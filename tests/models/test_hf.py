"""Every architecture of transformers is right over outpace's cache or refused by name; none is wrong."""

from __future__ import annotations

import functools
import random
from dataclasses import replace

import pytest
import torch

from outpace.drafters.ngram import NgramDrafter
from outpace.engine.engine import Engine
from outpace.errors import UnsupportedModel
from outpace.models.decoder import RowPath
from outpace.models.hf import TransformersModel
from outpace.models.hf_bits import probe_rows
from tests.engine.fakes import IdVocabulary, random_drafter
from tests.engine.harness import GREEDY, WARM, Job
from tests.models.hf_tiny import POSITIONS, REFUSED, RIGHT, VOCAB, eager_logits, tiny_model
from tests.models.tiny_models import pack_of, random_ids

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (150, 41, 7)
TOKENS = 10


@functools.cache
def adapted(kind):
    model = TransformersModel(tiny_model(kind))
    assert probe_rows(model).passed
    return model


@pytest.mark.parametrize("kind", RIGHT)
@pytest.mark.thinned(2)
def test_logits_are_the_models_own(kind):
    """Three requests in packs of random pieces, with drafts that are taken back, against eager passes of each alone."""
    source = random.Random(3)
    model, owner = adapted(kind), tiny_model(kind)
    texts = [random_ids(length, seed) for seed, length in enumerate(LENGTHS)]
    cache = model.new_cache(len(texts), 256, 3 * 256)
    assert [cache.allocate() for _ in texts] == [0, 1, 2]
    done, found = [0] * len(texts), [[] for _ in texts]
    while any(len(text) > count for text, count in zip(texts, done, strict=True)):
        parts, kept = [], []
        for lane, text in enumerate(texts):
            count = min(source.choice([0, 1, 1, 4, 9, 37]), len(text) - done[lane])
            wrong = source.choice([0, 0, 3]) if count else 0
            if count:
                cache.truncate(lane, done[lane]) if done[lane] < cache.reserved(lane) else None
                assert cache.reserve(lane, done[lane] + count + wrong)
                ids = text[done[lane] : done[lane] + count] + random_ids(wrong, seed=done[lane] + 50)
                parts.append((lane, done[lane], ids))
                kept.append((lane, count, len(ids)))
        if not parts:
            continue
        logits = model.forward(pack_of(*parts), cache).logits
        begin = 0
        for lane, count, size in kept:
            found[lane].append(logits[begin : begin + count])
            begin += size
            done[lane] += count
    for text, rows in zip(texts, found, strict=True):
        wanted = eager_logits(owner, text)
        torch.testing.assert_close(torch.cat(rows), wanted, atol=2e-4 * float(wanted.std()), rtol=2e-4)


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_by_name(kind):
    with pytest.raises(UnsupportedModel, match=REFUSED[kind][1]) as caught:
        TransformersModel(tiny_model(kind))
    assert kind in str(caught.value)


def make_engine(model, drafters, *, rows=512, max_rows=2400):
    return Engine(
        model,
        model.new_cache(8, 300, max_rows),
        {drafter.name: drafter for drafter in drafters},
        vocabulary=IdVocabulary(model.vocab_size),
        eos_ids=(),
        max_model_len=300,
        num_speculative_tokens={drafter.name: 4 for drafter in drafters},
        max_num_batched_tokens=rows,
    )


def run(engine, jobs):
    """Runs all jobs, each arriving some steps after the one before it, to their ends."""
    waiting, ids, done, step = list(jobs), [], {}, 0
    while len(done) < len(jobs):
        while waiting and waiting[0].arrives <= step:
            job = waiting.pop(0)
            ids.append(engine.submit(engine.prepare(job.prompt, job.params)))
        for output in engine.step():
            if output.finish_reason:
                done[output.request_id] = engine.take(output.request_id)
        engine.check_integrity()
        step += 1
    return [done[request_id] for request_id in ids]


def jobs():
    prompts = [random_ids(5, 1), random_ids(6, 2) * 22, random_ids(3, 4) * 9]
    return [
        Job(prompt, replace(params, max_tokens=TOKENS), arrives=index)
        for index, (prompt, params) in enumerate(zip(prompts, (GREEDY, WARM, GREEDY), strict=True))
    ]


def plain(model):
    """Each request alone, without drafts."""
    return [run(make_engine(model, ()), [replace(job, arrives=0)])[0].outputs[0].token_ids for job in jobs()]


def assert_same_tokens(model):
    wanted = plain(model)
    assert len({tuple(ids) for ids in wanted}) == len(wanted)
    for drafter, rows, max_rows in (("ngram", 512, 2400), ("random", 61, 170)):  # roomy; in chunks and preempting
        made = NgramDrafter(1, 4) if drafter == "ngram" else random_drafter(VOCAB)
        results = run(make_engine(model, (made,), rows=rows, max_rows=max_rows), jobs())
        assert [result.outputs[0].token_ids for result in results] == wanted
        assert sum(result.stats.draft_tokens for result in results) > 10


@pytest.mark.parametrize(
    "kind", [each if i % 2 == 0 else pytest.param(each, marks=pytest.mark.slow) for i, each in enumerate(RIGHT)]
)
def test_same_tokens_with_and_without_drafts(kind):
    assert_same_tokens(adapted(kind))


@pytest.mark.parametrize("path", [RowPath.ROW_ATTENTION, RowPath.SINGLE_ROWS])
@pytest.mark.thinned(2)
def test_same_tokens_on_the_slower_ways(path):
    model = TransformersModel(tiny_model("gemma2"))
    model.row_path = path
    assert path.value in model.describe()
    assert_same_tokens(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["gpt2", "mixtral"])
@pytest.mark.thinned(4)
def test_half_precision(kind, dtype):
    model = TransformersModel(tiny_model(kind, dtype))
    assert probe_rows(model).passed
    assert_same_tokens(model)


def test_what_the_engine_asks():
    owner = tiny_model("gpt2")
    model = TransformersModel(owner, vocab_size=90, max_model_len=100)
    assert (model.vocab_size, model.max_model_len, model.num_layers, model.hidden_size) == (90, 100, 3, 48)
    assert TransformersModel(owner).max_model_len == POSITIONS
    cache = model.new_cache(1, 20, 20)
    cache.reserve(cache.allocate(), 20)
    whole = model.forward(pack_of((0, 0, [1, 2, 3])), cache)
    some = model.forward(pack_of((0, 0, [1, 2, 3]), logits_rows=[0, 2]), cache)
    none = model.forward(pack_of((0, 0, [1, 2, 3]), logits_rows=[]), cache)
    assert whole.logits.shape == (3, 90) and whole.logits.dtype == torch.float32 and whole.aux == {}
    assert torch.equal(some.logits, whole.logits[[0, 2]])
    assert none.logits.shape == (0, 90)
    own = sum(weight.nbytes for weight in owner.parameters())
    assert own < model.bytes_per_token + owner.transformer.wpe.weight.nbytes + 1
    assert model.weight_bytes >= own
    assert model.describe().startswith("gpt2 on transformers' layers; ")
