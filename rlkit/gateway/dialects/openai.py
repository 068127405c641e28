"""What OpenAI's APIs, and vLLM's additions to them, have in common."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Final

from rlkit._interaction import Message
from rlkit.gateway.dialects.body import Body, wrong
from rlkit.gateway.dialects.call import Json, count
from rlkit.gateway.types import GatewayError, Reply
from rlkit.tools import ToolCall

__all__ = ["NAME", "arguments", "error", "error_type", "function_tool", "usage"]

NAME: Final = re.compile(r"[A-Za-z0-9_.:-]{1,128}", re.ASCII)  # of a tool
_HALVES: Final = re.compile("[\ud800-\udfff]")  # of surrogate pairs, which are no text


def function_tool(function: Body) -> Message:
    """Return a tool in the chat form, from an object with its ``name``, ``description`` and ``parameters``."""
    name = function.required("name", function.text("name"))
    if not NAME.fullmatch(name):
        raise wrong(function.path("name"), name, "1 to 128 letters, digits, and _ . : -")
    schema: Json = {"name": name, "description": function.text("description") or ""}
    parameters = function.body("parameters")
    schema["parameters"] = {"type": "object", "properties": {}} if parameters is None else dict(parameters.value)
    if not schema["description"]:
        del schema["description"]
    return {"type": "function", "function": schema}


def distinct(tools: Sequence[Message], where: str) -> tuple[Message, ...]:
    """Return the tools, each of which has a name of its own."""
    names: set[str] = set()
    for i, tool in enumerate(tools):
        name = tool["function"]["name"]
        if name in names:
            raise wrong(f"{where}[{i}]", name, "a name that no other tool has")
        names.add(name)
    return tuple(tools)


def known_tool(name: str, tools: Sequence[Message], where: str) -> str:
    """Return the name of a tool that must be called, which must be there."""
    names = [tool["function"]["name"] for tool in tools]
    if name not in names:
        raise wrong(where, name, "a name in tools: " + (", ".join(names) or "there are none"))
    return name


def arguments(call: ToolCall) -> str:
    """Return a call's arguments as JSON."""
    text = json.dumps(dict(call.arguments), ensure_ascii=False)
    return text if text.isascii() or not _HALVES.search(text) else json.dumps(dict(call.arguments))


def usage(replies: Sequence[Reply]) -> Json:
    """Return how many tokens were read and written."""
    prompt, completion = count(replies)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def error_type(status: int) -> str:
    """Return the type of an error, by its status."""
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def error(problem: GatewayError) -> Json:
    """Return the JSON of an error."""
    return {
        "error": {
            "message": problem.message,
            "type": error_type(problem.status),
            "param": problem.param,
            "code": problem.code,
        }
    }
