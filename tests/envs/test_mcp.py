"""Tools of MCP servers, with the official SDK: over stdio, over HTTP, in this process, and servers that are lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import rlkit
from rlkit.envs import Action, mcp
from rlkit.envs.calling import GuardedEnv
from tests.each import for_each
from tests.envs.parts import asynchronous, play, played, tool_call
from tests.examples.programs import load, script
from tests.test_process import gone

pytest.importorskip("mcp", reason="mcp is not installed: pip install --no-deps mcp mcp-types PyJWT python-multipart")
pytest.importorskip("jinja2")
pytest.importorskip("jsonschema")
from tests.envs.mcp_server import server

pytestmark = pytest.mark.timeout(300)

SERVER = [sys.executable, str(Path(__file__).with_name("mcp_server.py"))]
ROWS = [{"prompt": "How many pears?", "answer": "5"}, {"prompt": "How many apples?", "answer": "7"}]
PEARS = tool_call("stock", fruit="pears")
SELL = tool_call("sell", fruit="pears")


def right(text, answer):
    return float(answer in text)


def texts(task, *turns):
    """What the policy sees after each turn."""
    return [[message["content"] for message in result.observation] for result in played(task, *turns)[1]]


@contextlib.contextmanager
def serving():
    """A streamable HTTP server's address, and its process."""
    with subprocess.Popen([*SERVER, "--http"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}/mcp", process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def url():
    with serving() as (address, _):
        yield address


@pytest.fixture(scope="module")
def program():
    return load("mcp_tools")


@asynchronous
async def test_sessions_are_played_and_closed(program):
    """Several at once: tools listed, calls made and answered, nothing left open."""
    turns = (PEARS, tool_call("stock", fruit="stones"), "5")
    episodes = [play(program.tasks(program.server)[1], *turns) for _ in range(6)]
    for first, (found, missing, answered), env in await asyncio.gather(*episodes):
        assert first == "How many pears are there?"
        assert env.tools[0]["function"]["name"] == "stock"
        assert (found.observation[0]["content"], missing.observation[0]["content"]) == ("5", "0")
        assert (answered.reward, answered.terminated) == (1.0, True)


@for_each("over", ["stdio", "here"])
@asynchronous
async def test_a_call_that_is_given_up_leaves_nothing(over, caplog):
    env = await GuardedEnv.open(mcp(SERVER if over == "stdio" else server, ROWS, right)[0])
    await env.reset(0, timeout=60)
    (pid,) = (await env.step(Action(tool_call("pid")), timeout=60)).observation
    with pytest.raises(rlkit.EnvTimeout):
        await env.step(Action(tool_call("sleep", seconds=60)), timeout=1.0)
    assert await env.close(timeout=60) is None
    assert over == "here" or gone(pid["content"])
    assert not caplog.records


def test_the_program():
    for arguments in ((), ("--stdio",)):
        assert "could not be closed: 0" in script("mcp_tools", *arguments)


@pytest.mark.parametrize("over", ["stdio", "http", "here"])
def test_what_tools_give_is_told(over, url, monkeypatch):
    """Texts, structured content, pictures, errors of tools, and calls that were not made; schemas without titles."""
    monkeypatch.setenv("OPENAI_API_KEY", "not-passed-on")
    place = {"stdio": SERVER, "http": url, "here": server}[over]
    task = mcp(place, ROWS, right, env={"TOKEN": "passed"} if over == "stdio" else None)[0]
    calls = (
        PEARS,
        tool_call("stock", fruit="stones"),
        tool_call("stock", fruit=3),
        tool_call("nothing"),
        tool_call("price", fruit="pears"),
        tool_call("picture", fruit="pears"),
        tool_call("token"),
    )
    _, (*told, answer), env = played(task, *calls, "There are 5.")
    found, failed, misfit, missing, price, picture, keys = (result.observation[0]["content"] for result in told)
    assert found == "5"
    assert failed.startswith("error: ")
    assert "3 is not of type 'string'" in misfit
    assert "the tool does not exist" in missing
    assert json.loads(price) == {"amount": 0.5, "currency": "EUR"}
    assert picture == "a pear\n[image: image/png]"
    assert over != "stdio" or keys == "passed none", "a server is given no keys but those that are meant for it"
    assert (answer.reward, answer.info["answer"]) == (1.0, "5")
    assert env.tools[0]["function"] == {
        "name": "stock",
        "description": "Says how many pieces of a fruit there are.",
        "parameters": {"type": "object", "properties": {"fruit": {"type": "string"}}, "required": ["fruit"]},
    }


def test_rewards_may_look_at_calls_and_ask_the_server():
    """Those that name ``calls`` and ``client`` are given them; a row's own field of that name wins."""

    async def reward(text, answer, calls, client):
        left = await client.call_tool("stock", {"fruit": "pears"})
        return float(answer in text and [call.name for call, _ in calls] == ["stock"]) + len(left.content[0].text)

    assert played(mcp(SERVER, ROWS, reward)[0], PEARS, "5")[1][-1].reward == 2.0
    rows = [{"prompt": "?", "calls": "mine"}]
    assert played(mcp(SERVER, rows, lambda text, calls: len(calls))[0], "5")[1][-1].reward == 4.0


@asynchronous
async def test_each_episode_has_a_server():
    task = mcp(SERVER, ROWS, right)[0]
    episodes = await asyncio.gather(*(play(task, SELL, tool_call("pid")) for _ in range(3)))
    told = [[result.observation[0]["content"] for result in results] for _, results, _ in episodes]
    assert [sold for sold, _ in told] == ["sold 1"] * 3
    assert len({pid for _, pid in told}) == 3
    assert all(gone(pid) for _, pid in told)


def test_a_server_that_is_killed(tmp_path):
    """The episode fails and says what the server said last; nothing that it started is left; the next is served."""
    task = mcp(SERVER, ROWS, right, env={"CHILD": str(tmp_path / "child")})[0]
    with pytest.raises(rlkit.EnvError, match=r"MCP server .*Connection closed.*out of memory") as caught:
        played(task, tool_call("die"))
    assert not isinstance(caught.value, rlkit.EnvTimeout)
    assert gone(int((tmp_path / "child").read_text()))
    assert texts(task, SELL) == [["sold 1"]]


@for_each(
    ("server", "timeout", "turns", "error", "match"),
    [
        (SERVER, 2.0, [tool_call("sleep", seconds=60)], rlkit.EnvTimeout, "no answer within 2 s"),
        (["sleep", "60"], 1.0, [], rlkit.EnvTimeout, "no answer within 1 s"),
        (["sh", "-c", "echo no licence >&2"], 60, [], rlkit.EnvError, "Connection closed; its output: no licence"),
    ],
)
def test_a_server_that_does_not_answer(server, timeout, turns, error, match):
    """A call, or the start: EnvTimeout, and its process is ended."""
    with pytest.raises(error, match=match):
        played(mcp(server, ROWS, right, timeout=timeout)[0], *turns)


def test_an_http_server_that_is_lost():
    """In the middle of an episode: EnvError; before one: EnvBusy, which rollouts try again."""

    async def scene():
        env = await GuardedEnv.open(task)
        await env.reset(0, timeout=60)
        process.kill()
        process.wait()
        with pytest.raises(rlkit.EnvError, match="MCP server http"):
            await env.step(Action(tool_call("pid")), timeout=60)
        assert await env.close(timeout=60) is None

    with serving() as (address, process):
        task = mcp(address, ROWS, right, timeout=30)[0]
        asyncio.run(scene())
    with pytest.raises(rlkit.EnvBusy, match="MCP server http"):
        played(task)


def test_a_server_for_each_row(tmp_path):
    """A function of the row's fields gives its command."""
    rows = [{"prompt": "?", "folder": str(tmp_path / name)} for name in "ab"]
    tasks = mcp(lambda row: [*SERVER, row["folder"]], rows, lambda text, folder: float(folder.endswith("b")))
    assert played(tasks[1], ".")[1][0].reward == 1.0


def test_tools_may_be_chosen():
    _, _, env = played(mcp(server, ROWS, right, tools=["pid", "stock"])[0])
    assert [tool["function"]["name"] for tool in env.tools] == ["pid", "stock"]
    with pytest.raises(rlkit.EnvError, match="has no tool 'buy'; expected among: stock, sell"):
        played(mcp(server, ROWS, right, tools=["buy"])[0])


@for_each(
    ("arguments", "match"),
    [
        ({"server": "localhost:80"}, "server: got 'localhost:80' .*; expected a URL, a command"),
        ({"server": ["no-such-command-4711"]}, "'no-such-command-4711' cannot be found"),
        ({"server": []}, "a command as a list"),
        ({"server": None}, "expected a URL"),
        ({"tools": "stock"}, "tools"),
        ({"timeout": 0}, "timeout"),
        ({"reward": lambda text, missing: 0.0}, "no field 'missing'"),
        ({"prompts": [{"answer": "5"}]}, "expected a field 'prompt'"),
        ({"format": "hermess"}, "hermes"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_started(arguments, match):
    with pytest.raises(rlkit.RlkitError, match=match):
        mcp(**{"server": SERVER, "prompts": ROWS, "reward": right, **arguments})


def test_headers_are_sent_and_not_shown(url):
    secret = "xyzzy-4711-xyzzy"  # noqa: S105
    tasks = mcp(url, ROWS, right, headers={"Authorization": f"Bearer {secret}"})
    assert texts(tasks[0], PEARS) == [["5"]]
    env = tasks[0].make()
    assert secret not in f"{tasks!r} {env!r} {env._server!r}"


def test_files_of_servers_are_closed():
    task = mcp(["true"], ROWS, right)[0]
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        with pytest.raises(rlkit.EnvError, match="Connection closed"):
            played(task)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 8, "a loop's own; not one for each session"
