"""What came of training a head further: whether it is better than the one it began as, in `result.json` of the run.

Both were measured on the same held-out texts, none of which had a part in choosing the new one. A server takes a new
head for an old one only if this says so.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.errors import CheckpointError
from outpace.models.checkpoint import read_json
from outpace.train.identity import Identity
from outpace.train.writing import write_json

if TYPE_CHECKING:
    from outpace.train.beginning import Beginning
    from outpace.train.comparing import Comparison

__all__ = ["RESULT", "Result", "read_result", "weights_digest", "write_result"]

RESULT = "result.json"
_FORMAT = 1
_WEIGHTS = ("*.safetensors", "*.bin")
_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class Result:
    """What `result.json` says.

    Args:
        kind: eagle3 or early-exit.
        better: whether the new head is accepted more often.
        target: whom both are for, as `Identity.as_dict` gave it.
        old: digest of the weights it began as.
        new: digest of its own.
        said: both in numbers, for people.
    """

    kind: str
    better: bool
    target: Mapping[str, Any]
    old: str
    new: str
    said: str


def weights_digest(folder: Path) -> str:
    """Hash of the files of weights in a folder.

    Raises:
        CheckpointError: there are none, or they cannot be read.
    """
    digest = hashlib.sha256()
    files = sorted(path for pattern in _WEIGHTS for path in folder.glob(pattern))
    if not files:
        raise CheckpointError(f"{folder} holds no weights")
    for path in files:
        try:
            with path.open("rb") as file:
                while piece := file.read(_PIECE):
                    digest.update(piece)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def write_result(folder: Path, old: Beginning, new: Beginning, identity: Identity, comparison: Comparison) -> None:
    """Writes what came of a run that began as another head.

    Args:
        folder: of the run.
        old: the head it began as.
        new: the head that came of it.
        identity: of the target.
        comparison: of both.

    Raises:
        OutpaceError: it cannot be written.
    """
    heads = {"old": (old, comparison.old), "new": (new, comparison.new)}
    found = {
        "format": _FORMAT,
        "kind": new.kind,
        "better": comparison.is_better,
        "said": comparison.describe(),
        "target": identity.as_dict(),
        "texts": comparison.texts,
        "gain": comparison.gain,
        "doubt": None if math.isinf(comparison.doubt) else comparison.doubt,
    }
    for name, (head, acceptance) in heads.items():
        found[name] = {"folder": str(head.folder.absolute()), "weights": head.digest, **asdict(acceptance)}
    write_json(folder / RESULT, found)


def read_result(folder: Path) -> Result | None:
    """What a run's folder says; None if it has no result, because it began as no other head or is not done.

    Raises:
        CheckpointError: it is damaged, or of another version.
    """
    path = folder / RESULT
    if not path.is_file():
        return None
    found: Any = read_json(path)
    if found.get("format") != _FORMAT:
        raise CheckpointError(f"{path}: format {found.get('format')!r} is not {_FORMAT}: train again")
    try:
        old, new = (str(found[which]["weights"]) for which in ("old", "new"))
        return Result(str(found["kind"]), found["better"] is True, found["target"], old, new, str(found["said"]))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged ({error!r}): train again") from error
