"""Task folders in Harbor's form, in a sandbox of this machine."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from pathlib import Path

import pytest

import rlkit
from rlkit.envs import Action, _from_harbor, harbor
from rlkit.envs.calling import Guarded

pytest.importorskip("jsonschema")
TEST = 'if [ "$(cat hello.txt)" = "Hello, world!" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n'


def _isolates():
    try:
        _from_harbor.check()
    except rlkit.ConfigError:
        return False
    return True


isolated = pytest.mark.skipif(not _isolates(), reason="bwrap is not there, or may not isolate: apt install bubblewrap")


def task(folder, test=TEST, toml='version = "1.0"\n', dockerfile=None):
    """A task folder."""
    for name in ("tests", "environment", "solution"):
        (folder / name).mkdir(parents=True)
    (folder / "task.toml").write_text(toml)
    (folder / "instruction.md").write_text('Write "Hello, world!" into hello.txt.')
    (folder / "tests/test.sh").write_text(test)
    (folder / "solution/solve.sh").write_text("echo 'Hello, world!' > hello.txt")
    if dockerfile is not None:
        (folder / "environment/Dockerfile").write_text(dockerfile)
    return folder


def bash(command):
    return Action(f"<tool_call>{json.dumps({'name': 'bash', 'arguments': {'command': command}})}</tool_call>")


def played(tasks, *turns, index=0):
    """What the policy is told after each turn, or its result; commands as texts."""

    async def scene():
        env = await Guarded.opened(tasks[index], timeout=60)
        try:
            first = await env.reset(0, timeout=60)
            results = [await env.step(t if isinstance(t, Action) else bash(t), timeout=60) for t in turns]
        finally:
            assert await env.close(timeout=60) is None
        return first, [r if r.terminated else r.observation[0]["content"] for r in results]

    return asyncio.run(scene())


DONE = Action("Done.")


@isolated
def test_a_task(tmp_path):
    """Files stay from one command to the next; the reward is the tests'; nothing of the episode is left."""
    tasks = harbor(task(tmp_path / "hello"))
    before = set(Path("/tmp").glob("rlkit-harbor-*"))  # noqa: S108
    first, (none, again, failed, result) = played(
        tasks, "echo 'Hello, world!' > hello.txt; pwd", "cat hello.txt", "ls nothing", DONE
    )
    assert first == 'Write "Hello, world!" into hello.txt.'
    assert (none, again) == ("/app\n", "Hello, world!\n")
    assert "(exit code 2)" in failed
    assert (result.reward, result.terminated) == (1.0, True)
    assert played(tasks, DONE)[1][0].reward == 0.0
    assert set(Path("/tmp").glob("rlkit-harbor-*")) == before  # noqa: S108


@isolated
def test_commands_see_nothing_else(tmp_path, monkeypatch):
    """No tests, no solution, no home, no variables, no processes, no network, and no way to write outside."""
    monkeypatch.setenv("OPENAI_API_KEY", "xyzzy-4711")
    secret = tmp_path / "secret.txt"
    secret.write_text("xyzzy-4711")
    tasks = harbor(task(tmp_path / "hello"))
    commands = [
        "ls /tests /logs /solution 2>&1",
        f"cat {secret} {Path.home()}/.bashrc 2>&1",
        "env",
        "ls /proc | grep -c '^[0-9]'",
        "exec 3<>/dev/tcp/127.0.0.1/22 2>&1 || echo no network",
        "touch /usr/x 2>&1; touch /x && ls /",
        f"kill -9 {os.getpid()} 2>&1; ps 2>/dev/null | wc -l",
        "id -u; unshare -r true 2>&1",
    ]
    _, (others, files, variables, processes, network, write, kill, _) = played(tasks, *commands)
    assert others.count("No such file") == 3
    assert "xyzzy" not in files + variables
    assert files.count("No such file") == 2
    assert int(processes) < 10
    assert "no network" in network
    assert "Read-only file system" in write
    assert "No such process" in kill
    assert not Path("/usr/x").exists()
    assert not Path("/x").exists()


@isolated
def test_commands_end(tmp_path):
    """With what they started, and in time; a flood of output is cut."""
    tasks = harbor(task(tmp_path / "hello"), command_timeout=2.0, max_result=100)
    began = time.monotonic()
    _, (late, left, _, flood) = played(tasks, "sleep 60", "sleep 4711 & echo gone", "sleep 0.1", "yes | head -c 100000")
    assert late == "The command was ended after 2 s."
    assert left == "gone\n"
    assert "(cut)" in flood
    assert len(flood) < 200
    assert time.monotonic() - began < 50
    running = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if os.access(path, os.R_OK)]
    assert not any(b"4711" in line for line in running)


