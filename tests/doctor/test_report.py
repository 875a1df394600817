"""What follows from measured steps, against arithmetic by hand."""

from __future__ import annotations

import json

import pytest

from outpace.doctor.report import BitCheck, Costs
from tests.doctor.findings import NO_COMPILER, costs, findings, without_kernels


def test_costs_by_hand() -> None:
    found = costs(five=2.0)
    assert found.relative(5) == pytest.approx(2.0)
    # 100 MB in 10 ms are 10 GB/s, of 20 that can be read; twice the time is half the share.
    assert (found.bandwidth_share(1), found.bandwidth_share(5)) == (pytest.approx(0.5), pytest.approx(0.25))
    assert [found.speed_up(tokens) for tokens in (2, 3, 4)] == pytest.approx([1.0, 1.5, 2.0])
    # With a share a of four draft tokens accepted a step brings 1 + 4 a tokens, and costs 2.
    assert found.pays_from == pytest.approx(0.25)
    assert found.speed_up(1 + 4 * found.pays_from) == pytest.approx(1.0)


@pytest.mark.parametrize(("five", "pays_from"), [(0.9, 0.0), (1.0, 0.0), (5.0, 1.0), (6.0, 1.25)])
def test_where_speculation_begins_to_pay(five: float, pays_from: float) -> None:
    assert costs(five=five).pays_from == pytest.approx(pays_from)


def test_advice_is_one_sentence_about_all_precisions() -> None:
    mixed = findings(costs=(costs("int8", 2.0), costs("int4", 3.0), costs("fp32", 7.0))).advice()
    assert mixed == (
        "Speculation pays on this machine once more than 25 % (int8), 50 % (int4) of 4 draft tokens a step are "
        "accepted, if drafting costs nothing; never in fp32."
    )
    never = findings(costs=(costs("int8", 5.0), costs("fp32", 7.0))).advice()
    assert never == (
        "Speculation does not pay on this machine: a step of 5 rows brings at most 5 tokens and costs 5.0 or more "
        "steps of one."
    )
    unknown = findings(costs=(Costs("int8", "native", 6, skipped="needs 2 GB"),)).advice()
    assert unknown.endswith("nothing could be measured.")


def test_nothing_to_warn_of() -> None:
    assert findings().warnings() == []
    assert findings(others=None).warnings() == []


def test_every_warning_says_what_it_is_about() -> None:
    found = findings(
        others=1.34, kernels=without_kernels(), bits=(BitCheck("int4", (1, 2), False, False, "rows depend"),)
    ).warnings()
    for words, sentence in zip(("1.3 cores", NO_COMPILER, "int4", "--threads"), found, strict=True):
        assert words in sentence


def test_everything_found_is_json() -> None:
    skipped = Costs("fp32", "native", 2, skipped="needs 9 GB of memory, 1 GB are free")
    record = json.loads(json.dumps(findings(costs=(costs(), skipped)).as_dict(), allow_nan=False))
    assert record["machine"]["versions"] == {"Python": "3.11", "torch": "2.9"}
    assert record["bytes_per_second"] == {"1": 12e9, "2": 20e9}
    first, second = record["costs"]
    assert list(first["seconds"]) == ["1", "5"]
    assert first["relative"]["5"] == pytest.approx(2.0)
    assert first["bandwidth_share"]["1"] == pytest.approx(0.5)
    assert first["speed_up"]["4"] == pytest.approx(2.0)
    assert (second["relative"], second["speed_up"], second["pays_from"]) == ({}, {}, None)
    assert second["skipped"].startswith("needs 9 GB")
    assert record["warnings"] == [] and record["advice"].startswith("Speculation pays")
