"""benchmarks/quality.py: its scores against arithmetic by hand, its tables on a tiny model and on SmolLM2."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from outpace.errors import InvalidParameter
from outpace.models.load import load_files
from outpace.models.resolve import ALIASES
from tests.models.gguf_files import write_gguf
from tests.models.tiny_models import lanes, pack_of, random_ids, tiny_decoder

FOLDER = Path(__file__).parents[2] / "benchmarks"
CONTEXT = 128  # of the tiny model
TEXTS = [
    {"id": "long", "text": "hello, well: " * 20},
    {"id": "short", "text": "All is well."},
    {"id": "talk", "messages": [{"role": "user", "content": "hello?"}, {"role": "assistant", "content": "Hello."}]},
]


@pytest.fixture
def quality(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("quality")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "some.jsonl"
    path.write_text("".join(json.dumps(text) + "\n" for text in TEXTS))
    return path


def tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> str:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "tiny.gguf", **options)
    return str(tmp_path / "tiny.gguf")


def test_scores_by_hand(quality: ModuleType) -> None:
    reference = torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.2, 0.6]]).log()
    logits = torch.tensor([[0.25, 0.5, 0.25], [0.2, 0.2, 0.6]]).log() + 7.0  # a shift says nothing
    scores = quality.score_rows(reference, logits, torch.tensor([1, 0]))
    # 1/2 ln 2 + 1/4 ln 1/2 + 1/4 ln 1
    assert scores.kl.tolist() == pytest.approx([0.25 * math.log(2), 0.0], abs=1e-6)
    assert scores.same.tolist() == [False, True]
    assert scores.loss.exp().tolist() == pytest.approx([2.0, 5.0], rel=1e-6)


def test_kl_is_of_the_other_from_the_reference(quality: ModuleType) -> None:
    sure, unsure = torch.tensor([[0.99, 0.01]]).log(), torch.tensor([[0.5, 0.5]]).log()
    next_token = torch.tensor([0])
    forward = 0.99 * math.log(1.98) + 0.01 * math.log(0.02)
    backward = 0.5 * math.log(0.5 / 0.99) + 0.5 * math.log(50.0)
    assert quality.score_rows(sure, unsure, next_token).kl.item() == pytest.approx(forward, rel=1e-5)
    assert quality.score_rows(unsure, sure, next_token).kl.item() == pytest.approx(backward, rel=1e-5)


def test_a_small_divergence_over_a_large_vocabulary_is_not_lost_in_rounding(quality: ModuleType) -> None:
    reference = torch.zeros(1, 2**17)
    logits = reference.clone()
    logits[:, ::2] += 2**-10
    exact = math.log(0.5 * (1 + math.exp(2**-10))) - 0.5 * 2**-10  # about d^2 / 8, 1.2e-7
    assert quality.score_rows(reference, logits, torch.tensor([0])).kl.item() == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_refused(quality: ModuleType, bad: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        quality.score_rows(torch.zeros(1, 2), torch.tensor([[0.0, bad]]), torch.tensor([0]))


def test_summary(quality: ModuleType) -> None:
    part = quality.Scores(
        kl=torch.arange(101, dtype=torch.float64),
        same=torch.tensor([True] * 25 + [False] * 76),
        loss=torch.full((101,), math.log(3.0), dtype=torch.float64),
    )
    found = quality.Scores.join([part, part]).summary()
    assert found["positions"] == 202 and found["kl_mean"] == 50.0 and found["kl_p99"] == 99.0
    assert found["greedy_agreement"] == pytest.approx(25 / 101) and found["perplexity"] == pytest.approx(3.0)


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_packs_are_the_logits_of_one_pass(
    quality: ModuleType, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality, "ROWS_PER_PACK", rows)
    decoder, ids = tiny_decoder("llama"), random_ids(50)
    packs = list(quality.computed_logits(decoder, ids))
    whole = decoder.forward(pack_of((0, 0, ids[:-1])), lanes(decoder, 1, 49)).logits
    assert [len(pack) for pack in packs] == [rows] * (49 // rows) + [49 % rows] * (49 % rows > 0)
    torch.testing.assert_close(torch.cat(packs), whole, rtol=1e-5, atol=1e-5)
    quality.keep_logits(tmp_path / "kept.npy", packs)
    kept = list(quality.kept_logits(tmp_path / "kept.npy"))
    assert len(kept) == len(packs) and all(map(torch.equal, kept, packs))
    same = quality.score(kept, packs, ids)
    assert same.kl.abs().max() == 0.0 and same.same.all()
    expected = -whole.double().log_softmax(-1)[torch.arange(49), torch.tensor(ids[1:])]
    torch.testing.assert_close(same.loss, expected, rtol=1e-5, atol=1e-5)


def test_table_of_a_tiny_model(
    quality: ModuleType,
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = tiny_model(tmp_path, monkeypatch)
    target = tmp_path / "out.json"
    quality.main([model, model, "--precisions", "int8", "int8", "--texts", str(texts), "--json", str(target)])
    saved = json.loads(target.read_text())
    assert saved["reference"] == "float32" and "torch" in saved["machine"] and len(saved["texts_sha256"]) == 64
    assert [entry["model"] for entry in saved["models"]] == ["tiny", "tiny"]
    assert saved["models"][0] == saved["models"][1]  # nothing in it is left to chance
    own, int8 = saved["models"][0]["table"]
    assert (own["precision"], own["kl_mean"], own["kl_p99"], own["greedy_agreement"]) == ("float32", 0.0, 0.0, 1.0)
    assert int8["precision"] == "int8" and 0 < int8["kl_mean"] < int8["kl_p99"]
    assert int8["perplexity"] > 1 and int8["perplexity"] != own["perplexity"]
    assert int8["bytes_per_token"] < own["bytes_per_token"] <= own["weight_bytes"]
    assert int8["texts"].keys() == {"long", "short", "talk"} and int8["texts"]["long"]["positions"] == CONTEXT - 1
    assert int8["positions"] == sum(text["positions"] for text in int8["texts"].values())
    printed = capsys.readouterr().out
    assert "| float32 | 0.00000 | 0.0000 | 100.00% |" in printed
    assert f"| {int8['weight_bytes']:,} | {int8['bytes_per_token']:,} |" in printed


def test_default_precisions_are_known_ones(quality: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(quality, "measure_model", lambda *args: asked.append(args))
    quality.main([])
    assert asked == [("smollm2-135m", quality.PRECISIONS, FOLDER / "texts.jsonl")]
    assert quality.PRECISIONS == ("file", "int8", "int4", "torch-int8")


def test_an_unknown_precision_is_refused_before_anything_is_computed(
    quality: ModuleType, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(tmp_path, monkeypatch)
    monkeypatch.setattr(quality, "load_decoder", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises(InvalidParameter, match="int3"):
        quality.measure_model(model, ["int8", "int3"], texts)


def test_conversations_are_left_out_without_a_chat_template(
    quality: ModuleType,
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = tiny_model(tmp_path, monkeypatch, metadata={"tokenizer.chat_template": None})
    found = quality.encode_texts(texts, load_files(model).tokenizer, CONTEXT)
    assert found.keys() == {"long", "short"} and len(found["long"]) == CONTEXT
    assert "talk: left out, tiny has no chat template" in capsys.readouterr().out


@pytest.mark.smollm2
def test_int8_of_smollm2_stays_near_fp32(quality: ModuleType, smollm2_path: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.jsonl"
    lines = (FOLDER / "texts.jsonl").read_text().splitlines()
    prose = next(text for text in map(json.loads, lines) if text["id"] == "prose")
    short.write_text(json.dumps({**prose, "text": prose["text"][:800]}))
    entry = quality.measure_model("smollm2-135m", ["int8"], short)
    assert entry["model"] == ALIASES["smollm2-135m"].label
    own, int8 = entry["table"]
    # Any mistake in the texts, the positions or the pairing of rows makes these nats and not hundredths.
    assert 0 < int8["kl_mean"] < 0.12 and int8["greedy_agreement"] > 0.8
    assert int8["perplexity"] == pytest.approx(own["perplexity"], rel=0.2) and 20 < own["perplexity"] < 120


@pytest.mark.smollm2
def test_texts_are_several_hundred_tokens_each(quality: ModuleType, smollm2_path: Path) -> None:
    tokenizer = load_files("smollm2-135m").tokenizer
    found = quality.encode_texts(FOLDER / "texts.jsonl", tokenizer, 10_000)
    assert list(found) == ["prose", "chat", "code", "numbers"]
    assert all(200 < len(ids) < 700 for ids in found.values())