@isolated
def test_what_the_tests_write(tmp_path):
    """reward.json or reward.txt, by key; else the episode has failed, whatever they wrote instead."""
    json_test = 'echo \'{"reward": 0.5, "speed": 3}\' > /logs/verifier/reward.json'
    folder = task(tmp_path / "json", json_test)
    assert played(harbor(folder), DONE)[1][0].reward == 0.5
    assert played(harbor(folder, reward_key="speed"), DONE)[1][0].reward == 3.0
    wrong = {
        "none": "echo oh no; exit 3",
        "text": "echo great > /logs/verifier/reward.txt",
        "nan": "echo nan > /logs/verifier/reward.txt",
        "link": "ln -s /usr/lib/os-release /logs/verifier/reward.txt",
        "pipe": "mkfifo /logs/verifier/reward.txt",
        "list": "echo '[1]' > /logs/verifier/reward.json",
    }
    for name, test in wrong.items():
        with pytest.raises(rlkit.EnvError, match=f"the tests of '{name}'"):
            played(harbor(task(tmp_path / name, test)), DONE)
    with pytest.raises(rlkit.EnvError, match="wrote no reward .exit code 3.: oh no"):
        played(harbor(tmp_path / "none"), DONE)
    slow = task(tmp_path / "slow", "sleep 60", "[verifier]\ntimeout_sec = 1.0\n")
    with pytest.raises(rlkit.EnvError, match="took more than 1 s"):
        played(harbor(slow), DONE)


@isolated
def test_what_a_dockerfile_only_copies(tmp_path):
    """WORKDIR, ENV and COPY are done here; anything more is refused, or ignored where that is wanted."""
    dockerfile = "FROM debian:12\nWORKDIR /work\nENV COLOR=red\nCOPY data.txt ./\nCOPY more ./more\n# RUN nothing\n"
    folder = task(tmp_path / "copies", "cp data.txt /logs/verifier/reward.txt", dockerfile=dockerfile)
    (folder / "environment/data.txt").write_text("0.25")
    (folder / "environment/more").mkdir()
    (folder / "environment/more/x").write_text("there")
    _, (told, result) = played(harbor(folder), "pwd; cat more/x; echo $COLOR", DONE)
    assert told == "/work\nthere" + "red\n"
    assert result.reward == 0.25

    built = task(tmp_path / "built", dockerfile="FROM python:3.12\nRUN pip install torch \\\n  numpy\n")
    with pytest.raises(rlkit.ConfigError, match=r"runs 'RUN pip install torch.*ignore_image=True"):
        harbor(built)
    assert len(harbor(built, ignore_image=True)) == 1
    image = task(tmp_path / "image", toml='[environment]\ndocker_image = "python:3.12"\n')
    with pytest.raises(rlkit.ConfigError, match=r"needs the image 'python:3\.12'"):
        harbor(image)
    for number, line in enumerate(("COPY ../secret .", "COPY --from=x a b", "COPY a /etc/a", "ADD http://x/y .")):
        with pytest.raises(rlkit.ConfigError, match="Dockerfile|copies"):
            harbor(task(tmp_path / f"wrong{number}", dockerfile=f"FROM x\n{line}\n"))


@isolated
def test_folders_of_tasks(tmp_path):
    for name in "ba":
        task(tmp_path / name)
    tasks = harbor(tmp_path, name="hello")
    assert (len(tasks), tasks.name) == (2, "hello")


@pytest.mark.parametrize("part", ["instruction.md", "tests/test.sh"])
def test_what_is_no_task_is_refused(tmp_path, part):
    (task(tmp_path / "hello") / part).unlink()
    with pytest.raises(rlkit.DataError, match=f"has no {part}"):
        harbor(tmp_path)
    with pytest.raises(rlkit.DataError, match=r"has no task\.toml"):
        harbor(tmp_path / "hello/tests")
    (tmp_path / "broken").mkdir()
    shutil.copytree(tmp_path / "hello", tmp_path / "broken", dirs_exist_ok=True)


def test_nothing_is_run_where_it_cannot_be_isolated(tmp_path, monkeypatch):
    folder = task(tmp_path / "hello")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(rlkit.ConfigError, match="bwrap is not on the PATH"):
        harbor(folder)
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'no permission' >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    with pytest.raises(rlkit.ConfigError, match="cannot isolate commands on this machine: no permission"):
        harbor(folder)
