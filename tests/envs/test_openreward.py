"""OpenReward's environments, against its own server in another process on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import http.server
import json
import socket
import subprocess
import sys
import threading
import time

import pytest

import rlkit
from rlkit.envs import Action, TaskSettings, openreward
from rlkit.envs.calling import Guarded
from tests.each import for_each

pytest.importorskip("openreward", reason="openreward is not installed: pip install 'rlkit-lm[openreward]'")
pytest.importorskip("jsonschema")


@pytest.fixture(scope="module")
def url(openreward_url):
    """Where the server listens."""
    return openreward_url


def state(url):
    """What the server knows of its sessions."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
    with contextlib.closing(connection):
        connection.request("GET", "/state")
        return json.loads(connection.getresponse().read())


def tool_call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def played(tasks, *turns, index=0):
    """(first observation, results, tools) of an episode."""

    async def scene():
        env = await Guarded.opened(tasks[index], timeout=30)
        try:
            first = await env.reset(0, timeout=30)
            return first, [await env.step(Action(turn), timeout=30) for turn in turns], env.tools
        finally:
            assert await env.close(timeout=30) is None

    return asyncio.run(scene())


def contents(result):
    return [message["content"] for message in result.observation]


def test_splits_and_their_sizes(url):
    tasks = openreward("sums", base_url=url, settings=TaskSettings(n=4))
    assert (len(tasks), tasks.name, tasks.split, tasks[0].settings.n) == (10, "sums", "train", 4)
    assert len(openreward("sums", base_url=url, split="test")) == 3
    with pytest.raises(rlkit.UnknownNameError, match="no split named 'dev'. There are: train, test, empty"):
        openreward("sums", base_url=url, split="dev")
    with pytest.raises(rlkit.ConfigError, match="'empty': has no tasks"):
        openreward("sums", base_url=url, split="empty")


def test_each_task_is_its_own(url):
    tasks = openreward("sums", base_url=url, split="test")
    for index in range(3):
        first, _, _ = played(tasks, index=index)
        x = 100 + index
        assert first == ({"role": "user", "content": f"Add these.\n{x} + {2 * x}"},)


def test_tools_as_chat_templates_take_them(url):
    """Function schemas, without the titles that pydantic writes."""
    _, _, tools = played(openreward("sums", base_url=url))
    assert [tool["function"]["name"] for tool in tools] == ["answer", "fail", "look", "sleep"]
    assert tools[0] == {
        "type": "function",
        "function": {
            "name": "answer",
            "description": "Gives the sum.",
            "parameters": {"type": "object", "properties": {"value": {"type": "integer"}}, "required": ["value"]},
        },
    }


@pytest.mark.parametrize(("value", "reward"), [(9, 1.0), (8, 0.0)])
def test_an_answer_ends_the_episode(url, value, reward):
    _, (result,), _ = played(openreward("sums", base_url=url), tool_call("answer", value=value), index=3)
    assert (result.reward, result.terminated, result.truncated) == (reward, True, False)
    assert result.observation == ({"role": "tool", "name": "answer", "tool_call_id": "call00000", "content": "noted"},)
    assert result.info["metadata"] == [{"right": reward == 1.0}]


def test_several_calls_in_a_turn(url):
    """Their rewards are passed on one by one; what comes after the end is not called."""
    turn = "Let me see." + "".join(
        [
            tool_call("look", text="a"),
            tool_call("look", text="b"),
            tool_call("answer", value=3),
            tool_call("look", text="c"),
        ]
    )
    _, (result,), _ = played(openreward("sums", base_url=url), turn, index=1)
    assert contents(result) == ["you said a", "you said b", "noted"]
    assert (result.reward, result.rewards, result.terminated) == (1.5, (0.25, 0.25, 1.0), True)
    assert result.info["tool_calls"] == 3


