"""Sessions of the official MCP SDK, opened in ``reset`` and left in ``close``: examples/mcp_tools.py."""

from __future__ import annotations

import asyncio
import json
import sys

import attrs
import pytest

import rlkit
from rlkit.envs import Action
from rlkit.envs.calling import Guarded
from rlkit.rollouts import rollout_sync
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
    return program.StdioServerParameters(command=sys.executable, args=[str(FOLDER / "mcp_tools.py"), "--serve"])


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
