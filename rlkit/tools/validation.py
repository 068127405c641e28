"""Arguments checked against JSON schemas by the package jsonschema, with errors that a model can act on.

A schema is read by the draft that its ``$schema`` names, or else by 2020-12. Nothing is ever fetched.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
from collections.abc import Callable, Hashable, Iterable, Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, TypeAlias

from rlkit import _check
from rlkit._lazy import missing
from rlkit.errors import ConfigError, MissingPackageError

if TYPE_CHECKING:
    from jsonschema.exceptions import ValidationError
    from jsonschema.protocols import Validator
    from referencing._core import Resolver
    from referencing.jsonschema import Schema, SchemaResource

__all__ = ["check_schema", "problems"]

_MAX_PROBLEMS = 5
_SHOWN = 40  # characters of a value
_MAX_CHARACTERS = 300  # of a sentence
_Errors: TypeAlias = "Iterable[ValidationError]"
_Keyword: TypeAlias = "Callable[[Validator, object, object, Mapping[str, object]], _Errors | None]"


def problems(arguments: object, schema: Mapping[str, object]) -> list[str]:
    """Return what is wrong with ``arguments``: up to five sentences, none if they fit.

    Args:
        arguments: what JSON knows.
        schema: as ``check_schema`` allows. ``nullable: true`` allows null beside what the schema says.

    >>> numbers = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x", "y"]}
    >>> problems({"x": "1"}, numbers)
    ["arguments.x: '1' is not of type 'integer'", "arguments: 'y' is a required property"]
    >>> problems({"x": 1, "y": None}, numbers)
    []
    """
    try:
        errors = itertools.islice(_validator(_text(schema)).iter_errors(arguments), _MAX_PROBLEMS)
        return [f"arguments{best.json_path[1:]}: {_message(best)}" for best in map(_most_telling, errors)]
    except RecursionError:
        return ["arguments: is nested too deeply"]


def check_schema(schema: object, where: str = "schema") -> None:
    """Raise unless ``schema`` is a JSON schema whose references stay inside of it.

    Raises:
        ConfigError: names the keyword and where it stands.
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
        return json.dumps(schema, default=dict)  # mappings that are no dict
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(": " + _check.problem("it", f"is no JSON: {error}", "a JSON schema")) from None


@functools.lru_cache(maxsize=256)  # checking a schema takes a hundred times as long as checking arguments
def _validator(text: str) -> Validator:
    """Build the validator of a schema. Errors begin with the place inside of the schema."""
    try:
        drafts = importlib.import_module("jsonschema.validators")
        referencing = importlib.import_module("referencing.jsonschema")
    except ImportError as error:
        raise missing("checking arguments against schemas", "jsonschema", "tools") from error
    schema = json.loads(text)
    draft = drafts.Draft202012Validator
    if isinstance(schema, dict) and isinstance(schema.get("$schema"), str):
        draft = drafts.validator_for(schema, default=draft)
    meta = drafts.validator_for(draft.META_SCHEMA)(draft.META_SCHEMA, format_checker=draft.FORMAT_CHECKER)
    try:
        for wrong in map(_most_telling, meta.iter_errors(schema)):
            raise ConfigError(f"{wrong.json_path[1:]}: {_message(wrong)}")
        specification = referencing.specification_with(draft.ID_OF(draft.META_SCHEMA))
        root = specification.create_resource(schema)
        registry = referencing.SchemaRegistry()  # it has no ``retrieve``: nothing is fetched
        _check_references(root, registry.resolver_with_root(root))
    except RecursionError:
        raise ConfigError(": is nested too deeply") from None
    types = draft.TYPE_CHECKER.redefine("object", lambda _, value: isinstance(value, Mapping))
    types = types.redefine("array", lambda _, value: isinstance(value, (list, tuple)))
    keywords = dict(draft.VALIDATORS) | {"multipleOf": _multiple_of, "uniqueItems": _unique_items}
    keywords = {name: _unless_null(keyword) for name, keyword in keywords.items()}
    return drafts.extend(draft, keywords, type_checker=types)(schema, registry=registry)


def _check_references(resource: SchemaResource, resolver: Resolver[Schema]) -> None:
    """Raise unless every reference leads to a schema inside of the root."""
    schema = resource.contents if isinstance(resource.contents, Mapping) else {}
    unresolvable = importlib.import_module("referencing.exceptions").Unresolvable
    for key in {"$ref", "$dynamicRef"} & schema.keys():
        try:
            inside = isinstance(resolver.lookup(schema[key]).contents, (Mapping, bool))
        except (unresolvable, ValueError):
            inside = False
        if not inside:
            expected = "a place inside the same schema, such as #/$defs/name"
            raise ConfigError(": " + _check.problem(key, f"got {_check.shown(schema[key])}", expected))
    for part in resource.subresources():
        _check_references(part, resolver.in_subresource(part))


def _unless_null(keyword: _Keyword) -> _Keyword:
    """Let null pass where the schema has ``nullable: true``, which is OpenAPI's and no draft's."""

    def check(validator: Validator, value: object, instance: object, schema: Mapping[str, object]) -> _Errors | None:
        allowed = instance is None and schema.get("nullable") is True
        return None if allowed else keyword(validator, value, instance, schema)

    return check


def _multiple_of(_: Validator, value: object, instance: object, __: Mapping[str, object]) -> _Errors:
    """Compare as decimals, as the numbers were written: 0.3 is a multiple of 0.1."""
    number = isinstance(instance, (int, float)) and not isinstance(instance, bool)
    if number and Fraction(str(instance)) % Fraction(str(value)):
        yield _error(f"{instance!r} is not a multiple of {value!r}")


def _unique_items(_: Validator, value: object, instance: object, __: Mapping[str, object]) -> _Errors:
    """Take time that grows with the length alone; the package compares every pair of items."""
    if value is True and isinstance(instance, (list, tuple)) and len(set(map(_key, instance))) < len(instance):
        yield _error(f"{instance!r} has non-unique elements")


def _key(value: object) -> Hashable:
    """Return what is equal for values that JSON calls equal: 1 is 1.0, and not true."""
    if isinstance(value, Mapping):
        return "object", frozenset((name, _key(item)) for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return "array", tuple(map(_key, value))
    return type(value) is bool, value


def _error(message: str) -> ValidationError:
    return importlib.import_module("jsonschema").ValidationError(message)


def _most_telling(error: ValidationError) -> ValidationError:
    """Return the error itself, or of alternatives the one that came nearest."""
    return importlib.import_module("jsonschema.exceptions").best_match([error])


def _message(error: ValidationError) -> str:
    """Say what each alternative expects and which properties there are; shorten what a model wrote."""
    text, value = str(error.message), repr(error.instance)
    if len(value) > _SHOWN:
        text = text.replace(value, value[: _SHOWN - 3] + "...")
    if error.context:
        text = "; or ".join(map(_message, error.context))
    if error.validator == "additionalProperties":
        text += f"; there is {', '.join(error.schema.get('properties', ())) or 'nothing'}"
    return text if len(text) <= _MAX_CHARACTERS else text[: _MAX_CHARACTERS - 3] + "..."
