"""`outpace export --to ENGINE HEAD DIR`: an EAGLE-3 head in the layout that another engine reads."""

from __future__ import annotations

import argparse
from importlib import import_module

from outpace.cli.backend import Backend
from outpace.cli.streams import say

__all__ = ["add_arguments", "run"]

_USE = {
    "vllm": "vllm serve {folder}",
    "sglang": "--speculative-algorithm EAGLE3 --speculative-draft-model-path {folder}",
}
"""How the other engine is told of it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    parser.add_argument("head", metavar="HEAD", help="folder or hub id of an EAGLE-3 head, in either layout")
    parser.add_argument("folder", metavar="DIR", help="folder to write; a head that is there already is replaced")
    parser.add_argument("--to", choices=sorted(_USE), required=True, help="the engine that is to run it")
    parser.add_argument(
        "--target",
        metavar="NAME",
        help="the model it is for: hub id, folder, GGUF file or alias (default: the one that the head names)",
    )
    parser.add_argument(
        "--allow-pickle", action="store_true", help="read .bin weights, which can run code while they load"
    )


def run(arguments: argparse.Namespace, backend: Backend) -> int:
    """Reads, checks and writes; says how the other engine is told of it.

    Raises:
        OutpaceError: it cannot be read or written, or the other engine cannot run it.
    """
    # Imported when asked for: it brings torch with it.
    export = import_module("outpace.heads.export")
    export.export_head(
        arguments.head,
        arguments.folder,
        arguments.to,
        target=arguments.target,
        allow_pickle=arguments.allow_pickle,
        notify=say,
    )
    print(f"{arguments.folder} is for {arguments.to}: {_USE[arguments.to].format(folder=arguments.folder)}")
    return 0
