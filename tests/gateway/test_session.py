"""What is sampled in a session is what is trained, whatever clients make of the history."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import json
import os
import socket
import threading
import time
import tracemalloc
import weakref
from collections import deque

import numpy as np
import pytest

import rlkit
from rlkit import BackendError, ConfigError, Future, SamplingParams, _threads
from rlkit.chat import Chat
from rlkit.gateway import Gateway, GatewayError, Limits, Request, Sampling
from rlkit.gateway import _recording as recording
from rlkit.gateway import _session as session_module
from rlkit.trajectory import datums
from tests.each import for_each
from tests.gateway.parts import Scripted, ask, said, user
from tests.rollouts.parts import RandomSampler

TOKENIZER = rlkit.connect("toy").tokenizer
LONG = 30.0  # seconds: what comes at once, on a machine that is busy with other things
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}},
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'


@pytest.fixture
def session_of():
    opened = []

    def make(say, **options):
        sampler = Scripted(TOKENIZER, say)
        gateway = Gateway(sampler)
        opened.append(gateway)
        return sampler, gateway.session(**options)

    yield make
    for gateway in opened:
        gateway.close()


def test_a_conversation_that_goes_on_is_one_datum_of_the_tokens_that_were_sampled(session_of):
    sampler, session = session_of(["Hi.", "  Four. ", "Bye."])
    messages = [user("Hello")]
    for more in ("2 + 2?", "Thanks", None):
        reply = ask(session, messages)
        messages += [{"role": "assistant", "content": reply.choices[0].content.strip()}, user(more)]
    first, second, third = session.turns
    assert [node.parent for node in session.turns] == [None, first, second]
    assert len(session.branches) == 1
    for before, after in ((first, second), (second, third)):
        assert np.array_equal(after.sample.prompt[: before.tokens.size], before.tokens)
    trajectory = session.trajectory(1.0)
    assert [turn.reward for turn in trajectory.turns] == [0.0, 0.0, 1.0]
    (datum,) = datums(trajectory, 1.0)
    assert int(datum.mask.sum()) == sum(node.sample.tokens.size for node in session.turns)
    assert [m["role"] for m in trajectory.messages] == ["user", "assistant"] * 3
    assert [request[0].tolist() for request in sampler.requests] == [n.sample.prompt.tolist() for n in session.turns]
    assert {turn.version for turn in trajectory.turns} == {3}


def test_calls_are_read_and_their_conversation_goes_on(session_of):
    _, session = session_of([f"Let me see.\n{CALL}", "It is 2."])
    messages = [user("1 + 1?")]
    choice = ask(session, messages, tools=[ADD]).choices[0]
    assert (choice.finish, choice.content, choice.calls[0].name) == ("tool_calls", "Let me see.", "add")
    assert dict(choice.calls[0].arguments) == {"x": 1}
    messages += [said(choice), {"role": "tool", "tool_call_id": choice.calls[0].id, "content": "2"}]
    last = ask(session, messages, tools=[ADD]).choices[0]
    assert (last.finish, last.content, len(session.branches)) == ("stop", "It is 2.", 1)
    prompt = TOKENIZER.decode(session.turns[1].sample.prompt, skip_special=False)
    assert CALL in prompt


def test_calls_stay_text_without_tools_and_where_they_cannot_be_read(session_of):
    _, session = session_of([CALL, "<tool_call>{nonsense</tool_call>", CALL])
    assert ask(session, [user("a")]).choices[0].content == CALL
    wrong = ask(session, [user("b")], tools=[ADD]).choices[0]
    assert (wrong.content, wrong.calls, wrong.finish) == ("<tool_call>{nonsense</tool_call>", (), "stop")
    assert ask(session, [user("c")], tools=[ADD], tool_choice="none").choices[0].content == CALL


@pytest.mark.parametrize(
    ("choice", "rest"),
    [("required", '{"name": "add", "arguments": {"x": 1}}\n</tool_call>'), ("add", '{"x": 1}}\n</tool_call>')],
)
def test_a_call_that_is_required_begins_in_the_prompt(session_of, choice, rest):
    _, session = session_of([rest, "Two.", "No call"])
    messages = [user("1 + 1?")]
    found = ask(session, messages, tools=[ADD], tool_choice=choice).choices[0]
    assert (found.finish, [dict(call.arguments) for call in found.calls]) == ("tool_calls", [{"x": 1}])
    turn = session.turns[0].sample
    assert TOKENIZER.decode(turn.tokens) == rest
    assert TOKENIZER.decode(turn.prompt).endswith(("<tool_call>\n", '"arguments": '))
    messages += [said(found), {"role": "tool", "tool_call_id": found.calls[0].id, "content": "2"}]
    ask(session, messages, tools=[ADD])
    assert len(session.branches) == 1
    assert CALL in TOKENIZER.decode(session.turns[1].sample.prompt)
    ask(session, [user("x")], tools=[ADD], tool_choice=choice)
    assert session.metrics["unforced"] == 1


def test_a_wish_for_json_is_left_to_the_policy_and_counted(session_of, caplog):
    """A call is as good as JSON. The log says it once in a program."""
    session_module._warn_that_formats_are_free.cache_clear()
    _, session = session_of(['{"a": 1}', "Sure:", "[1", CALL, "[" * 100_000, "x"])
    asks = Sampling(json_field="response_format")
    for i, (tools, count) in enumerate([((), 0), ((), 1), ((), 2), ((ADD,), 2), ((), 3)]):
        ask(session, [user(str(i))], tools=list(tools), sampling=asks)
        assert session.metrics["unforced"] == count, i
    ask(session, [user("free")])
    assert session.metrics["unforced"] == 3
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "response_format" in caplog.text


def test_ids_of_calls_are_unique_and_do_not_depend_on_what_came_first(session_of):
    _, session = session_of([[CALL * 2, CALL], [CALL, CALL]])
    replies = [ask(session, [user("a")], tools=[ADD], n=2) for _ in range(2)]
    ids = [call.id for reply in replies for choice in reply.choices for call in choice.calls]
    assert len(set(ids)) == len(ids) == 5
    assert all(len(each) == 9 and each.isalnum() for each in ids)


@pytest.mark.parametrize("change", ["rewritten", "compacted", "tools", "system"])
def test_another_history_starts_a_branch_and_every_token_is_trained_once(session_of, change):
    _, session = session_of(["One.", "Two.", "Three."])
    messages = [user("Count")]
    messages += [said(ask(session, messages).choices[0]), user("Go on")]
    messages += [said(ask(session, messages).choices[0]), user("And?")]
    fields = {}
    if change == "rewritten":
        messages[1] = {"role": "assistant", "content": "Uno."}
    elif change == "compacted":
        messages = [user("So far: one, two. And?")]
    elif change == "tools":
        fields = {"tools": [ADD]}
    else:
        messages = [{"role": "system", "content": "Be brief."}, *messages]
    ask(session, messages, **fields)
    assert [len(branch.nodes) for branch in session.branches] == [2, 1]
    made = datums(session.trajectory(1.0), 1.0, split="allow")
    assert [int(d.mask.sum()) for d in made] == [
        sum(n.sample.tokens.size for n in branch.nodes) for branch in session.branches
    ]
    assert session.metrics["branches"] == 2
    assert session.metrics["rewritten"] == int(change != "compacted")


def test_a_name_that_the_template_does_not_show_rewrites_nothing(session_of):
    """The tokens continue the turn, and so does the branch."""
    _, session = session_of(["One.", "Two."])
    turn = said(ask(session, [user("Count")]).choices[0])
    ask(session, [{**user("Count"), "name": "Ada"}, turn, user("Go on")])
    assert (session.metrics["rewritten"], len(session.branches)) == (0, 1)


def test_branches_share_what_came_before_they_part(session_of):
    _, session = session_of(["One.", "Left.", "Right."])
    start = [user("Go")]
    start += [said(ask(session, start).choices[0])]
    ask(session, [*start, user("left")])
    ask(session, [*start, user("right")])
    root, left, right = session.turns
    assert [branch.nodes for branch in session.branches] == [[root, left], [root, right]]
    assert [branch.fresh for branch in session.branches] == [[root, left], [right]]
    whole, rest = datums(session.trajectory(1.0), 1.0, split="allow")
    assert int(whole.mask.sum()) == root.sample.tokens.size + left.sample.tokens.size
    assert int(rest.mask.sum()) == right.sample.tokens.size
    assert np.array_equal(rest.tokens[: root.tokens.size], root.tokens)
    assert [len(t.turns) for t in session.trajectories(1.0)] == [2, 1]
    assert [t.reward for t in session.trajectories(1.0)] == [1.0, 1.0]
    last = session.trajectory(1.0, credit="last")
    assert [turn.tokens.size for turn in last.turns] == [root.sample.tokens.size, right.sample.tokens.size]
    assert len(datums(last, 1.0)) == 1
    weighted = session.trajectory(1.0, credit=lambda branches: [0.25, 0.5])
    assert [turn.weight for turn in weighted.turns] == [0.5, 0.25, 0.5]
    with pytest.raises(ConfigError, match="one per branch"):
        session.trajectory(credit=lambda branches: [1.0])
    with pytest.raises(ConfigError, match="credit"):
        session.trajectory(credit="first")


def test_several_completions_are_branches_of_their_own(session_of):
    _, session = session_of([["One.", "Two."], "Three."])
    one, two = ask(session, [user("Go")], n=2).choices
    ask(session, [user("Go"), said(two), user("And?")])
    assert [[n.number for n in branch.nodes] for branch in session.branches] == [[0], [1, 2]]
    assert one.content == "One."


def test_reasoning_may_be_left_out_by_the_client(session_of):
    _, session = session_of(["<think>\nhm\n</think>\n\nFour.", "Yes."])
    choice = ask(session, [user("2 + 2?")]).choices[0]
    assert (choice.reasoning, choice.content) == ("hm", "Four.")
    ask(session, [user("2 + 2?"), said(choice), user("Sure?")])
    assert len(session.branches) == 1


def test_stop_texts_are_cut_from_what_the_client_reads_and_stay_in_what_is_trained(session_of):
    _, session = session_of(["Thought\nObservation:"])
    choice = ask(session, [user("a")], sampling=Sampling(stop=("\nObservation:",))).choices[0]
    assert choice.content == "Thought"
    assert TOKENIZER.decode(choice.sample.tokens[:-1]).endswith("Observation:")


def test_a_text_that_goes_on_is_another_branch_unless_its_tokens_begin_with_those(session_of):
    """It is tokenized as it is: what was sampled for "a" ended with an end token, which the text does not have."""
    _, session = session_of(["b", "d"])
    first = asyncio.run(session.answer(Request(text="a"))).choices[0]
    asyncio.run(session.answer(Request(text="a" + first.text + "c")))
    assert [node.parent for node in session.turns] == [None, None]
    assert np.array_equal(session.turns[1].sample.prompt, TOKENIZER.encode("abc"))


def test_tokens_are_sent_as_they_are(session_of):
    sampler, session = session_of(["b", "c"])
    asyncio.run(session.answer(Request(prompt=np.array([5, 6]))))
    asyncio.run(session.answer(Request(prompt=np.concatenate([session.turns[0].tokens, [7]]))))
    assert sampler.requests[0][0].tolist() == [5, 6]
    assert session.turns[1].parent is session.turns[0]
    with pytest.raises(GatewayError) as caught:
        asyncio.run(session.answer(Request(prompt=np.array([10**6]))))
    assert caught.value.status == 400


def test_the_session_s_params_stand_above_the_client_s():
    sampler = RandomSampler()
    with Gateway(sampler, params=SamplingParams(max_tokens=9, temperature=0.5)) as gateway:
        session = gateway.session()
        ask(session, [user("a")], sampling=Sampling(temperature=2.0, top_p=0.5, max_tokens=4, stop=("x",), seed=7))
        ask(session, [user("a")], sampling=Sampling(max_tokens=40))
    (_, first, _, seed), (_, second, _, _) = sampler.requests
    assert (first.temperature, first.top_p, first.max_tokens, first.stop) == (0.5, 1.0, 4, ("x",))
    assert (second.max_tokens, second.stop) == (9, None)
    assert seed != 7


def test_without_params_the_client_s_count():
    sampler = RandomSampler(max_length=1000)
    with Gateway(sampler) as gateway:
        session = gateway.session()
        ask(session, [user("a")], sampling=Sampling(temperature=0.0, top_k=3, seed=7))
    prompt, params, _, seed = sampler.requests[0]
    assert (params.temperature, params.top_k, params.max_tokens, seed) == (0.0, 3, 1000 - prompt.size, 7)


def test_seeds_do_not_depend_on_what_arrives_first():
    def drawn(order):
        sampler = RandomSampler()
        with Gateway(sampler) as gateway, gateway.session(seed=5) as session:
            for text in order:
                ask(session, [user(text)])
            return {node.sample.prompt.tobytes(): [] for node in session.turns} | {
                node.sample.prompt.tobytes(): node.sample.tokens.tolist() for node in session.turns
            }

    assert drawn("abc") == drawn("cab")
    sampler = RandomSampler()
    with Gateway(sampler) as gateway:
        for seed in (1, 1, 2):
            with gateway.session(seed=seed) as session:
                ask(session, [user("a")])
                ask(session, [user("a")])
    seeds = [seed for *_, seed in sampler.requests]
    assert seeds[:2] == seeds[2:4]
    assert len({*seeds}) == 4


@pytest.mark.parametrize(
    ("limits", "ended"),
    [(Limits(turns=2), "max_turns"), (Limits(tokens=4), "max_total_tokens"), (Limits(seconds=1e-9), "deadline")],
)
def test_limits(limits, ended):
    with Gateway(Scripted(TOKENIZER, lambda _: "abc")) as gateway, gateway.session(limits=limits) as session:
        for _ in range(2 if ended == "max_turns" else 1 if ended == "max_total_tokens" else 0):
            ask(session, [user("a")])
        assert session.ended == ""
        with pytest.raises(GatewayError) as caught:
            ask(session, [user("b")])
        assert (caught.value.status, caught.value.code, caught.value.retry_after) == (429, "limit_reached", None)
        assert session.ended == ended
        assert session.trajectory().truncated
        assert session.trajectory().ended == ended
        assert session.metrics["refused"] == 1


def test_a_prompt_that_is_too_long_is_refused_and_a_shorter_one_goes_on():
    with Gateway(Scripted(TOKENIZER, lambda _: "abc", max_length=300)) as gateway, gateway.session() as session:
        with pytest.raises(GatewayError, match=r"maximum context length is 300 tokens") as caught:
            ask(session, [user("a" * 300)])
        assert (caught.value.status, caught.value.code, session.ended) == (400, "context_length_exceeded", "context")
        ask(session, [user("a")])
        assert session.ended == ""


def test_more_messages_than_the_context_has_tokens_are_not_rendered():
    """A request may have millions, and a template that runs cannot be stopped."""
    with Gateway(Scripted(TOKENIZER, ["x"], max_length=100)) as gateway, gateway.session() as session:
        for method in (session.answer, session.render):
            with pytest.raises(GatewayError, match=r"length is 100 tokens, but there are 101 messages") as caught:
                asyncio.run(method(Request(messages=[user("")] * 101)))
            assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
        assert (session.ended, session.metrics["refused"]) == ("context", 1)


def test_closing_waits_for_no_template(monkeypatch):
    """Renderings that their clients gave up end by themselves, and those that wait for a thread are never begun."""
    monkeypatch.setattr(_threads, "_IDLE", 0.1)
    go_on, began = threading.Event(), []

    class Slow(type(TOKENIZER)):
        def encode(self, text, *, special=False):
            if "slowly" in text:
                began.append(text)
                go_on.wait(4 * LONG)
            return super().encode(text, special=special)

    gateway = Gateway(Scripted(Slow(), lambda _: "x"), open=True)
    host, port = gateway.url.removeprefix("http://").split(":")
    body = json.dumps({"messages": [user("slowly")]}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    most = min(32, (os.cpu_count() or 1) + 4)
    try:
        with contextlib.ExitStack() as clients:
            for _ in range(most + 4):
                clients.enter_context(socket.create_connection((host, int(port)))).sendall(head + body)
            until = time.monotonic() + LONG
            while len(began) < most and time.monotonic() < until:
                time.sleep(0.01)
        closing = threading.Thread(target=gateway.close)
        closing.start()
        closing.join(LONG)
        assert not closing.is_alive()
    finally:
        go_on.set()
    for thread in threading.enumerate():
        if thread.name.startswith("rlkit-gateway-work"):
            thread.join(LONG)
    assert len(began) == most


def test_at_once():
    started, release = threading.Event(), threading.Event()

    async def slow(prompt, params, n, seed):
        started.set()
        await asyncio.to_thread(release.wait)
        return Scripted(TOKENIZER, ["a"]).sample(prompt, params, n=n, seed=seed).result()

    async def main(session):
        first = asyncio.create_task(session.answer(Request(messages=[user("a")])))
        await asyncio.to_thread(started.wait)
        with pytest.raises(GatewayError) as caught:
            await session.answer(Request(messages=[user("b")]))
        assert (caught.value.status, caught.value.retry_after) == (429, 1.0)
        release.set()
        await first
        await session.answer(Request(messages=[user("c")]))

    with Gateway(Scripted(TOKENIZER, [])) as gateway:
        session = gateway.session(limits=Limits(at_once=1), ask=slow)
        asyncio.run(main(session))
        assert session.ended == ""


def test_a_sampler_that_fails_is_told_apart_from_a_bad_prompt(session_of):
    async def broken(prompt, params, n, seed):
        raise BackendError("the machine is on fire")

    _, session = session_of([], ask=broken)
    with pytest.raises(GatewayError) as caught:
        ask(session, [user("a")])
    assert caught.value.status == 503
    assert "fire" not in caught.value.message
    assert isinstance(session.error, BackendError)
    assert session.metrics["errors"] == 1
    assert not session.turns


def test_a_client_that_goes_away_leaves_nothing(session_of):
    asked, dropped, inner = threading.Event(), threading.Event(), concurrent.futures.Future()

    def given_up():
        dropped.set()
        return True

    class Waits(Scripted):
        def sample(self, prompt, params, *, n=1, seed=None):
            asked.set()
            return Future.wrap(inner, on_cancel=given_up)

    async def main(session):
        task = asyncio.create_task(session.answer(Request(messages=[user("a")])))
        assert await asyncio.to_thread(asked.wait, 60)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    with Gateway(Waits(TOKENIZER, [])) as gateway, gateway.session() as session:
        asyncio.run(main(session))
        assert dropped.wait(60)
        assert session.metrics["cancelled"] == 1
        assert not session.turns


def test_sessions_end_with_their_gateway(session_of):
    _, session = session_of(["a"])
    session.close()
    with pytest.raises(GatewayError, match="has ended") as caught:
        ask(session, [user("a")])
    assert (caught.value.status, caught.value.retry_after) == (429, None)
    gateway = Gateway(Scripted(TOKENIZER, []))
    gateway.close()
    for opened in (gateway.session, lambda: gateway.url):
        with pytest.raises(BackendError, match="closed"):
            opened()


def test_sessions_are_found_by_id_and_key_and_an_open_gateway_answers_without():
    with Gateway(Scripted(TOKENIZER, lambda _: "a")) as gateway, gateway.session() as session:
        assert gateway.admit(session.id, None) is gateway.admit(None, session.api_key) is session
        for wrong in (("x", None), (None, "x"), (None, None)):
            with pytest.raises(GatewayError) as caught:
                gateway.admit(*wrong)
            assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
    with Gateway(Scripted(TOKENIZER, lambda _: "a"), open=True, key="secret") as gateway:
        opened = gateway.admit(None, "secret")
        for _ in range(3):
            ask(opened, [user("a")])
        assert not opened.turns
        with pytest.raises(GatewayError):
            gateway.admit(None, "wrong")


def test_an_update_is_for_new_sessions():
    with Gateway(Scripted(TOKENIZER, lambda _: "a", version=1)) as gateway:
        old = gateway.session()
        gateway.update(Scripted(TOKENIZER, lambda _: "a", version=2))
        new = gateway.session()
        ask(old, [user("a")])
        ask(new, [user("a")])
        assert (old.turns[0].sample.version, new.turns[0].sample.version) == (1, 2)


def test_repeats_are_counted_of_the_prompts_asked_for_last(monkeypatch):
    """The seed of a request hangs on how often its prompt was asked for; an open gateway does not remember all."""
    monkeypatch.setattr(recording, "_MOST_PROMPTS", 2)
    remembered, chat = recording.Recording(), Chat(TOKENIZER)
    asked = [remembered.prompt(chat, Request(text=text)).repeat for text in "aabbcaab"]
    assert asked == [0, 1, 0, 1, 0, 0, 1, 0]


@pytest.mark.parametrize("of_prompt", [None, 0, 2, 3])
def test_alternatives(of_prompt):
    """Those of prompt and completion are the sampler's own, whether they are of one pass or of two."""
    with rlkit.connect("toy", seed=0) as policy, policy.sampler().result() as sampler, Gateway(sampler) as gateway:
        sampling = Sampling(max_tokens=3)
        request = Request(text="abc", sampling=sampling, n=2, top_logprobs=2, prompt_logprobs=of_prompt)
        reply = asyncio.run(gateway.session().answer(request))
        for choice in reply.choices:
            tokens = np.concatenate([reply.prompt, choice.sample.tokens])
            ids, logprobs = sampler.top_logprobs(tokens, 2).result()
            assert [list(row) for row in choice.top] == ids[reply.prompt.size :].tolist()
            assert [list(row.values()) for row in choice.top] == logprobs[reply.prompt.size :].tolist()
        if of_prompt:
            ids, logprobs = sampler.top_logprobs(reply.prompt, of_prompt).result()
            assert [list(row) for row in reply.prompt_top[1:]] == ids[1:].tolist()
            assert np.allclose([list(row.values()) for row in reply.prompt_top[1:]], logprobs[1:])
        else:
            assert reply.prompt_top is None
        assert (reply.prompt_logprobs is None) == (of_prompt is None)


