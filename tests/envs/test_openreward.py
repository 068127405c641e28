"""OpenReward's environments, against its own server in another process on this machine."""

from __future__ import annotations

import asyncio
import functools
import http.server
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

import rlkit
from rlkit.envs import Action, TaskSettings, openreward
from rlkit.envs.calling import GuardedEnv
from tests.each import for_each
from tests.envs.parts import asynchronous, play, played, tool_call

pytest.importorskip("openreward", reason="openreward is not installed: pip install 'rlkit-lm[openreward]'")
pytest.importorskip("jsonschema")
ROOT = Path(__file__).parents[2]
RIGHT_AT_ONCE = tool_call("answer", value=0)  # in the first task


@pytest.fixture
def sums(openreward_url):
    """Tasks of the server."""
    return functools.partial(openreward, "sums", base_url=openreward_url)


@pytest.fixture
def state(openreward_url):
    """What the server knows of its sessions."""
    return lambda: httpx.get(f"{openreward_url}/state", timeout=30).json()


def wait_until_closed(state):
    """The server tears sessions down behind its answer."""
    ends = time.monotonic() + 30
    while state()["open"]:
        assert time.monotonic() < ends, state()
        time.sleep(0.05)


def contents(result):
    return [message["content"] for message in result.observation]


def test_splits_and_their_sizes(sums):
    tasks = sums(settings=TaskSettings(n=4))
    assert (len(tasks), tasks.name, tasks.split, tasks[0].settings.n) == (10, "sums", "train", 4)
    firsts = [played(task)[0] for task in sums(split="test")]
    assert firsts == [({"role": "user", "content": f"Add these.\n{x} + {2 * x}"},) for x in (100, 101, 102)]
    with pytest.raises(rlkit.UnknownNameError, match="no split named 'dev'. There are: train, test, empty"):
        sums(split="dev")
    with pytest.raises(rlkit.ConfigError, match="'empty': has no tasks"):
        sums(split="empty")


def test_tools_as_chat_templates_take_them(sums):
    """Function schemas, without the titles that pydantic writes."""
    _, _, env = played(sums()[0])
    assert [tool["function"]["name"] for tool in env.tools] == ["answer", "fail", "look", "sleep"]
    parameters = {"type": "object", "properties": {"value": {"type": "integer"}}, "required": ["value"]}
    function = {"name": "answer", "description": "Gives the sum.", "parameters": parameters}
    assert env.tools[0] == {"type": "function", "function": function}


def test_an_answer_ends_the_episode(sums):
    for value, reward in ((9, 1.0), (8, 0.0)):
        _, (result,), _ = played(sums()[3], tool_call("answer", value=value))
        assert (result.reward, result.terminated, result.truncated) == (reward, True, False)
        told = {"role": "tool", "name": "answer", "tool_call_id": "call00000", "content": "noted"}
        assert result.observation == (told,)
        assert result.info["metadata"] == [{"right": reward == 1.0}]


def test_several_calls_in_a_turn(sums):
    """Their rewards are passed on one by one; what comes after the end is not called."""
    a, b, c = (tool_call("look", text=text) for text in "abc")
    _, (result,), _ = played(sums()[1], f"Let me see.{a}{b}{tool_call('answer', value=3)}{c}")
    assert contents(result) == ["you said a", "you said b", "noted"]
    assert (result.reward, result.rewards, result.terminated) == (1.5, (0.25, 0.25, 1.0), True)
    assert result.info["tool_calls"] == 3


def test_a_turn_without_a_reward(sums):
    """It has none: calls that give none or cannot be made, and a turn without a call, which a reminder answers."""
    nothing = tool_call("sleep", value=0)
    turns = [nothing + tool_call("look", text="a"), nothing, tool_call("nothing"), "It is 9.", RIGHT_AT_ONCE]
    _, results, _ = played(sums(reminder="Call a tool.")[0], *turns)
    assert [result.rewards for result in results] == [(0.25,), (), (), (), (1.0,)]
    assert (results[3].observation, results[3].terminated, results[3].truncated) == ("Call a tool.", False, False)
    _, (result,), _ = played(sums()[0], "I think it is 9.")
    assert (result.terminated, result.truncated, result.rewards) == (False, True, ()), "or it cuts the episode off"


