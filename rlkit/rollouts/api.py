"""``rollout``, ``stream`` and ``rollout_sync``: from tasks to groups of trajectories."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Self, TypeVar

from rlkit import _check
from rlkit.backends.protocol import Sampler
from rlkit.envs.protocol import Task
from rlkit.errors import ConfigError
from rlkit.rollouts._asking import Counters
from rlkit.rollouts._plan import Plan
from rlkit.rollouts._runner import Runner
from rlkit.trajectory import Group

__all__ = ["Rollouts", "Stream", "rollout", "rollout_sync", "run_in_thread", "stream"]

T = TypeVar("T")


class Rollouts(list[Group]):
    """Groups, and ``metrics``: what was counted while they were played.

    Those of two rollouts can be added up: counts and seconds are then of both, means over all their episodes.
    """

    def __init__(
        self, groups: Iterable[Group] = (), metrics: Mapping[str, float] | None = None, counters: Counters | None = None
    ) -> None:
        super().__init__(groups)
        self.metrics = dict(metrics or {})
        self._counters = counters

    def __add__(self, other: Any) -> Any:
        mine, theirs = self._counters, getattr(other, "_counters", None)
        if mine is None or theirs is None:
            return super().__add__(other)
        both = mine.together(theirs)
        seconds = self.metrics.get("time/rollout", 0.0) + other.metrics.get("time/rollout", 0.0)
        return Rollouts([*self, *other], both.metrics() | {"time/rollout": seconds}, both)


class Stream:
    """Groups as they are complete: ``async for group in stream(...)``. Made by ``stream``.

    As a context manager (``async with``) it ends what is under way when the block is left. ``metrics`` can be read at
    any time.
    """

    def __init__(self, runner: Runner, counters: Counters) -> None:
        self._groups = runner.groups()
        self.counters = counters

    @property
    def metrics(self) -> dict[str, float]:
        """Return the metrics so far."""
        return self.counters.metrics()

    def __aiter__(self) -> AsyncIterator[Group]:
        return self._groups

    async def aclose(self) -> None:
        """Cancel what is under way; every environment is closed before it returns."""
        await self._groups.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()


def stream(sampler: Sampler, tasks: object, *, step: int = 0, plan: Plan | None = None, **options: object) -> Stream:
    """Yield groups of episodes as they are complete, in whatever order that is.

    Args:
        sampler, tasks, step, plan, options: as for ``rollout``; ``tasks`` may be an endless iterator, which is read as
            there is room.

    Raises:
        DataError, ConfigError: at the call.
        BackendError: while iterating, as for ``rollout``.

    Leaving the loop early favours short episodes: what is complete first is not a fair sample of what was begun.
    """
    _check.integer("step", step, low=0)
    plan = planned(plan, options)
    if not isinstance(sampler, Sampler):
        what = f"got {_check.describe(sampler)}"
        raise ConfigError("sampler", what, "a sampler", "policy.sampler().result(), not the policy")
    counters = Counters()
    return Stream(Runner(sampler, listed(tasks), plan, step, counters), counters)


async def rollout(
    sampler: Sampler, tasks: object, *, step: int = 0, plan: Plan | None = None, **options: object
) -> Rollouts:
    """Play ``n`` episodes of each task, and return them in groups.

    Args:
        sampler: the policy.
        tasks: a sequence or iterator of tasks (``tasks.batch(step, size)``), one task, or an environment's class or
            any other callable that makes one.
        step: >= 0, which step of the run this is. Seeds are a function of the plan's seed, the step, the group's
            number, the member and the turn, never of what arrives first.
        plan: how to play; None: ``Plan()``.
        options: fields of the plan to have otherwise: ``n=4, deadline=60.0, ...``; see ``Plan``.

    Returns:
        A list of the groups that were kept, in the order of the tasks, with ``metrics``: counts per environment
        ("env/<name>/failed", ...), of the sampler ("sampler/tokens", ...), and seconds ("time/env", ...).

    An episode ends when the environment says so, or is truncated at a limit of turns, tokens, context or time. One
    whose environment fails (raises, gives no answer in time, or returns something other than an observation or a
    reward) is in no group's trajectories: it is counted, and is in the group's ``failures``. Whatever ends the
    rollout, all environments have been closed when it does.

    Raises:
        DataError, ConfigError: an argument is not what it should be; nothing was started.
        BackendError: the sampler failed; or no group was left, which the message counts by kind.

    >>> import asyncio, rlkit
    >>> from rlkit.envs import StepResult
    >>> class Parrot:
    ...     def reset(self, seed): return "Say a"
    ...     def step(self, action): return StepResult(reward=float("a" in action), terminated=True)
    ...     def close(self): pass
    >>> sampler = rlkit.connect("toy", seed=0).sampler().result()
    >>> groups = asyncio.run(rollout(sampler, Parrot, n=4, params=rlkit.SamplingParams(max_tokens=8)))
    >>> len(groups), len(groups[0].trajectories), groups.metrics["env/Parrot/failed"]
    (1, 4, 0.0)
    """
    streamed = stream(sampler, tasks, step=step, plan=plan, **options)
    async with streamed:
        groups = [group async for group in streamed]
    return Rollouts(sorted(groups, key=lambda group: group.number), streamed.metrics, streamed.counters)


def rollout_sync(
    sampler: Sampler, tasks: object, *, step: int = 0, plan: Plan | None = None, **options: object
) -> Rollouts:
    """Do as ``rollout``, for code that does not ``await``; it works inside of a running event loop (notebooks) too.

    The rollout runs in its own event loop, in its own thread. A KeyboardInterrupt ends it and closes its
    environments.

    Args:
        sampler, tasks, step, plan, options: as for ``rollout``.

    Raises:
        DataError, ConfigError, BackendError: as for ``rollout``.
    """
    return run_in_thread(rollout(sampler, tasks, step=step, plan=plan, **options))


def run_in_thread(coroutine: Coroutine[object, object, T]) -> T:
    """Return what ``coroutine`` returns, run in a thread with its own event loop."""
    result: list[T] = []
    raised: list[BaseException] = []
    started = threading.Event()
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[T]]] = []

    async def main() -> None:
        task = asyncio.ensure_future(coroutine)
        running.append((asyncio.get_running_loop(), task))
        started.set()
        result.append(await task)

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:  # noqa: BLE001  # raised again in the thread that waits
            raised.append(error)
        finally:
            started.set()

    thread = threading.Thread(target=run, name="rlkit-rollout", daemon=True)
    thread.start()
    try:
        thread.join()
    except BaseException:  # an interrupt: the thread ends in order before it goes on
        started.wait()
        for loop, task in running:
            loop.call_soon_threadsafe(task.cancel)
        thread.join()
        raise
    if raised:
        raise raised[0]
    return result[0]


def planned(plan: Plan | None, options: Mapping[str, object], caller: Callable[..., object] = rollout) -> Plan:
    """Return the plan with ``options`` in it, which ``caller`` was given besides its own."""
    _check.require(plan is None or isinstance(plan, Plan), "plan", plan, "an rlkit.rollouts.Plan")
    own = [p.name for p in inspect.signature(caller).parameters.values() if p.kind is p.KEYWORD_ONLY]
    _check.check_keywords(caller.__name__, Plan, options, more=own)
    return (Plan() if plan is None else plan).with_options(**options)


def listed(tasks: object) -> Iterable[Task]:
    """Return what a user gave as tasks: a list where its length is known, else an iterator."""
    if isinstance(tasks, Task) or callable(tasks):
        tasks = [tasks]
    if hasattr(tasks, "batch") and not isinstance(tasks, Sequence):
        what = f"got {_check.describe(tasks)}, which is infinite"
        raise ConfigError("tasks", what, "tasks", "draw a batch with tasks.batch(step, size)")
    if not isinstance(tasks, Iterable) or isinstance(tasks, (str, bytes, Mapping)):
        raise ConfigError("tasks", f"got {_check.describe(tasks)}", "tasks, or a callable that makes an environment")
    each = (_task(f"tasks[{i}]", task) for i, task in enumerate(tasks))
    if not isinstance(tasks, Sequence):
        return each
    if not tasks:
        raise ConfigError("tasks", "is empty", "at least one task")
    return list(each)


def _task(where: str, task: object) -> Task:
    if isinstance(task, Task):
        return task
    if not callable(task):
        raise ConfigError(where, f"got {_check.describe(task)}", "a Task, or a callable that makes an environment")
    name = getattr(task, "__name__", "env")
    return Task(task, name if name.isidentifier() else "env")
