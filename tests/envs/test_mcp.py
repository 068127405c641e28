"""Tools of MCP servers, with the official SDK: over stdio, over HTTP, in this process, and servers that are lost."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import attrs
import pytest

import rlkit
from rlkit.envs import Action, mcp
from rlkit.envs.calling import Guarded
from rlkit.rollouts import rollout_sync
from tests.each import for_each
from tests.examples.programs import FOLDER, load, script

pytest.importorskip("mcp", reason="mcp is not installed: pip install --no-deps mcp mcp-types PyJWT python-multipart")
pytest.importorskip("jinja2")
pytest.importorskip("jsonschema")
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def program():
    return load("mcp_tools")


def call(fruit):
    return Action(f"<tool_call>{json.dumps({'name': 'stock', 'arguments': {'fruit': fruit}})}</tool_call>")


def place(program, where):
    if where == "here":
        return program.server
    return [sys.executable, FOLDER / "mcp_tools.py", "--serve"]


@pytest.mark.parametrize(("where", "several"), [("here", 6), ("stdio", 2)])
def test_sessions_are_played_and_closed(program, where, several):
    """Several at once: tools listed, calls made and answered, nothing left open."""

    async def episode(task):
        env = await Guarded.opened(task, timeout=120)
        try:
            first = await asyncio.create_task(env.reset(0, timeout=120))
            results = [await env.step(turn, timeout=120) for turn in (call("pears"), call("stones"), Action("5"))]
            return first, env.tools, results
        finally:
            assert await asyncio.create_task(env.close(timeout=120)) is None

    async def scene():
        return await asyncio.gather(*(episode(program.tasks(place(program, where))[1]) for _ in range(several)))

    for first, tools, (found, missing, answered) in asyncio.run(scene()):
        assert first == "How many pears are there?"
        assert tools[0]["function"]["name"] == "stock"
        assert found.observation[0]["content"] == "5"
        assert missing.observation[0]["content"] == "0"
        assert (answered.reward, answered.terminated) == (1.0, True)


def test_a_rollout_closes_every_session(program, caplog):
    """Those of episodes that are given up, too."""

    sampler = rlkit.connect("toy", seed=0).sampler().result()
    params = rlkit.SamplingParams(max_tokens=6)
    tasks = list(program.tasks(program.server))
    groups = rollout_sync(sampler, tasks, n=3, params=params, max_turns=2, progress=False)
    assert groups.metrics["env/shop/close_failed"] == 0
    assert groups.metrics["env/shop/episodes"] == 12

    class Slow:
        """Has its session open when its time is up."""

        def __init__(self):
            self.inner = tasks[0].make()

        async def reset(self, seed):
            await self.inner.reset(seed)
            await asyncio.sleep(60)

        async def step(self, action):
            return await self.inner.step(action)

        async def close(self):
            await self.inner.close()

    async def given_up():
        env = await Guarded.opened(attrs.evolve(tasks[0], make=Slow))
        with pytest.raises(rlkit.EnvTimeout):
            await env.reset(0, timeout=2.0)
        return await env.close(timeout=60)

    assert asyncio.run(given_up()) is None
    assert not caplog.records


def test_the_program():
    assert "could not be closed: 0" in script("mcp_tools")
    assert "could not be closed: 0" in script("mcp_tools", "--stdio")


SERVER = [sys.executable, str(Path(__file__).with_name("mcp_server.py"))]
ROWS = [{"prompt": "How many pears?", "answer": "5"}, {"prompt": "How many apples?", "answer": "7"}]


def tool(name, **arguments):
    return Action(f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>")


def right(text, answer):
    return float(answer in text)


async def played(tasks, *turns, index=0):
    """The last observation's contents or the result of each turn; the tools that were offered."""
    env = await Guarded.opened(tasks[index], timeout=120)
    try:
        await env.reset(0, timeout=120)
        results = [await env.step(turn, timeout=120) for turn in turns]
    finally:
        assert await env.close(timeout=60) is None
    return [r if r.terminated else [m["content"] for m in r.observation] for r in results], env.tools


