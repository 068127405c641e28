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

from rlkit.gateway._app import Server, dump_json
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
USAGE = {"stream_options": {"include_usage": True}}
TOKENS = {"return_token_ids": True, "stop": ["x", "two"]}
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
SHAPES = [
    ("chat/completions", {"logprobs": True, "top_logprobs": 2, "n": 2}, ChatCompletion, ChatCompletionChunk),
    ("chat/completions", {"tools": [TOOLS["chat"]], **TOKENS}, ChatCompletion, ChatCompletionChunk),
    ("completions", {"prompt": ["Ö", "b"], "logprobs": 2, **TOKENS}, Completion, Completion),
    ("completions", {"prompt": "Ö", "logprobs": 0, "echo": True}, None, None),  # the SDK knows no null there
    ("responses", {"input": "Hi", "tools": [TOOLS["items"]]}, Response, ResponseStreamEvent),
    ("responses", {"input": "Hi", **LOGPROBS}, None, None),  # nor the bytes of tokens
    ("messages", {"max_tokens": 9, "tools": [TOOLS["claude"]]}, Message, RawMessageStreamEvent),
]
read_as = functools.cache(TypeAdapter)


def check(model, value):
    """Validate, and see that no field of the API was written that it does not have."""
    if model is None:
        return
    if model is Completion:  # its model knows no null in a stream, which the API sends
        choices = [{**choice, "finish_reason": choice["finish_reason"] or "stop"} for choice in value["choices"]]
        value = {**value, "choices": choices}
    read = read_as(model).validate_python(value)
    assert json.loads(read.model_dump_json(exclude_unset=True)) == value


def join_chat(events):
    """The whole answer in the chunks of chat completions."""
    *chunks, last = events
    whole = {**last, "object": "chat.completion", "choices": []}
    assert all(chunk["usage"] is None for chunk in chunks)
    for (choice,) in (chunk["choices"] for chunk in chunks):
        if "role" in choice["delta"]:
            whole["choices"].append(
                {"logprobs": None, "message": {"refusal": None, "annotations": [], "content": None}}
            )
        joined = whole["choices"][choice["index"]]
        logprobs = choice.pop("logprobs", None)
        joined["logprobs"] = logprobs or joined["logprobs"]
        for name, value in choice.pop("delta").items():
            calls = [{k: v for k, v in call.items() if k != "index"} for call in value] if name == "tool_calls" else 0
            known = joined["message"].get(name)
            joined["message"][name] = (known or []) + calls if calls else (known or "") + value
        joined.update(choice)
    for message in (choice["message"] for choice in whole["choices"]):
        message["content"] = message["content"] or (None if "tool_calls" in message else "")
    return whole | {name: value for chunk in chunks for name, value in chunk.items() if name == "prompt_token_ids"}


def join_text(events):
    """The whole answer in the chunks of completions, of which each choice has one, and its end."""
    choices = [event["choices"][0] for event in events[:-1]]
    ends = [{"finish_reason": end["finish_reason"], "stop_reason": end["stop_reason"]} for end in choices[1::2]]
    assert all(choice["text"] == "" and choice["logprobs"] is None for choice in choices[1::2])
    return {**events[-1], "choices": [each | end for each, end in zip(choices[::2], ends, strict=True)]}


def join_items(events):
    """The response at the end, whose items are those that came before."""
    assert [event.pop("sequence_number") for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    whole = events[-1]["response"]
    assert events[-1]["type"] == f"response.{whole['status']}"
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == whole["output"]
    for i, item in enumerate(whole["output"]):
        deltas = [each["delta"] for each in events if each.get("output_index") == i and each["type"].endswith(".delta")]
        assert deltas == [item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]]
    return whole


def join_claude(events):
    """The message that the deltas make."""
    assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop")
    whole = {**events[0]["message"], **events[-2]["delta"], "usage": events[-2]["usage"]}
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(whole["content"])
            whole["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            (_, name), (_, text) = ((k, v) for k, v in event["delta"].items())
            block = whole["content"][event["index"]]
            name = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}.get(name)
            block.update({name: block[name] + text} if name else {"input": json.loads(text)})
    return whole


JOIN = {"chat/completions": join_chat, "completions": join_text, "responses": join_items, "messages": join_claude}


@for_each("said", SAYS)
@for_each(("path", "body", "whole", "event"), SHAPES)
def test_shapes(http, service, path, body, whole, event, said):
    """And a stream has what the whole answer has."""
    service.says, body = [SAYS[said]], {"model": "m", "messages": HI, **body}
    service.begin()
    answer = asyncio.run(http.post(f"/v1/{path}", json=body)).json()
    service.begin()
    text = asyncio.run(http.post(f"/v1/{path}", json={**body, "stream": True, **USAGE})).text
    blocks = [dict(line.split(": ", 1) for line in block.split("\n")) for block in text.strip().split("\n\n")]
    events = [(block.get("event"), json.loads(block["data"])) for block in blocks if block["data"] != "[DONE]"]
    for name, data in events:
        assert name is None or name == data["type"]
        if data.get("type") != "ping":  # which the SDK's models leave out
            check(event, data)
    check(whole, answer)
    assert JOIN[path]([data for _, data in events]) == answer