def test_a_call_without_a_reward_has_none(url):
    """So do a call that cannot be made, and a turn without a call."""
    turns = [
        tool_call("sleep", value=0) + tool_call("look", text="a"),
        tool_call("sleep", value=0),
        tool_call("nothing"),
    ]
    _, results, _ = played(openreward("sums", base_url=url, reminder="Call a tool."), *turns, "It is 9.")
    assert [result.rewards for result in results] == [(0.25,), (), (), ()]


def test_what_is_wrong_with_a_call_is_told(url):
    """Broken JSON, a tool that is not there, arguments that do not fit: the episode goes on."""
    turns = [
        '<tool_call>{"name": "answer", "arguments": {value: 9}}</tool_call>',
        tool_call("guess", value=9),
        tool_call("answer", value="nine") + tool_call("look", text="x"),
        tool_call("answer", value=9),
    ]
    _, results, _ = played(openreward("sums", base_url=url), *turns, index=3)
    assert "JSON" in contents(results[0])[0]
    assert "the tool does not exist" in contents(results[1])[0]
    assert "integer" in contents(results[2])[0]
    assert contents(results[2])[1] == "you said x"
    assert [(result.reward, result.terminated) for result in results] == [
        (0, False),
        (0, False),
        (0.25, False),
        (1, True),
    ]
    assert [result.info["malformed_calls"] for result in results] == [1, 1, 1, 0]


def test_what_the_server_refuses_is_told(url):
    """A call that our own check lets pass, and the server's does not."""

    async def scene():
        env = await Guarded.opened(openreward("sums", base_url=url)[0])
        await env.reset(0)
        env.env.tools = []
        result = await env.step(Action(tool_call("look", txt=1)))
        env.env.tools = [{"function": {"name": "nothing"}}]
        unknown = await env.step(Action(tool_call("nothing")))
        await env.close()
        return result, unknown

    result, unknown = asyncio.run(scene())
    assert not result.terminated
    assert "not made" in contents(result)[0]
    assert "nothing" in contents(unknown)[0]


def test_formats(url):
    """A call as the policy's model writes it."""
    tasks = openreward("sums", base_url=url, format="json")
    _, (result,), _ = played(tasks, '{"name": "answer", "arguments": {"value": 0}}')
    assert result.reward == 1.0
    with pytest.raises(rlkit.UnknownNameError, match="hermes"):
        openreward("sums", base_url=url, format="hermess")


def test_a_turn_without_a_call(url):
    """It ends the episode, cut off, or is answered by a reminder."""
    _, (result,), _ = played(openreward("sums", base_url=url), "I think it is 9.")
    assert (result.terminated, result.truncated, result.rewards) == (False, True, ())
    _, results, _ = played(
        openreward("sums", base_url=url, reminder="Call a tool."), "It is 9.", tool_call("answer", value=0)
    )
    assert (results[0].observation, results[0].terminated, results[0].truncated) == ("Call a tool.", False, False)
    assert results[1].reward == 1.0


def test_a_terminal_tool_takes_the_plain_message(url):
    """It is not among the tools; two environments on one server are told apart by their variant."""
    tasks = openreward("sums", base_url=url, variant="essays")
    assert (len(tasks), tasks.name) == (2, "sums/essays")
    first, (result,), tools = played(tasks, "O silver moon!", index=1)
    assert first[0]["content"] == "Write about the moon."
    assert tools == ()
    assert (result.reward, result.terminated) == (1.0, True)
    assert played(tasks, "O silver moon!", index=0)[1][0].reward == 0.0


def test_secrets_arrive_and_are_not_shown(url):
    """At the server, and in nothing that we print."""
    secret = "xyzzy-4711-xyzzy"  # noqa: S105
    tasks = openreward(
        "sums", base_url=url, variant="keys", secrets={"MY_KEY": (secret, ["example.org"])}, api_key=secret
    )
    _, (result,), _ = played(tasks, tool_call("keys"))
    assert f"MY_KEY:{len(secret)}" in contents(result)[0]
    env = tasks[0].make()
    assert secret not in f"{tasks!r} {tasks[0]!r} {env!r} {env._place!r}"


