"""The four APIs as their SDKs read them: every field, in its type, and streams that say the same as whole answers."""

from __future__ import annotations

import asyncio
import functools
import json

import anthropic
import openai
import pytest
from anthropic.types import Message, MessageTokensCount, ModelInfo, RawMessageStreamEvent
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from rlkit.gateway._app import Server
from tests.each import for_each
from tests.gateway.conftest import HI
from tests.gateway.fake import Says

ADD = {"name": "add", "parameters": {"type": "object", "properties": {}}}
TOOLS = {
    "chat": {"type": "function", "function": ADD},
    "items": {"type": "function", **ADD, "strict": False},
    "claude": {"name": "add", "input_schema": {"type": "object"}},
}
SAYS = {
    "text": Says("Hello there, Wörld!"),
    "cut": Says("Wör", length=True),
    "nothing": Says(""),
    "thought": Says("4", reasoning="2 + 2"),
    "stop": Says("one", stop="two"),
    "calls": Says("Let me see.", reasoning="Hm.", calls=[("add", {"x": [1, "é"]}), ("add", {})]),
    "call": Says(calls=[("add", {"x": 1})]),
}
SHAPES = [
    ("chat/completions", {"logprobs": True, "top_logprobs": 2, "n": 2}, ChatCompletion, ChatCompletionChunk),
    ("chat/completions", {"tools": [TOOLS["chat"]]}, ChatCompletion, ChatCompletionChunk),
    ("completions", {"prompt": ["a", "b"], "logprobs": 2}, Completion, Completion),
    ("responses", {"input": "Hi", "tools": [TOOLS["items"]]}, Response, ResponseStreamEvent),
    ("messages", {"max_tokens": 9, "tools": [TOOLS["claude"]]}, Message, RawMessageStreamEvent),
]
read_as = functools.cache(TypeAdapter)


