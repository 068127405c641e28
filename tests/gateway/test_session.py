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
import weakref

import numpy as np
import pytest

import rlkit
from rlkit import BackendError, ConfigError, Future, SamplingParams, _threads
from rlkit.chat import Chat
from rlkit.gateway import Gateway, GatewayError, Limits, Request, Sampling
from rlkit.gateway import _recording as recording
from rlkit.gateway import _session as session_module
from rlkit.gateway._limits import Usage
from rlkit.trajectory import datums
from tests.each import for_each
from tests.gateway.parts import Scripted, ask, said, user
from tests.rollouts.parts import RandomSampler

TOKENIZER = rlkit.connect("toy").tokenizer
PROMPT = np.array([66, 67])
LONG = 30.0  # seconds: what comes at once, on a machine that is busy with other things
PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}}
ADD = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'


@pytest.fixture
def open_session():
    """``open_session(sampler, **options)``; a sampler that says texts is given by them."""
    with contextlib.ExitStack() as stack:

        def make(sampler, *, chat=None, params=None, **options):
            sampler = sampler if hasattr(sampler, "sample") else Scripted(TOKENIZER, sampler)
            return stack.enter_context(Gateway(sampler, chat=chat, params=params)).session(**options)

        yield make


def refused(call, *args, **fields):
    """The error with which a call is refused."""
    with pytest.raises(GatewayError) as caught:
        call(*args, **fields)
    return caught.value


def answer(session, **fields):
    return asyncio.run(session.answer(Request(**fields)))


def test_a_conversation_that_goes_on_is_one_datum_of_the_tokens_that_were_sampled(open_session):
    session = open_session(["<think>\nhm\n</think>\n\nHi.", "  Four. ", "Bye."])
    messages = [user("Hello")]
    for more in ("2 + 2?", "Thanks", None):
        choice = ask(session, messages).choices[0]
        messages += [{"role": "assistant", "content": choice.content.strip()}, user(more)]  # without its reasoning
        assert choice.reasoning == ("hm" if more == "2 + 2?" else None)
    first, second, third = session.turns
    assert [node.parent for node in session.turns] == [None, first, second]
    for before, after in ((first, second), (second, third)):
        assert np.array_equal(after.sample.prompt[: before.tokens.size], before.tokens)
    trajectory = session.trajectory(1.0)
    assert [(turn.reward, turn.version) for turn in trajectory.turns] == [(0.0, 3), (0.0, 3), (1.0, 3)]
    (datum,) = datums(trajectory, 1.0)
    assert int(datum.mask.sum()) == sum(node.sample.tokens.size for node in session.turns)
    assert [m["role"] for m in trajectory.messages] == ["user", "assistant"] * 3
    asked = [request[0].tolist() for request in session._sampler.requests]
    assert asked == [node.sample.prompt.tolist() for node in session.turns]


def test_calls_are_read_and_their_conversation_goes_on(open_session):
    session = open_session([f"Let me see.\n{CALL}", "It is 2.", CALL, "<tool_call>{nonsense</tool_call>", CALL])
    messages = [user("1 + 1?")]
    choice = ask(session, messages, tools=[ADD]).choices[0]
    assert (choice.finish, choice.content, choice.calls[0].name) == ("tool_calls", "Let me see.", "add")
    assert dict(choice.calls[0].arguments) == {"x": 1}
    messages += [said(choice), {"role": "tool", "tool_call_id": choice.calls[0].id, "content": "2"}]
    last = ask(session, messages, tools=[ADD]).choices[0]
    assert (last.finish, last.content, len(session.branches)) == ("stop", "It is 2.", 1)
    assert CALL in TOKENIZER.decode(session.turns[1].sample.prompt, skip_special=False)
    # They stay text without tools, where they cannot be read, and where none is to be made.
    assert ask(session, [user("a")]).choices[0].content == CALL
    wrong = ask(session, [user("b")], tools=[ADD]).choices[0]
    assert (wrong.content, wrong.calls, wrong.finish) == ("<tool_call>{nonsense</tool_call>", (), "stop")
    assert ask(session, [user("c")], tools=[ADD], tool_choice="none").choices[0].content == CALL


