"""What came of training a head further: whether it is better than the one it began as, in `result.json` of the run.

Both were measured on the same held-out windows. A server takes a new head for an old one only if this says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.errors import CheckpointError
from outpace.models.checkpoint import read_json
from outpace.train.acceptance import Acceptance
from outpace.train.identity import Identity
from outpace.train.writing import write_json

if TYPE_CHECKING:
    from outpace.train.beginning import Beginning
    from outpace.train.outcome import Outcome

__all__ = ["RESULT", "Result", "read_result", "score", "weights_digest", "write_result"]

RESULT = "result.json"
_FORMAT = 1
_WORTH = 1.005
"""A head whose score is not so many times that of the old one is not called better: that may be chance."""
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
        old_length: mean acceptance lengths of the old one, at temperature 0 and 1.
        new_length: of the new one.
    """

    kind: str
    better: bool
    target: Mapping[str, Any]
    old: str
    new: str
    old_length: tuple[float, float]
    new_length: tuple[float, float]

    def describe(self) -> str:
        """Both numbers, for people."""
        (old_greedy, old_sampled), (new_greedy, new_sampled) = self.old_length, self.new_length
        return (
            f"mean acceptance length {new_greedy:.3f} at temperature 0 and {new_sampled:.3f} at 1, against "
            f"{old_greedy:.3f} and {old_sampled:.3f} of the head it began as"
        )


def score(acceptance: Acceptance) -> float:
    """What heads are compared by: tokens a step brings at temperature 0 and at 1, together."""
    return acceptance.greedy_length + acceptance.sampled_length


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


def write_result(folder: Path, new: Path, beginning: Beginning, identity: Identity, outcome: Outcome) -> bool:
    """Writes what came of a run that began as another head. Returns whether the new one is better.

    Args:
        folder: of the run.
        new: folder of its drafter.
        beginning: the old head.
        identity: of the target.
        outcome: of the run; it has one drafter.

    Raises:
        OutpaceError: it cannot be written.
    """
    [before], [after], [step] = outcome.first.values(), outcome.best.values(), outcome.best_steps.values()
    better = step > 0 and score(after) > _WORTH * score(before)
    write_json(
        folder / RESULT,
        {
            "format": _FORMAT,
            "kind": beginning.kind,
            "better": better,
            "target": identity.as_dict(),
            "old": {"folder": str(beginning.folder.absolute()), "weights": beginning.digest, **asdict(before)},
            "new": {"folder": str(new.absolute()), "weights": weights_digest(new), **asdict(after)},
            "step": step,
        },
    )
    return better


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
        lengths = [(float(found[k]["greedy_length"]), float(found[k]["sampled_length"])) for k in ("old", "new")]
        old, new = (str(found[which]["weights"]) for which in ("old", "new"))
        return Result(str(found["kind"]), found["better"] is True, found["target"], old, new, lengths[0], lengths[1])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged ({error!r}): train again") from error
