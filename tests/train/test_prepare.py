"""From sources to windows on disk: answers are asked once, splits do not overlap, damage is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outpace import LLM, SamplingParams
from outpace.errors import BadInput, CheckpointError
from outpace.train.data import shards
from outpace.train.data.answers import ANSWERS, read_answers
from outpace.train.data.prepare import DataPlan, Tools, prepare_data
from outpace.train.data.shards import BYTES_PER_TOKEN, read_data
from outpace.train.settings import DataSettings
from tests.train.tiny import ENGINE, TEMPLATE, World, save_target

SETTINGS: dict[str, Any] = {"window": 32, "validation": 0.3, "max_prompts": 9, "max_tokens": 8, "batch": 4}


@pytest.fixture(scope="module")
def llm(target_folder: Path) -> LLM:
    return LLM(str(target_folder), "suffix", max_num_seqs=4, **ENGINE)


class Counting:
    """An engine that counts what it is asked, and may be stopped at the n-th batch."""

    def __init__(self, llm: LLM, stop_at: int = 0) -> None:
        self._llm, self._left, self.asked = llm, stop_at, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def generate(self, prompts: list[list[int]], params: list[SamplingParams]) -> Any:
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt
        self.asked += len(prompts)
        return self._llm.generate(prompts, params)


def tools(world: World, make: Callable[[], Any], said: list[str] | None = None) -> Tools:
    notify = (said if said is not None else []).append
    return Tools(world.files, world.identity, make, notify, lambda *_: None)


def no_engine() -> Any:
    raise AssertionError("nobody has to be asked")


def plan(**changes: Any) -> DataPlan:
    sources = {name: changes.pop(name, ()) for name in ("prompts", "text", "records")}
    return DataPlan(**sources, settings=DataSettings(**{**SETTINGS, **changes}))


def test_answers_are_the_models_own_and_asked_once(world: World, llm: LLM, tmp_path: Path) -> None:
    engine, said = Counting(llm), []
    data = prepare_data(plan(prompts=["builtin"]), tmp_path, tools(world, lambda: engine, said))
    assert engine.asked == 9
    assert "9 prompts with at most 72 tokens of answers" in said[0]
    answers = read_answers(tmp_path / ANSWERS)
    assert len(answers) == 9
    prompt, answer = next(iter(answers.values()))
    again = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=8))[0]
    assert answer == again.outputs[0].token_ids
    labelled = torch.cat([data.train.ids[data.train.labels], data.valid.ids[data.valid.labels]])
    assert len(labelled) <= sum(len(item[1]) for item in answers.values())
    assert set(answer) <= set(labelled.tolist())
    once_more = prepare_data(plan(prompts=["builtin"]), tmp_path, tools(world, no_engine))
    assert torch.equal(once_more.train.ids, data.train.ids)


def test_a_run_that_was_stopped_goes_on(world: World, llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        prepare_data(plan(prompts=["builtin"], batch=1), tmp_path, tools(world, lambda: Counting(llm, stop_at=2)))
    path = tmp_path / ANSWERS
    assert len(read_answers(path)) == 4
    path.write_bytes(path.read_bytes() + b'{"key": "half a li')  # as a crash may leave it
    engine = Counting(llm)
    data = prepare_data(plan(prompts=["builtin"]), tmp_path, tools(world, lambda: engine))
    assert engine.asked == 5
    whole = prepare_data(plan(prompts=["builtin"]), tmp_path / "whole", tools(world, lambda: llm))
    assert torch.equal(data.train.ids, whole.train.ids)
    assert torch.equal(data.valid.ids, whole.valid.ids)
    assert len(path.read_text().splitlines()) == 9


def test_prompts_without_room_for_an_answer_are_left_out(world: World, llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text("".join(json.dumps({"prompt": "why " * n}) + "\n" for n in (1, 2, 3, 4, 500)))
    prepare_data(plan(prompts=[str(path)], max_tokens=40), tmp_path, tools(world, lambda: llm))
    assert len(read_answers(tmp_path / ANSWERS)) == 4


def test_conversations_that_the_template_refuses_are_left_out(world: World, llm: LLM, tmp_path: Path) -> None:
    """Before the first answer, not after hours of them, and with the reason."""
    path = tmp_path / "talks.jsonl"
    talks = [[{"role": "user", "content": f"say {n} to me"}] for n in range(8)]
    talks[3] = talks[5] = [{"role": "judge", "content": "guilty"}]
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    strict = "{% if messages[0].role != 'user' %}{{ raise_exception('no such role') }}{% endif %}" + TEMPLATE
    picky = World(save_target(tmp_path / "picky", template=strict))
    engine, said = Counting(LLM(str(tmp_path / "picky"), "none", **ENGINE)), []
    prepare_data(plan(prompts=[str(path)]), tmp_path / "out", tools(picky, lambda: engine, said))
    assert engine.asked == 6
    assert any("2 of 8 conversations are left out, the first because: " in line and "no such role" in line
               for line in said)  # fmt: skip
    path.write_text(json.dumps({"messages": talks[3]}) + "\n")
    with pytest.raises(BadInput, match="no such role"):
        prepare_data(plan(prompts=[str(path)]), tmp_path / "none", tools(picky, no_engine))


def test_every_prompt_has_a_seed_of_its_own(world: World, llm: LLM, tmp_path: Path) -> None:
    seeds: list[dict[tuple[int, ...], int | None]] = []

    class Noting(Counting):
        def generate(self, prompts: list[list[int]], params: list[SamplingParams]) -> Any:
            seeds[-1].update({tuple(ids): item.seed for ids, item in zip(prompts, params, strict=True)})
            return super().generate(prompts, params)

    for number, seed in enumerate((0, 0, 1)):
        seeds.append({})
        made = plan(prompts=["builtin"], temperature=1.0, seed=seed)
        prepare_data(made, tmp_path / str(number), tools(world, lambda: Noting(llm)))
    assert len(set(seeds[0].values())) == len(seeds[0]) == 9
    assert seeds[0] == seeds[1]
    assert all(seeds[2][ids] != seed for ids, seed in seeds[0].items() if ids in seeds[2])


def test_answers_in_another_precision_are_others(world: World, llm: LLM, tmp_path: Path) -> None:
    prepare_data(plan(prompts=["builtin"]), tmp_path, tools(world, lambda: llm))
    engine = Counting(llm)
    prepare_data(plan(prompts=["builtin"]), tmp_path, replace(tools(world, lambda: engine), precision=" int4"))
    assert engine.asked == 9


def test_a_single_text_is_trained_on_and_measured(world: World, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("words and words " * 60)
    for seed in range(6):  # held out by some seeds, to train on by others
        made = plan(text=[str(tmp_path / "t.txt")], seed=seed)
        data = prepare_data(made, tmp_path / "out", tools(world, no_engine))
        assert (len(data.train), len(data.valid)) == (29, 1)


def test_other_parameters_are_other_answers(world: World, llm: LLM, tmp_path: Path) -> None:
    prepare_data(plan(prompts=["builtin"]), tmp_path, tools(world, lambda: llm))
    engine = Counting(llm)
    prepare_data(plan(prompts=["builtin"], temperature=1.0), tmp_path, tools(world, lambda: engine))
    assert engine.asked == 9


def test_a_damaged_line_is_named(world: World, tmp_path: Path) -> None:
    (tmp_path / ANSWERS).write_text('{"key": 1}\n{"key": "a", "prompt_token_ids": [1], "token_ids": [2]}\n')
    with pytest.raises(BadInput, match=r"answers.jsonl, line 1 is damaged"):
        prepare_data(plan(prompts=["builtin"]), tmp_path, tools(world, no_engine))


def test_given_answers_are_kept_or_asked_anew(world: World, llm: LLM, tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "because " * 4}]
    path = tmp_path / "talks.jsonl"
    answers = [{**talk[1], "content": f"{n} because of it"} for n in range(9)]
    path.write_text("".join(json.dumps({"messages": [talk[0], answer]}) + "\n" for answer in answers))
    kept = prepare_data(plan(prompts=[str(path)], keep_answers=True), tmp_path / "a", tools(world, no_engine))
    assert "because of it" in world.files.tokenizer.decode(kept.train.ids[kept.train.labels].tolist())
    engine = Counting(llm)
    prepare_data(plan(prompts=[str(path)]), tmp_path / "b", tools(world, lambda: engine))
    assert engine.asked == 9


def test_texts_and_records(world: World, tmp_path: Path) -> None:
    for number in range(12):
        (tmp_path / f"{number}.txt").write_text(f"text number {number}. " * 9)
    records = tmp_path / "records.jsonl"
    records.write_text(json.dumps({"prompt_token_ids": [5, 6, 7], "token_ids": [8, 9]}) + "\n")
    made = plan(text=[str(tmp_path)], records=[str(records)], max_text_tokens=900)
    data = prepare_data(made, tmp_path / "out", tools(world, no_engine))
    both = torch.cat((data.train.ids, data.valid.ids)), torch.cat((data.train.labels, data.valid.labels))
    at = both[0].flatten().tolist().index(5)
    assert both[1].flatten()[at : at + 5].tolist() == [False, False, False, True, True]
    assert data.train.num_tokens + data.valid.num_tokens <= 905
    train, valid = ({tuple(row) for row in part.ids.tolist()} for part in (data.train, data.valid))
    assert len(valid) > 0
    assert not train & valid
    read = read_data(tmp_path / "out", world.identity)
    for one, other in ((read.train, data.train), (read.valid, data.valid)):
        assert all(torch.equal(getattr(one, name), getattr(other, name)) for name in ("ids", "pieces", "labels"))
    assert read.index["splits"]["train"]["labels"] == int(data.train.labels.sum())
    size = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
    assert size == pytest.approx(BYTES_PER_TOKEN * (data.train.ids.numel() + data.valid.ids.numel()), abs=1000)


def test_token_ids_beyond_the_vocabulary(world: World, tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps({"prompt_token_ids": [5, 6, 7], "token_ids": [100_000]}) + "\n")
    with pytest.raises(BadInput, match=r"token id 100000 is not one of the \d+ ids"):
        prepare_data(plan(records=[str(path)]), tmp_path, tools(world, no_engine))


def test_too_little_and_nothing(world: World, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no usable text: name --prompts"):
        prepare_data(plan(), tmp_path, tools(world, no_engine))
    (tmp_path / "short.txt").write_text("a few words")
    with pytest.raises(BadInput, match="no usable text: 1 windows of 32 tokens came of it, at least 2"):
        prepare_data(plan(text=[str(tmp_path / "short.txt")]), tmp_path / "out", tools(world, no_engine))
    assert not (tmp_path / "out" / "index.json").exists()


def test_prompts_need_a_chat_template(tmp_path: Path) -> None:
    world = World(save_target(tmp_path / "plain", template=None))
    with pytest.raises(BadInput, match=r"plain has no chat template.*--text"):
        prepare_data(plan(prompts=["builtin"]), tmp_path, tools(world, no_engine))


def test_data_of_another_model_and_damaged_data(world: World, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("words and words " * 60)
    out = tmp_path / "out"
    prepare_data(plan(text=[str(tmp_path / "t.txt")]), out, tools(world, no_engine))
    index = json.loads((out / "index.json").read_text())
    stranger = {**index["target"], "tokenizer": "0", "model": "x"}
    (out / "index.json").write_text(json.dumps({**index, "target": stranger}))
    with pytest.raises(CheckpointError, match=r"index.json was made for x \(tokenizer 0\), not for tiny"):
        read_data(out, world.identity)
    (out / "index.json").write_text(json.dumps(index))
    shard = out / "train-00000.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-9])
    with pytest.raises(CheckpointError, match=r"train-00000.safetensors is missing or damaged"):
        read_data(out, world.identity)
    with pytest.raises(BadInput, match="holds no training data"):
        read_data(tmp_path / "nowhere", world.identity)
    shard.write_bytes(whole)
    without = {**index["splits"]["valid"], "shards": []}
    for splits in ({}, {**index["splits"], "valid": without}, {"train": 1}):
        (out / "index.json").write_text(json.dumps({**index, "splits": splits}))
        with pytest.raises(CheckpointError, match=r"index.json is damaged"):
            read_data(out, world.identity)


def test_data_is_written_anew_or_not_at_all(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that dies while it replaces data leaves none, not windows of two kinds; old shards go."""
    (tmp_path / "t.txt").write_text("words and words " * 60)
    out = tmp_path / "out"
    prepare_data(plan(text=[str(tmp_path / "t.txt")]), out, tools(world, no_engine))
    (out / "train-00007.safetensors").write_text("of a larger data set")
    true_write, left = shards.write_bytes, 1

    def dying(path: Path, content: bytes, *, private: bool = False) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise MemoryError
        true_write(path, content, private=private)

    with monkeypatch.context() as patch:
        patch.setattr(shards, "write_bytes", dying)
        with pytest.raises(MemoryError):
            prepare_data(plan(text=[str(tmp_path / "t.txt")], window=16), out, tools(world, no_engine))
    with pytest.raises(BadInput, match="holds no training data"):
        read_data(out, world.identity)
    made = prepare_data(plan(text=[str(tmp_path / "t.txt")], window=16), out, tools(world, no_engine))
    assert torch.equal(read_data(out, world.identity).train.ids, made.train.ids)
    assert sorted(path.name for path in out.glob("*.safetensors")) == ["train-00000.safetensors",
                                                                      "valid-00000.safetensors"]  # fmt: skip
