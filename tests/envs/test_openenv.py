"""OpenEnv's servers, with openenv-core as it is, in an interpreter of its own.

python -m venv /tmp/openenv && /tmp/openenv/bin/pip install openenv-core==0.3.0
RLKIT_OPENENV_PYTHON=/tmp/openenv/bin/python python -m pytest tests/envs/test_openenv.py
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import rlkit
from rlkit.backends.vllm.settings import free_port
from rlkit.envs import openenv
from rlkit.envs._from_openenv import Session
from rlkit.envs.calling import GuardedEnv
from rlkit.rollouts import Plan, rollout_sync
from tests.each import for_each
from tests.envs import parts
from tests.envs.parts import asynchronous

FOLDER = Path(__file__).parent
PYTHON = os.environ.get("RLKIT_OPENENV_PYTHON") or (sys.executable if importlib.util.find_spec("openenv") else "")
pytest.importorskip("websockets")
served = pytest.mark.skipif(not PYTHON, reason="RLKIT_OPENENV_PYTHON names no interpreter with openenv-core; see above")


def played(task, *turns):
    """The first observation, and the results."""
    return parts.played(task, *turns, seed=task.seed)[:2]


@contextlib.contextmanager
def serving(app):
    """Its server's address, started by uvicorn as the page says."""
    port = free_port()
    command = [PYTHON, "-m", "uvicorn", f"openenv_server:{app}", "--port", str(port), "--log-level", "warning"]
    with subprocess.Popen(command, cwd=FOLDER) as process:
        try:
            for _ in range(600):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
                    break
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


@pytest.fixture(scope="module")
def words():
    with serving("app") as address:
        yield openenv(address)


@pytest.fixture(scope="module")
def line():
    with serving("line") as address:
        yield address


@served
def test_an_action_of_one_text(words):
    """It is the policy's text; rewards, their absence, and the end are the server's; the seed reaches it."""
    assert words.name == "Words"
    every = [played(words[i], "show")[1][0].observation for i in range(8)]
    assert len(set(every)) > 1
    word = every[0]
    first, (shown, wrong, right) = played(words[0], "show", "x", f" {word}\n")
    assert first == "A word of 3 letters."
    assert (shown.observation, shown.rewards) == (word, ())
    assert (wrong.reward, wrong.terminated, wrong.observation) == (0.0, False, "no")
    assert (right.reward, right.terminated) == (1.0, True)
    address = words[0].make()._session._address.replace("http", "ws", 1)
    longer = openenv(address, reset=lambda index: {"length": index + 1})
    assert played(longer[4])[0] == "A word of 5 letters."


@served
def test_an_action_of_several_fields(line):
    """It is JSON by the server's schema, which the policy is told, as what is wrong with it."""
    there = '```\n{"direction": "right", "steps": 3}\n```'
    turns = ("go right", '{"direction": right}', 'I go. {"direction": "up"}', there)
    first, (none, broken, refused, there) = played(openenv(line, malformed_reward=-0.5)[0], *turns)
    assert first.startswith("Answer with one JSON object that fits this schema:")
    assert '"enum": ["left", "right"]' in first
    assert json.loads(first.rpartition("\n")[2]) == {"x": 0, "legal": ["left", "right"]}
    assert "it contains no JSON object" in none.observation
    assert "the JSON is not valid" in broken.observation
    assert "direction: Input should be 'left' or 'right'" in refused.observation
    assert [r.reward for r in (none, broken, refused)] == [-0.5] * 3
    assert (there.reward, there.terminated) == (1.0, True)


@served
def test_functions_of_yours_write_actions_and_observations(line):
    def walk(action):
        if action not in ("left", "right"):
            raise ValueError("say left or right")
        return {"direction": str(action)}

    tasks = openenv(line, action=walk, text=lambda seen: f"You are at {seen['x']}.")
    first, (told, moved) = played(tasks[0], "up", "left")
    assert first == "You are at 0."
    assert told.observation == "That was not a valid action: say left or right."
    assert moved.observation == "You are at -1."


@served
def test_faults_of_the_server_fail_the_episode():
    """One that raises, and one that dies."""
    with serving("app") as address:
        task = openenv(address)[0]
        with pytest.raises(rlkit.EnvError, match="EXECUTION_ERROR: the dictionary is gone"):
            played(task, "crash")
        assert played(task)[0] == "A word of 3 letters."
        with pytest.raises(rlkit.EnvError, match="the session was lost"):
            played(task, "die")


@served
@asynchronous
async def test_a_server_without_a_free_session():
    with serving("narrow") as address:
        tasks = openenv(address)
        env = await GuardedEnv.open(tasks[0])
        await env.reset(0, timeout=60)
        with pytest.raises(rlkit.EnvBusy, match="CAPACITY_REACHED"):
            await parts.play(tasks[1])
        assert await env.close(timeout=60) is None


@served
def test_a_rollout(words):
    with rlkit.connect("toy", seed=0) as policy, policy.sampler().result() as sampler:
        params = rlkit.SamplingParams(max_tokens=4)
        groups = rollout_sync(sampler, words.batch(0, 3), n=2, params=params, progress=False, max_turns=3)
    assert groups.metrics["env/Words/episodes"] == 6


@for_each(
    ("arguments", "match"),
    [
        ({"server": "server.app:app"}, "server: got 'server.app:app' .*; expected an address"),
        ({"server": 3}, "server: got 3"),
        ({"size": 0}, "size"),
        ({"timeout": 0}, "timeout"),
    ],
)
def test_what_cannot_be_played_is_said_before_the_first_episode(arguments, match):
    with pytest.raises(rlkit.ConfigError, match=match):
        openenv(**{"server": "http://127.0.0.1:9", **arguments})


def test_an_address_with_nobody_listening():
    """At the start and at an episode, which is tried again."""
    with pytest.raises(rlkit.EnvError, match="no server listens there") as caught:
        openenv("http://127.0.0.1:9")
    assert isinstance(caught.value, Plan().retry)
    assert not isinstance(caught.value, rlkit.EnvBusy)
    session = Session("http://127.0.0.1:9", "here", 10.0)
    with pytest.raises(ConnectionError, match="here: no server listens there"):
        asyncio.run(session.open())