def gone(pid, seconds=30):
    """Whether the process ends in time; one that has died and was not fetched has ended."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


@pytest.fixture(scope="module")
def url():
    """A streamable HTTP server in a process of its own."""
    process = subprocess.Popen([*SERVER, "--http"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    yield f"http://127.0.0.1:{int(process.stdout.readline())}/mcp"
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.mark.parametrize("over", ["stdio", "http", "here"])
def test_what_tools_give_is_told(over, url, monkeypatch):
    """Texts, structured content, pictures, errors of tools, and calls that were not made; schemas without titles."""
    monkeypatch.setenv("OPENAI_API_KEY", "not-passed-on")
    if over == "here":
        from tests.envs.mcp_server import server
    else:
        server = SERVER if over == "stdio" else url
    tasks = mcp(server, ROWS, right, env={"TOKEN": "passed"} if over == "stdio" else None)
    turns = [
        tool("stock", fruit="pears"),
        tool("stock", fruit="stones"),
        tool("stock", fruit=3),
        tool("nothing"),
        tool("price", fruit="pears"),
        tool("picture", fruit="pears"),
        tool("token"),
        Action("There are 5."),
    ]
    (found, failed, misfit, missing, price, picture, token, answer), tools = asyncio.run(played(tasks, *turns))
    assert found == ["5"]
    assert failed[0].startswith("error: ")
    assert "3 is not of type 'string'" in misfit[0]
    assert "the tool does not exist" in missing[0]
    assert json.loads(price[0]) == {"amount": 0.5, "currency": "EUR"}
    assert picture == ["a pear\n[image: image/png]"]
    if over == "stdio":
        assert token == ["passed none"], "a server is given no keys but those that are meant for it"
    assert (answer.reward, answer.info["answer"]) == (1.0, "5")
    assert tools[0]["function"] == {
        "name": "stock",
        "description": "Says how many pieces of a fruit there are.",
        "parameters": {"type": "object", "properties": {"fruit": {"type": "string"}}, "required": ["fruit"]},
    }


def test_rewards_may_look_at_calls_and_ask_the_server():
    """Those that name ``calls`` and ``client`` are given them; a row's own field of that name wins."""

    async def reward(text, answer, calls, client):
        left = await client.call_tool("stock", {"fruit": "pears"})
        return float(answer in text and [call.name for call, _ in calls] == ["stock"]) + len(left.content[0].text)

    results, _ = asyncio.run(played(mcp(SERVER, ROWS, reward), tool("stock", fruit="pears"), Action("5")))
    assert results[-1].reward == 2.0

    rows = [{"prompt": "?", "calls": "mine"}]
    results, _ = asyncio.run(played(mcp(SERVER, rows, lambda text, calls: len(calls)), Action("5")))
    assert results[-1].reward == 4.0


def test_each_episode_has_a_server():
    async def several():
        tasks = mcp(SERVER, ROWS, right)
        turns = (tool("sell", fruit="pears"), tool("pid"))
        return [results for results, _ in await asyncio.gather(*(played(tasks, *turns) for _ in range(3)))]

    alone = asyncio.run(several())
    assert [sold for sold, _ in alone] == [["sold 1"]] * 3
    assert len({pid[0] for _, pid in alone}) == 3
    for _, (pid,) in alone:
        assert gone(pid)


def test_a_server_that_is_killed(tmp_path):
    """The episode fails and says what the server said last; nothing that it started is left; the next is served."""
    tasks = mcp(SERVER, ROWS, right, env={"CHILD": str(tmp_path / "child")})
    with pytest.raises(rlkit.EnvError, match=r"MCP server .*Connection closed.*out of memory") as caught:
        asyncio.run(played(tasks, tool("die")))
    assert not isinstance(caught.value, rlkit.EnvTimeout)
    assert gone(int((tmp_path / "child").read_text()))
    assert asyncio.run(played(tasks, tool("sell", fruit="pears")))[0] == [["sold 1"]]