def test_a_sampler_that_scores_in_one_pass_is_asked_once():
    """As the local one; the numbers are those of its answer, for prompt and completion."""

    class Both(Scripted):
        asked = 0

        def prompt_logprobs(self, tokens, k):
            self.asked += 1
            own = -np.arange(len(tokens), dtype=np.float32)
            return Future.of((own, np.tile(np.arange(k), (len(tokens), 1)), np.tile(own[:, None], (1, k))))

    sampler = Both(TOKENIZER, lambda _: "d", max_length=64)
    with Gateway(sampler) as gateway:
        request = Request(text="abc", sampling=Sampling(max_tokens=1), top_logprobs=2, prompt_logprobs=2)
        reply = asyncio.run(gateway.session().answer(request))
    assert sampler.asked == 1
    assert reply.prompt_logprobs.tolist() == [0.0, -1.0, -2.0]
    assert reply.prompt_top == [{0: -0.0, 1: -0.0}, {0: -1.0, 1: -1.0}, {0: -2.0, 1: -2.0}]
    assert reply.choices[0].top == [{0: -3.0, 1: -3.0}]


def test_the_chat_is_the_user_s_with_history_append():
    chat = Chat(TOKENIZER, system="Be brief.", history="template")
    with Gateway(Scripted(TOKENIZER, ["a"]), chat=chat) as gateway, gateway.session() as session:
        ask(session, [user("a")])
        assert "Be brief." in TOKENIZER.decode(session.turns[0].sample.prompt)
        assert (gateway.chat.history, chat.history) == ("append", "template")