def test_what_the_sdks_accumulate(client, claude, service):
    service.says = [SAYS["calls"]]

    async def final(manager, name):
        async with manager as stream:
            return await getattr(stream, name)()

    chat = client.chat.completions.stream(model="m", messages=HI, tools=[TOOLS["chat"]])
    (choice,) = asyncio.run(final(chat, "get_final_completion")).choices
    arguments = [json.loads(call.function.arguments) for call in choice.message.tool_calls]
    assert (choice.message.content, arguments) == ("Let me see.", [{"x": [1, "é"]}, {}])
    items = client.responses.stream(model="m", input="Hi", tools=[TOOLS["items"]])
    got = asyncio.run(final(items, "get_final_response"))
    assert [item.type for item in got.output] == ["reasoning", "message", "function_call", "function_call"]
    assert (got.output_text, json.loads(got.output[2].arguments)) == ("Let me see.", {"x": [1, "é"]})
    messages = claude.messages.stream(model="m", max_tokens=9, messages=HI, tools=[TOOLS["claude"]])
    thought, *_, call = asyncio.run(final(messages, "get_final_message")).content
    assert (thought.thinking, call.input) == ("Hm.", {})


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
    found = [(c.index, c.message.content, c.finish_reason) for c in ask("chat", n=2).choices]
    assert found == [(0, "Wör", "length"), (1, "4", "stop")]
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
    for said, reason, stop in (("cut", "length", None), ("call", "stop", None), ("stop", "stop", "two")):
        service.says = [SAYS[said]]
        (choice,) = ask("text", stop=["two"]).choices
        assert (choice.finish_reason, choice.stop_reason) == (reason, stop)
    service.says = [Says("one"), Says("two")]
    for prompt, expected in ((["a", "b"], ["a", "b"]), ([5, 6], [[5, 6]]), ([[5, 6], [7]], [[5, 6], [7]])):
        service.begin()
        choices = ask("text", prompt=prompt, n=2).choices
        assert [each.text if each.prompt is None else each.prompt.tolist() for each in service.requests] == expected
        assert [choice.index for choice in choices] == list(range(2 * len(expected)))
        assert [choice.text for choice in choices[:2]] == ["one", "two"]


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
    got = ask("items", **given, **LOGPROBS)
    entries = got.output[0].content[0].logprobs
    assert [(bool(entry.top_logprobs), entry.logprob) for entry in entries] == [(True, -0.125)] * 21
    assert (got.id, got.object) == ("resp_000000000000000000000001", "response")
    assert (got.status, got.model, got.output_text) == ("completed", "m", "Hello there, Wörld!")
    assert {name: getattr(got, name) for name in given} == given
    assert (got.usage.output_tokens, got.usage.output_tokens_details.reasoning_tokens) == (21, 0)
    assert got.usage.total_tokens == got.usage.input_tokens + 21
    assert got.usage.input_tokens_details.to_dict() == {"cached_tokens": 0, "cache_write_tokens": 0}
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
    for said, reason in {"text": "end_turn", "cut": "max_tokens", "stop": "stop_sequence", "calls": "tool_use"}.items():
        service.says = [SAYS[said]]
        got = ask("claude", tools=[TOOLS["claude"]], stop_sequences=["x", "two"])
        assert (got.stop_reason, got.stop_sequence) == (reason, "two" if said == "stop" else None)
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
    assert data[6]["delta"] == {"type": "input_json_delta", "partial_json": '{"x": 1}'}
    assert data[8]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def test_half_a_surrogate_pair_in_a_call_is_told_in_ascii(ask, service):
    """JSON can name it, and UTF-8 cannot have it. A number that JSON does not have is never written."""
    service.says = [Says(calls=[("add", {"x": "\ud800é"})])]
    (choice,) = ask("chat", tools=[TOOLS["chat"]]).choices
    _, delta, _ = (chunk.choices[0].delta for chunk in ask("chat", tools=[TOOLS["chat"]], stream=True))
    for call in (*choice.message.tool_calls, *delta.tool_calls):
        assert call.function.arguments == '{"x": "\\ud800\\u00e9"}'
    assert ask("claude", tools=[TOOLS["claude"]]).content[0].input == {"x": "\ud800é"}
    with pytest.raises(ValueError, match="JSON compliant"):
        dump_json({"x": float("nan")})


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
    answered = asyncio.run(http.post("/v1/messages/count_tokens", json=body))
    check(MessageTokensCount, counted := answered.json())
    messages = [{"role": "system", "content": "Be brief."}, *HI]
    assert answered.status_code == 200
    assert counted == {"input_tokens": service.tokenizer.apply_chat_template(messages).size}
    assert not service.requests
