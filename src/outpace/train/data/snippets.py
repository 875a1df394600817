"""Pieces of Python's own source to ask about: short functions and classes, and what docstrings say in prose."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from textwrap import dedent

__all__ = ["Snippets", "snippets"]

_FEWEST_LINES, _MOST_LINES, _WIDEST_LINE = 6, 26, 100
_SHORTEST_PROSE, _LONGEST_PROSE = 240, 1100


class Snippets:
    """What there is to ask about.

    Attributes:
        code: functions and classes, without the indentation of where they stood.
        prose: docstrings of a paragraph and more.
    """

    def __init__(self, code: list[str], prose: list[str]) -> None:
        self.code, self.prose = code, prose


@cache
def snippets() -> Snippets:
    """Those of the Python that runs, in the order of its files; other versions of Python have others."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    code: dict[str, None] = {}
    prose: dict[str, None] = {}
    for path in sorted((*folder.glob("*.py"), *folder.glob("[a-z]*/*.py"))):
        if path.parts[-2] in ("test", "tests", "idlelib", "lib2to3", "site-packages", "pydoc_data", "encodings"):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        lines = text.splitlines()
        for node in _definitions(text):
            if isinstance(node, ast.Module) or _FEWEST_LINES <= _height(node) <= _MOST_LINES:
                piece = None if isinstance(node, ast.Module) else _source(lines, node)
                if piece is not None:
                    code[piece] = None
            words = ast.get_docstring(node) or ""
            if _SHORTEST_PROSE <= len(words) <= _LONGEST_PROSE and ">>>" not in words:
                prose[words] = None
    return Snippets(list(code), list(prose))


_Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _definitions(text: str) -> Iterator[_Definition]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return  # files that show errors on purpose
    yield tree
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node
            yield from (item for item in node.body if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)))


def _height(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _source(lines: Sequence[str], node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str | None:
    """The lines of a definition; None where they are too wide to be asked about."""
    own = lines[node.lineno - 1 : node.end_lineno]
    if max(map(len, own)) > _WIDEST_LINE:
        return None
    return dedent("\n".join(own))