ODD = [
    {"type": 5},
    {"type": ["string", 5]},
    {"properties": {"x": {"type": 5, "anyOf": 5, "oneOf": "y"}}},
    {"properties": 5},
    {"$ref": "http://schemas.example/x"},
    {"$ref": "#/nowhere"},
    {"properties": {"x": {"pattern": "(?<name>\\p{L}"}}},
]
WRITTEN = {
    "hermes": CALL,
    "qwen3_coder": "<tool_call><function=add><parameter=x>\n1\n</parameter></function></tool_call>",
    "llama": '{"name": "add", "parameters": {"x": 1}}',
    "json": '{"name": "add", "arguments": {"x": 1}}',
}


@for_each("parameters", ODD)
@for_each("tool_format", WRITTEN)
def test_schemas_that_are_not_valid_are_the_agent_s_own_affair(tool_format, parameters):
    """They stand in the prompt as they are, and calls are read all the same."""
    tools = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]
    with Gateway(Scripted(TOKENIZER, [WRITTEN[tool_format]]), chat=Chat(TOKENIZER, tool_format=tool_format)) as gateway:
        (choice,) = ask(gateway.session(), [user("Add.")], tools=tools).choices
    assert [call.name for call in choice.calls] == ["add"]
    assert choice.calls[0].arguments["x"] in (1, "1")


