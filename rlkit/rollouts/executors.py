"""Where environments run: in threads of this process, or in worker processes of Ray."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import importlib
import importlib.util
import io
import itertools
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import attrs

from rlkit import _check, _lazy
from rlkit.envs import Action, Env, Observation, StepResult, Task
from rlkit.envs.calling import call
from rlkit.errors import ConfigError, EnvError, EnvLost
from rlkit.rollouts._ray_worker import Worker

if TYPE_CHECKING:
    from rlkit.rollouts.plan import Plan

__all__ = ["check", "placed"]

EXECUTORS = ("threads", "ray")
OPTIONS = ("workers", "num_cpus", "memory", "resources")

_started = False  # whether the Ray of this process was started here
_starting = threading.Lock()


def check(executor: str, options: Mapping[str, object]) -> None:
    """Check a plan's ``executor`` and ``executor_options``.

    Raises:
        ConfigError: naming the field.
        MissingPackageError: Ray is not installed.

    >>> check("threads", {})
    """
    _check.choice("Plan.executor", executor, EXECUTORS)
    where = "Plan.executor_options"
    _check.require(isinstance(options, Mapping), where, options, "a dict")
    for name in options:
        _check.choice(f"{where}: name", name, OPTIONS)
    if executor == "threads":
        if options:
            raise ConfigError(where, f"is {dict(options)}", "none", 'executor is "threads"')
        return
    _check.optional(_check.integer, f"{where}['workers']", options.get("workers"), low=1)
    _check.optional(_check.real, f"{where}['num_cpus']", options.get("num_cpus"), low=0.0)
    _check.optional(_check.integer, f"{where}['memory']", options.get("memory"), low=1, why="bytes")
    resources = options.get("resources", {})
    _check.require(isinstance(resources, Mapping), f"{where}['resources']", resources, "names with numbers")
    if importlib.util.find_spec("ray") is None:
        raise _lazy.missing('executor="ray"', "ray", "ray")


@contextlib.asynccontextmanager
async def placed(plan: Plan, tasks: Iterable[Task]) -> AsyncIterator[Iterable[Task]]:
    """Yield the tasks with environments that live where the plan says; at the end nothing of theirs is left there.

    Raises:
        ConfigError: what makes an environment cannot be sent, or the machine has not what a worker needs.
    """
    if plan.executor == "threads":
        yield tasks
        return
    workers = await call(_Workers, plan, where="ray")
    try:
        if isinstance(tasks, Sequence):  # all of them are checked before any work
            yield await call(lambda: [workers.place(task) for task in tasks], where="ray")
        else:
            yield map(workers.place, tasks)
    finally:
        await call(workers.close, where="ray")


@attrs.define(eq=False)
class _Held:
    """A worker, and how many environments live there."""

    actor: Any
    envs: int = 0


class _Workers:
    """The worker processes of one rollout; one that died is replaced when an environment next needs it."""

    def __init__(self, plan: Plan) -> None:
        self._ray = _connected()
        options = dict(plan.executor_options)
        self._count = _count(self._ray.cluster_resources(), options)
        # more than all calls at once, so that closing never waits for steps
        self._actor = self._ray.remote(Worker).options(
            num_cpus=options.get("num_cpus", 1),
            memory=options.get("memory"),
            resources=dict(options.get("resources", {})),
            max_concurrency=max(1000, 4 * plan.concurrency),
            max_restarts=0,  # a worker without its environments would be of no use
            max_task_retries=0,
        )
        self._close_timeout = plan.close_timeout
        self._held: list[_Held] = []
        self._lock = threading.Lock()
        self._keys = itertools.count()
        self._closed = False
        self._sent: dict[int, tuple[object, Any]] = {}  # by identity

    def place(self, task: Task) -> Task:
        """Return the task with an environment that lives in a worker."""
        partial = task.make if isinstance(task.make, functools.partial) else functools.partial(task.make)
        function = partial.func  # of a set of tasks one for all, and it may hold a data set
        if id(function) not in self._sent:
            self._sent[id(function)] = (function, self._put(function, task.name))
        sent = (self._sent[id(function)][1], self._put((partial.args, partial.keywords), task.name))
        make = functools.partial(self._open, task.name, sent)
        return attrs.evolve(task, make=cast("Callable[[], Env]", make))  # which may be awaited, as all of Env

    def close(self) -> None:
        """End all workers."""
        with self._lock:
            self._closed = True
            held, self._held = self._held, []
        for worker in held:
            self._kill(worker)

    async def ask(self, worker: _Held, where: str, method: str, *args: object) -> Any:
        """Return what a worker's method gives; what an environment raised there is raised here.

        Raises:
            EnvLost: the worker died.
        """
        errors = self._ray.exceptions
        try:
            return await getattr(worker.actor, method).remote(*args)
        except errors.RayTaskError as error:
            if isinstance(error.cause, Exception) and not isinstance(error.cause, errors.RayError):
                raise error.cause from error
            raise EnvError(f"{where}: {error.cause}") from error
        except errors.RayError as error:
            self._lose(worker)
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise EnvLost(f"{where}: its worker process was lost: {lines[0]}") from error

    async def _open(self, name: str, sent: tuple[object, object]) -> Env:
        worker = self._least()
        env = _RemoteEnv(self, worker, name, next(self._keys))
        try:
            await self.ask(worker, f"environment {name!r}: make", "open", env.key, name, sent)
        except BaseException:  # nobody waits any more, or it failed
            await env.close()
            raise
        return env

    def release(self, worker: _Held) -> None:
        """Count one environment less."""
        with self._lock:
            worker.envs -= 1

    def _least(self) -> _Held:
        """Return the worker with the fewest environments, a new one where all have some and there is room."""
        with self._lock:
            worker = min(self._held, key=lambda held: held.envs, default=None)
            if worker is None or (worker.envs and len(self._held) < self._count):
                if self._closed:
                    raise EnvError("the rollout has ended")
                worker = _Held(self._actor.remote(self._close_timeout))
                self._held.append(worker)
            worker.envs += 1
            return worker

    def _lose(self, worker: _Held) -> None:
        with self._lock:
            if worker not in self._held:
                return
            self._held.remove(worker)
        self._kill(worker)  # it may only be out of reach

    def _kill(self, worker: _Held) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError, ValueError):  # it has ended
            self._ray.kill(worker.actor)

    def _put(self, value: object, name: str) -> object:
        try:
            return self._ray.put(value)
        except Exception as error:
            _, failures = self._ray.util.inspect_serializability(value, name="make", print_file=io.StringIO())
            names = ", ".join(
                sorted(f"{'.'.join(map(str, each.path))} = {_check.shown(each.obj)}" for each in failures)
            )
            what = f"cannot be sent to a worker: {names or error}"
            raise ConfigError(f"environment {name!r}: make", what, "what can be pickled", "executor='ray'") from error


class _RemoteEnv:
    """An environment that lives in a worker."""

    def __init__(self, workers: _Workers, worker: _Held, name: str, key: int) -> None:
        self._workers, self._worker, self._name = workers, worker, name
        self.key = key
        self.tools: Sequence[dict[str, object]] = ()

    async def reset(self, seed: int) -> Observation:
        observation: Observation
        observation, self.tools = await self._ask("reset", seed)
        return observation

    async def step(self, action: Action) -> StepResult:
        result: StepResult = await self._ask("step", action)
        return result

    async def close(self) -> None:
        try:
            await self._ask("close")
        except EnvLost:
            pass  # and what it held with it
        finally:
            self._workers.release(self._worker)

    async def _ask(self, method: str, *args: object) -> Any:
        where = f"environment {self._name!r}: {method}"
        return await self._workers.ask(self._worker, where, method, self.key, *args)


def _connected() -> Any:
    """Return the module ray, connected: to what the user has connected it to, else to processes of this machine."""
    global _started  # noqa: PLW0603  # a process has one Ray
    ray = importlib.import_module("ray")
    with _starting:  # by one of several rollouts
        if not ray.is_initialized():
            _start(ray)
            _started = True
    return ray


def _start(ray: Any) -> None:
    """Start Ray from a thread that lasts: Linux kills its processes with the thread that they were started from."""
    outcome: concurrent.futures.Future[None] = concurrent.futures.Future()

    def start() -> None:
        try:
            with _on_loopback():
                ray.init("local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        except BaseException as error:  # noqa: BLE001  # raised where it is waited for
            outcome.set_exception(error)
        else:
            outcome.set_result(None)
            threading.Event().wait()

    threading.Thread(target=start, name="rlkit-ray", daemon=True).start()
    outcome.result()


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """Let Ray listen on the loopback address, as it does elsewhere than on Linux where this is not set otherwise."""
    constants: Any = importlib.import_module("ray._private.ray_constants")
    name, here = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", constants.ENABLE_RAY_CLUSTER
    before = os.environ.get(name)
    os.environ[name], constants.ENABLE_RAY_CLUSTER = "0", False  # for what is started, and for this process
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = here
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def _count(has: Mapping[str, float], options: Mapping[str, Any]) -> int:
    """Return how many workers there may be: as many as were asked for, else as the CPUs suffice for."""
    needs = {"CPU": options.get("num_cpus", 1), "memory": options.get("memory") or 0} | dict(
        options.get("resources", {})
    )
    fits = min((int(has.get(name, 0) // need) for name, need in needs.items() if need), default=int(has.get("CPU", 1)))
    count: int = options.get("workers") or max(1, fits)
    if _started and fits < count:  # a cluster of the user's may grow
        held = ", ".join(f"{name}: {has.get(name, 0):g}" for name in needs)
        what = f"ask for {count} worker(s) with {', '.join(f'{name}: {need:g}' for name, need in needs.items())} each"
        raise ConfigError("Plan.executor_options", what, f"no more than this machine has ({held})")
    return count
