"""`outpace doctor`: what it asks for, what it shows, and in which form."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from outpace.config import EngineConfig
from outpace.doctor.report import BitCheck, Costs, Examination
from outpace.errors import ModelNotFound
from tests.doctor.findings import NO_COMPILER, costs, findings, without_kernels


class Examiner:
    """Stands in for `examine`; `asked` has what it was called with."""

    def __init__(self, found: Examination | None = None, fault: BaseException | None = None) -> None:
        self.asked: list[tuple[EngineConfig, bool]] = []
        self._found, self._fault = found or findings(), fault

    def __call__(self, config: EngineConfig, *, with_model: bool, progress: Any) -> Examination:
        self.asked.append((config, with_model))
        progress("measuring steps, int8", 0, 2)
        if self._fault:
            raise self._fault
        progress("measuring steps, int8", 2, 2)
        return self._found


def test_everything_found_is_shown(outpace) -> None:
    result = outpace("doctor", examine=Examiner())
    assert result.code == 0
    for line in (
        "processor: a processor, 2 usable cores, no control group limits them, last-level cache 32 MiB",
        "memory: 14.2 GB free",
        "system: Linux 6.1, Python 3.11, torch 2.9",
        "kernels: native, compiled by GCC: 12.2.0: /cache/kernels/outpace-1.so",
        "fallback: torch: int8 rows; fp32 prepacked",
        "bits: int8: rows have the same bits in every pack; the same bits with 1 and 2 threads",
        "reading: 12.0 GB/s with 1 thread, 20.0 GB/s with 2 threads",
        "others: other programs used 0.0 cores meanwhile",
        findings().advice(),
    ):
        assert line in result.out.splitlines()
    rows = [line.split() for line in result.out.splitlines() if line.startswith("int8")]
    assert rows == [
        ["int8", "100", "MB", "10.0", "ms", "50", "%", "2.00"],
        ["int8", "1.00x", "1.50x", "2.00x", "25", "%"],
    ]
    assert "measuring steps, int8 ..." in result.err


def test_json_is_one_object_and_nothing_else(outpace) -> None:
    result = outpace("doctor", "--json", examine=Examiner())
    assert (result.code, result.out.count("\n")) == (0, 1)
    assert json.loads(result.out) == json.loads(json.dumps(findings().as_dict()))


def test_missing_kernels_and_busy_neighbours_are_no_failure(outpace) -> None:
    found = findings(
        kernels=without_kernels(),
        others=1.5,
        bits=(BitCheck("int8 (torch)", (1, 2), True, False, "rows have the same bits"),),
        costs=(costs("int8 (torch)", 9.0), Costs("fp32 (torch)", "torch", 2, skipped="needs 9 GB")),
    )
    result = outpace("doctor", examine=Examiner(found))
    assert result.code == 0
    assert f"kernels: not native: {NO_COMPILER}" in result.out
    assert "OTHER bits with 1 and 2 threads" in result.out
    assert "never" in result.out
    assert "Steps in fp32 (torch) were not measured: needs 9 GB." in result.out
    assert "Other programs used 1.5 cores meanwhile: the numbers are pessimistic." in result.out


def test_a_terminal_gets_a_grid_that_fits(outpace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    result = outpace(
        "doctor", examine=Examiner(findings(costs=(costs("a-model-with-a-rather-long-name-of-many-words"),)))
    )
    assert result.code == 0
    shown = re.sub(r"\x1b\[[\d;]*m", "", result.out)
    assert all(len(line) <= 60 for line in shown.splitlines())
    assert "processor  a processor" in shown and "14.2 GB free" in shown


@pytest.mark.parametrize(
    ("words", "config", "with_model"),
    [
        ([], EngineConfig(), False),
        (["--threads", "1"], EngineConfig(threads=1), False),
        (
            ["--model", "m", "--quantization", "none", "--dtype", "float16", "--kernels", "native", "--allow-pickle"],
            EngineConfig("m", quantization="none", dtype="float16", kernels="native", allow_pickle=True),
            True,
        ),
    ],
)
def test_options_reach_the_examination(outpace, words: list[str], config: EngineConfig, with_model: bool) -> None:
    examiner = Examiner()
    assert outpace("doctor", *words, examine=examiner).code == 0
    assert examiner.asked == [(config, with_model)]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--threads", "0"], "threads=0"),
        (["--threads", "100000"], "threads=100000"),
        (["--threads", "two"], "'two'"),
        (["--model", ""], "model=''"),
        (["--model", "m", "--quantization", "int3"], "quantization='int3'"),
        (["--quantization", "int4"], "--quantization belongs to a model: name one with --model"),
        (["--allow-pickle"], "--allow-pickle belongs to a model"),
        (["--temperature", "1"], "--temperature"),
        (["--print-config"], "--print-config"),
        (["m"], "m"),
    ],
)
def test_a_bad_option_is_refused_before_anything_is_measured(outpace, words: list[str], told: str) -> None:
    examiner = Examiner()
    result = outpace("doctor", *words, examine=examiner)
    assert (result.code, result.out, examiner.asked) == (2, "", [])
    assert told in result.err
    assert len(result.err.splitlines()) <= 2


@pytest.mark.parametrize(("fault", "code"), [(ModelNotFound("no model goes by 'm'"), 2), (KeyboardInterrupt(), 130)])
def test_a_missing_model_and_an_interrupt(outpace, fault: BaseException, code: int) -> None:
    result = outpace("doctor", "--model", "m", examine=Examiner(fault=fault))
    assert (result.code, result.out) == (code, "")
    assert "Traceback" not in result.err


def test_help_says_what_is_done_without_an_option(outpace) -> None:
    shown = " ".join(outpace("doctor", "--help").out.split())
    assert "(default: all usable cores)" in shown
    assert "(default: none, only layers of random weights)" in shown
    assert "--max-num-seqs" not in shown and "--speculative-model" not in shown and "None" not in shown
