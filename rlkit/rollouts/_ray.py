"""Ray as the executor: environments live in actors, which it places and restarts, guarded as in this process."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import importlib.util
import itertools
import logging
import threading
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import attrs

from rlkit import _check, _runtime
from rlkit._check import checked
from rlkit.envs.calling import GuardedEnv, call
from rlkit.envs.protocol import Action, Env, Observation, StepResult, Task
from rlkit.errors import BackendTimeout, ConfigError, EnvError, EnvLost, RlkitError
from rlkit.futures import join_all, wait_done
from rlkit.rollouts._episode import find_place
from rlkit.rollouts._requests import RolloutFailed

if TYPE_CHECKING:
    from rlkit.rollouts._plan import Plan

__all__ = ["Ray"]

_log = logging.getLogger(__name__)
_connecting = threading.Lock()
_keys = itertools.count()
_SOON = 30.0  # seconds after which it is said that workers do not start


@attrs.frozen(kw_only=True)
class Ray:
    """Run environments in worker processes of Ray: ``Plan(executor=Ray(workers=8))``.

    They run on the cluster that ``ray.init`` connected to, else on this machine, from the start of a rollout to its
    end. The rollout waits up to ``Plan.deadline`` for them, before the time of an episode counts. An episode goes to
    the worker with the fewest environments. Ray restarts a worker that dies; its environments raise ``EnvLost``, which
    ``Plan.retry`` lists. If no worker is up, making an environment waits for one.

    Args:
        workers: how many, >= 1; None: as many as fit, at least one, and at most ``Plan.concurrency``.
        num_cpus, num_gpus: >= 0, which Ray reserves for each; it does not enforce CPUs.
        memory: bytes, >= 1, that Ray reserves for each and does not enforce; None: none.
        resources: other resources of Ray's, by name.
        placement_group: where they run, within its reservation: Ray's own or its name; None: anywhere.

    Raises:
        ConfigError: naming the field.
        MissingPackageError: Ray is not installed.
    """

    workers: int | None = checked(None, _check.integer, none=True, low=1)
    num_cpus: float = checked(1, _check.real, low=0.0)
    num_gpus: float = checked(0, _check.real, low=0.0)
    memory: int | None = checked(None, _check.integer, none=True, low=1, why="bytes")
    resources: Mapping[str, float] = attrs.field(factory=dict)
    placement_group: Any = None

    def __attrs_post_init__(self) -> None:
        resources, group = self.resources, self.placement_group
        _check.require(isinstance(resources, Mapping), "Ray.resources", resources, "a mapping of names to numbers")
        fits = group is None or isinstance(group, str) or hasattr(group, "bundle_specs")
        _check.require(fits, "Ray.placement_group", group, "a Ray placement group, or the name of one")
        if importlib.util.find_spec("ray") is None:
            raise _runtime.missing("Ray", "ray", "ray")

    @contextlib.asynccontextmanager
    async def place(self, plan: Plan, tasks: Iterable[Task]) -> AsyncIterator[Iterable[Task]]:
        """Yield the tasks with environments that live in workers; end the workers afterwards.

        Raises:
            ConfigError: what makes an environment cannot be pickled, or Ray refuses these settings.
            BackendTimeout: no worker got a place in time.
        """
        workers = await call(EnvWorkers, await call(connect, where="ray"), self, plan, where="ray")
        try:
            placed: Iterable[Task] = map(workers.place, tasks)
            if isinstance(tasks, Sequence):  # all of them are checked before any work
                placed = await call(list, placed, where="ray")
            await workers.wait_for_start(plan.deadline)
            yield placed
        finally:
            await call(workers.close, where="ray")


async def connect() -> Any:
    """Return the module ray, connected: to what the user has connected it to, else to processes of this machine.

    As a coroutine, it runs in the thread of the environments' event loop, which lasts as long as the program: Linux
    kills Ray's processes with the thread that started them.
    """
    ray = importlib.import_module("ray")
    with _connecting:  # by one of several rollouts
        if not ray.is_initialized():
            # Ray listens on loopback only where this is false. ``ray.init`` replaces a loopback address by that of the
            # machine, and the variable from which this comes is read when ray is imported, perhaps by the user.
            constants: Any = importlib.import_module("ray._private.ray_constants")
            before, constants.ENABLE_RAY_CLUSTER = constants.ENABLE_RAY_CLUSTER, False
            try:
                ray.init("local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
            finally:
                constants.ENABLE_RAY_CLUSTER = before
    return ray


class EnvWorkers:
    """The workers of one rollout."""

    def __init__(self, ray: Any, settings: Ray, plan: Plan) -> None:
        self._ray, self._settings = ray, settings
        needs = {"CPU": settings.num_cpus or 1, "GPU": settings.num_gpus, "memory": settings.memory or 0}
        needs = {name: need for name, need in {**needs, **settings.resources}.items() if need}
        options = attrs.asdict(settings, filter=attrs.filters.exclude("workers", "placement_group"), recurse=False)
        group, places = settings.placement_group, [ray.cluster_resources()]
        try:
            if group is not None:
                group = ray.util.get_placement_group(group) if isinstance(group, str) else group
                options["scheduling_strategy"] = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group)
                places = group.bundle_specs
            self._room = [{name: place.get(name, 0) for name in needs} for place in places]
            fits = sum(min(int(place[name] // need) for name, need in needs.items()) for place in self._room)
            actor = ray.remote(EnvWorker).options(
                max_concurrency=max(1000, 4 * plan.concurrency),  # more than all calls at once: closing waits for none
                max_restarts=-1,
                max_task_retries=0,  # the environments are gone, and no step is taken twice
                **options,
            )
            count = min(settings.workers or max(1, fits), plan.concurrency)
            self._workers = [_Worker(actor.remote(plan.close_timeout)) for _ in range(count)]
        except ValueError as error:  # there is no such group, or no bundle of it has room for a worker
            raise ConfigError(f"Ray: {error}") from error
        self._sent: dict[int, tuple[object, Any]] = {}  # by identity

    async def wait_for_start(self, timeout: float) -> None:
        """Wait until all have started; go on with those that have after ``timeout`` seconds."""
        soon = min(timeout, _SOON)
        if await self._all_start(soon):
            return
        _log.warning("%s; waiting for the others, %g s at most", self._describe(), timeout)
        if await self._all_start(timeout - soon):
            return
        if not any(worker.up.done() for worker in self._workers):
            raise BackendTimeout(f"{self._describe()}; waited {timeout:g} s")
        _log.warning("%s; going on with these", self._describe())

    async def _all_start(self, seconds: float) -> bool:
        return await wait_done(join_all([worker.up for worker in self._workers]), seconds)

    def _describe(self) -> str:
        started = sum(worker.up.done() for worker in self._workers)
        return f"{self._settings}: {started} of {len(self._workers)} workers have started; Ray has {self._room}"

    def place(self, task: Task) -> Task:
        """Return the task with an environment that lives in a worker."""
        make = task.make if isinstance(task.make, functools.partial) else functools.partial(task.make)
        where = f"environment {task.name!r}: make"
        if id(make.func) not in self._sent:  # of a set of tasks one for all, and it may hold a data set
            self._sent[id(make.func)] = (make.func, self._put(where, make.func))
        refs = self._sent[id(make.func)][1], self._put(f"{where}: arguments", (make.args, make.keywords))
        return attrs.evolve(task, make=cast("Any", functools.partial(self._open, task.name, refs)))  # it may be awaited

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            with contextlib.suppress(self._ray.exceptions.RayError, ValueError):  # Ray has ended
                self._ray.kill(worker.actor)

    async def _open(self, name: str, refs: tuple[Any, Any]) -> Env:
        """Make an environment in the worker with the fewest."""
        while not (worker := min(self._workers, key=lambda each: (not each.up.done(), len(each.keys)))).up.done():
            await wait_done(worker.up, 1.0)  # or until another one is there
        env = RayEnv(worker, name)
        try:
            await env.ask("make", name, refs)
        except BaseException:  # the caller stopped waiting, or it failed
            await env.close()
            raise
        return env

    def _put(self, where: str, value: object) -> Any:
        try:
            return self._ray.put(value)
        except Exception:
            _check_pickles(where, value, ConfigError)
            raise


class _Worker:
    """Ray's handle of a worker, the keys of its environments, and a future that is done when the process is up."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.keys: set[int] = set()
        self.expect()

    def expect(self) -> None:
        """Wait for the process to start, or to start again: Ray repeats this call alone until it is answered."""
        self.up = self.actor.up.options(max_task_retries=-1).remote().future()