def check(model, value):
    """Validate, and see that no field of the API was written that it does not have."""
    if model is Completion:  # its model knows no null in a stream, which the API sends
        for choice in value["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
    read = read_as(model).validate_python(value)
    assert json.loads(read.model_dump_json(exclude_unset=True)) == value


@for_each("said", SAYS)
@for_each(("path", "body", "whole", "event"), SHAPES)
def test_shapes(http, service, path, body, whole, event, said):
    service.says = [SAYS[said]]
    body = {"model": "m", "messages": HI, **body}
    check(whole, asyncio.run(http.post(f"/v1/{path}", json=body)).json())
    text = asyncio.run(http.post(f"/v1/{path}", json={**body, "stream": True})).text
    blocks = [dict(line.split(": ", 1) for line in block.split("\n")) for block in text.strip().split("\n\n")]
    events = [(block.get("event"), json.loads(block["data"])) for block in blocks if block["data"] != "[DONE]"]
    assert events
    for name, data in events:
        assert name is None or name == data["type"]
        if data.get("type") != "ping":  # which the SDK's models leave out
            check(event, data)


def twice(service, first, second):
    """What two calls give to which the service says the same, under the same ids."""
    given = []
    for call in (first, second):
        service.requests.clear()
        service.calls = 0
        given.append(call())
    return given


@for_each("said", SAYS)
def test_a_stream_of_chat_says_the_same(ask, service, said):
    service.says, more = [SAYS[said]], {"tools": [TOOLS["chat"]], "stop": ["x", "two"], "logprobs": True}
    more |= {"top_logprobs": 1, "extra_body": {"return_token_ids": True}}
    usage = {"stream_options": {"include_usage": True}}
    whole, chunks = twice(service, lambda: ask("chat", **more), lambda: ask("chat", stream=True, **more, **usage))
    choices, (expected,) = [choice for chunk in chunks for choice in chunk.choices], whole.choices
    for name in ("content", "reasoning_content"):
        joined = "".join(getattr(choice.delta, name, None) or "" for choice in choices)
        assert joined == (getattr(expected.message, name, None) or "")
    calls = [call for choice in choices for call in choice.delta.tool_calls or ()]
    expected_calls = [call.model_dump() for call in expected.message.tool_calls or ()]
    assert [call.model_dump() for call in calls] == [{"index": i, **call} for i, call in enumerate(expected_calls)]
    assert [x for each in choices if each.logprobs for x in each.logprobs.content] == expected.logprobs.content
    assert [x for each in choices for x in getattr(each, "token_ids", None) or ()] == expected.token_ids
    assert (expected.token_ids[-1] == 257) == (said not in ("cut", "stop"))
    prompt = asyncio.run(service.render(service.requests[0])).tolist()
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids == prompt
    assert choices[0].delta.role == "assistant"
    assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + [expected.finish_reason]
    assert choices[-1].stop_reason == expected.stop_reason == ("two" if said == "stop" else None)
    assert (chunks[-1].choices, chunks[-1].usage) == ([], whole.usage)
    assert {(chunk.id, chunk.usage) for chunk in chunks[:-1]} == {(whole.id, None)}


@for_each("said", SAYS)
def test_a_stream_of_responses_says_the_same(ask, service, said):
    service.says, more = [SAYS[said]], {"tools": [TOOLS["items"]], "include": ["message.output_text.logprobs"]}
    more |= {"top_logprobs": 1}
    whole, events = twice(service, lambda: ask("items", **more), lambda: ask("items", stream=True, **more))
    entries = [entry for item in whole.output if item.type == "message" for entry in item.content[0].logprobs]
    assert len(entries) == (whole.usage.output_tokens if said != "call" else 0)
    assert all(entry.top_logprobs for entry in entries)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == ("response.incomplete" if said == "cut" else "response.completed")
    assert events[-1].response == whole
    assert [event.item for event in events if event.type == "response.output_item.done"] == whole.output
    for i, item in enumerate(whole.output):
        own = [event for event in events if getattr(event, "output_index", None) == i]
        joined = "".join(event.delta for event in own if event.type.endswith(".delta"))
        assert joined == (item.arguments if item.type == "function_call" else item.content[0].text)


@for_each("said", SAYS)
def test_a_stream_of_messages_says_the_same(claude, ask, service, said):
    service.says, more = [SAYS[said]], {"tools": [TOOLS["claude"]], "stop_sequences": ["x", "two"]}
    names = []

    async def final():
        async with claude.messages.stream(model="m", max_tokens=64, messages=HI, **more) as stream:
            names.extend([event.type async for event in stream])
            return await stream.get_final_message()

    whole, got = twice(service, lambda: ask("claude", **more), lambda: asyncio.run(final()))
    added = {"content": {"__all__": {"parsed_output"}}}
    assert got.model_dump(exclude=added) == whole.model_dump()
    assert (names[0], names[-1]) == ("message_start", "message_stop")
    assert names.count("content_block_start") == names.count("content_block_stop") == len(whole.content)


def test_what_openai_s_sdk_accumulates(client, service):
    service.says = [SAYS["calls"]]

    async def final(manager):
        async with manager as stream:
            async for _ in stream:
                pass
            return await (stream.get_final_completion if manager is chat else stream.get_final_response)()

    chat = client.chat.completions.stream(model="m", messages=HI, tools=[TOOLS["chat"]])
    (message,) = (choice.message for choice in asyncio.run(final(chat)).choices)
    assert message.content == "Let me see."
    assert [json.loads(call.function.arguments) for call in message.tool_calls] == [{"x": [1, "é"]}, {}]
    got = asyncio.run(final(client.responses.stream(model="m", input="Hi", tools=[TOOLS["items"]])))
    assert [item.type for item in got.output] == ["reasoning", "message", "function_call", "function_call"]
    assert (got.output[0].content[0].text, got.output_text) == ("Hm.", "Let me see.")
    assert json.loads(got.output[2].arguments) == {"x": [1, "é"]}


def test_answers_of_chat(ask, service):
    got = ask("chat")
    assert (got.id, got.object) == ("chatcmpl-000000000000000000000001", "chat.completion")
    assert (got.created, got.model) == (1700000000, "m")
    assert (got.choices[0].message.content, got.choices[0].message.role) == ("Hello there, Wörld!", "assistant")
    assert got.choices[0].finish_reason == "stop"
    size = 1 + len("user\nHi") + 1 + len("\n") + 1 + len("assistant\n")
    used = {"prompt_tokens": size, "completion_tokens": 21, "total_tokens": size + 21}  # 20 bytes and the end token
    assert got.usage.model_dump(exclude_none=True) == used
    assert service.admitted == [("s1", "any")]
    service.says = [SAYS["thought"], SAYS["cut"]]
    assert [(c.index, c.message.content, c.finish_reason) for c in ask("chat", n=2).choices] == [
        (0, "Wör", "length"),
        (1, "4", "stop"),
    ]
    assert len(ask("chat", stream=True)) == 4  # the role, the thought, the text, each in one piece, and the end
    service.says = [SAYS["call"]]
    (choice,) = ask("chat", tools=[TOOLS["chat"]]).choices
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    service.says = [Says("aé")]
    (choice,) = ask("chat", logprobs=True, top_logprobs=2).choices
    assert [(each.token, each.bytes, each.logprob) for each in choice.logprobs.content] == [
        ("a", [97], -0.125),
        ("", None, -0.125),  # the first of two bytes
        ("é", [195, 169], -0.125),
        ("<|im_end|>", list(b"<|im_end|>"), -0.125),
    ]
    best = choice.logprobs.content[0].top_logprobs
    assert [(each.token, each.logprob) for each in best] == [("a", -0.125), ("!", -2.0)]


def test_answers_of_completions(ask, service):
    got = ask("text", prompt="Once")
    (choice,) = got.choices
    assert (choice.index, choice.text, choice.logprobs) == (0, "Hello there, Wörld!", None)
    assert (got.id, got.object, got.model) == ("cmpl-000000000000000000000001", "text_completion", "m")
    assert (got.usage.prompt_tokens, got.usage.completion_tokens, got.usage.total_tokens) == (4, 21, 25)
    service.says = [SAYS["stop"], SAYS["cut"], SAYS["call"]]
    for reason, stop in (("length", None), ("stop", None), ("stop", "two")):
        (choice,) = ask("text", stop=["two"]).choices
        assert (choice.finish_reason, choice.stop_reason) == (reason, stop)
    service.says = [Says("one"), Says("two")]
    for prompt, expected in ((["a", "b"], ["a", "b"]), ([5, 6], [[5, 6]]), ([[5, 6], [7]], [[5, 6], [7]])):
        service.requests.clear()
        got = ask("text", prompt=prompt, n=2)
        assert [each.text if each.prompt is None else each.prompt.tolist() for each in service.requests] == expected
        assert [choice.index for choice in got.choices] == list(range(2 * len(expected)))
        assert [choice.text for choice in got.choices[:2]] == ["one", "two"]
        chunks = ask("text", prompt=prompt, n=2, stream=True)
        assert {chunk.choices[0].index for chunk in chunks} == set(range(2 * len(expected)))


@for_each("echo", [False, True])
def test_a_stream_of_completions_says_the_same(ask, echo):
    more = {"prompt": "Önce", "logprobs": 2, "echo": echo, "extra_body": {"return_token_ids": True}}
    (whole,) = ask("text", **more).choices
    chunks = ask("text", **more, stream=True, stream_options={"include_usage": True})
    text, end = (choice for chunk in chunks for choice in chunk.choices)
    assert (text.text, text.logprobs, end.text) == (whole.text, whole.logprobs, "")
    assert text.prompt_token_ids == whole.prompt_token_ids == list("Önce".encode())
    assert text.token_ids == whole.token_ids == [*"Hello there, Wörld!".encode(), 257]
    assert (text.finish_reason, end.finish_reason, chunks[-1].usage.completion_tokens) == (None, "stop", 21)


def test_a_scored_prompt(ask, service):
    """As lm-eval asks: the prompt's logprobs, with or without one token after it; and as vLLM has them."""
    service.says = [Says("x", length=True)]
    got = ask("text", prompt=[65, 195, 169], echo=True, logprobs=1, max_tokens=0)
    (choice,) = got.choices
    assert (choice.text, choice.finish_reason, got.usage.completion_tokens) == ("Aé", "length", 0)
    assert choice.logprobs.tokens == ["A", "", "é"]
    assert choice.logprobs.token_logprobs == [None, -0.125, -0.25]
    assert choice.logprobs.text_offset == [0, 1, 1]
    assert choice.logprobs.top_logprobs[:2] == [None, {"�": -0.125, "A": -0.25, "B": -1.5}]  # the token itself is there
    (choice,) = ask("text", prompt="AB", echo=True, logprobs=1, max_tokens=1).choices
    assert (choice.text, choice.logprobs.token_logprobs) == ("ABx", [None, -0.125, -0.125])
    assert choice.logprobs.top_logprobs[2] == {"x": -0.125, "!": -2.0}
    (choice,) = ask("text", prompt="AC", extra_body={"prompt_logprobs": 2}).choices
    assert choice.prompt_logprobs == [
        None,
        {
            "67": {"logprob": -0.125, "rank": None, "decoded_token": "C"},
            "65": {"logprob": -0.25, "rank": 1, "decoded_token": "A"},
            "66": {"logprob": -1.5, "rank": 2, "decoded_token": "B"},
        },
    ]


def test_answers_of_responses(ask, service):
    given = {"instructions": "Be brief.", "max_output_tokens": 50, "temperature": 0.5, "metadata": {"a": "b"}}
    got = ask("items", **given)
    assert (got.id, got.object) == ("resp_000000000000000000000001", "response")
    assert (got.status, got.model, got.output_text) == ("completed", "m", "Hello there, Wörld!")
    assert {name: getattr(got, name) for name in given} == given
    assert (got.usage.output_tokens, got.usage.output_tokens_details.reasoning_tokens) == (21, 0)
    assert got.usage.total_tokens == got.usage.input_tokens + 21
    service.says = [Says("a", calls=[("add", {})])]
    assert [event.type.removeprefix("response.") for event in ask("items", tools=[TOOLS["items"]], stream=True)] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done"),
        "output_item.done",
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]


