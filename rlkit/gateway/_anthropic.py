"""Messages: Anthropic's API."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from rlkit.gateway._chat import count_tokens
from rlkit.gateway._logprobs import find_matched_stop
from rlkit.gateway._requests import NO_THREADS, Call
from rlkit.gateway._types import Block, Choice, Event, GatewayError, Json, Reply

__all__ = ["error", "failed", "stream", "write"]

_STOP_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_DELTAS: Final = {
    "content": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
_ERROR_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def write(call: Call, replies: Sequence[Reply]) -> Json:
    """Return the answer."""
    (choice,) = replies[0].choices
    content = [_block(block) for block in choice.blocks]
    return {**_head(replies), "content": content, **_end(call, choice), "usage": _usage(replies)}


def stream(call: Call, replies: Sequence[Reply]) -> Iterator[Event]:
    """Yield the answer as a stream: each block in one piece."""
    (choice,) = replies[0].choices
    none: Json = {"content": [], "stop_reason": None, "stop_sequence": None}
    started = {**_head(replies), **none, "usage": _usage(replies) | {"output_tokens": 0}}
    yield _event("message_start", message=started)
    yield _event("ping")
    for index, block in enumerate(choice.blocks):
        yield _event("content_block_start", index=index, content_block=_block(block, empty=True))
        kind, field = _DELTAS[block.kind]
        yield _event("content_block_delta", index=index, delta={"type": kind, field: block.text})
        if block.kind == "reasoning":  # clients require a signature; they do not check this one
            yield _event("content_block_delta", index=index, delta={"type": "signature_delta", "signature": ""})
        yield _event("content_block_stop", index=index)
    yield _event("message_delta", delta=_end(call, choice), usage=_usage(replies))
    yield _event("message_stop")


def _block(block: Block, *, empty: bool = False) -> Json:
    """Return a block; ``empty``: as it begins in a stream."""
    if block.call is not None:
        arguments = {} if empty else dict(block.call.arguments)
        return {"type": "tool_use", "id": block.call.id, "name": block.call.name, "input": arguments}
    text = "" if empty else block.text
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text}


def _end(call: Call, choice: Choice) -> Json:
    stop = None
    if choice.finish == "stop":
        stop = find_matched_stop(choice, call.session.tokenizer, call.requests[0].sampling.stop)
    reason = _STOP_REASONS[choice.finish] if stop is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": stop}


def _head(replies: Sequence[Reply]) -> Json:
    return {"id": f"msg_{replies[0].id}", "type": "message", "role": "assistant", "model": replies[0].model}


def _usage(replies: Sequence[Reply]) -> Json:
    prompt, completion = count_tokens(replies)
    cache = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": prompt, "output_tokens": completion, **cache}


def _event(name: str, **data: object) -> Event:
    return name, {"type": name, **data}


def error(problem: GatewayError) -> Json:
    """Return the JSON of an error."""
    message = problem.message
    if problem.code == "context_length_exceeded":
        message = f"prompt is too long: {message}"
    kind = _ERROR_TYPES.get(problem.status, "api_error" if problem.status >= 500 else "invalid_request_error")
    about: Json = {"type": kind, "message": message}
    if problem.code == NO_THREADS:
        about["details"] = {"error_code": NO_THREADS}
    return {"type": "error", "error": about, "request_id": None}


def failed(problem: GatewayError) -> Event:
    """Return the end of a stream that has begun."""
    return "error", error(problem)
