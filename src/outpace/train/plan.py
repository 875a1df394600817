"""One training run as it was asked for, kept in `run.json`, so that it goes on as it was begun."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from outpace.config import EngineConfig
from outpace.errors import CheckpointError
from outpace.models.checkpoint import read_json
from outpace.models.resolve import ALIASES, lasting_name
from outpace.models.threads import usable_cores
from outpace.train.data.sources import lasting_source
from outpace.train.settings import DataSettings, TrainSettings
from outpace.train.writing import write_json

__all__ = ["Plan", "keep_plan", "resumed"]

_RUN = "run.json"
_SOURCES = ("prompts", "text", "records")


@dataclass(frozen=True, slots=True)
class Plan:
    """One training run.

    Args:
        kind: early-exit, eagle3 or draft.
        engine: of the target.
        train: how.
        folder: of the run.
        data: folder of training data; None makes some in the run's folder.
        prompts: sources for it.
        text: sources for it.
        records: sources for it.
        data_settings: for it.
        preset: whose sources are taken where none is named.
        options: of this kind alone.
        tensorboard: write its files too.
        head: the head to begin as, instead of new weights: its folder, a run's folder or a hub id.
        resume: go on with what the folder has.
        made_for: whose run it is, if it is one to go on with, as `Identity.as_dict` said it.
    """

    kind: str
    engine: EngineConfig
    train: TrainSettings
    folder: Path
    data: Path | None
    prompts: tuple[str, ...]
    text: tuple[str, ...]
    records: tuple[str, ...]
    data_settings: DataSettings
    preset: str
    options: Mapping[str, Any]
    tensorboard: bool = False
    head: str | None = None
    resume: bool = False
    made_for: Mapping[str, Any] | None = None


def keep_plan(plan: Plan, made_for: Mapping[str, Any]) -> None:
    """Writes `run.json`: names in it mean the same from any folder.

    Args:
        plan: of the run.
        made_for: `Identity.as_dict` of the target.

    Raises:
        OutpaceError: it cannot be written.
    """
    model, threads = plan.engine.model, plan.engine.threads or usable_cores()
    # Another number of threads adds numbers in another order, and the run would not go on to the bit.
    engine = replace(plan.engine, model=model if model in ALIASES else lasting_name(model), threads=threads)
    found = {
        "kind": plan.kind,
        "made_for": dict(made_for),
        "engine": asdict(engine),
        "train": asdict(plan.train),
        "data": None if plan.data is None else str(plan.data.absolute()),
        "sources": {name: [lasting_source(name, each) for each in getattr(plan, name)] for name in _SOURCES},
        "data_settings": asdict(plan.data_settings),
        "preset": plan.preset,
        "options": dict(plan.options),
        "tensorboard": plan.tensorboard,
        "head": None if plan.head is None else lasting_name(plan.head),
    }
    write_json(plan.folder / _RUN, found)


def resumed(folder: Path, engine: Callable[[EngineConfig], EngineConfig]) -> Plan:
    """The plan of a run that was stopped.

    Args:
        folder: of the run.
        engine: changes the engine's settings where the user says so.

    Raises:
        CheckpointError: the folder holds no run, a damaged one, or one of a version of outpace with other settings.
    """
    path = folder / _RUN
    if not path.is_file():
        raise CheckpointError(f"{folder} holds no run to go on with ({_RUN} is missing)")
    found: Any = read_json(path)
    try:
        sources = found.get("sources", {})
        return Plan(
            kind=found["kind"],
            engine=engine(EngineConfig(**found["engine"])),
            train=TrainSettings(**found["train"]),
            folder=folder,
            data=Path(found["data"]) if found["data"] else None,
            **{name: tuple(sources.get(name, ())) for name in _SOURCES},
            data_settings=DataSettings(**found["data_settings"]),
            preset=found["preset"],
            options=found["options"],
            tensorboard=found["tensorboard"],
            head=found.get("head"),
            resume=True,
            made_for=found.get("made_for"),
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is damaged, or of a version of outpace with other settings ({error!r}): train again without "
            "--resume"
        ) from error
