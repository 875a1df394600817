"""benchmarks/control.py: what is compared, and that it comes to an end where nothing can be."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TASKS = {"a": "chat", "b": "maths"}


@pytest.fixture
def control(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("control")


def measured(control: ModuleType, rates: dict[str, list[float]]) -> Any:
    return control.Measured(rates=rates, expected={name: [1.5] * len(values) for name, values in rates.items()})


def test_texts_that_differ_are_left_out(control: ModuleType) -> None:
    """One of them even ended too early to count in one of the rounds."""
    found = {
        "plain": measured(control, {"a": [10.0, 10.0], "b": [10.0]}),
        "auto": measured(control, {"a": [20.0, 30.0], "b": [20.0, 90.0]}),
    }
    comparable = control.without(found, {"b"})
    (row,) = control.table_of(comparable, TASKS)
    assert row == {"way": "auto", "all": 2.5, "least": 2.5, "chat": 2.5, "accepted": None}
    assert [(gain["expected"], gain["real"]) for gain in control.gains_of(comparable, TASKS)] == [
        (1.5, 2.0),
        (1.5, 3.0),
    ]
    assert "| auto | 2.50 | 2.50 | 2.50 | - |" in control.text_of([row])


def test_nothing_to_compare_is_said(control: ModuleType) -> None:
    found = {"plain": measured(control, {"a": [10.0]}), "auto": measured(control, {"a": [20.0, 20.0]})}
    rows = control.table_of(control.without(found, {"a"}), TASKS)
    assert rows == [] and "nothing to compare" in control.text_of(rows)
