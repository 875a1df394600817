"""Which kernels and numbers every combination of settings gets, on every kind of machine and file."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import gguf
import pytest

from outpace.config import DTYPES, KERNELS, QUANTIZATIONS, EngineConfig
from outpace.errors import InvalidParameter
from outpace.models import selection
from outpace.models.checkpoint import Checkpoint
from outpace.models.load import load_files
from outpace.models.precision import Precision
from outpace.models.selection import precision_notes, select_precision
from tests.models.gguf_files import write_gguf

NATIVE_ONLY = ("int4", "file")
COMBINATIONS = list(itertools.product(KERNELS, QUANTIZATIONS, DTYPES))


def checkpoint(*, quantised: bool) -> Checkpoint:
    return cast(Checkpoint, SimpleNamespace(kinds={"a": "Q4_0"} if quantised else {}))


def machine(monkeypatch: pytest.MonkeyPatch, *, native: bool = True, int8: bool = True) -> None:
    monkeypatch.setattr(selection, "why_unavailable", lambda: None if native else "no compiler here")
    monkeypatch.setattr(selection, "has_int8", lambda: int8)


def resolved(kernels: str, quantization: str, dtype: str, **facts: bool) -> Precision | str:
    """What a combination has to give: a precision, or words of the refusal."""
    if kernels == "native" and not facts["native"]:
        return "kernels='native' is not possible: no compiler here; use kernels='torch'"
    used = "native" if facts["native"] and kernels != "torch" else "torch"
    if quantization == "auto":
        automatic = {
            ("native", True): "file",
            ("native", False): "int8",
            ("torch", True): "int8" if facts["int8"] else "none",
            ("torch", False): "int8" if facts["int8"] else "none",
        }[used, facts["quantised"]]
        quantization = automatic if dtype == "auto" else "none"
    if used == "torch" and quantization in NATIVE_ONLY:
        return f"quantization='{quantization}' needs the native kernels"
    if used == "torch" and dtype in ("float16", "bfloat16"):
        return f"dtype='{dtype}' needs the native kernels"
    if quantization != "none" and dtype != "auto":
        return f"dtype='{dtype}' goes with quantization='none', not with '{quantization}'"
    return Precision(quantization, dtype, used)


@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize("int8", [True, False])
@pytest.mark.parametrize("native", [True, False])
def test_every_combination(monkeypatch: pytest.MonkeyPatch, native: bool, int8: bool, quantised: bool) -> None:
    machine(monkeypatch, native=native, int8=int8)
    assert len(COMBINATIONS) == 3 * 5 * 4
    for kernels, quantization, dtype in COMBINATIONS:
        config = EngineConfig(kernels=kernels, quantization=quantization, dtype=dtype)
        wanted = resolved(kernels, quantization, dtype, native=native, int8=int8, quantised=quantised)
        if isinstance(wanted, Precision):
            assert select_precision(config, checkpoint(quantised=quantised)) == wanted
            continue
        with pytest.raises(InvalidParameter) as caught:
            select_precision(config, checkpoint(quantised=quantised))
        assert wanted in str(caught.value)


@pytest.mark.parametrize(
    ("facts", "settings", "wanted"),
    [
        ({}, {}, Precision("int8", "auto", "native")),
        ({"quantised": True}, {}, Precision("file", "auto", "native")),
        ({"quantised": True}, {"quantization": "none"}, Precision("none", "auto", "native")),
        ({"quantised": True}, {"dtype": "bfloat16"}, Precision("none", "bfloat16", "native")),
        ({}, {"quantization": "file"}, Precision("file", "auto", "native")),
        ({}, {"kernels": "torch"}, Precision("int8", "auto", "torch")),
        ({"int8": False}, {"kernels": "torch"}, Precision("none", "auto", "torch")),
        ({"native": False, "quantised": True}, {}, Precision("int8", "auto", "torch")),
        ({"native": False, "int8": False}, {}, Precision("none", "auto", "torch")),
        ({"native": False}, {"dtype": "float32"}, Precision("none", "float32", "torch")),
    ],
)
def test_the_usual_ones(
    monkeypatch: pytest.MonkeyPatch, facts: dict[str, bool], settings: dict[str, Any], wanted: Precision
) -> None:
    machine(monkeypatch, native=facts.get("native", True), int8=facts.get("int8", True))
    found = select_precision(EngineConfig(**settings), checkpoint(quantised=facts.get("quantised", False)))
    assert found == wanted


def test_descriptions_tell_precisions_apart() -> None:
    said = [
        Precision(*parts).describe()
        for parts in [
            ("none", "auto", "native"),
            ("none", "float32", "native"),
            ("none", "float16", "native"),
            ("none", "bfloat16", "native"),
            ("int8", "auto", "native"),
            ("int4", "auto", "native"),
            ("file", "auto", "native"),
            ("int8", "auto", "torch"),
            ("none", "auto", "torch"),
        ]
    ]
    assert len(set(said)) == len(said)


@pytest.mark.parametrize("quantize", [None, gguf.GGMLQuantizationType.Q4_0])
def test_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantize: Any) -> None:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "m.gguf", quantize=quantize)
    files = load_files(str(tmp_path / "m.gguf"))

    def notes(*precision: str) -> str:
        return "\n".join(precision_notes("m", files.checkpoint, Precision(*precision)))

    assert notes("file") == notes("int4") == ""
    assert ("quantization='file', its blocks as stored, takes" in notes("int8")) == (quantize is not None)
    on_torch = notes("int8", "auto", "torch")
    assert "torch's own kernels" in on_torch and "blocks as stored" not in on_torch
