"""Requests and answers as data, independent of the client's dialect."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Final, Literal, TypeAlias

import attrs
import numpy as np

from rlkit._interaction import Message
from rlkit.tools import ToolCall
from rlkit.types import Sample

__all__ = ["Block", "Choice", "Event", "GatewayError", "Json", "Reply", "Request", "Sampling"]

Finish: TypeAlias = Literal["stop", "length", "tool_calls"]
Json: TypeAlias = dict[str, object]
Event: TypeAlias = tuple[str | None, Json | str]
"""The name of a server-sent event, if it has one, and its data."""
_HALVES: Final = re.compile("[\ud800-\udfff]")  # of surrogate pairs, which are not text


@attrs.frozen
class Sampling:
    """A client's sampling settings; None: not given by the client.

    Attributes:
        max_tokens: as of ``SamplingParams``, but may be 0: nothing is sampled, the prompt is scored.
        temperature, top_p, top_k, min_p: as of ``SamplingParams``.
        repetition_penalty, presence_penalty, frequency_penalty: as of ``SamplingParams``.
        stop: texts, or token ids, that end a completion besides the model's end tokens; () if none was given.
        ignore_eos: only ``stop`` and ``max_tokens`` end it.
        seed: >= 0.
        json_field: the field that requests JSON, such as "response_format"; "" if none does.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: tuple[str, ...] | tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    json_field: str = ""


@attrs.frozen(eq=False)
class Request:
    """One call of a client.

    Exactly one of ``messages``, ``text`` and ``prompt`` is set.

    Attributes:
        messages: a conversation in OpenAI's chat form: ``role``, ``content`` (text), ``tool_calls``, ``tool_call_id``,
            ``name``, ``reasoning_content``; other dialects are translated into it. It does not end with the assistant.
        text: a prompt as text (completions).
        prompt: int64 [P], a prompt as tokens.
        tools: function schemas, OpenAI style: ``{"type": "function", "function": {...}}``.
        tool_choice: "auto", "none", "required", or a tool's name.
        template: variables of the chat template, such as ``{"enable_thinking": False}``.
        sampling: the client's sampling settings.
        n: completions, >= 1.
        top_logprobs: how many alternatives to report for each token, >= 0; None: no logprobs at all.
        prompt_logprobs: the same for the prompt's tokens; None: none.
        model: the name that the client used.
        fails_when_cut: its API reports a cut turn as an incomplete response, which clients treat as a failure.
    """

    messages: Sequence[Message] | None = None
    text: str | None = None
    prompt: np.ndarray | None = None
    tools: Sequence[Message] = ()
    tool_choice: str = "auto"
    template: Mapping[str, object] = attrs.field(factory=dict)
    sampling: Sampling = attrs.field(factory=Sampling)
    n: int = 1
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    model: str = ""
    fails_when_cut: bool = False


@attrs.frozen
class Block:
    """A part of a completion as clients read it.

    Attributes:
        kind: what the part is.
        text: of a call its arguments, as JSON.
        call: the call, if it is one.
    """

    kind: Literal["reasoning", "content", "call"]
    text: str
    call: ToolCall | None = None


@attrs.frozen(eq=False)
class Choice:
    """One completion.

    Attributes:
        sample: as it was drawn.
        text: the whole text, without the token or text that ended it.
        content: the text without reasoning and tool calls.
        reasoning: the policy's thinking; None if there is none, or if it was not separated.
        calls: of tools; their ids are unique in the session.
        finish: the reason why it ended.
        top: one mapping of token id -> logprob per token of the sample; None if not requested.
    """

    sample: Sample
    text: str
    content: str
    reasoning: str | None = None
    calls: Sequence[ToolCall] = ()
    finish: Finish = "stop"
    top: Sequence[Mapping[int, float]] | None = None

    @property
    def blocks(self) -> list[Block]:
        """The reasoning, the content and the calls, in this order; an empty content where there is nothing else."""
        blocks = [] if self.reasoning is None else [Block("reasoning", self.reasoning)]
        if self.content or (self.reasoning is None and not self.calls):
            blocks.append(Block("content", self.content))
        return [*blocks, *(Block("call", _write_arguments(call), call) for call in self.calls)]

    @property
    def message(self) -> Message:
        """The completion as the assistant's message, in OpenAI's chat form."""
        message: Json = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            functions = [(call.id, {"name": call.name, "arguments": dict(call.arguments)}) for call in self.calls]
            message["tool_calls"] = [{"id": i, "type": "function", "function": function} for i, function in functions]
        return message


@attrs.frozen(eq=False)
class Reply:
    """The answer to a request.

    Attributes:
        id: unique in the gateway, 24 hexadecimal digits; dialects put their prefix in front of it.
        created: seconds since 1970.
        model: the name that the client used, or the gateway's.
        prompt: int64 [P], the prompt that was sampled from.
        choices: n of them.
        prompt_logprobs: float32 [P], 0 for the first; None if not requested.
        prompt_top: as ``Choice.top``, for the prompt; None if not requested.
    """

    id: str
    created: int
    model: str
    prompt: np.ndarray
    choices: Sequence[Choice]
    prompt_logprobs: np.ndarray | None = None
    prompt_top: Sequence[Mapping[int, float]] | None = None


def _write_arguments(call: ToolCall) -> str:
    text = json.dumps(dict(call.arguments), ensure_ascii=False)
    return json.dumps(dict(call.arguments)) if _HALVES.search(text) else text


@attrs.define(eq=False)
class GatewayError(Exception):
    """A request that is refused or failed; each dialect writes it in its own form.

    Args:
        status: of HTTP: 400, 401, 404, 429, 500, 503, ...
        message: the field, the value, and the expected value.
        param: the field of the request, if there is one.
        code: for programs: "context_length_exceeded", "limit_reached", "invalid_api_key", ...; None: none.
        retry_after: seconds, for a 429 or 503 that may be retried; None: a retry cannot succeed.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: float | None = None

    def __str__(self) -> str:
        return self.message
