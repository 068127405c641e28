"""Common parts of OpenAI's APIs and of vLLM's additions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Final, TypedDict

import attrs

from rlkit._interaction import Message
from rlkit.gateway.dialects._logprobs import matched_stop
from rlkit.gateway.dialects.body import Body, Call, Event, Json, count, wrong
from rlkit.gateway.types import Choice, GatewayError, Reply
from rlkit.tools import ToolCall

__all__ = ["CompletionsCall", "arguments", "error", "function_tool", "read_stream_options", "read_tool_choice", "usage"]

NAME: Final = re.compile(r"[A-Za-z0-9_.:-]{1,128}", re.ASCII)  # of a tool
_HALVES: Final = re.compile("[\ud800-\udfff]")  # of surrogate pairs, which are not text


def function_tool(function: Body) -> Message:
    """Return a tool in the chat form, from an object with its ``name``, ``description`` and ``parameters``."""
    name = function.require_text("name")
    if not NAME.fullmatch(name):
        raise wrong(function.path("name"), name, "1 to 128 letters, digits, and _ . : -")
    schema: Json = {"name": name, "description": function.text("description") or ""}
    parameters = function.body("parameters")
    schema["parameters"] = {"type": "object", "properties": {}} if parameters is None else dict(parameters.value)
    if not schema["description"]:
        del schema["description"]
    return {"type": "function", "function": schema}


def distinct(tools: Sequence[Message], where: str) -> tuple[Message, ...]:
    """Return the tools, whose names must be distinct."""
    names: set[str] = set()
    for i, tool in enumerate(tools):
        name = tool["function"]["name"]
        if name in names:
            raise wrong(f"{where}[{i}]", name, "a unique name")
        names.add(name)
    return tuple(tools)


def known_tool(choice: Body, tools: Sequence[Message]) -> str:
    """Return the ``name`` of a tool that must be called; it must be among the tools."""
    name, names = choice.require_text("name"), [tool["function"]["name"] for tool in tools]
    if name not in names:
        raise wrong(choice.path("name"), name, "a name in tools: " + (", ".join(names) or "there are none"))
    return name


def read_tool_choice(body: Body, name: str, tools: Sequence[Message], *, typed: bool = False, inside: str = "") -> str:
    """Return the choice in a field: "auto", "none", "required", or a tool's name.

    Args:
        body: of the request.
        name: of the field.
        tools: of the request.
        typed: an object that names a tool has the type "function".
        inside: the member of such an object that has the name; "": itself.
    """
    value = body.get(name)
    if value is None or isinstance(value, str):
        word = body.choice(name, ("auto", "none", "required")) or "auto"
        if word == "required" and not tools:
            raise wrong(name, word, "a non-empty tools list")
        return word
    choice = Body(value, name)
    if typed and choice.get("type") != "function":
        raise wrong(choice.path("type"), choice.get("type"), "'function'")
    return known_tool(Body(choice.get(inside), choice.path(inside)) if inside else choice, tools)


def arguments(call: ToolCall) -> str:
    """Return a call's arguments as JSON."""
    text = json.dumps(dict(call.arguments), ensure_ascii=False)
    return text if text.isascii() or not _HALVES.search(text) else json.dumps(dict(call.arguments))


def usage(replies: Sequence[Reply]) -> Json:
    """Return the counts of prompt and completion tokens."""
    prompt, completion = count(replies)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class StreamOptions(TypedDict):
    """The options of a stream that the completions APIs share."""

    stream: bool
    include_usage: bool
    token_ids: bool


def read_stream_options(body: Body) -> StreamOptions:
    """Return ``stream``, ``stream_options.include_usage`` and vLLM's ``return_token_ids``."""
    options = body.body("stream_options")
    usage = options is not None and options.flag("include_usage")
    return {"stream": body.flag("stream"), "include_usage": usage, "token_ids": body.flag("return_token_ids")}


@attrs.frozen(eq=False)
class CompletionsCall(Call):
    """A call of one of the completions APIs, whose choices are numbered."""

    include_usage: bool = False
    token_ids: bool = False  # return_token_ids
    as_ids: bool = False  # return_tokens_as_token_ids

    def write_end(self, choice: Choice, of_calls: str = "stop") -> Json:
        """Return the finish reason, ``of_calls`` for calls of tools, and the stop that was met."""
        reason = of_calls if choice.finish == "tool_calls" else choice.finish
        stop = matched_stop(choice, self.session.tokenizer, self.requests[0].draw.stop)
        return {"finish_reason": reason, "stop_reason": stop}

    def finish_stream(self, head: Json, replies: Sequence[Reply]) -> Iterator[Event]:
        """Yield the end of a stream."""
        if self.include_usage:
            yield None, {**head, "choices": [], "usage": usage(replies)}
        yield None, "[DONE]"


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
