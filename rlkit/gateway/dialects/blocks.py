"""The messages of a conversation, as Anthropic's API has them: in blocks."""

from __future__ import annotations

from typing import Final

from rlkit._interaction import Message
from rlkit.gateway.dialects.body import Body, wrong
from rlkit.gateway.dialects.call import Json
from rlkit.gateway.dialects.messages import assistant_call, text_of
from rlkit.gateway.types import GatewayError

__all__ = ["block_messages", "system_messages"]

_ROLES: Final = ("user", "assistant", "system")


def system_messages(body: Body) -> list[Message]:
    """Return ``system`` as a message, where there is one."""
    text = text_of(body, "system", optional=True)
    return [{"role": "system", "content": text}] if text else []


def block_messages(body: Body) -> list[Message]:
    """Return ``messages`` in the chat form: results of tools become messages of their own, in their order."""
    messages: list[Message] = []
    for each in body.objects("messages"):
        role = each.required("role", each.choice("role", _ROLES))
        if role == "assistant":
            messages.append(_assistant(each))
        elif role == "system" or isinstance(each.get("content"), str):
            messages.append({"role": role, "content": text_of(each, "content")})
        else:
            messages += _user(each)
    if not messages:
        raise GatewayError(400, "messages: at least one message is required", param="messages")
    return messages


def _user(body: Body) -> list[Message]:
    """Return the results of tools and the texts between them."""
    messages: list[Json] = []
    if body.get("content") is None:
        raise GatewayError(400, f"{body.path('content')}: is missing", param=body.path("content"))
    for block in body.parts("content"):
        if block.get("type") not in ("text", "tool_result"):
            raise wrong(block.path("type"), block.get("type"), "text or tool_result", "this policy reads nothing else")
        if block.get("type") == "tool_result":
            identifier = block.required("tool_use_id", block.text("tool_use_id"))
            content = text_of(block, "content", optional=True)
            messages.append({"role": "tool", "tool_call_id": identifier, "content": content})
            continue
        text = block.required("text", block.text("text"))
        if messages and messages[-1]["role"] == "user":
            messages[-1]["content"] = f"{messages[-1]['content']}\n{text}"
        else:
            messages.append({"role": "user", "content": text})
    return list(messages or [{"role": "user", "content": ""}])


def _assistant(body: Body) -> Message:
    content = body.get("content")
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Json] = []
    for block in body.parts("content"):
        kind = block.get("type")
        if kind == "text":
            texts.append(block.required("text", block.text("text")))
        elif kind == "thinking":
            thoughts.append(block.text("thinking") or "")
        elif kind == "tool_use":
            about = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append(assistant_call(Body(about, block.where), block.text("id") or ""))
        elif kind != "redacted_thinking":
            raise wrong(block.path("type"), kind, "text, thinking or tool_use")
    message: Json = {"role": "assistant", "content": "".join(texts)}
    if any(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message
