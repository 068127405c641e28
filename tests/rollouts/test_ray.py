"""Environments in worker processes of Ray: the same groups as in threads, and workers that are killed."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import pytest

from rlkit import (
    BackendError,
    BackendTimeout,
    ConfigError,
    EnvError,
    EnvLost,
    MissingPackageError,
    SamplingParams,
    _ray_cluster,
)
from rlkit.envs import Harness, StepResult, Task, Tasks, agent
from rlkit.rollouts import Plan, _ray, rollout, rollout_sync
from rlkit.rollouts._ray import Worker
from tests.rollouts.parts import RandomSampler
from tests.sockets import listening, open_to_others

PARAMS = SamplingParams(max_tokens=4)
ON_RAY = {"executor": "ray", "executor_options": {"workers": 1, "num_cpus": 0}, "params": PARAMS, "deadline": 120.0}
MACHINE = {"include_dashboard": False, "node_ip_address": "127.0.0.1"}


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


class Odder(Exception):
    """What cannot be made again from its text, or with a lock not even be written."""

    def __init__(self, code, lock):
        super().__init__(f"code {code}")
        self.lock = lock


class RaisesOdder(Notes):
    def step(self, action):
        raise Odder(7, threading.Lock() if self.index else None)


class Sleeps(Notes):
    async def step(self, action):
        if self.steps == 1:
            await asyncio.sleep(600)
        return super().step(action)


class Locked(Notes):
    def step(self, action):
        return StepResult("More.", 0.0, info={"length": 3, "lock": {"of": threading.Lock()}})


class Tool(Notes):
    @property
    def tools(self):
        return ({"type": "function", "lock": threading.Lock()},)


class Seats:
    """A worker, and how many environments it counts."""

    envs = 0

    async def started(self):
        self.envs += 1
        return self

    def release(self, worker):
        worker.envs -= 1

    async def open(self, worker, name, sent):
        return worker


class SlowWorker(Worker):
    """Takes longer to start than an environment may take to be made."""

    def __init__(self, *args):
        time.sleep(8)
        super().__init__(*args)


class Plays:
    def play(self, session, seed):
        return StepResult()

    def close(self):
        pass


def annotated() -> Harness:
    return Plays()


class Takes(Notes):
    """Its first step takes some megabytes."""

    def __init__(self, folder, megabytes):
        super().__init__(folder)
        self.megabytes = megabytes

    def step(self, action):
        self.taken = b"x" * (self.megabytes * 2**20)
        return super().step(action)


class Falls(Notes):
    """Its second step waits on the first machine that comes to one."""

    async def step(self, action):
        import ray

        node = ray.get_runtime_context().get_node_id()
        if self.steps == 1:
            first = self.folder / "first"
            with contextlib.suppress(FileExistsError), first.open("x") as file:
                file.write(node)
            if first.read_text() == node:
                self.note("waits")
                await asyncio.sleep(600)
        return super().step(action)


class Placed(Notes):
    def reset(self, seed):
        from ray.util import get_current_placement_group

        with (self.folder / "group").open("a") as file:
            file.write(f"{get_current_placement_group().id.hex()}\n")
        return super().reset(seed)


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
        ({"executor": "ray", "executor_options": {"placement_group": 3}}, "a Ray placement group"),
    ):
        with pytest.raises(ConfigError, match=text):
            Plan(**options)


def test_without_ray(monkeypatch):
    """The error has the command that installs it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: None)
    with pytest.raises(MissingPackageError, match=r"needs ray: pip install .*ray"):
        Plan(executor="ray")


