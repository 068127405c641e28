"""Agents that are programs: real processes, with the SDKs that agents are written with, under faults."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import stat
import sys
import threading

import pytest

pytest.importorskip("jinja2", reason="needs the extra chat")
pytest.importorskip("uvicorn", reason="needs the extra gateway")

import httpx

from rlkit.envs import agent
from rlkit.gateway import Gateway, Session
from rlkit.rollouts import rollout
from rlkit.trajectory import datums
from tests.each import for_each
from tests.rollouts.parts import PARAMS, RandomSampler, fail_agent, is_text, play_agent
from tests.test_process import gone

CLIENT = """
import json, os, sys, urllib.request

task = json.load(sys.stdin)

def ask(*texts):
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    body = json.dumps({"model": os.environ["RLKIT_MODEL"], "messages": messages}).encode()
    headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]
"""
TWO = "first = ask(task['prompt'])\nsecond = ask(task['prompt'], first, 'more')\nprint(json.dumps(second))"
HANG = "ask('x')\nopen(sys.argv[1] + '/' + str(os.getpid()), 'w').close()\nimport time\ntime.sleep(600)"
DEAF = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
FORK = """
if not os.fork():
    open(sys.argv[1] + '/' + str(os.getpid()), 'w').close()
    import time
    time.sleep(600)
"""


@pytest.fixture
def program(tmp_path):
    """Return a function that writes a program, which can ask, and returns its command."""

    def write(body, *arguments, start=CLIENT):
        path = tmp_path / "agent.py"
        path.write_text(start + body)
        return [sys.executable, str(path), *arguments]

    return write


@pytest.fixture
def up(tmp_path):
    """Return a folder in which processes leave their ids."""
    (tmp_path / "up").mkdir()
    return tmp_path / "up"


def keep_in(results):
    """Return a reward that keeps the results; it is the answer of the row, or 1."""
    return lambda result, task: results.append(result) or float(task.get("answer", 1.0))


def read_pids(folder):
    return [int(path.name) for path in folder.iterdir() if path.name.isdigit()]


def test_programs_are_trained_as_they_are(program):
    """Each finds its session in its environment and its task on stdin; its result is what it prints."""
    rows, results = [{"prompt": f"task {i}", "answer": i} for i in range(12)], []
    groups = play_agent(program(TWO), reward=keep_in(results), rows=rows, concurrency=24)
    assert [group.rewards.tolist() for group in groups] == [[i, i] for i in range(12)]
    for row, trajectory in ((row, t) for row, group in zip(rows, groups, strict=True) for t in group.trajectories):
        assert [message["role"] for message in trajectory.messages] == ["user", "assistant"] * 2
        assert trajectory.messages[0]["content"] == row["prompt"]
        assert json.dumps(trajectory.messages[-1]["content"]) in results
        assert sum(d.mask.sum() for d in datums(trajectory, 1.0, split="allow")) == trajectory.token_count


def test_arguments_and_variables(program, tmp_path, monkeypatch):
    """Fields of the task stand in arguments once; braces that name none stay."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    body = "ask('x')\nprint(json.dumps([sys.argv[1:], os.environ['OWN'], os.getcwd()]))"
    command = program(body, "{prompt}", '{"a": {n}}', "{more}", "{}", "${HOME}")
    about, results = {"environment": {"OWN": "1"}, "folder": tmp_path}, []
    play_agent(command, reward=keep_in(results), rows=[{"prompt": "{n}", "n": [1]}], about=about, n=1)
    assert [json.loads(result) for result in results] == [
        [["{n}", '{"a": [1]}', "{more}", "{}", "${HOME}"], "1", os.path.realpath(tmp_path)]
    ]


@for_each(
    ("body", "message"),
    [
        ("ask('x')\nraise SystemExit('broken')", "2 AgentError in play.*agent.py': exit code 1: broken"),
        ("import signal\nos.kill(os.getpid(), signal.SIGSEGV)", "ended by signal 11"),
        ("print(4)", "2 no_turns in play"),
    ],
)
def test_programs_that_fail(program, body, message):
    """The message has the exit code and the end of what was said."""
    assert re.search(message, fail_agent(program(body)))


def test_one_that_cannot_be_run(tmp_path):
    path = tmp_path / "agent"
    path.write_text("not a program")
    path.chmod(stat.S_IRWXU)
    assert "2 EnvError in play" in fail_agent([str(path)])