def test_what_is_wrong_with_a_call_is_told(sums):
    """Broken JSON, a tool that is not there, arguments that do not fit: the episode goes on."""
    turns = [
        '<tool_call>{"name": "answer", "arguments": {value: 9}}</tool_call>',
        tool_call("guess", value=9),
        tool_call("answer", value="nine") + tool_call("look", text="x"),
        tool_call("answer", value=9),
    ]
    _, results, _ = played(sums()[3], *turns)
    for result, what in zip(results, ("JSON", "the tool does not exist", "integer"), strict=False):
        assert what in contents(result)[0]
    assert contents(results[2])[1] == "you said x"
    assert [result.reward for result in results] == [0, 0, 0.25, 1]
    assert [result.terminated for result in results] == [False, False, False, True]
    assert [result.info["malformed_calls"] for result in results] == [1, 1, 1, 0]


@asynchronous
async def test_what_the_server_refuses_is_told(sums):
    """A call that our own check lets pass, and the server's does not."""
    env = await GuardedEnv.open(sums()[0])
    await env.reset(0)
    for tools, call, what in (
        ([], tool_call("look", txt=1), "not made"),
        ([{"function": {"name": "nothing"}}], tool_call("nothing"), "nothing"),
    ):
        env.env.tools = tools
        result = await env.step(Action(call))
        assert not result.terminated
        assert what in contents(result)[0]
    await env.close()


def test_formats(sums):
    """A call as the policy's model writes it."""
    _, (result,), _ = played(sums(format="json")[0], '{"name": "answer", "arguments": {"value": 0}}')
    assert result.reward == 1.0


def test_a_terminal_tool_takes_the_plain_message(sums):
    """It is not among the tools; two environments on one server are told apart by their variant."""
    tasks = sums(variant="essays")
    assert (len(tasks), tasks.name) == (2, "sums/essays")
    first, (result,), env = played(tasks[1], "O silver moon!")
    assert first[0]["content"] == "Write about the moon."
    assert env.tools == ()
    assert (result.reward, result.terminated) == (1.0, True)
    assert played(tasks[0], "O silver moon!")[1][0].reward == 0.0


def keys_at_server(tasks):
    return contents(played(tasks[0], tool_call("keys"))[1][0])[0]


def test_secrets_arrive_and_are_not_shown(sums):
    """At the server, and in nothing that we print."""
    secret = "xyzzy-4711-xyzzy"  # noqa: S105
    tasks = sums(variant="keys", secrets={"MY_KEY": (secret, ["example.org"])}, api_key=secret)
    assert f"MY_KEY:{len(secret)}" in keys_at_server(tasks)
    env = tasks[0].make()
    assert secret not in f"{tasks!r} {tasks[0]!r} {env!r} {env._place!r}"


def test_keys_for_names_with_an_owner(sums, openreward_url, monkeypatch):
    """They need one, which is the variable's where none is given; other names on your own server are sent none."""
    owned = functools.partial(openreward, "me/keys", base_url=openreward_url, variant="keys")
    monkeypatch.delenv("OPENREWARD_API_KEY", raising=False)
    with pytest.raises(rlkit.ConfigError, match="'me/keys' needs an API key; set OPENREWARD_API_KEY"):
        openreward("me/keys")
    with pytest.raises(rlkit.ConfigError, match="or give the name without its owner"):
        owned()
    monkeypatch.setenv("OPENREWARD_API_KEY", "plugh-0815-plugh")
    assert keys_at_server(sums(variant="keys")) == ""
    for options, length in (({}, 16), ({"api_key": "xyzzy-4711-xyzzy-4711"}, 21)):
        seen = keys_at_server(owned(**options))
        assert seen == f"OPENREWARD_API_KEY:{length}, api_key:{length}", "as the server names it"


@for_each("body", [b"[]", b"{}", b"null", b"3", b'"text"', b'[["a"]]', b"<html>", b"\xff\xfe", b""])
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


def test_what_would_fail_again(sums, openreward_url):
    """A tool that fails, which is no matter of the policy, and a key that is not valid."""
    with pytest.raises(rlkit.EnvError, match=r"ToolFailed.*the disk is full") as failed:
        played(sums()[0], tool_call("fail"))
    with pytest.raises(rlkit.EnvError, match="API key") as refused:
        openreward("private", base_url=openreward_url)
    assert rlkit.EnvBusy not in (failed.type, refused.type)


