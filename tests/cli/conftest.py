from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from outpace.cli.backend import Backend
from outpace.cli.main import main
from tests.cli.stand_in import Script, StandIn


@dataclass
class Result:
    """What one call of the command left behind."""

    code: int
    out: str
    err: str
    llm: StandIn


@pytest.fixture(autouse=True)
def plain_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the caller's shell says about colours and terminals, tests begin without."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "OUTPACE_DEBUG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def outpace(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Runs the command line on a stand-in engine: outpace("generate", "Hi", script=Script(...))."""

    def call(
        *arguments: str,
        script: Script | None = None,
        llm: StandIn | None = None,
        models: tuple[str, ...] = (),
        examine: Callable[..., Any] | None = None,
    ) -> Result:
        stand_in = llm or StandIn(script or Script())
        backend = Backend(llm=stand_in, local_models=lambda: models)
        code = main(arguments, backend if examine is None else replace(backend, examine=examine))
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err, stand_in)

    return call
