"""Remembers what was learnt from one run to the next: costs and acceptances of drafters, never of requests.

One JSON file a key. What is read counts as a guess that few observations outweigh. A file that is damaged, of another
key or another version is left alone with a note in the log: starting anew costs a few steps, nothing else.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

from outpace.control.acceptance import DrafterAcceptance
from outpace.control.costs import DraftCosts
from outpace.control.knowledge import FEW_DRAFTS, Knowledge
from outpace.control.row_costs import RowCosts

__all__ = ["file_of", "load", "save"]

log = logging.getLogger(__name__)

_FORMAT = 1
_MOST_BYTES = 4 << 20


def file_of(folder: Path, key: str) -> Path:
    """Where a key's numbers are."""
    return folder / f"control-{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


def save(knowledge: Knowledge, folder: Path, key: str) -> bool:
    """Writes what is known; a reader sees the old file or the new one. False, and a note, if that is not possible.

    Args:
        knowledge: what was learnt.
        folder: is made if it is missing.
        key: all that the numbers depend on: model, precision, machine.
    """
    content = {
        "format": _FORMAT,
        "key": key,
        "target": {str(threads): _rows(table) for threads, table in knowledge.target.tables.items()},
        "drafters": {
            name: {"passes": _rows(costs.passes), "row": costs.row, "stops": costs.stops}
            for name, costs in knowledge.draft_costs.items()
            if costs.num_calls
        },
        "acceptances": {
            name: [list(pair) for pair in acceptance.state()]
            for name, acceptance in knowledge.acceptances.items()
            if acceptance.num_drafts
        },
    }
    path, temporary = file_of(folder, key), None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=path.stem, suffix=".tmp")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file)
        os.replace(temporary, path)
    except OSError as error:
        log.info("what was learnt about drafts could not be kept in %s: %s", path, error)
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        return False
    return True


def load(knowledge: Knowledge, folder: Path, key: str) -> bool:
    """Adds what an earlier run learnt. False, and no change, if there is nothing usable; says so if there is a file."""
    path = file_of(folder, key)
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"{path.stat().st_size} bytes, more than {_MOST_BYTES}")
        content = json.loads(path.read_text(encoding="utf-8"))
        tables, drafters, acceptances = _read(content, key, knowledge)
    except FileNotFoundError:
        return False
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        log.info("what was learnt about drafts is not used: %s: %s: %s", path, type(error).__name__, error)
        return False
    knowledge.target.recall(tables)
    knowledge.draft_costs.update(drafters)
    knowledge.acceptances.update(acceptances)
    return True


def _rows(table: RowCosts) -> dict[str, Any]:
    return {"seconds": table.state()}


def _read(
    content: Any, key: str, knowledge: Knowledge
) -> tuple[dict[int, RowCosts], dict[str, DraftCosts], dict[str, DrafterAcceptance]]:
    if content["format"] != _FORMAT:
        raise ValueError(f"format {content['format']!r}, this version reads {_FORMAT}")
    if content["key"] != key:
        raise ValueError(f"it belongs to {content['key']!r}")
    tables = {int(threads): _table(entry) for threads, entry in content["target"].items()}
    drafters = {}
    for name, entry in content["drafters"].items():
        costs = knowledge.new_costs(name, row=_positive(entry["row"]), num_calls=1)
        costs.passes = _table(entry["passes"])
        costs.stops = entry["stops"] is True
        drafters[name] = costs
    acceptances = {}
    for name, pairs in content["acceptances"].items():
        acceptance = knowledge.new_acceptance(name)
        acceptance.num_drafts = FEW_DRAFTS
        acceptance.recall([(float(kept), float(seen)) for kept, seen in pairs])
        acceptances[name] = acceptance
    return tables, drafters, acceptances


def _table(entry: Any) -> RowCosts:
    return RowCosts.recalled([float(value) for value in entry["seconds"]])


def _positive(value: Any) -> float:
    number = float(value)
    if not 0.0 < number < float("inf"):
        raise ValueError(f"{value!r} is no positive number")
    return number
