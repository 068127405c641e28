"""Calls written like Python, read without Python's parser: names, keyword arguments and literals, nothing else."""

from __future__ import annotations

import ast
import re

from rlkit.tools._reading import Unreadable

__all__ = ["calls_at"]

_DEPTH = 64
_TOKEN = re.compile(  # each string is read in one pass, whatever is missing at its end
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
    """((name, arguments, position) of each call, the position behind them) of ``[f(x=1), g()]`` or one bare call.

    >>> calls_at("[add(x=1, y=[2, 'a']), now()]", 0)
    ([('add', {'x': 1, 'y': [2, 'a']}, 1), ('now', {}, 23)], 29)

    Raises:
        Unreadable: anything that is not a name with keyword arguments that are literals.
    """
    reader = _Reader(text, start)
    if not reader.takes("["):
        return [reader.call()], reader.at
    calls: list[tuple[str, dict[str, object], int]] = []
    while not reader.takes("]"):
        if calls:
            reader.needs(",", "between two calls")
            if reader.takes("]"):
                break
        calls.append(reader.call())
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
        while not self.takes(")"):
            if arguments:
                self.needs(",", "between two arguments")
                if self.takes(")"):
                    break
            begin = self.at
            token = self.peek()
            if token is None or token["name"] is None:
                raise Unreadable("arguments need names: tool(argument=value)", begin)
            key, _ = self.name("the name of an argument")
            self.needs("=", f"behind the argument {key}")
            if key in arguments:
                raise Unreadable(f"the argument {key} comes twice", begin)
            arguments[key] = self.value(0)
        return name.removesuffix(".call"), arguments, position

    def value(self, depth: int) -> object:
        begin, token = self.at, self.peek()
        if depth > _DEPTH:
            raise Unreadable("the value is nested too deeply", begin)
        if token is None:
            raise Unreadable("a value is missing, or is no literal", begin)
        self.at = token.end()
        if token["string"] is not None or token["number"] is not None:
            return _literal(token["string"] or token["number"], begin)
        if token["name"] in _WORDS:
            return _WORDS[token["name"]]
        if token["mark"] == "[":
            return self.items("]", depth)
        if token["mark"] == "(":
            return self.items(")", depth)
        if token["mark"] == "{":
            return self.entries(depth)
        raise Unreadable(f"{token[0].strip()[:20]!r} is no literal value", begin)

    def items(self, closing: str, depth: int) -> list[object]:
        values: list[object] = []
        while not self.takes(closing):
            if values:
                self.needs(",", "in a list")
                if self.takes(closing):
                    break
            values.append(self.value(depth + 1))
        return values

    def entries(self, depth: int) -> dict[str, object]:
        values: dict[str, object] = {}
        while not self.takes("}"):
            if values:
                self.needs(",", "in a dictionary")
                if self.takes("}"):
                    break
            begin = self.at
            key = self.value(depth + 1)
            if not isinstance(key, str):
                raise Unreadable("a key of a dictionary is no string", begin)
            self.needs(":", f"behind the key {key[:20]!r}")
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
    raise Unreadable(f"{text[:20]!r} is no literal value", position)