def test_arguments_without_types_are_read_by_the_schema():
    chat = Chat(TOKENIZER, tool_format="qwen3_coder")
    with Gateway(Scripted(TOKENIZER, [WRITTEN["qwen3_coder"]]), chat=chat) as gateway:
        (choice,) = ask(gateway.session(), [user("Add.")], tools=[ADD]).choices
    assert dict(choice.calls[0].arguments) == {"x": 1}


@pytest.mark.parametrize(("n", "at_once"), [(8, 1), (1, 8), (3, 3)])
def test_the_limit_of_tokens_holds_for_completions_that_are_drawn_at_the_same_time(n, at_once):
    drawing, refused = [], []

    async def slow(prompt, params, n, seed):
        drawing.append(n * params.max_tokens)
        assert sum(drawing) + session.metrics["tokens"] <= 30
        await asyncio.sleep(0.02)
        drawing.remove(n * params.max_tokens)
        return Scripted(TOKENIZER, lambda _: "x" * 50).sample(prompt, params, n=n, seed=seed).result()

    async def one(i):
        try:
            await session.answer(Request(messages=[user(f"{i}")], n=n, sampling=Sampling(max_tokens=6)))
        except GatewayError as error:
            refused.append((error.status, error.code))

    async def main():
        await asyncio.gather(*(one(i) for i in range(at_once)))
        await one(at_once)

    with Gateway(Scripted(TOKENIZER, [])) as gateway:
        session = gateway.session(limits=Limits(tokens=30), ask=slow)
        asyncio.run(asyncio.wait_for(main(), 30))
        assert 24 <= session.metrics["tokens"] <= 30
        assert set(refused) == {(429, "limit_reached")}
        assert session.ended == "max_total_tokens"
        assert session.trajectory().truncated


