"""Chat completions: OpenAI's API, with vLLM's additions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlkit.gateway._logprobs import chat_logprobs, find_matched_stop
from rlkit.gateway._requests import Call
from rlkit.gateway._types import Block, Choice, Event, GatewayError, Json, Reply

__all__ = ["count_tokens", "error", "failed", "finish", "finish_stream", "stream", "usage", "write"]


def write(call: Call, replies: Sequence[Reply]) -> Json:
    """Return the answer."""
    (reply,) = replies
    answer = _head(reply, "chat.completion")
    answer["choices"] = [_choice(call, i, choice) for i, choice in enumerate(reply.choices)]
    answer["usage"] = usage(replies)
    return answer | ({"prompt_token_ids": reply.prompt.tolist()} if call.posted.return_token_ids else {})


def stream(call: Call, replies: Sequence[Reply]) -> Iterator[Event]:
    """Yield the answer as a stream: each block in one piece, the tokens with the first."""
    (reply,) = replies
    head = _head(reply, "chat.completion.chunk") | ({"usage": None} if call.posted.stream_options.include_usage else {})
    for index, choice in enumerate(reply.choices):
        first: Json = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        prompt = {"prompt_token_ids": reply.prompt.tolist()} if call.posted.return_token_ids and index == 0 else {}
        yield None, {**head, "choices": [first], **prompt}
        more = _about_tokens(call, choice)
        calls = 0
        for block in choice.blocks:
            delta: Json = {"reasoning_content" if block.kind == "reasoning" else "content": block.text}
            if block.call is not None:
                delta = {"tool_calls": [{"index": calls, **_tool_call(block)}]}
                calls += 1
            yield None, {**head, "choices": [{"index": index, "delta": delta, "finish_reason": None, **more}]}
            more = {"logprobs": None}
        yield None, {**head, "choices": [{"index": index, "delta": {}, "logprobs": None, **finish(call, choice)}]}
    yield from finish_stream(call, head, replies)


def _head(reply: Reply, kind: str) -> Json:
    return {
        "id": f"chatcmpl-{reply.id}",
        "object": kind,
        "created": reply.created,
        "model": reply.model,
        "service_tier": None,
        "system_fingerprint": None,
    }


def _choice(call: Call, index: int, choice: Choice) -> Json:
    content = choice.content or (None if choice.calls else "")
    message: Json = {"role": "assistant", "content": content, "refusal": None, "annotations": []}
    if choice.calls:
        message["tool_calls"] = [_tool_call(block) for block in choice.blocks if block.kind == "call"]
    if choice.reasoning is not None:
        message["reasoning_content"] = choice.reasoning
    return {"index": index, "message": message, **finish(call, choice), **_about_tokens(call, choice)}


def _about_tokens(call: Call, choice: Choice) -> Json:
    """Return the logprobs and the ids of a choice's tokens, as far as they were asked for."""
    entries = chat_logprobs(choice, call.session.tokenizer) if call.posted.logprobs else None
    about: Json = {"logprobs": None if entries is None else {"content": entries, "refusal": None}}
    return about | ({"token_ids": choice.sample.tokens.tolist()} if call.posted.return_token_ids else {})


def _tool_call(block: Block) -> Json:
    assert block.call is not None  # noqa: S101
    function = {"name": block.call.name, "arguments": block.text}
    return {"id": block.call.id, "type": "function", "function": function}


def finish(call: Call, choice: Choice) -> Json:
    """Return why a choice ended, and the stop that was met."""
    stop = find_matched_stop(choice, call.session.tokenizer, call.requests[0].sampling.stop)
    return {"finish_reason": choice.finish, "stop_reason": stop}


def finish_stream(call: Call, head: Json, replies: Sequence[Reply]) -> Iterator[Event]:
    """Yield the end of a stream of one of the completions APIs."""
    if call.posted.stream_options.include_usage:
        yield None, {**head, "choices": [], "usage": usage(replies)}
    yield None, "[DONE]"


def count_tokens(replies: Sequence[Reply]) -> tuple[int, int]:
    """Return the number of tokens in the prompts and in the completions."""
    drawn = sum(choice.sample.tokens.size for reply in replies for choice in reply.choices)
    return sum(int(reply.prompt.size) for reply in replies), int(drawn)


def usage(replies: Sequence[Reply]) -> Json:
    """Return the counts of prompt and completion tokens."""
    prompt, completion = count_tokens(replies)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def error(problem: GatewayError) -> Json:
    """Return the JSON of an error, in the form of all of OpenAI's APIs."""
    kind = "rate_limit_error" if problem.status == 429 else "invalid_request_error"
    kind = "server_error" if problem.status >= 500 else kind
    return {"error": {"message": problem.message, "type": kind, "param": problem.param, "code": problem.code}}


def failed(problem: GatewayError) -> Event:
    """Return the end of a stream that has begun."""
    return None, error(problem)
