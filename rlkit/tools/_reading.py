"""Common parts of the parsers: bounded JSON, Python-like calls, and a list of findings."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping

import attrs

from rlkit import _check
from rlkit.tools.types import Malformed, Parsed, ToolCall

__all__ = ["Findings", "Unreadable", "behind", "calls_at", "json_at", "skip"]

MOST = 128  # calls in one text; later ones are ignored, so that a flood costs no time


class Unreadable(ValueError):
    """The error of a text that is not a call, with the position where it stops being one."""

    def __init__(self, problem: str, position: int) -> None:
        super().__init__(problem)
        self.position = position


def json_at(text: str, start: int) -> tuple[object, int]:
    """Return (the JSON value that begins at ``start``, the position after it), in one pass.

    Raises:
        Unreadable: there is no JSON value.
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


_DECODER = json.JSONDecoder(parse_float=_check.finite, parse_constant=_check.finite)


@attrs.define
class Findings:
    """Calls, errors and the text around them, as a parser finds them."""

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

    def call(self, name: str, arguments: Mapping[str, object], position: int) -> None:
        """Add a call that can be read."""
        self.calls.append(ToolCall(name, arguments, self._id(), position))

    def call_of(self, value: object, position: int) -> None:
        """Add a call written as a JSON object with ``name`` and ``arguments`` (or ``parameters``)."""
        if isinstance(value, Mapping) and isinstance(value.get("function"), Mapping):
            value = value["function"]
        if not isinstance(value, Mapping):
            return self.wrong(f"a call is an object, but this is {kind(value)}", position)
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

    def calls_of(self, value: object, position: int) -> None:
        """Add the calls of a JSON value: a call, or a list of them."""
        for item in value if isinstance(value, list) else [value]:
            if not self.full:
                self.call_of(item, position)

    @property
    def full(self) -> bool:
        """Whether the limit of calls is reached."""
        return len(self.calls) + len(self.errors) >= MOST

    def parsed(self, rest: int | None) -> Parsed:
        """Return the result; the text from ``rest`` on was not parsed."""
        if rest is not None:
            self.outside.append(self.text[rest:])
        return Parsed("".join(self.outside).strip(), tuple(self.calls), tuple(self.errors))

    def _id(self) -> str:
        return f"call{len(self.calls) + len(self.errors):05d}"


def behind(text: str, at: int) -> int:
    """Return where to continue after a ``<tool_call>`` that cannot be parsed at ``at``."""
    closed, opened = text.find("</tool_call>", at), text.find("<tool_call>", at)
    if closed < 0 or 0 <= opened < closed:
        return opened if opened >= 0 else len(text)
    return closed + len("</tool_call>")


def kind(value: object) -> str:
    """Return JSON's name for the type of a value.

    >>> kind(None), kind(True), kind(1), kind({})
    ('null', 'a boolean', 'a number', 'an object')
    """
    if value is None:
        return "null"
    names = ((bool, "a boolean"), ((int, float), "a number"), (str, "a string"), (Mapping, "an object"))
    return next((name for types, name in names if isinstance(value, types)), "a list")


_DEPTH = 64
_TOKEN = re.compile(  # each string is read in one pass, even if its end is missing
    r"\s*(?:(?P<string>[rb]{0,2}(?:'''[^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)*'''"
    r'|"""[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*"""'
    r"|'[^'\\\n]*(?:\\.[^'\\\n]*)*'"
    r'|"[^"\\\n]*(?:\\.[^"\\\n]*)*"))'
    r"|(?P<number>[-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
    r"|(?P<name>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)|(?P<mark>[()\[\]{},:=]))",
    re.DOTALL | re.ASCII,
)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPES = "\n\\'\"abfnrtvxNuU0"
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}


