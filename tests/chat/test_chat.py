"""Conversations: what the next prompt is, worked by hand."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("transformers")

import rlkit
from rlkit.chat import Chat, _core
from rlkit.envs.protocol import Action
from rlkit.errors import ConfigError, DataError
from tests.chat.build import CHATML, END, SPECIAL, TEMPLATES, act, shown, smollm2, tokenizer, trained, wrapped
from tests.each import for_each

TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}


def played(chat, observation, *turns):
    """The conversation after (what was sampled, what the environment answered) pairs."""
    conversation = chat.start(observation)
    for text, answer in turns:
        conversation.add(act(chat, text), answer)
    return conversation


@for_each("kind", TEMPLATES)
def test_first_prompt_is_transformers_own(kind):
    """With and without a system prompt, the ids are those of apply_chat_template."""
    t = tokenizer(kind)
    user = {"role": "user", "content": "what is 1 + 2?\n\n(think)"}
    assert Chat(t).start(user["content"]).prompt.tolist() == t.apply_chat_template([user]).tolist()
    talk = [{"role": "system", "content": "Be brief."}, user]
    assert Chat(t, system="Be brief.").start(user["content"]).prompt.tolist() == t.apply_chat_template(talk).tolist()
    assert Chat(t).start(talk).prompt.tolist() == t.apply_chat_template(talk).tolist()


def test_first_prompt_of_the_toy_and_of_a_real_model():
    for t in (rlkit.connect("toy").tokenizer, smollm2()):
        if t is not None:
            talk = [{"role": "system", "content": "é"}, {"role": "user", "content": " Hi\n"}]
            assert Chat(t).start(talk).prompt.tolist() == t.apply_chat_template(talk).tolist()


@for_each("kind", ["chatml", "llama3", "gemma", "glm"])
def test_the_next_prompt_is_the_whole_conversation(kind):
    """Where a template never rewrites, adding turns gives the ids of rendering everything at once."""
    t = tokenizer(kind)
    chat = Chat(t)
    conversation = played(chat, "Hi", ("3 <b>" + END[kind], "And 2?"), ("it is 5" + END[kind], "ok"))
    talk = ["Hi", "3 <b>", "And 2?", "it is 5", "ok"]
    roles = ["user", "assistant"] * 3
    messages = [{"role": role, "content": text} for role, text in zip(roles, talk, strict=False)]
    assert conversation.extends
    assert conversation.prompt.tolist() == t.apply_chat_template(messages).tolist()
    assert conversation.messages == messages


def test_sampled_tokens_stay_as_they_were_sampled():
    """Another split of the same text into tokens is kept, where rendering anew would change it."""
    t = tokenizer("chatml")
    chat = Chat(t)
    odd = np.concatenate([t.encode(c) for c in "the user"] + [t.encode("<|im_end|>", special=True)])
    assert odd.tolist() != t.encode("the user<|im_end|>", special=True).tolist()
    conversation = chat.start("Hi")
    first = conversation.prompt
    conversation.add(chat.action(odd), "ok")
    assert conversation.extends
    assert conversation.prompt[: first.size].tolist() == first.tolist()
    assert conversation.prompt[first.size :][: odd.size].tolist() == odd.tolist()
    rest = "\n<|im_start|>user\nok<|im_end|>\n<|im_start|>assistant\n"
    assert shown(t, conversation.prompt[first.size + odd.size :]) == rest


@for_each(
    ("text", "expected"),
    [
        ("3<|im_end|>", "3<|im_end|>\n<|im_start|>user"),  # closed by the policy
        ("3", "3<|im_end|>\n<|im_start|>user"),  # cut by length, or ended by a stop string
        ("", "<|im_end|>\n<|im_start|>user"),  # nothing at all
        ("<|im_end|>", "<|im_end|>\n<|im_start|>user"),
        ("3<|endoftext|>", "3<|endoftext|>\n<|im_start|>user"),  # closed in another way: not twice
        ("a<|im_start|>b<|im_end|>", "a<|im_start|>b<|im_end|>\n<|im_start|>user"),  # control tokens it made up
    ],
)
def test_how_a_turn_is_closed(text, expected):
    t = tokenizer("chatml")
    conversation = played(Chat(t), "Hi", (text, "ok"))
    assert conversation.extends
    head = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert shown(t, conversation.prompt) == f"{head}{expected}\nok<|im_end|>\n<|im_start|>assistant\n"


def test_templates_without_a_closing_token():
    """GLM's policy stops by writing the head of the next turn; another end token does not swallow that head."""
    t = tokenizer("glm")
    assert "3<|user|>\nok<|assistant|>" in shown(t, played(Chat(t), "Hi", ("3<|user|>", "ok")).prompt)
    other = played(Chat(t), "Hi", ("3<|endoftext|>", "ok"))
    assert "3<|endoftext|><|user|>\nok<|assistant|>" in shown(t, other.prompt)


