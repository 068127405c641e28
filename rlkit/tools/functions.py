"""Schemas of Python functions, and their description for models whose template does not render tools."""

from __future__ import annotations

import collections.abc
import enum
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlkit import _check
from rlkit.errors import ConfigError

__all__ = ["describe", "schema"]

_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Yields|Raises|Examples?|Notes?):\s*$")
_ARGUMENT = re.compile(r"^\*{0,2}(\w+)(?:\s*\([^)]*\))?\s*:\s*(.*)$")


def schema(function: Callable[..., object]) -> dict[str, object]:
    """Return the OpenAI-style schema of a function, from its signature and its docstring.

    Args:
        function: each parameter needs a type hint that JSON can express: str, int, float, bool, None, lists, tuples,
            dicts with text as keys, Literal, Enum, TypedDict, unions of these, or object. The docstring says what it
            does, and in an ``Args:`` section, as Google writes it, what the parameters are.

    Raises:
        ConfigError: a parameter without such a hint, or one that takes any number of arguments.

    >>> def add(x: int, y: int = 0) -> int:
    ...     '''Adds two numbers.
    ...
    ...     Args:
    ...         x: the first.
    ...         y: the second.
    ...     '''
    ...     return x + y
    >>> made = schema(add)["function"]
    >>> made["name"], made["description"], made["parameters"]["required"]
    ('add', 'Adds two numbers.', ['x'])
    >>> made["parameters"]["properties"]["y"]
    {'type': 'integer', 'description': 'the second.', 'default': 0}
    """
    name = getattr(function, "__name__", "")
    _check.require(callable(function) and name and name != "<lambda>", "tool", function, "a function with a name")
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise ConfigError(f"tool {name}: its type hints cannot be resolved: {error}") from error
    description, arguments = _documented(inspect.getdoc(function) or "")
    properties: dict[str, object] = {}
    required = []
    for parameter in inspect.signature(function).parameters.values():
        where = f"tool {name}: parameter {parameter.name}"
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ConfigError(where, f"is {parameter.kind.description}", "one that is passed by name")
        if parameter.name not in hints:
            raise ConfigError(where, "has no type hint", "one", "the model is told what to write")
        made = _of_hint(hints[parameter.name], where)
        if parameter.name in arguments:
            made.setdefault("description", arguments[parameter.name])
        if parameter.default is parameter.empty:
            required.append(parameter.name)
        elif isinstance(parameter.default, (str, int, float, bool, type(None))):
            made["default"] = parameter.default
        properties[parameter.name] = made
    parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def describe(tools: Sequence[Mapping[str, object]], format: str = "hermes") -> str:  # noqa: A002
    """Return a system prompt's part on tools: what there is, and how a call is written.

    Args:
        tools: schemas, OpenAI style.
        format: "hermes", "qwen3_coder", "json", "llama" or "python"; a format of your own needs a description of
            your own.

    Raises:
        ConfigError: another format.

    >>> print(describe([{"type": "function", "function": {"name": "now"}}], "json"))
    You can call these tools:
    {"type": "function", "function": {"name": "now"}}
    To call one, write {"name": "<tool>", "arguments": {...}}; for several calls, a list of such objects.
    """
    if format not in _WRITTEN:
        raise ConfigError("format", f"got {format!r}", "one of " + ", ".join(_WRITTEN))
    lines = [json.dumps(tool, ensure_ascii=False, default=str) for tool in tools]
    return "\n".join(["You can call these tools:", *lines, _WRITTEN[format]])


_WRITTEN = {
    "hermes": 'To call one, write <tool_call>{"name": "<tool>", "arguments": {...}}</tool_call>; several calls may '
    "follow each other.",
    "qwen3_coder": "To call one, write <tool_call><function=TOOL><parameter=NAME>VALUE</parameter></function>"
    "</tool_call>, with one <parameter> for each argument; several calls may follow each other.",
    "json": 'To call one, write {"name": "<tool>", "arguments": {...}}; for several calls, a list of such objects.',
    "llama": 'To call one, write nothing but {"name": "<tool>", "parameters": {...}}, or [tool(argument=value), ...] '
    "for several calls.",
    "python": "To run code, write it in a block that begins with ```python and ends with ```.",
}


def _of_hint(hint: Any, where: str) -> dict[str, Any]:
    """Return the JSON schema of a type."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return {}
    if hint in _PLAIN:
        return {"type": _PLAIN[hint]}
    if origin is typing.Annotated:
        texts = [note for note in args[1:] if isinstance(note, str)]
        return _of_hint(args[0], where) | ({"description": texts[0]} if texts else {})
    if origin is typing.Literal:
        return {"enum": list(args)}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return {"enum": [member.value for member in hint]}
    if origin in (typing.Union, types.UnionType):
        options = [_of_hint(option, where) for option in args]
        if all(option.keys() == {"type"} for option in options):
            return {"type": [option["type"] for option in options]}
        return {"anyOf": options}
    if hint in (list, tuple) or origin in (list, collections.abc.Sequence, collections.abc.Iterable):
        return {"type": "array"} | ({"items": _of_hint(args[0], where)} if args else {})
    if origin is tuple:
        if len(args) == 2 and args[1] is ...:
            return {"type": "array", "items": _of_hint(args[0], where)}
        items = [_of_hint(item, where) for item in args]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    if hint is dict or origin in (dict, collections.abc.Mapping):
        return {"type": "object"} | ({"additionalProperties": _of_hint(args[1], where)} if args else {})
    if typing.is_typeddict(hint):
        fields = typing.get_type_hints(hint)
        properties = {key: _of_hint(value, f"{where}.{key}") for key, value in fields.items()}
        return {"type": "object", "properties": properties, "required": sorted(hint.__required_keys__)}
    expected = "a type that JSON can express"
    raise ConfigError(where, f"has the type {hint!r}", expected, "write its schema by hand instead")


def _documented(doc: str) -> tuple[str, dict[str, str]]:
    """Return (what a docstring says before its sections, what its Args section says of each parameter)."""
    section, head, texts, current, indent = "", [], {}, "", None
    for line in doc.splitlines():
        if match := _SECTION.match(line):
            section, current, indent = match[1], "", None
        elif not section:
            head.append(line)
        elif section in ("Args", "Arguments", "Parameters") and line.strip():
            depth = len(line) - len(line.lstrip())
            indent = depth if indent is None else indent
            match = _ARGUMENT.match(line.strip())
            if depth <= indent and match:
                current = match[1]
                texts[current] = match[2].strip()
            elif current:
                texts[current] = f"{texts[current]} {line.strip()}".strip()
    return "\n".join(head).strip(), texts