def test_a_call_whose_answer_is_lost_is_made_once(sums, state):
    """A 429 after the tool has run, from a proxy: EnvBusy, and not the SDK's second call in the same episode."""
    before = state()["looked"]
    with pytest.raises(rlkit.EnvBusy, match="429"):
        played(sums()[0], tool_call("look", text="lost"))
    assert state()["looked"] - before == 1


@pytest.mark.parametrize("name", ["full", "closed"])
@asynchronous
async def test_a_server_without_capacity(sums, state, name):
    """429 when the environment is made, or the session: EnvBusy, after few requests, and nothing stays open."""
    before = state()["refused"]
    env = await GuardedEnv.open(sums()[0])
    env.env._place = type(env.env._place)(name, None, sums.keywords["base_url"], None)
    with pytest.raises(rlkit.EnvBusy, match="429"):
        await env.reset(0)
    await env.close(timeout=30)
    assert 1 <= state()["refused"] - before <= 5
    wait_until_closed(state)


def test_a_server_that_does_not_answer():
    """Nobody listens, where the failure of one attempt is told, not of all; or who listens is silent."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(rlkit.EnvBusy, match="rlkit.envs.openreward: 'sums' at") as caught:
            openreward("sums", base_url=address)
        assert str(caught.value).count("Cannot connect to host 127.0.0.1") == 1
        taken.listen()
        with pytest.raises(rlkit.EnvTimeout, match=r"no answer within 0.5 s"):
            openreward("sums", base_url=address, timeout=0.5)


@asynchronous
async def test_a_step_that_is_given_up_closes_its_session(sums, state):
    """A tool that takes too long: EnvTimeout, and the server has no session left."""
    env = await GuardedEnv.open(sums()[0])
    await env.reset(0)
    assert state()["open"] == 1
    with pytest.raises(rlkit.EnvTimeout):
        await env.step(Action(tool_call("sleep", value=600)), timeout=0.3)
    assert await env.close(timeout=30) is None
    wait_until_closed(state)


@for_each("delay", [0.0, 0.01, 0.03, 0.06, 0.1, 0.2])
@asynchronous
async def test_a_reset_that_is_cancelled_leaves_no_session(sums, state, delay):
    """Whenever in its course that is."""
    env = await GuardedEnv.open(sums()[0])
    reset = asyncio.create_task(env.reset(0))
    await asyncio.sleep(delay)
    reset.cancel()
    await asyncio.gather(reset, return_exceptions=True)
    assert await env.close(timeout=30) is None
    wait_until_closed(state)


def test_many_sessions_at_once(sums, state):
    """64 episodes, each with its own task, over shared connections, from one event loop after the other."""
    tasks = sums()
    opened = state()["opened"]

    async def scene():
        turns = [tool_call("answer", value=3 * index) for index in range(10)]
        return await asyncio.gather(*(play(tasks[i % 10], turns[i % 10]) for i in range(32)))

    for _ in range(2):
        assert [result.reward for _, (result,), _ in asyncio.run(scene())] == [1.0] * 32
    assert state()["opened"] - opened == 64
    wait_until_closed(state)


@for_each(
    ("options", "message"),
    [
        ({"name": ""}, "name"),
        ({"split": ""}, "split"),
        ({"format": "hermess"}, "hermes"),
        ({"secrets": ["key"]}, "secrets: is a list"),
        ({"secrets": {"MY_KEY": "canary"}}, r"secrets\['MY_KEY'\]: the hosts .* are unknown"),
        ({"env_overrides": "x"}, "env_overrides"),
        ({"timeout": 0}, "timeout"),
    ],
)
def test_what_is_wrong_is_told_at_once(options, message):
    error = rlkit.UnknownNameError if "format" in options else rlkit.ConfigError
    with pytest.raises(error, match=message):
        openreward(**{"name": "sums", "base_url": "http://127.0.0.1:9", **options})


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "openreward", None)
    with pytest.raises(rlkit.ConfigError, match=r"pip install .*\[openreward\]"):
        openreward("sums")


def test_the_program_ends_without_a_word(openreward_url):
    """Connections are shared until the end, and closed there."""
    source = f"""
from rlkit.envs import openreward
from tests.envs.parts import played
print(played(openreward("sums", base_url={openreward_url!r})[0])[1])
"""
    command = [sys.executable, "-W", "always::ResourceWarning", "-c", source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "[]\n")
    assert "nclosed" not in done.stderr
    assert "Traceback" not in done.stderr
