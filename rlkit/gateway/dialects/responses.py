"""Responses: OpenAI's newer API, in items and with typed events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias

import attrs

from rlkit._interaction import Message
from rlkit.gateway.dialects import openai
from rlkit.gateway.dialects._logprobs import Kind, Part, chat_logprobs, parts, reasoning_tokens
from rlkit.gateway.dialects.body import Body, Call, Event, Json, asks_for_json, count, draw, refuse, wrong
from rlkit.gateway.dialects.chat import assistant_call, text_of, unended
from rlkit.gateway.types import Choice, GatewayError, Reply, Request

if TYPE_CHECKING:
    from rlkit.gateway._session import Session

__all__ = ["Item", "ResponseCall", "input_messages", "item_events"]

_Turn: TypeAlias = dict[str, Any]
_ROLES: Final = {"user": "user", "system": "system", "developer": "system", "assistant": "assistant"}


def input_messages(body: Body) -> list[Message]:
    """Return ``input`` in the chat form.

    Reasoning, a message of the assistant and calls that follow each other in this order are one turn, as they were
    sampled.
    """
    value = body.get("input")
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    messages: list[_Turn] = []
    for item in body.objects("input"):
        _add(item, messages)
    if not messages:
        raise body.missing("input", " or empty; expected a text or items")
    for message in messages:
        if message.get("reasoning_content") == "":  # the item only said that a turn begins
            del message["reasoning_content"]
    return [{"content": "", **message} for message in messages]


def _add(item: Body, messages: list[_Turn]) -> None:
    """Add an item of ``input`` to the messages."""
    kind = item.get("type") or "message"
    if kind == "message":
        role = _ROLES[item.require_choice("role", _ROLES)]
        if role == "assistant":
            _turn(messages, new=("content", "tool_calls"))["content"] = text_of(item, "content", role="assistant")
        else:
            messages.append({"role": role, "content": text_of(item, "content")})
    elif kind == "reasoning":
        _turn(messages, new=("content", "tool_calls", "reasoning_content"))["reasoning_content"] = _reasoning(item)
    elif kind == "function_call":
        call = assistant_call(item, item.text("call_id") or item.text("id") or "")
        _turn(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        identifier = item.require_text("call_id")
        messages.append({"role": "tool", "tool_call_id": identifier, "content": text_of(item, "output")})
    else:
        known = "message, reasoning, function_call or function_call_output"
        raise wrong(item.path("type"), kind, known, "tools of a provider are not supported")


def _turn(messages: list[_Turn], new: tuple[str, ...] = ()) -> _Turn:
    """Return the policy's turn at the end; a new one if there is none, or if it already has one of ``new``."""
    if not messages or messages[-1]["role"] != "assistant" or any(name in messages[-1] for name in new):
        messages.append({"role": "assistant"})
    return messages[-1]


def _reasoning(item: Body) -> str:
    """Return the thoughts of a reasoning item, or their summary."""
    for name in ("content", "summary"):
        texts = [part.text("text") or "" for part in item.parts(name)]
        if any(texts):
            return "".join(texts)
    return ""


_NAMES: Final[Mapping[Kind, str]] = {
    "content": "response.output_text",
    "reasoning": "response.reasoning_text",
    "call": "response.function_call_arguments",
}


@attrs.frozen
class Item:
    """An item of an answer.

    Attributes:
        kind: the kind of its text.
        call: the index of the call, if it is one.
        whole: the item as it is in the end.
    """

    kind: Kind
    call: int
    whole: Json

    @property
    def part(self) -> Json:
        """The one part of its content. Calls have none."""
        content = self.whole.get("content")
        return content[0] if isinstance(content, list) else {}

    @property
    def begun(self) -> Json:
        """The item while it is still empty."""
        empty: Json = {"arguments": ""} if self.kind == "call" else {"content": []}
        return {**self.whole, **empty, "status": "in_progress"}


def item_events(items: Sequence[Item], parts: Sequence[Part]) -> Iterator[Json]:
    """Yield the events of all items, from the parts of the answer."""
    for index, item in enumerate(items):
        where: Json = {"item_id": item.whole["id"], "output_index": index}
        yield {"type": "response.output_item.added", "output_index": index, "item": item.begun}
        if item.kind != "call":
            where["content_index"] = 0
            empty = {**item.part, "text": "", **({"logprobs": []} if item.kind == "content" else {})}
            yield {"type": "response.content_part.added", **where, "part": empty}
        for part in parts:
            if (part.kind, part.call) == (item.kind, item.call):
                delta = {"delta": part.text, **_logprobs(item, part.tokens)}
                yield {"type": f"{_NAMES[item.kind]}.delta", **where, **delta}
        if item.kind == "call":
            whole = {"arguments": item.whole["arguments"], "name": item.whole["name"]}
            yield {"type": f"{_NAMES[item.kind]}.done", **where, **whole}
        else:
            text = {"text": item.part["text"], **_logprobs(item, slice(None))}
            yield {"type": f"{_NAMES[item.kind]}.done", **where, **text}
            yield {"type": "response.content_part.done", **where, "part": item.part}
        yield {"type": "response.output_item.done", "output_index": index, "item": item.whole}