def test_a_call_that_is_required_begins_in_the_prompt(open_session):
    begun = {"required": "<tool_call>\n", "add": '<tool_call>\n{"name": "add", "arguments": '}
    for tool_choice, beginning in begun.items():
        rest = CALL.removeprefix(beginning)
        session = open_session([rest, "Two.", "No call"])
        messages = [user("1 + 1?")]
        found = ask(session, messages, tools=[ADD], tool_choice=tool_choice).choices[0]
        assert (found.finish, [dict(call.arguments) for call in found.calls]) == ("tool_calls", [{"x": 1}])
        turn = session.turns[0].sample
        assert TOKENIZER.decode(turn.tokens) == rest
        assert TOKENIZER.decode(turn.prompt).endswith(beginning)
        messages += [said(found), {"role": "tool", "tool_call_id": found.calls[0].id, "content": "2"}]
        ask(session, messages, tools=[ADD])
        assert len(session.branches) == 1
        assert CALL in TOKENIZER.decode(session.turns[1].sample.prompt)
        ask(session, [user("x")], tools=[ADD], tool_choice=tool_choice)
        assert session.metrics["unforced"] == 1


def test_a_wish_for_json_is_left_to_the_policy_and_counted(open_session, caplog):
    """A call is as good as JSON. The log says it once in a program."""
    session_module._warn_that_formats_are_free.cache_clear()
    session = open_session(['{"a": 1}', "Sure:", "[1", CALL, "[" * 100_000, "x"])
    asks = Sampling(json_field="response_format")
    for tools, sampling, count in [((), asks, i) for i in range(3)] + [((ADD,), asks, 2), ((), asks, 3), ((), None, 3)]:
        ask(session, [user("a")], tools=tools, sampling=sampling or Sampling())
        assert session.metrics["unforced"] == count
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "response_format" in caplog.text


def test_several_completions_are_branches_of_their_own(open_session):
    """The ids of their calls are unique, and hang on the request and its repeats alone."""
    session = open_session([[CALL * 2, CALL], [CALL, CALL], "Three."])
    replies = [ask(session, [user("a")], tools=[ADD], n=2) for _ in range(2)]
    ids = [call.id for reply in replies for choice in reply.choices for call in choice.calls]
    assert len(set(ids)) == len(ids) == 5
    assert all(len(each) == 9 and each.isalnum() for each in ids)
    assert replies[0].id != replies[1].id
    ask(session, [user("a"), said(replies[0].choices[1]), user("And?")], tools=[ADD])
    assert [[n.number for n in branch.nodes] for branch in session.branches] == [[0], [1], [2], [3, 4]]


def test_another_history_starts_a_branch_and_every_token_is_trained_once(open_session):
    """A name, which the template does not show, does not: the tokens continue the turn, and so does the branch."""
    first, again = [user("Count")], [{**user("Count"), "name": "Ada"}]
    brief, uno = {"role": "system", "content": "Be brief."}, {"role": "assistant", "content": "Uno."}
    for change, sizes, rewritten in (
        (lambda said: ([*first, uno, *said[2:]], {}), [2, 1], 1),
        (lambda said: ([user("So far: one, two. And?")], {}), [2, 1], 0),
        (lambda said: ([brief, *said], {}), [2, 1], 1),
        (lambda said: (said, {"tools": [ADD]}), [2, 1], 1),
        (lambda said: ([*again, *said[1:]], {}), [3], 0),
    ):
        session, messages = open_session(["One.", "Two.", "Three."]), [*first]
        for more in ("Go on", "And?"):
            messages += [said(ask(session, messages).choices[0]), user(more)]
        changed, fields = change(messages)
        ask(session, changed, **fields)
        assert [len(branch.nodes) for branch in session.branches] == sizes
        drawn = [sum(node.sample.tokens.size for node in branch.nodes) for branch in session.branches]
        made = datums(session.trajectory(1.0), 1.0, split="allow")
        assert [int(datum.mask.sum()) for datum in made] == drawn
        assert (session.metrics["branches"], session.metrics["rewritten"]) == (len(sizes), rewritten)


