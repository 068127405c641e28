"""Chat completions: OpenAI's API, with vLLM's additions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Self

import attrs

from rlkit._interaction import Message
from rlkit.chat.messages import read_call, read_content, read_messages
from rlkit.gateway.dialects import openai
from rlkit.gateway.dialects._logprobs import chat_logprobs, parts, prompt_logprobs
from rlkit.gateway.dialects.body import Body, Event, Json, as_request_errors, draw, refuse, wrong
from rlkit.gateway.types import Choice, Reply, Request

if TYPE_CHECKING:
    from rlkit.gateway._session import Session

__all__ = ["ChatCall", "assistant_call", "chat_request", "conversation", "text_of", "unended"]

_ROLES: Final = ("system", "user", "assistant", "tool")


def conversation(body: Body) -> list[Message]:
    """Return ``messages`` as ``read_messages`` reads them."""
    with as_request_errors():
        messages = read_messages(body.items("messages"), body.path("messages"))
    if not messages:
        raise body.missing("messages", " or empty; expected at least one message")
    for i, message in enumerate(messages):
        Body(message, f"{body.path('messages')}[{i}]").require_choice("role", _ROLES)
    return list(unended(messages, body.path("messages")))


def unended(messages: Sequence[Message], where: str) -> Sequence[Message]:
    """Return the messages, the last of which must not be the assistant's: it would have to be continued."""
    if messages[-1]["role"] == "assistant":
        expected = "a last message of the user, the system or a tool"
        raise wrong(f"{where}[-1].role", "assistant", expected, "the gateway does not continue an answer")
    return messages


def assistant_call(function: Body, identifier: str) -> Json:
    """Return one of an assistant's ``tool_calls``, from an object with ``name`` and ``arguments``."""
    with as_request_errors():
        return {"id": identifier, "type": "function", "function": read_call(function.value, function.where)}


def text_of(body: Body, name: str, *, optional: bool = False, role: str = "user") -> str:
    """Return a content as text, as ``read_messages`` does in that role."""
    value = body.get(name)
    if value is None and not optional:
        raise body.missing(name)
    with as_request_errors():
        return "" if value is None else read_content(value, role, body.path(name))


_UNSUPPORTED: Final = {
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (),
    "chat_template": (),
    "documents": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "echo": (False,),
    "best_of": (1,),
}
_NO_SETTINGS: Final = ("messages", "tools", "head", "add_generation_prompt", "self")


