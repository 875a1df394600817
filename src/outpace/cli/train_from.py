"""`outpace train --from DIR`: what a server that recorded answers says of its model and its head."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from outpace.errors import BadInput
from outpace.train.data.recorded import SERVED_AS, head_of, newest_header

__all__ = ["EPILOG", "Recorded", "add_option", "clear_refused", "free_name", "with_kind"]

EPILOG = (
    "`outpace train --from DIR [OPTIONS]` goes on with the drafter of the server that recorded DIR (`outpace serve "
    "--record DIR`), on what it was asked: KIND, model and head are those of the server."
)
_OPTIONS = {
    "--head": (
        "HEAD",
        "begin as this head instead of new weights, with its settings, and say at the end which of both is better: its "
        "folder, a run's folder, or a hub id",
    ),
    "--from": (
        "DIR",
        "answers that `outpace serve --record DIR` wrote; model, precision and head are those of the server unless "
        "given",
    ),
}
_OF_SERVER = ("model", "quantization", "dtype", "kernels")


@dataclass(frozen=True, slots=True)
class Recorded:
    """What is taken over from a server.

    Args:
        engine: settings of the engine, where the command line has none.
        head: to begin as; None for new weights.
        records: sources of answers.
    """

    engine: Mapping[str, Any] = field(default_factory=dict)
    head: str | None = None
    records: tuple[str, ...] = ()

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Recorded:
        """What the command line names; a head it names itself comes first.

        Raises:
            BadInput: the folder holds no recorded answers.
        """
        folder, head = getattr(arguments, "from", None), getattr(arguments, "head", None)
        if folder is None:
            return cls(head=head)
        header = newest_header(Path(folder).expanduser())
        said = header.get("engine", {})
        found = head_of(header, arguments.kind)
        engine = {name: said[name] for name in _OF_SERVER if name in said}
        return cls(engine, head or (None if found is None else found[1]), (folder,))


def add_option(group: Any, flag: str, kind: str) -> None:
    """Adds `--head` or `--from` for kinds that can be gone on with."""
    if kind in SERVED_AS:
        metavar, about = _OPTIONS[flag]
        group.add_argument(flag, metavar=metavar, help=about)


def with_kind(arguments: Sequence[str]) -> Sequence[str]:
    """`train --from DIR ...` as `train KIND --from DIR ...`, the kind being that of the head that the server used.

    Raises:
        BadInput: the folder holds no recorded answers, or the server used no head.
    """
    if len(arguments) < 2 or arguments[0] != "train" or not arguments[1].startswith("-"):
        return arguments
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--from", nargs="?", const="")
    folder = vars(finder.parse_known_args(arguments[1:])[0])["from"]
    if folder is None:
        return arguments
    if not folder:
        raise BadInput("--from needs a folder: name the one that `outpace serve --record DIR` writes to")
    found = head_of(newest_header(Path(folder).expanduser()))
    if found is None:
        raise BadInput(
            f"{folder} was recorded by a server without a head to go on with: name what is to be trained, as in "
            f"`outpace train eagle3 --from {folder}`"
        )
    return ["train", found[0], *arguments[1:]]


def clear_refused(folder: Path) -> None:
    """Takes the folder of a run away that was refused before there was anything in it but what was asked for."""
    kept = [path for path in folder.rglob("*") if path.is_file() and path != folder / "run.json"]
    if folder.is_dir() and not kept:
        shutil.rmtree(folder)


def free_name(name: str) -> str:
    """Who goes on again and again from the same recordings gets a new folder each time."""
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    return next(each for each in names if not Path(each).exists())
