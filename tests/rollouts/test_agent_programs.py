"""Agents that are programs: real processes, with the SDKs that agents are written with, under faults."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import stat
import sys
import textwrap
import threading
from pathlib import Path

import pytest

pytest.importorskip("jinja2", reason="needs the extra chat")
pytest.importorskip("uvicorn", reason="needs the extra gateway")

import httpx

from rlkit import BackendError, SamplingParams
from rlkit.envs import agent
from rlkit.evaluation import evaluate_sync
from rlkit.gateway import Gateway, Session
from rlkit.rollouts import rollout, rollout_sync
from rlkit.trajectory import datums
from tests.rollouts.parts import RandomSampler
from tests.test_process import gone

SHORT = SamplingParams(max_tokens=6)

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
    """Writes a program that can ask; gives the command."""

    def write(body, *arguments):
        path = tmp_path / "agent.py"
        path.write_text(CLIENT + textwrap.dedent(body))
        return [sys.executable, str(path), *arguments]

    return write


def length(result, task):
    return float(isinstance(result, str))


def played(command, *, reward=length, rows=("x",), n=2, tasks=None, **options):
    return rollout_sync(
        RandomSampler(), agent(command, reward, list(rows), **(tasks or {})), n=n, params=SHORT, **options
    )


def failures(command, **options):
    with pytest.raises(BackendError) as caught:
        played(command, **options)
    return str(caught.value)


def pids(folder):
    """Of the processes that have left a file there."""
    return [int(path.name) for path in Path(folder).iterdir() if path.name.isdigit()]


def test_a_program_is_trained_as_it_is(program):
    """It finds everything in its environment and on stdin, and its result is what it prints."""
    results = []

    def reward(result, task):
        results.append(json.loads(result))
        return float(task["answer"])

    groups = played(program(TWO), reward=reward, rows=[{"prompt": "a", "answer": 3}])
    assert groups[0].rewards.tolist() == [3.0, 3.0]
    for trajectory in groups[0].trajectories:
        assert [message["role"] for message in trajectory.messages] == ["user", "assistant"] * 2
        assert trajectory.messages[-1]["content"] in results
        assert sum(d.mask.sum() for d in datums(trajectory, 1.0, split="allow")) == trajectory.token_count


def test_arguments_and_variables(program, tmp_path, monkeypatch):
    """Fields of the task stand in arguments once; braces that name none stay."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    body = "ask('x')\nprint(json.dumps([sys.argv[1:], os.environ['OWN'], os.getcwd()]))"
    seen = []
    command = program(body, "{prompt}", '{"a": {n}}', "{more}", "{}", "${HOME}")
    tasks = {"environment": {"OWN": "1"}, "folder": tmp_path}
    played(
        command,
        reward=lambda result, task: seen.append(json.loads(result)) or 1.0,
        rows=[{"prompt": "{n}", "n": [1]}],
        tasks=tasks,
        n=1,
    )
    assert seen == [[["{n}", '{"a": [1]}', "{more}", "{}", "${HOME}"], "1", os.path.realpath(tmp_path)]]


def test_programs_that_fail(program):
    """The message has the exit code and the end of what was said."""
    assert "2 AgentError in play" in failures(program("ask('x')\nraise SystemExit('it is broken')"))
    assert "agent.py': exit code 1: it is broken" in failures(program("ask('x')\nraise SystemExit('it is broken')"))
    assert "ended by signal 11" in failures(program("import signal\nos.kill(os.getpid(), signal.SIGSEGV)"))
    assert "2 no_turns in play" in failures(program("print(4)"))


def test_one_that_cannot_be_run(tmp_path):
    path = tmp_path / "agent"
    path.write_text("not a program")
    path.chmod(stat.S_IRWXU)
    assert "2 EnvError in play" in failures([str(path)])