def test_no_key_is_sent_to_a_server_of_your_own(url, monkeypatch):
    """The key for OpenReward's own servers stays here."""
    monkeypatch.setenv("OPENREWARD_API_KEY", "plugh-0815-plugh")
    _, (result,), _ = played(openreward("sums", base_url=url, variant="keys"), tool_call("keys"))
    assert contents(result)[0] == ""


@pytest.mark.parametrize("given", [{}, {"api_key": "xyzzy-4711-xyzzy"}])
def test_a_name_with_an_owner_on_a_server_of_your_own(url, monkeypatch, given):
    """It needs a key, which is the variable's where none is given; the server is sent that one."""
    monkeypatch.delenv("OPENREWARD_API_KEY", raising=False)
    with pytest.raises(rlkit.ConfigError, match="'me/keys' needs an API key; set OPENREWARD_API_KEY, or .* owner"):
        openreward("me/keys", base_url=url)
    monkeypatch.setenv("OPENREWARD_API_KEY", "plugh-0815-plugh")
    tasks = openreward("me/keys", base_url=url, variant="keys", **given)
    _, (result,), _ = played(tasks, tool_call("keys"))
    length = len(given.get("api_key", "plugh-0815-plugh"))
    assert contents(result)[0] == f"OPENREWARD_API_KEY:{length}, api_key:{length}", "as the server names it"


@pytest.mark.parametrize("body", [b"[]", b"{}", b"null", b"3", b'"text"', b'[["a"]]', b"<html>", b"\xff\xfe", b""])
def test_a_server_that_answers_garbage(body):
    """Whatever it is: one of our errors, that names the address."""

    class Garbage(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Garbage) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises((rlkit.EnvError, rlkit.UnknownNameError, rlkit.ConfigError), match=address) as caught:
            openreward("sums", base_url=address, timeout=15.0)  # the SDK asks again after some of them
        server.shutdown()
    assert "\n" not in str(caught.value)


def test_a_tool_that_fails_fails_the_episode(url):
    """That is no matter of the policy; the session is gone."""
    with pytest.raises(rlkit.EnvError, match="ToolFailed.*the disk is full") as caught:
        played(openreward("sums", base_url=url), tool_call("fail"))
    assert not isinstance(caught.value, rlkit.EnvBusy)


def test_a_call_whose_answer_is_lost_is_made_once(url):
    """A 429 after the tool has run, from a proxy: EnvBusy, and not the SDK's second call in the same episode."""
    before = state(url)["looked"]
    with pytest.raises(rlkit.EnvBusy, match="429"):
        played(openreward("sums", base_url=url), tool_call("look", text="lost"))
    assert state(url)["looked"] - before == 1


@pytest.mark.parametrize("name", ["full", "closed"])
def test_a_server_without_capacity(url, name):
    """429 when the environment is made, or the session: EnvBusy, after few requests, and nothing stays open."""
    place = openreward("sums", base_url=url)
    before = state(url)["refused"]

    async def scene():
        env = await Guarded.opened(place[0])
        env.env._place = type(env.env._place)(name, None, url, None)
        try:
            await env.reset(0)
        finally:
            await env.close(timeout=30)

    with pytest.raises(rlkit.EnvBusy, match="429"):
        asyncio.run(scene())
    assert 1 <= state(url)["refused"] - before <= 5
    wait_until_closed(url)


def test_a_key_that_is_not_valid(url):
    with pytest.raises(rlkit.EnvError, match="API key") as caught:
        openreward("private", base_url=url)
    assert not isinstance(caught.value, rlkit.EnvBusy)


def test_a_server_that_is_not_there():
    """The failure of one attempt is told, not of all."""
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(rlkit.EnvBusy, match="rlkit.envs.openreward: 'sums' at") as caught:
            openreward("sums", base_url=address)
    assert str(caught.value).count("Cannot connect to host 127.0.0.1") == 1


def test_a_server_that_does_not_answer():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(rlkit.EnvTimeout, match="no answer within 0.5 s"):
            openreward("sums", base_url=f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.5)


