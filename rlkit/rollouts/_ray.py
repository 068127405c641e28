"""Ray as the executor: worker processes, and episodes' environments in each, guarded as in this process."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import copy
import functools
import importlib
import importlib.util
import io
import itertools
import logging
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import attrs

from rlkit import _check, _runtime
from rlkit._check import checked
from rlkit.envs.calling import GuardedEnv, call
from rlkit.envs.protocol import Action, Env, Harness, Observation, StepResult, Task
from rlkit.errors import BackendTimeout, ConfigError, EnvError, EnvLost, RlkitError
from rlkit.futures import join_all, wait_done
from rlkit.rollouts._episode import find_place
from rlkit.rollouts._requests import RolloutFailed

if TYPE_CHECKING:
    from rlkit.rollouts._plan import Plan

__all__ = ["Ray"]

Make = Callable[..., Env | Harness]
Sent = tuple[Awaitable[Make], Awaitable[tuple[Any, Any]]]  # Ray's references to a function, and to its arguments
_log = logging.getLogger(__name__)
_started = ""  # the address of the Ray that was started here
_starting = threading.Lock()


def connected() -> ModuleType:
    """Return the module ray, connected: to what the user has connected it to, else to processes of this machine."""
    global _started  # noqa: PLW0603  # a process has one Ray
    ray = importlib.import_module("ray")
    with _starting:  # by one of several rollouts
        if not ray.is_initialized():
            _start(ray)
            _started = ray.get_runtime_context().gcs_address
    return ray


@attrs.frozen(kw_only=True)
class Ray:
    """Run environments in worker processes of Ray: ``Plan(executor=Ray(workers=8))``.

    They run on the cluster that ``ray.init`` connected to, else on this machine, from the start of a rollout to its
    end. The rollout waits up to ``Plan.deadline`` for them, before the time of an episode counts. An episode goes to
    the worker with the fewest environments. Ray restarts a worker that dies; its environments raise ``EnvLost``, which
    ``Plan.retry`` lists. If no worker is up, making an environment waits for one.

    Args:
        workers: how many, >= 1; None: as many as fit, and at most ``Plan.concurrency``.
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
        name, group = type(self).__name__, self.placement_group
        expected = "a mapping of names to numbers"
        _check.require(isinstance(self.resources, Mapping), f"{name}.resources", self.resources, expected)
        fits = group is None or isinstance(group, str) or hasattr(group, "bundle_specs")
        _check.require(fits, f"{name}.placement_group", group, "a Ray placement group, or the name of one")
        if importlib.util.find_spec("ray") is None:
            raise _runtime.missing(name, "ray", "ray")

    def find_room(self, ray: ModuleType, timeout: float) -> tuple[dict[str, Any], int]:
        """Return the options of an actor, and how many there may be: ``workers``, else as many as fit, at least one.

        Args:
            ray: connected.
            timeout: seconds that a placement group may take to get its place.

        Raises:
            ConfigError: there is less than the workers need, or no such placement group.
            BackendTimeout: the placement group got no place in time.
        """
        where, group = type(self).__name__, self.placement_group
        options = {name: getattr(self, name) for name in ("num_cpus", "num_gpus", "memory")}
        options["resources"] = dict(self.resources)
        if isinstance(group, str):
            group = _find_group(ray, group, f"{where}.placement_group")
        places = [ray.cluster_resources()] if group is None else group.bundle_specs
        grows = group is None and ray.get_runtime_context().gcs_address != _started  # the user's cluster may
        needs = {"CPU": self.num_cpus, "GPU": self.num_gpus, "memory": self.memory or 0}
        needs = {name: need for name, need in needs.items() if need or name == "CPU"} | options["resources"]
        fits = sum(_count_fitting(place, needs) for place in places)
        count = self.workers or max(1, fits)
        if fits < count and any(needs.values()) and not grows:
            held = "; ".join(", ".join(f"{name}: {place.get(name, 0):g}" for name in needs) for place in places)
            asked = ", ".join(f"{name}: {need:g}" for name, need in needs.items())
            whose = "this machine" if group is None else "the placement group"
            what = f"asks for {count} worker(s) with {asked} each"
            raise ConfigError(where, what, f"at most what {whose} has ({held})")
        if group is not None:
            if not group.wait(timeout):
                raise BackendTimeout(f"{where}.placement_group: the cluster did not place it within {timeout:g} s")
            strategies = importlib.import_module("ray.util.scheduling_strategies")
            options["scheduling_strategy"] = strategies.PlacementGroupSchedulingStrategy(placement_group=group)
        return options, count

    @contextlib.asynccontextmanager
    async def place(self, plan: Plan, tasks: Iterable[Task]) -> AsyncIterator[Iterable[Task]]:
        """Yield the tasks with environments that live in workers; end the workers afterwards.

        Raises:
            ConfigError: what makes an environment cannot be pickled, or there is less than the workers need.
            BackendTimeout: no worker, or no placement group, got a place in time.
        """
        workers = await call(_Workers, self, plan, where="ray")
        try:
            placed: Iterable[Task] = map(workers.place, tasks)
            if isinstance(tasks, Sequence):  # all of them are checked before any work
                placed = await call(list, placed, where="ray")
            await workers.wait_for_start(plan.deadline)
            yield placed
        finally:
            await call(workers.close, where="ray")