@pytest.mark.parametrize("body", [HANG, DEAF + HANG, FORK + HANG], ids=["hangs", "deaf", "forks"])
def test_the_deadline_ends_programs(program, tmp_path, body):
    """And what they have started, whether they hear SIGTERM or not."""
    (tmp_path / "up").mkdir()
    assert "2 timeout in play" in failures(program(body, str(tmp_path / "up")), deadline=8.0)
    found = pids(tmp_path / "up")
    assert len(found) >= 2
    assert all(gone(pid) for pid in found)


@pytest.mark.parametrize("body", [HANG, DEAF + FORK + HANG], ids=["hangs", "deaf"])
def test_a_rollout_that_is_given_up_leaves_no_process(program, tmp_path, body):
    (tmp_path / "up").mkdir()
    command = program(body, str(tmp_path / "up"))
    wanted = 3 * (1 + body.count("os.fork"))

    async def main():
        playing = asyncio.ensure_future(rollout(RandomSampler(), agent(command, length, ["x"]), n=3, params=SHORT))
        while len(pids(tmp_path / "up")) < wanted and not playing.done():
            await asyncio.sleep(0.05)
        playing.cancel()
        await asyncio.wait([playing])
        assert playing.cancelled()

    asyncio.run(main())
    assert all(gone(pid) for pid in pids(tmp_path / "up"))


def test_children_of_a_program_that_ends_well(program, tmp_path):
    (tmp_path / "up").mkdir()
    played(program("ask('x')\n" + FORK + "print(1)", str(tmp_path / "up")))
    assert all(gone(pid) for pid in pids(tmp_path / "up"))


def test_a_flood_on_stdout(program):
    """The end of it is the result."""
    sizes = []
    played(
        program("ask('x')\nfor _ in range(300): print('x' * 100000)\nprint('end')"),
        reward=lambda result, task: sizes.append((len(result), result[-3:])) or 1.0,
    )
    assert all(size <= 1_000_000 and end == "end" for size, end in sizes)
    assert len(sizes) == 2


def test_a_limit_ends_a_program(program):
    """It is refused further turns, fails, and its episode is truncated."""
    groups = played(program("talk = ['x']\nwhile True: talk += [ask(*talk), 'more']"), max_turns=2)
    for trajectory in groups[0].trajectories:
        assert (trajectory.ended, len(trajectory.turns), trajectory.reward) == ("max_turns", 2, 0.0)


def test_many_programs_at_once(program):
    """Each in its session."""
    rows = [{"prompt": f"task {i}"} for i in range(12)]
    groups = played(program(TWO), rows=rows, n=2, concurrency=24)
    assert [len(group) for group in groups] == [2] * 12
    for row, group in zip(rows, groups, strict=True):
        assert {t.messages[0]["content"] for t in group.trajectories} == {row["prompt"]}


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
        groups = played(run, rows=[str(i) for i in range(50)], n=4, concurrency=200)
        assert groups.metrics["env/agent/episodes"] == 200
        assert groups.metrics["env/agent/failed"] == 0
        del groups
    assert left() <= before
    ours = [thread for thread in threading.enumerate() if "uvicorn" in thread.name or "gateway" in thread.name]
    for thread in ours:
        thread.join(30.0)  # closing waits for none that is just ending
    assert not [thread for thread in ours if thread.is_alive()]


def test_evaluate(program):
    found = evaluate_sync(RandomSampler(), agent(program(TWO), length, ["a", "b"]), params=SHORT)
    assert (found.scores["agent"].mean, found.scores["agent"].episodes) == (1.0, 2)


SDK = """
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


@pytest.mark.parametrize(("sdk", "body", "turns"), [("openai", SDK, 2), ("anthropic", ANTHROPIC, 1)])
def test_sdks_find_the_session(sdk, body, turns, tmp_path):
    """By the variables that they look for."""
    pytest.importorskip(sdk)
    path = tmp_path / "agent.py"
    path.write_text(body)
    groups = played([sys.executable, str(path)], n=1)
    assert len(groups[0].trajectories[0].turns) == turns
