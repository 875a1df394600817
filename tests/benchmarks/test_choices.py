"""What is compared: contenders by name, prompts by task, and how far logits are from the reference."""

from __future__ import annotations

import json
import math
from pathlib import Path

import gguf
import numpy as np
import pytest
from engines.contenders import REFERENCE, Places, all_contenders, select
from engines.model_files import EncodedPrompt, choose_prompts, parse_tasks, score_texts
from engines.quality import compare_logits
from engines.rewrite_gguf import rewrite, unreadable_types

from tests.benchmarks.conftest import BENCHMARKS

PLACES = Places(Path("/nowhere"))


def names(*patterns: str) -> list[str]:
    return [one.name for one in select(all_contenders(["auto", "int8"], PLACES), patterns)]


def test_everybody_has_a_name_of_their_own_and_the_reference_is_among_them() -> None:
    found = names("")
    assert len(set(found)) == len(found) and REFERENCE in found


def test_contenders_are_named_by_beginnings_and_globs() -> None:
    assert names("outpace-int8") == [f"outpace-int8/{variant}" for variant in ("plain", "ngram", "draft", "self")]
    assert names("vllm*/draft", "openvino/p") == ["openvino/plain", "vllm-float32/draft", "vllm-bfloat16/draft"]
    with pytest.raises(ValueError, match="'nobody' names none of outpace-auto/plain"):
        names("openvino", "nobody")


def test_a_contender_that_cannot_run_says_what_is_missing(tmp_path: Path) -> None:
    by_name = {one.name: one for one in all_contenders(["auto"], Places(tmp_path))}
    places = Places(tmp_path)
    assert places.missing(by_name["outpace-auto/ngram"], has_draft=False) is None
    assert places.missing(by_name["outpace-auto/draft"], has_draft=False) == "no draft model was given"
    assert "no environment openvino" in str(places.missing(by_name["openvino/plain"], has_draft=True))
    assert "llama-server is not there" in str(places.missing(by_name["llama-server/plain"], has_draft=True))


def test_every_contender_has_a_worker() -> None:
    for one in all_contenders(["auto"], PLACES):
        assert (BENCHMARKS / "engines" / f"{one.worker}.py").is_file(), one.name


def test_tasks_are_read_with_and_without_counts() -> None:
    assert parse_tasks("code_edit=10, chat") == {"code_edit": 10, "chat": None}
    for wrong in ("chat=0", "chat=", "chat=two", "=3", ""):
        with pytest.raises(ValueError, match="is not a task"):
            parse_tasks(wrong)


def prompts(path: Path, *tasks: str) -> Path:
    lines = [json.dumps({"id": f"{path.stem}-{n}", "task": task, "messages": []}) for n, task in enumerate(tasks)]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_prompts_take_turns_and_come_from_the_first_file_that_has_the_task(tmp_path: Path) -> None:
    files = [
        prompts(tmp_path / "a.jsonl", "edit", "edit", "edit"),
        prompts(tmp_path / "b.jsonl", "edit", "chat", "chat"),
    ]
    found = [prompt["id"] for prompt in choose_prompts(files, {"edit": None, "chat": 1})]
    assert found == ["a-0", "b-1", "a-1", "a-2"]
    with pytest.raises(ValueError, match=r"chat=3 is not possible: there are 2"):
        choose_prompts(files, {"chat": 3})
    with pytest.raises(ValueError, match="no task is called 'sums'; known: chat, edit"):
        choose_prompts(files, {"sums": None})


def test_scored_texts_are_beginnings_and_few() -> None:
    many = [
        EncodedPrompt(str(n), "task", list(range(size))) for n, size in enumerate((1000, 20, 1, 300, 1000, 1000, 9))
    ]
    texts = score_texts(many)
    assert [len(text) for text in texts] == [180, 20, 180, 180, 140]
    assert texts[1] == list(range(20))


def test_the_edits_are_at_least_ten_programs_with_an_instruction() -> None:
    edits = [json.loads(line) for line in (BENCHMARKS / "edits.jsonl").read_text().splitlines()]
    assert len(edits) >= 10 and len({edit["id"] for edit in edits}) == len(edits)
    for edit in edits:
        (message,) = edit["messages"]
        instruction, _, code = message["content"].partition("\n```python\n")
        lines = code.removesuffix("\n```").splitlines()
        assert edit["task"] == "code_edit" and message["role"] == "user" and instruction
        assert 25 <= len(lines) <= 60, edit["id"]
        compile("\n".join(lines), edit["id"], "exec")  # what is to be edited is a program


def test_the_distance_of_logits_is_that_of_their_distributions(tmp_path: Path) -> None:
    shares = [[0.9, 0.05, 0.05], [0.5, 0.25, 0.25], [0.1, 0.2, 0.7], [0.8, 0.1, 0.1], [0.3, 0.3, 0.4]]
    first = np.log(np.array(shares, dtype=np.float32))
    second = first[:, [1, 0, 2]] + 5  # two ids change places; a shift changes nothing
    second[2] = first[2]
    np.save(tmp_path / "a.npy", first)
    np.save(tmp_path / "b.npy", np.hstack([second, np.full((5, 4), 90, np.float32)]))  # padding is not looked at
    found = compare_logits(tmp_path / "a.npy", tmp_path / "b.npy", [3, 2])  # rows 0 and 3 begin a text
    assert found.kl == pytest.approx(0.25 * math.log(2) / 3, abs=1e-6)
    assert (found.median_kl, found.positions) == (pytest.approx(0, abs=1e-6), 3)
    assert found.agreement == pytest.approx(2 / 3)
    assert compare_logits(tmp_path / "a.npy", tmp_path / "a.npy", [5]).kl == 0


def test_logits_of_other_texts_or_no_numbers_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((2, 3), np.float32))
    np.save(tmp_path / "b.npy", np.zeros((3, 3), np.float32))
    np.save(tmp_path / "c.npy", np.full((2, 3), np.nan, np.float32))
    with pytest.raises(ValueError, match="2 and 3 positions are not those"):
        compare_logits(tmp_path / "a.npy", tmp_path / "b.npy", [2])
    with pytest.raises(ValueError, match="are not those of texts of"):
        compare_logits(tmp_path / "a.npy", tmp_path / "a.npy", [2, 1])
    with pytest.raises(ValueError, match="no numbers"):
        compare_logits(tmp_path / "a.npy", tmp_path / "c.npy", [2])


def test_only_tensors_that_cannot_be_read_are_rewritten(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    kinds = gguf.GGMLQuantizationType
    source, target = tmp_path / "in.gguf", tmp_path / "out.gguf"
    writer = gguf.GGUFWriter(source, "llama")
    writer.add_block_count(1)
    writer.add_token_list(["a", "b"])
    for name, kind in (("odd", kinds.Q5_0), ("fine", kinds.Q4_1)):
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.add_tensor("norm", values[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert unreadable_types(source) == ["Q5_0"]
    rewrite(source, target)
    assert unreadable_types(target) == []
    before, after = gguf.GGUFReader(source), gguf.GGUFReader(target)
    assert after.fields["llama.block_count"].contents() == 1
    assert after.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    assert set(after.fields) == set(before.fields)
    pairs = {tensor.name: tensor for tensor in after.tensors}
    for old in before.tensors:
        new = pairs[old.name]
        wanted, found = gguf.dequantize(old.data, old.tensor_type), gguf.dequantize(new.data, new.tensor_type)
        assert new.tensor_type == (kinds.Q8_0 if old.name == "odd" else old.tensor_type)
        np.testing.assert_allclose(found, wanted, atol=0.02 if old.name == "odd" else 0)
