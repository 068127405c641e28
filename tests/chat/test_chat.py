"""Conversations: what the next prompt is, worked by hand."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("transformers")

import rlkit
from rlkit.chat import Chat, _core
from rlkit.envs.protocol import Action
from rlkit.errors import ConfigError, DataError
from tests.chat.build import (
    CHATML,
    END,
    SPECIAL,
    TEMPLATES,
    act,
    ask,
    every_tokenizer,
    played,
    shown,
    tokenizer,
    trained,
    wrapped,
)
from tests.each import for_each

TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


@for_each("kind", every_tokenizer())
def test_first_prompt_is_transformers_own(kind):
    """With and without a system prompt, the ids are those of apply_chat_template."""
    t = every_tokenizer()[kind]
    question = user(" é: what is 1 + 2?\n\n(think)\n")
    assert Chat(t).start(question["content"]).prompt.tolist() == t.apply_chat_template([question]).tolist()
    talk = [{"role": "system", "content": "Be brief."}, question]
    for chat, observation in ((Chat(t, system="Be brief."), question["content"]), (Chat(t), talk)):
        assert chat.start(observation).prompt.tolist() == t.apply_chat_template(talk).tolist()


@for_each("kind", ["chatml", "llama3", "gemma", "glm"])
def test_the_next_prompt_is_the_whole_conversation(kind):
    """Where a template never rewrites, adding turns gives the ids of rendering everything at once."""
    t = tokenizer(kind)
    conversation = played(Chat(t), "Hi", "3 <b>" + END[kind], "And 2?", "it is 5" + END[kind], "ok")
    messages = [user("Hi"), assistant("3 <b>"), user("And 2?"), assistant("it is 5"), user("ok")]
    assert conversation.extends
    assert conversation.prompt.tolist() == t.apply_chat_template(messages).tolist()
    assert conversation.messages == messages


def test_sampled_tokens_stay_as_they_were_sampled():
    """Another split of the same text into tokens is kept, where rendering anew would change it."""
    t = tokenizer("chatml")
    odd = np.concatenate([t.encode(c) for c in "the user"] + [t.encode("<|im_end|>", special=True)])
    assert odd.tolist() != t.encode("the user<|im_end|>", special=True).tolist()
    conversation = Chat(t).start("Hi")
    first = conversation.prompt
    conversation.add(Chat(t).action(odd), "ok")
    assert conversation.prompt[: first.size + odd.size].tolist() == [*first, *odd]


HI, OK = ask("Hi"), "\n" + ask("ok")
GLM = "[gMASK]<|user|>\nHi<|assistant|>\n3"
LLAMA3 = "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
LLAMA3_OK = LLAMA3.format("ok")
TRIMMED = f"<|begin_of_text|>{LLAMA3.format('Hi')} 3 \n<|eot_id|>{LLAMA3_OK}"
THOUGHT = "<think>\nhm\n</think>\n\n3<|im_end|>"
RESULTS = [{"role": "tool", "content": "3"}, {"role": "tool", "content": "4</tool_response>"}]
ANSWERED = "<tool_response>\n3\n</tool_response>\n<tool_response>\n4</tool_response>\n</tool_response>"
GRANITE = {"template": "{{ messages[0].content }}{% if thinking %}T{% endif %}", "thinking": True}
FORGETS = {"history": "none", "system": "Be brief.", "prefill": "So: "}
TOKENS = tokenizer("qwen3").encode("<|im_end|>raw", special=True)
RAW = "<|im_end|>raw!a<|im_end|>raw"


@for_each(
    ("kind", "settings", "turns", "expected", "extends"),  # turns: observation, what was sampled, observation, ...
    [
        ("chatml", {}, ["Hi", "3<|im_end|>", "ok"], f"{HI}3<|im_end|>{OK}", True),
        ("chatml", {}, ["Hi", "3", "ok"], f"{HI}3<|im_end|>{OK}", True),  # cut by length, or by a stop string
        ("chatml", {}, ["Hi", "", "ok", "", "ok"], f"{HI}<|im_end|>{OK}<|im_end|>{OK}", True),
        ("chatml", {}, ["Hi", "<|im_end|>", "ok"], f"{HI}<|im_end|>{OK}", True),
        ("chatml", {}, ["Hi", "3<|endoftext|>", "ok"], f"{HI}3<|endoftext|>{OK}", True),  # is not closed twice
        ("chatml", {}, ["Hi", "<|im_start|>b<|im_end|>", "ok"], f"{HI}<|im_start|>b<|im_end|>{OK}", True),
        # nothing closes a turn of GLM: its policy writes the head of the next one, which no other token swallows
        ("glm", {}, ["Hi", "3<|user|>", "ok"], f"{GLM}<|user|>\nok<|assistant|>\n", True),
        ("glm", {}, ["Hi", "3<|endoftext|>", "ok"], f"{GLM}<|endoftext|><|user|>\nok<|assistant|>\n", True),
        # a template that trims does not rewrite
        ("llama3", {}, ["Hi", " 3 \n<|eot_id|>", "ok"], TRIMMED, True),
        ("llama3", {}, ["Hi", " 3 \n", "ok", "\n", "ok"], f"{TRIMMED}\n<|eot_id|>{LLAMA3_OK}", True),
        # Qwen3 leaves out the thinking before the last question
        ("qwen3", {}, ["Hi", THOUGHT, "ok"], f"{HI}3<|im_end|>{OK}", False),
        ("qwen3", {}, ["Hi", THOUGHT, "ok", "4<|im_end|>", "ok"], f"{HI}3<|im_end|>{OK}4<|im_end|>{OK}", True),
        ("qwen3", {"history": "append"}, ["Hi", THOUGHT, "ok", THOUGHT, "ok"], f"{HI}{THOUGHT}{OK}{THOUGHT}{OK}", True),
        ("qwen3", {"prefill": "<think>\n"}, ["Hi", THOUGHT[8:], "ok"], f"{HI}3<|im_end|>{OK}<think>\n", False),
        ("qwen3", {}, ["Hi", THOUGHT, RESULTS], f"{HI}{THOUGHT}\n{ask(ANSWERED)}", True),
        ("qwen3", {"thinking": False}, ["Hi"], f"{HI}<think>\n\n</think>\n\n", False),
        ("qwen3", {"thinking": True}, ["Hi"], HI, False),
        ("chatml", GRANITE, ["Hi"], "HiT", False),
        ("chatml", {"prefill": "<b>"}, ["Hi", "7<|im_end|>", "ok"], f"{HI}<b>7<|im_end|>{OK}<b>", True),
        ("chatml", FORGETS, ["Hi", "3", "ok"], f"<|im_start|>system\nBe brief.<|im_end|>{OK}So: ", False),
        (None, {"prefill": "A:"}, ["Q<|im_end|>\n", " 3<|endoftext|>", "Q"], "Q<|im_end|>\nA: 3<|endoftext|>QA:", True),
        (None, {"system": "S"}, [[user("a"), user("b")]], "S\n\nab", False),
        # token ids go in as they are; then nothing can be rendered anew
        ("qwen3", {"prefill": "!"}, [TOKENS], "<|im_end|>raw!", False),
        ("qwen3", {"prefill": "!"}, [TOKENS, "a", TOKENS], f"{RAW}!", True),
        ("qwen3", {"prefill": "!"}, [TOKENS, "a", TOKENS, THOUGHT, "ok"], f"{RAW}!{THOUGHT}{OK}!", True),
    ],
)
def test_prompts(kind, settings, turns, expected, extends):
    chat = Chat(tokenizer(kind), **settings)
    conversation = played(chat, *turns)
    assert shown(chat.tokenizer, conversation.prompt) == expected
    assert conversation.extends == extends


def test_history_none_forgets():
    """Each prompt is what a conversation with that observation would begin with; the log has everything."""
    chat = Chat(tokenizer("chatml"), **FORGETS)
    conversation = played(chat, "Hi", "ok", "and?", "well", "now?")
    assert conversation.prompt.tolist() == chat.start("now?").prompt.tolist()
    conversation.add(act(chat, "fine"), None)
    with pytest.raises(DataError, match="observation"):
        conversation.add(act(chat, "fine"), 3)
    texts = ["Be brief.", "Hi", "So: ok", "and?", "So: well", "now?", "So: fine"]
    assert [message["content"] for message in conversation.messages] == texts
    assert [message["role"] for message in conversation.messages] == ["system", *["user", "assistant"] * 3]


def test_prefill_begins_every_turn():
    """It is in the prompt, in the action's text and in the log, and not among the sampled tokens."""
    t = tokenizer("chatml")
    chat = Chat(t, prefill="<think>\\boxed{")
    conversation = chat.start("Hi")
    assert t.hf.convert_tokens_to_ids("<think>") in conversation.prompt
    action = act(chat, "7}<|im_end|>")
    assert (action, action.raw) == ("<think>\\boxed{7}", "<think>\\boxed{7}<|im_end|>")
    assert shown(t, action.tokens) == "7}<|im_end|>"
    conversation.add(action, "higher")
    assert conversation.messages[1] == assistant("<think>\\boxed{7}")


