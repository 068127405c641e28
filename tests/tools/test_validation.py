"""Arguments against JSON schemas: what the package jsonschema says, bounded and said for a model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples

pytest.importorskip("jsonschema", reason="needs the extra tools")

from rlkit.errors import ConfigError
from rlkit.tools import check_schema, problems
from tests.each import for_each

KEYWORDS = ("$ref", "$schema", "$defs", "$id", "type", "enum", "items", "properties", "anyOf", "not", "pattern", "a")

anything = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.sampled_from(["string", "#", "#/a", "^(", "a"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=3),
    max_leaves=8,
)


@given(anything, anything)
@examples(400)
def test_nothing_but_answers(schema, value):
    """Any schema is accepted or refused with one error, and any value then gets an answer."""
    try:
        check_schema(schema)
    except ConfigError:
        return
    if isinstance(schema, dict):
        assert len(problems(value, schema)) <= 5


NEAREST = {"anyOf": [{"type": "null"}, {"properties": {"a": {"type": "string"}}}]}
INNER = {"properties": {"a": {"properties": {"b": {"minLength": 2}}}}}
CLOSED = {"properties": {"a": {}}, "additionalProperties": False}
EITHER = {"anyOf": [{"type": "null"}, {"type": "string"}]}
DRAFT_7 = "http://json-schema.org/draft-07/schema#"  # as MCP's servers send it


@for_each(
    ("schema", "value", "expected"),
    [
        ({"type": "integer"}, 1.0, []),
        ({"type": "integer"}, True, ["arguments: True is not of type 'integer'"]),
        ({"items": {"type": "string"}}, ["a", 1], ["arguments[1]: 1 is not of type 'string'"]),
        ({"items": {"type": "null"}}, [1] * 50, [f"arguments[{i}]: 1 is not of type 'null'" for i in range(5)]),
        (NEAREST, {"a": 1}, ["arguments.a: 1 is not of type 'string'"]),
        (INNER, {"a": {"b": "c"}}, ["arguments.a.b: 'c' is too short"]),
        (CLOSED, {"b": 1}, ["arguments: Additional properties are not allowed ('b' was unexpected); the schema has a"]),
        (EITHER, 1, ["arguments: 1 is not of type 'null'; or 1 is not of type 'string'"]),
        ({"type": "integer"}, "x" * 99, [f"arguments: '{'x' * 36}... is not of type 'integer'"]),
        ({"$schema": DRAFT_7, "items": [{"type": "string"}]}, [1], ["arguments[0]: 1 is not of type 'string'"]),
    ],
)
def test_what_is_said(schema, value, expected):
    check_schema(schema)
    assert problems(value, schema) == expected


def nested(levels, key):
    value = {}
    for _ in range(levels):
        value = {key: value}
    return value


def test_references_may_recur():
    child = {"$ref": "#/$defs/tree"}
    tree = {"$defs": {"tree": {"type": "object", "properties": {"left": child}}}, **child}
    check_schema(tree)
    assert problems({"left": {"left": {}}}, tree) == []
    assert problems({"left": {"left": 3}}, tree) == ["arguments.left.left: 3 is not of type 'object'"]
    for value, schema in ((1, {"$ref": "#"}), (nested(1000, "left"), tree)):
        assert problems(value, schema) == ["arguments: is nested too deeply"]


@for_each(
    ("schema", "message"),
    [
        (3, "schema: 3 is not of type 'object', 'boolean'"),
        ({1, 2}, "schema: it: is not JSON"),
        ({"type": "int"}, r"schema.type: 'int' is not one of \['array'"),
        ({"properties": {"a": {"items": {"type": "text"}}}}, "schema.properties.a.items.type: 'text' is not one of"),
        ({"pattern": "("}, "schema.pattern: '\\(' is not a 'regex'"),
        (nested(400, "items"), "is nested too deeply"),
    ],
)
def test_schemas_that_are_refused(schema, message):
    with pytest.raises(ConfigError, match=message):
        check_schema(schema)


@for_each("there", ["https://example.org/x", "#/$defs/none", "file:///x"])
def test_references_stay_inside_of_the_schema(there):
    """Nothing is fetched; where one leads elsewhere is told when a call is checked."""
    with pytest.raises(ConfigError) as caught:
        problems({"a": 1}, {"properties": {"a": {"$ref": there}}})
    assert f"{there[1:]}'; expected a place inside" in str(caught.value)
