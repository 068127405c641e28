"""Arguments against JSON schemas: the same verdicts as the jsonschema package, and words for a model."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.errors import ConfigError
from rlkit.tools import check_schema, problems

keys = st.sampled_from(["a", "b", "ab"])
scalars = st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.5, 1.0, 2.0]) | st.text("ab1", max_size=3)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3), max_leaves=6
)
types = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])
counts = st.integers(0, 2)
plain = st.fixed_dictionaries(
    {},
    optional={
        "type": types | st.lists(types, min_size=1, max_size=3, unique=True),
        "enum": st.lists(values, min_size=1, max_size=3),
        "const": values,
        "minimum": st.integers(-2, 2),
        "exclusiveMaximum": st.integers(-2, 2),
        "maximum": st.integers(-2, 2),
        "exclusiveMinimum": st.integers(-2, 2),
        "multipleOf": st.integers(1, 3),
        "minLength": counts,
        "maxLength": counts,
        "pattern": st.sampled_from(["^a", "b$", "1"]),
        "minItems": counts,
        "maxItems": counts,
        "uniqueItems": st.booleans(),
        "minProperties": counts,
        "maxProperties": counts,
        "required": st.lists(keys, max_size=2, unique=True),
        "title": st.just("ignored"),
        "$ref": st.just("#/$defs/d"),
    },
)
schemas = st.recursive(
    plain | st.booleans(),
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            "type": types,
            "properties": st.dictionaries(keys, inner, max_size=2),
            "patternProperties": st.dictionaries(st.sampled_from(["^a", "b"]), inner, max_size=2),
            "additionalProperties": inner,
            "propertyNames": inner,
            "items": inner,
            "prefixItems": st.lists(inner, min_size=1, max_size=2),
            "allOf": st.lists(inner, min_size=1, max_size=2),
            "anyOf": st.lists(inner, min_size=1, max_size=2),
            "oneOf": st.lists(inner, min_size=1, max_size=2),
            "not": inner,
            "if": inner,
            "then": inner,
            "else": inner,
        },
    ),
    max_leaves=6,
)


@given(schemas, st.sampled_from([True, {"type": "integer"}, {"minLength": 1}]), values)
@settings(max_examples=400, deadline=None)
def test_same_verdict_as_jsonschema(schema, referred, value):
    """The oracle is another implementation of draft 2020-12."""
    jsonschema = pytest.importorskip("jsonschema")
    schema = {"$defs": {"d": referred}, "allOf": [schema]}
    check_schema(schema)
    assert (problems(value, schema) == []) == jsonschema.Draft202012Validator(schema).is_valid(value)


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        ({"type": "integer"}, 1.0, []),
        ({"type": "integer"}, True, ["arguments: True is a boolean, not an integer"]),
        ({"type": ["integer", "null"]}, "a", ["arguments: 'a' is a string, not an integer or null"]),
        ({"enum": [1, "a"]}, True, ["arguments: True is not one of 1, 'a'"]),
        ({"const": 1}, 2, ["arguments: 2 is not 1"]),
        ({"minimum": 2}, 1, ["arguments: 1 is not at least 2"]),
        ({"exclusiveMinimum": 1}, 1, ["arguments: 1 is not more than 1"]),
        ({"multipleOf": 0.1}, 0.3, []),  # decimal, as it was written
        ({"multipleOf": 0.1}, 0.35, ["arguments: 0.35 is not a multiple of 0.1"]),
        ({"maxLength": 1}, "é🎈", ["arguments: has 2 characters, more than 1"]),
        ({"minItems": 1}, [], ["arguments: has 0 items, fewer than 1"]),
        ({"uniqueItems": True}, [1, 1.0], ["arguments: an item comes twice"]),
        ({"uniqueItems": True}, [1, True], []),
        ({"pattern": "^a"}, "b", ["arguments: 'b' does not match the pattern ^a"]),
        (
            {"anyOf": [{"type": "null"}, {"type": "string"}]},
            1,
            ["arguments: 1 fits none of the 2 forms that are allowed"],
        ),
        ({"type": "string", "nullable": True}, None, []),
        ({"type": "array", "items": {"type": "string"}}, ["a", 1], ["arguments[1]: 1 is a number, not a string"]),
        (
            {"properties": {"a": {"properties": {"b": {"type": "string"}}}}},
            {"a": {"b": 1}},
            ["arguments.a.b: 1 is a number, not a string"],
        ),
        ({"properties": {"a": {}}, "additionalProperties": False}, {"b": 1}, ['arguments: "b" is unknown; there is a']),
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
    assert problems({"left": {"left": 3}}, tree) == ["arguments.left.left: 3 is a number, not an object"]
    endless = {"$ref": "#"}
    assert problems(1, endless) == ["arguments: is nested too deeply"]
    deep = {}
    for _ in range(100):
        deep = {"left": deep}
    assert "nested too deeply" in problems(deep, tree)[0]


def test_never_more_than_five():
    assert len(problems({str(i): 1 for i in range(50)}, {"additionalProperties": False})) == 5


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (3, "schema: got 3"),
        ({"type": "int"}, "schema.type: got 'int'"),
        ({"properties": {"a": {"items": {"type": "text"}}}}, "schema.properties.a.items.type: got 'text'"),
        ({"contains": {}}, "has the keyword 'contains'"),
        ({"allOf": [{"unevaluatedProperties": False}]}, r"schema.allOf\[0\]: has the keyword"),
        ({"pattern": "("}, "schema.pattern: got '\\('"),
        ({"$ref": "https://example.org/x"}, r"schema.\$ref"),
        ({"$ref": "#/$defs/none"}, r"schema.\$ref"),
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


def test_an_endless_schema_is_refused():
    schema = {}
    for _ in range(100):
        schema = {"items": schema}
    with pytest.raises(ConfigError, match="nested more than 64 deep"):
        check_schema(schema)
