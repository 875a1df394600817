"""Steps before anybody asks: costs are known then, and nothing else has changed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from outpace.build import Built, build
from outpace.config import EngineConfig, SpeculativeConfig
from outpace.control.controller import AdaptiveController
from outpace.decisions import ControlReport
from outpace.warm_up import warm_up
from tests.test_build import write_model


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Built:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    folder = write_model(tmp_path / "target")
    draft = write_model(tmp_path / "draft", num_hidden_layers=1)
    config = EngineConfig(str(folder), quantization="none", threads=1, cache_tokens=512, max_num_seqs=4)
    return build(config, [SpeculativeConfig(method="auto", model=str(draft))])


def test_costs_are_known_and_nothing_else(built: Built) -> None:
    engine, controller = built.engine, built.engine.steering.controller
    assert isinstance(controller, AdaptiveController)
    knowledge = controller.knowledge
    warm_up(built, seconds=60.0)
    assert engine.steering.controller is controller
    assert knowledge.costs("draft_model").num_calls > 4
    assert knowledge.target.tables[1].num_passes > 8
    assert not knowledge.acceptances or not any(found.num_drafts for found in knowledge.acceptances.values())
    assert not engine.has_work and engine.free_rows == 512
    assert (engine.prefix_cache_queries, engine.prefix_cache_hits) == (0, 0)
    assert controller.report() == ControlReport({}, 0, 0.0, 0.0), "steps that answered nobody are not counted"
    engine.check_integrity()


@pytest.mark.parametrize("change", [{"speculative_control": "fixed"}, {"max_model_len": 12}])
def test_there_is_nothing_to_learn(built: Built, change: dict[str, object]) -> None:
    stepped: list[int] = []
    built.engine.step = lambda: stepped.append(1) or []  # type: ignore[method-assign,func-returns-value]
    warm_up(replace(built, config=replace(built.config, **change)))
    warm_up(replace(built, speculative=()))
    assert not stepped
