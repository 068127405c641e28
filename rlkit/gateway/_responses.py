"""Responses: OpenAI's newer API, in items and with typed events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from rlkit.backends.protocol import Tokenizer
from rlkit.gateway._chat import count_tokens, error
from rlkit.gateway._logprobs import chat_logprobs, decode_each
from rlkit.gateway._requests import Call
from rlkit.gateway._types import Block, Choice, Event, GatewayError, Json, Reply

__all__ = ["count_reasoning", "failed", "stream", "write"]

_NAMES: Final = {
    "content": "response.output_text",
    "reasoning": "response.reasoning_text",
    "call": "response.function_call_arguments",
}


def write(call: Call, replies: Sequence[Reply]) -> Json:
    """Return the answer, and keep the conversation for a later ``previous_response_id``."""
    (reply,) = replies
    _remember(call, reply)
    return _response(call, reply, _items(call, reply), done=True)


def stream(call: Call, replies: Sequence[Reply]) -> Iterator[Event]:
    """Yield the answer as a stream of numbered events: each item in one piece."""
    (reply,) = replies
    _remember(call, reply)
    for number, event in enumerate(_events(call, reply)):
        yield str(event["type"]), {**event, "sequence_number": number}


def _events(call: Call, reply: Reply) -> Iterator[Json]:
    begun = _response(call, reply, [], done=False)
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    items = _items(call, reply)
    for index, (block, item) in enumerate(zip(reply.choices[0].blocks, items, strict=True)):
        name = _NAMES[block.kind]
        where: Json = {"item_id": item["id"], "output_index": index}
        started: Json = {**item, **({"arguments": ""} if block.call else {"content": []}), "status": "in_progress"}
        yield {"type": "response.output_item.added", "output_index": index, "item": started}
        if block.call is not None:
            yield {"type": f"{name}.delta", **where, "delta": block.text}
            yield {"type": f"{name}.done", **where, "arguments": block.text, "name": block.call.name}
        else:
            where["content_index"] = 0
            part = item["content"][0]
            logprobs = {"logprobs": part["logprobs"]} if block.kind == "content" else {}
            empty = {**part, "text": ""} | ({"logprobs": []} if logprobs else {})
            yield {"type": "response.content_part.added", **where, "part": empty}
            yield {"type": f"{name}.delta", **where, "delta": block.text, **logprobs}
            yield {"type": f"{name}.done", **where, "text": block.text, **logprobs}
            yield {"type": "response.content_part.done", **where, "part": part}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    response = _response(call, reply, items, done=True)
    yield {"type": f"response.{response['status']}", "response": response}


def _items(call: Call, reply: Reply) -> list[dict[str, Any]]:
    """Return an item for each block of the completion."""
    (choice,) = reply.choices
    first = len(choice.blocks) - len(choice.calls)  # of the calls
    return [_item(call, reply, block, i - first) for i, block in enumerate(choice.blocks)]


def _item(call: Call, reply: Reply, block: Block, number: int) -> dict[str, Any]:
    status = "incomplete" if reply.choices[0].finish == "length" else "completed"
    about: dict[str, Any]
    if block.call is not None:
        about = {"id": f"fc_{reply.id}{number:02d}", "type": "function_call", "call_id": block.call.id}
        return {**about, "name": block.call.name, "arguments": block.text, "status": "completed"}
    if block.kind == "reasoning":
        about = {"id": f"rs_{reply.id}", "type": "reasoning", "summary": [], "encrypted_content": None}
        return {**about, "content": [{"type": "reasoning_text", "text": block.text}], "status": status}
    entries = chat_logprobs(reply.choices[0], call.session.tokenizer) if call.posted.logprobs else []
    text = {"type": "output_text", "text": block.text, "annotations": [], "logprobs": entries}
    return {"id": f"msg_{reply.id}", "type": "message", "role": "assistant", "content": [text], "status": status}


def _response(call: Call, reply: Reply, output: Sequence[Json], *, done: bool) -> Json:
    cut = reply.choices[0].finish == "length"
    return {
        "id": f"resp_{reply.id}",
        "object": "response",
        "created_at": reply.created,
        "status": "in_progress" if not done else "incomplete" if cut else "completed",
        "model": reply.model,
        "output": list(output),
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if done and cut else None,
        "usage": _usage(call, reply) if done else None,
        **_repeated(call),
    }


def _usage(call: Call, reply: Reply) -> Json:
    prompt, completion = count_tokens([reply])
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": count_reasoning(reply.choices[0], call.session.tokenizer)},
        "total_tokens": prompt + completion,
    }


def count_reasoning(choice: Choice, tokenizer: Tokenizer) -> int:
    """Return how many of a choice's first tokens hold its reasoning."""
    if not choice.reasoning:
        return 0
    texts = decode_each(tokenizer, choice.sample.tokens)
    end = "".join(texts).find(choice.reasoning) + len(choice.reasoning)
    ends = np.cumsum([len(text) for text in texts])
    return min(int(np.searchsorted(ends, end)) + 1, len(texts))


def _repeated(call: Call) -> Json:
    """Return the request's fields that an answer repeats."""
    body, posted = call.body, call.posted
    defaults: Json = {"temperature": 1.0, "top_p": 1.0, "tool_choice": "auto", "tools": [], "metadata": {}}
    given = {name: value for name in defaults if (value := body.get(name)) is not None}
    names = ("instructions", "max_output_tokens", "previous_response_id", "prompt_cache_key", "user", "max_tool_calls")
    form = posted.text.format
    return {
        **{name: body.get(name) for name in names},
        **defaults,
        **given,
        "parallel_tool_calls": True,
        "reasoning": {"effort": None, "summary": None} if posted.reasoning is None else posted.reasoning,
        "text": {"format": {"type": "text"} if form is None else body["text"]["format"]},  # type: ignore[index]
        "top_logprobs": posted.top_logprobs,
        "truncation": "disabled",
        "background": False,
        "service_tier": "default",
        "store": _is_stored(call),
    }


def _is_stored(call: Call) -> bool:
    return bool(call.posted.store) and call.session.responses is not None


def _remember(call: Call, reply: Reply) -> None:
    """Keep the conversation, without the instructions, which belong to this call alone."""
    if _is_stored(call):
        said = (call.requests[0].messages or ())[bool(call.posted.instructions) :]
        call.session.responses[f"resp_{reply.id}"] = [*said, reply.choices[0].message]  # type: ignore[index]


def failed(problem: GatewayError) -> Event:
    """Return the end of a stream that has begun."""
    whole = error(problem)
    fields = whole["error"] if isinstance(whole["error"], dict) else {}
    return "error", {**fields, "type": "error", "sequence_number": 0, **whole}
