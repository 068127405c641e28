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
from rlkit.gateway._requests import ChatRequest, read_posted
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


def user(content, **more):
    return {"role": "user", "content": content, **more}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def call(arguments, **more):
    return {"type": "function", "function": {"name": "add", "arguments": arguments}, **more}


def calling(arguments, **more):
    """A conversation about a call."""
    told = [user("2+2?"), assistant(None, tool_calls=[call(arguments, id="c1")])]
    return [*told, {"role": "tool", "tool_call_id": "c1", "content": "4", **more}]


def told(content="A", **more):
    """A question, this answer, and the question again."""
    return [user("Q"), assistant(content, **more), user("Q")]


def called(content, role="tool", **more):
    """A question, an answer that calls, and its result without an id."""
    return [user("Q"), assistant(content, **more), {"role": role, "content": "4"}]


def sides(*before):
    """A pair of answers, each with what is before it."""
    return {"chosen": [*before, assistant("4")], "rejected": [*before, assistant("5")]}


ANSWERED = {"chosen": "4", "rejected": "5"}
Q, A = turn("user", "Q"), turn("assistant", "A")
CALLED = turn("user", "2+2?") + turn("assistant", 'c1:add{"x": 2}')
CALLED_EMPTY = turn("user", "2+2?") + turn("assistant", "c1:add{}") + turn("tool", "4=c1")
NAMED = turn("assistant", "call00000:add{}") + turn("tool", "4=call00000")
PARTS = [{"type": "text", "text": "Q"}, {"type": "input_text", "text": "R"}]
EMPTY = {"name": None, "audio": None, "refusal": None, "function_call": {"name": None, "arguments": None}}
PROMPTS = [  # conversations that an answer follows, and the text before the answer
    ([user("Q")], Q),
    (np.array([user("Q"), assistant("A"), user("B")], object), Q + A + turn("user", "B")),
    ([user(np.array(PARTS, object))], turn("user", "Q\nR")),
    (told(PARTS), Q + turn("assistant", "QR") + Q),
    ([{"role": "developer", "content": "S"}, user("Q")], turn("system", "S") + Q),
    ([user("Q", id=7, metadata={"source": "x"}, weight=1, tool_calls=None, **EMPTY)], Q),
    ([user("")], turn("user", "")),
    ([user("<|im_end|>")], turn("user", "<|im_end|>")),
    (calling('{"x": 2}'), CALLED + turn("tool", "4=c1")),
    (calling({"x": 2}, content=None), CALLED + turn("tool", "=c1")),
    (calling("", content=[{"type": "text", "text": "4"}]), CALLED_EMPTY),
    (calling(None), CALLED_EMPTY),
    (called("I", tool_calls=[call("{}", id="c1")]), Q + turn("assistant", "Ic1:add{}") + turn("tool", "4")),
    (called(None, role="function", function_call={"name": "add", "arguments": "{}"}), Q + NAMED),
    (called("", tool_calls=[{"name": "add", "arguments": {}}]), Q + NAMED),
    (told(reasoning_content="hm", tool_calls=[]), Q + turn("assistant", "(hm)A") + Q),
]
REFUSED = [  # the field that is refused
    ("[0].role", [{"role": "User", "content": "Q"}]),
    ("[0].role", [{"content": "Q"}]),
    ("[1].thinking", told(thinking="a", reasoning="b")),
    ("[1].tool_calls[0]", told("", tool_calls=[{"name": "add", "parameters": {"x": 1}}])),
    ("[1].tool_calls[0].function.arguments", calling('{"x": 1e400}')),
    ("[0].content", [user(None)]),
    ("[1].content", told(None, tool_calls=[])),
    ("[1].content", told(None, reasoning_content="hm")),
    ("[0].content", [user(4)]),
    ("[0].content[0]", [user(["Q"])]),
    ("[0].content[1].type", [user([PARTS[0], {"type": "image_url", "image_url": {"url": "x.png"}}])]),
    ("[0].content[0].text", [user([{"type": "text", "text": 4}])]),
    ("[0].content", [user("half \ud83d")]),
    ("[0]", [{"from": "human", "value": "Q"}]),
    ("[0]", ["Q"]),
    ("[0].images", [user("Q", images=["x.png"])]),
    ("[1].refusal", told(None, refusal="No.")),
    ("[1].weight", told(weight=0)),
    ("[0].tool_calls", [user("Q", tool_calls=[call("{}")])]),
    ("[1].tool_calls", told(tool_calls="add()")),
    ("[1].tool_calls[0]", told(tool_calls=["add()"])),
    ("[1].tool_calls[0].type", told(tool_calls=[{"type": "custom"}])),
    ("[1].tool_calls[0].function", told(tool_calls=[{"type": "function"}])),
    ("[1].tool_calls[0].function.name", told(tool_calls=[{"type": "function", "function": {"arguments": "{}"}}])),
    ("[1].tool_calls[0].function.arguments", calling("{x: 2}")),
    ("[1].tool_calls[0].function.arguments", calling("[2]")),
    ("[2].tool_call_id", calling("{}", tool_call_id=1)),
    ("[1].reasoning_content", told(reasoning_content=["hm"])),
]


