"""benchmarks/kernels.py: products against torch's, tables against arithmetic by hand, a tiny model from end to end."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from outpace.config import EngineConfig
from outpace.errors import InvalidParameter
from outpace.models.native.layers import NativeHead
from outpace.models.native.library import why_unavailable
from tests.models.gguf_files import write_gguf
from tests.models.tiny_models import tiny_decoder

FOLDER = Path(__file__).parents[2] / "benchmarks"
SHAPES = ((40, 64), (16, 96))
native = pytest.mark.skipif(why_unavailable() is not None, reason="the native kernels do not run on this processor")


@pytest.fixture(autouse=True)
def benchmarks_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


@pytest.fixture
def kernels() -> ModuleType:
    return importlib.import_module("kernels")


@pytest.fixture
def products() -> ModuleType:
    return importlib.import_module("kernel_products")


@pytest.fixture
def models() -> ModuleType:
    return importlib.import_module("kernel_models")


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "tiny.gguf")
    return str(tmp_path / "tiny.gguf")


def error_of(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result - expected).norm() / expected.norm())


def test_every_kernel_multiplies(products: ModuleType) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator) * shape[1] ** -0.5 for shape in SHAPES]
    found = {product.name: product for product in products.all_products(1, SHAPES, least_bytes=1)}
    assert {"torch f32", "torch bf16", "oneDNN f32"} <= set(found)
    assert why_unavailable() is not None or {f"native {kind}" for kind in ("f32", "f16", "int8", "int4")} <= set(found)
    allowed = {"f32": 1e-5, "f16": 1e-3, "bf16": 1e-2, "int8": 2e-2, "int4": 0.15}
    for name, product in found.items():
        if name.startswith("onnxruntime"):
            continue  # its weights are its own
        assert product.weights == sum(weight.numel() for weight in weights)
        for (apply, width), weight in zip(product.layers, weights, strict=True):
            assert width == weight.shape[1]
            rows = torch.randn(3, width, generator=generator)
            expected = F.linear(F.rms_norm(rows, (width,)) if name.startswith("native") else rows, weight)
            assert error_of(apply(rows).float(), expected) < allowed[name.split()[1]], name


def test_layers_are_repeated_until_they_are_large_enough(products: ModuleType) -> None:
    (product,) = [p for p in products.all_products(1, SHAPES, least_bytes=100_000) if p.name == "torch f32"]
    each = sum(4 * outputs * inputs for outputs, inputs in SHAPES)
    assert 100_000 <= product.bytes_read < 100_000 + each
    assert len(product.layers) == len(SHAPES) * product.bytes_read // each
    assert product.weights == product.bytes_read // 4


def test_seconds_are_those_of_100_million_weights(
    kernels: ModuleType, products: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[tuple[int, int]] = []
    product = products.Product("a kernel", 5_000, 10_000, ((lambda rows: shapes.append(tuple(rows.shape)), 8),) * 2)

    def one_second_a_row(run: Any, keys: Any, **options: Any) -> dict[Any, float]:
        for key in keys:
            run(key)
        return {key: float(key[1]) for key in keys}

    monkeypatch.setattr(kernels, "median_seconds", one_second_a_row)
    (record,) = kernels.measure_products([product], 5, (1, 2), (64,))
    assert record["bytes_per_weight"] == 0.5
    assert record["seconds"] == {"1": 10_000.0, "2": 20_000.0, "64": 640_000.0}
    assert shapes == [(1, 8)] * 2 + [(2, 8)] * 2 + [(64, 8)] * 2


def test_the_table_of_products_by_hand(kernels: ModuleType) -> None:
    record = {"kernels": "a kernel", "bytes_per_weight": 0.5, "weights": 7, "seconds": {"1": 0.01, "2": 0.015}}
    head, row = kernels.products_table([record], 20e9)
    # 50 MB in 10 ms are 5 GB/s, a quarter of 20.
    assert head == ["kernels", "bytes a weight", "1 row, ms", "2 rows, ms", "GB/s, 1 row", "of memory's"]
    assert row == ["a kernel", "0.500", "10.00", "15.00", "5.0", "25%"]
    assert kernels.markdown([head[:2], row[:2]]) == "| kernels | bytes a weight |\n|---|---|\n| a kernel | 0.500 |"


def test_the_table_of_a_model_by_hand(kernels: ModuleType) -> None:
    record = {
        "precision": "int8",
        "load_seconds": 1.25,
        "resident_bytes": 300e6,
        "resident_bytes_before": 100e6,
        "anonymous_bytes": 250e6,
        "anonymous_bytes_before": 50e6,
        "bytes_per_token": 100e6,
        "bytes_per_second": 20e9,
        "seconds": {"1": 0.01, "5": 0.02},
        "products_seconds": 0.006,
        "prefill_tokens_per_second": 123.44,
    }
    head, row, other = kernels.models_table([record, {**record, "products_seconds": None}])
    shown = dict(zip(head, row, strict=True))
    assert shown["resident MB (before)"] == "300 (100)" and shown["anonymous MB (before)"] == "250 (50)"
    # Its weights take 5 ms to read.
    assert (shown["step ms"], shown["/ floor"], shown["products ms"], shown["V(5)"]) == (
        "10.00",
        "2.00",
        "6.00",
        "2.00",
    )
    assert (shown["prefill tokens/s"], shown["MB a token"]) == ("123.4", "100")
    assert dict(zip(head, other, strict=True))["products ms"] == "-"


def test_names_of_precisions(models: ModuleType) -> None:
    assert models.engine_config("m", "file") == EngineConfig("m", quantization="file")
    assert models.engine_config("m", "none") == EngineConfig("m", quantization="none")
    assert models.engine_config("m", "bfloat16") == EngineConfig("m", dtype="bfloat16")
    assert models.engine_config("m", "torch-int8") == EngineConfig("m", quantization="int8", kernels="torch")
    assert models.engine_config("m", "torch-float32") == EngineConfig("m", dtype="float32", kernels="torch")
    for unknown in ("int3", "cuda-int8"):
        with pytest.raises(InvalidParameter):
            models.engine_config("m", unknown)


@native
def test_bare_products_are_all_that_a_token_meets(models: ModuleType) -> None:
    decoder = tiny_decoder("qwen2", "int8")
    products = models.bare_products(decoder)
    assert len(products) == 7 * decoder.num_layers + 1
    for product in products:
        product.result.fill_(float("nan"))
        product()
        assert product.result.isfinite().all()
    head = products[-1]
    again = NativeHead(decoder.config, torch.ones(decoder.hidden_size), decoder.head._matrix, "")
    assert torch.equal(head.result, again.logits(head.row))


def test_torch_kernels_have_no_bare_products(models: ModuleType) -> None:
    assert models.bare_products(tiny_decoder("llama", "torch none")) == []


def test_resident_bytes(models: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "status").write_text("Name:\tpython\nVmRSS:\t    1000 kB\nRssAnon:\t     400 kB\nThreads:\t2\n")
    assert models.resident_bytes(tmp_path / "status") == {"VmRSS": 1_024_000, "RssAnon": 409_600}


@pytest.mark.parametrize("precision", [pytest.param("int4", marks=native), "torch-float32"])
def test_a_model_in_this_process(models: ModuleType, tiny: str, precision: str) -> None:
    record = models.measure_model(tiny, precision, 1, (1, 2, 5), 2)
    assert list(record["seconds"]) == ["1", "2", "5"]
    assert (record["products_seconds"] is None) == precision.startswith("torch")
    assert record["prefill_rows"] == 128  # all of its context
    assert record["bytes_per_token"] > 0 and record["prefill_tokens_per_second"] > 0
    assert record["resident_bytes"] >= record["anonymous_bytes"] > 0
    json.dumps(record, allow_nan=False)


def test_a_model_in_processes_of_its_own(
    kernels: ModuleType, tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kernels.main(
        ["--threads=1", "--rounds=1", f"--model={tiny}", "--precisions=torch-float32", f"--save={tmp_path}/m.1"]
    )
    saved = json.loads((tmp_path / "m.1.json").read_text())
    assert [row["precision"] for row in saved["rows"]] == ["torch-float32"]
    assert saved["threads"] == 1 and saved["model"] == tiny and saved["bytes_per_second"] > 0
    assert (tmp_path / "m.1.md").read_text() in capsys.readouterr().out


def test_products_from_end_to_end(
    kernels: ModuleType, products: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "all_products", lambda threads: products.all_products(threads, SHAPES, least_bytes=1))
    kernels.main(["--threads=1", "--rounds=1", f"--save={tmp_path}/linear"])
    saved = json.loads((tmp_path / "linear.json").read_text())
    assert {"torch f32", "oneDNN f32"} <= {row["kernels"] for row in saved["rows"]}
    assert all(list(map(int, row["seconds"])) == [1, 2, 3, 5, 8, 12, 16, 64, 256] for row in saved["rows"])
    assert "| kernels | bytes a weight | 1 row, ms |" in (tmp_path / "linear.md").read_text()