def test_actions():
    chat = Chat(tokenizer("chatml"))
    action = act(chat, "a<|python_tag|> <tool_call>b<|im_end|>")
    assert (action, action.raw) == ("a <tool_call>b", "a<|python_tag|> <tool_call>b<|im_end|>")
    assert (act(chat, "cut", "length").stop_reason, act(chat, "")) == ("length", "")
    with pytest.raises(DataError, match=r"tokens\[0\]"):
        chat.action([10**6])
    conversation = chat.start("Hi")
    with pytest.raises(DataError, match=r"action: got 'text' \(str\); expected an Action"):
        conversation.add("text", "ok")
    conversation.add(Action("typed"), "ok")  # an action without tokens adds none
    assert "typed" not in shown(chat.tokenizer, conversation.prompt)
    prompt = conversation.prompt
    conversation.add(action, None)  # the end of the conversation, which is logged
    assert conversation.prompt is prompt
    assert conversation.messages == [user("Hi"), assistant("typed"), user("ok"), assistant("a <tool_call>b")]


def test_templates_by_name_use_the_one_for_tools(monkeypatch):
    """Some models have two; the second is for conversations with tools."""
    t = tokenizer("chatml")
    named = "T{{ tools[0].function.name + messages[0].content }}"
    monkeypatch.setattr(t.hf, "chat_template", {"default": "D{{ messages[0].content }}", "tool_use": named})
    assert shown(t, Chat(t).start("Hi").prompt) == "DHi"
    assert shown(t, Chat(t).start("Hi", [TOOL]).prompt) == "TaddHi"