def read(row, chat=CHAT, kind="demonstrations"):
    """The datums of a row."""
    (example,) = data.read_examples([row], kind)
    return example.datums(chat)


def decode(tokens):
    return TOKENIZER.decode(tokens, skip_special=False)


def learnt_text(datum):
    return decode(datum.select(datum.tokens))


def by_gateway(messages, _):
    with Gateway(Scripted(TOKENIZER, "4"), chat=CHAT) as gateway, gateway.session() as session:
        request = {"messages": list(messages)}
        return asyncio.run(session.render(read_posted(ChatRequest, request, session).requests[0]))


def prompt_of(row, kind="demonstrations"):
    """The datum before its last answer, which is `4` and its end: of a pair, of the chosen one."""
    first = read(row, kind=kind)[0 if kind == "pairs" else -1]
    assert decode(first.tokens[-2:]) == "4<|im_end|>"
    assert first.mask[-2:].all()
    return first.tokens[:-2]


def file_of(folder, messages):
    path, row = folder / "rows.jsonl", {"prompt": messages, "response": "4", "answer": "4"}
    path.write_text(json.dumps(row, default=np.ndarray.tolist), "utf-8")
    return str(path)


def by_task(messages, folder):
    (task,) = tasks.make_tasks(Taskset(path=file_of(folder, messages)), ExplorerInput(), "t")
    return CHAT.start(task.make().reset(0)).prompt


def by_eval(messages, folder):
    (task,) = cli._make_tasks(cli._parse(["eval", "toy", file_of(folder, messages)])[1])
    return CHAT.start(task.make().reset(0)).prompt


DOORS = {
    "chat": lambda messages, _: CHAT.start(messages).prompt,
    "gateway": by_gateway,
    "messages": lambda messages, _: prompt_of({"messages": [*messages, assistant("4")]}),
    "prompt": lambda messages, _: prompt_of({"prompt": messages, "completion": "4"}),
    "pair": lambda messages, _: prompt_of({"prompt": messages, **ANSWERED}, "pairs"),
    "whole pair": lambda messages, _: prompt_of(sides(*messages), "pairs"),
    "task": by_task,
    "eval": by_eval,
}


