"""Common parts of the parsers: bounded JSON, Python-like calls, and a list of findings."""

from __future__ import annotations

import ast
import json
import keyword
import math
import re
from collections.abc import Mapping

import attrs

from rlkit import _check
from rlkit.errors import DataError
from rlkit.tools.types import Malformed, Parsed, ToolCall

__all__ = ["Findings", "Unreadable", "calls_at", "json_at", "resume_after", "skip_space"]

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
    start = skip_space(text, start)
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise Unreadable(f"the JSON is not valid: {error.msg}", error.pos) from None
    except ValueError as error:  # a number: not finite, or of thousands of digits
        raise Unreadable(f"the JSON is not valid: {error}", start) from None
    except RecursionError:
        raise Unreadable("the JSON is nested too deeply", start) from None
    if isinstance(value, (dict, list)):
        check_depth(value, start)
    return value, int(end)


def check_depth(value: object, position: int) -> None:
    """Raise Unreadable for what clients could not send back, as a part of a conversation."""
    try:
        _check.depth("", value, most=_check.DEEPEST_CALL)
    except DataError:
        raise Unreadable("the JSON is nested too deeply", position) from None


def skip_space(text: str, at: int) -> int:
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

    def add_error(self, problem: str, position: int, *, name: str = "", expected: str = "") -> None:
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
            return self.add_error(f"a call is an object, but this is {kind(value)}", position)
        name = value.get("name")
        if not isinstance(name, str) or not name:
            return self.add_error('the object has no "name" with the name of a tool', position)
        key = "arguments" if "arguments" in value or "parameters" not in value else "parameters"
        if key not in value:
            return self.add_error('the object has no "arguments"', position, name=name)
        arguments = value[key]
        if isinstance(arguments, str):  # JSON inside a string, as some interfaces send it
            try:
                arguments, end = json_at(arguments, 0)
                arguments = None if value[key][end:].strip() else arguments
            except Unreadable:
                arguments = None
        if not isinstance(arguments, Mapping):
            return self.add_error(f'"{key}" is {kind(value[key])}, not an object', position, name=name)
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


def resume_after(text: str, at: int) -> int:
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
_WORDS = {"true": "True", "false": "False", "null": "None", "True": "True", "False": "False", "None": "None"}


def calls_at(text: str, start: int) -> tuple[list[tuple[str, dict[str, object], int]], int]:
    """Return ((name, arguments, position) of each call, the position after them) of ``[f(x=1), g()]`` or one bare call.

    >>> calls_at("[add(x=1, y=[2, 'a']), now()]", 0)
    ([('add', {'x': 1, 'y': [2, 'a']}, 1), ('now', {}, 23)], 29)

    Raises:
        Unreadable: anything that is not a name with keyword arguments that are literals.
    """
    source = _Source(text, start)
    tree = source.parse()
    return [source.call(node) for node in (tree.elts if isinstance(tree, ast.List) else [tree])], source.end


class _Source:
    """Calls as Python's parser reads them, one token a line, so that a line tells where in the text it was.

    Words of JSON become Python's, names that Python keeps for itself others, and backslashes that escape nothing text.
    """

    def __init__(self, text: str, start: int) -> None:
        self.text, self.end = text, start
        self.pieces: list[str] = []
        self.tokens: list[re.Match[str]] = []  # of each line
        depth = 0
        while not self.tokens or depth or self.tokens[-1]["mark"] not in (")", "]", "}"):
            token = _TOKEN.match(text, self.end)
            if token is None:
                raise Unreadable(
                    "the calls are not closed, or have what is no literal value", skip_space(text, self.end)
                )
            depth += (token["mark"] or " ") in "([{"
            depth -= (token["mark"] or " ") in ")]}"
            if not 0 <= depth <= _check.DEEPEST_CALL:
                raise Unreadable("the value is nested too deeply" if depth > 0 else "a call is missing", self.end)
            self._add(token)

    def _add(self, token: re.Match[str]) -> None:
        piece = token[0].lstrip()
        if token["string"] is not None and not piece.startswith("r"):
            piece = _ESCAPE.sub(lambda pair: pair[0] if pair[1] in _ESCAPES else "\\" + pair[0], piece)
        elif token["name"] is not None:
            named = self.text.startswith(("=", "("), skip_space(self.text, token.end()))  # of an argument or a tool
            reserved = any(keyword.iskeyword(part) for part in piece.split("."))
            piece = "_" if named and reserved else piece if named else _WORDS.get(piece, piece)
        lines = len(re.split("\r\n|\r|\n", piece))
        self.pieces.append(piece)
        self.tokens += [token] * lines
        self.end = token.end()

    def parse(self) -> ast.expr:
        """Return Python's tree of all tokens."""
        try:
            return ast.parse("(\n" + "\n".join(self.pieces) + "\n)", mode="eval").body
        except SyntaxError as error:
            line = min(max((error.lineno or 2) - 2, 0), len(self.tokens) - 1)
            raise Unreadable(f"the calls are not Python: {error.msg}", _place(self.tokens[line])) from None
        except (ValueError, MemoryError, RecursionError) as error:
            raise Unreadable(f"the calls are not Python: {error}", _place(self.tokens[0])) from None

    def at(self, node: ast.expr | ast.keyword) -> re.Match[str]:
        """Return the first token of a node."""
        return self.tokens[node.lineno - 2]

    def call(self, node: ast.expr) -> tuple[str, dict[str, object], int]:
        """Return name, arguments and position of a call."""
        name = self.at(node)["name"]
        if not isinstance(node, ast.Call) or name is None or not isinstance(node.func, (ast.Name, ast.Attribute)):
            raise Unreadable("the name of a tool is missing", _place(self.at(node)))
        if node.args:
            raise Unreadable("arguments need names: tool(argument=value)", _place(self.at(node.args[0])))
        arguments: dict[str, object] = {}
        for argument in node.keywords:
            key = self.at(argument)["name"]
            if key in arguments:
                raise Unreadable(f"the argument {key} comes twice", _place(self.at(argument)))
            arguments[key] = self.value(argument.value)
        return name.removesuffix(".call"), arguments, _place(self.at(node))

    def value(self, node: ast.expr) -> object:
        """Return a literal value of JSON's types."""
        if isinstance(node, (ast.List, ast.Tuple)):
            return [self.value(each) for each in node.elts]
        if isinstance(node, ast.Dict):
            keys = [self.value(key) for key in node.keys if key is not None]
            if not all(isinstance(key, str) for key in keys):
                raise Unreadable("a key of a dictionary is not a string", _place(self.at(node)))
            return dict(zip(keys, map(self.value, node.values), strict=True))
        value = ast.literal_eval(node) if isinstance(node, (ast.Constant, ast.UnaryOp)) else ...
        if value is None or isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value)):
            return value
        token = self.at(node)
        raise Unreadable(f"{token[0].strip()[:20]!r} is not a literal value", _place(token))


def _place(token: re.Match[str]) -> int:
    return token.end() - len(token[0].lstrip())
