"""Answers found by their form. Each function takes any text, in time that grows with its length only."""

from __future__ import annotations

import math
import re

from rlkit import _check

__all__ = ["between_tags", "boxed", "last_number"]

_BRACES = re.compile(r"(\\boxed\s*\{)|\\.|[{}]", re.DOTALL)
_NUMBER = re.compile(
    r"(?<![\w.])[-+\u2212]?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+|(?=\.[0-9]))(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?"
)
_DIGITS = 1000  # of an integer; longer ones are not numbers that anybody meant


def boxed(text: str) -> str | None:
    r"""Return what the last complete ``\boxed{...}`` holds; None without one.

    Braces inside have to balance; ``\{`` and ``\}`` are characters. Of nested boxes the outer one counts.

    >>> boxed(r"so \boxed{1}, or rather \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    >>> boxed(r"\boxed{3} and \boxed{4") , boxed("3")
    ('3', None)

    Source: the form that MATH's solutions have. Peers: most libraries look for the last one; several stop at the
    first closing brace.
    """
    _text("boxed(text)", text)
    opened: list[int | None] = []  # where the content of each open brace begins; None: no box
    inner = None
    for match in _BRACES.finditer(text):
        if match[1]:
            opened.append(match.end())
        elif match[0] == "{":
            opened.append(None)
        elif match[0] == "}" and opened and (start := opened.pop()) is not None:
            inner = start, match.start()
    return None if inner is None else text[inner[0] : inner[1]].strip()


def last_number(text: str) -> int | float | None:
    """Return the last number in a text: an int, a float if it is written as one, None without any.

    Commas between thousands are read, and so is a sign that stands directly before the number. Digits inside of words
    do not count.

    >>> last_number("It costs $1,234.50."), last_number("7 - 3 = 4"), last_number("x1")
    (1234.5, 4, None)

    Source: the usual score for GSM8K.
    """
    _text("last_number(text)", text)
    last = None
    for match in _NUMBER.finditer(text):
        written = match[0].replace(",", "").replace("\u2212", "-")
        if "." in written or "e" in written.lower():
            last = written if len(written) <= _DIGITS and math.isfinite(float(written)) else last
        elif len(written) <= _DIGITS:
            last = written
    if last is None:
        return None
    return float(last) if "." in last or "e" in last.lower() else int(last)


def between_tags(text: str, tag: str = "answer") -> str | None:
    """Return the text between the last ``<tag>`` and ``</tag>``, stripped of white space; None without a pair.

    >>> between_tags("<answer>3</answer> no: <answer> 4 </answer>"), between_tags("<answer>3")
    ('4', None)
    """
    _text("between_tags(text)", text)
    _check.require(isinstance(tag, str) and tag, "tag", tag, "the name of a tag")
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, max(end, 0))
    return None if start < 0 else text[start + len(tag) + 2 : end].strip()


def _text(where: str, text: str) -> None:
    _check.require(isinstance(text, str), where, text, "a string")
