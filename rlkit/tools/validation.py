"""Whether arguments fit a JSON schema, said so that a model can put it right.

The vocabulary of draft 2020-12 as tool schemas use it. A keyword that demands something and is not known here is
refused when the schema is given, never passed over.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from rlkit import _check
from rlkit.errors import ConfigError
from rlkit.tools._reading import kind

__all__ = ["check_schema", "problems"]

_MOST = 5
_DEPTH = 64
_TYPES = {"null": "null", "boolean": "a boolean", "integer": "an integer", "number": "a number"}
_TYPES |= {"string": "a string", "array": "a list", "object": "an object"}
_SCHEMAS = ("additionalProperties", "propertyNames", "items", "not", "if", "then", "else")
_LISTS = ("prefixItems", "allOf", "anyOf", "oneOf")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_COUNTS = ("maxLength", "minLength", "maxItems", "minItems", "maxProperties", "minProperties")
_NUMBERS = ("multipleOf", "maximum", "exclusiveMaximum", "minimum", "exclusiveMinimum")
_REFUSED = (
    *("contains", "minContains", "maxContains", "dependentRequired", "dependentSchemas", "dependencies"),
    *("unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef", "additionalItems"),
)


def problems(arguments: Any, schema: Mapping[str, Any]) -> list[str]:
    """What is wrong with ``arguments``: up to five sentences, none if they fit.

    Args:
        arguments: what JSON knows.
        schema: as ``check_schema`` allows. ``nullable: true`` allows null beside what the schema says.

    >>> numbers = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x", "y"]}
    >>> problems({"x": "1"}, numbers)
    ['arguments: "y" is missing', "arguments.x: '1' is a string, not an integer"]
    >>> problems({"x": 1, "y": None}, numbers)
    []
    """
    checker = _Checker(schema)
    checker.check(arguments, schema, "arguments", 0)
    return checker.found[:_MOST]


def check_schema(schema: Any, where: str = "schema") -> None:
    """Raises unless every keyword of the schema is one that ``problems`` knows, or demands nothing.

    Raises:
        ConfigError: naming the keyword and where it stands.

    >>> check_schema({"type": "object", "properties": {"x": {"type": "int"}}})
    Traceback (most recent call last):
    rlkit.errors.ConfigError: schema.properties.x.type: got 'int' (str); expected one of null, boolean, ...
    """
    _check_schema(schema, schema, where, 0)


def _check_schema(schema: Any, root: Any, where: str, depth: int) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise ConfigError(_check.problem(where, f"got {_check.shown(schema)}", "a JSON schema"))
    if depth > _DEPTH:
        raise ConfigError(_check.problem(where, f"is nested more than {_DEPTH} deep", "a flatter schema"))
    for key in _REFUSED:
        if key in schema:
            raise ConfigError(_check.problem(where, f"has the keyword {key!r}", "a schema without it", "not supported"))
    given = schema.get("type", [])
    for name in [given] if not isinstance(given, (list, tuple)) else given:
        if name not in _TYPES:
            raise ConfigError(
                _check.problem(f"{where}.type", f"got {_check.shown(name)}", "one of " + ", ".join(_TYPES))
            )
    for key in (*_COUNTS, *_NUMBERS):
        if key in schema:
            _check.real(f"{where}.{key}", schema[key], low=0 if key in _COUNTS else None)
    if "multipleOf" in schema:
        _check.real(f"{where}.multipleOf", schema["multipleOf"], above=0)
    for pattern in [*schema.get("patternProperties", ()), *([schema["pattern"]] if "pattern" in schema else [])]:
        _compiled(pattern, f"{where}.pattern")
    if "$ref" in schema:
        _referred(schema["$ref"], root, f"{where}.$ref")
    for key in ("required", "enum"):
        if key in schema and not isinstance(schema[key], (list, tuple)):
            raise ConfigError(_check.problem(f"{where}.{key}", f"got {_check.shown(schema[key])}", "a list"))
    for key in _SCHEMAS:
        if key in schema:
            _check_schema(schema[key], root, f"{where}.{key}", depth + 1)
    for key in _LISTS:
        if not isinstance(schema.get(key, []), (list, tuple)):
            raise ConfigError(_check.problem(f"{where}.{key}", f"got {_check.shown(schema[key])}", "a list"))
        for i, part in enumerate(schema.get(key, ())):
            _check_schema(part, root, f"{where}.{key}[{i}]", depth + 1)
    for key in _MAPS:
        if not isinstance(schema.get(key, {}), Mapping):
            raise ConfigError(_check.problem(f"{where}.{key}", f"got {_check.shown(schema[key])}", "an object"))
        for name, part in schema.get(key, {}).items():
            _check_schema(part, root, f"{where}.{key}.{name}", depth + 1)


class _Checker:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self.root = root
        self.found: list[str] = []

    def say(self, where: str, what: str) -> None:
        self.found.append(f"{where}: {what}")

    def fits(self, value: Any, schema: Any, depth: int) -> bool:
        inner = _Checker(self.root)
        inner.check(value, schema, "", depth + 1)
        return not inner.found

    def check(self, value: Any, schema: Any, where: str, depth: int) -> None:
        if schema is True or len(self.found) >= _MOST:
            return
        if schema is False:
            self.say(where, "nothing is allowed here")
        elif depth > _DEPTH:
            self.say(where, "is nested too deeply")
        elif value is not None or schema.get("nullable") is not True:
            if "$ref" in schema:
                self.check(value, _referred(schema["$ref"], self.root, "$ref"), where, depth + 1)
            self._typed(value, schema, where, depth)

    def _typed(self, value: Any, schema: Mapping[str, Any], where: str, depth: int) -> None:
        types = schema.get("type", ())
        types = (types,) if isinstance(types, str) else types
        if types and not any(_is(value, name) for name in types):
            self.say(where, f"{_short(value)} is {kind(value)}, not {' or '.join(_TYPES[name] for name in types)}")
            return
        self._values(value, schema, where)
        self._options(value, schema, where, depth)
        if isinstance(value, str):
            self._text(value, schema, where)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            self._number(value, schema, where)
        elif isinstance(value, Mapping):
            self._object(value, schema, where, depth)
        elif isinstance(value, (list, tuple)):
            self._list(value, schema, where, depth)

    def _values(self, value: Any, schema: Mapping[str, Any], where: str) -> None:
        if "enum" in schema and _key(value) not in {_key(option) for option in schema["enum"]}:
            options = ", ".join(_short(option) for option in schema["enum"][:20])
            self.say(where, f"{_short(value)} is not one of {options}")
        if "const" in schema and _key(value) != _key(schema["const"]):
            self.say(where, f"{_short(value)} is not {_short(schema['const'])}")

    def _options(self, value: Any, schema: Mapping[str, Any], where: str, depth: int) -> None:
        for part in schema.get("allOf", ()):
            self.check(value, part, where, depth + 1)
        if "anyOf" in schema and not any(self.fits(value, part, depth) for part in schema["anyOf"]):
            self.say(where, f"{_short(value)} fits none of the {len(schema['anyOf'])} forms that are allowed")
        if "oneOf" in schema and (n := sum(self.fits(value, part, depth) for part in schema["oneOf"])) != 1:
            self.say(where, f"{_short(value)} fits {n} of the forms that are allowed, not exactly one")
        if "not" in schema and self.fits(value, schema["not"], depth):
            self.say(where, f"{_short(value)} has a form that is not allowed")
        if "if" in schema:
            branch = "then" if self.fits(value, schema["if"], depth) else "else"
            self.check(value, schema.get(branch, True), where, depth + 1)

    def _text(self, value: str, schema: Mapping[str, Any], where: str) -> None:
        self._counts(len(value), schema, where, "Length", "characters")
        if "pattern" in schema and not _compiled(schema["pattern"], where).search(value):
            self.say(where, f"{_short(value)} does not match the pattern {schema['pattern']}")

    def _number(self, value: float, schema: Mapping[str, Any], where: str) -> None:
        bounds = (
            ("minimum", value < schema.get("minimum", value), "at least"),
            ("maximum", value > schema.get("maximum", value), "at most"),
            ("exclusiveMinimum", "exclusiveMinimum" in schema and value <= schema["exclusiveMinimum"], "more than"),
            ("exclusiveMaximum", "exclusiveMaximum" in schema and value >= schema["exclusiveMaximum"], "less than"),
        )
        for key, broken, words in bounds:
            if broken:
                self.say(where, f"{value} is not {words} {schema[key]}")
        if "multipleOf" in schema and Fraction(str(value)) % Fraction(str(schema["multipleOf"])):
            self.say(where, f"{value} is not a multiple of {schema['multipleOf']}")

    def _object(self, value: Mapping[str, Any], schema: Mapping[str, Any], where: str, depth: int) -> None:
        properties, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        for name in schema.get("required", ()):
            if name not in value:
                self.say(where, f'"{name}" is missing')
        self._counts(len(value), schema, where, "Properties", "entries")
        for name, item in value.items():
            at = f"{where}.{name[:64]}"
            known = name in properties
            if known:
                self.check(item, properties[name], at, depth + 1)
            for pattern, part in patterns.items():
                if _compiled(pattern, where).search(name):
                    known = True
                    self.check(item, part, at, depth + 1)
            if not known and schema.get("additionalProperties") is False:
                self.say(where, f'"{name[:64]}" is unknown; there is {", ".join(properties) or "nothing"}')
            elif not known:
                self.check(item, schema.get("additionalProperties", True), at, depth + 1)
            if "propertyNames" in schema:
                self.check(name, schema["propertyNames"], at, depth + 1)

    def _list(self, value: Sequence[Any], schema: Mapping[str, Any], where: str, depth: int) -> None:
        self._counts(len(value), schema, where, "Items", "items")
        first = schema.get("prefixItems", ())
        for i, item in enumerate(value):
            part = first[i] if i < len(first) else schema.get("items", True)
            self.check(item, part, f"{where}[{i}]", depth + 1)
        if schema.get("uniqueItems") is True and len({_key(item) for item in value}) < len(value):
            self.say(where, "an item comes twice")

    def _counts(self, n: int, schema: Mapping[str, Any], where: str, what: str, unit: str) -> None:
        if n < schema.get(f"min{what}", n):
            self.say(where, f"has {n} {unit}, fewer than {schema[f'min{what}']}")
        if n > schema.get(f"max{what}", n):
            self.say(where, f"has {n} {unit}, more than {schema[f'max{what}']}")


def _is(value: Any, name: str) -> bool:
    if name == "integer":
        return not isinstance(value, bool) and (
            isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        )
    return kind(value) == _TYPES[name]


def _key(value: Any) -> Any:
    """Equal for values that JSON calls equal: 1 is 1.0, and not true."""
    if isinstance(value, Mapping):
        return "o", frozenset((name, _key(item)) for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return "l", tuple(_key(item) for item in value)
    return kind(value), value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _compiled(pattern: Any, where: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ConfigError(_check.problem(where, f"got {_check.shown(pattern)}", "a regular expression")) from error


def _referred(reference: Any, root: Any, where: str) -> Any:
    """What ``#/$defs/name`` stands for."""
    target = root
    if isinstance(reference, str) and reference.startswith("#"):
        for part in reference[1:].split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            target = target.get(name) if isinstance(target, Mapping) else None
        if isinstance(target, (Mapping, bool)):
            return target
    expected = "a place inside the same schema, such as #/$defs/name"
    raise ConfigError(_check.problem(where, f"got {_check.shown(reference)}", expected))
