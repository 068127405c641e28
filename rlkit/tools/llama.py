"""Tool calls as Llama models write them: JSON objects, or a list of Python-like calls."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rlkit.tools._reading import Findings, Unreadable, json_at, skip
from rlkit.tools.pythonic import calls_at
from rlkit.tools.types import Parsed

__all__ = ["llama"]

_TAG = "<|python_tag|>"
_ENDS = re.compile(r"(?:<\|e(?:om|ot)_id\|>\s*)+\Z")
_BETWEEN = re.compile(r"[\s;,]*")
_JSON = re.compile(r"\{\s*\"|\[\s*\{\s*\"")
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
    at = skip(text, 0 if tag < 0 else tag + len(_TAG))
    tagged = tag >= 0
    python = _WORD.match(text, at) is not None or (tagged and text[at : at + 1].isidentifier())
    if not python and not tagged and not _names_a_tool(text, at):
        return Parsed(text[:stop].strip())
    findings.keep(0, max(tag, 0))
    if not python and not text.startswith(("{", "["), at):
        findings.wrong(f"behind {_TAG} stands no call", at)
        return findings.parsed(None)
    at = _pythonic(text, at, findings) if python else _objects(text, at, stop, findings)
    rest = text[at:stop].strip() if at < stop else ""
    if rest and not findings.errors:
        findings.wrong("there is text behind the calls", at)
    return findings.parsed(None)


def _objects(text: str, at: int, stop: int, findings: Findings) -> int:
    while at < stop and text.startswith(("{", "["), at) and not findings.full:
        begin = at
        try:
            value, at = json_at(text, at)
        except Unreadable as error:
            findings.wrong(str(error), error.position)
            return stop
        for item in value if isinstance(value, list) else [value]:
            if not findings.full:
                findings.call_of(item, begin)
        match = _BETWEEN.match(text, at)
        at = match.end() if match else at
    return stop if findings.full else at


def _pythonic(text: str, at: int, findings: Findings) -> int:
    try:
        calls, end = calls_at(text, at)
    except Unreadable as error:
        findings.wrong(str(error), error.position)
        return len(text)
    for name, arguments, position in calls:
        if not findings.full:
            findings.call(name, arguments, position)
    return end


def _names_a_tool(text: str, at: int) -> bool:
    """Whether JSON begins here that is a call, or is broken and might have been one."""
    if _JSON.match(text, at) is None:
        return False
    try:
        value, _ = json_at(text, at)
    except Unreadable:
        return True
    first = value[0] if isinstance(value, list) else value
    return isinstance(first, Mapping) and ("name" in first or "function" in first)
