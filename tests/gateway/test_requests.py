"""What clients post: what is read, what is let through, and what is refused by the name of its field."""

from __future__ import annotations

import itertools
import json

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


def typed(kind, **fields):
    return {"type": kind, **fields}


NAMED_SUB = {"type": "function", "function": {"name": "sub"}}
REFUSED = {  # by API: fields, each with values for which it is named
    "chat": """messages [] 5 null; temperature 1e-7 "1" true 1e999; top_p 0; top_k 0.5 2147483648; min_p 2;
        presence_penalty 3; repetition_penalty 0; max_tokens 0; max_completion_tokens "5"; n 1025 1.5 true;
        seed 18446744073709551616; stream "yes"; stop_token_ids [259]; logprobs 1; top_logprobs 3 21; echo true;
        tool_choice "required" "always"; chat_template_kwargs {"messages":[]}; response_format "json";
        prompt_logprobs 0; skip_special_tokens false""",
    "text": """prompt null [] "" 5 ["a",[5]] [[5],"a"] [[5],[]]; logprobs 21; max_tokens -1""",
    "items": """input null []; tool_choice {"type":"web_search"}; prompt {"id":"pmpt_1"}; max_output_tokens 0;
        previous_response_id "resp_0" """,
    "claude": """max_tokens null 0; messages []; system 5; thread {"id":"x"}; tool_choice {"type":"any"}""",
}
DEEP = '{"a": ' * 800 + "1" + "}" * 800
REFUSED_INSIDE = [  # the same with the name of the part
    ("chat", "messages[0].role", messages({"role": "robot", "content": "x"})),
    ("chat", "messages[1].content", messages(*HI, assistant(None), *HI)),
    ("chat", "messages[-1].role", messages(*HI, assistant("I"))),
    ("chat", "messages[1].tool_calls[0].function.arguments", history(called('{"x": NaN}'))),
    ("chat", "messages[1].tool_calls[0].function.arguments", history(called("not JSON"))),
    ("chat", "messages[1].tool_calls[0].function.arguments", history(called(DEEP))),
    ("chat", "messages[0]", messages({**HI[0], "more": json.loads(DEEP)})),
    ("items", "input[0].arguments", items(typed("function_call", name="f", arguments=DEEP), *HI)),
    (
        "claude",
        "messages[0].content[0].input",
        blocks(typed("tool_use", name="f", input=json.loads(DEEP)), role="assistant"),
    ),
    ("chat", "messages[2].content", history(CALL, {"sum": 2})),
    ("chat", "stop", {"stop": [f"x{i}" for i in range(129)]}),
    ("chat", "tools", {"tools": [CHAT_ADD, CHAT_ADD]}),
    ("text", "prompt", {"prompt": ["a"] * 4097}),
    ("chat", "response_format.type", {"response_format": typed("grammar")}),
    ("chat", "stream_options.include_usage", {"stream_options": {"include_usage": 1}}),
    ("chat", "stop[1]", {"stop": ["a", ""]}),
    ("chat", "stop_token_ids[0]", {"stop_token_ids": [-1]}),
    ("chat", "top_logprobs", {"top_logprobs": 21, "logprobs": True}),
    ("chat", "tools[0].type", {"tools": [typed("custom", function=ADD)]}),
    ("chat", "tools[0].function", {"tools": [typed("function")]}),
    ("chat", "tools[0].function.name", {"tools": [{"function": {"name": "a b"}}]}),
    ("chat", "tools[0].function.parameters", {"tools": [{"function": {"name": "a", "parameters": []}}]}),
    ("chat", "tool_choice", {"tools": [CHAT_ADD], "tool_choice": "always"}),
    ("chat", "tool_choice", {"tools": [CHAT_ADD], "tool_choice": NAMED_SUB}),
    ("text", "prompt[1]", {"prompt": [5, "a"]}),
    ("text", "prompt[1]", {"prompt": [5, True]}),
    ("text", "prompt[0]", {"prompt": [5.0]}),
    ("text", "prompt[1][0]", {"prompt": [[5], [-1]]}),
    ("text", "response_format.type", {"response_format": {"schema": {}}}),
    ("items", "input[0].content[0].type", items({"role": "user", "content": [typed("input_image")]})),
    ("items", "input[0]", items({"role": "user"})),
    ("items", "input[0]", items({"content": "x"})),
    ("items", "input[0].type", items(typed("item_reference", id="x"))),
    ("items", "input[0].arguments", items(typed("function_call", name="f", arguments="1"), *HI)),
    ("items", "input[0]", items(typed("function_call_output", output="1"))),
    ("items", "input[-1].role", items(assistant("I"))),
    ("items", "text.format.type", {"text": {"format": typed("grammar")}}),
    ("items", "tools[0].type", {"tools": [typed("web_search")]}),
    ("claude", "messages[0].role", messages({"role": "tool", "content": "x"})),
    ("claude", "messages[0].content", messages({"role": "user", "content": 5})),
    ("claude", "messages[0].content[0].type", blocks(typed("image", source={}))),
    ("claude", "messages[0].content[0]", blocks(typed("text"))),
    ("claude", "messages[0].content[0]", blocks(typed("tool_result", content="2"))),
    ("claude", "messages[0]", blocks(typed("tool_use", name="f"))),
    ("claude", "messages[0]", blocks(typed("tool_result", tool_use_id="1"), role="assistant")),
    ("claude", "messages[0].content[0].input", blocks(typed("tool_use", name="f", input="1"), role="assistant")),
    ("claude", "messages[-1].role", messages(*HI, assistant("I"))),
    ("claude", "stop_sequences[0]", {"stop_sequences": [""]}),
    ("claude", "tools[0].type", {"tools": [typed("bash_20250124", name="bash")]}),
    ("claude", "tools[0].name", {"tools": [{"name": "a b"}]}),
    ("claude", "tool_choice", {"tools": [{"name": "add"}], "tool_choice": typed("tool", name="sub")}),
    ("claude", "output_config.format.type", {"output_config": {"format": typed("grammar")}}),
]