def _logprobs(item: Item, tokens: slice) -> Json:
    entries = item.part.get("logprobs")
    return {"logprobs": entries[tokens]} if isinstance(entries, list) else {}


_UNSUPPORTED: Final = {"background": (False,), "conversation": (), "prompt": ()}
_LOGPROBS: Final = "message.output_text.logprobs"


@attrs.frozen(eq=False)
class ResponseCall(Call):
    """One call of ``POST /v1/responses``."""

    about: Json = attrs.field(factory=dict)  # the request's fields that the answer repeats
    said: Sequence[Message] = ()  # the conversation without the instructions, which belong to this call alone
    store: bool = True
    logprobs: bool = False

    @classmethod
    def parse(cls, value: Mapping[str, object], session: Session) -> Self:
        """Read a request. Raises GatewayError."""
        body = Body(value)
        refuse(body, _UNSUPPORTED)
        text = body.body("text") or Body({})
        said = unended([*_previous(body, session), *input_messages(body)], "input")
        instructions = body.text("instructions")
        top = body.integer("top_logprobs", low=0, high=20)
        logprobs = _LOGPROBS in body.items("include") or bool(top)
        tools = openai.distinct([_tool(each) for each in body.objects("tools")], "tools")
        max_tokens = body.integer("max_output_tokens", low=1)
        store = session.responses is not None and (body.get("store") is None or body.flag("store"))
        request = Request(
            messages=[{"role": "system", "content": instructions}, *said] if instructions else said,
            tools=tools,
            tool_choice=openai.read_tool_choice(body, "tool_choice", tools, typed=True),
            draw=attrs.evolve(draw(body, session, max_tokens), json_field=asks_for_json(text, "format")),
            top_logprobs=(top or 0) if logprobs else None,
            model=body.text("model") or "",
            fails_when_cut=True,
        )
        return cls(
            session=session,
            requests=[request],
            stream=body.flag("stream"),
            about=_about(body, store, text.get("format")),
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
        yield from item_events(items, parts(choice, self.session.tokenizer, texts))
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
            entries = chat_logprobs(choice, self.session.tokenizer, as_ids=False) if self.logprobs else []
            text: Json = {"type": "output_text", "text": choice.content, "annotations": [], "logprobs": entries}
            message: Json = {"id": f"msg_{reply.id}", "type": "message", "role": "assistant"}
            items.append(Item("content", 0, {**message, "content": [text], "status": status}))
        for i, call in enumerate(choice.calls):
            about: Json = {"id": f"fc_{reply.id}{i:02d}", "type": "function_call", "call_id": call.id}
            whole = {**about, "name": call.name, "arguments": openai.arguments(call), "status": "completed"}
            items.append(Item("call", i, whole))
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
        thought = reasoning_tokens(replies[0].choices[0], self.session.tokenizer)
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": thought},
            "total_tokens": prompt + completion,
        }

    def _remember(self, reply: Reply, choice: Choice) -> None:
        """Keep the conversation for a later ``previous_response_id``."""
        responses = self.session.responses
        if not self.store or responses is None:
            return
        turn: Json = {"role": "assistant", "content": choice.content}
        if choice.reasoning is not None:
            turn["reasoning_content"] = choice.reasoning
        if choice.calls:
            functions = [(call.id, {"name": call.name, "arguments": dict(call.arguments)}) for call in choice.calls]
            turn["tool_calls"] = [{"id": i, "type": "function", "function": function} for i, function in functions]
        responses[f"resp_{reply.id}"] = [*self.said, turn]


def _previous(body: Body, session: Session) -> Sequence[Message]:
    name = body.text("previous_response_id")
    if name is None:
        return ()
    messages = None if session.responses is None else session.responses.get(name)
    if messages is None:
        what = f"previous_response_id: {name[:80]!r} is not known"
        why = "responses are stored only within sessions" if session.responses is None else "in this session"
        param = "previous_response_id"
        raise GatewayError(400, f"{what} ({why})", param=param, code="previous_response_not_found")
    return messages


def _tool(body: Body) -> Message:
    if body.get("type") != "function":
        raise wrong(body.path("type"), body.get("type"), "'function'", "tools of a provider are not supported")
    return openai.function_tool(body)


def _about(body: Body, store: bool, form: object) -> Json:
    """Return the request's fields that an answer repeats."""
    repeated = ("instructions", "max_output_tokens", "previous_response_id", "prompt_cache_key", "user")
    defaults: Json = {"temperature": 1.0, "top_p": 1.0, "tool_choice": "auto", "tools": [], "metadata": {}}
    given = {name: value for name in defaults if (value := body.get(name)) is not None}
    reasoning = body.body("reasoning")
    return {
        **{name: body.get(name) for name in (*repeated, "max_tool_calls")},
        **defaults,
        **given,
        "parallel_tool_calls": True,
        "reasoning": {"effort": None, "summary": None} if reasoning is None else dict(reasoning.value),
        "text": {"format": form or {"type": "text"}},
        "top_logprobs": body.integer("top_logprobs") or 0,
        "truncation": "disabled",
        "background": False,
        "service_tier": "default",
        "store": store,
    }