def test_one_that_waits_for_tokens_may_leave():
    release = asyncio.Event()

    async def slow(prompt, params, n, seed):
        await release.wait()
        return Scripted(TOKENIZER, lambda _: "x").sample(prompt, params, n=n, seed=seed).result()

    async def main():
        first, second, third = (
            asyncio.create_task(session.answer(Request(messages=[user(text)], sampling=Sampling(max_tokens=20))))
            for text in "abc"
        )
        await asyncio.sleep(0.1)
        second.cancel()
        await asyncio.sleep(0.05)
        release.set()
        await first
        await third

    with Gateway(Scripted(TOKENIZER, [])) as gateway:
        session = gateway.session(limits=Limits(tokens=30), ask=slow)
        asyncio.run(asyncio.wait_for(main(), 30))
        assert (session.metrics["turns"], session.metrics["cancelled"], session.ended) == (2, 1, "")


def test_what_a_gateway_and_a_session_are_made_of():
    sampler = Scripted(TOKENIZER, [])
    for wrong in (
        {"params": {"max_tokens": 3}},
        {"limits": {"turns": 3}},
        {"model": 5},
        {"host": ""},
        {"host": "192.168.0.1"},
        {"port": -1},
        {"key": ""},
    ):
        with pytest.raises(ConfigError, match=f"Gateway.{next(iter(wrong))}"):
            Gateway(sampler, **wrong)
    with Gateway(sampler) as gateway:
        for wrong in ({"params": {}}, {"limits": {"turns": 3}}, {"ask": 3}, {"seed": -1}):
            with pytest.raises(ConfigError, match=f"session.{next(iter(wrong))}"):
                gateway.session(**wrong)


