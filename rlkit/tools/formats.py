"""The formats of models' tool calls, and one function that parses all of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import attrs

from rlkit import _check
from rlkit._interaction import Action
from rlkit.errors import ConfigError
from rlkit.registry import Registry
from rlkit.tools._functions import check_schema, problems
from rlkit.tools._reading import Findings, Unreadable, calls_at, json_at, resume_after, skip_space
from rlkit.tools.types import SURROGATES, Malformed, Parsed, ToolCall

__all__ = ["Format", "formats", "llama", "opening", "parameters", "parse", "qwen3_coder", "read_calls"]

Format: TypeAlias = Callable[[str, Mapping[str, Mapping[str, object]]], Parsed]

formats = Registry("tool-call format", entry_point_group="rlkit.tool_formats")
formats["llama"] = "rlkit.tools.formats:llama"
formats["qwen3_coder"] = "rlkit.tools.formats:qwen3_coder"


def parse(
    text: str,
    format: str | Format = "hermes",  # noqa: A002
    tools: Sequence[Mapping[str, object]] | None = None,
) -> Parsed:
    r"""Return the tool calls in a policy's text. It accepts any text, in time linear in its length.

    Args:
        text: a whole turn.
        format: a name in ``formats``, or a function of (text, name -> parameter schema).
        tools: schemas, OpenAI style. With them, calls of other tools and arguments that do not fit become errors.

    Returns:
        ``Parsed(text_outside, calls, errors)``; at most 128 calls and errors.

    Raises:
        ConfigError: ``text`` is not a string, or a schema is not valid.
        UnknownNameError: there is no such format.

    >>> found = parse('Let me see.\n<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>')
    >>> found.text_outside, found.calls[0].name, found.calls[0].arguments
    ('Let me see.', 'add', {'x': 1})
    >>> print(parse('<tool_call>{"name": "add", "arguments": {x: 1}}</tool_call>').errors[0].message)
    The tool call was not made: the JSON is not valid: Expecting property name enclosed in double quotes.
    Where: character 41, at 'add", "arguments": {x: 1}}</tool_call>'.
    Expected: <tool_call>{"name": "<tool>", "arguments": {...}}</tool_call>.
    """
    _check.require(isinstance(text, str), "parse(text)", text, "a string")
    known = parameters(tools or ())
    parsed: Parsed = formats.resolve(format)(str(text), known)
    return parsed if tools is None else _all_checked(parsed, known, text)


def read_calls(action: Action, format: str | Format, tools: Sequence[Mapping[str, object]]) -> Parsed:  # noqa: A002
    """Return the calls of a turn: as the model's response template or a renderer read them, or else by ``format``.

    Args:
        action: from ``Chat.action``.
        format: as of ``parse``; not used where ``action.parsed`` has the calls.
        tools: schemas, OpenAI style. Calls of other tools and arguments that do not fit become errors.

    >>> add = {"name": "add", "parameters": {"properties": {"x": {"type": "integer"}}}}
    >>> read_calls(Action('<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>'), "hermes", [add]).calls
    (ToolCall(name='add', arguments={'x': 1}, id='call00000', position=0),)
    """
    if action.parsed is not None:
        return _all_checked(action.parsed, parameters(tools), action.raw)
    parsed = parse(action, format, tools)
    if not parsed.in_order and action.raw != action:
        parsed = parse(action.raw, format, tools)  # some formats begin with a control token
    if not parsed.in_order and action.unread is not None:
        return attrs.evolve(parsed, errors=(action.unread,))
    return parsed


_OPENINGS = {  # (of any call, of the call of one tool)
    "hermes": ("<tool_call>\n", '<tool_call>\n{{"name": "{name}", "arguments": '),
    "qwen3_coder": ("<tool_call>\n<function=", "<tool_call>\n<function={name}>\n"),
    "json": ('{{"name": "', '{{"name": "{name}", "arguments": '),
    "llama": ('{{"name": "', '{{"name": "{name}", "parameters": '),
    "python": ("```python\n", "```python\n"),
}


def opening(format: str, name: str | None = None) -> str | None:  # noqa: A002
    r"""Return how a call begins, so that a turn can be made to begin with one; None for your own format.

    Args:
        format: a name in ``formats``.
        name: of the tool; None: any.

    >>> opening("hermes", "add")
    '<tool_call>\n{"name": "add", "arguments": '
    """
    if format not in _OPENINGS:
        return None
    return _OPENINGS[format][name is not None].format(name=name)


def parameters(tools: Sequence[Mapping[str, object]]) -> dict[str, Mapping[str, object]]:
    """Return the schemas of the arguments, by name, of OpenAI-style schemas.

    Raises:
        ConfigError: one has no name, a name comes twice, or a schema is not valid.
    """
    schemas: dict[str, Mapping[str, object]] = {}
    for i, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not name or name in schemas:
            raise ConfigError(f"tools[{i}]", f"got {_check.describe(tool)}", "a function schema with a unique name")
        schemas[name] = function.get("parameters") or {}
        check_schema(schemas[name], f"tools[{i}]")
    return schemas


def _all_checked(parsed: Parsed, known: Mapping[str, Mapping[str, object]], text: str) -> Parsed:
    """Make errors of calls whose tools or arguments do not fit the schemas."""
    checked = [_checked(call, known, text) for call in parsed.calls]
    wrong = tuple(item for item in checked if isinstance(item, Malformed))
    calls = tuple(item for item in checked if isinstance(item, ToolCall))
    return attrs.evolve(parsed, calls=calls, errors=(*parsed.errors, *wrong))


def _checked(call: ToolCall, known: Mapping[str, Mapping[str, object]], text: str) -> ToolCall | Malformed:
    excerpt = text[call.position : call.position + 40]
    if SURROGATES.search(f"{call.name} {json.dumps(call.arguments, ensure_ascii=False, default=str)}"):
        name = SURROGATES.sub("?", call.name[:64])
        return Malformed("it has half of a character", "whole ones", call.position, excerpt, name, call.id)
    if call.name not in known:
        names = ", ".join(known) or "none"
        return Malformed("the tool does not exist", f"one of: {names}", call.position, excerpt, call.name[:64], call.id)
    wrong = problems(call.arguments, known[call.name])
    if wrong:
        expected = f"arguments for {call.name} that fit its schema"
        return Malformed("; ".join(wrong), expected, call.position, excerpt, call.name, call.id)
    return call


@formats.register("hermes")
def hermes(text: str, tools: Mapping[str, Mapping[str, object]]) -> Parsed:  # noqa: ARG001
    """JSON between ``<tool_call>`` and ``</tool_call>``: Hermes, Qwen2.5, Qwen3. The last tag may be missing."""
    start, end = "<tool_call>", "</tool_call>"
    findings = Findings(text, f'{start}{{"name": "<tool>", "arguments": {{...}}}}{end}')
    at = 0
    while not findings.full and (opened := text.find(start, at)) >= 0:
        findings.keep(at, opened)
        body = opened + len(start)
        try:
            value, at = json_at(text, body)
        except Unreadable as error:
            findings.add_error(str(error), error.position)
            at = resume_after(text, body)
            continue
        at = skip_space(text, at)
        if text.startswith(end, at) or at == len(text):  # the tag may be a stop string
            findings.call_of(value, opened)
            at = min(at + len(end), len(text))
        else:
            findings.add_error(f"{end} is missing after the JSON", at)
            at = resume_after(text, at)
    return findings.parsed(at)


_OBJECT = re.compile(r"\{\s*\"|\[\s*\{\s*\"")
_FENCE = re.compile(r"```(?:json)?")
_AROUND = " \t\r\n`json"


@formats.register("json")
def json_calls(text: str, tools: Mapping[str, Mapping[str, object]]) -> Parsed:  # noqa: ARG001
    """JSON objects, or lists of them, in the plain text or in a block marked json."""
    findings = Findings(text, '{"name": "<tool>", "arguments": {...}}, or a list of such objects')
    begin, stop = len(text) - len(text.lstrip(_AROUND)), len(text.rstrip(_AROUND))
    at = 0
    while not findings.full and (match := _OBJECT.search(text, at)) is not None:
        findings.keep(at, match.start())
        try:
            value, end = json_at(text, match.start())
        except Unreadable as error:
            findings.add_error(str(error), error.position)
            at = max(error.position, match.end())
            continue
        values = value if isinstance(value, list) else [value]
        alone = match.start() <= begin and end >= stop
        if alone or all(isinstance(item, Mapping) and ("name" in item or "function" in item) for item in values):
            findings.calls_of(value, match.start())
        else:
            findings.keep(match.start(), end)  # JSON, but no call
        at = end
    parsed = findings.parsed(at)
    if not parsed.calls and not parsed.errors:
        return parsed
    return attrs.evolve(parsed, text_outside=_FENCE.sub("", parsed.text_outside).strip())


_BLOCK = re.compile(r"^```(?:python|py)[ \t]*\r?\n", re.MULTILINE | re.IGNORECASE)
_BLOCK_END = re.compile(r"^```[ \t]*$", re.MULTILINE)


@formats.register("python")
def python_blocks(text: str, tools: Mapping[str, Mapping[str, object]]) -> Parsed:  # noqa: ARG001
    """Blocks marked python: each is a call of the tool ``python`` with the argument ``code``. It runs no code."""
    findings = Findings(text, "a block of code that begins with ```python and ends with ```, each on a line of its own")
    at = 0
    while not findings.full and (opened := _BLOCK.search(text, at)) is not None:
        findings.keep(at, opened.start())
        closed = _BLOCK_END.search(text, opened.end())
        if closed is None:
            findings.add_error("the block of code is not closed", opened.start(), name="python")
            at = len(text)
            break
        findings.call("python", {"code": text[opened.end() : closed.start()]}, opened.start())
        at = closed.end()
    return findings.parsed(at)


_TAG = "<|python_tag|>"
_ENDS = re.compile(r"(?:<\|e(?:om|ot)_id\|>\s*)+\Z")
_BETWEEN = re.compile(r"[\s;,]*")
_WORD = re.compile(r"\[\s*[A-Za-z_][\w.]*\s*\(")


def llama(text: str, tools: Mapping[str, Mapping[str, object]]) -> Parsed:  # noqa: ARG001
    """``{"name": ..., "parameters": {...}}; ...`` or ``[f(x=1), g()]``: Llama 3 and 4, ``<|python_tag|>`` or not.

    Without the tag the whole turn has to be calls; otherwise it is text.
    """
    expected = '{"name": "<tool>", "parameters": {...}}, several separated by ";", or [tool(argument=value), ...]'
    findings = Findings(text, expected)
    ends = _ENDS.search(text, max(len(text) - 100, 0))
    stop = ends.start() if ends else len(text)
    tag = text.find(_TAG, 0, stop)
    at = skip_space(text, 0 if tag < 0 else tag + len(_TAG))
    tagged = tag >= 0
    python = _WORD.match(text, at) is not None or (tagged and text[at : at + 1].isidentifier())
    if not python and not tagged and not _names_a_tool(text, at):
        return Parsed(text[:stop].strip())
    findings.keep(0, max(tag, 0))
    if not python and not text.startswith(("{", "["), at):
        findings.add_error(f"no call follows {_TAG}", at)
        return findings.parsed(None)
    at = _pythonic(text, at, findings) if python else _objects(text, at, stop, findings)
    rest = text[at:stop].strip() if at < stop else ""
    if rest and not findings.errors:
        findings.add_error("text follows the calls", at)
    return findings.parsed(None)


def _objects(text: str, at: int, stop: int, findings: Findings) -> int:
    while at < stop and text.startswith(("{", "["), at) and not findings.full:
        begin = at
        try:
            value, at = json_at(text, at)
        except Unreadable as error:
            findings.add_error(str(error), error.position)
            return stop
        findings.calls_of(value, begin)
        match = _BETWEEN.match(text, at)
        at = match.end() if match else at
    return stop if findings.full else at


def _pythonic(text: str, at: int, findings: Findings) -> int:
    try:
        calls, end = calls_at(text, at)
    except Unreadable as error:
        findings.add_error(str(error), error.position)
        return len(text)
    for name, arguments, position in calls:
        if not findings.full:
            findings.call(name, arguments, position)
    return end


def _names_a_tool(text: str, at: int) -> bool:
    """Return whether JSON begins here that is a call, or a broken one."""
    if _OBJECT.match(text, at) is None:
        return False
    try:
        value, _ = json_at(text, at)
    except Unreadable:
        return True
    first = value[0] if isinstance(value, list) else value
    return isinstance(first, Mapping) and ("name" in first or "function" in first)


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
    """Read the call that begins at ``opened``; return where to continue."""
    at = opened + len(_START)
    function = _FUNCTION.match(text, at)
    if function is None:
        findings.add_error("<function=NAME> is missing", at)
        return resume_after(text, at)
    name, at = function[1], function.end()
    schema = tools.get(name, {}).get("properties")
    arguments: dict[str, object] = {}
    while (parameter := _PARAMETER.match(text, at)) is not None:
        key, begin = parameter[1], parameter.end()
        end = text.find(_PARAMETER_END, begin)
        if end < 0:
            findings.add_error(f"the parameter {key} is not closed", parameter.start(), name=name)
            return len(text)
        if key in arguments:
            findings.add_error(f"the parameter {key} comes twice", parameter.start(), name=name)
            return resume_after(text, end)
        value = text[begin:end].removeprefix("\n").removesuffix("\n")
        arguments[key] = _value(value, schema.get(key) if isinstance(schema, Mapping) else None)
        at = end + len(_PARAMETER_END)
    closing = _FUNCTION_END.match(text, at)
    if closing is None:
        findings.add_error("</function> is missing, or there is text between the parameters", at, name=name)
        return resume_after(text, at)
    if closing.end() < len(text) and not text.startswith(_END, closing.end()):
        findings.add_error(f"{_END} is missing after </function>", closing.end(), name=name)
        return resume_after(text, closing.end())
    findings.call(name, arguments, opened)
    return min(closing.end() + len(_END), len(text))


def _value(text: str, schema: object) -> object:
    """Return the text itself where the schema allows a string or says nothing; else its value as JSON."""
    if not isinstance(schema, Mapping):
        return text
    types: list[object] = [schema["type"]] if isinstance(schema.get("type"), str) else _listed(schema, "type")
    if not types:
        types = ["string" if isinstance(value, str) else "other" for value in _listed(schema, "enum")]
    if "null" in types and text.strip() == "null":
        return None
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
    """Return a list of a schema, which may be one that no one has checked."""
    value = schema.get(name)
    return value if isinstance(value, list) else []


def _takes_text(schema: object) -> bool:
    if not isinstance(schema, Mapping):
        return False
    return schema.get("type") == "string" or any(isinstance(value, str) for value in _listed(schema, "enum"))