class RayEnv:
    """An environment that lives in a worker."""

    def __init__(self, worker: _Worker, name: str) -> None:
        self._worker, self._name, self._key = worker, name, next(_keys)
        self.tools: Sequence[dict[str, object]] = ()
        worker.keys.add(self._key)

    async def reset(self, seed: int) -> Observation:
        observation, self.tools = await self.ask("reset", seed)
        return cast("Observation", observation)

    async def step(self, action: Action) -> StepResult:
        return cast("StepResult", await self.ask("step", action))

    async def close(self) -> None:
        self._worker.keys.discard(self._key)
        with contextlib.suppress(EnvLost):  # and what it held with it
            await self.ask("close")

    async def ask(self, method: str, *args: object) -> Any:
        """Return what a method of the worker gives; what the environment raised there is raised here.

        Raises:
            EnvLost: the worker died.
        """
        from ray.exceptions import RayError, RayTaskError

        try:
            return await self._worker.actor.call.remote(self._key, method, *args)
        except RayTaskError as error:
            raise error.cause from error
        except RayError as error:
            self._worker.expect()
            reason = str(error).partition("\n")[0]  # of Ray's paragraph
            raise EnvLost(f"environment {self._name!r}: {method}: its worker process was lost: {reason}") from None


class EnvWorker:
    """In a worker process: its environments, by key."""

    def __init__(self, close_timeout: float) -> None:
        self._close_timeout = close_timeout
        self._envs: dict[int, GuardedEnv] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._fetched: dict[Any, Any] = {}  # by reference: what makes environments may hold a data set

    async def up(self) -> None:
        """Answer when the process has started."""

    async def call(self, key: int, method: str, *args: Any) -> Any:
        """Return what a method gives for environment ``key``; cancel its last call, which the caller has given up."""
        if method in {"reset", "step"} and key not in self._envs:
            raise EnvLost("its worker process died, and Ray started another one")
        if key in self._calls:
            self._calls[key].cancel()
            await asyncio.wait([self._calls[key]])
        running = self._calls[key] = asyncio.ensure_future(getattr(self, f"_{method}")(key, *args))
        try:
            return await running
        except Exception as error:
            raise _make_sendable(error) from error

    async def _make(self, key: int, name: str, refs: tuple[Any, Any]) -> None:
        if refs[0] not in self._fetched:
            self._fetched[refs[0]] = await refs[0]
        args, keywords = await refs[1]
        task = Task(functools.partial(self._fetched[refs[0]], *args, **keywords), name)
        env = self._envs[key] = await GuardedEnv.open(task, grace=self._close_timeout / 2)
        if env.is_harness:
            why = "a harness runs its agent against an endpoint in the sampling process"
            what = "is a harness, but executor is Ray(...)"
            raise RolloutFailed(ConfigError(f"environment {name!r}", what, 'executor="threads"', why))

    async def _reset(self, key: int, seed: int) -> tuple[Observation, tuple[dict[str, object], ...]]:
        env = self._envs[key]
        observation = await env.reset(seed)
        _check_pickles(f"environment {env.name!r}: tools", env.tools, EnvError)
        return observation, env.tools

    async def _step(self, key: int, action: Action) -> StepResult:
        env = self._envs[key]
        result = await env.step(action)
        info = dict(result.info)  # which is read-only, and then does not pickle; the other parts were copied
        _check_pickles(f"environment {env.name!r}: step: info", info, EnvError)
        return attrs.evolve(result, info=info)

    async def _close(self, key: int) -> None:
        env = self._envs.pop(key, None)
        del self._calls[key]
        problem = None if env is None else await env.close(timeout=self._close_timeout)
        if problem is not None:
            raise problem


def _make_sendable(error: Exception) -> Exception:
    """Return an exception with the line where it was raised; another one with its type and text if it cannot be sent.

    Ray would report its own failure to pickle it; and a dead worker where it cannot be restored.
    """
    from ray import cloudpickle

    where = find_place(error)
    try:
        cloudpickle.dumps(error)
        if str(copy.deepcopy(error)) != str(error):  # by the protocol of pickle, from nothing that was sent
            raise ValueError("its text changes when it is restored")
    except Exception as failure:  # noqa: BLE001  # whatever its class does when it is pickled or restored
        error = EnvError(f"{type(error).__name__}: {error} (the exception itself cannot be sent: {failure})")
    if where and "ray/util/tracing" not in where:  # where Ray calls a method is no place in an environment
        error.add_note(where)
    return error


def _check_pickles(where: str, value: object, kind: type[RlkitError]) -> None:
    from ray import cloudpickle

    try:
        cloudpickle.dumps(value)
    except Exception as error:
        what = f"cannot be pickled ({error})"
        raise kind(where, what, "values that pickle", "environments run in processes of Ray") from error