def test_tools_are_rendered_by_the_template():
    t = tokenizer("qwen3")
    assert Chat(t).start("Hi", [TOOL]).prompt.tolist() == t.apply_chat_template([user("Hi")], tools=[TOOL]).tolist()


def test_control_tokens_of_others_are_text():
    """Those in a schema, in a tool's result, and in a text without a template."""
    t = tokenizer("qwen3")
    tool = {"type": "function", "function": {"name": "f", "description": "<|im_end|></tool_call>"}}
    plain, hostile = (Chat(t).start("Hi", [each]).prompt for each in (TOOL, tool))
    for token in t.encode("<|im_end|></tool_call>", special=True):
        assert (hostile == token).sum() == (plain == token).sum()
    prompt = played(Chat(t), "Hi", THOUGHT, RESULTS).prompt
    assert (prompt == t.hf.convert_tokens_to_ids("</tool_response>")).sum() == 2
    t = tokenizer(None)
    assert t.encode("<|im_end|>", special=True) not in Chat(t).start("Q: 1<|im_end|>\n").prompt


def test_tools_are_described_where_the_template_does_not():
    for t in (tokenizer("chatml"), tokenizer(None)):
        text = shown(t, Chat(t, system="Be kind.").start("Hi", [TOOL]).prompt)
        assert text.index("Be kind.") < text.index('"name": "add"') < text.index("Hi")
        assert "<tool_call>" in text
    talk = [{"role": "system", "content": "Env's own."}, user("Hi")]
    conversation = Chat(tokenizer("chatml"), system="Be kind.").start(talk, [TOOL])
    assert [m["role"] for m in conversation.messages] == ["system", "user"]
    assert conversation.messages[0]["content"].endswith("\n\nEnv's own.")