class _Workers:
    """The worker processes of one rollout."""

    def __init__(self, settings: Ray, plan: Plan) -> None:
        self._ray = connected()
        options, count = settings.find_room(self._ray, plan.deadline)
        actor = self._ray.remote(_Environments).options(
            max_concurrency=max(1000, 4 * plan.concurrency),  # more than all calls at once: closing waits for no step
            max_restarts=-1,
            max_task_retries=0,  # the environments are gone, and no step is taken twice
            **options,
        )
        count = min(count, plan.concurrency)
        self._workers = [_Worker(actor.remote(plan.close_timeout)) for _ in range(count)]
        self._keys = itertools.count()
        self._sent: dict[int, tuple[object, Any]] = {}  # by identity

    async def wait_for_start(self, timeout: float) -> None:
        """Wait until all have started; go on with those that have after ``timeout`` seconds."""
        await wait_done(join_all([worker.up for worker in self._workers]), timeout)
        started = sum(worker.up.done() for worker in self._workers)
        text = f"Ray: {started} of {len(self._workers)} workers started within {timeout:g} s"
        if not started:
            raise BackendTimeout(text)
        if started < len(self._workers):
            _log.warning("%s; the others take part once they have started", text)

    def place(self, task: Task) -> Task:
        """Return the task with an environment that lives in a worker."""
        make = task.make if isinstance(task.make, functools.partial) else functools.partial(task.make)
        where = f"environment {task.name!r}: make"
        if id(make.func) not in self._sent:  # of a set of tasks one for all, and it may hold a data set
            self._sent[id(make.func)] = (make.func, self._put(where, make.func))
        sent = self._sent[id(make.func)][1], self._put(f"{where}: arguments", (make.args, make.keywords))
        return attrs.evolve(task, make=cast("Any", functools.partial(self._open, task.name, sent)))  # it may be awaited

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            with contextlib.suppress(self._ray.exceptions.RayError, ValueError):  # Ray has ended
                self._ray.kill(worker.actor)

    async def _open(self, name: str, sent: Sent) -> Env:
        """Make an environment in the worker with the fewest."""
        while not (worker := min(self._workers, key=_Worker.rank)).up.done():
            await wait_done(worker.up, 1.0)  # or until another one is there
        env = _RemoteEnv(worker, name, next(self._keys))
        try:
            await env.ask("make", name, sent)
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
    """A worker process.

    Attributes:
        actor: Ray's handle.
        keys: of the environments that live there.
        up: done when the process has started, or cannot.
    """

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.keys: set[int] = set()
        self.expect()

    def expect(self) -> None:
        """Wait for the process to start, or to start again: Ray repeats this call alone until it is answered."""
        self.up = self.actor.up.options(max_task_retries=-1).remote().future()

    def rank(self) -> tuple[bool, int]:
        """Return what is lowest for the worker that gets the next environment."""
        return not self.up.done(), len(self.keys)


class _RemoteEnv:
    """An environment that lives in a worker."""

    def __init__(self, worker: _Worker, name: str, key: int) -> None:
        self._worker, self._name, self._key = worker, name, key
        self.tools: Sequence[dict[str, object]] = ()
        worker.keys.add(key)

    async def reset(self, seed: int) -> Observation:
        observation: Observation
        observation, self.tools = await self.ask("reset", seed)
        return observation

    async def step(self, action: Action) -> StepResult:
        return cast("StepResult", await self.ask("step", action))

    async def close(self) -> None:
        try:
            await self.ask("close")
        except EnvLost:
            pass  # and what it held with it
        finally:
            self._worker.keys.discard(self._key)

    async def ask(self, method: str, *args: object) -> Any:
        """Return what a method of the worker gives; what the environment raised there is raised here.

        Raises:
            EnvLost: the worker died.
        """
        from ray.exceptions import RayError, RayTaskError

        try:
            return await getattr(self._worker.actor, method).remote(self._key, *args)
        except RayTaskError as error:
            raise error.cause from error
        except RayError as error:
            self._worker.expect()
            reason = str(error).partition("\n")[0]  # of Ray's paragraph
            raise EnvLost(f"environment {self._name!r}: {method}: its worker process was lost: {reason}") from None


