"""Environments in worker processes of Ray: the same groups as in threads, and workers that are killed."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import os
import signal
import threading
import time
import traceback

import pytest

from rlkit import (
    BackendError,
    BackendTimeout,
    ConfigError,
    EnvLost,
    MissingPackageError,
    SamplingParams,
    envs,
)
from rlkit.chat import Chat
from rlkit.envs import StepResult, Task, Tasks
from rlkit.rollouts import Plan, Ray, _ray, rollout, rollout_sync
from tests.each import for_each
from tests.rollouts.parts import RandomSampler, describe
from tests.sockets import listening, open_to_others
from tests.test_process import gone

PARAMS = SamplingParams(max_tokens=4)
MACHINE = {"include_dashboard": False, "node_ip_address": "127.0.0.1"}
LOCK = r"cannot be pickled \(cannot pickle '_thread.lock' object\): .*<unlocked _thread.lock"
ODDER = r"2 EnvError in step; the first error: Odder: code 7 \(.*"


class Notes:
    """Two steps; notes in a folder in which process it was made, and that it was closed.

    Args:
        act: a coroutine function that the second step awaits; what it returns is the step's ``info``.
    """

    tools = ({"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}},)

    def __init__(self, folder, index=0, act=None):
        self.folder, self.index, self.act = folder, index, act
        self.steps = 0
        self.note("made")

    def note(self, what):
        with (self.folder / what).open("a") as file:
            file.write(f"{os.getpid()}\n")

    def reset(self, seed):
        return f"Task {self.index}, seed {seed}"

    async def step(self, action):
        self.steps += 1
        info = await self.act(self) if self.act and self.steps == 2 else None
        return StepResult("More.", float(action.tokens.size), self.steps == 2, info=info or {"length": len(action)})

    def close(self):
        self.note("closed")


class Tool(Notes):
    @property
    def tools(self):
        return ({"type": "function", "lock": threading.Lock()},)


class Plays:
    def play(self, session, seed):
        return StepResult()

    def close(self):
        pass


class Odd(Exception):
    """What can be sent, from a module that the workers can import."""


class Odder(Exception):
    """What cannot be restored from its text, or with a lock not even be pickled."""

    def __init__(self, code, locked):
        super().__init__(f"code {code}")
        self.lock = threading.Lock() if locked else None


async def wait(env, place=None):
    """Wait in the first place that comes here: a process, unless it is given."""
    first, place = env.folder / "first", place or str(os.getpid())
    with contextlib.suppress(FileExistsError), first.open("x") as file:
        file.write(place)
    if first.read_text() == place:
        env.note("waits")
        await asyncio.sleep(3600)


async def wait_on_machine(env):
    import ray

    await wait(env, ray.get_runtime_context().get_node_id())


async def hold_lock(env):
    return {"lock": {"of": threading.Lock()}}


async def fail(env):
    kind, *args = env.index
    raise kind(*args)


def make_locked(folder):
    lock = threading.Lock()
    return Tasks(lambda i: Notes(folder, lock), 2, name="locked")


def on_ray(**options):
    """Options of a rollout: one worker, unless others are given."""
    return {"executor": Ray(**{"workers": 1, "num_cpus": 0} | options), "params": PARAMS, "deadline": 600.0}


def play(folder, act, *, index=0, **options):
    """Play one task, of four episodes."""
    task = Task(lambda: Notes(folder, index, act), "notes")
    return rollout_sync(RandomSampler(), task, **{"n": 4} | on_ray() | options)


def noted(folder, what):
    file = folder / what
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def wait_for(condition):
    until = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < until, "nothing happened"
        time.sleep(0.02)


def check_ended(folder):
    """No worker runs any more."""
    wait_for(lambda: all(gone(pid) for pid in noted(folder, "made") if pid != os.getpid()))


@contextlib.contextmanager
def once_waiting(folder, count, action):
    """Call ``action`` in a thread once so many environments wait."""

    def run():
        wait_for(lambda: len(noted(folder, "waits")) >= count)
        action()

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join()


@for_each(
    "make, text",
    [
        (lambda: Plan(executor="dask"), "Plan.executor: got 'dask'"),
        (lambda: Plan(executor=Ray), "Plan.executor"),
        (lambda: Plan().with_options(executor_options={}), "no option 'executor_options'"),
        (lambda: Ray(workers=0), "Ray.workers: got 0"),
        (lambda: Ray(num_cpus=-1), "Ray.num_cpus: got -1"),
        (lambda: Ray(memory=0.5), "Ray.memory"),
        (lambda: Ray(resources=3), "Ray.resources"),
        (lambda: Ray(placement_group=3), "Ray.placement_group: .* a Ray placement group"),
    ],
)
def test_settings_are_checked(make, text):
    pytest.importorskip("ray")
    with pytest.raises(ConfigError, match=text):
        make()


def test_the_name_of_the_executor_is_deprecated():
    pytest.importorskip("ray")
    with pytest.warns(DeprecationWarning, match=r"pass executor=rlkit.rollouts.Ray\(\)"):
        assert Plan(executor="ray") == Plan(executor=Ray())


def test_without_ray(monkeypatch):
    """The error has the command that installs it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: None)
    with pytest.raises(MissingPackageError, match=r"needs ray: pip install .*ray"):
        Ray()