def test_branches_share_what_came_before_they_part(open_session):
    session = open_session(["One.", "Left.", "Right."])
    turn = said(ask(session, [user("Go")]).choices[0])
    for text in ("left", "right"):
        ask(session, [user("Go"), turn, user(text)])
    root, left, right = session.turns
    left, right = [([root, left], [root, left]), ([root, right], [right])]
    assert [(branch.nodes, branch.fresh) for branch in session.branches] == [left, right]
    whole, rest = datums(session.trajectory(1.0), 1.0, split="allow")
    sizes = [node.sample.tokens.size for node in session.turns]
    assert [int(whole.mask.sum()), int(rest.mask.sum())] == [sizes[0] + sizes[1], sizes[2]]
    assert np.array_equal(rest.tokens[: root.tokens.size], root.tokens)
    assert [(len(t.turns), t.reward) for t in session.trajectories(1.0)] == [(2, 1.0), (1, 1.0)]
    last = session.trajectory(1.0, credit="last")
    assert [turn.tokens.size for turn in last.turns] == sizes[::2]
    assert len(datums(last, 1.0)) == 1
    weighted = session.trajectory(1.0, credit=lambda branches: [0.25, 0.5])
    assert [turn.weight for turn in weighted.turns] == [0.5, 0.25, 0.5]
    for credit, match in ((lambda branches: [1.0], "one per branch"), ("first", "credit")):
        with pytest.raises(ConfigError, match=match):
            session.trajectory(credit=credit)


def test_prompts_of_text_and_of_tokens(open_session):
    """A text is tokenized as it is, control tokens too: what was sampled for "a" has an end token, "abc" has none."""
    session, a = open_session(["b", "d", "b", "c"]), "<|im_start|>a"
    first = answer(session, text=a).choices[0]
    answer(session, text=a + first.text + "c")
    assert np.array_equal(session.turns[1].sample.prompt, TOKENIZER.encode(f"{a}bc", special=True))
    answer(session, prompt=np.array([5, 6]))
    answer(session, prompt=np.concatenate([session.turns[2].tokens, [7]]))
    assert session._sampler.requests[2][0].tolist() == [5, 6]
    assert [node.parent for node in session.turns] == [None, None, None, session.turns[2]]
    assert refused(answer, session, prompt=np.array([10**6])).status == 400


def test_whose_settings_count(open_session):
    """The session's settings override the client's. Clients do not see a stop text; the trained tokens include it."""
    session = open_session(RandomSampler(), params=SamplingParams(max_tokens=9, temperature=0.5))
    ask(session, [user("a")], sampling=Sampling(temperature=2.0, top_p=0.5, max_tokens=4, stop=("x",), seed=7))
    ask(session, [user("a")], sampling=Sampling(max_tokens=40))
    (_, first, _, seed), (_, second, _, _) = session._sampler.requests
    assert (first.temperature, first.top_p, first.max_tokens, first.stop) == (0.5, 1.0, 4, ("x",))
    assert (second.max_tokens, second.stop) == (9, None)
    assert seed != 7
    session = open_session(RandomSampler(max_length=1000))
    ask(session, [user("a")], sampling=Sampling(temperature=0.0, top_k=3, seed=7))
    ((prompt, params, _, seed),) = session._sampler.requests
    assert (params.temperature, params.top_k, params.max_tokens, seed) == (0.0, 3, 1000 - prompt.size, 7)
    mixed = (("a",), (5,), ("a",))  # texts and ids cannot be
    for own, asked, expected in ((("a",), ("b", "a"), ("a", "b")), mixed, (("a",), (), ("a",)), (None, (), ())):
        session = open_session(RandomSampler(), params=own and SamplingParams(stop=own))
        ask(session, [user("a")], sampling=Sampling(stop=asked, ignore_eos=not asked))
        assert session._sampler.requests[0][1].stop == expected
    session = open_session(["Thought\nObservation:"])
    choice = ask(session, [user("a")], sampling=Sampling(stop=("\nObservation:",))).choices[0]
    assert choice.content == "Thought"
    assert TOKENIZER.decode(choice.sample.tokens[:-1]).endswith("Observation:")
    for max_tokens, text in ((1, "a"), (2, "a"), (3, "a")):  # 98 is "b", which ends the turn where it fits
        session = open_session(Scripted(TOKENIZER, ["abc"], stops=True))
        sampling = Sampling(max_tokens=max_tokens, stop=(98,))
        assert ask(session, [user("a")], sampling=sampling).choices[0].content == text


def test_seeds_do_not_depend_on_what_arrives_first(open_session):
    drawn = []
    for seed, order in ((5, "abca"), (5, "caba"), (6, "abca")):
        session = open_session(RandomSampler(), seed=seed)
        for text in order:
            ask(session, [user(text)])
        drawn.append(sorted((prompt.tobytes(), seed) for prompt, *_, seed in session._sampler.requests))
    assert drawn[0] == drawn[1]
    seeds = {seed for given in drawn for _, seed in given}
    assert (len(seeds), max(seeds) < 2**31) == (8, True)  # every backend takes such a seed as it is


