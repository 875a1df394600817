"""Grammars in llama.cpp's GBNF, rewritten in Lark's notation for llguidance.

llguidance converts the rules; what its converter gets wrong is put right before: escapes by code point (`\\u00e9`,
which it hands on in a form that nothing reads), `.` (any character in GBNF, none but newline in a regular expression)
and `&&` and `~~` in a class (set operations in a regular expression, plain letters in GBNF).
"""

from __future__ import annotations

import re

from llguidance.gbnf_to_lark import gbnf_to_lark

__all__ = ["gbnf_as_lark", "looks_like_gbnf"]

_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_PART = re.compile(r'#[^\r\n]*|"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|\.', re.DOTALL)
_CODE_POINT = re.compile(r"\\(\\)|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})")


def looks_like_gbnf(grammar: str) -> bool:
    """Whether a line begins a rule as GBNF does (`root ::=`); Lark writes `start:`."""
    return _RULE.search(grammar) is not None


def gbnf_as_lark(grammar: str) -> str:
    """The same grammar in Lark's notation.

    Raises:
        ValueError: what is wrong with it, and where.
    """
    try:
        lark: str = gbnf_to_lark(_PART.sub(_plain, grammar))
    except RecursionError:
        raise ValueError("its parentheses are nested too deeply") from None
    except Exception as error:  # the converter raises plain Exception, and IndexError where a text ends too soon
        raise ValueError(str(error) if type(error) is not IndexError else "it ends inside an escape") from error
    return lark


def _plain(match: re.Match[str]) -> str:
    part = match.group()
    if part == ".":
        return r"[^\x00]"
    if part.startswith("#"):
        return part
    if part.startswith("["):
        part = part.replace("&", r"\x26").replace("~", r"\x7E")
    return _CODE_POINT.sub(_letter, part)


def _letter(match: re.Match[str]) -> str:
    if match.group(1):
        return match.group()
    code = int(match.group(2) or match.group(3), 16)
    if code < 0x80:
        return f"\\x{code:02X}"
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise ValueError(f"{match.group()} is no character")
    return chr(code)
