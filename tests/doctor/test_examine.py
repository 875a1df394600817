"""A whole examination of a tiny sample, and of tiny and missing models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outpace.config import EngineConfig
from outpace.doctor import examine as examination
from outpace.doctor.examine import Plan, examine
from outpace.doctor.report import Examination
from outpace.doctor.sample import CONTEXT, SampleLayers, SampleWeights, layer_bytes, sample_config, with_layers
from outpace.errors import ModelNotFound
from outpace.models.native.library import why_unavailable
from outpace.models.precision import Precision
from tests.doctor.findings import NO_COMPILER, without_kernels
from tests.models.gguf_files import write_gguf

TINY = replace(sample_config(), hidden_size=64, intermediate_size=96, num_heads=4, num_kv_heads=2, head_dim=16)
PLAN = Plan(shape=TINY, weight_bytes=1, rows=(1, 2, 5), budget=0.0)
THREADS = EngineConfig(threads=1)
native = pytest.mark.skipif(why_unavailable() is not None, reason="the native kernels do not run on this processor")


def check_complete(found: Examination) -> None:
    for costs in found.costs:
        assert sorted(costs.seconds) == [1, 2, 5]
        assert costs.bytes_read > 0 and costs.bytes_per_second == found.bytes_per_second[found.threads] > 0
    assert [check.name for check in found.bits] == [costs.name for costs in found.costs]
    assert all(check.independent and check.same_on_all for check in found.bits)
    json.dumps(found.as_dict(), allow_nan=False)


@native
def test_every_precision_is_probed_and_measured() -> None:
    told: list[tuple[str, int, int]] = []
    found = examine(THREADS, plan=PLAN, progress=lambda *what: told.append(what))
    check_complete(found)
    assert [costs.name for costs in found.costs] == ["int8", "int4", "fp32"]
    assert {costs.layers for costs in found.costs} == {2}
    finished = {what for what, done, total in told if done == total}
    assert finished == {what for what, _, _ in told}
    assert {"comparing bits, int4", "measuring steps, fp32"} <= finished


@native
def test_with_several_threads_bits_are_compared_among_them() -> None:
    torch.set_num_threads(1)
    found = examine(EngineConfig(threads=2), plan=PLAN)
    check_complete(found)
    assert set(found.bytes_per_second) == {1, 2}
    assert {check.threads for check in found.bits} == {(1, 2)}
    assert torch.get_num_threads() == 1


def test_without_native_kernels_torch_is_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "find_kernels", without_kernels)
    found = examine(THREADS, plan=PLAN)
    check_complete(found)
    assert {costs.kernels for costs in found.costs} == {"torch"}
    assert found.costs[-1].name == "fp32 (torch)"
    assert any(NO_COMPILER in sentence for sentence in found.warnings())


def test_a_model_comes_first_and_under_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "tiny.gguf")
    found = examine(replace(THREADS, model=str(tmp_path / "tiny.gguf")), with_model=True, plan=PLAN)
    check_complete(found)
    assert found.bits[0].name == found.costs[0].name == "tiny"


def test_a_model_that_is_nowhere(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        examine(replace(THREADS, model=str(tmp_path / "nothing")), with_model=True, plan=PLAN)


def test_too_little_memory_for_the_steps_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "available_bytes", lambda: 1000)
    found = examine(THREADS, plan=PLAN)
    assert all(costs.skipped and "1 kB are free" in costs.skipped and not costs.seconds for costs in found.costs)
    json.dumps(found.as_dict(), allow_nan=False)


@pytest.mark.parametrize("cache", [None, 32 << 20, 1 << 30])
@pytest.mark.parametrize("quantization", ["int8", "none"])
def test_samples_are_larger_than_the_last_level_cache(
    cache: int | None, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examination, "last_level_cache_bytes", lambda: cache)
    precision = Precision(quantization, kernels="torch")
    weights = Plan().num_layers(precision) * layer_bytes(sample_config(), precision)
    assert weights >= max(280_000_000, 2 * (cache or 0))
    assert weights < max(280_000_000, 2 * (cache or 0)) + 2 * layer_bytes(sample_config(), precision)


@pytest.mark.parametrize(
    "precision", [Precision("int8", kernels="torch"), pytest.param(Precision("int4"), marks=native)], ids=str
)
def test_a_step_computes_its_rows_behind_the_context(precision: Any) -> None:
    shape = with_layers(TINY, 2)
    layers = SampleLayers(SampleWeights(shape), shape, precision, 5)
    five, two = layers.step(5), layers.step(2)
    assert five.shape == (5, TINY.hidden_size)
    assert five.isfinite().all()
    assert torch.equal(five[:2], two)
    assert CONTEXT == 256