def test_previous_responses(ask, service):
    """What an agent gets and gives back is one turn, whether it sends that or the response's id."""
    service.says = [SAYS["calls"]]
    first = ask("items", tools=[TOOLS["items"]], instructions="Be brief.")
    calls = [item.call_id for item in first.output if item.type == "function_call"]
    results = [{"type": "function_call_output", "call_id": each, "output": "1"} for each in calls]
    items = [{"role": "user", "content": "Hi"}, *(item.model_dump(exclude_none=True) for item in first.output)]
    ask("items", input=[*items, *results])
    messages = service.requests[1].messages
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool"]
    assert messages[1]["reasoning_content"] == "Hm."
    second = ask("items", input=results, previous_response_id=first.id, instructions="Be long.")
    assert service.requests[2].messages == [{"role": "system", "content": "Be long."}, *messages]
    assert second.previous_response_id == first.id
    kept = list(service.responses)
    ask("items", store=False, previous_response_id=second.id, stream=True)
    assert list(service.responses) == kept
    service.responses = None  # as outside of sessions
    for name in (first.id, "resp_0"):
        with pytest.raises(openai.BadRequestError) as caught:
            ask("items", previous_response_id=name)
        assert caught.value.code == "previous_response_not_found"
    assert ask("items").store is False


