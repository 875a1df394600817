"""Drafters that are replaced while requests run: the same tokens, the old one let go of, and what may go wrong."""

from __future__ import annotations

import asyncio
import threading
import weakref
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outpace.async_llm import AsyncLLM
from outpace.build import Built, build
from outpace.config import EngineConfig, SpeculativeConfig
from outpace.control.controller import AdaptiveController
from outpace.decisions import DraftCall
from outpace.drafters.feature_head import FeatureHeadDrafter
from outpace.engine.engine import Engine
from outpace.errors import CheckpointError, InvalidParameter, OutOfMemory, OutpaceError, Unavailable
from outpace.params import SamplingParams, SpeculationParams
from outpace.train.kinds.base import Kind
from outpace.train.kinds.eagle3 import Eagle3, Eagle3Options
from outpace.train.kinds.early_exit import EarlyExit
from tests.asynchronous import make_llm, run
from tests.engine.fakes import HistoryModel
from tests.train.tiny import ENGINE, EXIT, World, save_target

METHODS = ("eagle3", "early_exit")
PARAMS = [
    SamplingParams(temperature=0, max_tokens=60, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=5, max_tokens=60, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, repetition_penalty=1.3),
]
PROMPTS = [[20, 40, 60], list(range(30, 80)), [20, 40, 60, 7]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(save_target(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(scope="module")
def heads(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[SpeculativeConfig]]:
    """Two of each method; the adapters stand at different exits."""
    place = tmp_path_factory.mktemp("heads")
    found: dict[str, list[SpeculativeConfig]] = {"eagle3": [], "early_exit": []}
    for number, exit_layer in enumerate((EXIT, EXIT - 1)):
        vocab = torch.arange(number, world.material.vocab_size, 2)
        kinds: dict[str, Kind] = {
            "eagle3": Eagle3(world.material, vocab, Eagle3Options()),
            "early_exit": EarlyExit(world.material, [exit_layer]),
        }
        for method, kind in kinds.items():
            folder = place / f"{method}-{number}"
            kind.save(folder)
            named: dict[str, Any] = {"model" if method == "eagle3" else "adapter": str(folder)}
            found[method].append(SpeculativeConfig(method=method, num_speculative_tokens=4, **named))
    return found


def built(world: World, *drafters: SpeculativeConfig, **options: Any) -> Built:
    settings = {**ENGINE, "speculative_control": "fixed", "max_num_seqs": 4, **options}
    return build(EngineConfig(world.engine.model, **settings), drafters)


def answers(engine: Engine, world_built: Built, swaps: dict[int, SpeculativeConfig] | None = None) -> list[list[int]]:
    """Tokens of all prompts side by side; before the step of this number a drafter is replaced."""
    ids = [
        engine.submit(engine.prepare(prompt, params.resolved(world_built.defaults)))
        for prompt, params in zip(PROMPTS, PARAMS, strict=True)
    ]
    found: dict[int, list[int]] = {}
    number = 0
    while engine.has_work:
        if swaps and number in swaps:
            assert world_built.make_drafter is not None
            new = world_built.make_drafter(swaps[number])
            engine.replace_drafter(new.settings.method, new.drafter, new.relative_cost)
            engine.check_integrity()
        for output in engine.step():
            if output.finish_reason:
                found[output.request_id] = engine.take(output.request_id).outputs[0].token_ids
        number += 1
    engine.check_integrity()
    return [found[each] for each in ids]


@pytest.fixture(scope="module")
def plain(world: World) -> list[list[int]]:
    made = built(world)
    return answers(made.engine, made)


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_tokens_are_those_of_plain_decoding(
    world: World, heads: dict[str, list[SpeculativeConfig]], plain: list[list[int]], method: str, reuse: bool
) -> None:
    """Replaced before the first step, while prompts are read, and again and again in the middle of texts."""
    old, new = heads[method]
    made = built(world, old, enable_prefix_caching=reuse, max_num_batched_tokens=24)
    swaps = {0: new, 1: old, 2: new, 3: old, 7: new, 8: new, 12: old, 20: new}
    assert answers(made.engine, made, swaps) == plain
    assert made.engine.steering.controller.report().drafters[method].accepted > 0


@pytest.mark.parametrize("method", METHODS)
def test_the_new_one_drafts_and_the_old_one_is_gone(
    world: World, heads: dict[str, list[SpeculativeConfig]], plain: list[list[int]], method: str
) -> None:
    old, new = heads[method]
    made = built(world, old)
    assert answers(made.engine, made) == plain
    before = made.engine.memory()["drafter"]
    gone = weakref.ref(made.engine.drafting.drafters[method])
    assert made.make_drafter is not None
    replacement = made.make_drafter(new)
    made.engine.replace_drafter(method, replacement.drafter, replacement.relative_cost)
    assert gone() is None
    assert made.engine.drafting.drafters[method] is replacement.drafter
    drafted = made.engine.steering.controller.report().drafters[method].tokens
    assert answers(made.engine, made) == plain
    assert made.engine.steering.controller.report().drafters[method].tokens > drafted
    assert made.engine.memory()["drafter"] < 2 * before


def test_an_adapter_in_the_place_of_a_bare_exit_observes_every_row(
    world: World, heads: dict[str, list[SpeculativeConfig]], plain: list[list[int]]
) -> None:
    """Rows of kept prefixes are no use to it from then on, not even to requests that run."""
    bare = SpeculativeConfig(method="early_exit", exit_layer=1, num_speculative_tokens=4)
    made = built(world, bare)
    assert answers(made.engine, made) == plain
    assert made.engine.prefix_cache_queries > 0
    assert answers(made.engine, made, {5: heads["early_exit"][0], 12: heads["early_exit"][1]}) == plain
    queries = made.engine.prefix_cache_queries
    assert answers(made.engine, made) == plain
    assert made.engine.prefix_cache_queries == queries


@pytest.mark.parametrize("reuse", [True, False])
def test_a_new_head_sees_the_whole_text(
    world: World, heads: dict[str, list[SpeculativeConfig]], plain: list[list[int]], reuse: bool
) -> None:
    """Of requests that run, and of those that would have reused rows which were computed before it came."""
    old, new = heads["eagle3"]
    made = built(world, old, enable_prefix_caching=reuse)
    engine = made.engine
    assert answers(engine, made) == plain
    params = PARAMS[0].resolved(made.defaults)
    engine.submit(engine.prepare(list(range(200, 160, -1)), params))
    for _ in range(6):
        engine.step()
    assert made.make_drafter is not None
    replacement = made.make_drafter(new).drafter
    assert isinstance(replacement, FeatureHeadDrafter)
    engine.replace_drafter("eagle3", replacement)
    engine.submit(engine.prepare([*PROMPTS[1], 3], params))
    for _ in range(4):
        engine.step()
    seen = [rows.num_rows for rows in replacement._running.values() if rows is not None]
    assert sorted(count >= 40 for count in seen) == [True, True]
    assert max(seen) >= 50
    engine.check_integrity()


def test_others_go_on_where_they_are(
    world: World, heads: dict[str, list[SpeculativeConfig]], plain: list[list[int]]
) -> None:
    """Requests that the old one does not draft for keep their places."""
    made = built(world, heads["eagle3"][0])
    engine = made.engine
    request = engine.prepare(PROMPTS[0], PARAMS[0].resolved(made.defaults), SpeculationParams(enabled=False))
    engine.submit(request)
    for _ in range(5):
        engine.step()
    assert made.make_drafter is not None
    engine.replace_drafter("eagle3", made.make_drafter(heads["eagle3"][1]).drafter)
    assert request.lane is not None
    while engine.has_work:
        for output in engine.step():
            if output.finish_reason:
                assert engine.take(output.request_id).outputs[0].token_ids == plain[0]
    assert request.stats.preemptions == 0


def test_what_was_learnt_of_the_old_one_is_forgotten(
    world: World, heads: dict[str, list[SpeculativeConfig]], plain: list[list[int]]
) -> None:
    old, new = heads["eagle3"]
    suffix = SpeculativeConfig(method="suffix", num_speculative_tokens=4)
    made = built(world, suffix, old, speculative_control="adaptive")
    controller = made.engine.steering.controller
    assert isinstance(controller, AdaptiveController)
    knowledge = controller.knowledge
    for name in ("suffix", "eagle3"):
        knowledge.costs(name).observe(DraftCall(name, 1, 3, 0, 0.01), 0.02)
        knowledge.acceptance(name).num_drafts = 5
        knowledge.own(7, name)
        knowledge.branches_of(name)
    kept = knowledge.acceptance("suffix"), knowledge.costs("suffix"), knowledge.own(7, "suffix")
    lost = knowledge.acceptance("eagle3"), knowledge.costs("eagle3"), knowledge.own(7, "eagle3")
    assert made.make_drafter is not None
    replacement = made.make_drafter(new)
    assert replacement.relative_cost is not None
    made.engine.replace_drafter("eagle3", replacement.drafter, 0.123)
    assert not knowledge.is_known("eagle3")
    assert knowledge.settings.relative_costs["eagle3"] == 0.123
    again = knowledge.acceptance("eagle3"), knowledge.costs("eagle3"), knowledge.own(7, "eagle3")
    assert not any(before is now for before, now in zip(lost, again, strict=True))
    assert "eagle3" not in knowledge.branches
    assert (knowledge.acceptance("suffix"), knowledge.costs("suffix"), knowledge.own(7, "suffix")) == kept
    assert answers(made.engine, made) == plain


def test_what_is_learnt_of_the_new_one_is_kept_under_its_own_name(
    world: World, heads: dict[str, list[SpeculativeConfig]], plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: list[str] = []
    monkeypatch.setattr("outpace.control.memory.save", lambda knowledge, folder, key: keys.append(key))
    old, new = heads["eagle3"]
    made = built(world, old, speculative_control="adaptive")
    assert answers(made.engine, made) == plain
    made.close()
    made = made.with_drafter(new)
    made.close()
    assert [(str(old.model) in key, str(new.model) in key) for key in keys] == [(True, False), (False, True)]


def test_log_probabilities_of_a_prompt_come_once(world: World, heads: dict[str, list[SpeculativeConfig]]) -> None:
    """Replaced while the prompt is read, a part at a time."""
    found = []
    for swap in (False, True):
        made = built(world, heads["eagle3"][0], max_num_batched_tokens=24)
        params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, prompt_logprobs=1)
        engine, number = made.engine, 0
        request = engine.submit(engine.prepare(PROMPTS[1], params.resolved(made.defaults)))
        while engine.has_work:
            if swap and number in (1, 2):
                assert made.make_drafter is not None
                engine.replace_drafter("eagle3", made.make_drafter(heads["eagle3"][number % 2]).drafter)
            if any(output.finish_reason for output in engine.step()):
                output = engine.take(request)
                found.append((output.prompt_logprobs, output.outputs[0].token_ids))
            number += 1
    assert found[0] == found[1]
    assert found[0][0] is not None
    assert len(found[0][0]) == len(PROMPTS[1])


def test_only_a_loaded_drafter_can_be_replaced(world: World, heads: dict[str, list[SpeculativeConfig]]) -> None:
    made = built(world, heads["eagle3"][0])
    assert made.make_drafter is not None
    replacement = made.make_drafter(heads["early_exit"][0])
    with pytest.raises(InvalidParameter, match="drafter 'early_exit' cannot be replaced: loaded are eagle3"):
        made.engine.replace_drafter("early_exit", replacement.drafter)


def test_not_inside_a_step(world: World, heads: dict[str, list[SpeculativeConfig]]) -> None:
    made = built(world, heads["eagle3"][0])
    assert made.make_drafter is not None
    replacement = made.make_drafter(heads["eagle3"][1])
    raised: list[OutpaceError] = []

    def processor(*_: Any) -> Any:
        try:
            made.engine.replace_drafter("eagle3", replacement.drafter)
        except OutpaceError as error:
            raised.append(error)
        return _[-1]

    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logits_processors=[processor])
    engine = made.engine
    request = engine.submit(engine.prepare([20, 30], params.resolved(made.defaults)))
    while engine.has_work:
        if any(output.finish_reason for output in engine.step()):
            engine.take(request)
    assert raised
    assert "in the middle of a step" in str(raised[0])


# Through the asynchronous front, where a thread steps.


async def stream(llm: AsyncLLM, number: int, after: dict[int, asyncio.Event]) -> list[int]:
    """Tokens of one prompt; sets the event when so many have come."""
    prepared = await llm.prepare(PROMPTS[number], PARAMS[number])
    tokens: list[int] = []
    async with aclosing(llm.stream(prepared)) as chunks:
        async for chunk in chunks:
            tokens += chunk.token_ids
            for count, event in after.items():
                if len(tokens) >= count:
                    event.set()
    return tokens


@pytest.mark.parametrize("method", METHODS)
def test_in_the_middle_of_running_streams(
    world: World, heads: dict[str, list[SpeculativeConfig]], plain: list[list[int]], method: str
) -> None:
    old, new = heads[method]

    async def main() -> None:
        llm = AsyncLLM(built(world, old))
        async with llm:
            events = {10: asyncio.Event(), 30: asyncio.Event()}
            streams = [asyncio.ensure_future(stream(llm, n, events if n == 1 else {})) for n in range(3)]
            for item, event in zip((new, old), events.values(), strict=True):
                await event.wait()
                await llm.replace_drafter(item)
                assert llm.built.speculative[0].adapter == item.adapter
                assert llm.built.speculative[0].model == item.model
            assert list(await asyncio.gather(*streams)) == plain
            assert llm.built.in_use == list(llm.built.speculative)

    run(main())


def test_what_the_engine_goes_by_stays(world: World, heads: dict[str, list[SpeculativeConfig]]) -> None:
    """And is said to be what it is."""
    old, new = heads["eagle3"]
    names = ("num_speculative_tokens", "rejection_sample_method", "disable_by_batch_size", "tree_width")

    async def main() -> None:
        async with AsyncLLM(built(world, replace(old, num_speculative_tokens=2, disable_by_batch_size=3))) as llm:
            before = llm.built.speculative[0]
            await llm.replace_drafter(replace(new, num_speculative_tokens=6, tree_width=None))
            after = llm.built.speculative[0]
            assert after.model == new.model
            assert [getattr(after, name) for name in names] == [getattr(before, name) for name in names]
            assert (after.num_speculative_tokens, after.disable_by_batch_size) == (2, 3)

    run(main())


def test_a_drafter_that_cannot_be_loaded_leaves_the_old_one(
    world: World,
    heads: dict[str, list[SpeculativeConfig]],
    plain: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old, new = heads["eagle3"]
    assert new.model is not None
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("config.json", "model.safetensors"):
        content = (Path(new.model) / name).read_bytes()
        (broken / name).write_bytes(content[: -100 if name != "config.json" else None])

    async def main() -> None:
        llm = AsyncLLM(built(world, old))
        with pytest.raises(Unavailable, match="was not started"):
            await llm.replace_drafter(new)
        async with llm:
            drafter = llm.built.engine.drafting.drafters["eagle3"]
            with pytest.raises(CheckpointError, match=r"model\.safetensors"):
                await llm.replace_drafter(SpeculativeConfig(method="eagle3", model=str(broken)))
            with pytest.raises(InvalidParameter, match="no drafter of method 'early_exit' is loaded"):
                await llm.replace_drafter(heads["early_exit"][0])
            with monkeypatch.context() as patch:
                patch.setattr("outpace.models.memory.available_bytes", lambda: 1000)
                with pytest.raises(OutOfMemory):
                    await llm.replace_drafter(new)
            assert llm.built.engine.drafting.drafters["eagle3"] is drafter
            assert llm.built.speculative[0].model == old.model
            assert await stream(llm, 1, {}) == plain[1]
        with pytest.raises(Unavailable):
            await llm.replace_drafter(new)

    run(main())


def test_nobody_else_computes_with_the_cache_of_an_engine_that_runs(
    world: World, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exit that is not named would have to be tried, which takes a lane and rows of the same cache."""
    bare = SpeculativeConfig(method="early_exit", num_speculative_tokens=4)

    async def main() -> None:
        llm = AsyncLLM(built(world, bare, max_num_seqs=3))
        exit_layer = llm.built.speculative[0].exit_layer
        async with llm:
            cache, event = llm.built.engine.cache, asyncio.Event()
            streams = [asyncio.ensure_future(stream(llm, n, {5: event} if n == 1 else {})) for n in range(3)]
            await event.wait()
            allocate, callers = cache.allocate, set[str]()

            def watched() -> int | None:
                callers.add(threading.current_thread().name)
                return allocate()

            monkeypatch.setattr(cache, "allocate", watched)
            with pytest.raises(InvalidParameter, match="name exit_layer or adapter"):
                await llm.replace_drafter(bare)
            assert list(await asyncio.gather(*streams)) == plain
            await llm.replace_drafter(SpeculativeConfig(method="early_exit", exit_layer=1, num_speculative_tokens=4))
            assert await stream(llm, 0, {}) == plain[0]
            assert callers <= {"outpace-engine"}
            assert (exit_layer, llm.built.speculative[0].exit_layer) != (None, None)
            assert llm.failure is None

    run(main())


def test_a_call_into_the_engines_thread() -> None:
    """What it returns and raises reaches the caller; nobody waits for ever if the thread ends first."""

    async def main() -> None:
        llm = make_llm(HistoryModel())
        async with llm:
            thread = llm._thread
            assert thread is not None
            name = await asyncio.wrap_future(thread.call(lambda engine: threading.current_thread().name))
            assert name == "outpace-engine"

            def fails(engine: Engine) -> None:
                raise ValueError("mine")

            with pytest.raises(ValueError, match="mine"):
                await asyncio.wrap_future(thread.call(fails))
            assert thread.ended is None
            held = threading.Event()
            first = thread.call(lambda engine: held.wait(60))
            thread.stop()
            late = thread.call(lambda engine: None)
            held.set()
            assert await asyncio.wrap_future(first)
            with pytest.raises(Unavailable):
                await asyncio.wrap_future(late)
            with pytest.raises(Unavailable):
                thread.call(lambda engine: None)

    run(main())
