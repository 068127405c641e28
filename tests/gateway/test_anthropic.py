"""Messages, asked by Anthropic's SDK and by hand."""

from __future__ import annotations

import asyncio
import json

import anthropic
import pytest

from rlkit.gateway._app import Server
from rlkit.gateway._types import GatewayError
from tests.gateway.fake import Says

ADD = {
    "name": "add",
    "description": "Add.",
    "input_schema": {"type": "object", "properties": {"x": {"type": "integer"}}},
}
HI = [{"role": "user", "content": "Hi"}]
BASE = {"model": "claude", "max_tokens": 64, "messages": HI}


def run(coroutine):
    return asyncio.run(coroutine)


def create(claude, **options):
    return run(claude.messages.create(**{**BASE, **options}))


async def streamed(claude, **options):
    """The message that the SDK puts together, and the events that came."""
    async with claude.messages.stream(**{**BASE, **options}) as stream:
        events = [event async for event in stream]
        return await stream.get_final_message(), events


def test_an_answer(claude, service):
    got = create(
        claude, system="Be brief.", stop_sequences=["Z"], extra_body={"temperature": 0.5, "top_k": 5, "top_p": 0.9}
    )
    assert [(block.type, block.text) for block in got.content] == [("text", "Hello there, Wörld!")]
    assert (got.stop_reason, got.stop_sequence, got.role, got.type) == ("end_turn", None, "assistant", "message")
    assert (got.model, got.id) == ("claude", "msg_000000000000000000000001")
    assert got.usage.output_tokens == 21
    request = service.requests[0]
    assert request.messages == [{"role": "system", "content": "Be brief."}, *HI]
    assert (request.sampling.max_tokens, request.sampling.temperature, request.sampling.top_k) == (64, 0.5, 5)
    assert (request.sampling.top_p, request.sampling.stop) == (0.9, ("Z",))
    assert service.admitted == [("s1", "any")]


@pytest.mark.parametrize(
    "said",
    [
        Says("Hello there, Wörld!"),
        Says("", length=True),
        Says("4", reasoning="2 + 2"),
        Says("Let me see.", reasoning="Hm.", calls=[("add", {"x": [1, "é"]}), ("add", {})]),
        Says(calls=[("add", {"x": 1})]),
    ],
)
def test_a_stream_says_the_same(claude, service, said):
    service.says = [said]
    whole = create(claude, tools=[ADD])
    service.calls = 0
    got, events = run(streamed(claude, tools=[ADD]))
    assert [block.model_dump(exclude={"citations", "parsed_output"}) for block in got.content] == [
        block.model_dump(exclude={"citations", "parsed_output"}) for block in whole.content
    ]
    assert (got.stop_reason, got.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    names = [event.type for event in events]
    assert names[0] == "message_start"
    assert names[-1] == "message_stop"
    starts = [event.index for event in events if event.type == "content_block_start"]
    assert starts == list(range(len(whole.content)))
    assert names.count("content_block_stop") == len(starts)


def test_the_order_of_events(http, service):
    """As the API documents it, byte for byte but for the numbers."""
    service.says = [Says("a", calls=[("add", {"x": 1})])]
    got = run(http.post("/v1/messages", json={**BASE, "stream": True, "tools": [ADD]}))
    events = [block.split("\n") for block in got.text.strip().split("\n\n")]
    assert [line[0].removeprefix("event: ") for line in events] == [
        *("message_start", "ping", "content_block_start", "content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_stop", "message_delta", "message_stop"),
    ]
    data = [json.loads(line[1].removeprefix("data: ")) for line in events]
    assert data[0]["message"]["content"] == []
    assert data[0]["message"]["stop_reason"] is None
    assert data[2] == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    assert data[3] == {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}}
    assert data[5]["content_block"] == {"type": "tool_use", "id": "call00000", "name": "add", "input": {}}
    assert data[6]["delta"] == {"type": "input_json_delta", "partial_json": '{"x": 1}'}
    assert data[8]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def test_tools(claude, service):
    service.says = [Says("Let me.", calls=[("add", {"x": 1})])]
    got = create(claude, tools=[ADD], tool_choice={"type": "tool", "name": "add"})
    assert got.stop_reason == "tool_use"
    assert [block.type for block in got.content] == ["text", "tool_use"]
    assert (got.content[1].name, got.content[1].input, got.content[1].id) == ("add", {"x": 1}, "call00000")
    request = service.requests[0]
    expected = {"name": "add", "description": "Add.", "parameters": ADD["input_schema"]}
    assert request.tools == ({"type": "function", "function": expected},)
    assert request.tool_choice == "add"
    for kind, word in (("auto", "auto"), ("any", "required"), ("none", "none")):
        create(claude, tools=[ADD], tool_choice={"type": kind})
        assert service.requests[-1].tool_choice == word