@pytest.mark.parametrize("body", [HANG, DEAF + HANG, FORK + HANG], ids=["hangs", "deaf", "forks"])
def test_the_deadline_ends_programs(program, up, body):
    """And what they have started, whether they hear SIGTERM or not."""
    assert "2 timeout in play" in fail_agent(program(body, str(up)), deadline=8.0)
    assert len(read_pids(up)) >= 2
    assert all(gone(pid) for pid in read_pids(up))


@pytest.mark.parametrize("body", [HANG, DEAF + FORK + HANG], ids=["hangs", "deaf"])
def test_a_rollout_that_is_given_up_leaves_no_process(program, up, body):
    tasks = agent(program(body, str(up)), is_text, ["x"])
    wanted = 3 * (1 + body.count("os.fork"))

    async def main():
        playing = asyncio.ensure_future(rollout(RandomSampler(), tasks, n=3, params=PARAMS))
        while len(read_pids(up)) < wanted and not playing.done():
            await asyncio.sleep(0.05)
        playing.cancel()
        await asyncio.wait([playing])
        assert playing.cancelled()

    asyncio.run(main())
    assert all(gone(pid) for pid in read_pids(up))


def test_children_of_a_program_that_ends_well(program, up):
    play_agent(program("ask('x')\n" + FORK + "print(1)", str(up)))
    assert all(gone(pid) for pid in read_pids(up))


def test_a_flood_on_stdout(program):
    """The end of it is the result."""
    results = []
    command = program("ask('x')\nfor _ in range(300): print('x' * 100000)\nprint('end')")
    play_agent(command, reward=keep_in(results))
    assert len(results) == 2
    assert all(len(result) <= 1_000_000 and result.endswith("end") for result in results)


def test_a_limit_ends_a_program(program):
    """It is refused further turns, fails, and its episode is truncated."""
    groups = play_agent(program("talk = ['x']\nwhile True: talk += [ask(*talk), 'more']"), max_turns=2)
    for trajectory in groups[0].trajectories:
        assert (trajectory.ended, len(trajectory.turns), trajectory.reward) == ("max_turns", 2, 0.0)


def test_200_sessions_over_http_leave_nothing():
    """Twice as many requests, all at once; then no session, no socket and no thread is left."""

    async def run(task, session):
        # certificates take longer to read than all the rest
        options = {"base_url": session.base_url, "timeout": 240.0, "verify": False}
        async with httpx.AsyncClient(**options) as client:
            for _ in range(2):
                body = {"model": session.model, "messages": [{"role": "user", "content": task["prompt"]}]}
                answer = await client.post("/chat/completions", json=body)
                answer.raise_for_status()
        return ""

    def left():
        gc.collect()
        return sum(type(thing) in (Session, Gateway) for thing in gc.get_objects())

    before = left()
    for _ in range(2):
        groups = play_agent(run, rows=[str(i) for i in range(50)], n=4, concurrency=200)
        assert groups.metrics["env/agent/episodes"] == 200
        assert groups.metrics["env/agent/failed"] == 0
        del groups
    assert left() <= before
    ours = [thread for thread in threading.enumerate() if "uvicorn" in thread.name or "gateway" in thread.name]
    for thread in ours:
        thread.join(30.0)  # closing waits for none that is just ending
    assert not [thread for thread in ours if thread.is_alive()]


OPENAI = """
import json, os, sys
from openai import OpenAI
task = json.load(sys.stdin)
client = OpenAI()
first = client.chat.completions.create(model="any", messages=[{"role": "user", "content": task["prompt"]}])
with client.chat.completions.create(model="any", messages=[{"role": "user", "content": "x"}], stream=True) as stream:
    print("".join(part.choices[0].delta.content or "" for part in stream if part.choices))
"""
ANTHROPIC = """
import json, os, sys
from anthropic import Anthropic
task = json.load(sys.stdin)
message = Anthropic().messages.create(model="any", max_tokens=5, messages=[{"role": "user", "content": task["prompt"]}])
print(message.content)
"""


@pytest.mark.parametrize(("sdk", "body", "turns"), [("openai", OPENAI, 2), ("anthropic", ANTHROPIC, 1)])
def test_sdks_find_the_session(sdk, body, turns, program):
    """By the variables that they look for."""
    pytest.importorskip(sdk)
    groups = play_agent(program(body, start=""), n=1)
    assert len(groups[0].trajectories[0].turns) == turns
