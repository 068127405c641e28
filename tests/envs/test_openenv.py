"""OpenEnv's servers, with openenv-core as it is, in an interpreter of its own.

python -m venv /tmp/openenv && /tmp/openenv/bin/pip install openenv-core==0.3.0
RLKIT_OPENENV_PYTHON=/tmp/openenv/bin/python python -m pytest tests/envs/test_openenv.py
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import rlkit
from rlkit.envs import Action, _from_openenv, openenv
from rlkit.envs._from_openenv import Session
from rlkit.envs.calling import Guarded
from rlkit.rollouts import Plan, rollout_sync

FOLDER = Path(__file__).parent
PYTHON = os.environ.get("RLKIT_OPENENV_PYTHON") or (sys.executable if importlib.util.find_spec("openenv") else "")
pytest.importorskip("websockets")
served = pytest.mark.skipif(not PYTHON, reason="RLKIT_OPENENV_PYTHON names no interpreter with openenv-core; see above")
make = functools.partial(openenv, python=PYTHON, cwd=FOLDER)


async def played(task, *turns):
    """The first observation, and the results."""
    env = await Guarded.opened(task, timeout=60)
    try:
        first = await env.reset(task.seed, timeout=60)
        return first, [await env.step(Action(turn), timeout=60) for turn in turns]
    finally:
        assert await env.close(timeout=60) is None


@pytest.fixture(scope="module")
def words():
    return make("openenv_server:app")


@served
def test_an_action_of_one_text(words):
    """It is the policy's text; rewards, their absence, and the end are the server's; the seed reaches it."""
    assert words.name == "Words"
    word = asyncio.run(played(words[0], "show"))[1][0].observation
    first, (shown, wrong, right) = asyncio.run(played(words[0], "show", "x", f" {word}\n"))
    assert first == "A word of 3 letters."
    assert (shown.observation, shown.rewards) == (word, ())
    assert (wrong.reward, wrong.terminated, wrong.observation) == (0.0, False, "no")
    assert (right.reward, right.terminated) == (1.0, True)
    shown = [asyncio.run(played(words[i], "show"))[1][0].observation for i in range(8)]
    assert len(set(shown)) > 1


@served
def test_reset_is_given_more():
    tasks = make("openenv_server:app", reset=lambda index: {"length": index + 1})
    assert asyncio.run(played(tasks[4]))[0] == "A word of 5 letters."


@served
def test_an_action_of_several_fields():
    """It is JSON by the server's schema, which the policy is told, as what is wrong with it."""
    tasks = make("openenv_server:line", malformed_reward=-0.5)
    turns = (
        "go right",
        '{"direction": right}',
        'I go. {"direction": "up"}',
        '```\n{"direction": "right", "steps": 3}\n```',
    )
    first, (none, broken, refused, there) = asyncio.run(played(tasks[0], *turns))
    assert first.startswith("Answer with one JSON object that fits this schema:")
    assert '"enum": ["left", "right"]' in first
    assert json.loads(first.rpartition("\n")[2]) == {"x": 0, "legal": ["left", "right"]}
    assert "it contains no JSON object" in none.observation
    assert "the JSON is not valid" in broken.observation
    assert "direction: Input should be 'left' or 'right'" in refused.observation
    assert [r.reward for r in (none, broken, refused)] == [-0.5] * 3
    assert (there.reward, there.terminated) == (1.0, True)


@served
def test_functions_of_yours_write_actions_and_observations():
    def walk(action):
        if action not in ("left", "right"):
            raise ValueError("say left or right")
        return {"direction": str(action)}

    tasks = make("openenv_server:line", action=walk, text=lambda seen: f"You are at {seen['x']}.")
    first, (told, moved) = asyncio.run(played(tasks[0], "up", "left"))
    assert first == "You are at 0."
    assert told.observation == "That was not a valid action: say left or right."
    assert moved.observation == "You are at -1."