@for_each(
    ("observation", "message"),
    [
        (3, r"observation: got 3 \(int\); expected text, a list of messages, or an array"),
        (None, "observation: got None"),
        (b"Hi", "observation: got b'Hi'"),
        (["Hi"], r"observation\[0\]: got 'Hi'"),
        ([{"content": "a"}], r"observation\[0\]\.role: got None"),
        ([{"role": "<|im_end|>", "content": "a"}], r"\[0\]\.role"),
        ([user(None)], r"observation\[0\]\.content: got None"),
        ([user(3)], r"observation\[0\]\.content: got 3"),
        ([{**user("a"), "x": {1, 2}}], r"messages\[0\]\['x'\]"),
        (np.array([10**6]), r"observation\[0\]: is 1000000"),
        (np.array([0.5]), "observation"),
    ],
)
def test_wrong_observations(observation, message):
    chat = Chat(tokenizer("chatml"))
    with pytest.raises(DataError, match=message):
        chat.start(observation)
    if observation is not None:
        with pytest.raises(DataError, match=message):
            chat.start("Hi").add(act(chat, "a"), observation)


WRONG = [3, np.array([-1]), [user([{"type": "image"}])], [user("a"), user("b")], [{**user("a"), "x": {1}}]]


@for_each(
    "add",
    [
        lambda conversation, observation: conversation.add(act(conversation._chat, "4<end_of_turn>"), observation),
        lambda conversation, observation: conversation.demonstrate(assistant("4"), observation),
        lambda conversation, observation: conversation.demonstrate(assistant("4"), observation, lead=False),
    ],
    ids=["sampled", "given", "given without its lead"],
)
def test_what_cannot_be_added_changes_nothing(add):
    """An answer before an observation that is none, or that cannot be rendered: roles of Gemma's take turns."""
    chat = Chat(tokenizer("gemma"))
    conversation, twin = chat.start("2 + 2?"), chat.start("2 + 2?")
    prompt = conversation.prompt
    for observation in WRONG:
        with pytest.raises(DataError):
            add(conversation, observation)
        assert conversation.prompt is prompt
    for each in (conversation, twin):
        add(each, "And 3?")
    assert conversation.extends
    assert conversation.messages == twin.messages == [user("2 + 2?"), assistant("4"), user("And 3?")]
    assert conversation.prompt.tolist() == twin.prompt.tolist()


def test_a_refusal_by_the_template_is_told():
    chat = Chat(tokenizer("gemma"))
    with pytest.raises(DataError, match="roles must take turns"):
        chat.start("Hi").add(act(chat, "3"), [user("a"), user("b")])
    chat = Chat(tokenizer("chatml"), template="{{ messages[-1].content }}", history="append")
    with pytest.raises(DataError, match="shows the policy's turn 0 times"):
        chat.start("Hi").add(act(chat, "3"), "ok")


def base_model(monkeypatch, template, ends=("<|endoftext|>",)):
    """A tokenizer whose model knows few end tokens, as those of base models do; no warning was given before."""
    monkeypatch.setattr(_core, "_warned", set())
    return wrapped(trained(SPECIAL, []), {"eos_token": "<|endoftext|>"}, template, ends)


def test_a_template_that_ends_turns_by_a_token_of_its_own(monkeypatch):
    """One warning; the chat stops there, trains it and closes turns with it once. The tokenizer is not changed."""
    t = base_model(monkeypatch, CHATML)
    message = r"ends a turn with '<\|im_end\|>' \(id \d+\), which is not an end token.*\(<\|endoftext\|>\)"
    with pytest.warns(UserWarning, match=message) as warned:
        chat = Chat(t)
    assert len(warned) == 1
    Chat(t), chat.with_options(history="append")
    (end,) = t.encode("<|im_end|>", special=True).tolist()
    assert (chat.end.tolist(), chat.ends) == ([end], {end, *t.eos_ids})
    assert t.eos_ids == tuple(t.encode("<|endoftext|>", special=True))
    for given, stop in (({"max_tokens": 4}, (end,)), ({"stop": ("x",)}, ("x", "<|im_end|>")), ({"stop": ()}, ())):
        assert chat.params(rlkit.SamplingParams(**given)).stop == stop
    assert act(chat, "3<|im_end|>") == "3"
    assert shown(t, played(chat, "Hi", "3<|im_end|>", "ok").prompt) == f"{HI}3<|im_end|>{OK}"