def test_limits(open_session):
    for turns, ended, limits in (
        (2, "max_turns", Limits(turns=2)),
        (1, "max_total_tokens", Limits(tokens=4)),
        (0, "deadline", Limits(seconds=1e-9)),
    ):
        session = open_session(lambda _: "abc", limits=limits)
        for _ in range(turns):
            ask(session, [user("a")])
        assert session.ended == ""
        error = refused(ask, session, [user("b")])
        assert (error.status, error.code, error.retry_after) == (429, "limit_reached", None)
        trajectory = session.trajectory()
        assert (session.ended, trajectory.ended, trajectory.truncated) == (ended, ended, True)
        session.refuse()  # what is not valid is counted, too
        assert (session.metrics["refused"], session.metrics["requests"]) == (2, turns + 2)
    usage = Usage(Limits(at_once=1))
    with usage.request(1):
        error = refused(usage.request(1).__enter__)
        assert (error.status, error.retry_after, usage.ended) == (429, 1.0, "")
    with usage.request(1):
        assert usage.counts["requests"] == 3


def test_a_prompt_that_is_too_long_is_refused_and_a_shorter_one_goes_on(open_session):
    """One with more messages than the context has tokens is not rendered: a template that runs cannot be stopped."""
    session = open_session(Scripted(TOKENIZER, lambda _: "abc", max_length=300))
    error = refused(ask, session, [user("a" * 300)])
    assert (error.status, error.code, session.ended) == (400, "context_length_exceeded", "context")
    assert "maximum context length is 300 tokens" in error.message
    ask(session, [user("a")])
    assert session.ended == ""
    for method in (session.answer, session.render):
        error = refused(lambda: asyncio.run(method(Request(messages=[user("")] * 301))))  # noqa: B023
        assert (error.status, error.code) == (400, "context_length_exceeded")
        assert "length is 300 tokens, but there are 301 messages" in error.message
    assert (session.ended, session.metrics["refused"]) == ("context", 2)


def test_closing_waits_for_no_template(monkeypatch):
    """Renderings that their clients gave up end by themselves, and those that wait for a thread are never begun."""
    monkeypatch.setattr(_threads, "_IDLE", 0.1)
    go_on, began, most = threading.Event(), [], min(32, (os.cpu_count() or 1) + 4)

    class Slow(type(TOKENIZER)):
        def encode(self, text, *, special=False):
            if "slowly" in text:
                began.append(text)
                go_on.wait(4 * LONG)
            return super().encode(text, special=special)

    gateway = Gateway(Scripted(Slow(), lambda _: "x"), open=True)
    address = ("127.0.0.1", int(gateway.url.rpartition(":")[2]))
    body = json.dumps({"messages": [user("slowly")]})
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    closing = threading.Thread(target=gateway.close)
    with contextlib.ExitStack() as clients:
        clients.callback(go_on.set)
        for _ in range(most + 4):
            clients.enter_context(socket.create_connection(address)).sendall((head + body).encode())
        until = time.monotonic() + LONG
        while len(began) < most and time.monotonic() < until:
            time.sleep(0.01)
        closing.start()
        closing.join(LONG)
        assert not closing.is_alive()
    for thread in threading.enumerate():
        if thread.name.startswith("rlkit-gateway-work"):
            thread.join(LONG)
    assert len(began) == most


@for_each(("n", "at_once"), [(8, 1), (1, 8), (3, 3)])
def test_the_limit_of_tokens_holds_for_completions_that_are_drawn_at_the_same_time(open_session, n, at_once):
    """One that waits for tokens may leave."""
    drawing, sampling = [], Sampling(max_tokens=6)

    async def slow(prompt, params, n, seed):
        drawing.append(n * params.max_tokens)
        assert sum(drawing) + session.metrics["tokens"] <= 30
        await asyncio.sleep(0.02)
        drawing.remove(n * params.max_tokens)
        return Scripted(TOKENIZER, lambda _: "x" * 50).sample(prompt, params, n=n, seed=seed).result()

    async def main():
        asked = [Request(messages=[user(f"{i}")], n=n, sampling=sampling) for i in range(at_once + 1)]
        tasks = [asyncio.create_task(session.answer(request)) for request in asked[1:]]
        await asyncio.sleep(0.01)
        if at_once == 8:
            tasks[7].cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        ended += await asyncio.gather(session.answer(asked[0]), return_exceptions=True)
        return {(error.status, error.code) for error in ended if isinstance(error, GatewayError)}

    session = open_session([], limits=Limits(tokens=30), ask=slow)
    assert asyncio.run(asyncio.wait_for(main(), LONG)) == {(429, "limit_reached")}
    assert 24 <= session.metrics["tokens"] <= 30
    assert session.metrics["cancelled"] == int(at_once == 8)
    assert (session.ended, session.trajectory().truncated) == ("max_total_tokens", True)


