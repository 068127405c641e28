"""What clients post: what is read, what is let through, and what is refused by the name of its field."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from rlkit.gateway import GatewayError
from rlkit.gateway._requests import (
    UNSUPPORTED,
    ChatRequest,
    CompletionsRequest,
    MessagesRequest,
    ResponsesRequest,
    read_posted,
)
from tests.each import for_each
from tests.gateway.fake import FakeService

HI = [{"role": "user", "content": "Hi"}]
ADD = {"name": "add", "parameters": {"type": "object"}}
CHAT_ADD = {"type": "function", "function": ADD}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
APIS = {
    "chat": (ChatRequest, {"messages": HI}),
    "text": (CompletionsRequest, {"prompt": "x"}),
    "items": (ResponsesRequest, {"input": "Hi"}),
    "claude": (MessagesRequest, {"messages": HI, "max_tokens": 9}),
}


def read(api, **change):
    model, body = APIS[api]
    return read_posted(model, {"model": "m", **body, **change}, FakeService())


def messages(*said):
    return {"messages": list(said)}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def history(call, result="2"):
    """A conversation with this call and its result."""
    return messages(*HI, assistant(None, tool_calls=[call]), {"role": "tool", "tool_call_id": "c1", "content": result})


def called(arguments):
    return {**CALL, "function": {"name": "add", "arguments": arguments}}


def blocks(*content, role="user"):
    return messages({"role": role, "content": list(content)}, *HI)


def items(*given):
    return {"input": list(given)}


REFUSED = [
    ("chat", "messages", messages()),
    ("chat", "messages", {"messages": 5}),
    ("chat", "messages", {"messages": None}),
    ("chat", "messages[0]", messages("Hi")),
    ("chat", "messages[0].role", messages({"role": "robot", "content": "x"})),
    ("chat", "messages[0].content", messages({"role": "user"})),
    ("chat", "messages[0].content", messages({"role": "user", "content": None})),
    ("chat", "messages[0].content", messages({"role": "user", "content": 5})),
    ("chat", "messages[1].content", messages(*HI, assistant(None), *HI)),
    ("chat", "messages[0].content[0].type", messages({"role": "user", "content": [{"type": "image_url"}]})),
    ("chat", "messages[-1].role", messages(*HI, assistant("I"))),
    ("chat", "messages[1].tool_calls[0].function.arguments", history(called("[]"))),
    ("chat", "messages[1].tool_calls[0].function.arguments", history(called('{"x": NaN}'))),
    ("chat", "messages[1].tool_calls[0].function.arguments", history(called("not JSON"))),
    ("chat", "messages[1].tool_calls[0].function.name", history({"id": "c1", "function": {"name": 5}})),
    ("chat", "messages[2].content", history(CALL, {"sum": 2})),
    ("chat", "response_format.type", {"response_format": {"type": "grammar"}}),
    ("chat", "response_format", {"response_format": "json"}),
    ("chat", "temperature", {"temperature": 1e-7}),
    ("chat", "temperature", {"temperature": "1"}),
    ("chat", "temperature", {"temperature": True}),
    ("chat", "temperature", {"temperature": 1e999}),
    ("chat", "top_p", {"top_p": 0}),
    ("chat", "top_k", {"top_k": 0.5}),
    ("chat", "top_k", {"top_k": 2**31}),
    ("chat", "min_p", {"min_p": 2}),
    ("chat", "presence_penalty", {"presence_penalty": 3}),
    ("chat", "repetition_penalty", {"repetition_penalty": 0}),
    ("chat", "max_tokens", {"max_tokens": 0}),
    ("chat", "max_completion_tokens", {"max_completion_tokens": "5"}),
    ("chat", "n", {"n": 129}),
    ("chat", "n", {"n": 1.5}),
    ("chat", "n", {"n": True}),
    ("chat", "seed", {"seed": 2**64}),
    ("chat", "stream", {"stream": "yes"}),
    ("chat", "stream_options.include_usage", {"stream_options": {"include_usage": 1}}),
    ("chat", "stop[1]", {"stop": ["a", ""]}),
    ("chat", "stop", {"stop": [f"x{i}" for i in range(129)]}),
    ("chat", "stop_token_ids[0]", {"stop_token_ids": [-1]}),
    ("chat", "stop_token_ids", {"stop_token_ids": [259]}),
    ("chat", "logprobs", {"logprobs": 1}),
    ("chat", "top_logprobs", {"top_logprobs": 3}),
    ("chat", "top_logprobs", {"top_logprobs": 21, "logprobs": True}),
    ("chat", "tools", {"tools": [CHAT_ADD, CHAT_ADD]}),
    ("chat", "tools[0].type", {"tools": [{"type": "custom", "function": ADD}]}),
    ("chat", "tools[0].function", {"tools": [{"type": "function"}]}),
    ("chat", "tools[0].function.name", {"tools": [{"function": {"name": "a b"}}]}),
    ("chat", "tools[0].function.parameters", {"tools": [{"function": {"name": "a", "parameters": []}}]}),
    ("chat", "tool_choice", {"tool_choice": "required"}),
    ("chat", "tool_choice", {"tools": [CHAT_ADD], "tool_choice": "always"}),
    ("chat", "tool_choice", {"tools": [CHAT_ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}}),
    ("chat", "chat_template_kwargs", {"chat_template_kwargs": {"messages": []}}),
    ("chat", "echo", {"echo": True}),
    ("chat", "prompt_logprobs", {"prompt_logprobs": 0}),
    ("chat", "skip_special_tokens", {"skip_special_tokens": False}),
    ("text", "prompt", {"prompt": None}),
    ("text", "prompt", {"prompt": []}),
    ("text", "prompt", {"prompt": ""}),
    ("text", "prompt", {"prompt": 5}),
    ("text", "prompt", {"prompt": ["a", [5]]}),
    ("text", "prompt", {"prompt": [[5], "a"]}),
    ("text", "prompt", {"prompt": [[5], []]}),
    ("text", "prompt", {"prompt": ["a"] * 4097}),
    ("text", "prompt[1]", {"prompt": [5, "a"]}),
    ("text", "prompt[1]", {"prompt": [5, True]}),
    ("text", "prompt[0]", {"prompt": [5.0]}),
    ("text", "prompt[1][0]", {"prompt": [[5], [-1]]}),
    ("text", "logprobs", {"logprobs": 21}),
    ("text", "max_tokens", {"max_tokens": -1}),
    ("text", "response_format.type", {"response_format": {"schema": {}}}),
    ("items", "input", {"input": None}),
    ("items", "input", items()),
    ("items", "input", {**items(), "instructions": "Be brief."}),
    ("items", "input[0].content[0].type", items({"role": "user", "content": [{"type": "input_image"}]})),
    ("items", "input[0].content", items({"role": "user", "content": 5})),
    ("items", "input[0]", items({"role": "user"})),
    ("items", "input[0]", items({"content": "x"})),
    ("items", "input[0].type", items({"type": "item_reference", "id": "x"})),
    ("items", "input[0].arguments", items({"type": "function_call", "name": "f", "arguments": "1"}, *HI)),
    ("items", "input[0]", items({"type": "function_call_output", "output": "1"})),
    ("items", "input[-1].role", items(assistant("I"))),
    ("items", "text.format.type", {"text": {"format": {"type": "grammar"}}}),
    ("items", "tools[0].type", {"tools": [{"type": "web_search"}]}),
    ("items", "tool_choice", {"tool_choice": {"type": "web_search"}}),
    ("items", "prompt", {"prompt": {"id": "pmpt_1"}}),
    ("items", "max_output_tokens", {"max_output_tokens": 0}),
    ("items", "previous_response_id", {"previous_response_id": "resp_0"}),
    ("claude", "max_tokens", {"max_tokens": None}),
    ("claude", "max_tokens", {"max_tokens": 0}),
    ("claude", "messages", messages()),
    ("claude", "messages[0].role", messages({"role": "tool", "content": "x"})),
    ("claude", "messages[0].content", messages({"role": "user", "content": 5})),
    ("claude", "messages[0].content", messages({"role": "user", "content": None})),
    ("claude", "messages[0].content[0].type", blocks({"type": "image", "source": {}})),
    ("claude", "messages[0].content[0]", blocks({"type": "text"})),
    ("claude", "messages[0].content[0]", blocks({"type": "tool_result", "content": "2"})),
    ("claude", "messages[0]", blocks({"type": "tool_use", "name": "f"})),
    ("claude", "messages[0]", blocks({"type": "tool_result", "tool_use_id": "1"}, role="assistant")),
    (
        "claude",
        "messages[0].content[0].input",
        blocks({"type": "tool_use", "name": "f", "input": "1"}, role="assistant"),
    ),
    ("claude", "messages[-1].role", messages(*HI, assistant("I"))),
    ("claude", "stop_sequences[0]", {"stop_sequences": [""]}),
    ("claude", "system", {"system": 5}),
    ("claude", "thread", {"thread": {"id": "x"}}),
    ("claude", "tools[0].type", {"tools": [{"type": "bash_20250124", "name": "bash"}]}),
    ("claude", "tools[0].name", {"tools": [{"name": "a b"}]}),
    ("claude", "tool_choice", {"tools": [{"name": "add"}], "tool_choice": {"type": "tool", "name": "sub"}}),
    ("claude", "tool_choice", {"tool_choice": {"type": "any"}}),
    ("claude", "output_config.format.type", {"output_config": {"format": {"type": "grammar"}}}),
]


def test_refusals_name_the_field():
    """In ``param`` and at the beginning of the message, which says what was found or what is missing."""
    wrong = []
    for api, param, change in REFUSED:
        try:
            read(api, **change)
            wrong.append((api, param, "is let through"))
        except GatewayError as error:
            if (error.status, error.param) != (400, param) or not error.message.startswith(f"{param}: "):
                wrong.append((api, param, error.param, error.message))
    assert not wrong, "\n".join(map(str, wrong))


def test_what_would_change_the_answer_is_refused_by_name_in_every_api():
    wrong = []
    for (api, (model, _)), (name, neutral) in itertools.product(APIS.items(), UNSUPPORTED.items()):
        if name in model.model_fields:  # this API has it
            continue
        for harmless in (neutral, None, "", [], {}):
            read(api, **{name: harmless})
        try:
            read(api, **{name: {"a": 1}})
            wrong.append((api, name))
        except GatewayError as error:
            if error.param != name or not error.message.startswith(f"{name}: is not supported"):
                wrong.append((api, name, error.message))
    assert not wrong


@for_each("api", APIS)
def test_what_has_no_effect_is_let_through(api):
    known = {
        "parallel_tool_calls": True,
        "store": False,
        "user": "me",
        "metadata": {"a": "b"},
        "reasoning_effort": "low",
    }
    more = {
        "unheard_of": {"nested": [1]},
        "service_tier": "auto",
        "truncation": "auto",
        "thinking": {"type": "enabled"},
    }
    plain, odd = read(api).requests[0], read(api, **known, **more).requests[0]
    assert (odd.messages, odd.text, odd.sampling) == (plain.messages, plain.text, plain.sampling)


@for_each("api", APIS)
def test_how_a_completion_is_sampled(api):
    """Whole numbers may be written as 4.0, which JSON does not distinguish from 4."""
    limit = {"items": "max_output_tokens"}.get(api, "max_tokens")
    penalties = {"repetition_penalty": 1.5, "presence_penalty": -1, "frequency_penalty": 2}
    given = {"temperature": 0, "top_p": 0.5, "top_k": 4.0, "min_p": 0.25, **penalties, "ignore_eos": True}
    sampling = read(api, **given, **{limit: 7, "seed": -1}).requests[0].sampling
    assert {name: getattr(sampling, name) for name in given} == given
    assert (sampling.max_tokens, sampling.seed) == (7, 2**64 - 1)
    assert read(api, top_k=0).requests[0].sampling.top_k == -1


@for_each(
    ("given", "stop"),
    [
        ({}, ()),
        ({"stop": "a"}, ("a",)),
        ({"stop": ["b", "a", "b"]}, ("b", "a")),
        ({"stop_token_ids": [7, 9, 7]}, (7, 9)),
        ({"stop": "a", "stop_token_ids": [257, 65]}, ("a", "A")),  # of one kind; 257 ends a completion anyway
        ({"stop": "a", "stop_token_ids": [257], "ignore_eos": True}, ("a", "<|im_end|>")),
    ],
)
def test_stops(given, stop):
    assert FakeService.tokenizer.eos_ids == (257,)
    assert read("text", **given).requests[0].sampling.stop == stop


def test_a_wish_for_json_is_taken_in_every_api():
    """Whatever the field is called, and whatever the schema."""
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    fields = [("chat", "response_format"), ("text", "response_format"), ("items", "text.format")]
    fields += [("claude", "output_config.format"), ("claude", "output_format")]
    forms = [({"type": "json_object"}, True), (schema, True), ({"type": "text"}, False), ({}, False), (None, False)]
    for (api, field), (form, wanted) in itertools.product(fields, forms):
        name, _, inner = field.partition(".")
        request = read(api, **{name: {inner: form} if inner else form}).requests[0]
        assert request.sampling.json_field == (field if wanted else ""), (api, field, form)
        assert request.fails_when_cut == (api == "items")


@for_each(
    ("api", "tool", "choices"),
    [
        ("chat", CHAT_ADD, ["auto", "none", "required", {"type": "function", "function": {"name": "add"}}]),
        ("items", {"type": "function", **ADD}, ["auto", "none", "required", {"type": "function", "name": "add"}]),
        (
            "claude",
            {"name": "add", "input_schema": {"type": "object"}},
            [{"type": "auto"}, {"type": "none"}, {"type": "any"}, {"type": "tool", "name": "add"}],
        ),
    ],
)
def test_tools_and_their_choice(api, tool, choices):
    made = [read(api, tools=[tool], tool_choice=choice).requests[0] for choice in choices]
    assert [request.tool_choice for request in made] == ["auto", "none", "required", "add"]
    assert made[0].tools == (CHAT_ADD,)
    assert read(api, tools=[{**tool, "strict": True}]).requests[0].tool_choice == "auto"


@for_each("result", [None, "", [], [{"type": "text", "text": ""}]])
def test_a_tool_may_return_nothing(result):
    """null beside calls and in the role tool is the empty text; elsewhere it is refused."""
    said = read("chat", **history(CALL, result)).requests[0].messages
    assert [message["content"] for message in said] == ["Hi", "", ""]


def test_arguments_may_be_an_object_or_its_text():
    for arguments in ({"x": 1}, '{"x": 1}', ' {"x": 1.0} '):
        chat = read("chat", **history(called(arguments))).requests[0].messages[1]
        item = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": arguments}
        output = {"type": "function_call_output", "call_id": "c1", "output": "2"}
        response = read("items", **items(item, output)).requests[0].messages[0]
        block = {"type": "tool_use", "id": "c1", "name": "add", "input": arguments}
        claude = read("claude", **blocks(block, role="assistant")).requests[0].messages[0]
        found = [message["tool_calls"][0]["function"] for message in (chat, response, claude)]
        assert found == [{"name": "add", "arguments": {"x": 1}}] * 3
    assert read("chat", **history(called(""))).requests[0].messages[1]["tool_calls"][0]["function"]["arguments"] == {}


def test_calls_and_results_of_2023_are_read_from_a_history():
    said = messages(
        *HI,
        assistant(None, function_call={"name": "add", "arguments": "{}"}),
        {"role": "function", "name": "add", "content": "3"},
    )
    _, call, result = read("chat", **said).requests[0].messages
    assert call["tool_calls"][0]["id"] == result["tool_call_id"]
    assert (result["role"], result["name"]) == ("tool", "add")


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses", "messages"])
def test_refusals_are_written_in_the_form_of_the_api(http, path):
    got = asyncio.run(
        http.post(f"/v1/{path}", json={"model": "m", "temperature": "hot", "messages": HI, "prompt": "x"})
    )
    assert got.status_code == 400
    error = got.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith("temperature: got 'hot' (str)")
    assert path == "messages" or error["param"] == "temperature"
