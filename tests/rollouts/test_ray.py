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

LOCK = r"cannot be pickled \(cannot pickle '_thread.lock' object\)"


class Notes:
    """Two steps; notes in a folder in which process it was made, and that it was closed.

    Args:
        act: a coroutine function that the second step awaits; what it returns is the step's ``info``.
        tool: something in the schema of a tool.
    """

    def __init__(self, folder, index=0, act=None, tool="function"):
        self.folder, self.index, self.act, self.steps = folder, index, act, 0
        self.tools = ({"type": tool, "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}},)
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
    with contextlib.suppress(FileExistsError), (env.folder / "first").open("x") as file:
        file.write(str(os.getpid()))
    if noted(env.folder, "first") == [os.getpid()]:
        env.note("waits")
        try:
            await asyncio.sleep(3600)
        finally:
            env.note("cancelled")


async def hold_lock(env):
    return {"lock": threading.Lock()}


async def fail(env):
    kind, *args = env.index
    raise kind(*args)


def plan(chat=None, n=1, deadline=600.0, attempts=3, call_timeout=None, **executor):
    """Return a plan with one worker, unless others are given."""
    fixed = {"params": SamplingParams(max_tokens=4), "max_turns": 2, "chat": chat}
    executor = Ray(**{"workers": 1, "num_cpus": 0} | executor)
    return Plan(n=n, deadline=deadline, attempts=attempts, call_timeout=call_timeout, executor=executor, **fixed)


def play(tasks, **options):
    return rollout_sync(RandomSampler(), tasks, plan=plan(**options))


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


def test_settings_are_checked(monkeypatch):
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
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: None)
    with pytest.raises(MissingPackageError, match=r"needs ray: pip install .*ray"):
        Ray()


def test_the_same_groups_as_in_threads(folder):
    """Seeds, observations, rewards and counts are those of threads, also of packages that draw from the process."""
    tasks = list(Tasks(lambda i: Notes(folder, i), 2, name="notes"))  # a function without a name to import
    tasks += [*envs.gem("game:Game2048-v0-easy", size=4), *envs.reasoning_gym("chain_sum", size=4)]
    chat = Chat(RandomSampler.tokenizer, prefill="\\boxed{up} ", history="none")
    there = play(tasks, n=3, chat=chat)
    here = rollout_sync(RandomSampler(), tasks, plan=plan(n=3, chat=chat), executor="threads")
    assert describe(there) == describe(here)
    counts = ("env/notes/failed", "env/notes/retried", "env/notes/close_failed", "sampler/tokens")
    assert [here.metrics[name] for name in counts] == [there.metrics[name] for name in counts]
    assert len(noted(folder, "closed")) == len(noted(folder, "made")) == 12
    assert noted(folder, "made").count(os.getpid()) == 6


def test_ray_listens_on_loopback(ray, folder, monkeypatch):
    """Also if its module was imported before; it lasts longer than the threads of the rollout that started it."""
    ray.shutdown()
    monkeypatch.setattr("rlkit._threads._IDLE", 0.1)
    for _ in range(2):
        play(Task(lambda: Notes(folder)))
        time.sleep(1.0)  # Linux would kill Ray's processes now
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


def test_a_killed_worker_is_counted(folder):
    """With one attempt it is a failure of kind EnvLost."""
    with killing(folder, 1), pytest.raises(BackendError, match="1 EnvLost in step") as caught:
        play(Task(lambda: Notes(folder, act=wait)), attempts=1)
    assert "class_name" not in "".join(traceback.format_exception(caught.value))  # Ray's paragraph beside ours


def test_a_step_that_takes_too_long(folder):
    """It is cancelled, and the environment closed."""
    with pytest.raises(BackendError, match="1 timeout in step"):
        play(Task(lambda: Notes(folder, act=wait)), call_timeout=5.0)
    assert noted(folder, "closed") == noted(folder, "cancelled") == noted(folder, "waits")


def test_two_rollouts_at_once(folder):
    """Each has its own workers; one that is cancelled closes its environments."""

    async def scene():
        tasks = [Task(lambda: Notes(folder, act=wait), name) for name in "ab"]
        playing = [asyncio.create_task(rollout(RandomSampler(), [task], plan=plan(n=2))) for task in tasks]
        (ended,), (waits,) = await asyncio.wait(playing, return_when="FIRST_COMPLETED")
        assert len(ended.result()[0].trajectories) == 2
        waits.cancel()
        await asyncio.wait([waits])

    asyncio.run(scene())
    assert len(set(noted(folder, "made"))) == 2
    assert len(noted(folder, "made")) == len(noted(folder, "closed")) == 4


def test_what_cannot_be_played(folder):
    """It is named: before anything is played, if what makes it cannot be sent; else when it is there."""
    lock = threading.Lock()
    locked = Task(lambda: Notes(folder, lock), "x")
    wrong = [
        ([Task(lambda: Notes(folder)), locked], f"'x': make: {LOCK}", ConfigError),
        (iter([locked]), f"'x': make: {LOCK}", ConfigError),
        (Task(functools.partial(Notes, lock), "x"), f"'x': make: arguments: {LOCK}", ConfigError),
        (Task(Plays, "x"), r"'x': is a harness.*executor=\"threads\"", ConfigError),
        (Task(lambda: Notes(folder, act=hold_lock), "x"), f"'x': step: info: {LOCK}.*of Ray.$", BackendError),
        (Task(lambda: Notes(folder, tool=threading.Lock()), "x"), f"'x': tools: {LOCK}", BackendError),
    ]
    for tasks, text, error in wrong:
        with pytest.raises(error, match=text):
            play(tasks)
        assert error is BackendError or not noted(folder, "made")


def test_environments_that_raise(folder):
    """The exception is as it was raised, so that ``retry`` knows it; else its type, text and line are told."""
    odder = r"2 EnvError in step; the first error: Odder: code 7 \(.*"
    for raised, text in {
        (Odd, 7): "2 Odd in step; the first error: 7; at ",
        (Odder, 7, False): rf"{odder}missing 1 required positional argument",
        (Odder, 7, True): f"{odder}cannot pickle",
    }.items():
        with pytest.raises(BackendError, match=rf"{text}.*test_ray.py:\d+ in fail"):
            play(Task(functools.partial(Notes, folder, raised, fail)), n=2)
    assert len(noted(folder, "closed")) == len(noted(folder, "made"))


def test_a_placement_group(ray, folder):
    """By its name; the workers are as many as it has room for."""
    group = ray.util.placement_group([{"CPU": 1}], name="environments")
    play(Task(lambda: Notes(folder)), n=2, placement_group="environments", workers=None, num_cpus=0.5)
    ray.util.remove_placement_group(group)
    assert len(set(noted(folder, "made"))) == 2


@for_each(
    "options, bundle, text",
    [
        ({"num_gpus": 1000}, None, r"num_gpus=1000.*: 0 of 1 workers have started; Ray has .*'GPU': 0"),
        ({}, {"nobody_has_this": 1}, "0 of 1 workers have started"),
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


def test_a_recipe(ray, tmp_path):
    """``explorer.executor`` of a run's settings says where its episodes and its held-out ones are played."""
    pytest.importorskip("torch")
    pytest.importorskip("omegaconf")
    from tests.recipes.problems import curve, played

    there = ("explorer.executor=ray", "explorer.executor_options={workers: 1, num_cpus: 0}")
    assert curve(played(tmp_path / "there", *there, steps=2)) == curve(played(tmp_path / "here", steps=2))
    for wrong in ((there[0], "explorer.executor_options={cpus: 1}"), there[1:]):
        with pytest.raises(ConfigError, match="explorer.executor_options"):
            played(tmp_path / "wrong", *wrong)
