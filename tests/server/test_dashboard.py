"""The Grafana dashboard asks only for what /metrics has."""

from __future__ import annotations

import json
import re
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from outpace.async_llm import Load
from outpace.decisions import ControlReport, DrafterReport
from outpace.server.control_metrics import control_metrics
from outpace.server.metrics import Metrics

FILE = Path(__file__).parents[2] / "docs" / "grafana" / "outpace.json"
DASHBOARD: dict[str, Any] = json.loads(FILE.read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel.get("targets", [])]
VARIABLES = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
CONTROL = {family.name.removeprefix("outpace:") for family in control_metrics({}, "model")}
"""What the controller of drafts reports."""
SERIES = re.compile(r"((?:vllm|outpace):\w+)(?:\{([^}]*)\})?")


def exposed() -> dict[str, set[str]]:
    """{name of a sample: its labels} of a server with a drafter."""
    report = DrafterReport("ngram", 1, 2, 1.0, 1, 0.1, 0.1, 1.5, 1.4, None)
    control = ControlReport({"ngram": report}, 3, 1.0, 0.0)
    text = Metrics("model", Load, {"ngram": 2}, lambda: control).text()[0].decode()
    families = text_string_to_metric_families(text)
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


def test_every_expression_asks_for_metrics_and_labels_that_are_there() -> None:
    samples = exposed()
    asked = set()
    for expression in EXPRESSIONS:
        series = SERIES.findall(expression)
        assert series, expression
        for name, matchers in series:
            assert name in samples, name
            assert matchers == 'model_name=~"$model_name"', expression
            asked.add(name)
        grouped = re.findall(r"by \((\w+)\) \((?:rate\()?([\w:]+)", expression)
        assert len(grouped) == expression.count("by (")
        assert all(label in samples[name] for label, name in grouped), expression
    for wanted in ("drafts_total", "draft_tokens_total", "accepted_tokens_total", "accepted_tokens_per_pos_total"):
        assert f"vllm:spec_decode_num_{wanted}" in asked
    assert {name for name in asked if name.startswith("outpace:")} == {
        f"outpace:spec_decode_num_{name}_total" for name in ("drafts", "draft_tokens", "accepted_tokens")
    } | {name for name in samples if name.removeprefix("outpace:").removesuffix("_total") in CONTROL}
    assert len(CONTROL) == 6


def test_legends_name_labels_of_their_expression() -> None:
    for panel in PANELS:
        for target in panel.get("targets", []):
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert f"by ({label})" in target["expr"], target


def test_counters_are_rated_and_brackets_match() -> None:
    lines = Metrics("model", Load).text()[0].decode().splitlines()
    kinds = dict(line.removeprefix("# TYPE ").split() for line in lines if line.startswith("# TYPE "))
    for expression in EXPRESSIONS:
        depth = 0
        for character in expression:
            depth += (character in "([{") - (character in ")]}")
            assert depth >= 0, expression
        assert depth == 0, expression
        for name, _ in SERIES.findall(expression):
            rated = f"rate({name}{{" in expression
            assert rated == (kinds.get(name) != "gauge"), expression


def test_variables_are_defined_and_filled_from_metrics() -> None:
    text = FILE.read_text()
    used = set(re.findall(r"\$\{?(\w+)", text)) - {"__rate_interval"}
    assert used == VARIABLES == {"datasource", "model_name"}
    (model,) = [each for each in DASHBOARD["templating"]["list"] if each["name"] == "model_name"]
    ((name, label),) = re.findall(r"label_values\(([\w:]+), (\w+)\)", model["query"]["query"])
    assert label in exposed()[name]


def test_panels_have_a_place_of_their_own() -> None:
    assert isinstance(DASHBOARD["schemaVersion"], int) and DASHBOARD["schemaVersion"] >= 41
    ids = [panel["id"] for panel in PANELS]
    assert len(set(ids)) == len(ids)
    places = [panel["gridPos"] for panel in PANELS]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for one, other in combinations(places, 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_x or apart_y, (one, other)
    assert all(before["y"] <= after["y"] for before, after in pairwise(p for p in places if p["x"] == 0))
    assert all(panel["title"] and panel.get("description", "a row") for panel in PANELS)