class _Environments:
    """In a worker process: its environments, by key; every method is ``async``, so that none waits for another."""

    def __init__(self, close_timeout: float) -> None:
        self._close_timeout = close_timeout
        self._envs: dict[int, GuardedEnv] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._fetched: dict[Awaitable[Make], Make] = {}  # what makes environments may hold a data set

    async def up(self) -> None:
        """Answer when the process has started."""

    async def make(self, key: int, name: str, sent: Sent) -> None:
        """Make environment ``key`` of task ``name``."""
        await self._run(key, self._make(key, name, *sent))

    async def reset(self, key: int, seed: int) -> tuple[Observation, tuple[dict[str, object], ...]]:
        """Return the first observation, and the tools that the environment offers."""
        env = self._find(key)
        observation = await self._run(key, env.reset(seed))
        _check_pickles(f"environment {env.name!r}: tools", env.tools, EnvError)
        return observation, env.tools

    async def step(self, key: int, action: Action) -> StepResult:
        """Return what the action led to."""
        env = self._find(key)
        result: StepResult = await self._run(key, env.step(action))
        info = dict(result.info)  # which is read-only, and then does not pickle; the other parts were copied
        _check_pickles(f"environment {env.name!r}: step: info", info, EnvError)
        return attrs.evolve(result, info=info)

    async def close(self, key: int) -> None:
        """Cancel what environment ``key`` does, and close it."""
        running = self._calls.get(key)
        if running is not None:
            running.cancel()
            await asyncio.wait([running])
        env = self._envs.pop(key, None)
        problem = None if env is None else await env.close(timeout=self._close_timeout)
        if problem is not None:
            raise _make_sendable(problem)

    def _find(self, key: int) -> GuardedEnv:
        if key not in self._envs:
            raise EnvLost("its worker process died, and Ray started another one")
        return self._envs[key]

    async def _make(self, key: int, name: str, make: Awaitable[Make], arguments: Awaitable[tuple[Any, Any]]) -> None:
        if make not in self._fetched:
            self._fetched[make] = await make
        args, keywords = await arguments
        task = Task(functools.partial(self._fetched[make], *args, **keywords), name)
        env = self._envs[key] = await GuardedEnv.open(task, grace=self._close_timeout / 2)
        if env.is_harness:
            why = "a harness runs its agent against an endpoint in the sampling process"
            what = "is a harness, but executor is Ray(...)"
            raise RolloutFailed(ConfigError(f"environment {name!r}", what, 'executor="threads"', why))

    async def _run(self, key: int, work: Coroutine[object, object, Any]) -> Any:
        """Run a call that ``close`` can cancel."""
        running = asyncio.ensure_future(work)
        self._calls[key] = running
        try:
            return await running
        except Exception as error:
            raise _make_sendable(error) from error
        finally:
            self._calls.pop(key, None)


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
    if where:
        error.add_note(where)
    return error


def _check_pickles(where: str, value: object, kind: type[RlkitError]) -> None:
    """Raise ``kind``, naming the innermost part that cannot be pickled, unless ``value`` can be."""
    from ray import cloudpickle
    from ray.util import inspect_serializability

    try:
        cloudpickle.dumps(value)
    except Exception as error:
        rows = enumerate(value) if isinstance(value, (list, tuple)) else ()
        for key, part in value.items() if isinstance(value, Mapping) else rows:
            _check_pickles(f"{where}[{key!r}]", part, kind)
        _, failures = inspect_serializability(value, print_file=io.StringIO())  # finds what a function holds
        names = sorted(f"{'.'.join(each.path) or 'value'} = {_check.describe(each.obj)}" for each in failures)
        what = f"cannot be pickled ({error}): {', '.join(names)}"
        raise kind(where, what, "values that pickle", "environments run in processes of Ray") from error


def _count_fitting(place: Mapping[str, float], needs: Mapping[str, float]) -> int:
    """Return how many workers fit into a place.

    >>> _count_fitting({"CPU": 3.0}, {"CPU": 2})
    1
    """
    fits = (int(place.get(name, 0) // need) for name, need in needs.items() if need)
    return min(fits, default=max(1, int(place.get("CPU", 1))))


def _find_group(ray: ModuleType, name: str, where: str) -> Any:
    try:
        return ray.util.get_placement_group(name)
    except ValueError as error:
        what = f"is {name!r}, which this Ray cluster does not have"
        raise ConfigError(where, what, "one that your program created") from error


def _start(ray: ModuleType) -> None:
    """Start Ray from a thread that lasts: Linux kills its processes with the thread that they were started from."""
    outcome: concurrent.futures.Future[None] = concurrent.futures.Future()

    def start() -> None:
        try:
            with on_loopback():
                ray.init("local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        except BaseException as error:  # noqa: BLE001  # raised where it is waited for
            outcome.set_exception(error)
        else:
            outcome.set_result(None)
            threading.Event().wait()

    threading.Thread(target=start, name="rlkit-ray", daemon=True).start()
    outcome.result()


@contextlib.contextmanager
def on_loopback() -> Iterator[None]:
    """Make Ray listen on the loopback address, as it does elsewhere than on Linux where this is not set otherwise."""
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
