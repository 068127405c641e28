"""Schemas that servers write, as chat templates take them."""

from __future__ import annotations

from collections.abc import Mapping


def function_schema(name: str, description: str | None, parameters: Mapping[str, object] | None) -> dict[str, object]:
    """Return a tool's function schema, OpenAI style.

    >>> made = function_schema("f", None, {"type": "object", "title": "F", "properties": {"title": {"title": "Title"}}})
    >>> made["function"]
    {'name': 'f', 'description': '', 'parameters': {'type': 'object', 'properties': {'title': {}}}}
    """
    schema = untitled(dict(parameters or {"type": "object", "properties": {}}))
    return {"type": "function", "function": {"name": name, "description": description or "", "parameters": schema}}


def untitled(schema: object) -> object:
    """Return a schema without pydantic's titles: they say nothing, and a prompt is paid for by the token."""
    if isinstance(schema, list):
        return [untitled(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept = {key: value for key, value in schema.items() if key != "title" or not isinstance(value, str)}
    return {
        key: {name: untitled(part) for name, part in value.items()}
        if key in ("properties", "$defs", "definitions") and isinstance(value, Mapping)
        else value
        if key in ("enum", "const", "default", "examples")
        else untitled(value)
        for key, value in kept.items()
    }