def test_answers_of_messages(ask, http, service):
    got = ask("claude")
    assert [(block.type, block.text) for block in got.content] == [("text", "Hello there, Wörld!")]
    assert (got.id, got.type, got.role, got.model) == ("msg_000000000000000000000001", "message", "assistant", "m")
    assert (got.usage.output_tokens, service.admitted) == (21, [("s1", "any")])
    for said, reason, stop in (
        ("text", "end_turn", None),
        ("cut", "max_tokens", None),
        ("stop", "stop_sequence", "two"),
        ("calls", "tool_use", None),
    ):
        service.says = [SAYS[said]]
        got = ask("claude", tools=[TOOLS["claude"]], stop_sequences=["x", "two"])
        assert (got.stop_reason, got.stop_sequence) == (reason, stop)
    assert [block.type for block in got.content] == ["thinking", "text", "tool_use", "tool_use"]
    service.says, service.calls = [Says("a", calls=[("add", {"x": 1})])], 0
    body = {"model": "m", "max_tokens": 64, "messages": HI, "stream": True, "tools": [TOOLS["claude"]]}
    got = asyncio.run(http.post("/v1/messages", json=body))
    data = [json.loads(block.partition("data: ")[2]) for block in got.text.strip().split("\n\n")]
    assert [event["type"] for event in data] == [
        *("message_start", "ping", "content_block_start", "content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_stop", "message_delta", "message_stop"),
    ]
    assert (data[0]["message"]["content"], data[0]["message"]["stop_reason"]) == ([], None)
    assert data[2] == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    assert data[3] == {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}}
    assert data[5]["content_block"] == {"type": "tool_use", "id": "call00000", "name": "add", "input": {}}
    assert data[6]["delta"] == {"type": "input_json_delta", "partial_json": '{"x": 1}'}
    assert data[8]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def test_the_tool_runner_sends_all_messages_where_threads_are_not_kept(service):
    """It would continue by the id of a message, and is told that it cannot in the way that it understands."""

    @anthropic.beta_tool
    def add(x: int) -> str:
        """Add."""
        return str(x + 1)

    service.says = [Says("", calls=[("add", {"x": 4})]), Says("It is 5.")]
    with Server(service) as server, anthropic.Anthropic(base_url=f"{server.url}/s/s1", api_key="any") as client:
        runner = client.beta.messages.tool_runner(model="m", max_tokens=64, messages=HI, tools=[add])
        assert runner.until_done().content[0].text == "It is 5."
    assert [(m["role"], m["content"]) for m in service.requests[1].messages[1:]] == [("assistant", ""), ("tool", "5")]


def test_models_and_counts(client, claude, http, service):
    for sdk, model, missing, headers in (
        (client, Model, openai.NotFoundError, {}),
        (claude, ModelInfo, anthropic.NotFoundError, {"anthropic-version": "2023-06-01"}),
    ):
        card = asyncio.run(http.get("/v1/models/policy", headers=headers)).json()
        check(model, card)

        async def listed(models=sdk.models):
            return (await models.list()).data

        assert [json.loads(found.model_dump_json(exclude_unset=True)) for found in asyncio.run(listed())] == [card]
        assert card["id"] == "policy"
        with pytest.raises(missing):
            asyncio.run(sdk.models.retrieve("gpt-4"))
    body = {"messages": HI, "system": "Be brief."}
    counted = asyncio.run(http.post("/v1/messages/count_tokens", json=body)).json()
    check(MessageTokensCount, counted)
    messages = [{"role": "system", "content": "Be brief."}, *HI]
    assert counted == {"input_tokens": service.tokenizer.apply_chat_template(messages).size}
    assert not service.requests
