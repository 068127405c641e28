"""The input of the responses API: items, of which several may be one turn of the policy."""

from __future__ import annotations

from typing import Final

from rlkit._interaction import Message
from rlkit.gateway.dialects.body import Body, wrong
from rlkit.gateway.dialects.call import Json
from rlkit.gateway.dialects.messages import assistant_call, text_of
from rlkit.gateway.types import GatewayError

__all__ = ["input_messages"]

_ROLES: Final = {"user": "user", "system": "system", "developer": "system", "assistant": "assistant"}


def input_messages(body: Body) -> list[Message]:
    """Return ``input`` in the chat form.

    Reasoning, a message of the assistant and calls that follow each other in this order are one turn: that is how they
    were given.
    """
    value = body.get("input")
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    messages: list[Json] = []
    for item in body.objects("input"):
        kind = item.get("type") or "message"
        if kind == "message":
            _add_message(item, messages)
        elif kind == "reasoning":
            _turn(messages, new=("content", "tool_calls", "reasoning_content"))["reasoning_content"] = _reasoning(item)
        elif kind == "function_call":
            call = assistant_call(item, item.text("call_id") or item.text("id") or "")
            calls = _turn(messages).setdefault("tool_calls", [])
            assert isinstance(calls, list)  # noqa: S101  # it was made here
            calls.append(call)
        elif kind == "function_call_output":
            identifier = item.required("call_id", item.text("call_id"))
            messages.append({"role": "tool", "tool_call_id": identifier, "content": text_of(item, "output")})
        else:
            known = "message, reasoning, function_call or function_call_output"
            raise wrong(item.path("type"), kind, known, "tools of a provider are not here")
    if not messages:
        raise GatewayError(400, "input: is missing or empty; expected a text or items", param="input")
    empty = [message for message in messages if message.get("reasoning_content") == ""]
    for message in empty:  # the item said that a turn begins, and nothing more
        del message["reasoning_content"]
    return [{"content": "", **message} for message in messages]


def _add_message(item: Body, messages: list[Json]) -> None:
    role = _ROLES[item.required("role", item.choice("role", _ROLES))]
    if role == "assistant":
        _turn(messages, new=("content", "tool_calls"))["content"] = text_of(item, "content", between="")
    else:
        messages.append({"role": role, "content": text_of(item, "content")})


def _turn(messages: list[Json], new: tuple[str, ...] = ()) -> Json:
    """Return the policy's turn at the end; another one where there is none, or where it has one of ``new`` already."""
    if not messages or messages[-1]["role"] != "assistant" or any(name in messages[-1] for name in new):
        messages.append({"role": "assistant"})
    return messages[-1]


def _reasoning(item: Body) -> str:
    """Return the thoughts of a reasoning item, or their summary."""
    for name in ("content", "summary"):
        texts = [part.text("text") or "" for part in item.parts(name)]
        if any(texts):
            return "".join(texts)
    return ""