@served
def test_faults_of_the_server_fail_the_episode(words):
    """One that raises, and one that dies; the next episode starts it again."""
    with pytest.raises(rlkit.EnvError, match="EXECUTION_ERROR: the dictionary is gone"):
        asyncio.run(played(words[0], "crash"))
    with pytest.raises(rlkit.EnvError, match="the session was lost"):
        asyncio.run(played(words[0], "die"))
    until = time.monotonic() + 60
    while True:
        try:
            assert asyncio.run(played(words[0]))[0] == "A word of 3 letters."
            break
        except (rlkit.EnvBusy, ConnectionError):  # it has not quite ended; rollouts try again, too
            assert time.monotonic() < until


@served
def test_a_server_without_a_free_session():
    tasks = make("openenv_server:narrow")

    async def scene():
        env = await Guarded.opened(tasks[0])
        await env.reset(0, timeout=60)
        with pytest.raises(rlkit.EnvBusy, match="CAPACITY_REACHED"):
            await played(tasks[1])
        assert await env.close(timeout=60) is None

    asyncio.run(scene())


@served
def test_rollouts_over_an_address(words):
    """Groups share a seed; what is left of a program that is gone is nothing."""
    with rlkit.connect("toy", seed=0) as policy, policy.sampler().result() as sampler:
        params = rlkit.SamplingParams(max_tokens=4)
        groups = rollout_sync(sampler, words.batch(0, 3), n=2, params=params, progress=False, max_turns=3)
    assert groups.metrics["env/Words/episodes"] == 6

    line = "from rlkit.envs import openenv; import sys; "
    line += f"t = openenv('openenv_server:app', python={PYTHON!r}, cwd={str(FOLDER)!r}); "
    line += "print(t._make.__closure__ and 'ready', flush=True); sys.stdin.read()"
    program = subprocess.Popen([sys.executable, "-c", line], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert program.stdout.readline() == "ready\n"
    children = Path(f"/proc/{program.pid}/task/{program.pid}/children")
    others = [Path(f"/proc/{program.pid}/task/{t.name}/children") for t in children.parent.parent.iterdir()]
    pids = [pid for place in others for pid in place.read_text().split()]
    (child,) = [pid for pid in pids if b"_openenv_child" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    program.kill()
    program.wait()
    program.stdin.close()
    program.stdout.close()
    until = time.monotonic() + 60
    while Path(f"/proc/{child}/cmdline").exists() and Path(f"/proc/{child}/cmdline").read_bytes():
        assert time.monotonic() < until, "the server outlives its program"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"server": "no server"}, 'expected an address, or "module:app"'),
        ({"server": 3}, "server: got 3"),
        ({"server": "http://127.0.0.1:9", "cwd": "."}, "the server runs elsewhere"),
        ({"server": "http://127.0.0.1:9"}, "no server listens there: .*Connection refused"),
        ({"server": "nothing_here:app", "python": sys.executable}, "No module named 'nothing_here'"),
        ({"server": "a:b", "size": 0}, "size"),
        ({"server": "a:b", "timeout": 0}, "timeout"),
    ],
)
def test_what_cannot_be_played_is_said_before_the_first_episode(arguments, match):
    with pytest.raises(rlkit.RlkitError, match=match):
        openenv(**arguments)


def test_a_server_that_does_not_start(tmp_path):
    (tmp_path / "slow.py").write_text("import time; time.sleep(60)")
    server = _from_openenv.LocalServer("slow:app", python=sys.executable, folder=str(tmp_path), timeout=1.0)
    with pytest.raises(rlkit.EnvError, match="did not start"):
        server.url()


def test_an_address_with_nobody_listening():
    """At the start and at an episode, which is tried again."""
    with pytest.raises(rlkit.EnvError, match="no server listens there") as caught:
        openenv("http://127.0.0.1:9")
    assert isinstance(caught.value, Plan().retry)
    assert not isinstance(caught.value, rlkit.EnvBusy)
    session = Session(lambda: "http://127.0.0.1:9", "here", 10.0)
    with pytest.raises(ConnectionError, match="here: no server listens there"):
        asyncio.run(session.open())