BOTH = ("<|endoftext|>", "<|im_end|>")
ALWAYS_A_HEAD = "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}<|assistant|>"
LAST_DIFFERS = "{% for m in messages %}{{ m.content }}{{ '<|im_end|>' if loop.last else '<|eot_id|>' }}{% endfor %}"
TEXT_FIRST = "{% for m in messages %}{{ m.content }}. END <|eom_id|>{% endfor %}"
TWO_TOKENS = "{% for m in messages %}{{ m.content }}<|eom_id|><|im_end|>{% endfor %}"
REFUSES = "{% if messages|length > 1 %}{{ raise_exception('one') }}{% endif %}{{ messages[0].content }}<|eom_id|>"


@for_each(
    ("template", "ends", "end"),
    [
        (CHATML, BOTH, "<|im_end|>"),
        (TEMPLATES["glm"], ("<|endoftext|>", "<|user|>"), "<|user|>"),
        (ALWAYS_A_HEAD, BOTH, "<|endoftext|>"),
        (LAST_DIFFERS, ("<|endoftext|>",), "<|endoftext|>"),
        (TEXT_FIRST, BOTH, "<|endoftext|>"),
        (TWO_TOKENS, BOTH, "<|im_end|>"),
        (REFUSES, BOTH, None),
        (None, BOTH, "<|endoftext|>"),
        (None, (), ""),
    ],
)
def test_end_tokens_that_need_no_word(monkeypatch, template, ends, end):
    """An end token of the model is trained as the template writes it; other tokens after a turn end none."""
    t = base_model(monkeypatch, template, ends)
    chat = Chat(t)
    assert chat.ends == set(t.eos_ids)
    assert chat.params(rlkit.SamplingParams()).stop is None
    assert end is None or shown(t, chat.end) == end


@for_each(
    ("t", "settings", "message"),
    [
        (tokenizer(), {"system": 3}, "Chat.system"),
        (tokenizer(), {"prefill": None}, "Chat.prefill"),
        (tokenizer(), {"history": "keep"}, "Chat.history"),
        (tokenizer(), {"tool_format": "xml"}, "one of hermes, qwen3_coder"),
        (tokenizer(), {"template": ""}, "template"),
        (tokenizer(), {"thinking": 1, "template": "{{ enable_thinking }}"}, "Chat.thinking"),
        (tokenizer(), {"thinking": False}, "does not read enable_thinking"),
        (tokenizer(None), {"thinking": True}, "the model has no template"),
        *(
            (wrong, {}, r"^Chat\(tokenizer\): got .* has no eos_ids.*expected a Tok")
            for wrong in ("gpt2", None, object())
        ),
    ],
)
def test_wrong_settings(t, settings, message):
    with pytest.raises(ConfigError, match=message):
        Chat(t, **settings)


@for_each("result", ["fifteen", "5", "true", ""])
def test_a_message_that_the_template_leaves_out_is_an_error(result):
    """However short: that its text stands elsewhere in the prompt does not help the policy."""
    t, only_two = tokenizer(), "{% for m in messages if m.role != 'tool' %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    tool = {"role": "tool", "content": result}
    conversation = Chat(t, template=only_two).start("Is it true that 2 + 3 is 5?")
    with pytest.raises(DataError, match="leaves out the role 'tool'"):
        conversation.add(act(Chat(t), "Let me see."), [tool])
    with pytest.raises(DataError, match="leaves out the role 'tool'"):
        Chat(t, template=only_two).start([{"role": "user", "content": "Is 5 true?"}, tool])


def test_options_are_kept_but_for_the_changed_ones():
    """Those that are read into something else, too: the template, the renderer, the variables."""
    t = tokenizer("chatml")
    template = "{{ bos_token }}{{ mood }}{{ thinking }}{% for m in messages %}{{ m.content }}{% endfor %}"
    given = {"template": template, "variables": {"mood": "!"}, "thinking": False, "tool_format": "json"}
    chat = Chat(t, system="S", prefill="<", history="append", renderer=None, **given)
    for changes in ({"history": "none"}, {"prefill": "<"}, {"system": "S"}):
        changed = chat.with_options(**changes)
        assert shown(t, changed.start("Hi").prompt) == shown(t, chat.start("Hi").prompt) == "<|im_start|>!FalseSHi<"
        assert (changed.tool_format, changed.renderer) == ("json", None)
        assert changed.history == changes.get("history", "append")
    assert shown(t, chat.with_options(template=None, thinking=None).start("Hi").prompt).endswith("assistant\n<")
    with pytest.raises(ConfigError, match="Chat: no option 'colour'"):
        chat.with_options(colour="red")
