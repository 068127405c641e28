"""Responses, asked by OpenAI's SDK."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

from tests.gateway.fake import Says

ADD = {"type": "function", "name": "add", "description": "Add.", "parameters": {"type": "object"}, "strict": False}
CHAT_ADD = {"name": "add", "description": "Add.", "parameters": {"type": "object"}}


def run(coroutine):
    return asyncio.run(coroutine)


def create(client, **options):
    return run(client.responses.create(**{"model": "m", "input": "Hi", **options}))


async def streamed(client, **options):
    return [
        event async for event in await client.responses.create(**{"model": "m", "input": "Hi", **options}, stream=True)
    ]


def test_an_answer(client, service):
    got = create(client, instructions="Be brief.", max_output_tokens=50, temperature=0.5, metadata={"a": "b"})
    assert got.output_text == "Hello there, Wörld!"
    assert (got.id, got.object, got.status, got.model) == (
        "resp_000000000000000000000001",
        "response",
        "completed",
        "m",
    )
    assert (got.instructions, got.max_output_tokens, got.temperature) == ("Be brief.", 50, 0.5)
    assert got.metadata == {"a": "b"}
    assert (got.usage.output_tokens, got.usage.output_tokens_details.reasoning_tokens) == (21, 0)
    assert got.usage.total_tokens == got.usage.input_tokens + 21
    request = service.requests[0]
    assert request.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert request.sampling.max_tokens == 50


SAYS = [
    Says("Hello there, Wörld!"),
    Says("cut", length=True),
    Says(""),
    Says("4", reasoning="2 + 2"),
    Says("Let me see.", reasoning="Hm.", calls=[("add", {"x": [1, "é"]}), ("add", {})]),
    Says(calls=[("add", {"x": 1})]),
]


@pytest.mark.parametrize("said", SAYS)
def test_a_stream_says_the_same(client, service, said):
    service.says = [said]
    options = {"tools": [ADD], "include": ["message.output_text.logprobs"], "top_logprobs": 1}
    whole = create(client, **options)
    entries = [entry for item in whole.output if item.type == "message" for entry in item.content[0].logprobs]
    assert all(entry.top_logprobs for entry in entries)
    assert len(entries) in (0, whole.usage.output_tokens)
    assert bool(entries) == any(item.type == "message" for item in whole.output)
    service.calls = 0
    events = run(streamed(client, **options))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type for event in events]
    assert names[:2] == ["response.created", "response.in_progress"]
    assert names[-1] == ("response.incomplete" if said.length else "response.completed")
    last = events[-1].response

    def plain(response):
        text = json.dumps(response.model_dump(exclude={"id", "created_at"}))
        return text.replace(whole.id[5:], "ID").replace(last.id[5:], "ID")

    assert plain(last) == plain(whole)
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.model_dump() for item in done] == [item.model_dump() for item in last.output]
    for i, item in enumerate(last.output):
        own = [event for event in events if getattr(event, "output_index", None) == i]
        joined = "".join(event.delta for event in own if event.type.endswith(".delta"))
        assert joined == (item.arguments if item.type == "function_call" else item.content[0].text)


def test_the_sdk_s_accumulating_stream(client, service):
    service.says = [SAYS[4]]

    async def final():
        async with client.responses.stream(model="m", input="Hi", tools=[ADD]) as stream:
            async for _ in stream:
                pass
            return await stream.get_final_response()

    got = run(final())
    assert [item.type for item in got.output] == ["reasoning", "message", "function_call", "function_call"]
    assert got.output[0].content[0].text == "Hm."
    assert json.loads(got.output[2].arguments) == {"x": [1, "é"]}
    assert got.output_text == "Let me see."


def test_the_order_of_events(client, service):
    service.says = [Says("a", calls=[("add", {})])]
    names = [event.type.removeprefix("response.") for event in run(streamed(client, tools=[ADD]))]
    assert names == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done"),
        "output_item.done",
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]


def test_items(client, service):
    create(
        client,
        tools=[ADD],
        tool_choice={"type": "function", "name": "add"},
        input=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "input_text", "text": "1 + 1?"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {
                "type": "message",
                "id": "msg_1",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "Let me."}],
            },
            {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": '{"x": 1}'},
            {"type": "function_call", "id": "fc_2", "call_id": "c2", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "2"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "3"}]},
            {"type": "function_call", "id": "fc_3", "call_id": "c3", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c3", "output": "4"},
        ],
    )

    def call(identifier, **arguments):
        return {"id": identifier, "type": "function", "function": {"name": "add", "arguments": arguments}}

    request = service.requests[0]
    assert request.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 1?"},
        {
            "role": "assistant",
            "content": "Let me.",
            "reasoning_content": "Hm.",
            "tool_calls": [call("c1", x=1), call("c2")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "tool", "tool_call_id": "c2", "content": "3"},
        {"role": "assistant", "content": "", "tool_calls": [call("c3")]},
        {"role": "tool", "tool_call_id": "c3", "content": "4"},
    ]
    assert request.tools == ({"type": "function", "function": CHAT_ADD},)
    assert request.tool_choice == "add"


def test_output_is_input(client, service):
    """What an agent gets and gives back is one turn."""
    service.says = [SAYS[4]]
    first = create(client, tools=[ADD])
    result = [
        {"type": "function_call_output", "call_id": c.call_id, "output": "1"} for c in first.output if c.type[0] == "f"
    ]
    items = [item.model_dump(exclude_none=True) for item in first.output]
    create(client, tools=[ADD], input=[{"role": "user", "content": "Hi"}, *items, *result])
    messages = service.requests[1].messages
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool"]
    assert messages[1]["reasoning_content"] == "Hm."
    create(client, tools=[ADD], input=result, previous_response_id=first.id)
    assert service.requests[2].messages == messages


def test_previous_responses(client, service):
    first = create(client, instructions="Be brief.")
    second = create(client, input="More", previous_response_id=first.id, instructions="Be long.")
    assert service.requests[1].messages == [
        {"role": "system", "content": "Be long."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello there, Wörld!"},
        {"role": "user", "content": "More"},
    ]
    assert second.previous_response_id == first.id
    run(streamed(client, store=False, previous_response_id=second.id))
    assert list(service.responses) == [first.id, second.id]
    service.responses = None  # as outside of sessions
    for name in (first.id, "resp_0"):
        with pytest.raises(openai.BadRequestError) as caught:
            create(client, previous_response_id=name)
        assert caught.value.code == "previous_response_not_found"
    assert create(client).store is False