def test_history(claude, service):
    thinking = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    use = {"type": "tool_use", "id": "t1", "name": "add", "input": {"x": 1}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "2"}], "is_error": False}
    cached = {"type": "text", "text": "So?", "cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [thinking, {"type": "text", "text": "Let me."}, use]},
        {"role": "user", "content": [result, {"type": "tool_result", "tool_use_id": "t2"}, cached]},
    ]
    create(claude, messages=messages, system=[{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}])
    function = {"name": "add", "arguments": {"x": 1}}
    assert service.requests[0].messages == [
        {"role": "system", "content": "Be\nbrief."},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "Let me.",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "t1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "2"},
        {"role": "tool", "tool_call_id": "t2", "content": ""},
        {"role": "user", "content": "So?"},
    ]


def test_why_it_ended(claude, service):
    service.says = [Says("one", stop="two")]
    got = create(claude, stop_sequences=["x", "two"])
    assert (got.content[0].text, got.stop_reason, got.stop_sequence) == ("one", "stop_sequence", "two")
    service.says = [Says("cut", length=True)]
    assert create(claude).stop_reason == "max_tokens"


def test_count_tokens(claude, service):
    got = run(claude.messages.count_tokens(model="claude", messages=HI, system="Be brief."))
    messages = [{"role": "system", "content": "Be brief."}, *HI]
    assert got.input_tokens == service.tokenizer.apply_chat_template(messages).size
    assert not service.requests


def test_the_tool_runner_sends_all_messages_where_threads_are_not_kept(service):
    """It would continue by the id of a message, and is told that it cannot in the way that it understands."""
    with Server(service) as server:
        client = anthropic.Anthropic(base_url=f"{server.url}/s/s1", api_key="any")

        @anthropic.beta_tool
        def add(x: int) -> str:
            """Add."""
            return str(x + 1)

        service.says = [Says("", calls=[("add", {"x": 4})]), Says("It is 5.")]
        runner = client.beta.messages.tool_runner(model="claude", max_tokens=64, messages=HI, tools=[add])
        assert runner.until_done().content[0].text == "It is 5."
        client.close()
    assert [message["role"] for message in service.requests[1].messages] == ["user", "assistant", "tool"]
    assert service.requests[1].messages[2]["content"] == "5"


def test_errors(claude, service):
    claude = claude.with_options(max_retries=0)
    service.max_length = 5
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: "):
        create(claude)
    service.max_length = 4096
    service.raises = GatewayError(429, "no more", code="limit_reached")
    with pytest.raises(anthropic.RateLimitError) as caught:
        create(claude)
    assert caught.value.body["error"] == {"type": "rate_limit_error", "message": "no more"}
    assert caught.value.response.headers["x-should-retry"] == "false"
    service.raises = RuntimeError("secret")
    with pytest.raises(anthropic.InternalServerError) as caught:
        create(claude)
    assert caught.value.body["error"]["type"] == "api_error"
    with pytest.raises(anthropic.AuthenticationError):
        create(claude.with_options(base_url="http://127.0.0.1/s/x"))