def calls_at(text: str, start: int) -> tuple[list[tuple[str, dict[str, object], int]], int]:
    """Return ((name, arguments, position) of each call, the position after them) of ``[f(x=1), g()]`` or one bare call.

    >>> calls_at("[add(x=1, y=[2, 'a']), now()]", 0)
    ([('add', {'x': 1, 'y': [2, 'a']}, 1), ('now', {}, 23)], 29)

    Raises:
        Unreadable: anything that is not a name with keyword arguments that are literals.
    """
    reader = _Reader(text, start)
    if not reader.takes("["):
        return [reader.call()], reader.at
    calls = [reader.call() for _ in reader.until("]", "between two calls")]
    return calls, reader.at


class _Reader:
    def __init__(self, text: str, start: int) -> None:
        self.text, self.at = text, start

    def peek(self) -> re.Match[str] | None:
        return _TOKEN.match(self.text, self.at)

    def takes(self, mark: str) -> bool:
        token = self.peek()
        if token is None or token["mark"] != mark:
            return False
        self.at = token.end()
        return True

    def needs(self, mark: str, where: str) -> None:
        if not self.takes(mark):
            raise Unreadable(f"{mark!r} is missing {where}", self.at)

    def until(self, closing: str, where: str) -> Iterator[None]:
        """Yield before each of the items that commas separate; the last may have one behind it."""
        first = True
        while not self.takes(closing):
            if not first:
                self.needs(",", where)
                if self.takes(closing):
                    return
            first = False
            yield

    def name(self, what: str) -> tuple[str, int]:
        token = self.peek()
        if token is None or token["name"] is None:
            raise Unreadable(f"{what} is missing", self.at)
        self.at = token.end()
        return token["name"], token.start("name")

    def call(self) -> tuple[str, dict[str, object], int]:
        name, position = self.name("the name of a tool")
        self.needs("(", f"behind {name}")
        arguments: dict[str, object] = {}
        for _ in self.until(")", "between two arguments"):
            begin = self.at
            token = self.peek()
            if token is None or token["name"] is None:
                raise Unreadable("arguments need names: tool(argument=value)", begin)
            key, _ = self.name("the name of an argument")
            self.needs("=", f"after the argument {key}")
            if key in arguments:
                raise Unreadable(f"the argument {key} comes twice", begin)
            arguments[key] = self.value(0)
        return name.removesuffix(".call"), arguments, position

    def value(self, depth: int) -> object:
        begin, token = self.at, self.peek()
        if depth > _DEPTH:
            raise Unreadable("the value is nested too deeply", begin)
        if token is None:
            raise Unreadable("a value is missing or is not a literal", begin)
        self.at = token.end()
        if token["string"] is not None or token["number"] is not None:
            return _literal(token["string"] or token["number"], begin)
        if token["name"] in _WORDS:
            return _WORDS[token["name"]]
        if token["mark"] in ("[", "("):
            closing = "]" if token["mark"] == "[" else ")"
            return [self.value(depth + 1) for _ in self.until(closing, "in a list")]
        if token["mark"] == "{":
            return self.entries(depth)
        raise Unreadable(f"{token[0].strip()[:20]!r} is not a literal value", begin)

    def entries(self, depth: int) -> dict[str, object]:
        values: dict[str, object] = {}
        for _ in self.until("}", "in a dictionary"):
            begin = self.at
            key = self.value(depth + 1)
            if not isinstance(key, str):
                raise Unreadable("a key of a dictionary is not a string", begin)
            self.needs(":", f"after the key {key[:20]!r}")
            values[key] = self.value(depth + 1)
        return values


def _literal(text: str, position: int) -> object:
    if "\\" in text and not text.startswith("r"):  # "\d" is a backslash and a d, without Python's warning
        text = _ESCAPE.sub(lambda pair: pair[0] if pair[1] in _ESCAPES else "\\" + pair[0], text)
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        value = None
    if isinstance(value, (str, int)) or (isinstance(value, float) and abs(value) != float("inf")):
        return value
    raise Unreadable(f"{text[:20]!r} is not a literal value", position)
