"""`outpace swap URL RUN`: a better head into a server that is running."""

from __future__ import annotations

import argparse
import json
import os
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from outpace.cli.backend import Backend
from outpace.cli.streams import say
from outpace.errors import BadInput, OutpaceError

__all__ = ["add_arguments", "run"]

_KEYS = ("OUTPACE_API_KEY", "VLLM_API_KEY")
_PATIENCE = 600.0
"""Seconds in which a head has to be loaded."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    parser.add_argument("url", metavar="URL", help="of the server, such as http://127.0.0.1:8000")
    parser.add_argument(
        "folder", metavar="RUN", help="folder of a run of `outpace train`, or of a head, on the server's machine"
    )
    parser.add_argument("--force", action="store_true", help="put it in place whatever the run says about being better")
    parser.add_argument("--api-key", metavar="KEY", help=f"the server's (default: ${_KEYS[0]} or ${_KEYS[1]})")


def run(arguments: argparse.Namespace, backend: Backend) -> int:
    """Asks the server, and says what it did. Prints its answer as JSON.

    Raises:
        BadInput: the URL is none.
        OutpaceError: the server refused, or cannot be reached.
    """
    if not _is_address(arguments.url):
        raise BadInput(f"{arguments.url!r} is no server: write http://HOST:PORT")
    folder = Path(arguments.folder).expanduser()
    place = str(folder.absolute()) if folder.exists() else arguments.folder
    answer = _ask(arguments.url, _key(arguments), {"run": place, "force": arguments.force})
    swapped = answer["swapped"]
    say(f"{swapped['method']} now drafts with {swapped.get('model') or swapped.get('adapter')} ({answer['reason']})")
    print(json.dumps(answer))
    return 0


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0  # asking may raise
    except ValueError:
        return False


def _key(arguments: argparse.Namespace) -> str | None:
    return arguments.api_key or next((key for key in map(os.environ.get, _KEYS) if key), None)


def _ask(url: str, key: str | None, body: dict[str, Any]) -> Any:
    address = f"{url.rstrip('/').removesuffix('/v1')}/v1/drafter"
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    try:
        with urlopen(Request(address, json.dumps(body).encode(), headers), timeout=_PATIENCE) as answer:
            return json.load(answer)
    except HTTPError as error:
        raise OutpaceError(f"{url} refused ({error.code}): {_message(error)}") from error
    except (URLError, OSError) as error:
        raise OutpaceError(f"{url} cannot be reached: {getattr(error, 'reason', error)}") from error
    except (ValueError, HTTPException) as error:
        raise OutpaceError(f"{url} is no outpace server: {error!s:.80}") from error


def _message(error: HTTPError) -> str:
    """What the server says, or what the status means."""
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return str(error.reason)