def test_a_sampler_that_fails_is_told_apart_from_a_bad_prompt(open_session):
    async def broken(*_):
        raise BackendError("the machine is on fire")

    session = open_session([], ask=broken)
    error = refused(ask, session, [user("a")])
    assert (error.status, "fire" in error.message, type(session.error)) == (503, False, BackendError)
    assert (session.metrics["errors"], session.turns) == (1, [])
    good = rlkit.Sample(TOKENIZER.encode("a"), [65], [-1.0], "stop")
    bad, long = rlkit.Sample(PROMPT, [9999], [-1.0], "stop"), rlkit.Sample(PROMPT, [65] * 3, [-1.0] * 3, "stop")
    for samples in ([], [good, good], [None], [good], [bad], [long], None, iter([good])):
        session = open_session([], ask=lambda *_, samples=samples: asyncio.sleep(0, samples))
        assert refused(answer, session, prompt=PROMPT, sampling=Sampling(max_tokens=2)).status == 503
        assert ("session(ask)" in str(session.error), session.turns) == (True, [])


@for_each("when", ["while it is submitted", "later"])
def test_a_client_that_goes_away_leaves_nothing(open_session, when):
    """The service is told that no one waits."""
    asked, go_on, dropped = threading.Event(), threading.Event(), threading.Event()

    class Waits(Scripted):
        def sample(self, prompt, params, *, n=1, seed=None):
            asked.set()
            go_on.wait(60)
            return Future.wrap(concurrent.futures.Future(), on_cancel=lambda: dropped.set() or True)

    async def main():
        task = asyncio.create_task(session.answer(Request(messages=[user("a")])))
        assert await asyncio.to_thread(asked.wait, 60)
        if when == "later":
            go_on.set()
            await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        go_on.set()

    session = open_session(Waits(TOKENIZER, []))
    asyncio.run(main())
    assert dropped.wait(60)
    assert (session.metrics["cancelled"], session.turns) == (1, [])


def test_sessions_are_found_by_id_and_key_and_end_with_their_gateway():
    """An open gateway answers without one, and does not record. An update is for new sessions."""
    with Gateway(Scripted(TOKENIZER, lambda _: "a", version=1)) as gateway, gateway.session() as session:
        assert gateway.admit(session.id, None) is gateway.admit(None, session.api_key) is session
        for wrong in (("x", None), (None, "x"), (None, None)):
            error = refused(gateway.admit, *wrong)
            assert (error.status, error.code) == (401, "invalid_api_key")
        gateway.update(Scripted(TOKENIZER, lambda _: "a", version=2))
        new = gateway.session()
        assert [(ask(s, [user("a")]), s.turns[0].sample.version)[1] for s in (session, new)] == [1, 2]
        new.close()
        error = refused(ask, new, [user("a")])
        assert (error.status, error.retry_after, error.message) == (429, None, "this session has ended")
    for opened in (gateway.session, lambda: gateway.url):
        with pytest.raises(BackendError, match="closed"):
            opened()
    with Gateway(Scripted(TOKENIZER, lambda _: "a"), open=True, key="secret") as gateway:
        opened = gateway.admit(None, "secret")
        gateway.update(newest := Scripted(TOKENIZER, lambda _: "a"))
        for _ in range(3):
            ask(opened, [user("a")])
        assert (len(newest.requests), opened.turns, opened.responses) == (3, [], None)
        assert refused(gateway.admit, None, "wrong").status == 401


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
            assert refused(gateway.admit, *names).status == 401


def test_repeats_are_counted_of_the_prompts_asked_for_last(monkeypatch):
    """The seed of a request hangs on how often its prompt was asked for; an open gateway does not remember all."""
    monkeypatch.setattr(recording, "_MOST_PROMPTS", 2)
    remembered, chat = recording.Recording(), Chat(TOKENIZER)
    asked = [remembered.prompt(chat, Request(text=text)).repeat for text in "aabbcaab"]
    assert asked == [0, 1, 0, 1, 0, 0, 1, 0]


