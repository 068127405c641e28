"""Messages: Anthropic's API."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Self

import attrs

from rlkit._interaction import Message
from rlkit.gateway.dialects import openai
from rlkit.gateway.dialects._logprobs import matched_stop, parts
from rlkit.gateway.dialects.body import Body, Call, Event, Json, asks_for_json, count, draw, refuse, wrong
from rlkit.gateway.dialects.chat import assistant_call, text_of, unended
from rlkit.gateway.types import Choice, GatewayError, Reply, Request

if TYPE_CHECKING:
    from rlkit.gateway._session import Session

__all__ = ["MessagesCall", "block_messages", "count_tokens", "error", "system_messages"]

_ROLES: Final = ("user", "assistant", "system")


def system_messages(body: Body) -> list[Message]:
    """Return ``system`` as a message, if it is given."""
    text = text_of(body, "system", optional=True)
    return [{"role": "system", "content": text}] if text else []


def block_messages(body: Body) -> list[Message]:
    """Return ``messages`` in the chat form: results of tools become messages of their own, in their order."""
    messages: list[Message] = []
    for each in body.objects("messages"):
        role = each.require_choice("role", _ROLES)
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
        raise body.missing("content")
    for block in body.parts("content"):
        if block.get("type") not in ("text", "tool_result"):
            raise wrong(block.path("type"), block.get("type"), "text or tool_result", "this policy reads only text")
        if block.get("type") == "tool_result":
            identifier = block.require_text("tool_use_id")
            content = text_of(block, "content", optional=True)
            messages.append({"role": "tool", "tool_call_id": identifier, "content": content})
            continue
        text = block.require_text("text")
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
            texts.append(block.require_text("text"))
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


_UNSUPPORTED: Final = {"container": (), "mcp_servers": ()}
_NO_THREADS: Final = "thread_unsupported_request"  # tells the SDK that it has to send all messages
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none", "tool": ""}
_STOP_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERROR_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


@attrs.frozen(eq=False)
class MessagesCall(Call):
    """One call of ``POST /v1/messages``."""

    @classmethod
    def parse(cls, value: Mapping[str, object], session: Session) -> Self:
        """Read a request. Raises GatewayError."""
        body = Body(value)
        max_tokens = body.integer("max_tokens", low=1)
        if max_tokens is None:
            raise body.missing("max_tokens")
        output = body.body("output_config") or Body({})
        asked = asks_for_json(output, "format") or asks_for_json(body, "output_format")  # as it was called before
        how = attrs.evolve(draw(body, session, max_tokens), stop=body.texts("stop_sequences"), json_field=asked)
        request = attrs.evolve(_request(body), draw=how)
        return cls(session=session, requests=[request], stream=body.flag("stream"))

    def body(self, replies: Sequence[Reply]) -> Json:
        (choice,) = replies[0].choices
        content: list[Json] = []
        if choice.reasoning is not None:
            content.append({"type": "thinking", "thinking": choice.reasoning, "signature": ""})
        if choice.content or (choice.reasoning is None and not choice.calls):
            content.append({"type": "text", "text": choice.content})
        content += [_tool_use(choice, i, dict(call.arguments)) for i, call in enumerate(choice.calls)]
        return {**_head(replies), "content": content, **self._end(choice), "usage": _usage(replies)}

    def events(self, replies: Sequence[Reply]) -> Iterator[Event]:
        (choice,) = replies[0].choices
        none: Json = {"content": [], "stop_reason": None, "stop_sequence": None}
        yield _event(
            "message_start", message={**_head(replies), **none, "usage": _usage(replies) | {"output_tokens": 0}}
        )
        yield _event("ping")
        index, open_block = -1, ("", 0)
        for part in parts(choice, self.session.tokenizer, [openai.arguments(call) for call in choice.calls]):
            if (part.kind, part.call) != open_block:
                if index >= 0:
                    yield from _closed(index, open_block[0])
                index, open_block = index + 1, (part.kind, part.call)
                block: Json = {"type": "text", "text": ""}
                if part.kind == "reasoning":
                    block = {"type": "thinking", "thinking": "", "signature": ""}
                elif part.kind == "call":
                    block = _tool_use(choice, part.call, {})
                yield _event("content_block_start", index=index, content_block=block)
            kind, field = _DELTAS[part.kind]
            yield _event("content_block_delta", index=index, delta={"type": kind, field: part.text})
        yield from _closed(index, open_block[0])
        yield _event("message_delta", delta=self._end(choice), usage=_usage(replies))
        yield _event("message_stop")

    def failed(self, error: Mapping[str, object]) -> Iterator[Event]:
        yield "error", dict(error)

    def _end(self, choice: Choice) -> Json:
        stop = None
        if choice.finish == "stop":
            stop = matched_stop(choice, self.session.tokenizer, self.requests[0].draw.stop)
        reason = _STOP_REASONS[choice.finish] if stop is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": stop}


_DELTAS: Final = {
    "content": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


async def count_tokens(value: Mapping[str, object], session: Session) -> Json:
    """Answer ``POST /v1/messages/count_tokens``. Raises GatewayError."""
    return {"input_tokens": int((await session.render(_request(Body(value)))).size)}


def error(problem: GatewayError) -> Json:
    """Return the JSON of an error."""
    message = problem.message
    if problem.code == "context_length_exceeded":
        message = f"prompt is too long: {message}"
    kind = _ERROR_TYPES.get(problem.status, "api_error" if problem.status >= 500 else "invalid_request_error")
    about: Json = {"type": kind, "message": message}
    if problem.code == _NO_THREADS:
        about["details"] = {"error_code": _NO_THREADS}
    return {"type": "error", "error": about, "request_id": None}


def _request(body: Body) -> Request:
    """Return the conversation and the tools."""
    refuse(body, _UNSUPPORTED)
    if body.get("thread") is not None:
        what = "thread: the gateway does not store conversations; send all messages"
        raise GatewayError(400, what, param="thread", code=_NO_THREADS)
    messages = [*system_messages(body), *block_messages(body)]
    tools = openai.distinct([_tool(each) for each in body.objects("tools")], "tools")
    return Request(
        messages=unended(messages, "messages"),
        tools=tools,
        tool_choice=_tool_choice(body, tools),
        model=body.text("model") or "",
    )


def _tool(body: Body) -> Message:
    if body.get("type") not in (None, "custom"):
        raise wrong(body.path("type"), body.get("type"), "'custom'", "the policy knows only tools with a schema")
    schema = body.body("input_schema")
    about = {name: body.get(name) for name in ("name", "description")}
    return openai.function_tool(Body({**about, "parameters": None if schema is None else schema.value}, body.where))


def _tool_choice(body: Body, tools: Sequence[Message]) -> str:
    choice = body.body("tool_choice")
    if choice is None:
        return "auto"
    kind = choice.require_choice("type", _CHOICES)
    if kind == "tool":
        return openai.known_tool(choice, tools)
    if kind == "any" and not tools:
        raise wrong(choice.path("type"), kind, "a non-empty tools list")
    return _CHOICES[kind]


def _head(replies: Sequence[Reply]) -> Json:
    return {"id": f"msg_{replies[0].id}", "type": "message", "role": "assistant", "model": replies[0].model}


def _usage(replies: Sequence[Reply]) -> Json:
    prompt, completion = count(replies)
    cache = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": prompt, "output_tokens": completion, **cache}


def _tool_use(choice: Choice, index: int, arguments: Mapping[str, object]) -> Json:
    call = choice.calls[index]
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": dict(arguments)}


def _event(name: str, **data: object) -> Event:
    return name, {"type": name, **data}


def _closed(index: int, kind: str) -> Iterator[Event]:
    if kind == "reasoning":  # clients require a signature; they do not check this one
        yield _event("content_block_delta", index=index, delta={"type": "signature_delta", "signature": ""})
    yield _event("content_block_stop", index=index)