@for_each("door", DOORS)
def test_one_conversation_has_one_prompt(door, tmp_path):
    """Whichever way it comes in; what cannot be rendered is refused by its field."""
    for messages, expected in PROMPTS:
        assert decode(DOORS[door](messages, tmp_path)) == expected + HEAD
    for field, messages in REFUSED:
        with pytest.raises((DataError, GatewayError)) as error:
            DOORS[door](messages, tmp_path)
        assert re.search(re.escape(field) + r": (got|has|is|differs) .*; expected ", str(error.value)), field


ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
END = "<|im_end|>"
HISTORY = [user("Q"), assistant("A"), user("R")]
TWO_TURNS = [*HISTORY, assistant("B")]
DEMONSTRATIONS = [  # rows to imitate, what is learnt, and what comes before it
    ({"message": [user("Q"), assistant("A")]}, "A" + END, Q),
    ({"prompt": "Q", "response": "A"}, "A" + END, Q),
    ({"prompt": [user("Q")], "completion": [assistant([{"type": "text", "text": "A"}])]}, "A" + END, Q),
    ({"messages": None, "prompt": "Q", "response": assistant("A"), "tools": None}, "A" + END, Q),
    ({"messages": TWO_TURNS}, f"A{END}B{END}", Q),
    ({"messages": [user("Q"), assistant(" A<|im_end|>\n")]}, " A<|im_end|>\n" + END, Q),
    ({"messages": [*calling('{"x": 2}'), assistant("4")]}, f'c1:add{{"x": 2}}{END}4{END}', turn("user", "2+2?")),
    ({"messages": [user("Q"), assistant("A")], "tools": [ADD]}, "A" + END, "[add]" + Q),
    ({"messages": [user("Q"), assistant("A")], "tools": json.dumps([ADD])}, "A" + END, "[add]" + Q),
]
IMITATED = "demonstrations"
NOTHING = "has the fields ['prompt', 'response']; expected a field 'response' that is not null"
NOT_LEARNT = [  # kind, row, and what is said
    (IMITATED, {"prompt": "Q", "response": " \n"}, "response: has an empty answer"),
    (IMITATED, {"prompt": "Q", "response": None}, NOTHING),
    (IMITATED, {"prompt": "Q", "response": {"answer": 4}}, "response: got"),
    (IMITATED, {"prompt": "Q", "response": [user("A")]}, "response: has no message of the assistant"),
    (IMITATED, {"prompt": "Q", "response": []}, "response: has no messages"),
    (IMITATED, {"prompt": "Q", "response": "half \ud83d"}, "response: has half of a surrogate pair"),
    (IMITATED, {"prompt": TWO_TURNS, "response": "B"}, "prompt: ends with a message of the assistant"),
    (IMITATED, {"prompt": json.dumps([user("Q")]), "response": "A"}, "prompt: got"),
    (IMITATED, {"prompt": "Q"}, "has the fields ['prompt']; expected a field 'response'"),
    (IMITATED, {"a": 1}, "has the fields ['a']; expected a field 'messages', or 'prompt' and 'response'"),
    (IMITATED, {"messages": [user("Q")]}, "messages: has no message of the assistant"),
    (IMITATED, {"messages": [assistant("A")]}, "messages: begins with a message of the assistant"),
    (IMITATED, {"messages": [user("Q"), assistant("")]}, "messages: has an empty answer"),
    (IMITATED, {"messages": TWO_TURNS, "tools": "add"}, "tools: got 'add'"),
    (IMITATED, {"messages": TWO_TURNS, "tools": [{"name": "add"}]}, "tools[0]: got"),
    (IMITATED, None, "got None"),
    ("texts", {"prompt": ["abc"]}, "prompt: got ['abc'] (list)"),
]


def test_demonstrations():
    for row, learnt, before in DEMONSTRATIONS:
        (datum,) = read(row)
        assert (learnt_text(datum), decode(datum.tokens[: np.argmax(datum.mask)])) == (learnt, before + HEAD)


PAIRS = [  # a row, and what is before its two answers
    ({"prompt": "Q", **ANSWERED}, Q),
    ({"prompt": "Q", **sides()}, Q),
    ({"prompt": "Q", "chosen": assistant("4"), "rejected": assistant("5")}, Q),
    ({"prompt": "Q", **sides(user("Q"))}, Q),
    ({"prompt": [user("Q")], **sides(user("Q"))}, Q),
    (sides(user("Q")), Q),
    ({"prompt": "Q", **sides(*HISTORY)}, Q + A + turn("user", "R")),
    ({"prompt": HISTORY, **ANSWERED}, Q + A + turn("user", "R")),
    ({"prompt": "Q", **ANSWERED, "tools": [ADD]}, "[add]" + Q),
]
UNFIT = [
    ({"prompt": "R", **sides(user("Q"))}, "chosen: does not contain"),
    ({"prompt": [user("R")], **sides(user("Q"))}, "chosen: does not begin"),
    (sides(user("Q")) | {"rejected": [user("R"), assistant("5")]}, "rejected: differs from chosen before its last"),
    ({"prompt": "Q", **sides(user("Q")), "rejected": "5"}, "has one answer with its prompt"),
    (ANSWERED, "has the fields ['chosen', 'rejected']; expected a field 'prompt'"),
    ({"prompt": "Q", "chosen": "4"}, "has the fields ['chosen', 'prompt']; expected a field 'rejected'"),
    ({"prompt": "Q", "chosen": "4", "rejected": ""}, "rejected: has an empty answer"),
    ({"prompt": "Q", "chosen": 4, "rejected": "5"}, "chosen: got 4 (int)"),
    ({"prompt": "Q", "chosen": [user("Q")], "rejected": [user("Q")]}, "chosen: ends with the role 'user'"),
    ({"prompt": "Q", "chosen": [*HISTORY[1:], assistant("4")], "rejected": "5"}, "chosen: has 3 messages"),
    ({"prompt": "Q", "chosen": "a", "rejected": " a"}, "rejected: is the same as chosen"),
]


