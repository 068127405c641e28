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


@for_each(
    ("schema", "value", "expected"),
    [
        ({"type": "integer"}, 1.0, []),
        ({"type": "integer"}, True, ["arguments: True is not of type 'integer'"]),
        ({"enum": [1, "a"]}, True, ["arguments: True is not one of [1, 'a']"]),
        ({"uniqueItems": True}, [1, 1.0], ["arguments: [1, 1.0] has non-unique elements"]),
        ({"uniqueItems": True}, [1, True], []),
        (
            {"uniqueItems": True},
            [[{"a": 1}], [{"a": 1.0}]],
            ["arguments: [[{'a': 1}], [{'a': 1.0}]] has non-unique elements"],
        ),
        ({"uniqueItems": False}, [1, 1], []),
        ({"type": "array", "items": {"type": "string"}}, ["a", 1], ["arguments[1]: 1 is not of type 'string'"]),
        (
            {"anyOf": [{"type": "null"}, {"properties": {"a": {"type": "string"}}}]},
            {"a": 1},
            ["arguments.a: 1 is not of type 'string'"],  # of the alternatives, what came nearest
        ),
        (
            {"properties": {"a": {"properties": {"b": {"minLength": 2}}}}},
            {"a": {"b": "c"}},
            ["arguments.a.b: 'c' is too short"],
        ),
        (
            {"properties": {"a": {}}, "additionalProperties": False},
            {"b": 1},
            ["arguments: Additional properties are not allowed ('b' was unexpected); the schema has a"],
        ),
        (
            {"anyOf": [{"type": "null"}, {"type": "string"}]},
            1,
            ["arguments: 1 is not of type 'null'; or 1 is not of type 'string'"],
        ),
        ({"type": "integer"}, "x" * 99, [f"arguments: '{'x' * 36}... is not of type 'integer'"]),
        (
            {"contains": {"type": "integer"}},
            ["a"],
            ["arguments: ['a'] does not contain items matching the given schema"],
        ),
        (
            {"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"type": "string"}]},
            [1],
            ["arguments[0]: 1 is not of type 'string'"],  # as MCP's servers send it
        ),
    ],
)
def test_what_is_said(schema, value, expected):
    check_schema(schema)
    assert problems(value, schema) == expected


def test_references_may_recur():
    tree = {
        "$defs": {"tree": {"type": "object", "properties": {"left": {"$ref": "#/$defs/tree"}}}},
        "$ref": "#/$defs/tree",
    }
    check_schema(tree)
    assert problems({"left": {"left": {}}}, tree) == []
    assert problems({"left": {"left": 3}}, tree) == ["arguments.left.left: 3 is not of type 'object'"]
    endless = {"$ref": "#"}
    assert problems(1, endless) == ["arguments: is nested too deeply"]
    deep = {}
    for _ in range(1000):
        deep = {"left": deep}
    assert "nested too deeply" in problems(deep, tree)[0]


def test_never_more_than_five():
    assert len(problems([1] * 50, {"items": {"type": "string"}})) == 5


@for_each(
    ("schema", "message"),
    [
        (3, "schema: 3 is not of type 'object', 'boolean'"),
        ({1, 2}, "schema: it: is not JSON"),
        ({"type": "int"}, r"schema.type: 'int' is not one of \['array'"),
        ({"properties": {"a": {"items": {"type": "text"}}}}, "schema.properties.a.items.type: 'text' is not one of"),
        ({"pattern": "("}, "schema.pattern: '\\(' is not a 'regex'"),
        ({"required": "a"}, "schema.required"),
        ({"anyOf": {}}, "schema.anyOf"),
        ({"properties": []}, "schema.properties"),
        ({"minLength": -1}, "schema.minLength"),
        ({"multipleOf": 0}, "schema.multipleOf"),
        ({"minimum": "1"}, "schema.minimum"),
    ],
)
def test_schemas_that_are_refused(schema, message):
    with pytest.raises(ConfigError, match=message):
        check_schema(schema)


def test_references_stay_inside_of_the_schema():
    """Nothing is fetched; where one leads elsewhere is told when a call is checked."""
    for there in ("https://example.org/x", "#/$defs/none", "file:///x"):
        with pytest.raises(ConfigError) as caught:
            problems({"a": 1}, {"properties": {"a": {"$ref": there}}})
        assert f"{there[1:]}'; expected a place inside" in str(caught.value)


def test_an_endless_schema_is_refused():
    schema = {}
    for _ in range(400):
        schema = {"items": schema}
    with pytest.raises(ConfigError, match="is nested too deeply"):
        check_schema(schema)
