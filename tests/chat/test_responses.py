"""Turns read by a tokenizer's own response template, before rlkit's formats."""

from __future__ import annotations

import asyncio
import copy
import pickle

import numpy as np
import pytest

pytest.importorskip("transformers")

from hypothesis import given
from hypothesis import strategies as st

from rlkit import tools
from rlkit.backends.tokenizers import LocalTokenizer, tokenizer_from
from rlkit.chat import Chat
from tests.chat.build import QWEN3, SCHEMAS, act, add, family, tokenizer
from tests.each import for_each
from tests.properties import examples


def template(**calls):
    """A response template with this form of calls, as transformers' server has it for models like Qwen3."""
    fields = {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {"repeats": True, **calls},
        "content": {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)", "content": "text"},
    }
    return {"defaults": {"role": "assistant"}, "start_anchor": "<|im_start|>assistant\n", "fields": fields}


def json_template(call):
    return template(open_pattern=r"\s*<tool_call>", close="</tool_call>", content="json", transform=call)


MADE = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
JSON = json_template({"type": "function", "function": "{content}"})
XML = template(  # for Qwen3.5
    open_pattern=r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
    close_pattern=r"</function>\s*</tool_call>",
    content="xml-inline",
    content_args={"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
    transform=MADE,
)
LAX = template(  # a format that rlkit does not know, like Gemma 4's
    open_pattern=r"<tool_call>call:(?P<name>\w+)",
    close="</tool_call>",
    content="json",
    content_args={"unquoted_keys": True, "string_delims": [["<q>", "<q>"]]},
    transform=MADE,
)
WRITTEN = {  # template and rlkit's format for it, two calls
    "json": (
        *(JSON, "hermes", '<tool_call>\n{"name": "add", "arguments": {"x": 7}}\n</tool_call>'),
        '<tool_call>{"name": "add", "arguments": {"x": 1, "note": "</think>"}}</tool_call>',
    ),
    "xml": (
        *(XML, "qwen3_coder", "<tool_call>\n<function=add>\n<parameter=x>\n7\n</parameter>\n</function>\n</tool_call>"),
        "<tool_call><function=add><parameter=x>1</parameter><parameter=note></think></parameter></function></tool_call>",
    ),
    "lax": (
        *(LAX, "hermes", "<tool_call>call:add{x:7}</tool_call>"),
        "<tool_call>call:add{x:1,note:<q></think><q>}</tool_call>",
    ),
}


def with_template(template, t=None):
    """A copy of a tokenizer that carries a response template."""
    t = t or tokenizer("qwen3")
    hf = copy.deepcopy(t.hf)
    hf.response_template = template
    return LocalTokenizer(hf, vocab_size=t.vocab_size, eos_ids=t.eos_ids)


def said(chat, text, prompt=()):
    return act(chat, text, prompt=prompt, tools=SCHEMAS)


def read(parsed):
    return [(call.name, dict(call.arguments)) for call in parsed.calls]


@pytest.mark.parametrize("kind", WRITTEN)
def test_a_turn_is_read(kind, tmp_path):
    """Reasoning, content and calls, also where the environment names another format; from a saved tokenizer, too."""
    template, _, one, two = WRITTEN[kind]
    with_template(template).hf.save_pretrained(tmp_path)
    for t in (with_template(template), tokenizer_from(tmp_path)):
        chat = Chat(t)
        text = f"<think>\nhm <b>\n</think>\n\nLet me see. {one} And: {two}<|im_end|>"
        action = said(chat, text, chat.start("7 + 0?", SCHEMAS).prompt)
        parsed = tools.read_calls(action, "json", SCHEMAS)
        assert read(parsed) == [("add", {"x": 7}), ("add", {"x": 1, "note": "</think>"})]
        twice = tools.read_calls(said(chat, one + one), "json", SCHEMAS)
        for first, second in (parsed.calls, twice.calls):
            assert first.position < second.position
        assert (parsed.errors, parsed.reasoning) == ((), "hm <b>")
        assert action.content == parsed.text_outside
        assert parsed.text_outside.split() == ["Let", "me", "see.", "And:"]
        assert pickle.loads(pickle.dumps(action)).parsed == action.parsed


def test_reasoning_that_the_prompt_has_begun():
    chat = Chat(with_template(JSON), prefill="<think>\n")
    conversation = chat.start("Hi")
    action = said(chat, "hm</think>\n\nIt is 7.<|im_end|>", conversation.prompt)
    assert (action.parsed.reasoning, action.content) == ("hm", "It is 7.")
    plain = Chat(with_template(JSON))
    head = np.append(plain.start("Hi").prompt, plain.tokenizer.encode("<think>\n", special=True))
    assert said(plain, "hm</think>\n\nIt is 7.<|im_end|>", head).parsed == action.parsed


@for_each("kind", WRITTEN)
@for_each("history", ["template", "append"])
def test_a_conversation_goes_on(kind, history):
    """What was sampled stays in the prompt, and the tool's answer follows it."""
    chat = Chat(with_template(WRITTEN[kind][0]), history=history)
    conversation = chat.start("7 + 0?", SCHEMAS)
    before = conversation.prompt
    action = said(chat, f"Let me see. {WRITTEN[kind][2]}<|im_end|>", before)
    (call,) = tools.read_calls(action, "json", SCHEMAS).calls
    conversation.add(action, [tools.tool_message(call, "it is 7")])
    assert conversation.extends
    assert conversation.prompt[: before.size + action.tokens.size].tolist() == [*before, *action.tokens]
    assert "it is 7" in chat.tokenizer.decode(conversation.prompt[before.size + action.tokens.size :])


def test_calls_in_the_prompt_are_not_the_policys():
    """Nothing before the head of the policy's turn is read, whether the template finds the head or not."""
    chat, call = Chat(with_template(JSON)), WRITTEN["json"][2]
    as_tokens = chat.tokenizer.encode(call, special=True)
    for prompt in ((), as_tokens, chat.start(f"<|im_start|>assistant\n{call}").prompt):
        assert said(chat, "Yes.<|im_end|>", prompt).parsed == tools.Parsed("Yes.")


BROKEN = {
    "json": (
        "<tool_call>{oops}</tool_call>",
        '<tool_call>{"name": "add", "arguments": {"x": 1',
        '<tool_call>{"name": "add", "arguments": {"x": NaN}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        "<tool_call>[1]</tool_call>",
        '<tool_call>{"name": "ad", "arguments": {"x": 1}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"x": "1"}}</tool_call>',
        "<tool_call>" + "[" * 50_000 + "</tool_call>",
    ),
    "xml": (
        "<tool_call><fun=add></function></tool_call>",
        "<tool_call><function=add><parameter=x>7</function></tool_call>",
        "<tool_call><function=add><parameter=x>7</parameter>and<parameter=y>1</parameter></function></tool_call>",
        "<tool_call><function=add><parameter=x>7</parameter><parameter=x>1</parameter></function></tool_call>",
        "<tool_call><function=add><parameter=x>seven</parameter></function></tool_call>",
        "<tool_call><function=add><parameter=x>7",
    ),
}


@pytest.mark.parametrize(("kind", "bad"), [(kind, bad) for kind, texts in BROKEN.items() for bad in texts])
def test_what_cannot_be_read_is_reported_as_without_the_template(kind, bad):
    """The same sentences, and the same good calls beside the bad one."""
    template, form, good, _ = WRITTEN[kind]
    for text in (bad, f"{good}{bad}", f"{bad}{good}<|im_end|>"):
        one, two = (
            tools.read_calls(said(Chat(with_template(template), template=chosen), text), form, SCHEMAS)
            for chosen in (None, QWEN3)
        )
        assert two.errors
        assert [error.problem for error in one.errors] == [error.problem for error in two.errors]
        assert read(one) == read(two)


@for_each(
    ("text", "why"),
    [
        ("<tool_call>call:add{x:<q>}</tool_call>", "ValueError: json: could not parse"),
        ("<tool_call>add{x:7}</tool_call>", "<tool_call> is not followed by a call"),
        ("\n" * 1000 + "yes", "blanks in a row"),
        ("It is 7.<|im_end|>", None),
    ],
)
def test_a_broken_call_of_an_unknown_format_is_no_answer(text, why):
    """Where rlkit's format finds nothing, the policy is told that its turn cannot be read."""
    env = tools.ToolEnv("7 + 0?", [add], lambda answer: 1.0, format="json")
    action = said(Chat(with_template(LAX)), text)
    result = asyncio.run(env.step(action))
    assert result.terminated == (why is None)
    if why is not None:
        assert action.parsed is None
        assert pickle.loads(pickle.dumps(action)).unread == action.unread
        assert "the turn cannot be read" in result.observation[0]["content"]
        assert why in result.observation[0]["content"]


def test_where_no_template_is_used():
    """A chat template or a renderer that the user chose, and a template that is not valid, with a warning."""
    t, text = with_template(JSON), "<think>hm</think>Yes.<|im_end|>"
    action = said(Chat(t, template=QWEN3), text)
    assert (action.parsed, action.content) == (None, "<think>hm</think>Yes.")
    for wrong in ({"fields": {}}, {**JSON, "start_anchor": None}, ["?"], {**JSON, "more": 1}):
        with pytest.warns(RuntimeWarning, match="the tokenizer's response template cannot be used"):
            assert said(Chat(with_template(wrong)), "Yes.").parsed is None
    pytest.importorskip("renderers")
    named = json_template({"name": "by_template", "arguments": "{content.arguments}"})
    t = with_template(named, family("qwen3", QWEN3))
    for name, expected in ((None, "by_template"), ("qwen3", "add")):
        assert [call.name for call in said(Chat(t, renderer=name), WRITTEN["json"][2]).parsed.calls] == [expected]


def test_floods():
    """At most 128 calls are read, in a time that grows with the length alone."""
    chat = Chat(with_template(JSON))
    parsed = said(chat, '<tool_call>{"name":"add"}</tool_call>' * 3000).parsed
    assert len(parsed.errors) == 128
    parsed = said(chat, WRITTEN["json"][2] * 500).parsed
    assert len(parsed.calls) == 128
    for text in ("\n" * 50_000 + "x", "<tool_call>" * 3000, "<" * 30_000):
        assert said(chat, text).stop_reason == "stop"


CHATS = [Chat(with_template(template)) for template, *_ in WRITTEN.values()]
TAGS = "<tool_call> </tool_call> <function=add> </function> <parameter=x> </parameter> <think> </think> <|im_end|>"
BITS = st.sampled_from([*TAGS.split(), *'7{}\n "', '{"name": "add", "arguments": {"x": 7}}', "call:add{x:7}"])


@given(st.sampled_from(CHATS), st.lists(BITS | st.text(max_size=3), max_size=12).map("".join))
@examples(200)
def test_any_text_is_read_or_refused(chat, text):
    """A call comes out as one that fits its schema or as an error; no text raises."""
    action = said(chat, text.encode("utf-8", "replace").decode())
    assert (action.parsed is None) == (action.unread is not None)
    parsed = tools.read_calls(action, "hermes", SCHEMAS)
    assert all(tools.problems(call.arguments, SCHEMAS[0]["function"]["parameters"]) == [] for call in parsed.calls)
