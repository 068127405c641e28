"""Chat completions, asked by OpenAI's SDK and by hand."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.gateway.fake import Says

ADD = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}},
}
HI = [{"role": "user", "content": "Hi"}]


def run(coroutine):
    return asyncio.run(coroutine)


async def streamed(client, **options):
    return [chunk async for chunk in await client.chat.completions.create(model="m", stream=True, **options)]


def joined(chunks, index=0, field="content"):
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(getattr(choice.delta, field, None) or "" for choice in choices)


def test_an_answer(client, service):
    got = run(client.chat.completions.create(model="m", messages=HI, max_tokens=32, temperature=0.5, seed=-1, stop="Z"))
    assert got.choices[0].message.content == "Hello there, Wörld!"
    assert got.choices[0].message.role == "assistant"
    assert got.choices[0].finish_reason == "stop"
    assert got.id == "chatcmpl-000000000000000000000001"
    assert (got.object, got.created, got.model) == ("chat.completion", 1700000000, "m")
    request = service.requests[0]
    assert got.usage.prompt_tokens == len("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n") - 12 * 2 - 10 + 3
    assert got.usage.completion_tokens == 21  # 20 bytes and the end token
    assert got.usage.total_tokens == got.usage.prompt_tokens + 21
    assert request.sampling.max_tokens == 32
    assert request.sampling.temperature == 0.5
    assert request.sampling.seed == 2**64 - 1
    assert request.sampling.stop == ("Z",)
    assert request.messages == HI
    assert request.top_logprobs is None
    assert service.admitted == [("s1", "any")]


def test_a_stream_says_the_same(client, service):
    chunks = run(streamed(client, messages=HI, stream_options={"include_usage": True}))
    assert joined(chunks) == "Hello there, Wörld!"
    assert len(chunks) == 4  # the role, the text in one piece, the end, and the usage
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 21
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_several_answers(client, service):
    service.says = [Says("one"), Says("two", length=True)]
    got = run(client.chat.completions.create(model="m", messages=HI, n=2))
    assert [(c.index, c.message.content, c.finish_reason) for c in got.choices] == [
        (0, "one", "stop"),
        (1, "two", "length"),
    ]
    chunks = run(streamed(client, messages=HI, n=2))
    assert sorted([joined(chunks, 0), joined(chunks, 1)]) == ["one", "two"]


@pytest.mark.parametrize("stream", [False, True])
def test_tools(client, service, stream):
    service.says = [Says("Let me.", calls=[("add", {"x": [1, "é"]}), ("add", {})])]
    options = {"messages": HI, "tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "add"}}}
    if stream:

        async def collect():
            async with client.chat.completions.stream(model="m", **options) as events:
                return await events.get_final_completion()

        got = run(collect())
    else:
        got = run(client.chat.completions.create(model="m", **options))
    message = got.choices[0].message
    assert message.content == "Let me."
    assert [(c.id, c.type, c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls] == [
        ("call00000", "function", "add", {"x": [1, "é"]}),
        ("call00001", "function", "add", {}),
    ]
    assert got.choices[0].finish_reason == "tool_calls"
    assert service.requests[0].tool_choice == "add"
    assert service.requests[0].tools == (ADD,)
    service.says = [Says(calls=[("add", {})])]
    got = run(client.chat.completions.create(model="m", messages=HI, tools=[ADD]))
    assert got.choices[0].message.content is None  # as the API has it where there is nothing but a call


def test_logprobs(client, service):
    service.says = [Says("aé")]
    options = {"messages": HI, "logprobs": True, "top_logprobs": 2}
    entries = run(client.chat.completions.create(model="m", **options)).choices[0].logprobs.content
    assert [(e.token, e.bytes, e.logprob) for e in entries] == [
        ("a", [97], -0.125),
        ("", None, -0.125),  # the first of two bytes
        ("é", [195, 169], -0.125),
        ("<|im_end|>", list(b"<|im_end|>"), -0.125),
    ]
    assert [(t.token, t.logprob) for t in entries[0].top_logprobs] == [("a", -0.125), ("!", -2.0)]
    chunks = run(streamed(client, **options))
    parts = [choice.logprobs.content for chunk in chunks for choice in chunk.choices if choice.logprobs]
    assert [e for part in parts for e in part] == entries


@pytest.mark.parametrize("said", [Says("Wörld, how are you?"), Says("a", reasoning="b", calls=[("add", {})]), Says("")])
def test_token_ids(client, service, said):
    """As vLLM returns them: every sampled token once, streamed or not."""
    service.says = [said]
    options = {"messages": HI, "extra_body": {"return_token_ids": True}}
    got = run(client.chat.completions.create(model="m", **options))
    tokens = got.choices[0].token_ids
    assert got.prompt_token_ids == run(service.render(service.requests[0])).tolist()
    assert tokens[-1] == 257
    chunks = run(streamed(client, **options))
    assert chunks[0].prompt_token_ids == got.prompt_token_ids
    ids = [getattr(choice, "token_ids", None) or [] for chunk in chunks for choice in chunk.choices]
    assert [token for part in ids for token in part] == tokens


def test_reasoning_and_the_stop_that_was_met(client, service):
    service.says = [Says("4", reasoning="2 + 2", stop="two")]
    (choice,) = run(client.chat.completions.create(model="m", messages=HI, stop=["x", "two"])).choices
    assert (choice.message.content, choice.message.reasoning_content, choice.stop_reason) == ("4", "2 + 2", "two")
    chunks = run(streamed(client, messages=HI, stop=["x", "two"]))
    assert (joined(chunks), joined(chunks, field="reasoning_content")) == ("4", "2 + 2")
    assert chunks[-1].choices[0].stop_reason == "two"


def test_template_settings(client, service):
    extra = {"chat_template_kwargs": {"enable_thinking": False}, "top_k": 0, "min_p": 0.5, "stop_token_ids": [7]}
    run(client.chat.completions.create(model="m", messages=HI, reasoning_effort="low", extra_body=extra))
    request = service.requests[0]
    assert request.template == {"enable_thinking": False}
    assert (request.sampling.top_k, request.sampling.min_p, request.sampling.stop) == (-1, 0.5, (7,))