def test_a_worker_that_was_restarted_knows_no_environment():
    """Its environments are lost, and closing them is no error."""

    async def scene():
        worker = _ray._Environments(1.0)
        for work in (worker.reset(3, 0), worker.step(3, None)):
            with pytest.raises(EnvLost, match="worker process died"):
                await work
        await worker.close(3)

    asyncio.run(scene())


def test_workers_that_do_not_start(caplog):
    """The rollout goes on with the others, and says so; without any it ends. A started one is preferred."""

    class Late(_ray._Worker):
        def expect(self):
            self.up = concurrent.futures.Future()

    workers = object.__new__(_ray._Workers)
    workers._workers = late, started = [Late(None), Late(None)]
    with pytest.raises(BackendTimeout, match="0 of 2 workers started within 0 s"):
        asyncio.run(workers.wait_for_start(0.0))
    started.up.set_result(None)
    started.keys.add(3)
    asyncio.run(workers.wait_for_start(0.0))
    assert "1 of 2 workers started" in caplog.text
    assert started.rank() < late.rank()


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
        tasks = Tasks(lambda i: Notes(tmp_path, i), 4, name="notes")  # a function without a name to import
        here = rollout_sync(RandomSampler(), tasks[:2], n=3, params=PARAMS)
        assert set(noted(tmp_path, "made")) == {os.getpid()}
        there = rollout_sync(RandomSampler(), tasks[:2], n=3, **on_ray())
        assert describe(there) == describe(here)
        counts = ("env/notes/failed", "env/notes/retried", "env/notes/close_failed", "sampler/tokens")
        assert [here.metrics[name] for name in counts] == [there.metrics[name] for name in counts]
        assert len(noted(tmp_path, "closed")) == len(noted(tmp_path, "made")) == 12
        assert len(set(noted(tmp_path, "made"))) == 2  # this process and a worker
        check_ended(tmp_path)

    def test_packages_that_draw_from_the_process(self):
        """Members of a group play the same problem, whatever else the worker plays meanwhile."""
        games, problems = envs.gem("game:Game2048-v0-easy", size=4), envs.reasoning_gym("chain_sum", size=4)
        options = {
            "n": 3,
            "max_turns": 2,
            "chat": Chat(RandomSampler.tokenizer, prefill="\\boxed{up} ", history="none"),
        }
        here = rollout_sync(RandomSampler(), [*games, *problems], params=PARAMS, **options)
        there = rollout_sync(RandomSampler(), [*games, *problems], **on_ray(), **options)
        assert describe(there) == describe(here)

    def test_a_killed_worker(self, tmp_path):
        """Its episodes are played again."""
        with once_waiting(tmp_path, 4, lambda: os.kill(noted(tmp_path, "waits")[0], signal.SIGKILL)):
            (group,) = play(tmp_path, wait)
        assert [len(trajectory.turns) for trajectory in group.trajectories] == [2] * 4
        assert not group.failures
        check_ended(tmp_path)

    def test_a_killed_worker_is_counted(self, tmp_path):
        """With one attempt it is a failure of kind EnvLost."""
        with (
            once_waiting(tmp_path, 1, lambda: os.kill(noted(tmp_path, "waits")[0], signal.SIGKILL)),
            pytest.raises(BackendError, match="1 EnvLost in step") as caught,
        ):
            play(tmp_path, wait, n=1, attempts=1)
        assert "class_name" not in "".join(traceback.format_exception(caught.value))  # Ray's paragraph beside ours
        check_ended(tmp_path)

    def test_two_rollouts_at_once(self, tmp_path):
        """Each has workers of its own, which end with it."""

        async def scene():
            tasks = [Task(lambda: Notes(tmp_path, act=wait), name) for name in "ab"]
            playing = [rollout(RandomSampler(), [task], n=2, **on_ray()) for task in tasks]
            playing = [asyncio.create_task(each) for each in playing]
            (ended,), (waits,) = await asyncio.wait(playing, return_when="FIRST_COMPLETED")
            assert len(ended.result()[0].trajectories) == 2
            waits.cancel()  # environments are closed also then
            await asyncio.wait([waits])

        asyncio.run(scene())
        assert len(set(noted(tmp_path, "made"))) == 2
        assert len(noted(tmp_path, "made")) == len(noted(tmp_path, "closed")) == 4
        check_ended(tmp_path)

    @for_each(
        "tasks, text, error",
        [
            (lambda f: [Task(lambda: Notes(f), "x"), make_locked(f)[0]], f"'locked': make: {LOCK}", ConfigError),
            (lambda f: iter(make_locked(f)), f"'locked': make: {LOCK}", ConfigError),
            (lambda f: Task(functools.partial(Notes, f, index={"of": threading.Lock()}), "x"),
             rf"'x': make: arguments\[1\]\['index'\]\['of'\]: {LOCK}", ConfigError),
            (lambda f: Task(lambda: Notes(f, act=hold_lock), "x"),
             rf"'x': step: info\['lock'\]\['of'\]: {LOCK}", BackendError),
            (lambda f: Task(lambda: Tool(f), "x"), rf"'x': tools\[0\]\['lock'\]: {LOCK}", BackendError),
        ],
    )  # fmt: skip
    def test_values_that_cannot_be_sent(self, tmp_path, tasks, text, error):
        """They are named: before anything is played, if they make an environment; else in the episode's failure."""
        with pytest.raises(error, match=text):
            rollout_sync(RandomSampler(), tasks(tmp_path), n=1, **on_ray())
        assert error is BackendError or not noted(tmp_path, "made")
        check_ended(tmp_path)

    @for_each(
        "raised, text",
        [
            ((Odd, 7), "2 Odd in step; the first error: 7; at "),
            ((Odder, 7, False), rf"{ODDER}missing 1 required positional argument"),
            ((Odder, 7, True), f"{ODDER}cannot pickle"),
        ],
    )
    def test_environments_that_raise(self, tmp_path, raised, text):
        """The exception is as it was raised, so that ``retry`` knows it; else its type, text and line are told."""
        before = len(noted(tmp_path, "closed"))
        with pytest.raises(BackendError, match=rf"{text}.*test_ray.py:\d+ in fail"):
            play(tmp_path, fail, index=raised, n=2, attempts=2, retry=Odd)
        assert len(noted(tmp_path, "closed")) - before == (4 if raised[0] is Odd else 2)
        check_ended(tmp_path)

    def test_harnesses_are_refused(self, tmp_path):
        """The first that is made ends the rollout: it is no failure of an episode."""
        tasks = [Task(lambda: Notes(tmp_path, act=wait), "waits"), Task(lambda: Plays(), "plays")]
        text = r"'plays': is a harness.*executor=\"threads\" \(a harness runs its agent"
        with pytest.raises(ConfigError, match=text):
            rollout_sync(RandomSampler(), tasks, n=2, **on_ray())
        check_ended(tmp_path)

    def test_the_thread_that_starts_ray_may_end(self, ray, tmp_path):
        """Ray's processes, which Linux ends with the thread that started them, go on; they listen on loopback."""
        ray.shutdown()
        thread = threading.Thread(target=_ray.connected)
        thread.start()
        thread.join()
        play(tmp_path, None)
        assert [node["Alive"] for node in ray.nodes()] == [True]
        assert {node["NodeManagerAddress"] for node in ray.nodes()} == {"127.0.0.1"}
        assert len(listening(os.getpid())) > 3
        assert open_to_others(os.getpid()) == []

    @for_each(
        "options, text",
        [
            ({"num_cpus": 10_000}, "at most what this machine has .*CPU: "),
            ({"num_gpus": 1000}, "at most what this machine has .*GPU: "),
            ({"placement_group": {"CPU": 1}, "workers": 2, "num_cpus": 1}, "at most what the placement group has"),
            ({"placement_group": {"CPU": 1}, "num_cpus": 2}, "at most what the placement group has"),
            ({"placement_group": {"nobody_has_this": 1}}, "the cluster did not place it within 1 s"),
            ({"placement_group": "nobody"}, "is 'nobody', which this Ray cluster does not have"),
        ],
    )
    def test_more_than_there_is(self, ray, options, text):
        """It is refused, where it would wait for ever."""
        _ray.connected()
        bundle = options.get("placement_group")
        if isinstance(bundle, dict):
            options = options | {"placement_group": ray.util.placement_group([bundle])}
        with pytest.raises((ConfigError, BackendTimeout), match=text):
            rollout_sync(RandomSampler(), Notes, n=1, **on_ray(**options) | {"deadline": 1.0})
        if isinstance(bundle, dict):
            ray.util.remove_placement_group(options["placement_group"])

    def test_a_recipe(self, tmp_path):
        """``explorer.executor`` of a run's settings says where its episodes and its held-out ones are played."""
        pytest.importorskip("torch")
        pytest.importorskip("omegaconf")
        from tests.recipes.problems import curve, played

        ray = ("explorer.executor=ray", "explorer.executor_options={workers: 1, num_cpus: 0}")
        assert curve(played(tmp_path / "there", *ray, steps=2)) == curve(played(tmp_path / "here", steps=2))
        for wrong in ((ray[0], "explorer.executor_options={cpus: 1}"), ray[1:]):
            with pytest.raises(ConfigError, match="explorer.executor_options"):
                played(tmp_path / "wrong", *wrong)

    def test_a_lost_machine(self, ray, tmp_path):
        """In the user's placement group: episodes of a machine that is gone for good are played on the other one."""
        from ray.cluster_utils import Cluster

        ray.shutdown()  # what the tests before were on
        with _ray.on_loopback(), contextlib.ExitStack() as stack:
            cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **MACHINE})
            stack.callback(cluster.shutdown)
            machines = [cluster.add_node(num_cpus=2, **MACHINE) for _ in range(2)]
            ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
            stack.callback(ray.shutdown)
            room = ray.util.placement_group([{"CPU": 1}] * 2, strategy="STRICT_SPREAD", name="environments")
            assert room.wait(300)

            def lose_machine():
                place = (tmp_path / "first").read_text()
                cluster.remove_node(next(each for each in machines if each.node_id == place), allow_graceful=False)

            options = on_ray(workers=None, num_cpus=1, placement_group="environments") | {"attempts": 20}
            with once_waiting(tmp_path, 1, lose_machine):
                groups = play(tmp_path, wait_on_machine, **options)
        assert [len(trajectory.turns) for trajectory in groups[0].trajectories] == [2] * 4
        assert groups.metrics["env/notes/retried"] >= 1
        assert len(set(noted(tmp_path, "made"))) == 2  # a worker on each machine, as the placement group has room
