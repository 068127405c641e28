"""How models write tool calls, and one function that reads all of the ways."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import attrs

from rlkit import _check
from rlkit._interaction import Action
from rlkit.errors import ConfigError
from rlkit.registry import Registry
from rlkit.tools._reading import Findings, Unreadable, behind, json_at, skip
from rlkit.tools.types import Malformed, Parsed, ToolCall
from rlkit.tools.validation import check_schema, problems

__all__ = ["Format", "formats", "opening", "parameters", "parse", "read_calls"]

Format: TypeAlias = Callable[[str, Mapping[str, Mapping[str, object]]], Parsed]

formats = Registry("tool-call format", entry_point_group="rlkit.tool_formats")
formats["llama"] = "rlkit.tools.llama:llama"
formats["qwen3_coder"] = "rlkit.tools.qwen3_coder:qwen3_coder"


def parse(
    text: str,
    format: str | Format = "hermes",  # noqa: A002
    tools: Sequence[Mapping[str, object]] | None = None,
) -> Parsed:
    r"""Return the tool calls in what a policy wrote. Any text is taken, in time that grows with its length only.

    Args:
        text: a whole turn.
        format: a name in ``formats``, or a function of (text, name -> parameter schema).
        tools: schemas, OpenAI style. With them, calls of other tools and arguments that do not fit become errors.

    Returns:
        ``Parsed(text_outside, calls, errors)``; at most 128 calls and errors.

    Raises:
        ConfigError: ``text`` is no string, or a schema is not valid.
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
    """Return the calls of a turn: as a renderer read them from the tokens, or else parsed from the text.

    Args:
        action: from ``Chat.action``.
        format: as of ``parse``; not used where a renderer has read the turn.
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
    return parsed


_OPENINGS = {  # (of any call, of the call of one tool)
    "hermes": ("<tool_call>\n", '<tool_call>\n{{"name": "{name}", "arguments": '),
    "qwen3_coder": ("<tool_call>\n<function=", "<tool_call>\n<function={name}>\n"),
    "json": ('{{"name": "', '{{"name": "{name}", "arguments": '),
    "llama": ('{{"name": "', '{{"name": "{name}", "parameters": '),
    "python": ("```python\n", "```python\n"),
}


def opening(format: str, name: str | None = None) -> str | None:  # noqa: A002
    r"""Return how a call begins, so that a turn can be made to begin with one; None for a format of your own.

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
            raise ConfigError(f"tools[{i}]", f"got {_check.shown(tool)}", "a function schema with a name of its own")
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
    if call.name not in known:
        names = ", ".join(known) or "none"
        return Malformed("there is no such tool", f"one of: {names}", call.position, excerpt, call.name[:64], call.id)
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
            findings.wrong(str(error), error.position)
            at = behind(text, body)
            continue
        at = skip(text, at)
        if text.startswith(end, at) or at == len(text):  # the tag may be a stop string
            findings.call_of(value, opened)
            at = min(at + len(end), len(text))
        else:
            findings.wrong(f"{end} is missing behind the JSON", at)
            at = behind(text, at)
    return findings.parsed(at)


_OBJECT = re.compile(r"\{\s*\"|\[\s*\{\s*\"")
_FENCE = re.compile(r"```(?:json)?")
_AROUND = " \t\r\n`json"


@formats.register("json")
def json_calls(text: str, tools: Mapping[str, Mapping[str, object]]) -> Parsed:  # noqa: ARG001
    """JSON objects, or lists of them, that stand in the text as they are or in a block marked json."""
    findings = Findings(text, '{"name": "<tool>", "arguments": {...}}, or a list of such objects')
    begin, stop = len(text) - len(text.lstrip(_AROUND)), len(text.rstrip(_AROUND))
    at = 0
    while not findings.full and (match := _OBJECT.search(text, at)) is not None:
        findings.keep(at, match.start())
        try:
            value, end = json_at(text, match.start())
        except Unreadable as error:
            findings.wrong(str(error), error.position)
            at = max(error.position, match.end())
            continue
        values = value if isinstance(value, list) else [value]
        alone = match.start() <= begin and end >= stop
        if alone or all(isinstance(item, Mapping) and ("name" in item or "function" in item) for item in values):
            for item in values:
                if not findings.full:
                    findings.call_of(item, match.start())
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
    """Blocks marked python: each is a call of the tool ``python`` with the argument ``code``. Nothing is run here."""
    findings = Findings(text, "a block of code that begins with ```python and ends with ```, each on a line of its own")
    at = 0
    while not findings.full and (opened := _BLOCK.search(text, at)) is not None:
        findings.keep(at, opened.start())
        closed = _BLOCK_END.search(text, opened.end())
        if closed is None:
            findings.wrong("the block of code is not closed", opened.start(), name="python")
            at = len(text)
            break
        findings.call("python", {"code": text[opened.end() : closed.start()]}, opened.start())
        at = closed.end()
    return findings.parsed(at)
