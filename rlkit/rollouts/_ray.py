"""Ray as the executor: worker processes, and episodes' environments in each, guarded as in this process."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import copy
import functools
import io
import itertools
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_type_hints

import attrs

from rlkit import _check, _ray_cluster
from rlkit.envs.calling import Guarded, call, drives_itself
from rlkit.envs.protocol import Action, Env, Harness, Observation, StepResult, Task
from rlkit.errors import ConfigError, EnvError, EnvLost
from rlkit.futures import wait_done
from rlkit.rollouts._plan import CannotGoOn, place

if TYPE_CHECKING:
    from rlkit.rollouts._plan import Plan

__all__ = ["Arguments", "Make", "Ray", "Worker"]

T = TypeVar("T")
Make = Callable[..., Env | Harness]
Arguments = tuple[tuple[object, ...], Mapping[str, object]]


class Worker:
    """Opens, steps and closes environments by number; every method is ``async``, so that none waits for another.

    Args:
        close_timeout: seconds that closing an environment may take.
        memory: bytes that the environments may take, together; None: as many as there are.
    """

    def __init__(self, close_timeout: float, memory: int | None = None) -> None:
        if memory is not None:
            _limit(memory)
        self._close_timeout = close_timeout
        self._envs: dict[int, Guarded] = {}
        self._calls: dict[int, asyncio.Task[object]] = {}
        self._fetched: dict[Awaitable[Make], Make] = {}  # what makes environments may hold a data set

    async def up(self) -> None:
        """Answer when the process has started."""

    async def open(self, key: int, name: str, sent: tuple[Awaitable[Make], Awaitable[Arguments]]) -> bool:
        """Make environment ``key``; return whether it is a harness, which is closed at once: it drives itself.

        Args:
            key: of later calls.
            name: the task's.
            sent: references to what makes it, and to the arguments.

        Raises:
            Exception: as ``make`` raised it.
        """
        return await self._cancellable(key, self._open(key, name, *sent))

    async def reset(self, key: int, seed: int) -> tuple[Observation, tuple[dict[str, object], ...]]:
        """Return the first observation, and the tools that the environment offers."""
        env = self._envs[key]
        observation = await self._cancellable(key, env.reset(seed))
        for i, tool in enumerate(env.tools):
            _check_sendable(f"environment {env.name!r}: tools[{i}]", tool)
        return observation, env.tools

    async def step(self, key: int, action: Action) -> StepResult:
        """Return what the action led to."""
        env = self._envs[key]
        result = await self._cancellable(key, env.step(action))
        for name, value in result.info.items():  # the other parts are copies that can be sent
            _check_sendable(f"environment {env.name!r}: step: info[{name!r}]", value)
        return attrs.evolve(result, info=dict(result.info))  # a read-only view cannot be sent

    async def close(self, key: int) -> None:
        """Cancel what environment ``key`` does, and close it."""
        call = self._calls.get(key)
        if call is not None:
            call.cancel()
            await asyncio.wait([call])
        env = self._envs.pop(key, None)
        problem = None if env is None else await env.close(timeout=self._close_timeout)
        if problem is not None:
            raise _sendable(problem)

    async def _open(self, key: int, name: str, make: Awaitable[Make], arguments: Awaitable[Arguments]) -> bool:
        if make not in self._fetched:
            self._fetched[make] = await make
        args, keywords = await arguments
        task = Task(functools.partial(self._fetched[make], *args, **keywords), name)
        env = await Guarded.opened(task, grace=self._close_timeout / 2)
        if env.plays:
            await env.close(timeout=self._close_timeout)
        else:
            self._envs[key] = env
        return env.plays

    async def _cancellable(self, key: int, work: Coroutine[object, object, T]) -> T:
        call = asyncio.ensure_future(work)
        self._calls[key] = call
        try:
            return await call
        except Exception as error:
            raise _sendable(error) from error
        finally:
            self._calls.pop(key, None)


def _sendable(error: Exception) -> Exception:
    """Return an exception with the line where it was raised; another one with its type and text if it cannot be sent.

    Ray would tell of its own failure to send it, and of one that cannot be read again as of a dead worker.
    """
    from ray import cloudpickle

    where = place(error)
    try:
        cloudpickle.dumps(error)
        read = copy.deepcopy(error)  # made again by the same protocol as when Ray reads it, from nothing that was sent
        problem = "" if str(read) == str(error) else "its text changes when it is restored"
    except Exception as failure:  # noqa: BLE001  # whatever its class does when it is pickled or made again
        problem = f"{type(failure).__name__}: {failure}"
    if problem:
        error = EnvError(f"{type(error).__name__}: {error} (the exception itself cannot be sent: {problem})")
    if where:
        error.add_note(where)
    return error


def _check_sendable(where: str, value: object) -> None:
    """Check that a part of an answer can be sent.

    Raises:
        EnvError: it cannot; the innermost part that cannot is named.
    """
    if value is None or isinstance(value, (str, bytes, bool, int, float)):
        return
    from ray.util import inspect_serializability

    good, failures = inspect_serializability(value, name=where, print_file=io.StringIO())
    if good:
        return
    parts = (
        value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    )
    for key, part in parts:
        _check_sendable(f"{where}[{key!r}]", part)
    names = ", ".join(sorted({_check.describe(each.obj) for each in failures}))
    what = f"holds values that cannot be serialized: {names}"
    raise EnvError(where, what, "values that can be pickled", "executor='ray'")


def _limit(memory: int) -> None:
    """Limit this process to ``memory`` more bytes than it uses now; a larger request raises MemoryError.

    Only Linux holds a process to what it maps for itself; shared memory, such as Ray's store of objects, is not in it.
    """
    if sys.platform != "linux":
        return
    import resource

    status = Path("/proc/self/status").read_text("ascii", errors="replace")
    has = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmData:"))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = has + memory if hard == resource.RLIM_INFINITY else min(has + memory, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


PATIENCE = 30.0  # seconds for a worker to start while others could do its work
OPTIONS = ("workers", "num_cpus", "num_gpus", "memory", "resources", "placement_group")


class Ray:
    """Worker processes of Ray's, on its cluster or this machine."""

    def check_options(self, options: Mapping[str, object]) -> None:
        """Check a plan's ``executor_options``.

        Raises:
            ConfigError: naming the field.
            MissingPackageError: Ray is not installed.
        """
        _ray_cluster.check(options, "Plan.executor_options", OPTIONS, 'executor="ray"')

    @contextlib.asynccontextmanager
    async def place_tasks(self, plan: Plan, tasks: Iterable[Task]) -> AsyncIterator[Iterable[Task]]:
        """Yield the tasks with environments that live in workers; end the workers afterwards.

        Raises:
            ConfigError: what makes an environment cannot be sent, or the machine has not what a worker needs.
        """
        workers = await call(_Workers, plan, where="ray")
        try:
            if isinstance(tasks, Sequence):  # all of them are checked before any work
                yield await call(lambda: [workers.place(task) for task in tasks], where="ray")
            else:
                yield map(workers.place, tasks)
        finally:
            await call(workers.close, where="ray")

    @contextlib.asynccontextmanager
    async def prepare_task(self, task: Task) -> AsyncIterator[Task]:
        """Yield a task whose next environment is made at once: the start of a worker is waited for before.

        Raises:
            EnvError: the rollout has ended.
        """
        async with cast("_Make", task.make).ready() as make:
            yield attrs.evolve(task, make=cast("Callable[[], Env]", make))


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
            raise EnvLost(f"{where}: its worker process was lost: {lines[0]}") from None  # Ray says it at length

    async def open(self, worker: _Held, name: str, sent: tuple[object, object]) -> Env:
        """Return an environment that lives in a worker, which counts it already."""
        env = _RemoteEnv(self, worker, name, next(self._keys))
        try:
            plays = await self.ask(worker, f"environment {name!r}: make", "open", env.key, name, sent)
        except BaseException:  # the caller stopped waiting, or it failed
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
                if await wait_done(worker.up, PATIENCE):
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
                sorted(f"{'.'.join(map(str, each.path))} = {_check.describe(each.obj)}" for each in failures)
            )
            what = f"cannot be sent to a worker: {names or error}"
            raise ConfigError(f"environment {name!r}: make", what, "picklable values", "executor='ray'") from error


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
            except IndexError:  # nothing waits any more
                raise EnvError(f"environment {self._name!r}: make: too late") from None
            return await self._workers.open(worker, self._name, self._sent)

        try:
            yield make
        finally:
            with contextlib.suppress(IndexError):  # what makes it, in another thread, has taken it
                self._workers.release(seat.pop())


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
    """Return whether a class, or a function's annotated result, is a harness; other functions are unknown."""
    made: object = make
    if not isinstance(make, type):
        with contextlib.suppress(Exception):  # an annotation may name what is not there
            made = get_type_hints(make).get("return")
    return isinstance(made, type) and drives_itself(made)


def _refused(name: str) -> ConfigError:
    what = 'is a harness, but executor is "ray"'
    why = "a harness runs its agent against an endpoint in the sampling process"
    return ConfigError(f"environment {name!r}", what, 'executor="threads"', why)