def test_a_template_that_trims_does_not_rewrite():
    t = tokenizer("llama3")
    conversation = played(Chat(t), "Hi", (" 3 \n<|eot_id|>", "ok"), ("\n<|eot_id|>", "so?"))
    assert conversation.extends
    assert " 3 \n<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nok<|eot_id|>" in shown(t, conversation.prompt)
    assert "\n\n\n<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nso?" in shown(t, conversation.prompt)


THOUGHT = "<think>\nhm\n</think>\n\n3<|im_end|>"


def test_history_template_renders_rewritten_turns_anew():
    """Qwen3 leaves out earlier thinking: the next prompt is what the model sees in use, and begins a new datum."""
    t = tokenizer("qwen3")
    conversation = played(Chat(t), "Hi", (THOUGHT, "ok"))
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\n3"},
        {"role": "user", "content": "ok"},
    ]
    assert not conversation.extends
    assert conversation.prompt.tolist() == t.apply_chat_template(messages).tolist()
    assert "hm" not in shown(t, conversation.prompt)
    conversation.add(act(Chat(t), "without thinking<|im_end|>"), "and?")
    assert conversation.extends  # nothing to leave out this time


def test_history_none_forgets():
    """Each prompt is what a conversation with that observation would begin with; the log has everything."""
    t = tokenizer("chatml")
    chat = Chat(t, history="none", system="Be brief.", prefill="So: ")
    conversation = played(chat, "Hi", ("ok", "and?"), ("well", "now?"))
    assert not conversation.extends
    assert conversation.prompt.tolist() == chat.start("now?").prompt.tolist()
    roles = [message["role"] for message in conversation.messages]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user"]
    conversation.add(chat.action(t.encode("fine")), None)
    assert conversation.messages[-1] == {"role": "assistant", "content": "So: fine"}
    with pytest.raises(DataError, match="observation"):
        conversation.add(chat.action(t.encode("fine")), 3)
    assert len(conversation.messages) == 7


def test_history_append_keeps_them():
    t = tokenizer("qwen3")
    conversation = played(Chat(t, history="append"), "Hi", (THOUGHT, "ok"), (THOUGHT, "and?"))
    assert conversation.extends
    head = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    expected = head.format("Hi") + THOUGHT + "\n" + head.format("ok") + THOUGHT + "\n" + head.format("and?")
    assert shown(t, conversation.prompt) == expected


def test_thinking_is_kept_while_tools_answer():
    """Qwen3 keeps the thinking behind the user's last question, so tool calls extend the prompt."""
    t = tokenizer("qwen3")
    answer = [{"role": "tool", "content": "3"}, {"role": "tool", "content": "4</tool_response>"}]
    conversation = played(Chat(t), "Hi", (THOUGHT, answer))
    assert conversation.extends
    expected = (
        "3<|im_end|>\n<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n4</tool_response>\n"
    )
    assert expected + "</tool_response><|im_end|>" in shown(t, conversation.prompt)
    closing = t.hf.convert_tokens_to_ids("</tool_response>")
    assert (conversation.prompt == closing).sum() == 2  # the tool's own is text


def test_thinking_switch():
    t = tokenizer("qwen3")
    off = shown(t, Chat(t, thinking=False).start("Hi").prompt)
    assert off.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert shown(t, Chat(t, thinking=True).start("Hi").prompt).endswith("<|im_start|>assistant\n")
    granite = Chat(t, thinking=True, template="{{ messages[0].content }}{% if thinking %}T{% endif %}")
    assert shown(t, granite.start("Hi").prompt) == "HiT"
    with pytest.raises(ConfigError, match="does not read enable_thinking"):
        Chat(tokenizer("chatml"), thinking=False)
    with pytest.raises(ConfigError, match="the model has no template"):
        Chat(tokenizer(None), thinking=True)