def test_refusals_name_the_field():
    """In ``param`` and at the beginning of the message, which says what was found or what is missing."""
    wrong, cases = [], [*REFUSED_INSIDE]
    for api, field in ((api, field.split()) for api, fields in REFUSED.items() for field in fields.split(";")):
        cases += [(api, field[0], {field[0]: json.loads(value)}) for value in field[1:]]
    for api, param, change in cases:
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
    odd = {"parallel_tool_calls": True, "store": False, "user": "me", "metadata": {"a": "b"}, "service_tier": "auto"}
    odd |= {"reasoning_effort": "low", "unheard_of": {"nested": [1]}, "thinking": {"type": "enabled"}}
    plain, odd = read(api).requests[0], read(api, **odd).requests[0]
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
    for seed in (-(2**63), 5, 2**64 - 1):
        assert read(api, seed=seed).requests[0].sampling.seed == seed % 2**64


def test_variables_of_the_template_are_passed_on():
    variables = {"enable_thinking": False}
    assert read("chat", chat_template_kwargs=variables).requests[0].template == variables


def test_stops():
    assert FakeService.tokenizer.eos_ids == (257,)
    for given, stop in (
        ({}, ()),
        ({"stop": "a"}, ("a",)),
        ({"stop": ["b", "a", "b"]}, ("b", "a")),
        ({"stop_token_ids": [7, 9, 7]}, (7, 9)),
        ({"stop": "a", "stop_token_ids": [257, 65]}, ("a", "A")),  # of one kind; 257 ends a completion anyway
        ({"stop": "a", "stop_token_ids": [257], "ignore_eos": True}, ("a", "<|im_end|>")),
    ):
        assert read("text", **given).requests[0].sampling.stop == stop, given


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


