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

import pytest

from rlkit import BackendError, BackendTimeout, ConfigError, MissingPackageError, SamplingParams, envs
from rlkit.chat import Chat
from rlkit.envs import StepResult, Task, Tasks
from rlkit.rollouts import Plan, Ray, rollout, rollout_sync
from tests.each import for_each
from tests.rollouts.parts import RandomSampler, describe
from tests.sockets import listening, open_to_others
from tests.test_process import gone

PARAMS = SamplingParams(max_tokens=4)
LOCK = r"cannot be pickled \(cannot pickle '_thread.lock' object\)"
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


class Odd(Exception):
    """What can be sent, from a module that the workers can import."""


class Odder(Exception):
    """What cannot be restored from its text, or with a lock not even be pickled."""

    def __init__(self, code, locked):
        super().__init__(f"code {code}")
        self.lock = threading.Lock() if locked else None


async def wait(env):
    """Wait in the first process that comes here."""
    first = env.folder / "first"
    with contextlib.suppress(FileExistsError), first.open("x") as file:
        file.write(str(os.getpid()))
    if first.read_text() == str(os.getpid()):
        env.note("waits")
        await asyncio.sleep(3600)


async def hold_lock(env):
    return {"lock": threading.Lock()}


async def fail(env):
    kind, *args = env.index
    raise kind(*args)


def make_locked(folder):
    lock = threading.Lock()
    return Tasks(lambda i: Notes(folder, lock), 2, name="locked")


def play(tasks, *, n=1, deadline=600.0, attempts=3, call_timeout=None, **options):
    """Play with one worker, unless others are given."""
    executor = Ray(**{"workers": 1, "num_cpus": 0} | options)
    plan = Plan(n=n, params=PARAMS, deadline=deadline, attempts=attempts, call_timeout=call_timeout, executor=executor)
    return rollout_sync(RandomSampler(), tasks, plan=plan)


def noted(folder, what):
    file = folder / what
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def wait_for(condition):
    until = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < until, "nothing happened"
        time.sleep(0.02)


@contextlib.contextmanager
def killing(folder, count):
    """Kill a worker once so many of its environments wait."""

    def run():
        wait_for(lambda: len(noted(folder, "waits")) >= count)
        os.kill(noted(folder, "waits")[0], signal.SIGKILL)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join()


@pytest.fixture(scope="module")
def ray():
    ray = pytest.importorskip("ray")
    yield ray
    ray.shutdown()


@pytest.fixture
def folder(ray, tmp_path):
    """A folder for notes; in the end no worker that made an environment runs any more."""
    yield tmp_path
    wait_for(lambda: all(gone(pid) for pid in noted(tmp_path, "made") if pid != os.getpid()))


def test_settings_are_checked():
    pytest.importorskip("ray")
    wrong = {
        "Plan.executor: got 'dask'": lambda: Plan(executor="dask"),
        "Plan.executor: got <class": lambda: Plan(executor=Ray),
        "Ray.workers: got 0": lambda: Ray(workers=0),
        "Ray.num_cpus: got -1": lambda: Ray(num_cpus=-1),
        "Ray.memory": lambda: Ray(memory=0.5),
        "Ray.resources": lambda: Ray(resources=3),
        "Ray.placement_group: .* a Ray placement group": lambda: Ray(placement_group=3),
    }
    for text, make in wrong.items():
        with pytest.raises(ConfigError, match=text):
            make()
    with pytest.warns(DeprecationWarning, match=r"pass executor=rlkit.rollouts.Ray\(\)"):
        assert Plan(executor="ray") == Plan(executor=Ray())


