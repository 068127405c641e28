"""``rollout``, ``stream`` and ``rollout_sync``: from tasks to groups of trajectories.

Tasks are read as there is room, a bounded number of episodes is played at a time, and each group is handed over when it
is complete.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import inspect
import logging
import math
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar

import attrs

from rlkit import _check
from rlkit.backends.protocol import Sampler
from rlkit.envs.calling import CallLimit, call, scores
from rlkit.envs.protocol import Task
from rlkit.errors import BackendError, BackendTimeout, ConfigError, EnvTimeout
from rlkit.rollouts._counters import Counters, Progress
from rlkit.rollouts._episode import Episode, Shared, describe_error, require_reward
from rlkit.rollouts._plan import Plan, pauses, start_seed
from rlkit.rollouts._requests import FirstTurns, Requests, RolloutFailed
from rlkit.trajectory import Failure, Group, Trajectory, Turn

if TYPE_CHECKING:
    from rlkit.chat import Chat

__all__ = ["Rollouts", "Stream", "rollout", "rollout_sync", "run_in_thread", "stream"]

T = TypeVar("T")
_log = logging.getLogger(__name__)


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
        both = mine.merge(theirs)
        seconds = self.metrics.get("time/rollout", 0.0) + other.metrics.get("time/rollout", 0.0)
        return Rollouts([*self, *other], both.metrics() | {"time/rollout": seconds}, both)


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
    plan = read_plan(plan, options)
    if not isinstance(sampler, Sampler):
        what = f"got {_check.describe(sampler)}"
        raise ConfigError("sampler", what, "a sampler", "policy.sampler().result(), not the policy")
    return Stream(sampler, read_tasks(tasks), plan, step)


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


_START = 2**31  # the member's number where a whole group is meant


@attrs.define(eq=False)
class _PendingGroup:
    """A group on its way."""

    number: int
    task: Task
    plan: Plan  # with the task's settings
    first_turns: FirstTurns | None
    running: int  # members that have not ended
    trajectories: dict[int, Trajectory] = attrs.field(factory=dict)
    failures: list[Failure] = attrs.field(factory=list)

    def group(self, step: int) -> Group:
        return Group(
            [self.trajectories[member] for member in sorted(self.trajectories)],
            failures=sorted(self.failures, key=lambda failure: failure.member),
            env=self.task.name,
            index=self.task.index,
            number=self.number,
            step=step,
        )

    def is_large_enough(self) -> bool:
        return len(self.trajectories) >= min(self.plan.n, 2 if self.plan.min_n is None else self.plan.min_n)


class Stream:
    """Groups as they are complete: ``async for group in stream(...)``. Made by ``stream``.

    As a context manager (``async with``) it ends what is under way when the block is left. ``metrics`` can be read at
    any time.
    """

    def __init__(self, sampler: Sampler, tasks: Iterable[Task], plan: Plan, step: int) -> None:
        if plan.share < 1.0 and not isinstance(tasks, Sequence):
            raise ConfigError("Plan.share", f"is {plan.share}", "1.0", "the number of tasks is unknown")
        self.counters = Counters()
        self._tasks, self._plan, self._step, self._sampler = tasks, plan, step, sampler
        self._total = sum(task.settings.n or plan.n for task in tasks) if isinstance(tasks, Sequence) else None
        self._stop_after = math.inf if plan.share == 1.0 else math.ceil(plan.share * (self._total or 0))
        self._finished = self._kept = 0
        self._pending: dict[int, _PendingGroup] = {}
        self._members: set[asyncio.Task[None]] = set()
        self._failures: list[Failure] = []
        self._cause: Exception | None = None  # of the first of them
        self._groups = self._play()

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

    async def _play(self) -> AsyncGenerator[Group, None]:
        """Yield the groups that are kept, as they are complete.

        Ending it early gives up what is under way. Whatever ends it, environments are closed before it returns.

        Raises:
            BackendError: the sampler failed, or no group was left at all.
        """
        plan, computing = self._plan, CallLimit(2, 0.25)
        self._ready: asyncio.Queue[Group | None] = asyncio.Queue()
        self._slots = asyncio.Semaphore(plan.concurrency)
        self._room = asyncio.Semaphore(2 * plan.concurrency)  # groups that were not taken yet
        requests = Requests(self._sampler, plan, self.counters, computing)
        chat = await call(self._make_chat, where="chat")  # in a thread: it may import and compile
        self._shared = Shared(plan, self._step, chat, requests, self.counters, computing, playing=CallLimit(8, 0.02))
        self.counters.mean("sampler/version", self._sampler.version)
        with Progress(self._total, plan.progress) as self._progress:
            supervisor = asyncio.create_task(self._supervise())
            supervisor.add_done_callback(lambda _: self._ready.put_nowait(None))
            try:
                while (group := await self._ready.get()) is not None:
                    self._room.release()
                    yield group
                await supervisor
            except BaseExceptionGroup as failed:
                error = _first(failed)
                raise error from error.__cause__
            finally:
                supervisor.cancel()
                await asyncio.wait([supervisor])
                if not supervisor.cancelled():
                    supervisor.exception()  # whoever reads on has been told
                if self._shared.agents is not None:
                    await self._shared.agents.close()

    def _make_chat(self) -> Chat:
        if self._plan.chat is not None:
            return self._plan.chat
        from rlkit.chat import Chat

        return Chat(self._sampler.tokenizer)

    async def _supervise(self) -> None:
        executor, tasks = self._plan.executor, self._tasks
        try:
            placed = contextlib.nullcontext(tasks) if isinstance(executor, str) else executor.place(self._plan, tasks)
            async with placed as tasks, asyncio.TaskGroup() as members:
                for number, task in enumerate(tasks):
                    if self._finished < self._stop_after:  # room is not given back after that
                        await self._room.acquire()
                    await self._begin_group(members, number, task)
        finally:
            for pending in self._pending.values():
                if pending.first_turns is not None:
                    pending.first_turns.give_up()
        for pending in list(self._pending.values()):  # those cut short by share
            await self._finish_group(pending)
        if not self._kept and self._failures:
            raise self._nothing_left() from self._cause

    async def _begin_group(self, members: asyncio.TaskGroup, number: int, task: Task) -> None:
        """Start a group's members as slots become free; none any more once enough episodes have ended."""
        plan = task.settings.over(self._plan)
        first_turns = None
        if plan.shared_start and plan.n > 1:
            place = (plan.seed, self._step, number)
            first_turns = FirstTurns(self._shared.requests, plan.n, start_seed(*place), pauses(*place, _START))
        pending = self._pending[number] = _PendingGroup(number, task, plan, first_turns, plan.n)
        for member in range(plan.n):
            await self._slots.acquire()
            if self._finished >= self._stop_after:
                self._slots.release()
                self.counters.add(f"env/{task.name}/abandoned", plan.n - member)
                return
            members.create_task(self._play_member(pending, member))

    async def _play_member(self, pending: _PendingGroup, member: int) -> None:
        task, playing = pending.task, asyncio.current_task()
        if self._finished >= self._stop_after:  # since it was created
            self._slots.release()
            self.counters.add(f"env/{task.name}/abandoned")
            return
        episode = Episode(self._shared, task, pending.plan, pending.number, member, pending.first_turns)
        assert playing is not None  # noqa: S101  # this is a task
        self._members.add(playing)  # now that it can be cancelled: before, it would end without a trace
        try:
            outcome = await episode.play()
        except BaseException:
            self.counters.add(f"env/{task.name}/abandoned")
            raise
        finally:
            self._slots.release()
            self._members.discard(playing)
        if isinstance(outcome, Failure):
            self._add_failure(pending, outcome, episode.error)
        else:
            pending.trajectories[member] = outcome
            if task.score is None:
                self.counters.trajectory(outcome)
        self._finished += 1
        last = self._finished == self._stop_after
        self._progress.episode(failed=len(self._failures))
        pending.running -= 1
        if pending.running == 0:
            await self._finish_group(pending)
        if last:  # cancelled once: a member that is closing its environment is left to it
            self._room.release()  # the next group is waited for no longer
            for other in self._members:
                other.cancel()

    def _add_failure(self, pending: _PendingGroup, failure: Failure, error: Exception | None) -> None:
        self.counters.failure(failure)
        if self.counters.sums[f"env/{failure.env}/failed/{failure.kind}"] == 1:
            text = "%s: an episode failed in %s, %s: %s; env/%s/failed counts them"
            _log.warning(text, failure.env, failure.where, failure.kind, failure.message, failure.env)
        pending.failures.append(failure)
        self._failures.append(failure)
        self._cause = self._cause or error

    async def _score(self, pending: _PendingGroup) -> None:
        """Score a group's episodes together; if that cannot be done, all of them have failed."""
        task, plan = pending.task, pending.plan
        timeout = plan.deadline / 2 if plan.call_timeout is None else plan.call_timeout
        try:
            members = dict(sorted(pending.trajectories.items()))
            pending.trajectories = await _add_scores(task, members, self._shared.chat, timeout=timeout)
        except Exception as error:  # noqa: BLE001  # the score is the environment's, and so are its faults
            kind = "timeout" if isinstance(error, EnvTimeout) else type(error).__name__
            for member, trajectory in pending.trajectories.items():
                turns = len(trajectory.turns)
                failure = Failure(task.name, kind, describe_error(error), "score", turns, member)
                self._add_failure(pending, failure, error)
            pending.trajectories = {}
        for member, trajectory in list(pending.trajectories.items()):
            outcome = require_reward(trajectory, member)
            if isinstance(outcome, Failure):
                self._add_failure(pending, outcome, None)
                del pending.trajectories[member]
            else:
                self.counters.trajectory(trajectory)

    async def _finish_group(self, pending: _PendingGroup) -> None:
        """Hand a group over, if enough of it is there."""
        if pending.task.score is not None:
            await self._score(pending)
        del self._pending[pending.number]
        group, kept = pending.group(self._step), pending.is_large_enough()
        self.counters.group(group, kept=kept)
        if kept:
            self._kept += 1
            self._ready.put_nowait(group)
        else:
            self._room.release()

    def _nothing_left(self) -> BackendError:
        kinds = [f"{failure.kind} in {failure.where}" for failure in self._failures]
        counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
        first = self._failures[0].message
        text = f"rollout: no group is left; {len(kinds)} episodes failed: {counts}; the first error: {first}"
        asked = all(failure.kind == "timeout" and failure.where == "sampler" for failure in self._failures)
        return BackendTimeout(text) if asked else BackendError(text)


