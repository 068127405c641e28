"""Schemas of Python functions, and arguments checked against schemas.

Arguments checked against JSON schemas by the package jsonschema, with errors that a model can act on.

A schema is read by the draft that its ``$schema`` names, or else by 2020-12. Nothing is ever fetched.
"""

from __future__ import annotations

import collections.abc
import enum
import functools
import importlib
import inspect
import itertools
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from rlkit import _check
from rlkit._runtime import missing
from rlkit.errors import ConfigError, MissingPackageError

if TYPE_CHECKING:
    from jsonschema.exceptions import ValidationError
    from jsonschema.protocols import Validator

__all__ = ["check_schema", "describe", "problems", "schema"]

_PLAIN: dict[object, str] = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_PLAIN |= {list: "array", tuple: "array", dict: "object"}
_Arguments: TypeAlias = tuple[object, ...]
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
        signature = inspect.signature(function)
    except (NameError, TypeError, ValueError) as error:
        raise ConfigError(f"tool {name}: its parameters and their types cannot be found: {error}") from error
    description, arguments = _parse_docstring(inspect.getdoc(function) or "")
    properties: dict[str, object] = {}
    required = []
    for parameter in signature.parameters.values():
        where = f"tool {name}: parameter {parameter.name}"
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ConfigError(where, f"is {parameter.kind.description}", "a parameter that can be passed by name")
        if parameter.name not in hints:
            raise ConfigError(where, "has no type hint", "one", "the model's schema needs a type")
        try:
            made = _of_hint(hints[parameter.name], where)
        except RecursionError:
            raise ConfigError(where, "has a type that refers to itself", "one that does not") from None
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
    """Return a system prompt's part on tools: the tools, and the format of a call.

    Args:
        tools: schemas, OpenAI style.
        format: "hermes", "qwen3_coder", "json", "llama" or "python"; your own format needs your own
            description.

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


def _of_hint(hint: object, where: str) -> dict[str, object]:
    """Return the JSON schema of a type."""
    if hint in (Any, object):
        return {}
    if hint in _PLAIN:
        return {"type": _PLAIN[hint]}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return {"enum": [member.value for member in hint]}
    if typing.is_typeddict(hint):
        fields, said = typing.get_type_hints(hint), typing.get_type_hints(hint, include_extras=True)
        properties = {key: _of_hint(value, f"{where}.{key}") for key, value in fields.items()}
        must = {key: typing.get_origin(value) for key, value in said.items()}  # __required_keys__ misreads text
        usual = {typing.Required: True, typing.NotRequired: False}
        required = [key for key in said if usual.get(must[key], key in vars(hint)["__required_keys__"])]
        return {"type": "object", "properties": properties, "required": sorted(required)}
    make = _GENERIC.get(typing.get_origin(hint))
    if make is None:
        expected = "a type that JSON can express"
        raise ConfigError(where, f"has the type {hint!r}", expected, "write its schema by hand instead")
    return make(typing.get_args(hint), where)


def _of_annotated(args: _Arguments, where: str) -> dict[str, object]:
    notes = [note if isinstance(note, str) else getattr(note, "description", None) for note in args[1:]]
    texts = [note for note in notes if isinstance(note, str)]
    return _of_hint(args[0], where) | ({"description": texts[0]} if texts else {})


def _of_literal(args: _Arguments, _: str) -> dict[str, object]:
    return {"enum": list(args)}


def _of_union(args: _Arguments, where: str) -> dict[str, object]:
    options = [_of_hint(option, where) for option in args]
    if all(option.keys() == {"type"} for option in options):
        return {"type": [option["type"] for option in options]}
    return {"anyOf": options}


def _of_list(args: _Arguments, where: str) -> dict[str, object]:
    return {"type": "array"} | ({"items": _of_hint(args[0], where)} if args else {})


def _of_tuple(args: _Arguments, where: str) -> dict[str, object]:
    if len(args) == 2 and args[1] is ...:
        return _of_list(args, where)
    items = [_of_hint(item, where) for item in args]
    return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}


def _of_dict(args: _Arguments, where: str) -> dict[str, object]:
    return {"type": "object"} | ({"additionalProperties": _of_hint(args[1], where)} if args else {})


_GENERIC: Mapping[object, Callable[[_Arguments, str], dict[str, object]]] = {
    typing.Annotated: _of_annotated,
    typing.Literal: _of_literal,
    typing.Union: _of_union,
    types.UnionType: _of_union,
    tuple: _of_tuple,
    **dict.fromkeys((list, collections.abc.Sequence, collections.abc.Iterable), _of_list),
    **dict.fromkeys((dict, collections.abc.Mapping), _of_dict),
}


def _parse_docstring(doc: str) -> tuple[str, dict[str, str]]:
    """Return (a docstring's text before its sections, its Args section's text of each parameter)."""
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


_MAX_PROBLEMS = 5
_SHOWN = 40  # characters of a value
_MAX_CHARACTERS = 300  # of a sentence


def problems(arguments: object, schema: Mapping[str, object]) -> list[str]:
    """Return what is wrong with ``arguments``: up to five sentences, none if they fit.

    Args:
        arguments: values of JSON types.
        schema: as ``check_schema`` allows.

    Raises:
        ConfigError: a reference of the schema leads nowhere, or outside of it.

    >>> numbers = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x", "y"]}
    >>> problems({"x": "1"}, numbers)
    ["arguments.x: '1' is not of type 'integer'", "arguments: 'y' is a required property"]
    >>> problems({"x": 1, "y": None}, numbers)
    []
    """
    unresolvable = _import("referencing.exceptions").Unresolvable
    try:
        errors = itertools.islice(_validator(_text(schema)).iter_errors(arguments), _MAX_PROBLEMS)
        return [f"arguments{best.json_path[1:]}: {_message(best)}" for best in map(_most_telling, errors)]
    except RecursionError:
        return ["arguments: is nested too deeply"]
    except unresolvable as error:
        expected = "a place inside the same schema, such as #/$defs/name"
        raise ConfigError("schema: $ref", f"got {error.ref!r}", expected) from None


def check_schema(schema: object, where: str = "schema") -> None:
    """Raise unless ``schema`` is a JSON schema. Where its references lead is seen when arguments are checked.

    Raises:
        ConfigError: names the keyword and its place.
        MissingPackageError: jsonschema is not installed.

    >>> check_schema({"type": "object", "properties": {"x": {"type": "int"}}})
    Traceback (most recent call last):
    rlkit.errors.ConfigError: schema.properties.x.type: 'int' is not one of ['array', 'boolean', ...
    """
    try:
        _validator(_text(schema))
    except MissingPackageError:
        raise
    except ConfigError as error:
        raise ConfigError(f"{where}{error}") from error


def _text(schema: object) -> str:
    try:
        return json.dumps(schema, default=dict)  # mappings that are not a dict
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(": it", f"is not JSON: {error}", "a JSON schema") from None


@functools.lru_cache(maxsize=256)  # checking a schema takes a hundred times as long as checking arguments
def _validator(text: str) -> Validator:
    """Build the validator of a schema. Errors begin with the place inside of the schema."""
    validators, schema = _import("jsonschema.validators"), json.loads(text)
    draft = validators.Draft202012Validator
    if isinstance(schema, dict) and isinstance(schema.get("$schema"), str):
        draft = validators.validator_for(schema, default=draft)
    try:
        draft.check_schema(schema)
    except RecursionError:
        raise ConfigError(": is nested too deeply") from None
    except validators.exceptions.SchemaError as error:
        raise ConfigError(f"{error.json_path[1:]}: {_message(error)}") from None
    return draft(schema, registry=_import("referencing.jsonschema").SchemaRegistry())  # which fetches nothing


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing("checking arguments against schemas", "jsonschema", "tools") from error


def _most_telling(error: ValidationError) -> ValidationError:
    """Return the error itself, or the closest of its alternatives."""
    return _import("jsonschema.exceptions").best_match([error])


def _message(error: ValidationError) -> str:
    """Return the message: what each alternative expects, the known properties, and the model's text, shortened."""
    text, value = str(error.message), repr(error.instance)
    if len(value) > _SHOWN:
        text = text.replace(value, value[: _SHOWN - 3] + "...")
    if error.context:
        text = "; or ".join(map(_message, error.context))
    if error.validator == "additionalProperties":
        text += f"; the schema has {', '.join(error.schema.get('properties', ())) or 'none'}"
    return text if len(text) <= _MAX_CHARACTERS else text[: _MAX_CHARACTERS - 3] + "..."
