"""Rows and messages as other people write them: rendered right, or refused by name, through every door alike."""

from __future__ import annotations

import asyncio
import codecs
import json
import re

import numpy as np
import pytest

import rlkit
from rlkit import cli, recipes
from rlkit.chat import Chat
from rlkit.envs import Action
from rlkit.errors import DataError
from rlkit.gateway import Gateway, GatewayError
from rlkit.gateway.dialects.chat import ChatCall
from rlkit.recipes import data, tasks
from rlkit.recipes.settings import ExplorerInput, Format, Taskset
from tests.chat.build import CHATML, LLAMA3, QWEN3
from tests.chat.build import tokenizer as bpe
from tests.each import for_each
from tests.gateway.parts import Scripted

# Every field that it knows is seen in the text.
TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.id }}:{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% if m.tool_call_id %}={{ m.tool_call_id }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOKENIZER = rlkit.connect("toy").tokenizer
CHAT = Chat(TOKENIZER, template=TEMPLATE)
HEAD = "<|im_start|>assistant\n"


def turn(role, text):
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def call(arguments, **more):
    return {"type": "function", "function": {"name": "add", "arguments": arguments}, **more}


def calling(arguments, **more):
    """A conversation about a call."""
    said = [user("2+2?"), assistant(None, tool_calls=[call(arguments, id="c1")])]
    return [*said, {"role": "tool", "tool_call_id": "c1", "content": "4", **more}]


CALLED = turn("user", "2+2?") + turn("assistant", 'c1:add{"x": 2}')
Q = turn("user", "Q")
PARTS = [{"type": "text", "text": "Q"}]
# Conversations that an answer follows: the text before the answer, or the field that is refused.
PROMPTS = [
    ([user("Q")], Q),
    (np.array([user("Q"), assistant("A"), user("B")], object), Q + turn("assistant", "A") + turn("user", "B")),
    ([user(PARTS)], Q),
    ([user(np.array(PARTS, object))], Q),
    ([user([*PARTS, {"type": "text", "text": "R"}])], turn("user", "Q\nR")),
    ([user([{"type": "input_text", "text": "Q"}])], Q),
    ([user("Q"), assistant([*PARTS, *PARTS]), user("Q")], Q + turn("assistant", "QQ") + Q),
    ([{"role": "developer", "content": "S"}, user("Q")], turn("system", "S") + Q),
    ([{**user("Q"), "name": None, "tool_calls": None, "audio": None, "refusal": None}], Q),
    ([{**user("Q"), "id": 7, "metadata": {"source": "x"}}], Q),
    ([{**user("Q"), "weight": 1}], Q),
    ([user("")], turn("user", "")),
    ([user("<|im_end|>")], turn("user", "<|im_end|>")),
    (calling('{"x": 2}'), CALLED + turn("tool", "4=c1")),
    (calling({"x": 2}), CALLED + turn("tool", "4=c1")),
    (calling({"x": 2}, content=None), CALLED + turn("tool", "=c1")),
    (calling({"x": 2}, content=[{"type": "text", "text": "4"}]), CALLED + turn("tool", "4=c1")),
    (calling(""), turn("user", "2+2?") + turn("assistant", "c1:add{}") + turn("tool", "4=c1")),
    (calling(None), turn("user", "2+2?") + turn("assistant", "c1:add{}") + turn("tool", "4=c1")),
    (
        [user("Q"), assistant("I add.", tool_calls=[call("{}", id="c1")]), {"role": "tool", "content": "4"}],
        Q + turn("assistant", "I add.c1:add{}") + turn("tool", "4"),
    ),
    (
        [
            user("Q"),
            assistant(None, function_call={"name": "add", "arguments": "{}"}),
            {"role": "function", "content": "4"},
        ],
        Q + turn("assistant", "call00000:add{}") + turn("tool", "4=call00000"),
    ),
    (
        [user("Q"), assistant("", tool_calls=[{"name": "add", "arguments": {}}]), {"role": "tool", "content": "4"}],
        Q + turn("assistant", "call00000:add{}") + turn("tool", "4=call00000"),
    ),
    ([user("Q"), assistant("A", reasoning_content="hm"), user("Q")], Q + turn("assistant", "(hm)A") + Q),
    ([user("Q"), assistant("A", reasoning="hm"), user("Q")], Q + turn("assistant", "(hm)A") + Q),
    ([user("Q"), assistant("A", tool_calls=[], audio=None), user("Q")], Q + turn("assistant", "A") + Q),
    ([{"role": "human", "content": "Q"}], r"[0].role"),
    ([{"role": "User", "content": "Q"}], r"[0].role"),
    ([user("Q"), assistant("A", train=False), user("Q")], r"[1].train"),
    ([user("Q"), assistant("A", thinking="a", reasoning="b"), user("Q")], r"[1].thinking"),
    ([user("Q"), assistant("A", thinking="hm"), user("Q")], Q + turn("assistant", "(hm)A") + Q),
    (
        [user("Q"), assistant("", tool_calls=[{"name": "add", "parameters": {"x": 1}}]), user("Q")],
        r"[1].tool_calls[0]",
    ),
    (calling('{"x": 1e400}'), r"[1].tool_calls[0].function.arguments"),
    ([{**user("Q"), "function_call": {"name": None, "arguments": None}}], Q),
    ([user(None)], r"[0].content"),
    ([{"role": "user"}], r"[0].content"),
    ([{"role": "system", "content": None}, user("Q")], r"[0].content"),
    ([user("Q"), assistant(None), user("Q")], r"[1].content"),
    ([user("Q"), assistant(None, tool_calls=[]), user("Q")], r"[1].content"),
    ([user("Q"), assistant(None, reasoning_content="hm"), user("Q")], r"[1].content"),
    ([user(4)], r"[0].content"),
    ([user(True)], r"[0].content"),
    ([user({"text": "Q"})], r"[0].content"),
    ([user(["Q"])], r"[0].content[0]"),
    ([user([{"text": "Q"}])], r"[0].content[0]"),
    ([user([*PARTS, {"type": "image_url", "image_url": {"url": "x.png"}}])], r"[0].content[1].type"),
    ([user([{"type": "text", "text": 4}])], r"[0].content[0].text"),
    ([user([{"type": "text", "text": None}])], r"[0].content[0].text"),
    ([user("half \ud83d")], r"[0].content"),
    ([{"content": "Q"}], r"[0].role"),
    ([{"role": 1, "content": "Q"}], r"[0].role"),
    ([{"role": "a b", "content": "Q"}], r"[0].role"),
    ([{"from": "human", "value": "Q"}], r"[0]"),
    (["Q"], r"[0]"),
    ([{**user("Q"), "images": ["x.png"]}], r"[0].images"),
    ([{**user("Q"), "audio": {"id": "a"}}], r"[0].audio"),
    ([user("Q"), assistant(None, refusal="No."), user("Q")], r"[1].refusal"),
    ([user("Q"), assistant("A", weight=0), user("Q")], r"[1].weight"),
    ([{**user("Q"), "tool_calls": [call("{}")]}], r"[0].tool_calls"),
    ([user("Q"), assistant("A", tool_calls="add()"), user("Q")], r"[1].tool_calls"),
    ([user("Q"), assistant("A", tool_calls=["add()"]), user("Q")], r"[1].tool_calls[0]"),
    ([user("Q"), assistant("A", tool_calls=[{"type": "custom"}]), user("Q")], r"[1].tool_calls[0].type"),
    ([user("Q"), assistant("A", tool_calls=[{"type": "function"}]), user("Q")], r"[1].tool_calls[0].function"),
    (calling("{x: 2}"), r"[1].tool_calls[0].function.arguments"),
    (calling("[2]"), r"[1].tool_calls[0].function.arguments"),
    (calling(2), r"[1].tool_calls[0].function.arguments"),
    (
        [user("Q"), assistant("", tool_calls=[{"type": "function", "function": {"arguments": "{}"}}]), user("Q")],
        r"[1].tool_calls[0].function.name",
    ),
    (calling("{}", content={"result": 4}), r"[2].content"),
    (calling("{}", content=4), r"[2].content"),
    (calling("{}", tool_call_id=1), r"[2].tool_call_id"),
    ([{**user("Q"), "name": 3}], r"[0].name"),
    ([user("Q"), assistant("A", reasoning_content=["hm"]), user("Q")], r"[1].reasoning_content"),
]


def by_chat(messages):
    return CHAT.start(messages).prompt


def by_gateway(messages):
    with Gateway(Scripted(TOKENIZER, "4"), chat=CHAT) as gateway, gateway.session() as session:
        request = {"messages": list(messages)}
        return asyncio.run(session.render(ChatCall.parse(request, session).requests[0]))


def by_messages(messages):
    return prompt_of({"messages": [*messages, assistant("4")]})


def by_prompt(messages):
    return prompt_of({"prompt": messages, "completion": "4"})


def by_pair(messages):
    return prompt_of({"prompt": messages, "chosen": "4", "rejected": "5"}, "pairs")


def by_whole_pair(messages):
    return prompt_of({"chosen": [*messages, assistant("4")], "rejected": [*messages, assistant("5")]}, "pairs")


def read(row, chat=CHAT, kind="demonstrations"):
    """The datums of a row."""
    (example,) = data.read_examples([row], kind)
    return example.datums(chat)


def whole_text(datum):
    return TOKENIZER.decode(datum.tokens, skip_special=False)


def learnt_text(datum):
    return TOKENIZER.decode(datum.select(datum.tokens), skip_special=False)


def prompt_of(row, kind="demonstrations"):
    """The datum before its last answer, which is `4` and its end: of a pair, of the chosen one."""
    first = read(row, kind=kind)[0 if kind == "pairs" else -1]
    assert TOKENIZER.decode(first.tokens[-2:], skip_special=False) == "4<|im_end|>"
    assert first.mask[-2:].all()
    return first.tokens[:-2]


def by_task(messages, tmp_path):
    (task,) = tasks.make_tasks(Taskset(path=file_of(tmp_path, messages)), ExplorerInput(), "t")
    return CHAT.start(task.make().reset(0)).prompt


def by_eval(messages, tmp_path):
    (task,) = cli._make_tasks(cli._parse(["eval", "toy", file_of(tmp_path, messages)])[1])
    return CHAT.start(task.make().reset(0)).prompt


def file_of(tmp_path, messages):
    path = tmp_path / "rows.jsonl"
    row = {"prompt": messages, "response": "4", "answer": "4"}
    path.write_text(json.dumps(row, default=np.ndarray.tolist), "utf-8")
    return str(path)


DOORS = (by_chat, by_gateway, by_messages, by_prompt, by_pair, by_whole_pair, by_task, by_eval)


@for_each("door", DOORS)
@for_each(("messages", "expected"), PROMPTS)
def test_one_conversation_has_one_prompt(door, messages, expected, tmp_path):
    """Whichever way it comes in; what cannot be rendered is refused by its field."""
    given = (messages, tmp_path) if door in (by_task, by_eval) else (messages,)
    if expected.startswith("["):
        with pytest.raises((DataError, GatewayError)) as error:
            door(*given)
        assert re.search(re.escape(expected) + r": (got|has|is|differs) .*; expected ", str(error.value))
    else:
        assert TOKENIZER.decode(door(*given), skip_special=False) == expected + HEAD


ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
END = "<|im_end|>"
# Rows to imitate: what is learnt, with what comes before it; or what is refused.
DEMONSTRATIONS = [
    ({"messages": [user("Q"), assistant("A")]}, Q + HEAD, "A" + END),
    ({"message": [user("Q"), assistant("A")]}, Q + HEAD, "A" + END),
    ({"prompt": "Q", "response": "A"}, Q + HEAD, "A" + END),
    ({"prompt": "Q", "completion": "A"}, Q + HEAD, "A" + END),
    ({"prompt": [user("Q")], "completion": [assistant("A")]}, Q + HEAD, "A" + END),
    ({"prompt": "Q", "response": assistant("A")}, Q + HEAD, "A" + END),
    ({"prompt": "Q", "response": [assistant([{"type": "text", "text": "A"}])]}, Q + HEAD, "A" + END),
    ({"messages": None, "prompt": "Q", "response": "A"}, Q + HEAD, "A" + END),
    (
        {"prompt": [user("Q"), assistant("A"), user("Q")], "response": "B"},
        f"{Q}{turn('assistant', 'A')}{Q}{HEAD}",
        "B" + END,
    ),
    ({"messages": [user("Q"), assistant("A"), user("R"), assistant("B")]}, Q + HEAD, f"A{END}B{END}"),
    ({"messages": [user("Q"), assistant(" A\n")]}, Q + HEAD, " A\n" + END),
    ({"messages": [user("Q"), assistant("A<|im_end|>")]}, Q + HEAD, "A<|im_end|>" + END),
    ({"messages": [user("Q"), assistant("A", reasoning_content="hm")]}, Q + HEAD, "(hm)A" + END),
    (
        {"messages": [user("Q"), assistant("I add.", tool_calls=[call('{"x": 2}', id="c1")])]},
        Q + HEAD,
        f'I add.c1:add{{"x": 2}}{END}',
    ),
    ({"messages": [*calling('{"x": 2}'), assistant("4")]}, turn("user", "2+2?") + HEAD, f'c1:add{{"x": 2}}{END}4{END}'),
    ({"messages": [user("Q"), assistant("A")], "tools": [ADD]}, f"[add]{Q}{HEAD}", "A" + END),
    ({"messages": [user("Q"), assistant("A")], "tools": json.dumps([ADD])}, f"[add]{Q}{HEAD}", "A" + END),
    ({"messages": [user("Q"), assistant("A")], "tools": None}, Q + HEAD, "A" + END),
    ({"prompt": "Q", "response": 4.0}, "response: got 4.0 (float)", ""),
    ({"prompt": "Q", "response": True}, "response: got True (bool)", ""),
    ({"prompt": "Q", "response": ""}, "response: has an empty answer", ""),
    (
        {"prompt": "Q", "response": None},
        "has the fields ['prompt', 'response']; expected a field 'response' that is not null",
        "",
    ),
    ({"prompt": "Q", "response": {"answer": 4}}, "response: got", ""),
    ({"prompt": "Q", "response": ["A"]}, "response[0]: got 'A'", ""),
    ({"prompt": "Q", "response": [user("A")]}, "response: has no message of the assistant", ""),
    ({"prompt": "Q", "response": []}, "response: has no messages", ""),
    ({"prompt": "Q", "response": "half \ud83d"}, "response: has half of a surrogate pair", ""),
    ({"prompt": 5, "response": "A"}, "prompt: got 5 (int)", ""),
    ({"prompt": [user("Q"), assistant("A")], "response": "B"}, "prompt: ends with a message of the assistant", ""),
    ({"prompt": "Q"}, "has the fields ['prompt']; expected a field 'response'", ""),
    ({"text": "Q"}, "has the fields ['text']; expected a field 'messages', or 'prompt' and 'response'", ""),
    ({"messages": [user("Q")]}, "messages: has no message of the assistant", ""),
    ({"messages": [assistant("A")]}, "messages: begins with a message of the assistant", ""),
    ({"messages": [user("Q"), assistant("")]}, "messages: has an empty answer", ""),
    ({"messages": "Q"}, "messages: got 'Q'", ""),
    ({"messages": [user("Q"), assistant("A")], "tools": "add"}, "tools: got 'add'", ""),
    ({"messages": [user("Q"), assistant("A")], "tools": {"add": {}}}, "tools: got", ""),
]


@for_each(("row", "before", "learnt"), DEMONSTRATIONS)
def test_demonstrations(row, before, learnt):
    """What is learnt is what the template writes, and nothing of the prompt."""
    if not learnt:
        with pytest.raises(DataError, match=re.escape(f"rows.jsonl: row 1: {before}")):
            data.read_examples([{"prompt": "Q", "response": "A"}, row], "demonstrations", where="rows.jsonl")
        return
    (datum,) = read(row)
    assert TOKENIZER.decode(datum.tokens[: np.argmax(datum.mask)], skip_special=False) == before
    assert learnt_text(datum) == learnt


HISTORY = [user("Q"), assistant("A"), user("R")]
TWO_TURNS = [*HISTORY, assistant("B")]
PAIRS = [
    ({"prompt": "Q", "chosen": "4", "rejected": "5"}, Q),
    ({"prompt": "Q", "chosen": [assistant("4")], "rejected": [assistant("5")]}, Q),
    ({"prompt": "Q", "chosen": assistant("4"), "rejected": assistant("5")}, Q),
    ({"prompt": "Q", "chosen": [user("Q"), assistant("4")], "rejected": [user("Q"), assistant("5")]}, Q),
    ({"prompt": [user("Q")], "chosen": [user("Q"), assistant("4")], "rejected": [user("Q"), assistant("5")]}, Q),
    ({"chosen": [user("Q"), assistant("4")], "rejected": [user("Q"), assistant("5")]}, Q),
    (
        {"prompt": "Q", "chosen": [*HISTORY, assistant("4")], "rejected": [*HISTORY, assistant("5")]},
        Q + turn("assistant", "A") + turn("user", "R"),
    ),
    ({"prompt": HISTORY, "chosen": "4", "rejected": "5"}, Q + turn("assistant", "A") + turn("user", "R")),
    ({"prompt": "Q", "chosen": "4", "rejected": "5", "tools": [ADD]}, "[add]" + Q),
    (
        {"prompt": "R", "chosen": [user("Q"), assistant("4")], "rejected": [user("Q"), assistant("5")]},
        "!chosen: does not",
    ),
    (
        {"prompt": [user("R")], "chosen": [user("Q"), assistant("4")], "rejected": [user("Q"), assistant("5")]},
        "!chosen: does not",
    ),
    (
        {"chosen": [user("Q"), assistant("4")], "rejected": [user("R"), assistant("5")]},
        "!rejected: differs from chosen before its last message",
    ),
    ({"prompt": "Q", "chosen": [user("Q"), assistant("4")], "rejected": "5"}, "!has one answer with its prompt"),
    ({"chosen": "4", "rejected": "5"}, "!has the fields ['chosen', 'rejected']; expected a field 'prompt'"),
    ({"prompt": "Q", "chosen": "4"}, "!has the fields ['chosen', 'prompt']; expected a field 'rejected'"),
    ({"prompt": "Q", "chosen": "4", "rejected": ""}, "!rejected: has an empty answer"),
    ({"prompt": "Q", "chosen": 4, "rejected": "5"}, "!chosen: got 4 (int)"),
    ({"prompt": "Q", "chosen": [user("Q")], "rejected": [user("Q")]}, "!chosen: ends with the role 'user'"),
    ({"prompt": "Q", "chosen": [*HISTORY[1:], assistant("4")], "rejected": "5"}, "!chosen: has 3 messages"),
    ({"prompt": "Q", "chosen": assistant(None), "rejected": "5"}, "!chosen[0].content: got None"),
]


@for_each(("row", "expected"), PAIRS)
def test_a_pair_is_two_datums(row, expected):
    if expected.startswith("!"):
        with pytest.raises(DataError, match=re.escape(f"rows.jsonl: row 0: {expected[1:]}")):
            data.read_examples([row], "pairs", where="rows.jsonl")
        return
    chosen, rejected = read(row, kind="pairs")
    for datum, answer in ((chosen, "4"), (rejected, "5")):
        assert whole_text(datum) == expected + HEAD + answer + END
        assert learnt_text(datum) == answer + END


NESTED = {"ground_truth": "34", "style": "rule"}
ANSWERS = [  # an answer, and texts that are right and wrong with every reward that reads one
    ("34", "34", "35"),
    (34, "34", "35"),
    (34.0, "34", "35"),
    (0.5, "0.5", "5"),
    (["34", "thirty-four"], "34", "35"),
    (["35", "34"], "34", "36"),
    ([34], "34", "35"),
    (NESTED, "t: row 0: answer: got {'ground_truth': '34', 'style': 'rule'} (dict)", "answer.ground_truth"),
    ({"a": {"b": 1}}, "t: row 0: answer: got", "answer.a.b"),
    (None, "t: row 0: has the fields", "expected a field 'answer' that is not null"),
    (True, "t: row 0: answer: got True (bool)", ""),
    (float("nan"), "t: row 0: answer: got nan", ""),
    ([], "t: row 0: answer: is an empty list", ""),
    ([None], "t: row 0: answer: got None", ""),
    (["34", {"x": 1}], "t: row 0: answer: got {'x': 1}", ""),
    ("half \ud83d", "t: row 0: answer: has half of a surrogate pair", ""),
]
SCORED = {  # how each reward has an answer written, and what it gives then
    "answer_reward": ("{}", 1.0),
    "boxed_reward": (r"\boxed{{{}}}", 1.0),
    "exact_match": ("{}", 1.0),
    "contains": ("It is {}.", 1.0),
    "math_reward": ("<think>x</think> <answer>{}</answer>", 1.1),
    "math_boxed_reward": (r"\boxed{{{}}}", 1.0),
    "algebra_boxed_reward": (r"\boxed{{{}}}", 1.0),
}


@for_each("reward", SCORED)
@for_each(("answer", "right", "wrong"), ANSWERS)
def test_answers(reward, answer, right, wrong, tmp_path, monkeypatch):
    """Text, numbers, and lists of accepted answers; others are refused when the tasks are made."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "Q", "answer": answer}), "utf-8")
    taskset = Taskset(path=str(path), format=Format(response_key="answer"), default_reward_fn_type=reward)
    if right.startswith("t: "):
        with pytest.raises(DataError) as error:
            tasks.make_tasks(taskset, ExplorerInput(), "t")
        assert right.replace("t: ", f"{path}: ") in str(error.value)
        assert wrong in str(error.value)
        return
    (task,) = tasks.make_tasks(taskset, ExplorerInput(), "t")
    form, full = SCORED[reward]
    scores = [task.make().step(Action(form.format(text))).reward for text in (right, wrong)]
    assert scores == [pytest.approx(full), pytest.approx(full - 1)]


@for_each(
    ("content", "expected"),
    [
        (codecs.BOM_UTF8 + b'{"prompt": "a"}', ""),
        ('{"prompt": "a"}'.encode("utf-16"), "cannot be read"),
        (b'{"prompt": "\xff"}', "cannot be read"),
        (b'{"prompt": "a"}\n[1]', "row 1: got"),
    ],
)
@for_each("suffix", [".jsonl", ".json"])
def test_files(content, expected, suffix, tmp_path):
    path = tmp_path / f"rows{suffix}"
    if suffix == ".json" and not content.startswith(codecs.BOM_UTF16_LE):
        content = content.replace(b"{", b"[{").replace(b"\n", b",") + b"]"
    path.write_bytes(content)
    if expected:
        with pytest.raises(rlkit.RlkitError, match=re.escape(expected)):
            data.read_rows(str(path), where="path")
    else:
        assert data.read_rows(str(path), where="path") == [{"prompt": "a"}]


def test_fields_that_are_not_read_are_named_once(caplog):
    rows = [{"prompt": "Q", "response": "A", "source": "x"}, {"prompt": "Q", "response": "A", "id": 1}]
    data.read_examples(rows, "demonstrations", where="rows.jsonl")
    assert [record.getMessage() for record in caplog.records] == ["rows.jsonl: not read: the fields id, source"]


def test_rows_that_do_not_fit(caplog):
    """All are named before the first step; they may be left out, and are counted."""
    rows = [{"prompt": "Q", "response": "A" * n} for n in (1, 500, 2, 600)]
    examples = data.read_examples(rows, "demonstrations", where="rows.jsonl")
    longest = [len(example.datums(CHAT)[0]) for example in examples]
    names = f"rows.jsonl: row 1 ({longest[1]} tokens), rows.jsonl: row 3 ({longest[3]} tokens)"
    what = f"2 of 4 rows are longer than the policy's context of 100 tokens: {names}"
    with pytest.raises(DataError, match=re.escape(f"{what}; shorten them, or set a.b=true to leave them out")):
        data.fit(examples, CHAT, 100, setting="a.b=true")
    assert len(data.fit(examples, CHAT, 100, leave_out=True)) == 2
    assert [record.getMessage() for record in caplog.records] == [f"left out: {what}"]
    assert len(data.fit(examples, CHAT, longest[3])) == 4
    with pytest.raises(DataError, match="4 of 4 rows"):
        data.fit(examples, CHAT, 5, leave_out=True)


SAID = [user("2+2?"), assistant("<think>\nsum\n</think>\n\n4!"), user("3+3?")]


@for_each(
    ("thinking", "answer", "before", "learnt"),
    [
        (None, assistant("6!"), "", "<think>\n\n</think>\n\n6!"),
        (None, assistant("<think>\nsum\n</think>\n\n6!"), "", "<think>\nsum\n</think>\n\n6!"),
        (False, assistant("6!"), "<think>\n\n</think>\n\n", "6!"),
        (
            False,
            assistant("<think>\nsum\n</think>\n\n6!"),
            "content: is written otherwise, or not at all, after the prompt",
            "",
        ),
        (
            None,
            assistant("6!", reasoning_content="sum"),
            "reasoning_content: is not written by the model's chat template",
            "",
        ),
    ],
)
def test_templates_that_rewrite_the_history(thinking, answer, before, learnt):
    """What was thought in earlier turns is left out, and the answer is what comes after the prompt of a sampler."""
    chat = Chat(TOKENIZER, template=QWEN3, thinking=thinking)
    said = SAID if thinking is None else [SAID[0], assistant("4!"), SAID[2]]  # what was thought is learnt as well
    rows = [{"messages": [*said, answer]}, {"prompt": SAID, "chosen": answer, "rejected": "7!"}]
    for row, kind in zip(rows, ("demonstrations", "pairs"), strict=True):
        if not learnt:
            with pytest.raises(DataError, match=rf"data: row 0: messages\[3\]\.{before}"):
                read(row, chat, kind)
            continue
        datum = read(row, chat, kind)[-1 if kind == "demonstrations" else 0]
        whole = turn("user", "2+2?") + turn("assistant", "4!") + turn("user", "3+3?") + HEAD + before
        prompt = TOKENIZER.decode(datum.tokens[~datum.mask], skip_special=False)
        shared = "<think>\n\n</think>\n\n" if kind == "pairs" and learnt.startswith("<think>\n\n") else ""
        assert prompt == whole + shared  # of a pair, also what the template puts before either answer
        assert whole_text(datum) == whole + learnt + END


@for_each("answer", ["4", "<think>\nsum</think>4"])
def test_a_head_that_the_template_writes_for_samplers_alone(answer):
    """An answer continues it, or is refused: a thought that was begun and never ends would be learnt."""
    opened = "{% for m in messages %}{{ m.role }}:{{ m.content.split('</think>')[-1] }}<|im_end|>{% endfor %}"
    chat = Chat(TOKENIZER, template=opened + "{% if add_generation_prompt %}assistant:<think>\n{% endif %}")
    row = {"prompt": "2+2?", "response": answer}
    if answer == "4":
        with pytest.raises(
            DataError, match="content: is written otherwise, or not at all, after the prompt, which ends with"
        ):
            read(row, chat)
        return
    (datum,) = read(row, chat)
    assert whole_text(datum) == f"user:2+2?{END}assistant:<think>\nsum</think>4{END}"


@for_each("thinking", [None, True, False])
@for_each("prompt", [[user("2+2?")], SAID])
def test_dpo_prefers_the_chosen_answer(prompt, thinking, tmp_path, tiny):
    """With a history that the template rewrites, too: nothing of it is trained."""
    row = {"prompt": prompt, "chosen": "6!", "rejected": "7?"}
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(row), "utf-8")
    settings = recipes.load(
        overrides=[
            *("backend=local", f"model.model_path={tiny('llama')}", "seed=0", "mode=train", "buffer.batch_size=1"),
            *("algorithm.algorithm_type=dpo", "algorithm.optimizer.lr=0.01", "buffer.total_steps=6"),
            *(f"checkpoint_root_dir={tmp_path}", f"name={len(prompt)}{thinking}"),
            *(f"model.enable_thinking={json.dumps(thinking)}", f"model.custom_chat_template={json.dumps(QWEN3)}"),
            f"buffer.trainer_input.experience_buffer.path={path}",
        ]
    )
    (outcome,) = recipes.run(settings)
    before, after = (rlkit.sampler("local", model=tiny("llama"), path=path) for path in (None, outcome.path))
    chat = Chat(before.tokenizer, template=QWEN3, thinking=thinking)
    gains = []
    for datum in read(row, chat, "pairs"):
        found = [sampler.logprobs(datum.tokens).result()[datum.mask].sum() for sampler in (before, after)]
        gains.append(float(found[1] - found[0]))
    assert gains[0] > 1, gains
    assert gains[1] < -1, gains


@pytest.mark.parametrize("backend", ["toy", "local"])
def test_check_sees_rows_that_do_not_fit(backend, tmp_path, tiny, capsys):
    """And those that the chat template refuses, before a model is loaded."""
    path = tmp_path / "rows.jsonl"
    more = [f"model.model_path={tiny('llama')}"] if backend == "local" else ["options.max_length=100"]
    given = [f"backend={backend}", "seed=0", "algorithm.algorithm_type=sft", "mode=train", *more]
    given += [f"buffer.trainer_input.experience_buffer.path={path}", f"checkpoint_root_dir={tmp_path}"]
    (tmp_path / "run.yaml").write_text("{}", "utf-8")
    for row, expected in (
        ({"prompt": "Q", "response": "A" * 5000}, "1 of 1 rows are longer than the policy's context"),
        ({"prompt": "Q", "response": 4}, "row 0: response: got 4 (int)"),
        ({"prompt": "Q", "response": "A"}, ""),
    ):
        path.write_text(json.dumps(row), "utf-8")
        code = cli.main(["train", str(tmp_path / "run.yaml"), "--check", *given])
        assert code == 2 * bool(expected)
        assert expected in capsys.readouterr().err


TALK = [user("What is 1 + 2?"), assistant("it is 3."), user("and 2?"), assistant("it is 2 .")]
BLANK = (  # as Vicuna and Llama-2 write: an answer begins with a blank, which joins its first word
    "{% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }}{% else %} ASSISTANT: {{ m.content }}"
    "<|endoftext|>{% endif %}{% endfor %}{% if add_generation_prompt %} ASSISTANT:{% endif %}"
)


@for_each("template", [BLANK, CHATML, LLAMA3])
@for_each("talk", [TALK, [TALK[0], assistant(" it is")], [TALK[0], assistant("\nit is\n\nthe  3 ")]])
def test_tokens_are_those_of_the_whole_text(template, talk):
    """With merges: no token of an answer is cut in two, whether it is learnt, preferred or part of the history."""
    t = bpe("llama3" if template is LLAMA3 else "chatml")
    chat = Chat(t, template=template)
    whole = chat.control.encode(chat.template.render(talk))
    row = {"prompt": talk[:-1], "chosen": talk[-1], "rejected": "no"}
    for kind, given in (("demonstrations", {"messages": talk}), ("pairs", row)):
        datum = read(given, chat, kind)[0]
        if talk[-1]["content"].startswith("\n"):  # the prompt of a sampler ends before the line break
            assert t.decode(whole, skip_special=False).startswith(t.decode(datum.tokens, skip_special=False))
        else:
            assert datum.tokens.tolist() == whole[: len(datum)].tolist()
        answer = t.decode(datum.select(datum.tokens), skip_special=False)
        assert answer.strip().startswith(("it is 3." if kind == "demonstrations" else talk[-1]["content"]).strip()[:5])


def written(content="{{ m.content }}", arguments="{{ c.function.arguments | tojson }}", of="m.tool_calls or []"):
    """A template of calls, in the manner of one family or another."""
    return (
        "{% for m in messages %}{{ m.role }}: " + content + "{% for c in " + of + " %}{{ c.function.name }}" + arguments
        + "{% endfor %}<|im_end|>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )  # fmt: skip


FAMILIES = {  # a template, and whether text beside calls is written
    "objects": (written(), True),
    "text": (written(arguments="{{ '' + c.function.arguments }}"), True),
    "null": (
        written(
            "{% if m.content is not none %}{{ m.content }}{% endif %}", of="m.tool_calls or [] if m.content is none"
        ),
        False,
    ),
    "instead": (written("{% if not m.tool_calls %}{{ m.content }}{% endif %}"), False),
    "none": (CHATML, True),  # they are written as hermes does
}


@for_each("family", FAMILIES)
def test_calls_are_given_as_the_template_reads_them(family):
    """As objects or text, beside null or an empty content; where a template would lose something, it is refused."""
    template, beside = FAMILIES[family]
    chat = Chat(TOKENIZER, template=template)
    said = calling('{"x": 2}')
    prompt = TOKENIZER.decode(chat.start(said).prompt, skip_special=False)
    assert "add" in prompt
    assert '"x": 2' in prompt
    for content in (None, "I look."):
        row = {"messages": [said[0], assistant(content, tool_calls=said[1]["tool_calls"])]}
        if content and not beside:
            with pytest.raises(DataError, match=r"row 0: messages\[1\]\.(content|tool_calls): is (not )?written"):
                read(row, chat)
            continue
        (datum,) = read(row, chat)
        learnt = learnt_text(datum)
        assert learnt.startswith(content or ("<tool_call>" if family == "none" else "add"))
        assert '"x": 2' in learnt
        assert learnt.endswith(END)


def test_messages_that_a_template_leaves_out():
    """A role that it does not know, a tool's result for one, is refused and not lost."""
    skipping = "{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}"
    chat = Chat(TOKENIZER, template=skipping)
    with pytest.raises(
        DataError,
        match=r"messages\[2\]\.content: is not written by the chat template, which leaves out the role 'tool'",
    ):
        chat.start([user("Q"), assistant("A"), {"role": "tool", "content": "4"}])
    quoted = Chat(TOKENIZER, template="{% for m in messages %}{{ m.content | tojson }}{% endfor %}")
    assert TOKENIZER.decode(quoted.start([user('a "b"\nc')]).prompt) == r'"a \"b\"\nc"'


@for_each("name", ["reasoning_content", "thinking", "reasoning"])
@for_each("given", ["reasoning_content", "thinking", "reasoning"])
def test_thoughts_have_the_name_that_the_template_reads(name, given):
    template = f"{{% for m in messages %}}{{{{ m.{name} or '' }}}}{{{{ m.content }}}}<|im_end|>{{% endfor %}}"
    (datum,) = read({"messages": [user("Q"), assistant("A", **{given: "hm"})]}, Chat(TOKENIZER, template=template))
    assert learnt_text(datum) == f"hmA{END}"


def test_a_system_prompt_that_is_written_before_the_last_question_alone():
    """It is in the prompt of the answer, as in that of a sampler; the answer begins with the template's blank."""
    template = (
        "{% set ns = namespace(s='') %}{% for m in messages %}"
        "{% if m.role == 'system' %}{% set ns.s = m.content + ' ' %}"
        "{% elif m.role == 'user' %}[{{ ns.s if loop.last else '' }}{{ m.content }}]"
        "{% else %} {{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    )
    row = {"messages": [{"role": "system", "content": "S"}, user("Q"), assistant("A")]}
    (datum,) = read(row, Chat(TOKENIZER, template=template))
    assert whole_text(datum) == f"[S Q] A{END}"


def test_a_turn_ends_otherwise_within_a_conversation():
    """What ends the last turn is learnt of each, and the history has what the template writes there."""
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.role == 'assistant' and loop.last %}<|im_end|>"
        "{% else %}<|im_start|>{% endif %}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    shown = [whole_text(datum) for datum in read({"messages": TWO_TURNS}, Chat(TOKENIZER, template=template))]
    first, second = "user: Q<|im_start|>assistant: A", "<|im_start|>user: R<|im_start|>assistant: B<|im_end|>"
    assert shown == [first + END, first + second]


def test_an_eos_after_the_last_turn_alone_does_not_end_turns(monkeypatch):
    """What the template writes after every turn does, and there is a warning: the model does not know it as an end."""
    monkeypatch.setattr("rlkit.chat._core._warned", set())
    template = "{% for m in messages %}{{ m.content }}<|im_start|>{% endfor %}<|im_end|>"
    with pytest.warns(UserWarning, match="ends a turn with '<|im_start|>'"):
        chat = Chat(TOKENIZER, template=template)
    learnt = [learnt_text(datum) for datum in read({"messages": TWO_TURNS}, chat)]
    assert "".join(learnt) == "A<|im_start|>B<|im_start|>"


def test_a_prefill_begins_the_answer():
    """An answer goes on from it; another one, which would make a thought that never ends, is refused."""
    chat = Chat(TOKENIZER, template=QWEN3, prefill="OK: ")
    (datum,) = read({"prompt": "Q", "response": "OK: a"}, chat)
    assert whole_text(datum) == f"{Q}{HEAD}OK: a{END}"
    with pytest.raises(DataError, match=r"messages\[1\]\.content: does not begin with Chat\.prefill, 'OK: '"):
        read({"prompt": "Q", "response": "a"}, chat)


def test_what_two_answers_share_is_not_their_prompt():
    """Only what the template puts before them: not a word that is in the calls of both, too."""
    sides = [assistant("add", tool_calls=[call({"x": x}, id="c1")]) for x in (1, 2)]
    chosen, _ = read({"prompt": "Q", "chosen": sides[0], "rejected": sides[1]}, kind="pairs")
    assert learnt_text(chosen) == f'addc1:add{{"x": 1}}{END}'
    sides = [assistant(text, reasoning_content="hm") for text in "45"]  # thoughts are the answers' own
    datums = read({"prompt": "Q", "chosen": sides[0], "rejected": sides[1]}, kind="pairs")
    assert [learnt_text(datum) for datum in datums] == ["(hm)4" + END, "(hm)5" + END]


@for_each(
    ("row", "kind", "expected"),
    [
        ({"prompt": 4}, "texts", "prompt: got 4 (int)"),
        ({"prompt": ["abc"]}, "texts", "prompt: got ['abc'] (list)"),
        ({"prompt": None}, "texts", "a field 'prompt' that is not null"),
        ({"prompt": "\udc00"}, "texts", "prompt: has half"),
        ("Q", "pairs", "row 0: got 'Q'"),
        (None, "demonstrations", "row 0: got None"),
        ({"prompt": "Q", "chosen": "a", "rejected": "a"}, "pairs", "rejected: is the same as chosen"),
        ({"prompt": "Q", "response": " \n"}, "demonstrations", "response: has an empty answer"),
        ({"prompt": json.dumps([user("Q")]), "response": "A"}, "demonstrations", "this is their JSON text"),
        ({"prompt": "Q", "chosen": json.dumps([assistant("A")]), "rejected": "b"}, "pairs", "this is their JSON text"),
        ({"messages": [user("Q"), assistant("A")], "tools": [{"name": "add"}]}, "demonstrations", "tools[0]: got"),
    ],
)
def test_other_rows_that_are_refused(row, kind, expected):
    with pytest.raises(DataError, match=re.escape(expected)):
        data.read_examples([row], kind)
    with pytest.raises(rlkit.ConfigError, match="kind: got 'preferences'"):
        data.read_examples([], "preferences")


def test_keys_with_dots_and_a_system_prompt_of_the_row():
    form = Format(prompt_key="input.text", messages_key="m.x", tools_key="a.b", system_prompt_key="sys")
    row = {"input": {"text": "Q"}, "chosen": "A", "rejected": "B", "a": {"b": [ADD]}, "sys": "S"}
    (pair,) = data.read_examples([row], "pairs", form)
    chosen, _ = pair.datums(CHAT)
    assert whole_text(chosen) == f"[add]{turn('system', 'S')}{Q}{HEAD}A{END}"
    (example,) = data.read_examples([{"m": {"x": [user("Q"), assistant("A")]}, "sys": "S"}], "demonstrations", form)
    assert [message["role"] for message in example.prompt] == ["system", "user"]


def test_tables_nest_arrays(caplog):
    """Read nested arrays as lists, let ids differ within a pair, and name the fields that are not read."""
    schema = {"type": "function", "function": {"name": "add", "parameters": {"required": np.array(["x"], object)}}}
    said = np.array([user("Q"), assistant("", tool_calls=np.array([call({"x": np.array([1.5])})], object))], object)
    row = {"messages": said, "tools": np.array([schema], object), "images": np.array([], float)}
    (example,) = data.read_examples([row], "demonstrations", where="t")
    (datum,) = example.datums(CHAT)
    assert learnt_text(datum) == f'call00000:add{{"x": [1.5]}}{END}'
    sides = [[{**user("Q"), "id": i}, {**assistant(text), "id": i}] for i, text in enumerate("AB")]
    data.read_examples([{"chosen": sides[0], "rejected": sides[1]}], "pairs", where="p")
    names = ["t: not read: the fields images", "p: not read: the fields id of messages"]
    assert [record.getMessage() for record in caplog.records] == names


def test_eval_names_the_fields_of_a_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "Q", "reward_model": NESTED}), "utf-8")
    keys = ["--set", "prompt_key=question", "--set", "response_key=reward_model.ground_truth"]
    given = ["eval", "toy", str(path), *keys]
    (task,) = cli._make_tasks(cli._parse(given)[1])
    assert task.make().step(Action("34")).reward == 1.0
    with pytest.raises(rlkit.ConfigError, match="for files, prompt_key or response_key"):
        cli._make_tasks(cli._parse([*given, "--set", "size=3"])[1])
