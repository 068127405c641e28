"""Responses: OpenAI's newer API, in items and with typed events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Final, Self

import attrs

from rlkit._interaction import Message
from rlkit.gateway.dialects import openai
from rlkit.gateway.dialects.body import Body, refuse, wrong
from rlkit.gateway.dialects.call import Call, Event, Json, count
from rlkit.gateway.dialects.drawing import draw
from rlkit.gateway.dialects.items import input_messages
from rlkit.gateway.dialects.logprobs import chat_logprobs
from rlkit.gateway.dialects.messages import unended
from rlkit.gateway.dialects.response_events import Item, item_events
from rlkit.gateway.dialects.spelling import parts, reasoning_tokens
from rlkit.gateway.types import Answerer, Choice, GatewayError, Reply, Request

__all__ = ["ResponseCall"]

_UNSUPPORTED: Final = {"background": (False,), "conversation": (), "prompt": ()}
_LOGPROBS: Final = "message.output_text.logprobs"


@attrs.frozen(eq=False)
class ResponseCall(Call):
    """One call of ``POST /v1/responses``."""

    about: Json = attrs.field(factory=dict)  # what the answer repeats of the request
    said: Sequence[Message] = ()  # the conversation without the instructions, which are of this call alone
    store: bool = True
    logprobs: bool = False

    @classmethod
    def parse(cls, value: Mapping[str, object], answerer: Answerer) -> Self:
        """Read a request. Raises GatewayError."""
        body = Body(value)
        refuse(body, _UNSUPPORTED)
        text = body.body("text")
        if text is not None:
            refuse(text, {"format": ({"type": "text"},)})
        said = unended([*_previous(body, answerer), *input_messages(body)], "input")
        instructions = body.text("instructions")
        top = body.integer("top_logprobs", low=0, high=20)
        logprobs = _LOGPROBS in body.items("include") or bool(top)
        tools = openai.distinct([_tool(each) for each in body.objects("tools")], "tools")
        max_tokens = body.integer("max_output_tokens", low=1)
        store = answerer.responses is not None and (body.get("store") is None or body.flag("store"))
        request = Request(
            messages=[{"role": "system", "content": instructions}, *said] if instructions else said,
            tools=tools,
            tool_choice=_tool_choice(body, tools),
            draw=draw(body, answerer, max_tokens),
            top_logprobs=(top or 0) if logprobs else None,
            model=body.text("model") or "",
        )
        return cls(
            answerer=answerer,
            requests=[request],
            stream=body.flag("stream"),
            about=_about(body, store),
            said=said,
            store=store,
            logprobs=logprobs,
        )

    def body(self, replies: Sequence[Reply]) -> Json:
        (reply,) = replies
        (choice,) = reply.choices
        items = self._items(reply, choice)
        self._remember(reply, choice)
        return self._response(replies, [item.whole for item in items], done=True)

    def events(self, replies: Sequence[Reply]) -> Iterator[Event]:
        (reply,) = replies
        (choice,) = reply.choices
        self._remember(reply, choice)
        for number, event in enumerate(self._numbered(replies, self._items(reply, choice))):
            yield str(event["type"]), {**event, "sequence_number": number}

    def failed(self, error: Mapping[str, object]) -> Iterator[Event]:
        about = error.get("error")
        fields = about if isinstance(about, Mapping) else {}
        yield "error", {**fields, "type": "error", "sequence_number": 0, **error}

    def _numbered(self, replies: Sequence[Reply], items: Sequence[Item]) -> Iterator[Json]:
        (choice,) = replies[0].choices
        begun = self._response(replies, [], done=False)
        yield {"type": "response.created", "response": begun}
        yield {"type": "response.in_progress", "response": begun}
        texts = [openai.arguments(call) for call in choice.calls]
        yield from item_events(items, parts(choice, self.answerer.tokenizer, texts))
        response = self._response(replies, [item.whole for item in items], done=True)
        yield {"type": f"response.{response['status']}", "response": response}

    def _items(self, reply: Reply, choice: Choice) -> list[Item]:
        """Return the items of a choice, in the order of its parts."""
        status = "incomplete" if choice.finish == "length" else "completed"
        items = []
        if choice.reasoning is not None:
            content = [{"type": "reasoning_text", "text": choice.reasoning}]
            empty: Json = {"id": f"rs_{reply.id}", "type": "reasoning", "summary": [], "encrypted_content": None}
            items.append(Item("reasoning", 0, {**empty, "content": content, "status": status}))
        if choice.content or (choice.reasoning is None and not choice.calls):
            entries = chat_logprobs(choice, self.answerer.tokenizer, as_ids=False) if self.logprobs else []
            text: Json = {"type": "output_text", "text": choice.content, "annotations": [], "logprobs": entries}
            message: Json = {"id": f"msg_{reply.id}", "type": "message", "role": "assistant"}
            items.append(Item("content", 0, {**message, "content": [text], "status": status}))
        for i, call in enumerate(choice.calls):
            about: Json = {
                "id": f"fc_{reply.id}{i:02d}",
                "type": "function_call",
                "call_id": call.id,
                "name": call.name,
            }
            items.append(Item("call", i, {**about, "arguments": openai.arguments(call), "status": "completed"}))
        return items

    def _response(self, replies: Sequence[Reply], output: Sequence[Json], *, done: bool) -> Json:
        (reply,) = replies
        (choice,) = reply.choices
        cut = choice.finish == "length"
        return {
            "id": f"resp_{reply.id}",
            "object": "response",
            "created_at": reply.created,
            "status": "in_progress" if not done else "incomplete" if cut else "completed",
            "model": reply.model,
            "output": list(output),
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if done and cut else None,
            "usage": self._usage(replies) if done else None,
            **self.about,
        }

    def _usage(self, replies: Sequence[Reply]) -> Json:
        prompt, completion = count(replies)
        thought = reasoning_tokens(replies[0].choices[0], self.answerer.tokenizer)
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": thought},
            "total_tokens": prompt + completion,
        }

    def _remember(self, reply: Reply, choice: Choice) -> None:
        """Keep the conversation for a later ``previous_response_id``."""
        responses: MutableMapping[str, Sequence[Message]] | None = self.answerer.responses
        if not self.store or responses is None:
            return
        turn: Json = {"role": "assistant", "content": choice.content}
        if choice.reasoning is not None:
            turn["reasoning_content"] = choice.reasoning
        if choice.calls:
            functions = [(call.id, {"name": call.name, "arguments": openai.arguments(call)}) for call in choice.calls]
            turn["tool_calls"] = [{"id": i, "type": "function", "function": function} for i, function in functions]
        responses[f"resp_{reply.id}"] = [*self.said, turn]


def _previous(body: Body, answerer: Answerer) -> Sequence[Message]:
    name = body.text("previous_response_id")
    if name is None:
        return ()
    messages = None if answerer.responses is None else answerer.responses.get(name)
    if messages is None:
        what = f"previous_response_id: {name[:80]!r} is not known"
        why = "nothing is remembered outside of sessions" if answerer.responses is None else "in this session"
        param = "previous_response_id"
        raise GatewayError(400, f"{what} ({why})", param=param, code="previous_response_not_found")
    return messages


def _tool(body: Body) -> Message:
    if body.get("type") != "function":
        raise wrong(body.path("type"), body.get("type"), "'function'", "tools of a provider are not here")
    return openai.function_tool(body)


def _tool_choice(body: Body, tools: Sequence[Message]) -> str:
    value = body.get("tool_choice")
    if value is None or isinstance(value, str):
        word = body.choice("tool_choice", ("auto", "none", "required")) or "auto"
        if word == "required" and not tools:
            raise wrong("tool_choice", word, "tools to choose from")
        return word
    choice = Body(value, "tool_choice")
    if choice.get("type") != "function":
        raise wrong(choice.path("type"), choice.get("type"), "'function'")
    return openai.known_tool(choice.required("name", choice.text("name")), tools, choice.path("name"))


def _about(body: Body, store: bool) -> Json:
    """Return what an answer repeats of its request."""
    repeated = (
        "instructions",
        "max_output_tokens",
        "previous_response_id",
        "prompt_cache_key",
        "user",
        "max_tool_calls",
    )
    defaults: Json = {"temperature": 1.0, "top_p": 1.0, "tool_choice": "auto", "tools": [], "metadata": {}}
    given = {name: value for name in defaults if (value := body.get(name)) is not None}
    reasoning = body.body("reasoning")
    return {
        **{name: body.get(name) for name in repeated},
        **defaults,
        **given,
        "parallel_tool_calls": True,
        "reasoning": {"effort": None, "summary": None} if reasoning is None else dict(reasoning.value),
        "text": {"format": {"type": "text"}},
        "top_logprobs": body.integer("top_logprobs") or 0,
        "truncation": "disabled",
        "background": False,
        "service_tier": "default",
        "store": store,
    }
