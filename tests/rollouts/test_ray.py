"""Environments in worker processes of Ray: the same groups as in threads, and workers that are killed."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from rlkit import BackendError, ConfigError, MissingPackageError, SamplingParams
from rlkit.envs import StepResult, Task, Tasks
from rlkit.rollouts import Plan, executors, rollout, rollout_sync
from tests.rollouts.parts import RandomSampler

PARAMS = SamplingParams(max_tokens=4)
ON_RAY = {"executor": "ray", "executor_options": {"workers": 1, "num_cpus": 0}, "params": PARAMS, "deadline": 120.0}


class Notes:
    """Two steps; notes in a folder in which process it was made, and that it was closed."""

    tools = ({"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}},)

    def __init__(self, folder, index=0):
        self.folder = Path(folder)
        self.index = index
        self.steps = 0
        self.note("made")

    def note(self, what):
        with (self.folder / what).open("a") as file:
            file.write(f"{os.getpid()}\n")

    def reset(self, seed):
        return f"Task {self.index}, seed {seed}"

    def step(self, action):
        self.steps += 1
        return StepResult("More.", float(action.tokens.size), self.steps == 2, info={"length": len(action)})

    def close(self):
        self.note("closed")


class Waits(Notes):
    """Its second step waits in the first worker that it is made in, and nowhere else."""

    async def step(self, action):
        if self.steps == 1 and set(noted(self.folder, "made")) == {os.getpid()}:
            self.note("waits")
            await asyncio.sleep(600)
        return super().step(action)


class Raises(Notes):
    def step(self, action):
        raise Odd(self.index)


class Odd(Exception):
    """What can be sent, from a module that the workers can import."""


class Sleeps(Notes):
    async def step(self, action):
        if self.steps == 1:
            await asyncio.sleep(600)
        return super().step(action)


class Plays:
    def play(self, session, seed):
        return StepResult()

    def close(self):
        pass


def noted(folder, what):
    file = Path(folder) / what
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def alive(pid):
    """Whether a process runs; one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition, seconds=60.0):
    until = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < until, "nothing happened"
        time.sleep(0.02)
    return value


def ended(folder):
    """All environments were closed or died, and no worker runs any more."""
    return wait_for(lambda: not any(alive(pid) for pid in noted(folder, "made")))


def test_plans_are_checked():
    """Unknown executors and options are refused, by name; options without Ray, too."""
    for options, text in (
        ({"executor": "dask"}, "Plan.executor"),
        ({"executor_options": {"workers": 2}}, 'executor is "threads"'),
        ({"executor": "ray", "executor_options": {"cpus": 2}}, "executor_options"),
        ({"executor": "ray", "executor_options": {"workers": 0}}, "workers"),
        ({"executor": "ray", "executor_options": {"memory": 0.5}}, "memory"),
        ({"executor": "ray", "executor_options": 3}, "executor_options"),
    ):
        with pytest.raises(ConfigError, match=text):
            Plan(**options)