def test_without_ray(monkeypatch):
    """The error has the command that installs it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: None)
    with pytest.raises(MissingPackageError, match=r"needs ray: pip install .*ray"):
        Ray()


def test_the_same_groups_as_in_threads(folder):
    """Seeds, observations, rewards and counts are those of threads; environments were elsewhere and are closed."""
    tasks = Tasks(lambda i: Notes(folder, i), 4, name="notes")  # a function without a name to import
    here = rollout_sync(RandomSampler(), tasks[:2], n=3, params=PARAMS)
    there = play(tasks[:2], n=3)
    assert describe(there) == describe(here)
    counts = ("env/notes/failed", "env/notes/retried", "env/notes/close_failed", "sampler/tokens")
    assert [here.metrics[name] for name in counts] == [there.metrics[name] for name in counts]
    assert len(noted(folder, "closed")) == len(noted(folder, "made")) == 12
    assert noted(folder, "made").count(os.getpid()) == 6


@pytest.mark.usefixtures("ray")
def test_packages_that_draw_from_the_process():
    """Members of a group play the same problem, whatever else the worker plays meanwhile."""
    tasks = [*envs.gem("game:Game2048-v0-easy", size=4), *envs.reasoning_gym("chain_sum", size=4)]
    chat = Chat(RandomSampler.tokenizer, prefill="\\boxed{up} ", history="none")
    plan = Plan(n=3, max_turns=2, params=PARAMS, chat=chat)
    here = rollout_sync(RandomSampler(), tasks, plan=plan)
    assert describe(rollout_sync(RandomSampler(), tasks, plan=plan, executor=Ray(workers=1))) == describe(here)


def test_ray_listens_on_loopback(ray, folder):
    """Also if its module was imported before; it lasts longer than the threads of rollouts."""
    ray.shutdown()
    for _ in range(2):
        play(Task(lambda: Notes(folder)))
    assert [(node["Alive"], node["NodeManagerAddress"]) for node in ray.nodes()] == [(True, "127.0.0.1")]
    assert len(listening(os.getpid())) > 3
    assert open_to_others(os.getpid()) == []


def test_a_killed_worker(folder):
    """Its episodes are played again, and the other worker goes on."""
    with killing(folder, 2):
        groups = play(Task(lambda: Notes(folder, act=wait), "notes"), n=4, workers=2)
    assert [len(trajectory.turns) for trajectory in groups[0].trajectories] == [2] * 4
    assert groups.metrics["env/notes/retried"] == 2
    assert len(noted(folder, "made")) == 6
    assert noted(folder, "waits")[0] not in noted(folder, "closed")


def test_a_killed_worker_is_counted(folder):
    """With one attempt it is a failure of kind EnvLost."""
    with killing(folder, 1), pytest.raises(BackendError, match="1 EnvLost in step") as caught:
        play(Task(lambda: Notes(folder, act=wait)), attempts=1)
    assert "class_name" not in "".join(traceback.format_exception(caught.value))  # Ray's paragraph beside ours


def test_a_step_that_takes_too_long(folder):
    """It is cancelled, and the environment closed."""
    with pytest.raises(BackendError, match="1 timeout in step"):
        play(Task(lambda: Notes(folder, act=wait)), call_timeout=5.0)
    assert noted(folder, "closed") == noted(folder, "waits")


def test_two_rollouts_at_once(folder):
    """Each has its own workers; one that is cancelled closes its environments."""

    async def scene():
        executor = Ray(workers=1, num_cpus=0)
        tasks = [Task(lambda: Notes(folder, act=wait), name) for name in "ab"]
        playing = [rollout(RandomSampler(), [task], n=2, params=PARAMS, executor=executor) for task in tasks]
        playing = [asyncio.create_task(each) for each in playing]
        (ended,), (waits,) = await asyncio.wait(playing, return_when="FIRST_COMPLETED")
        assert len(ended.result()[0].trajectories) == 2
        waits.cancel()
        await asyncio.wait([waits])

    asyncio.run(scene())
    assert len(set(noted(folder, "made"))) == 2
    assert len(noted(folder, "made")) == len(noted(folder, "closed")) == 4


@for_each(
    "tasks, text, error",
    [
        (lambda f: [Task(lambda: Notes(f), "x"), make_locked(f)[0]], f"'locked': make: {LOCK}", ConfigError),
        (lambda f: iter(make_locked(f)), f"'locked': make: {LOCK}", ConfigError),
        (lambda f: Task(functools.partial(Notes, threading.Lock()), "x"), f"'x': make: arguments: {LOCK}", ConfigError),
        (lambda f: Task(lambda: Plays(), "plays"), r"'plays': is a harness.*executor=\"threads\"", ConfigError),
        (lambda f: Task(lambda: Notes(f, act=hold_lock), "x"), f"'x': step: info: {LOCK}.*of Ray.$", BackendError),
        (lambda f: Task(lambda: Tool(f), "x"), f"'x': tools: {LOCK}", BackendError),
    ],
)  # fmt: skip
def test_what_cannot_be_played(folder, tasks, text, error):
    """It is named: before anything is played, if what makes it cannot be sent; else when it is there."""
    with pytest.raises(error, match=text):
        play(tasks(folder))
    assert error is BackendError or not noted(folder, "made")


@for_each(
    "raised, text",
    [
        ((Odd, 7), "2 Odd in step; the first error: 7; at "),
        ((Odder, 7, False), rf"{ODDER}missing 1 required positional argument"),
        ((Odder, 7, True), f"{ODDER}cannot pickle"),
    ],
)
def test_environments_that_raise(folder, raised, text):
    """The exception is as it was raised, so that ``retry`` knows it; else its type, text and line are told."""
    with pytest.raises(BackendError, match=rf"{text}.*test_ray.py:\d+ in fail"):
        play(Task(lambda: Notes(folder, raised, fail)), n=2)
    assert len(noted(folder, "closed")) == len(noted(folder, "made"))


def test_a_placement_group(ray, folder):
    """By its name; the workers are as many as it has room for."""
    group = ray.util.placement_group([{"CPU": 1}], name="environments")
    groups = play(Task(lambda: Notes(folder)), n=2, placement_group="environments", workers=None, num_cpus=0.5)
    ray.util.remove_placement_group(group)
    assert len(groups[0].trajectories) == len(set(noted(folder, "made"))) == 2


@for_each(
    "options, bundle, text",
    [
        ({"num_gpus": 1000}, None, r"num_gpus=1000.*: 0 of 1 workers started within 1 s; there is .*'GPU': 0"),
        ({}, {"nobody_has_this": 1}, "0 of 1 workers started within 1 s"),
        ({"num_cpus": 2}, {"CPU": 1}, "Ray: .* bundle"),
        ({"placement_group": "nobody"}, None, "Ray: .*nobody"),
    ],
)
def test_more_than_there_is(ray, folder, options, bundle, text):
    """It is refused, or ends after the deadline."""
    group = bundle and ray.util.placement_group([bundle])
    with pytest.raises((ConfigError, BackendTimeout), match=text):
        play(Task(lambda: Notes(folder)), deadline=1.0, **{"placement_group": group} | options)
    if group is not None:
        ray.util.remove_placement_group(group)


@pytest.mark.usefixtures("ray")
def test_a_recipe(tmp_path):
    """``explorer.executor`` of a run's settings says where its episodes and its held-out ones are played."""
    pytest.importorskip("torch")
    pytest.importorskip("omegaconf")
    from tests.recipes.problems import curve, played

    there = ("explorer.executor=ray", "explorer.executor_options={workers: 1, num_cpus: 0}")
    assert curve(played(tmp_path / "there", *there, steps=2)) == curve(played(tmp_path / "here", steps=2))
    for wrong in ((there[0], "explorer.executor_options={cpus: 1}"), there[1:]):
        with pytest.raises(ConfigError, match="explorer.executor_options"):
            played(tmp_path / "wrong", *wrong)
