"""docs/parameters.md is what its generator writes, and says everything."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

from outpace.config import VERIFICATIONS
from outpace.parameters import page
from outpace.params import SamplingParams, SpeculationParams
from outpace.refused import REFUSED, STRUCTURED_REFUSED
from outpace.structured import StructuredOutputs

PAGE = Path(__file__).parents[1] / "docs" / "parameters.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text("utf-8") == page(), "run: python -m outpace.parameters > docs/parameters.md"


def test_the_page_has_a_row_for_every_name() -> None:
    rows = [line for line in page().splitlines() if line.startswith("| `")]
    names = [line.split("`")[1] for line in rows]
    owners = (SamplingParams, StructuredOutputs, SpeculationParams)
    expected = [item.name for owner in owners for item in fields(owner)]
    assert names == [*expected, *VERIFICATIONS, *sorted(REFUSED), *sorted(STRUCTURED_REFUSED)]


def test_tables_are_whole() -> None:
    heads = {"name": 0, "value": 0}
    columns = 0
    for line in page().splitlines():
        if not line.startswith("|"):
            columns = 0
            continue
        cells = line.replace("\\|", "").count("|") - 1
        columns = columns or cells
        assert cells == columns, line
        heads[line.split("|")[1].strip()] = heads.get(line.split("|")[1].strip(), 0) + 1
    assert (heads["name"], heads["value"]) == (5, 1)


def test_the_generator_needs_no_torch() -> None:
    program = (
        "import runpy, sys; runpy.run_module('outpace.parameters', run_name='__main__'); "
        "print([m for m in ('torch', 'transformers') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, page())
    assert done.stderr.splitlines()[-1] == "[]"
