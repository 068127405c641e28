"""What the parsers share: bounded JSON, and a list of findings."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import attrs

from rlkit.tools.types import Malformed, Parsed, ToolCall

MOST = 128  # calls in one text; what comes after is not looked at, so that a flood costs nothing


class Unreadable(ValueError):
    """With the position at which the text stops being a call."""

    def __init__(self, problem: str, position: int) -> None:
        super().__init__(problem)
        self.position = position


def json_at(text: str, start: int) -> tuple[object, int]:
    """Return (the JSON value that begins at ``start``, the position behind it); never more work than reading it once.

    Raises:
        Unreadable: there is none.
    """
    start = skip(text, start)
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise Unreadable(f"the JSON is not valid: {error.msg}", error.pos) from None
    except ValueError as error:  # a number: not finite, or of thousands of digits
        raise Unreadable(f"the JSON is not valid: {error}", start) from None
    except RecursionError:
        raise Unreadable("the JSON is nested too deeply", start) from None
    return value, int(end)


def skip(text: str, at: int) -> int:
    """Return where the white space that begins at ``at`` ends."""
    while text[at : at + 1].isspace():
        at += 1
    return at


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is not a finite number")
    return number


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


@attrs.define
class Findings:
    """Calls, errors and the text around them, as a parser comes upon them."""

    text: str
    expected: str
    outside: list[str] = attrs.field(factory=list)
    calls: list[ToolCall] = attrs.field(factory=list)
    errors: list[Malformed] = attrs.field(factory=list)

    def keep(self, start: int, end: int) -> None:
        """Keep a part of the text that belongs to no call."""
        self.outside.append(self.text[start:end])

    def wrong(self, problem: str, position: int, *, name: str = "", expected: str = "") -> None:
        """Add a call that cannot be read."""
        excerpt = self.text[max(position - 20, 0) : position + 20]
        expected = expected or self.expected
        self.errors.append(Malformed(problem, expected, position, excerpt, name, self._id()))

    def call(self, name: str, arguments: Mapping[str, Any], position: int) -> None:
        """Add a call that can be read."""
        self.calls.append(ToolCall(name, arguments, self._id(), position))

    def call_of(self, value: object, position: int) -> None:
        """Add a call written as a JSON object with ``name`` and ``arguments`` (or ``parameters``)."""
        if isinstance(value, Mapping) and isinstance(value.get("function"), Mapping):
            value = value["function"]
        if not isinstance(value, Mapping):
            return self.wrong(f"a call is an object, and this is {kind(value)}", position)
        name = value.get("name")
        if not isinstance(name, str) or not name:
            return self.wrong('the object has no "name" with the name of a tool', position)
        key = "arguments" if "arguments" in value or "parameters" not in value else "parameters"
        if key not in value:
            return self.wrong('the object has no "arguments"', position, name=name)
        arguments = value[key]
        if isinstance(arguments, str):  # JSON inside a string, as some interfaces send it
            try:
                arguments, end = json_at(arguments, 0)
                arguments = None if value[key][end:].strip() else arguments
            except Unreadable:
                arguments = None
        if not isinstance(arguments, Mapping):
            return self.wrong(f'"{key}" is {kind(value[key])}, not an object', position, name=name)
        return self.call(name, arguments, position)

    @property
    def full(self) -> bool:
        """Whether there are as many as are looked at."""
        return len(self.calls) + len(self.errors) >= MOST

    def parsed(self, rest: int | None) -> Parsed:
        """Return the result; the text from ``rest`` on was not looked at."""
        if rest is not None:
            self.outside.append(self.text[rest:])
        return Parsed("".join(self.outside).strip(), tuple(self.calls), tuple(self.errors))

    def _id(self) -> str:
        return f"call{len(self.calls) + len(self.errors):05d}"


def behind(text: str, at: int) -> int:
    """Return where to go on behind a ``<tool_call>`` that cannot be read at ``at``."""
    closed, opened = text.find("</tool_call>", at), text.find("<tool_call>", at)
    if closed < 0 or 0 <= opened < closed:
        return opened if opened >= 0 else len(text)
    return closed + len("</tool_call>")


def kind(value: object) -> str:
    """JSON's name for the type of a value.

    >>> kind(None), kind(True), kind(1), kind({})
    ('null', 'a boolean', 'a number', 'an object')
    """
    if value is None:
        return "null"
    names = ((bool, "a boolean"), ((int, float), "a number"), (str, "a string"), (Mapping, "an object"))
    return next((name for types, name in names if isinstance(value, types)), "a list")