def test_without_ray(monkeypatch):
    """The error has the command that installs it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: None)
    with pytest.raises(MissingPackageError, match=r"needs ray: pip install .*ray"):
        Plan(executor="ray")


@pytest.fixture(scope="module")
def ray():
    ray = pytest.importorskip("ray")
    yield ray
    ray.shutdown()


@pytest.mark.usefixtures("ray")
class TestOnRay:
    """What needs Ray."""

    def test_the_same_groups_as_in_threads(self, tmp_path):
        """Seeds, observations, rewards and counts are those of threads; environments were elsewhere and are closed."""
        sampler = RandomSampler()
        tasks = Tasks(lambda i: Notes(tmp_path, i), 4, name="notes")  # a function without a name to import
        here = rollout_sync(sampler, tasks[:2], n=3, params=PARAMS)
        assert set(noted(tmp_path, "made")) == {os.getpid()}
        there = rollout_sync(sampler, tasks[:2], n=3, **ON_RAY)
        for one, other in zip(here, there, strict=True):
            for a, b in zip(one.trajectories, other.trajectories, strict=True):
                assert [turn.reward for turn in a.turns] == [turn.reward for turn in b.turns]
                assert a.messages == b.messages
                assert [dict(turn.metrics) for turn in a.turns] == [dict(turn.metrics) for turn in b.turns]
                assert (a.env, a.index, a.seed, a.ended) == (b.env, b.index, b.seed, b.ended)
        counts = ("env/notes/failed", "env/notes/retried", "env/notes/close_failed", "sampler/tokens")
        assert [here.metrics[name] for name in counts] == [there.metrics[name] for name in counts]
        assert len(noted(tmp_path, "closed")) == len(noted(tmp_path, "made")) == 12
        workers = set(noted(tmp_path, "made")) - {os.getpid()}
        assert len(workers) == 1
        wait_for(lambda: not any(alive(pid) for pid in workers))

    def test_a_killed_worker(self, tmp_path):
        """Its episodes are played again in another one, and counted."""

        def kill():
            wait_for(lambda: len(noted(tmp_path, "waits")) == 4)
            os.kill(noted(tmp_path, "waits")[0], signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        task = Task(lambda: Waits(tmp_path), "waits")
        (group,) = rollout_sync(RandomSampler(), [task], n=4, **ON_RAY)
        killer.join()
        assert [len(trajectory.turns) for trajectory in group.trajectories] == [2] * 4
        assert not group.failures
        ended(tmp_path)

    def test_a_killed_worker_is_counted(self, tmp_path):
        """With one attempt it is a failure of kind EnvLost."""

        def kill():
            os.kill(wait_for(lambda: noted(tmp_path, "waits"))[0], signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        with pytest.raises(BackendError, match="1 EnvLost in step"):
            rollout_sync(RandomSampler(), Task(lambda: Waits(tmp_path), "waits"), n=1, attempts=1, **ON_RAY)
        killer.join()
        ended(tmp_path)

    def test_what_cannot_be_sent(self, tmp_path):
        """It is named, before anything is played; in what makes the environment, and in its arguments."""
        lock = threading.Lock()
        locked = Tasks(lambda i: Notes(tmp_path, lock), 2, name="locked")
        with pytest.raises(ConfigError, match=r"environment 'locked': make: cannot be sent .*lock = "):
            rollout_sync(RandomSampler(), [*Tasks(lambda i: Notes(tmp_path), 1), locked[0]], n=2, **ON_RAY)
        with pytest.raises(ConfigError, match=r"'locked': make: cannot be sent .*lock"):  # an iterator
            rollout_sync(RandomSampler(), iter(locked), n=2, **ON_RAY)
        assert not noted(tmp_path, "made")

    def test_environments_that_raise(self, tmp_path):
        """The exception is the one that was raised, so that ``retry`` knows it."""
        plan = Plan(**ON_RAY, attempts=2, n=2, retry=Odd)
        with pytest.raises(BackendError, match="2 Odd in step; the first said: 7"):
            rollout_sync(RandomSampler(), Task(lambda: Raises(tmp_path, 7), "raises"), plan=plan)
        assert len(noted(tmp_path, "closed")) == 4
        ended(tmp_path)

    def test_a_deadline(self, tmp_path):
        """The turns so far are kept, truncated, and the call that waits is cancelled."""
        rollout_sync(RandomSampler(), Task(lambda: Notes(tmp_path), "warm"), n=1, **ON_RAY)
        options = ON_RAY | {"deadline": 10.0, "call_timeout": 60.0, "n": 2}
        began = time.monotonic()
        (group,) = rollout_sync(RandomSampler(), Task(lambda: Sleeps(tmp_path), "sleeps"), **options)
        assert [(trajectory.ended, len(trajectory.turns)) for trajectory in group.trajectories] == [("deadline", 1)] * 2
        assert time.monotonic() - began < 60.0
        assert len(noted(tmp_path, "closed")) == 3
        ended(tmp_path)

    def test_a_rollout_that_is_cancelled(self, tmp_path):
        """Environments are closed, and no worker is left."""

        async def scene():
            task = Task(lambda: Sleeps(tmp_path), "sleeps")
            playing = asyncio.create_task(rollout(RandomSampler(), [task], n=2, **ON_RAY))
            await asyncio.to_thread(wait_for, lambda: len(noted(tmp_path, "made")) == 2)
            playing.cancel()
            await asyncio.wait([playing])
            assert playing.cancelled()

        asyncio.run(scene())
        ended(tmp_path)
        assert len(noted(tmp_path, "closed")) == 2

    def test_the_thread_that_starts_ray_may_end(self, ray, tmp_path):
        """Ray's processes, which Linux ends with the thread that started them, go on."""
        ray.shutdown()
        thread = threading.Thread(target=executors._connected)
        thread.start()
        thread.join()
        (group,) = rollout_sync(RandomSampler(), Task(lambda: Notes(tmp_path), "notes"), n=2, **ON_RAY)
        assert len(group.trajectories) == 2
        assert [node["Alive"] for node in ray.nodes()] == [True]
        addresses = {node["NodeManagerAddress"] for node in ray.nodes()}
        assert addresses == {"127.0.0.1"}

    def test_harnesses_are_refused(self):
        """With what plays them."""
        with pytest.raises(BackendError, match=r'drives itself.*executor="threads"'):
            rollout_sync(RandomSampler(), Plays, n=1, **ON_RAY)

    def test_more_than_the_machine_has(self):
        """It is refused at once, where it would wait for ever."""
        options = ON_RAY | {"executor_options": {"workers": 1, "num_cpus": 10_000}}
        with pytest.raises(ConfigError, match="no more than this machine has"):
            rollout_sync(RandomSampler(), Plays, n=1, **options)
