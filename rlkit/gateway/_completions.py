"""Completions of texts and of tokens: OpenAI's older API, with vLLM's additions.

Clients that train post token ids with ``logprobs: 0`` and ``return_token_ids``, and those that score texts ``echo``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from rlkit.gateway import _chat
from rlkit.gateway._choices import cut_at_stop
from rlkit.gateway._logprobs import prompt_logprobs, text_logprobs
from rlkit.gateway._requests import Call
from rlkit.gateway._types import Choice, Event, GatewayError, Json, Reply, Request

__all__ = ["stream", "write"]


def write(call: Call, replies: Sequence[Reply]) -> Json:
    """Return the answer."""
    return {**_head(replies), "choices": _choices(call, replies), "usage": _chat.usage(replies)}


def stream(call: Call, replies: Sequence[Reply]) -> Iterator[Event]:
    """Yield the answer as a stream: each choice in one piece, and its end."""
    head = _head(replies) | ({"usage": None} if call.posted.stream_options.include_usage else {})
    for choice in _choices(call, replies):
        end = {name: choice[name] for name in ("index", "finish_reason", "stop_reason")}
        yield None, {**head, "choices": [{**choice, "finish_reason": None, "stop_reason": None}]}
        yield None, {**head, "choices": [{**end, "text": "", "logprobs": None}]}
    yield from _chat.finish_stream(call, head, replies)


def _head(replies: Sequence[Reply]) -> Json:
    first = replies[0]
    return {"id": f"cmpl-{first.id}", "object": "text_completion", "created": first.created, "model": first.model}


def _choices(call: Call, replies: Sequence[Reply]) -> list[Json]:
    """Return the choices of all prompts, numbered one after the other."""
    choices: list[Json] = []
    for request, reply in zip(call.requests, replies, strict=True):
        of_prompt = prompt_logprobs(reply, call.session.tokenizer)
        for choice in reply.choices:
            written: Json = {
                "index": len(choices),
                "text": (_prompt_text(call, request) if call.posted.echo else "") + _text(call, choice),
                "logprobs": _logprobs(call, reply, choice),
                **_chat.finish(call, choice),
            }
            if written["finish_reason"] == "tool_calls":
                written["finish_reason"] = "stop"
            if call.posted.return_token_ids:
                written |= {"prompt_token_ids": reply.prompt.tolist(), "token_ids": choice.sample.tokens.tolist()}
            if reply.prompt_logprobs is not None and not call.posted.echo:
                written["prompt_logprobs"] = of_prompt
            choices.append(written)
    return choices


def _text(call: Call, choice: Choice) -> str:
    """Return a choice's text, with control tokens where they are not to be skipped, but not the one that ended it."""
    if call.posted.skip_special_tokens:
        return choice.text
    tokens, stop = choice.sample.tokens, call.requests[0].sampling.stop
    ends = {*call.session.tokenizer.eos_ids, *stop} if choice.sample.stop_reason == "stop" else set()
    ended = tokens.size > 0 and int(tokens[-1]) in ends
    return cut_at_stop(call.session.tokenizer.decode(tokens[:-1] if ended else tokens, skip_special=False), stop)


def _logprobs(call: Call, reply: Reply, choice: Choice) -> dict[str, list[object] | None] | None:
    """Return the logprobs of a choice, with ``echo`` after those of the prompt."""
    if call.posted.logprobs is None:
        return None
    ids, values, top = choice.sample.tokens, choice.sample.logprobs, [*(choice.top or ())]
    if call.posted.echo:
        if reply.prompt_logprobs is None:
            raise GatewayError(400, "echo: this policy does not support logprobs of prompts", param="echo")
        ids = np.concatenate([reply.prompt, ids])
        values = np.concatenate([reply.prompt_logprobs, values])
        top = [*(reply.prompt_top or ()), *top]
    asked = top if call.posted.logprobs else None
    return text_logprobs(call.session.tokenizer, ids, values, asked, first=int(call.posted.echo))


def _prompt_text(call: Call, request: Request) -> str:
    if request.prompt is None:
        return request.text or ""
    return call.session.tokenizer.decode(request.prompt)