def test_tools_and_their_choice():
    words, item = ["auto", "none", "required"], typed("function", name="add")
    kinds = [*map(typed, ("auto", "none", "any")), typed("tool", name="add")]
    for api, tool, choices in (
        ("chat", CHAT_ADD, [*words, typed("function", function={"name": "add"})]),
        ("items", {**item, **ADD}, [*words, item]),
        ("claude", {"name": "add", "input_schema": ADD["parameters"]}, kinds),
    ):
        made = [read(api, tools=[tool], tool_choice=choice).requests[0] for choice in choices]
        assert [request.tool_choice for request in made] == [*words, "add"]
        assert made[0].tools == (CHAT_ADD,)
        assert read(api, tools=[{**tool, "strict": True}]).requests[0].tool_choice == "auto"


def test_a_conversation_of_any_api():
    """Results that come together, reasoning, blocks of text, and a tool that returned nothing."""
    args = {"c1": {"x": 1}, "c2": {}, "c3": {}}
    call = {name: {**CALL, "id": name, "function": {"name": "add", "arguments": args[name]}} for name in args}
    turn = assistant("Let me.", reasoning_content="Hm.", tool_calls=[call["c1"], call["c2"]])
    results = [{"role": "tool", "tool_call_id": f"c{i}", "content": text} for i, text in ((1, "2"), (2, ""), (3, "4"))]
    system, user = {"role": "system", "content": "Be\nbrief."}, {"role": "user", "content": "1 + 1?"}
    expected = [system, user, turn, *results[:2]]
    given = items(
        {**system, "role": "developer"},
        {"role": "user", "content": [typed("input_text", text="1 + 1?")]},
        typed("reasoning", id="rs_1", summary=[], content=[typed("reasoning_text", text="Hm.")]),
        typed("message", **assistant([typed("output_text", text="Let "), typed("output_text", text="me.")])),
        typed("function_call", call_id="c1", name="add", arguments='{"x": 1}'),
        typed("function_call", call_id="c2", name="add", arguments="{}"),
        typed("function_call_output", call_id="c1", output="2"),
        typed("function_call_output", call_id="c2", output=[]),
        typed("reasoning", summary=[typed("summary_text", text="Hm.")]),
        typed("function_call", id="c3", name="add", arguments=""),
        typed("function_call_output", call_id="c3", output=[typed("input_text", text="4")]),
    )
    last = assistant("", reasoning_content="Hm.", tool_calls=[call["c3"]])
    assert read("items", **given).requests[0].messages == [*expected, last, results[2]]
    uses = [typed("tool_use", id=name, name="add", input=args[name]) for name in ("c1", "c2")]
    texts = [typed("text", text="2", cache_control={})]
    told = [typed("tool_result", tool_use_id="c1", content=texts), typed("tool_result", tool_use_id="c2")]
    thought = [typed("thinking", thinking="Hm.", signature=""), typed("text", text="Let me.")]
    system, so = ([typed("text", text=text) for text in each] for each in (("Be", "brief."), ("So", "what?")))
    given = messages(user, assistant([*thought, *uses]), {"role": "user", "content": [*told, *so]})
    said = read("claude", system=system, **given).requests[0].messages
    assert said == [*expected, {"role": "user", "content": "So\nwhat?"}]
    for empty in (None, "", [], [typed("text", text="")]):
        said = read("chat", **history(CALL, empty)).requests[0].messages
        assert [message["content"] for message in said] == ["Hi", "", ""]


def test_arguments_may_be_an_object_or_its_text():
    for arguments in ({"x": 1}, '{"x": 1}', ' {"x": 1.0} '):
        chat = read("chat", **history(called(arguments))).requests[0].messages[1]
        item = typed("function_call", call_id="c1", name="add", arguments=arguments)
        output = typed("function_call_output", call_id="c1", output="2")
        response = read("items", **items(item, output)).requests[0].messages[0]
        block = typed("tool_use", id="c1", name="add", input=arguments)
        claude = read("claude", **blocks(block, role="assistant")).requests[0].messages[0]
        found = [message["tool_calls"][0]["function"] for message in (chat, response, claude)]
        assert found == [{"name": "add", "arguments": {"x": 1}}] * 3
    assert read("chat", **history(called(""))).requests[0].messages[1]["tool_calls"][0]["function"]["arguments"] == {}
