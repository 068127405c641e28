"""The messages of a conversation, as chat completions have them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from rlkit._interaction import Message
from rlkit.gateway.dialects.body import Body, wrong
from rlkit.gateway.dialects.call import Json
from rlkit.gateway.types import GatewayError

__all__ = ["assistant_call", "conversation", "text_of", "unended"]

_ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
_PARTS: Final = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def conversation(body: Body) -> list[Message]:
    """Return ``messages``: roles known, contents as text, calls complete.

    ``developer`` becomes ``system``; ``function`` and ``function_call``, which came before tools, become ``tool`` and
    ``tool_calls``.
    """
    messages = [_message(each) for each in body.objects("messages")]
    if not messages:
        raise GatewayError(400, "messages: is missing or empty; expected at least one message", param="messages")
    _name_legacy_calls(messages)
    return list(unended(messages, body.path("messages")))


def unended(messages: Sequence[Message], where: str) -> Sequence[Message]:
    """Return the messages, the last of which must not be the assistant's: it would have to be continued."""
    if messages[-1]["role"] == "assistant":
        expected = "a message of the user, the system or a tool at the end"
        raise wrong(f"{where}[-1].role", "assistant", expected, "an answer is not continued here")
    return messages


def _message(body: Body) -> Json:
    role = body.required("role", body.choice("role", _ROLES))
    message: Json = {"role": {"developer": "system", "function": "tool"}.get(role, role)}
    message["content"] = text_of(
        body, "content", optional=role in ("assistant", "function"), between="" if role == "assistant" else "\n"
    )
    name = body.text("name")
    if name is not None:
        message["name"] = name
    if role == "tool":
        identifier = body.text("tool_call_id")
        if identifier is not None:
            message["tool_call_id"] = identifier
    if role == "assistant":
        reasoning = body.text("reasoning_content") or body.text("reasoning")
        if reasoning:
            message["reasoning_content"] = reasoning
        calls = [_call(each) for each in body.objects("tool_calls")]
        legacy = body.body("function_call")
        if legacy is not None:
            calls.append(assistant_call(legacy, ""))
        if calls:
            message["tool_calls"] = calls
    return message


def _call(body: Body) -> Json:
    if body.get("type") not in (None, "function"):
        raise wrong(body.path("type"), body.get("type"), "'function'")
    function = body.body("function")
    if function is None:
        raise GatewayError(400, f"{body.path('function')}: is missing", param=body.path("function"))
    return assistant_call(function, body.text("id") or "")


def assistant_call(function: Body, identifier: str) -> Json:
    """Return one of an assistant's ``tool_calls``, from an object with ``name`` and ``arguments``."""
    name = function.required("name", function.text("name"))
    value = function.get("arguments")
    if value is None or isinstance(value, dict):
        value = json.dumps(value or {}, ensure_ascii=False)
    if not isinstance(value, str):
        raise wrong(function.path("arguments"), value, "a JSON text")
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": value or "{}"}}


def text_of(body: Body, name: str, *, optional: bool = False, between: str = "\n") -> str:
    """Return a content as text; ``between`` stands between the texts of several parts."""
    value = body.get(name)
    if isinstance(value, str):
        return value
    if value is None and optional:
        return ""
    if value is None:
        raise GatewayError(400, f"{body.path(name)}: is missing", param=body.path(name))
    texts = []
    for part in body.parts(name):
        kind = part.choice("type", _PARTS) if part.get("type") in _PARTS else None
        if kind is None:
            raise wrong(part.path("type"), part.get("type"), "text", "this policy reads nothing else")
        text = part.text(_PARTS[kind])
        texts.append(part.required(_PARTS[kind], text))
    return between.join(texts)


def _name_legacy_calls(messages: Sequence[Json]) -> None:
    """Give calls without an id one of their own, and their results the same."""
    number, waiting = 0, ""
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else []:
            if not call["id"]:
                call["id"] = waiting = f"call{number:05d}"
                number += 1
        if message["role"] == "tool" and "tool_call_id" not in message and waiting:
            message["tool_call_id"] = waiting