def wait_until_closed(url):
    """The server tears sessions down behind its answer."""
    ends = time.monotonic() + 30
    while state(url)["open"]:
        assert time.monotonic() < ends, state(url)
        time.sleep(0.05)


def test_a_step_that_is_given_up_closes_its_session(url):
    """A tool that takes too long: EnvTimeout, and the server has no session left."""

    async def scene():
        env = await Guarded.opened(openreward("sums", base_url=url)[0])
        await env.reset(0)
        assert state(url)["open"] == 1
        with pytest.raises(rlkit.EnvTimeout):
            await env.step(Action(tool_call("sleep", value=600)), timeout=0.3)
        assert await env.close(timeout=30) is None

    asyncio.run(scene())
    wait_until_closed(url)


def test_a_reset_that_is_cancelled_leaves_no_session(url):
    """Whenever in its course that is."""

    async def scene(delay):
        env = await Guarded.opened(openreward("sums", base_url=url)[0])
        reset = asyncio.create_task(env.reset(0))
        await asyncio.sleep(delay)
        reset.cancel()
        await asyncio.gather(reset, return_exceptions=True)
        assert await env.close(timeout=30) is None

    for delay in (0.0, 0.01, 0.03, 0.06, 0.1, 0.2):
        asyncio.run(scene(delay))
    wait_until_closed(url)


def test_many_sessions_at_once(url):
    """64 episodes, each with its own task, over shared connections, from one event loop after the other."""
    tasks = openreward("sums", base_url=url)
    opened = state(url)["opened"]

    async def episode(index):
        env = await Guarded.opened(tasks[index % 10])
        try:
            await env.reset(0)
            return (await env.step(Action(tool_call("answer", value=3 * (index % 10))))).reward
        finally:
            await env.close(timeout=60)

    async def scene():
        return await asyncio.gather(*(episode(index) for index in range(32)))

    assert [*asyncio.run(scene()), *asyncio.run(scene())] == [1.0] * 64
    assert state(url)["opened"] - opened == 64
    wait_until_closed(url)


@for_each(
    ("arguments", "options", "message"),
    [
        (("",), {}, "name"),
        (("sums",), {"split": ""}, "split"),
        (("sums",), {"secrets": ["key"]}, "secrets: is a list"),
        (("sums",), {"secrets": {"MY_KEY": "canary"}}, r"secrets\['MY_KEY'\]: the hosts .* are unknown"),
        (("sums",), {"env_overrides": "x"}, "env_overrides"),
        (("sums",), {"timeout": 0}, "timeout"),
    ],
)
def test_what_is_wrong_is_told_at_once(arguments, options, message):
    with pytest.raises(rlkit.ConfigError, match=message):
        openreward(*arguments, base_url="http://127.0.0.1:9", **options)


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "openreward", None)
    with pytest.raises(rlkit.ConfigError, match=r"pip install .*\[openreward\]"):
        openreward("sums")


def test_the_program_ends_without_a_word(url):
    """Connections are shared until the end, and closed there."""
    source = f"""
import asyncio
from rlkit.envs import openreward
from rlkit.envs.calling import Guarded
tasks = openreward("sums", base_url={url!r})
async def scene():
    env = await Guarded.opened(tasks[0])
    await env.reset(0)
    await env.close()
asyncio.run(scene())
print("done")
"""
    done = subprocess.run(
        [sys.executable, "-W", "always::ResourceWarning", "-c", source], capture_output=True, text=True, timeout=280
    )
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert "nclosed" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_key_that_is_missing(monkeypatch):
    """Names with an owner need one; said before anything is asked for."""
    monkeypatch.delenv("OPENREWARD_API_KEY", raising=False)
    with pytest.raises(rlkit.ConfigError, match="'owner/name' needs an API key; set OPENREWARD_API_KEY"):
        openreward("owner/name")
    with pytest.raises(rlkit.ConfigError, match="give the name without its owner"):
        openreward("owner/name", base_url="http://127.0.0.1:9")