def test_rollouts_count_servers_that_are_killed(tmp_path):
    """They are no rewards of 0: such episodes are in no group."""

    class Calls:
        """Writes every turn as a call that kills the server."""

        def __init__(self, inner):
            self.inner = inner

        async def reset(self, seed):
            return await self.inner.reset(seed)

        async def step(self, action):
            return await self.inner.step(tool("die"))

        async def close(self):
            await self.inner.close()

    tasks = mcp(SERVER, ROWS, right, tools=["die"], env={"CHILD": str(tmp_path / "child")}, name="shop")
    mixed = [attrs.evolve(tasks[0], make=lambda: Calls(tasks[0].make())), tasks[1]]
    params = rlkit.SamplingParams(max_tokens=4)
    with rlkit.connect("toy", seed=0) as policy, policy.sampler().result() as sampler:
        groups = rollout_sync(sampler, mixed, n=2, params=params, progress=False)
    assert [group.index for group in groups] == [1]
    assert groups.metrics["env/shop/failed/EnvError"] == 2
    assert groups.metrics["env/shop/close_failed"] == 0


def test_a_server_that_does_not_answer():
    """A call, or the start: EnvTimeout, and its process is ended."""
    with pytest.raises(rlkit.EnvTimeout, match="no answer within 2 s"):
        asyncio.run(played(mcp(SERVER, ROWS, right, timeout=2.0), tool("sleep", seconds=60)))
    with pytest.raises(rlkit.EnvTimeout, match="no answer within 1 s"):
        asyncio.run(played(mcp(["sleep", "60"], ROWS, right, timeout=1.0)))
    with pytest.raises(rlkit.EnvError, match="Connection closed; its output: no licence"):
        asyncio.run(played(mcp(["sh", "-c", "echo no licence >&2"], ROWS, right)))


def test_an_http_server_that_is_lost():
    """In the middle of an episode: EnvError; before one: EnvBusy, which rollouts try again."""
    process = subprocess.Popen([*SERVER, "--http"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    tasks = mcp(f"http://127.0.0.1:{int(process.stdout.readline())}/mcp", ROWS, right, timeout=30)

    async def scene():
        env = await Guarded.opened(tasks[0])
        await env.reset(0, timeout=60)
        process.kill()
        process.wait()
        process.stdout.close()
        try:
            with pytest.raises(rlkit.EnvError, match="MCP server http"):
                await env.step(tool("pid"), timeout=60)
        finally:
            assert await env.close(timeout=60) is None

    asyncio.run(scene())
    with pytest.raises(rlkit.EnvBusy, match="MCP server http"):
        asyncio.run(played(tasks))


def test_a_server_for_each_row(tmp_path):
    """A function of the row's fields gives its command."""
    rows = [{"prompt": "?", "folder": str(tmp_path / name)} for name in "ab"]
    tasks = mcp(lambda row: [*SERVER, row["folder"]], rows, lambda text, folder: float(folder.endswith("b")))
    assert asyncio.run(played(tasks, Action("."), index=1))[0][0].reward == 1.0


def test_tools_may_be_chosen():
    from tests.envs.mcp_server import server

    _, tools = asyncio.run(played(mcp(server, ROWS, right, tools=["pid", "stock"])))
    assert [tool["function"]["name"] for tool in tools] == ["pid", "stock"]
    with pytest.raises(rlkit.EnvError, match="has no tool 'buy'; expected among: stock, sell"):
        asyncio.run(played(mcp(server, ROWS, right, tools=["buy"])))


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
    assert asyncio.run(played(tasks, tool("stock", fruit="pears")))[0] == [["5"]]
    env = tasks[0].make()
    assert secret not in f"{tasks!r} {env!r} {env._server!r}"


def test_files_of_servers_are_closed():
    tasks = mcp(["true"], ROWS, right)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        with pytest.raises(rlkit.EnvError, match="Connection closed"):
            asyncio.run(played(tasks))
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 8, "a loop's own; not one for each session"
