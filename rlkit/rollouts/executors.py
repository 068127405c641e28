"""Where environments run: in threads of this process, or in worker processes of Ray."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import io
import itertools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast, get_type_hints

import attrs

from rlkit import _check, _ray_cluster
from rlkit.envs import Action, Env, Observation, StepResult, Task
from rlkit.envs.calling import call, drives_itself
from rlkit.errors import ConfigError, EnvError, EnvLost
from rlkit.futures import settled
from rlkit.rollouts._ray_worker import Worker
from rlkit.rollouts.faults import CannotGoOn

if TYPE_CHECKING:
    from rlkit.rollouts.plan import Plan

__all__ = ["check", "placed", "prepared"]

EXECUTORS = ("threads", "ray")
PATIENCE = 30.0  # seconds for a worker to start while others could do its work
OPTIONS = ("workers", "num_cpus", "num_gpus", "memory", "resources", "placement_group")


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
    if executor == "ray":
        _ray_cluster.check(options, where, OPTIONS, 'executor="ray"')
    elif options:
        raise ConfigError(where, f"is {dict(options)}", "none", 'executor is "threads"')


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
    """A worker, and how many environments live there.

    Attributes:
        up: done when its process has started, or cannot.
    """

    actor: Any
    up: concurrent.futures.Future[None]
    envs: int = 0


class _Workers:
    """The worker processes of one rollout; one that died is replaced when an environment next needs it."""

    def __init__(self, plan: Plan) -> None:
        self._ray = _ray_cluster.connected()
        place = _ray_cluster.Place.of(self._ray, plan.executor_options, plan.deadline, "Plan.executor_options")
        self._count = place.count
        self._actor = self._ray.remote(Worker).options(
            max_concurrency=max(1000, 4 * plan.concurrency),  # more than all calls at once: closing waits for no step
            max_restarts=0,  # a worker without its environments would be of no use
            max_task_retries=0,
            **place.options,
        )
        self._settings = plan.close_timeout, plan.executor_options.get("memory")
        self._held: list[_Held] = []
        self._lock = threading.Lock()
        self._keys = itertools.count()
        self._closed = False
        self._sent: dict[int, tuple[object, Any]] = {}  # by identity

    def place(self, task: Task) -> Task:
        """Return the task with an environment that lives in a worker."""
        partial = task.make if isinstance(task.make, functools.partial) else functools.partial(task.make)
        function = partial.func  # of a set of tasks one for all, and it may hold a data set
        if _makes_harness(function):
            raise _refused(task.name)
        if id(function) not in self._sent:
            self._sent[id(function)] = (function, self._put(function, task.name))
        sent = (self._sent[id(function)][1], self._put((partial.args, partial.keywords), task.name))
        return attrs.evolve(task, make=cast("Callable[[], Env]", _Make(self, task.name, sent)))  # it may be awaited

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

    async def open(self, worker: _Held, name: str, sent: tuple[object, object]) -> Env:
        """Return an environment that lives in a worker, which counts it already."""
        env = _RemoteEnv(self, worker, name, next(self._keys))
        try:
            plays = await self.ask(worker, f"environment {name!r}: make", "open", env.key, name, sent)
        except BaseException:  # nobody waits any more, or it failed
            await env.close()
            raise
        if plays:
            await env.close()
            raise CannotGoOn(_refused(name))
        return env

    async def started(self) -> _Held:
        """Return a worker for one more environment.

        A cluster that lost a machine may have no room for a new worker: where others run, it is not waited for long.
        """
        while True:
            worker = self._least()
            try:
                if await settled(worker.up, PATIENCE):
                    return worker
            except BaseException:
                self.release(worker)
                raise
            with self._lock:
                others = any(held.up.done() for held in self._held)
                if others and worker in self._held:
                    self._count = len(self._held) - 1
            if not others:
                return worker
            self._lose(worker)

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
                actor = self._actor.remote(*self._settings)
                worker = _Held(actor, actor.up.remote().future())
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


class _Make:
    """Makes environments in workers."""

    def __init__(self, workers: _Workers, name: str, sent: tuple[object, object]) -> None:
        self._workers, self._name, self._sent = workers, name, sent

    async def __call__(self) -> Env:
        return await self._workers.open(await self._workers.started(), self._name, self._sent)

    @contextlib.asynccontextmanager
    async def ready(self) -> AsyncIterator[Callable[[], Awaitable[Env]]]:
        """Yield what makes one environment in a worker that is up, or has not come up within ``PATIENCE``."""
        seat = [await self._workers.started()]  # taken by whoever comes first: what makes it, or the end of this

        async def make() -> Env:
            try:
                worker = seat.pop()
            except IndexError:  # nobody waits any more
                raise EnvError(f"environment {self._name!r}: make: too late") from None
            return await self._workers.open(worker, self._name, self._sent)

        try:
            yield make
        finally:
            with contextlib.suppress(IndexError):  # what makes it, in another thread, has taken it
                self._workers.release(seat.pop())


@contextlib.asynccontextmanager
async def prepared(task: Task) -> AsyncIterator[Task]:
    """Yield a task whose next environment is made at once: the start of a worker is waited for before.

    Raises:
        EnvError: the rollout has ended.
    """
    if isinstance(task.make, _Make):
        async with task.make.ready() as make:
            yield attrs.evolve(task, make=cast("Callable[[], Env]", make))
    else:
        yield task


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


def _makes_harness(make: object) -> bool:
    """Whether a class, or what a function is annotated to return, is a harness; of other functions nobody knows."""
    made: object = make
    if not isinstance(make, type):
        with contextlib.suppress(Exception):  # an annotation may name what is not there
            made = get_type_hints(make).get("return")
    return isinstance(made, type) and drives_itself(made)


def _refused(name: str) -> ConfigError:
    what = 'is a harness, and executor is "ray"'
    why = "it drives itself, by an endpoint of the process that samples"
    return ConfigError(f"environment {name!r}", what, 'executor="threads"', why)