def test_alternatives(open_session):
    """Those of prompt and completion are the sampler's own, whether they are of one pass or of two."""

    def rows(pairs):
        return [dict(zip(ids.tolist(), logprobs.tolist(), strict=True)) for ids, logprobs in zip(*pairs, strict=True)]

    with rlkit.connect("toy", seed=0) as policy, policy.sampler().result() as sampler:
        for of_prompt in (None, 0, 2, 3):
            more = {"n": 2, "top_logprobs": 2, "prompt_logprobs": of_prompt}
            reply = answer(open_session(sampler), text="abc", sampling=Sampling(max_tokens=3), **more)
            for choice in reply.choices:
                tokens = np.concatenate([reply.prompt, choice.sample.tokens])
                assert choice.top == rows(sampler.top_logprobs(tokens, 2).result())[reply.prompt.size :]
            assert (reply.prompt_logprobs is None, reply.prompt_top is None) == (of_prompt is None, not of_prompt)
            if of_prompt:
                ids, logprobs = sampler.top_logprobs(reply.prompt, of_prompt).result()
                assert [list(row) for row in reply.prompt_top[1:]] == ids[1:].tolist()
                assert np.allclose([list(row.values()) for row in reply.prompt_top[1:]], logprobs[1:])


def test_a_sampler_that_scores_in_one_pass_is_asked_once(open_session):
    """As the local one; the numbers are those of its answer, for prompt and completion."""

    class Both(Scripted):
        asked = 0

        def prompt_logprobs(self, tokens, k):
            self.asked += 1
            own = -np.arange(len(tokens), dtype=np.float32)
            return Future.of((own, np.tile(np.arange(k), (len(tokens), 1)), np.tile(own[:, None], (1, k))))

    session = open_session(Both(TOKENIZER, lambda _: "d", max_length=64))
    reply = answer(session, text="abc", sampling=Sampling(max_tokens=1), top_logprobs=2, prompt_logprobs=2)
    assert (session._sampler.asked, reply.prompt_logprobs.tolist()) == (1, [0.0, -1.0, -2.0])
    assert [*reply.prompt_top, *reply.choices[0].top] == [{0: float(-i), 1: float(-i)} for i in range(4)]


def test_the_chat_is_the_user_s_with_history_append(open_session):
    """And with the client's variables, where the template reads them."""
    chat = Chat(TOKENIZER, system="Be brief.", history="template")
    session = open_session(["a"], chat=chat)
    ask(session, [user("a")])
    assert "Be brief." in TOKENIZER.decode(session.turns[0].sample.prompt)
    assert (session._gateway.chat.history, chat.history) == ("append", "template")
    error = refused(ask, session, [user("a")], template={"enable_thinking": False})
    assert (error.status, error.param) == (400, "chat_template_kwargs")
    assert "does not read enable_thinking" in error.message


ODD = [{"type": ["string", 5]}, {"properties": 5}, {"properties": {"x": {"pattern": "(?<name>\\p{L}", "type": 5}}}]
WRITTEN = {
    "hermes": CALL,
    "qwen3_coder": "<tool_call><function=add><parameter=x>\n1\n</parameter></function></tool_call>",
    "llama": '{"name": "add", "parameters": {"x": 1}}',
    "json": '{"name": "add", "arguments": {"x": 1}}',
}


@for_each("parameters", [*ODD, {"$ref": "http://schemas.example/x"}, PARAMETERS])
@for_each("tool_format", WRITTEN)
def test_schemas_that_are_not_valid_are_the_agent_s_own_affair(open_session, tool_format, parameters):
    """They stand in the prompt as they are, and calls are read all the same; by valid ones texts become numbers."""
    tools = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]
    session = open_session([WRITTEN[tool_format]], chat=Chat(TOKENIZER, tool_format=tool_format))
    (call,) = ask(session, [user("Add.")], tools=tools).choices[0].calls
    assert (call.name, str(call.arguments["x"])) == ("add", "1")
    assert parameters is not PARAMETERS or call.arguments["x"] == 1


def test_what_a_gateway_and_a_session_are_made_of():
    wrong = [("params", {"max_tokens": 3}), ("limits", {"turns": 3}), ("model", 5), ("host", ""), ("port", -1)]
    for name, value in (*wrong, ("host", "192.168.0.1"), ("key", "")):
        with pytest.raises(ConfigError, match=f"Gateway.{name}"):
            Gateway(Scripted(TOKENIZER, []), **{name: value})
    with Gateway(Scripted(TOKENIZER, [])) as gateway:
        for name, value in (*wrong[:2], ("ask", 3), ("seed", -1)):
            with pytest.raises(ConfigError, match=f"session.{name}"):
                gateway.session(**{name: value})
