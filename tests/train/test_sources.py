"""Sources of prompts and text: what is read, in which order, and what is refused by file and line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outpace.errors import BadInput, CheckpointError
from outpace.train.data import sources
from outpace.train.data.builtin import TASKS, builtin_prompts
from outpace.train.data.recorded import HEADER, newest_header
from outpace.train.data.sources import lasting_source, read_prompts, read_records, read_texts
from outpace.train.identity import Identity

BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "prompts.jsonl"


def lines(path: Path, *values: Any) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_prompts_of_a_file_in_every_usual_form(tmp_path: Path) -> None:
    talk = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes?"}]
    path = lines(tmp_path / "a.jsonl", {"prompt": "one"}, {"messages": user("two")}, {"conversations": talk},
                 {"instruction": "three"}, {"question": "four", "answer": "4"})  # fmt: skip
    answered = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    expected = [user("one"), user("two"), answered, user("three"), user("four")]
    assert list(read_prompts([str(path)], 99, 0)) == expected
    assert list(read_prompts([str(tmp_path)], 2, 0)) == expected[:2]
    assert list(read_prompts([str(path), str(path)], 6, 0)) == [*expected, expected[0]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"title": "x"}', "line 2: no prompt; one of messages"),
        ("[1]", "line 2: a JSON object is needed"),
        ("{", "line 2 is not JSON: Expecting"),
        ('{"messages": ["x"]}', "line 2: a message must be"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(BadInput, match=message) as caught:
        list(read_prompts([str(path)], 99, 0))
    assert "bad.jsonl" in str(caught.value)


def test_sources_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="'nowhere' is no source"):
        list(read_prompts(["nowhere"], 1, 0))
    with pytest.raises(BadInput, match=r"holds no .jsonl file"):
        list(read_prompts([str(tmp_path)], 1, 0))
    with pytest.raises(BadInput, match="'nowhere' is no text"):
        list(read_texts(["nowhere"], 0))


def test_sources_by_names_that_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "docs"):
        (tmp_path / name).mkdir()
    assert lasting_source("text", "mine") == str(tmp_path / "mine")
    assert lasting_source("text", "docs") == "docs"  # as when it is read
    assert lasting_source("records", "docs") == str(tmp_path / "docs")
    for kind, name in (("prompts", "builtin"), ("prompts", "datasets:some/set"), ("text", "nowhere")):
        assert lasting_source(kind, name) == name


def test_a_data_set_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def broken_off() -> Iterator[dict[str, Any]]:
        yield {"prompt": "one"}
        raise ConnectionError

    def load_dataset(name: str, **options: Any) -> Iterable[dict[str, Any]]:
        asked.append((name, options))
        if name == "no/such":
            raise FileNotFoundError("not on the hub")
        if name == "breaks/off":
            return broken_off()
        if name == "some/table":
            return [{"column": 1}]
        return [{"prompt": "one"}, {"prompt": "two"}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert list(read_prompts(["datasets:some/set:test"], 1, 0)) == [user("one")]
    assert list(read_prompts(["datasets:some/set"], 9, 0)) == [user("one"), user("two")]
    assert asked[:2] == [
        ("some/set", {"split": "test", "streaming": True}),
        ("some/set", {"split": "train", "streaming": True}),
    ]
    with pytest.raises(BadInput, match=r"datasets:no/such cannot be loaded \(not on the hub\)"):
        list(read_prompts(["datasets:no/such"], 1, 0))
    with pytest.raises(BadInput, match=r"datasets:breaks/off cannot be loaded \(ConnectionError\)"):
        list(read_prompts(["datasets:breaks/off"], 9, 0))
    with pytest.raises(BadInput, match=r"datasets:some/table, row 1: no prompt"):
        list(read_prompts(["datasets:some/table"], 9, 0))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(BadInput, match=r"outpace\[train\]"):
        list(read_prompts(["datasets:some/set"], 1, 0))


def test_texts_are_files_that_are_text(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("print(1)\n")
    (tmp_path / "b.md").write_text("# B\n")
    (tmp_path / "c.bin").write_text("no text by its name")
    (tmp_path / "d.txt").write_bytes(b"\xff\xfe broken")
    (tmp_path / "e.txt").write_text("  \n")
    (tmp_path / "f.txt").write_text("zero \0 byte")
    assert sorted(read_texts([str(tmp_path)], 0)) == ["# B\n", "print(1)\n"]
    assert list(read_texts([str(tmp_path / "c.bin")], 0)) == ["no text by its name"]
    assert list(read_texts([str(tmp_path)], 1)) == list(read_texts([str(tmp_path)], 1))


def test_licences_and_lists_of_changes_are_no_text_worth_learning(tmp_path: Path) -> None:
    for name in ("copyright", "LICENSE", "Licence.txt", "COPYING.md", "changelog.rst", "README", "licensing.py"):
        (tmp_path / name).write_text(name)
    assert sorted(read_texts([str(tmp_path)], 0)) == ["README", "licensing.py"]
    assert list(read_texts([str(tmp_path / "copyright")], 0)) == ["copyright"]  # whoever names it wants it


def test_tests_of_the_standard_library_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "test" / "lib"  # where the library itself lies does not matter
    for name in ("a.py", "json/b.py", "test/c.py", "json/tests/d.py", "site-packages/e.py"):
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text(name)
    monkeypatch.setattr(sources.sysconfig, "get_paths", lambda: {"stdlib": str(library)})
    assert sorted(read_texts(["stdlib"], 0)) == ["a.py", "json/b.py"]


def test_the_standard_library_is_on_every_machine() -> None:
    text = next(read_texts(["stdlib"], 0))
    assert "def " in text or "import" in text


ME = Identity("me", "words", 10, 8, 2, "abc")


def test_records_are_token_ids(tmp_path: Path) -> None:
    path = lines(tmp_path / "r.jsonl", {"prompt_token_ids": [1, 2], "token_ids": [3]})
    assert list(read_records(str(path), ME)) == [([1, 2], [3])]
    lines(path, {"prompt_token_ids": [1, -2], "token_ids": [3]})
    with pytest.raises(BadInput, match="line 1: prompt_token_ids and token_ids"):
        list(read_records(str(path), ME))


def recorded(path: Path, identity: Identity, *answers: int) -> Path:
    said = [{"prompt_token_ids": [1], "token_ids": [answer]} for answer in answers]
    return lines(path, {HEADER: 1, "target": identity.as_dict(), "drafters": []}, *said)


def test_recorded_answers_come_newest_first_and_half_a_line_is_left_out(tmp_path: Path) -> None:
    recorded(tmp_path / "answers-20260101T000000-1-000001.jsonl", ME, 1, 2)
    last = recorded(tmp_path / "answers-20260102T000000-1-000001.jsonl", ME, 3, 4, 5)
    last.write_text(last.read_text()[:-3])
    lines(tmp_path / "mine.jsonl", {"prompt_token_ids": [1], "token_ids": [9]})
    assert [answer for _, [answer] in read_records(str(tmp_path), ME)] == [9, 4, 3, 2, 1]
    assert newest_header(tmp_path)["target"]["model"] == "me"


def test_what_another_model_said_is_refused(tmp_path: Path) -> None:
    path = recorded(tmp_path / "answers-1.jsonl", replace(ME, model="other", weights="def"), 1)
    with pytest.raises(CheckpointError, match=r"answers-1.* was made for other \(weights def\), not for me \(abc\)"):
        list(read_records(str(tmp_path), ME))
    lines(path, {HEADER: 2, "target": ME.as_dict()})
    with pytest.raises(CheckpointError, match="format 2 of recorded answers is not 1"):
        list(read_records(str(tmp_path), ME))


def test_files_of_another_model_are_left_out_where_there_are_others(tmp_path: Path) -> None:
    """A server was given another model, and went on recording into the same folder."""
    other = replace(ME, model="other", weights="def")
    recorded(tmp_path / "answers-1.jsonl", other, 1, 2)
    recorded(tmp_path / "answers-2.jsonl", ME, 3)
    lines(tmp_path / "answers-3.jsonl", {HEADER: 2, "target": ME.as_dict()})
    recorded(tmp_path / "answers-4.jsonl", ME, 4)
    said: list[str] = []
    assert [answer for _, [answer] in read_records(str(tmp_path), ME, said.append)] == [4, 3]
    [line] = said
    assert "2 of 4 files of recorded answers are left out" in line
    assert [answer for _, [answer] in read_records(str(tmp_path), other)] == [2, 1]


@pytest.mark.parametrize(
    "damage",
    [{"drafters": [1]}, {"drafters": 5}, {"engine": 5}, {"engine": {"model": 5}}, {"drafters": [{"model": []}]}],
)
def test_a_damaged_first_line_is_named(tmp_path: Path, damage: dict[str, Any]) -> None:
    lines(tmp_path / "answers-1.jsonl", {HEADER: 1, "target": ME.as_dict(), **damage})
    with pytest.raises(BadInput, match=r"answers-1\.jsonl, line 1 is damaged"):
        newest_header(tmp_path)
    with pytest.raises(BadInput, match=r"answers-1\.jsonl, line 1 is damaged"):
        list(read_records(str(tmp_path), ME))


def test_a_folder_without_recorded_answers_says_so(tmp_path: Path) -> None:
    lines(tmp_path / "mine.jsonl", {"prompt_token_ids": [1], "token_ids": [9]})
    (tmp_path / "answers-1.jsonl").write_text('{"outpace_rec')
    with pytest.raises(BadInput, match="holds no answers that `outpace serve --record"):
        newest_header(tmp_path)


def test_built_in_prompts_are_many_and_none_is_in_the_benchmark() -> None:
    """What is measured must not be what was trained on: not the prompt, and none of its longer lines either."""
    prompts = list(builtin_prompts(3000, 0))
    assert len(prompts) == len(set(prompts)) == 3000
    measured = set()
    for line in BENCHMARKS.read_text().splitlines():
        for message in json.loads(line)["messages"]:
            measured.update(part.strip() for part in message["content"].splitlines() if len(part.strip()) > 30)
    assert len(measured) > 40
    trained = {part.strip() for prompt in prompts for part in prompt.splitlines()}
    assert not measured & trained


def test_built_in_prompts_take_turns_and_are_the_same_again() -> None:
    first = list(builtin_prompts(64, 0))
    assert first == list(builtin_prompts(64, 0))
    assert first != list(builtin_prompts(64, 1))
    assert len(TASKS) == 9
    assert "```python" in first[2]
    assert list(builtin_prompts(0)) == []