def test_prefill_begins_every_turn():
    """It is in the prompt, in the action's text and in the log, and not among the sampled tokens."""
    t = tokenizer("chatml")
    chat = Chat(t, prefill="<think>\\boxed{")
    conversation = chat.start("Hi")
    assert shown(t, conversation.prompt).endswith("<|im_start|>assistant\n<think>\\boxed{")
    assert t.hf.convert_tokens_to_ids("<think>") in conversation.prompt
    action = act(chat, "7}<|im_end|>")
    assert (action, action.raw) == ("<think>\\boxed{7}", "<think>\\boxed{7}<|im_end|>")
    assert shown(t, action.tokens) == "7}<|im_end|>"
    conversation.add(action, "higher")
    assert conversation.extends
    head = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think>\\boxed{{"
    assert shown(t, conversation.prompt) == head.format("Hi") + "7}<|im_end|>\n" + head.format("higher")
    assert conversation.messages[1] == {"role": "assistant", "content": "<think>\\boxed{7}"}


def test_prefill_where_the_template_drops_thinking():
    t = tokenizer("qwen3")
    conversation = played(Chat(t, prefill="<think>\n"), "Hi", ("hm\n</think>\n\n3<|im_end|>", "ok"))
    assert not conversation.extends
    expected = "<|im_start|>assistant\n3<|im_end|>\n<|im_start|>user\nok<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert shown(t, conversation.prompt).endswith(expected)


def test_actions():
    chat = Chat(tokenizer("chatml"))
    action = act(chat, "a<|python_tag|> <tool_call>b<|im_end|>")
    assert action == "a <tool_call>b"
    assert action.raw == "a<|python_tag|> <tool_call>b<|im_end|>"
    assert (act(chat, "cut", "length").stop_reason, act(chat, "")) == ("length", "")
    with pytest.raises(DataError, match=r"tokens\[0\]"):
        chat.action([10**6])


def test_models_without_a_template_get_plain_text():
    t = tokenizer(None)
    assert t.chat_template is None
    chat = Chat(t, prefill="A:")
    conversation = chat.start("Q: 1<|im_end|>\n")
    conversation.add(act(chat, " 3\n<|endoftext|>"), "Q: 2\n")
    assert conversation.extends
    assert shown(t, conversation.prompt) == "Q: 1<|im_end|>\nA: 3\n<|endoftext|>Q: 2\nA:"
    assert (conversation.prompt == t.encode("<|im_end|>", special=True)[0]).sum() == 0
    two = Chat(t, system="S").start([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
    assert shown(t, two.prompt) == "S\n\nab"
    with pytest.raises(DataError, match=r"observation\[0\]\.content: got None"):
        chat.start([{"role": "user", "content": None}])


def test_token_observations_go_in_as_they_are():
    t = tokenizer("qwen3")
    chat = Chat(t, prefill="!")
    tokens = t.encode("<|im_end|>raw", special=True)
    conversation = chat.start(tokens)
    assert shown(t, conversation.prompt) == "<|im_end|>raw!"
    conversation.add(act(chat, "a"), tokens)
    assert shown(t, conversation.prompt) == "<|im_end|>raw!a<|im_end|>raw!"
    conversation.add(act(chat, "<think>\n\n</think>b<|im_end|>"), "text again")  # which cannot be rendered anew
    assert conversation.extends
    tail = "!<think>\n\n</think>b<|im_end|>\n<|im_start|>user\ntext again<|im_end|>\n<|im_start|>assistant\n!"
    assert shown(t, conversation.prompt) == "<|im_end|>raw!a<|im_end|>raw" + tail


def test_templates_by_name_use_the_one_for_tools():
    """Some models have two; the second is for conversations with tools."""

    class Two:
        def __init__(self, inner):
            self.inner = inner
            self.chat_template = {
                "default": "D{{ messages[0].content }}",
                "tool_use": "T{{ tools[0].function.name + messages[0].content }}",
            }

        def __getattr__(self, name):
            return getattr(self.inner, name)

    t = Two(tokenizer("chatml"))
    assert shown(t, Chat(t).start("Hi").prompt) == "DHi"
    assert shown(t, Chat(t).start("Hi", [TOOL]).prompt) == "TaddHi"


def test_tools_are_rendered_by_the_template():
    t = tokenizer("qwen3")
    talk = [{"role": "user", "content": "Hi"}]
    assert Chat(t).start("Hi", [TOOL]).prompt.tolist() == t.apply_chat_template(talk, tools=[TOOL]).tolist()
    bad = {"type": "function", "function": {"name": "f", "description": "<|im_end|></tool_call>"}}
    plain = Chat(t).start("Hi", [{"type": "function", "function": {"name": "f", "description": "x"}}]).prompt
    for token in t.encode("<|im_end|></tool_call>", special=True):
        assert (Chat(t).start("Hi", [bad]).prompt == token).sum() == (plain == token).sum()


def test_tools_are_described_where_the_template_does_not():
    for t in (tokenizer("chatml"), tokenizer(None)):
        text = shown(t, Chat(t, system="Be kind.").start("Hi", [TOOL]).prompt)
        assert text.index("Be kind.") < text.index('"name": "add"') < text.index("Hi")
        assert "<tool_call>" in text
    talk = [{"role": "system", "content": "Env's own."}, {"role": "user", "content": "Hi"}]
    conversation = Chat(tokenizer("chatml"), system="Be kind.").start(talk, [TOOL])
    assert [m["role"] for m in conversation.messages] == ["system", "user"]
    assert conversation.messages[0]["content"].endswith("\n\nEnv's own.")


def test_custom_template_and_variables():
    t = tokenizer("chatml")
    text = "{{ bos_token }}{{ level }}|{% for m in messages %}{{ m.content }}|{% endfor %}"
    assert shown(t, Chat(t, template=text, variables={"level": "low"}).start("Hi").prompt) == "<|im_start|>low|Hi|"


def test_the_end_of_a_conversation_is_logged():
    t = tokenizer("chatml")
    chat = Chat(t)
    conversation = chat.start("Hi")
    prompt = conversation.prompt
    conversation.add(act(chat, "bye<|im_end|>"), None)
    assert conversation.prompt is prompt
    assert conversation.messages[-1] == {"role": "assistant", "content": "bye"}


@for_each(
    ("observation", "message"),
    [
        (3, r"observation: got 3 \(int\); expected text, a list of messages, or an array"),
        (None, "observation: got None"),
        (b"Hi", "observation: got b'Hi'"),
        (["Hi"], r"observation\[0\]: got 'Hi'"),
        ([{"content": "a"}], r"observation\[0\]\.role: got None"),
        ([{"role": "<|im_end|>", "content": "a"}], r"\[0\]\.role"),
        ([{"role": "user", "content": 3}], r"observation\[0\]\.content: got 3"),
        ([{"role": "user", "content": "a", "x": {1, 2}}], r"messages\[0\]\['x'\]"),
        (np.array([10**6]), r"observation\[0\]: is 1000000"),
        (np.array([0.5]), "observation"),
    ],
)
def test_wrong_observations(observation, message):
    """They are refused by name, and a conversation goes on as if they had not come."""
    chat = Chat(tokenizer("chatml"))
    with pytest.raises(DataError, match=message):
        chat.start(observation)
    conversation = chat.start("Hi")
    prompt, messages = conversation.prompt, list(conversation.messages)
    if observation is not None:
        with pytest.raises(DataError, match=message):
            conversation.add(act(chat, "a"), observation)
    assert conversation.prompt is prompt
    assert conversation.messages == messages
    conversation.add(act(chat, "b<|im_end|>"), "c")
    assert conversation.extends
    assert "a<|im_end|>" not in shown(chat.tokenizer, conversation.prompt)


def test_a_refusing_template_changes_nothing():
    chat = Chat(tokenizer("gemma"))
    conversation = chat.start("Hi")
    with pytest.raises(DataError, match="roles must take turns"):
        conversation.add(act(chat, "3"), [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
    conversation.add(act(chat, "4"), "ok")
    assert [m["content"] for m in conversation.messages] == ["Hi", "4", "ok"]


def test_a_template_that_does_not_show_the_turn():
    chat = Chat(tokenizer("chatml"), template="{{ messages[-1].content }}", history="append")
    conversation = chat.start("Hi")
    with pytest.raises(DataError, match="shows the policy's turn 0 times"):
        conversation.add(act(chat, "3"), "ok")


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
    params = rlkit.SamplingParams(max_tokens=4)
    assert chat.params(params).stop == (end,)
    assert chat.params(rlkit.SamplingParams(stop=("x",))).stop == ("x", "<|im_end|>")
    assert chat.params(rlkit.SamplingParams(stop=())).stop == ()
    assert act(chat, "3<|im_end|>") == "3"
    conversation = played(chat, "Hi", ("3<|im_end|>", "And 2?"))
    assert "3<|im_end|>\n<|im_start|>user" in shown(t, conversation.prompt)


def test_end_tokens_that_need_no_word(monkeypatch):
    """An end token of the model is trained as the template writes it; other tokens after a turn end none."""
    always_a_head = "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}<|assistant|>"
    last_differs = "{% for m in messages %}{{ m.content }}{{ '<|im_end|>' if loop.last else '<|eot_id|>' }}{% endfor %}"
    text_first = "{% for m in messages %}{{ m.content }}. END <|eom_id|>{% endfor %}"
    both = ("<|endoftext|>", "<|im_end|>")
    block = "{% for m in messages %}{{ m.content }}<|eom_id|><|im_end|>{% endfor %}"
    refuses = "{% if messages|length > 1 %}{{ raise_exception('one') }}{% endif %}{{ messages[0].content }}<|eom_id|>"
    for template, ends, end in (
        (CHATML, both, "<|im_end|>"),
        (TEMPLATES["glm"], ("<|endoftext|>", "<|user|>"), "<|user|>"),
        (always_a_head, both, "<|endoftext|>"),
        (last_differs, ("<|endoftext|>",), "<|endoftext|>"),
        (text_first, both, "<|endoftext|>"),
        (block, both, "<|im_end|>"),
        (refuses, both, None),
        (None, both, "<|endoftext|>"),
        (None, (), ""),
    ):
        t = base_model(monkeypatch, template, ends)
        chat = Chat(t)
        assert chat.ends == set(t.eos_ids), template
        assert chat.params(rlkit.SamplingParams()).stop is None, template
        assert end is None or shown(t, chat.end) == end, template


@for_each(
    ("settings", "message"),
    [
        ({"system": 3}, "Chat.system"),
        ({"prefill": None}, "Chat.prefill"),
        ({"history": "keep"}, "Chat.history"),
        ({"template": ""}, "template"),
        ({"thinking": 1, "template": "{{ enable_thinking }}"}, "Chat.thinking"),
    ],
)
def test_wrong_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        Chat(tokenizer("chatml"), **settings)


def test_options_are_kept_but_for_the_changed_ones():
    """Those that are read into something else, too: the template, the renderer, the variables."""
    t = tokenizer("qwen3")
    given = {
        "template": "{{ mood }}{{ thinking }}{% for m in messages %}{{ m.content }}{% endfor %}",
        "variables": {"mood": "!"},
        "thinking": False,
    }
    chat = Chat(t, system="S", prefill="<", history="append", tool_format="json", renderer=None, **given)
    for changes in ({"history": "none"}, {"prefill": "<"}, {"system": "S"}):
        changed = chat.with_options(**changes)
        assert shown(t, changed.start("Hi").prompt) == shown(t, chat.start("Hi").prompt) == "!FalseSHi<"
        assert (changed.tool_format, changed.renderer) == ("json", None)
        assert changed.history == changes.get("history", "append")
    assert shown(t, chat.with_options(template=None, thinking=None).start("Hi").prompt).endswith("assistant\n<")
    with pytest.raises(ConfigError, match="Chat: no option 'colour'"):
        chat.with_options(colour="red")


def test_what_cannot_be_added_changes_nothing():
    """A sampled or a given answer before an observation that is none, or that cannot be rendered."""
    t = tokenizer("chatml")
    chat, wrong = Chat(t), [{"role": "user", "content": [{"type": "image"}]}]
    answer = chat.action(t.encode("4<|im_end|>", special=True))
    for add in (
        lambda conversation, observation: conversation.add(answer, observation),
        lambda conversation, observation: conversation.demonstrate({"role": "assistant", "content": "4"}, observation),
        lambda conversation, observation: conversation.demonstrate(
            {"role": "assistant", "content": "4"}, observation, lead=False
        ),
    ):
        conversation, twin = chat.start("2 + 2?"), chat.start("2 + 2?")
        for observation in (3, wrong, np.array([-1])):
            with pytest.raises(DataError):
                add(conversation, observation)
        for each in (conversation, twin):
            add(each, "And 3?")
        assert conversation.messages == twin.messages
        assert conversation.prompt.tolist() == twin.prompt.tolist()


def test_only_actions_are_added():
    conversation = Chat(tokenizer("chatml")).start("Hi")
    with pytest.raises(DataError, match=r"action: got 'text' \(str\); expected an Action"):
        conversation.add("text", "ok")
    conversation.add(Action("typed"), "ok")  # an action without tokens adds none
    assert "typed" not in shown(tokenizer("chatml"), conversation.prompt)