def _first(failed: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return why the rollout ends, as it was raised; a single error as it is; else all."""
    leaf: BaseException = failed.subgroup(RolloutFailed) or failed
    while isinstance(leaf, BaseExceptionGroup) and (leaf is not failed or len(failed.exceptions) == 1):
        leaf = leaf.exceptions[0]
    return leaf.error if isinstance(leaf, RolloutFailed) else leaf


async def _add_scores(
    task: Task, members: Mapping[int, Trajectory], chat: Chat, *, timeout: float
) -> dict[int, Trajectory]:
    """Return the trajectories, with what ``task.score`` gives for their last actions added to their last rewards.

    Raises:
        EnvError: the scores are not one finite number per trajectory.
        EnvTimeout: they did not come within ``timeout`` seconds.
        Exception: whatever the function raised.
    """
    last = [trajectory.turns[-1] for trajectory in members.values()]
    reads = [functools.partial(chat.action, prompt=turn.prompt) for turn in last]
    actions = [await call(read, t.tokens, t.stop_reason, where="chat") for read, t in zip(reads, last, strict=True)]
    rewards = await scores(task, actions, timeout=timeout)
    return {
        member: attrs.evolve(trajectory, turns=(*trajectory.turns[:-1], _add_reward(turn, reward)))
        for (member, trajectory), turn, reward in zip(members.items(), last, rewards, strict=True)
    }


def _add_reward(turn: Turn, reward: float | None) -> Turn:
    """Return the turn with a reward added to its last one, or as its only one; None adds nothing."""
    if reward is None:
        return turn
    if turn.rewards is None:
        return attrs.evolve(turn, reward=turn.reward + reward)
    last = turn.rewards[-1] if turn.rewards else 0.0
    return attrs.evolve(turn, reward=0.0, rewards=(*turn.rewards[:-1], last + reward))


def run_in_thread(coroutine: Coroutine[object, object, T]) -> T:
    """Return what ``coroutine`` returns, run in a thread with its own event loop."""
    result: concurrent.futures.Future[T] = concurrent.futures.Future()
    begun: concurrent.futures.Future[asyncio.Task[T]] = concurrent.futures.Future()

    async def main() -> T:
        begun.set_result(asyncio.ensure_future(coroutine))
        return await begun.result()

    def run() -> None:
        try:
            result.set_result(asyncio.run(main()))
        except BaseException as error:  # noqa: BLE001  # raised again in the thread that waits
            begun.cancel()
            result.set_exception(error)

    thread = threading.Thread(target=run, name="rlkit-rollout", daemon=True)
    thread.start()
    try:
        thread.join()
    except BaseException:  # an interrupt: the thread ends in order before it goes on
        with contextlib.suppress(concurrent.futures.CancelledError, RuntimeError):  # it did not begin, or is over
            task = begun.result()
            task.get_loop().call_soon_threadsafe(task.cancel)
        thread.join()
        raise
    return result.result()


def read_plan(plan: Plan | None, options: Mapping[str, object], caller: Callable[..., object] = rollout) -> Plan:
    """Return the plan with ``options`` in it, which ``caller`` was given besides its own."""
    _check.require(plan is None or isinstance(plan, Plan), "plan", plan, "an rlkit.rollouts.Plan")
    own = [p.name for p in inspect.signature(caller).parameters.values() if p.kind is p.KEYWORD_ONLY]
    _check.check_keywords(caller.__name__, Plan, options, more=own)
    return (Plan() if plan is None else plan).with_options(**options)


def read_tasks(tasks: object) -> Iterable[Task]:
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