def test_a_place_in_a_worker_is_given_back_once():
    """Where nothing was made; else by what was made."""

    async def scene():
        seats = Seats()
        task = Task(_ray._Make(seats, "notes", ()), "notes")
        async with _ray.Ray().prepare_task(task):
            assert seats.envs == 1
        assert seats.envs == 0
        async with _ray.Ray().prepare_task(task) as ready:
            assert await ready.make() is seats
            with pytest.raises(EnvError, match="too late"):
                await ready.make()
        assert seats.envs == 1

    asyncio.run(scene())


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
        with pytest.raises(BackendError, match="1 EnvLost in step") as caught:
            rollout_sync(RandomSampler(), Task(lambda: Waits(tmp_path), "waits"), n=1, attempts=1, **ON_RAY)
        assert "class_name" not in "".join(traceback.format_exception(caught.value))  # Ray's paragraph beside ours
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
        with pytest.raises(BackendError, match=r"2 Odd in step; the first error: 7; at .*test_ray.py:\d+ in step"):
            rollout_sync(RandomSampler(), Task(lambda: Raises(tmp_path, 7), "raises"), plan=plan)
        assert len(noted(tmp_path, "closed")) == 4
        ended(tmp_path)

    def test_exceptions_that_cannot_be_sent(self, tmp_path):
        """Their type, text and line are told, and their worker is not lost."""
        for index, why in ((0, "missing 1 required positional argument"), (1, "cannot pickle")):
            plan = Plan(**ON_RAY, attempts=2, n=2, retry=EnvLost)
            told = rf"2 EnvError in step; the first error: Odder: code 7 \(.*{why}.*test_ray.py:\d+ in step"
            with pytest.raises(BackendError, match=told):
                rollout_sync(RandomSampler(), Task(lambda i=index: RaisesOdder(tmp_path, i), "odd"), plan=plan)
        assert len(noted(tmp_path, "made")) == len(noted(tmp_path, "closed")) == 4
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

    def test_a_worker_that_starts_slowly(self, tmp_path, monkeypatch):
        """Its start is no time of an episode, nor of the call that makes the environment."""
        monkeypatch.setattr(_ray, "Worker", SlowWorker)
        options = ON_RAY | {"deadline": 12.0, "n": 1}
        (group,) = rollout_sync(RandomSampler(), Task(lambda: Notes(tmp_path), "notes"), **options)
        assert [len(trajectory.turns) for trajectory in group.trajectories] == [2]
        assert not group.failures
        ended(tmp_path)

    @pytest.mark.parametrize(
        ("kind", "field"), [("Locked", r"step: info\['lock'\]\['of'\]"), ("Tool", r"tools\[0\]\['lock'\]")]
    )
    def test_answers_that_cannot_be_sent(self, tmp_path, kind, field):
        """They are named, with the environment and the field."""
        make = {"Locked": Locked, "Tool": Tool}[kind]
        words = rf"environment 'locks': {field}: holds values that cannot be serialized: <unlocked _thread.lock"
        with pytest.raises(BackendError, match=words):
            rollout_sync(RandomSampler(), Task(lambda: make(tmp_path), "locks"), n=1, **ON_RAY)
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
        thread = threading.Thread(target=_ray_cluster.connected)
        thread.start()
        thread.join()
        (group,) = rollout_sync(RandomSampler(), Task(lambda: Notes(tmp_path), "notes"), n=2, **ON_RAY)
        assert len(group.trajectories) == 2
        assert [node["Alive"] for node in ray.nodes()] == [True]
        addresses = {node["NodeManagerAddress"] for node in ray.nodes()}
        assert addresses == {"127.0.0.1"}
        assert len(listening(os.getpid())) > 3
        assert open_to_others(os.getpid()) == []

    @pytest.mark.parametrize(
        "tasks",
        [Plays, Task(annotated, "annotated"), agent(lambda task, session: "", lambda result, task: 0.0, ["Say a"])],
        ids=["class", "annotation", "agent"],
    )
    def test_harnesses_are_refused(self, tasks, tmp_path):
        """Before anything is made, with why, and what plays them; also beside environments."""
        mixed = [Task(lambda: Notes(tmp_path), "notes"), *(tasks if isinstance(tasks, Sequence) else [tasks])]
        with pytest.raises(ConfigError, match=r'is a harness.*executor="threads" \(a harness runs its agent against'):
            rollout_sync(RandomSampler(), mixed, n=1, **ON_RAY)
        assert not noted(tmp_path, "made")

    def test_harnesses_that_nobody_could_know_of(self, tmp_path):
        """The first that is made ends the rollout: it is no failure of an episode."""
        sampler = RandomSampler()
        tasks = [Task(lambda: Sleeps(tmp_path), "sleeps"), Task(lambda: Plays(), "plays")]
        with pytest.raises(ConfigError, match=r"environment 'plays': is a harness"):
            rollout_sync(sampler, tasks, n=2, **ON_RAY)
        ended(tmp_path)

    def test_a_limit_of_memory(self, tmp_path):
        """An environment that takes more than its worker may have fails with a MemoryError, and no other does."""
        options = ON_RAY | {"executor_options": {"workers": 1, "num_cpus": 0, "memory": 512 * 2**20}}
        tasks = [Task(functools.partial(Takes, tmp_path, size), f"takes_{size}") for size in (64, 1024)]
        groups = rollout_sync(RandomSampler(), tasks, n=1, **options)
        assert [group.env for group in groups] == ["takes_64"]
        assert groups.metrics["env/takes_1024/failed/MemoryError"] == 1
        assert len(set(noted(tmp_path, "made"))) == 1  # of one worker, which goes on

    def test_a_placement_group(self, ray, tmp_path):
        """Workers run in the user's group, given as such or by name; as many as it has room for."""
        _ray_cluster.connected()
        group = ray.util.placement_group([{"CPU": 1}], name="environments")
        for given in (group, "environments"):
            options = ON_RAY | {"executor_options": {"placement_group": given}}
            rollout_sync(RandomSampler(), Task(lambda: Placed(tmp_path), "placed"), n=4, **options)
            assert set((tmp_path / "group").read_text().split()) == {group.id.hex()}
        assert len(set(noted(tmp_path, "made"))) == 2  # one worker in each rollout
        for more in ({"workers": 2}, {"num_cpus": 2}):
            options = ON_RAY | {"executor_options": {"placement_group": group, **more}}
            with pytest.raises(ConfigError, match="at most what the placement group has"):
                rollout_sync(RandomSampler(), Task(lambda: Placed(tmp_path), "placed"), n=1, **options)
        with pytest.raises(ConfigError, match="is 'nobody', which this Ray cluster does not have"):
            rollout_sync(RandomSampler(), Plays, n=1, executor="ray", executor_options={"placement_group": "nobody"})
        ray.util.remove_placement_group(group)

    def test_a_cluster_of_the_users(self, ray, tmp_path, monkeypatch):
        """Two machines, a worker on each by a placement group. One dies: its episodes are played on the other."""
        from ray.cluster_utils import Cluster

        monkeypatch.setattr(_ray, "PATIENCE", 3.0)  # a new worker has no place, and the other does the work
        ray.shutdown()  # what the tests before were on
        with _ray_cluster.on_loopback(), contextlib.ExitStack() as stack:
            cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **MACHINE})
            stack.callback(cluster.shutdown)
            machines = [cluster.add_node(num_cpus=2, **MACHINE) for _ in range(2)]
            ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
            stack.callback(ray.shutdown)
            group = ray.util.placement_group([{"CPU": 1}] * 2, strategy="STRICT_SPREAD")

            def lose_a_machine():
                wait_for(lambda: noted(tmp_path, "waits"))
                place = (tmp_path / "first").read_text()
                cluster.remove_node(next(each for each in machines if each.node_id == place), allow_graceful=False)

            killer = threading.Thread(target=lose_a_machine)
            killer.start()
            options = ON_RAY | {"executor_options": {"placement_group": group}, "attempts": 20}
            groups = rollout_sync(RandomSampler(), Task(lambda: Falls(tmp_path), "falls"), n=4, **options)
            killer.join()
        assert [len(trajectory.turns) for trajectory in groups[0].trajectories] == [2] * 4
        assert groups.metrics["env/falls/retried"] >= 2  # two lived on each machine

    def test_a_placement_group_without_a_place(self, ray, tmp_path):
        """What a cluster does not have is not waited for without end."""
        _ray_cluster.connected()
        group = ray.util.placement_group([{"nobody_has_this": 1}])
        options = {"placement_group": group, "num_cpus": 0}
        task = Task(lambda: Notes(tmp_path), "notes")
        with pytest.raises(BackendTimeout, match="the cluster did not place it within 1 s"):
            rollout_sync(RandomSampler(), task, n=1, executor="ray", executor_options=options, deadline=1.0)
        ray.util.remove_placement_group(group)

    def test_a_recipe(self, tmp_path):
        """``explorer.executor`` of a run's settings says where its episodes and its held-out ones are played."""
        pytest.importorskip("torch")
        pytest.importorskip("omegaconf")
        from tests.recipes.problems import curve, played

        on_ray = ["explorer.executor=ray", "explorer.executor_options={workers: 1, num_cpus: 0}"]
        here, there = played(tmp_path / "here", steps=2), played(tmp_path / "there", *on_ray, steps=2)
        assert curve(there) == curve(here)
        with pytest.raises(ConfigError, match="Plan.executor_options: name"):
            played(tmp_path / "wrong", "explorer.executor=ray", "explorer.executor_options={cpus: 1}")

    def test_more_than_the_machine_has(self):
        """It is refused at once, where it would wait for ever."""
        for more, has in (({"num_cpus": 10_000}, "CPU: "), ({"num_cpus": 0, "num_gpus": 1000}, "GPU: ")):
            options = ON_RAY | {"executor_options": {"workers": 1, **more}}
            with pytest.raises(ConfigError, match=f"at most what this machine has .*{has}"):
                rollout_sync(RandomSampler(), Plays, n=1, **options)