def test_a_pair_is_two_datums():
    for row, before in PAIRS:
        for datum, answer in zip(read(row, kind="pairs"), "45", strict=True):
            assert (decode(datum.tokens), learnt_text(datum)) == (f"{before}{HEAD}{answer}{END}", answer + END)


@for_each(("kind", "row", "expected"), [*NOT_LEARNT, *[("pairs", *each) for each in UNFIT]])
def test_rows_that_are_refused(kind, row, expected):
    right = {"prompt": "Q", "response": "A", **ANSWERED}
    with pytest.raises(DataError, match=re.escape(f"rows.jsonl: row 1: {expected}")):
        data.read_examples([right, row], kind, where="rows.jsonl")


def test_kinds_of_rows():
    with pytest.raises(rlkit.ConfigError, match="kind: got 'preferences'"):
        data.read_examples([], "preferences")
    with pytest.raises(rlkit.DataError, match="row 0: its text has 1 tokens"):
        read({"prompt": "a"}, kind="texts")


NESTED = {"ground_truth": "34", "style": "rule"}
ANSWERS = [  # an answer, and texts that are right and wrong with every reward that reads one
    ("34", "34", "35"),
    (34.0, "34", "35"),
    (0.5, "0.5", "5"),
    (["34", "thirty-four"], "34", "35"),
    ([35, 34], "34", "36"),
]
NO_ANSWERS = [  # what is said instead
    (NESTED, "answer: got {'ground_truth': '34', 'style': 'rule'} (dict)", "response_key=answer.ground_truth"),
    ({"a": {"b": 1}}, "answer: got", "answer.a.b"),
    (None, "has the fields", "expected a field 'answer' that is not null"),
    (True, "answer: got True (bool)", ""),
    (float("nan"), "answer: got nan", ""),
    ([], "answer: is an empty list", ""),
    (["34", {"x": 1}], "answer: got {'x': 1}", ""),
    ("half \ud83d", "answer: has half of a surrogate pair", ""),
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


def answered(tmp_path, answer, reward):
    """A task with this answer."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "Q", "answer": answer}), "utf-8")
    taskset = Taskset(path=str(path), format=Format(response_key="answer"), default_reward_fn_type=reward)
    (task,) = tasks.make_tasks(taskset, ExplorerInput(), "t")
    return task.make()


@for_each("reward", SCORED)
@for_each(("answer", "right", "wrong"), ANSWERS)
def test_answers(reward, answer, right, wrong, tmp_path):
    form, full = SCORED[reward]
    scores = [answered(tmp_path, answer, reward).step(Action(form.format(text))).reward for text in (right, wrong)]
    assert scores == [pytest.approx(full), pytest.approx(full - 1)]


@for_each(("answer", "what", "why"), NO_ANSWERS)
def test_answers_that_no_reward_reads(answer, what, why, tmp_path):
    with pytest.raises(DataError, match=re.escape(f"rows.jsonl: row 0: {what}") + ".*" + re.escape(why)):
        answered(tmp_path, answer, "answer_reward")


def test_files(tmp_path):
    given = [{"prompt": "a\u2028", "response": "b"}]  # some call it the end of a line; JSON does not
    text = json.dumps(given[0], ensure_ascii=False).encode()
    path = tmp_path / "rows"
    for suffix, content, expected in (
        (".jsonl", text + b"\r\n\n", ""),
        (".json", codecs.BOM_UTF8 + b"[" + text + b"]", ""),
        (".jsonl", codecs.BOM_UTF8 + text, ""),
        (".jsonl", '{"prompt": "a"}'.encode("utf-16"), "cannot be read"),
        (".json", b'[{"prompt": "\xff"}]', "cannot be read"),
        (".json", text, "cannot be read: expected a list of rows"),
        (".jsonl", b"", "is empty"),
        (".jsonl", b'{}\n\n{"a": ', "cannot be read: line 3, column 7: Expecting value"),
        (".csv", b"a", "a file that ends in"),
        (".none", None, "a file that ends in"),
        ("-none.jsonl", None, "a file that exists"),
    ):
        file = path.with_name(path.name + suffix)
        if content is not None:
            file.write_bytes(content)
        if expected:
            with pytest.raises(rlkit.ConfigError, match=f"here: .*{expected}"):
                data.read_rows(str(file), where="here")
        else:
            assert data.read_rows(str(file), where="here") == given
    path.with_suffix(".jsonl").write_text('{"prompt": "a"}\n[1]\n', "utf-8")
    with pytest.raises(DataError, match="row 1: got"):
        data.read_rows(str(path.with_suffix(".jsonl")), where="here")


def test_rows_that_do_not_fit(caplog):
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
THOUGHT, NO_THOUGHT = "<think>\nsum\n</think>\n\n6!", "<think>\n\n</think>\n\n"


def test_templates_that_rewrite_the_history():
    """What was thought in earlier turns is left out, and the answer is what comes after the prompt of a sampler."""
    whole = turn("user", "2+2?") + turn("assistant", "4!") + turn("user", "3+3?") + HEAD
    for thinking, answer, before, learnt, shared in (
        (None, assistant("6!"), "", NO_THOUGHT + "6!", NO_THOUGHT),  # of a pair the template puts it before either
        (None, assistant(THOUGHT), "", THOUGHT, ""),
        (False, assistant("6!"), NO_THOUGHT, "6!", ""),
        (False, assistant(THOUGHT), "content: is written otherwise, or not at all, after the prompt", None, ""),
        (None, assistant("6!", reasoning_content="sum"), "reasoning_content: is not written by the model's", None, ""),
    ):
        chat = Chat(TOKENIZER, template=QWEN3, thinking=thinking)
        said = SAID if thinking is None else [SAID[0], assistant("4!"), SAID[2]]  # what was thought is learnt as well
        rows = [{"messages": [*said, answer]}, {"prompt": SAID, "chosen": answer, "rejected": "7!"}]
        for row, kind in zip(rows, (IMITATED, "pairs"), strict=True):
            if learnt is None:
                with pytest.raises(DataError, match=rf"data: row 0: messages\[3\]\.{before}"):
                    read(row, chat, kind)
                continue
            datum = read(row, chat, kind)[-1 if kind == "demonstrations" else 0]
            assert decode(datum.tokens[~datum.mask]) == whole + before + (shared if kind == "pairs" else "")
            assert decode(datum.tokens) == whole + before + learnt + END


def learning(path, where, kind, backend):
    """Settings of a run that learns from a file."""
    given = [where, f"algorithm.algorithm_type={kind}", f"backend={backend}", "seed=0", "mode=train"]
    return [*given, f"buffer.trainer_input.experience_buffer.path={path}", f"checkpoint_root_dir={path.parent}"]


@for_each("thinking", [None, True, False])
@for_each("prompt", [[user("2+2?")], SAID])
def test_dpo_prefers_the_chosen_answer(prompt, thinking, tmp_path, tiny):
    """With a history that the template rewrites, too: nothing of it is trained."""
    row = {"prompt": prompt, "chosen": "6!", "rejected": "7?"}
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(row), "utf-8")
    more = [
        f"name={len(prompt)}{thinking}",
        "algorithm.optimizer.lr=0.01",
        "buffer.batch_size=1",
        "buffer.total_steps=6",
    ]
    more += [f"model.enable_thinking={json.dumps(thinking)}", f"model.custom_chat_template={json.dumps(QWEN3)}"]
    settings = recipes.load(overrides=[*learning(path, f"model.model_path={tiny('llama')}", "dpo", "local"), *more])
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
    path = tmp_path / "rows.jsonl"
    where = f"model.model_path={tiny('llama')}" if backend == "local" else "options.max_length=100"
    given = learning(path, where, "sft", backend)
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
    for kind, given in ((IMITATED, {"messages": talk}), ("pairs", row)):
        datum = read(given, chat, kind)[0]
        if talk[-1]["content"].startswith("\n"):  # the prompt of a sampler ends before the line break
            assert t.decode(whole, skip_special=False).startswith(t.decode(datum.tokens, skip_special=False))
        else:
            assert datum.tokens.tolist() == whole[: len(datum)].tolist()
        answer = t.decode(datum.select(datum.tokens), skip_special=False)
        assert answer.strip().startswith(("it is 3." if kind == "demonstrations" else talk[-1]["content"]).strip()[:5])


def written(content="{{ m.content }}", arguments="{{ c.function.arguments | tojson }}", of="m.tool_calls or []"):
    """A template of calls, in the manner of one family or another."""
    calls = f"{{% for c in {of} %}}{{{{ c.function.name }}}}{arguments}{{% endfor %}}"
    head = "{% if add_generation_prompt %}assistant: {% endif %}"
    return f"{{% for m in messages %}}{{{{ m.role }}}}: {content}{calls}<|im_end|>{{% endfor %}}{head}"


NULL = "{% if m.content is not none %}{{ m.content }}{% endif %}"
FAMILIES = [  # a template, what is learnt of a call, and before it where text beside calls is written
    (written(), "add", "I look."),
    (written(arguments="{{ '' + c.function.arguments }}"), "add", "I look."),
    (written(NULL, of="m.tool_calls or [] if m.content is none"), "add", None),
    (written("{% if not m.tool_calls %}{{ m.content }}{% endif %}"), "add", None),
    (CHATML, '<tool_call>\n{"name": "add", "arguments": ', "I look.\n"),  # they are written as hermes does
]


@for_each(("template", "call", "before"), FAMILIES)
def test_calls_are_given_as_the_template_reads_them(template, call, before):
    """As objects or text, beside null or an empty content; where a template would lose something, it is refused."""
    chat, (asked, answer, result) = Chat(TOKENIZER, template=template), calling('{"x": 2}')
    assert f'{call}{{"x": 2}}' in decode(chat.start([asked, answer, result]).prompt)
    assert learnt_text(*read({"messages": [asked, answer]}, chat)).startswith(f'{call}{{"x": 2}}')
    both = {"messages": [asked, answer | {"content": "I look."}]}
    if before is None:
        with pytest.raises(DataError, match=r"row 0: messages\[1\]\.(content|tool_calls): is (not )?written"):
            read(both, chat)
    else:
        assert learnt_text(*read(both, chat)).startswith(f'{before}{call}{{"x": 2}}')


def test_messages_that_a_template_leaves_out():
    skipping = "{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}"
    chat = Chat(TOKENIZER, template=skipping)
    what = r"messages\[2\]\.content: is not written by the chat template, which leaves out the role 'tool'"
    with pytest.raises(DataError, match=what):
        chat.start([user("Q"), assistant("A"), {"role": "tool", "content": "4"}])
    quoted = Chat(TOKENIZER, template="{% for m in messages %}{{ m.content | tojson }}{% endfor %}")
    assert TOKENIZER.decode(quoted.start([user('a "b"\nc')]).prompt) == r'"a \"b\"\nc"'


@for_each("name", ["reasoning_content", "thinking", "reasoning"])
@for_each("given", ["reasoning_content", "thinking", "reasoning"])
def test_thoughts_have_the_name_that_the_template_reads(name, given):
    template = f"{{% for m in messages %}}{{{{ m.{name} or '' }}}}{{{{ m.content }}}}<|im_end|>{{% endfor %}}"
    (datum,) = read({"messages": [user("Q"), assistant("A", **{given: "hm"})]}, Chat(TOKENIZER, template=template))
    assert learnt_text(datum) == f"hmA{END}"


HEADS = (
    "{% for m in messages %}{{ m.role }}:{{ m.content.split('</think>')[-1] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant:<think>\n{% endif %}"
)
LAST = (
    "{% set ns = namespace(s='') %}{% for m in messages %}{% if m.role == 'system' %}{% set ns.s = m.content + ' ' %}"
    "{% elif m.role == 'user' %}[{{ ns.s if loop.last else '' }}{{ m.content }}]"
    "{% else %} {{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
ENDS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.role == 'assistant' and loop.last %}<|im_end|>"
    "{% else %}<|im_start|>{% endif %}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
FIRST = "user: Q<|im_start|>assistant: A"


def test_what_templates_write_around_an_answer():
    for template, prefill, row, expected in (
        # a head for samplers alone: an answer continues it, or a thought that never ends would be learnt
        (
            HEADS,
            "",
            {"prompt": "Q", "response": "<think>\ns</think>4"},
            [f"user:Q{END}assistant:<think>\ns</think>4{END}"],
        ),
        (
            HEADS,
            "",
            {"prompt": "Q", "response": "4"},
            "content: is written otherwise, or not at all, after the prompt, w",
        ),
        (QWEN3, "OK: ", {"prompt": "Q", "response": "OK: a"}, [f"{Q}{HEAD}OK: a{END}"]),
        (QWEN3, "OK: ", {"prompt": "Q", "response": "a"}, "content: does not begin with Chat.prefill, 'OK: '"),
        # the system prompt before the last question: as for a sampler; the answer begins with the template's blank
        (LAST, "", {"messages": [{"role": "system", "content": "S"}, user("Q"), assistant("A")]}, [f"[S Q] A{END}"]),
        # what ends the last turn is learnt of each, and the history has what the template writes there
        (ENDS, "", {"messages": TWO_TURNS}, [FIRST + END, f"{FIRST}<|im_start|>user: R<|im_start|>assistant: B{END}"]),
    ):
        chat = Chat(TOKENIZER, template=template, prefill=prefill)
        if isinstance(expected, list):
            assert [decode(datum.tokens) for datum in read(row, chat)] == expected
        else:
            with pytest.raises(DataError, match=re.escape(f"messages[1].{expected}")):
                read(row, chat)


@for_each("end", ["", END])
def test_the_end_that_a_template_writes_is_learnt(end, monkeypatch):
    """What it writes after every turn ends them, with a warning if the model does not know it."""
    monkeypatch.setattr("rlkit.chat._core._warned", set())
    with pytest.warns(UserWarning, match="ends a turn with '<|im_start|>'"):
        chat = Chat(TOKENIZER, template="{% for m in messages %}{{ m.content }}<|im_start|>{% endfor %}" + end)
    learnt = [read({"messages": TWO_TURNS}, chat), read({"prompt": "Q", **ANSWERED}, chat, "pairs")]
    texts = ["".join(map(learnt_text, datums)) for datums in learnt]
    assert texts == ["A<|im_start|>B<|im_start|>", "4<|im_start|>5<|im_start|>"]


def test_what_two_answers_share_is_not_their_prompt():
    """Only what the template puts before them: not a word that is in the calls of both, too."""
    sides = [assistant("add", tool_calls=[call({"x": x}, id="c1")]) for x in (1, 2)]
    chosen, _ = read({"prompt": "Q", "chosen": sides[0], "rejected": sides[1]}, kind="pairs")
    assert learnt_text(chosen) == f'addc1:add{{"x": 1}}{END}'
    sides = [assistant(text, reasoning_content="hm") for text in "45"]  # thoughts are the answers' own
    datums = read({"prompt": "Q", "chosen": sides[0], "rejected": sides[1]}, kind="pairs")
    assert [learnt_text(datum) for datum in datums] == ["(hm)4" + END, "(hm)5" + END]


def test_keys_with_dots_and_a_system_prompt_of_the_row():
    form = Format(prompt_key="input.text", messages_key="m.x", tools_key="a.b", system_prompt_key="sys")
    row = {"input": {"text": "Q"}, "chosen": "A", "rejected": "B", "a": {"b": [ADD]}, "sys": "S"}
    (pair,) = data.read_examples([row], "pairs", form)
    chosen, _ = pair.datums(CHAT)
    assert decode(chosen.tokens) == f"[add]{turn('system', 'S')}{Q}{HEAD}A{END}"
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
    pair = {"chosen": sides[0], "rejected": sides[1]}
    data.read_examples([pair | {"source": "x"}, pair | {"by": 1}], "pairs", where="p")  # once for all rows
    names = ["t: not read: the fields images", "p: not read: the fields by, id of messages, source"]
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