@attrs.frozen(eq=False)
class ChatCall(openai.CompletionsCall):
    """One call of ``POST /v1/chat/completions``."""

    logprobs: bool = False
    legacy: bool = False  # the client wrote `functions`, and reads `function_call`

    @classmethod
    def parse(cls, value: Mapping[str, object], session: Session) -> Self:
        """Read a request. Raises GatewayError."""
        body = Body(value)
        refuse(body, _UNSUPPORTED)
        logprobs = body.flag("logprobs")
        top = body.integer("top_logprobs", low=0, high=20)
        if top and not logprobs:
            raise wrong("top_logprobs", top, "logprobs=true together with it")
        limits = [body.integer(name, low=1) for name in ("max_completion_tokens", "max_tokens")]
        request = attrs.evolve(
            chat_request(body),
            draw=draw(body, session, min((x for x in limits if x is not None), default=None)),
            n=body.integer("n", low=1, high=128) or 1,
            top_logprobs=(top or 0) if logprobs else None,
            prompt_logprobs=body.integer("prompt_logprobs", low=0, high=20),
        )
        return cls(
            session=session,
            requests=[request],
            **openai.read_stream_options(body),
            logprobs=logprobs,
            legacy=body.get("functions") is not None and body.get("tools") is None,
            as_ids=body.flag("return_tokens_as_token_ids"),
        )

    def body(self, replies: Sequence[Reply]) -> Json:
        (reply,) = replies
        answer = self._head(reply, "chat.completion")
        answer["choices"] = [self._choice(i, choice) for i, choice in enumerate(reply.choices)]
        answer["usage"] = openai.usage(replies)
        if self.token_ids:
            answer["prompt_token_ids"] = reply.prompt.tolist()
        if reply.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(reply, self.session.tokenizer)
        return answer

    def events(self, replies: Sequence[Reply]) -> Iterator[Event]:
        (reply,) = replies
        head = self._head(reply, "chat.completion.chunk")
        if self.include_usage:
            head["usage"] = None
        for index, choice in enumerate(reply.choices):
            first: Json = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            whole = {"prompt_token_ids": reply.prompt.tolist()} if self.token_ids and index == 0 else {}
            yield None, {**head, "choices": [first], **whole}
            for delta in self._deltas(choice):
                yield None, {**head, "choices": [{"index": index, **delta}]}
        yield from self.finish_stream(head, replies)

    def _head(self, reply: Reply, kind: str) -> Json:
        return {
            "id": f"chatcmpl-{reply.id}",
            "object": kind,
            "created": reply.created,
            "model": reply.model,
            "service_tier": None,
            "system_fingerprint": None,
        }

    def _choice(self, index: int, choice: Choice) -> Json:
        message: Json = {"role": "assistant", "content": choice.content or None, "refusal": None, "annotations": []}
        if not choice.calls:
            message["content"] = choice.content
        elif self.legacy:
            message["function_call"] = self._function(choice, 0)
        else:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": self._function(choice, i)}
                for i, call in enumerate(choice.calls)
            ]
        if choice.reasoning is not None:
            message["reasoning_content"] = choice.reasoning
        return {
            "index": index,
            "message": message,
            "logprobs": {"content": self._logprobs(choice), "refusal": None} if self.logprobs else None,
            **self._end(choice),
            **({"token_ids": choice.sample.tokens.tolist()} if self.token_ids else {}),
        }

    def _deltas(self, choice: Choice) -> Iterator[Json]:
        """Yield the additions to a choice, and at the end its finish reason."""
        entries = self._logprobs(choice) if self.logprobs else []
        begun: set[int] = set()
        texts = [openai.arguments(call) for call in choice.calls]
        for part in parts(choice, self.session.tokenizer, texts):
            delta: Json
            if part.kind != "call":
                delta = {"reasoning_content" if part.kind == "reasoning" else "content": part.text}
            else:
                function: Json = {"arguments": part.text}
                head: Json = {}
                if part.call not in begun:
                    begun.add(part.call)
                    head = {"id": choice.calls[part.call].id, "type": "function"}
                    function = {"name": choice.calls[part.call].name, **function}
                delta = {"tool_calls": [{"index": part.call, **head, "function": function}]}
                if self.legacy:
                    delta = {"function_call": function} if part.call == 0 else {}
            yield {
                "delta": delta,
                "logprobs": {"content": entries[part.tokens], "refusal": None} if self.logprobs else None,
                "finish_reason": None,
                **({"token_ids": choice.sample.tokens[part.tokens].tolist()} if self.token_ids else {}),
            }
        yield {"delta": {}, "logprobs": None, **self._end(choice)}

    def _end(self, choice: Choice) -> Json:
        return self.write_end(choice, "function_call" if self.legacy else "tool_calls")

    def _function(self, choice: Choice, index: int) -> Json:
        return {"name": choice.calls[index].name, "arguments": openai.arguments(choice.calls[index])}

    def _logprobs(self, choice: Choice) -> list[Json]:
        return chat_logprobs(choice, self.session.tokenizer, as_ids=self.as_ids)


def chat_request(body: Body) -> Request:
    """Return the conversation, the tools and the template's settings of a chat request."""
    tools = _tools(body)
    template = body.body("chat_template_kwargs")
    for name in _NO_SETTINGS:
        if template is not None and name in template.value:
            raise wrong(template.path(name), template.get(name), "only variables of the template")
    return Request(
        messages=conversation(body),
        tools=tools,
        tool_choice=_tool_choice(body, tools),
        template={} if template is None else dict(template.value),
        model=body.text("model") or "",
    )


def _tools(body: Body) -> tuple[Message, ...]:
    tools = []
    for each in body.objects("tools"):
        function = each.body("function")
        if each.get("type") not in (None, "function") or function is None:
            raise wrong(each.path("type"), each.get("type"), "'function', and the function", "the only supported kind")
        tools.append(openai.function_tool(function))
    where = "tools" if tools else "functions"
    return openai.distinct(tools or [openai.function_tool(each) for each in body.objects("functions")], where)


def _tool_choice(body: Body, tools: Sequence[Message]) -> str:
    if body.get("tool_choice") is None:
        return openai.read_tool_choice(body, "function_call", tools)
    return openai.read_tool_choice(body, "tool_choice", tools, typed=True, inside="function")
