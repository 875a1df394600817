"""Small facts about files: what a file really is, a cheap fingerprint, where outpace keeps its own."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from outpace.errors import OutpaceError

__all__ = ["cache_folder", "describe_impostor", "fingerprint", "format_bytes"]

_HEAD = 1 << 9
_SAMPLE = 1 << 20


def cache_folder() -> Path:
    """Where outpace keeps things: `$OUTPACE_CACHE`, else `$XDG_CACHE_HOME/outpace`, else `~/.cache/outpace`.

    Raises:
        OutpaceError: the path names the home directory of a user who has none.
    """
    own, shared = os.environ.get("OUTPACE_CACHE"), os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(own).expanduser() if own else Path(shared or "~/.cache").expanduser() / "outpace"
    except RuntimeError as error:
        raise OutpaceError(
            f"there is no cache folder ({error}): set OUTPACE_CACHE to a folder that can be written"
        ) from error


def describe_impostor(path: Path) -> str | None:
    """What stands in a file instead of weights, and what to do about it; None if it looks like neither of those.

    Recognised: an empty file, a Git LFS pointer, an HTML page.
    """
    with path.open("rb") as file:
        head = file.read(_HEAD)
    if not head:
        return "is empty: download it again"
    if head.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer, not the weights: run `git lfs pull` in its repository"
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if start.startswith((b"<!doctype html", b"<html", b"<head")):
        return "is an HTML page, not weights (a login or error page was saved in their place): download it again"
    return None


def fingerprint(path: Path) -> str:
    """32 hex digits from a file's size and its first and last megabyte: cheap, and enough to notice another file."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(_SAMPLE))
        file.seek(max(0, size - _SAMPLE))
        digest.update(file.read(_SAMPLE))
    return digest.hexdigest()[:32]


def format_bytes(count: float) -> str:
    """A size for people, in powers of ten: 98 MB, 3.09 GB."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{int(count)} bytes"