def test_a_closed_session_leaves_nothing():
    """A gateway may live for years. Late clients are refused as strangers are."""
    with Gateway(Scripted(TOKENIZER, lambda _: CALL)) as gateway:
        kept = []
        for i in range(50):
            session = gateway.session(seed=i)
            ask(session, [user(str(i))], tools=[ADD])
            session.close()
            kept.append((session.id, session.api_key, weakref.ref(session)))
        del session
        gc.collect()
        assert [seen() for *_, seen in kept] == [None] * 50
        assert not gateway._sessions
        for names in ((kept[-1][0], None), (None, kept[-1][1])):
            with pytest.raises(GatewayError) as caught:
                gateway.admit(*names)
            assert caught.value.status == 401


def test_sessions_that_come_and_go_take_no_memory():
    """The two names of a session alone would be 190 bytes."""
    with Gateway(Scripted(TOKENIZER, lambda _: "x")) as gateway:
        gateway._sampler.requests = deque(maxlen=1)

        async def play(count):
            for i in range(count):
                with gateway.session(seed=i) as session:
                    await session.answer(Request(messages=[user("Hi")]))

        async def measure():
            await play(50)
            gc.collect()
            before = tracemalloc.get_traced_memory()[0]
            await play(200)
            gc.collect()
            return tracemalloc.get_traced_memory()[0] - before

        tracemalloc.start()
        try:
            assert asyncio.run(measure()) < 200 * 100
        finally:
            tracemalloc.stop()
