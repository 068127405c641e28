"""What a client asks and what it is answered, whatever dialect it speaks."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

import attrs
import numpy as np

from rlkit._interaction import Message
from rlkit.backends.protocol import Tokenizer
from rlkit.tools import ToolCall
from rlkit.types import Sample

if TYPE_CHECKING:
    import httpx

    from rlkit.chat import Chat

__all__ = ["Answerer", "Choice", "Draw", "GatewayError", "Owner", "Reply", "Request", "Service"]

Finish: TypeAlias = Literal["stop", "length", "tool_calls"]


@attrs.frozen
class Draw:
    """How a client wants to have its completion drawn; None: the client did not say.

    Attributes:
        max_tokens: as of ``SamplingParams``, but may be 0: nothing is sampled, the prompt is scored.
        temperature, top_p, top_k, min_p: as of ``SamplingParams``.
        repetition_penalty, presence_penalty, frequency_penalty: as of ``SamplingParams``.
        stop: texts, or token ids, that end a completion beside the model's end tokens; () where none was named.
        ignore_eos: nothing but ``stop`` and ``max_tokens`` ends it.
        seed: >= 0.
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


@attrs.frozen(eq=False)
class Request:
    """One call of a client.

    Exactly one of ``messages``, ``text`` and ``prompt`` is there.

    Attributes:
        messages: a conversation in OpenAI's chat form: ``role``, ``content`` (text), ``tool_calls``, ``tool_call_id``,
            ``name``, ``reasoning_content``; other dialects are translated into it. It does not end with the assistant.
        text: a prompt as text (completions).
        prompt: int64 [P], a prompt as tokens.
        tools: function schemas, OpenAI style: ``{"type": "function", "function": {...}}``.
        tool_choice: "auto", "none", "required", or a tool's name.
        template: what the chat template is to see, such as ``{"enable_thinking": False}``.
        draw: how to draw.
        n: completions, >= 1.
        top_logprobs: how many alternatives to report for each token, >= 0; None: no logprobs at all.
        prompt_logprobs: the same for the prompt's tokens; None: none.
        model: the name that the client used.
    """

    messages: Sequence[Message] | None = None
    text: str | None = None
    prompt: np.ndarray | None = None
    tools: Sequence[Message] = ()
    tool_choice: str = "auto"
    template: Mapping[str, object] = attrs.field(factory=dict)
    draw: Draw = attrs.field(factory=Draw)
    n: int = 1
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    model: str = ""


@attrs.frozen(eq=False)
class Choice:
    """One completion.

    Attributes:
        sample: as it was drawn.
        text: the whole text, without the token or text that ended it.
        content: the text without reasoning and tool calls.
        reasoning: what the policy thought; None where it did not, or where it was not told apart.
        calls: of tools; their ids are unique in the session.
        finish: why it ended.
        top: one mapping of token id -> logprob per token of the sample; None where nobody asked.
    """

    sample: Sample
    text: str
    content: str
    reasoning: str | None = None
    calls: Sequence[ToolCall] = ()
    finish: Finish = "stop"
    top: Sequence[Mapping[int, float]] | None = None


@attrs.frozen(eq=False)
class Reply:
    """What a request is answered.

    Attributes:
        id: unique in the gateway, 24 hexadecimal digits; dialects put their prefix in front of it.
        created: seconds since 1970.
        model: the name that the client used, or the gateway's.
        prompt: int64 [P], what was sampled from.
        choices: n of them.
        prompt_logprobs: float32 [P], 0 for the first; None where nobody asked.
        prompt_top: as ``Choice.top``, for the prompt; None where nobody asked.
    """

    id: str
    created: int
    model: str
    prompt: np.ndarray
    choices: Sequence[Choice]
    prompt_logprobs: np.ndarray | None = None
    prompt_top: Sequence[Mapping[int, float]] | None = None


class GatewayError(Exception):
    """A request that is not answered; each dialect writes it in its own way.

    Args:
        status: of HTTP: 400, 401, 404, 429, 500, 503, ...
        message: where, what, what was expected.
        param: the field of the request, where there is one.
        code: for programs: "context_length_exceeded", "limit_reached", "invalid_api_key", ...; None: none.
        retry_after: seconds, for a 429 or 503 that may be tried again; None: trying again is of no use.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after


class Answerer(Protocol):
    """What answers the requests of one client: a session, or a gateway that is open to all.

    Attributes:
        model: the name of the policy.
        tokenizer: the policy's.
        max_length: longest prompt + completion, in tokens.
        responses: of the responses API, by id, the conversation that ends with each; None: they are not remembered.
    """

    @property
    def model(self) -> str: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def max_length(self) -> int: ...

    @property
    def responses(self) -> MutableMapping[str, Sequence[Message]] | None: ...

    async def answer(self, request: Request) -> Reply:
        """Sample what was asked for. May be cancelled. Raises GatewayError."""

    def refused(self) -> None:
        """Count a request that was not valid, and so was not answered."""

    async def render(self, request: Request) -> np.ndarray:
        """Return the prompt int64 [P] that ``answer`` would sample from; nothing is recorded. Raises GatewayError."""


class Service(Protocol):
    """What a gateway is to its endpoints."""

    @property
    def model(self) -> str:
        """The name of the policy."""

    def admit(self, session: str | None, key: str | None) -> Answerer:
        """Return what answers a client.

        Args:
            session: the id in the URL, ``/s/<id>/...``; the key does not matter then. None: there is none.
            key: what the client sent as its API key; None: nothing.

        Raises:
            GatewayError: 401, there is no such session, or no such key and the gateway is not open.
        """


class Owner(Protocol):
    """What a session knows of the gateway that opened it."""

    @property
    def model(self) -> str:
        """The name that clients are told."""

    @property
    def url(self) -> str:
        """Where the gateway listens; the first use starts it."""

    def chat_with(self, template: Mapping[str, object]) -> Chat:
        """Return the chat with these variables of its template."""

    def client(self, id: str, api_key: str, package: Literal["httpx", "httpx2"]) -> httpx.AsyncClient:  # noqa: A002
        """Return a client that reaches a session without a socket."""

    def forget(self, id: str, api_key: str) -> None:  # noqa: A002
        """Let go of a session that has ended."""
