"""Tool calls as Qwen3-Coder writes them: tags for the function and for each of its parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rlkit.tools._reading import Findings, Unreadable, behind, json_at
from rlkit.tools.types import Parsed

__all__ = ["qwen3_coder"]

_FUNCTION = re.compile(r"\s*<function=([^<>\s]{1,256})>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\s]{1,256})>")
_FUNCTION_END = re.compile(r"\s*</function>\s*")
_START, _END, _PARAMETER_END = "<tool_call>", "</tool_call>", "</parameter>"


def qwen3_coder(text: str, tools: Mapping[str, Mapping[str, object]]) -> Parsed:
    """``<tool_call><function=f><parameter=x>1</parameter></function></tool_call>``: Qwen3-Coder, Qwen3.5.

    A value is text between line breaks; where the tool's schema wants something else, it is read as JSON.
    """
    findings = Findings(text, f"{_START}<function=NAME><parameter=KEY>VALUE{_PARAMETER_END}</function>{_END}")
    at = 0
    while not findings.full and (opened := text.find(_START, at)) >= 0:
        findings.keep(at, opened)
        at = _call(text, opened, tools, findings)
    return findings.parsed(at)


def _call(text: str, opened: int, tools: Mapping[str, Mapping[str, object]], findings: Findings) -> int:
    """Read the call that begins at ``opened``; return where to go on."""
    at = opened + len(_START)
    function = _FUNCTION.match(text, at)
    if function is None:
        findings.wrong("there is no <function=NAME>", at)
        return behind(text, at)
    name, at = function[1], function.end()
    schema = tools.get(name, {}).get("properties")
    arguments: dict[str, object] = {}
    while (parameter := _PARAMETER.match(text, at)) is not None:
        key, begin = parameter[1], parameter.end()
        end = text.find(_PARAMETER_END, begin)
        if end < 0:
            findings.wrong(f"the parameter {key} is not closed", parameter.start(), name=name)
            return len(text)
        if key in arguments:
            findings.wrong(f"the parameter {key} comes twice", parameter.start(), name=name)
            return behind(text, end)
        value = text[begin:end].removeprefix("\n").removesuffix("\n")
        arguments[key] = _value(value, schema.get(key) if isinstance(schema, Mapping) else None)
        at = end + len(_PARAMETER_END)
    closing = _FUNCTION_END.match(text, at)
    if closing is None:
        findings.wrong("</function> is missing, or something stands between the parameters", at, name=name)
        return behind(text, at)
    if closing.end() < len(text) and not text.startswith(_END, closing.end()):
        findings.wrong(f"{_END} is missing behind </function>", closing.end(), name=name)
        return behind(text, closing.end())
    findings.call(name, arguments, opened)
    return min(closing.end() + len(_END), len(text))


def _value(text: str, schema: object) -> Any:
    """Return the text itself where the schema allows a string or says nothing; else its value as JSON."""
    if not isinstance(schema, Mapping):
        return text
    types = [schema["type"]] if isinstance(schema.get("type"), str) else _listed(schema, "type")
    if "string" in types or (not types and not any(k in schema for k in ("anyOf", "oneOf", "$ref", "allOf"))):
        return text
    if not types and any(_takes_text(option) for option in _listed(schema, "anyOf") + _listed(schema, "oneOf")):
        return None if text.strip() == "null" else text
    written = text.strip()
    if "boolean" in types and written in ("True", "False"):  # Python's spelling is common
        return written == "True"
    try:
        value, end = json_at(written, 0)
    except Unreadable:
        return text
    return value if end == len(written) else text


def _listed(schema: Mapping[str, object], name: str) -> list[object]:
    """Return a list of a schema, which may be one that nobody has checked."""
    value = schema.get(name)
    return value if isinstance(value, list) else []


def _takes_text(schema: object) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") == "string"
