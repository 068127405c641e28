"""Sampling ahead of training: batches that are rolled out while earlier ones are trained on."""

from __future__ import annotations

import asyncio
import bisect
import concurrent.futures
import functools
import threading
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, Self, TypeAlias, cast

import attrs
import numpy as np

from rlkit import _check, storage
from rlkit._runtime import Resource
from rlkit.backends.protocol import LiveSampling, Sampler, TrainerBackend
from rlkit.envs.protocol import TaskSource
from rlkit.errors import ConfigError, DataError, UnsupportedError
from rlkit.futures import Future
from rlkit.metrics import token_lag
from rlkit.rollouts._plan import Plan
from rlkit.rollouts.api import Rollouts, read_plan, rollout
from rlkit.trajectory import Group, checked_groups

__all__ = ["AsyncRollouts", "Replay", "async_rollouts"]


class Replay:
    """A buffer of groups with a maximum age.

    A group's age is how many optimizer steps the policy is ahead of its oldest sample.

    Args:
        max_age: >= 0; what is older is dropped.
        capacity: groups kept at most, >= 1: the ones added first go first. None: no limit.
        seed: >= 0, of the draws.
        draws: how many times was drawn before: with the same groups, a buffer made with this goes on exactly where
            another one was (``replay.draws``).

    Iterating gives the groups in the order in which they were added, as ``rlkit.storage.append`` takes them.

    >>> from rlkit import Sample
    >>> from rlkit.trajectory import Group, Trajectory, Turn
    >>> def made(version):
    ...     return Group([Trajectory([Turn(Sample([5], [6], [-1.0], version=version))])], number=version)
    >>> replay = Replay(max_age=2)
    >>> replay.add([made(0), made(1), made(2)])
    >>> [group.number for group in replay.sample(5, current=3)], len(replay)
    ([1, 2], 2)
    """

    def __init__(self, *, max_age: int, capacity: int | None = None, seed: int = 0, draws: int = 0) -> None:
        self.max_age = _check.integer("max_age", max_age, low=0)
        self.draws = _check.integer("draws", draws, low=0)
        self._seed = _check.integer("seed", seed, low=0)
        _check.optional(_check.integer, "capacity", capacity, low=1)
        self._groups: deque[Group] = deque(maxlen=capacity)

    def add(self, groups: Iterable[Group] | Group) -> None:
        """Add groups, such as what ``rollout`` returned.

        Raises:
            DataError: something else; nothing was added.
        """
        self._groups.extend(checked_groups(groups))

    def sample(self, size: int, *, current: int) -> list[Group]:
        """Draw up to ``size`` different groups, drawn uniformly, in the order in which they were added.

        Args:
            size: >= 1; where fewer are left, all of them are returned.
            current: the policy's version now; groups that are too old for it are dropped for good.

        Raises:
            DataError: a group is newer than ``current``.
        """
        size = _check.integer("size", size, low=1)
        self.expire(current)
        stream = np.random.SeedSequence(self._seed, spawn_key=(self.draws,))
        self.draws += 1
        groups = list(self._groups)
        chosen = np.random.default_rng(stream).permutation(len(groups))[:size]
        return [groups[i] for i in sorted(chosen.tolist())]

    def expire(self, current: int) -> int:
        """Drop what is too old for version ``current``; return how many groups that were."""
        current = _check.integer("current", current, low=0)
        for i, group in enumerate(self._groups):
            if group.version > current:
                raise DataError(f"groups[{i}]", f"has the version {group.version}", f"at most current={current}")
        young = [group for group in self._groups if current - group.version <= self.max_age]
        dropped = len(self._groups) - len(young)
        self._groups.clear()
        self._groups.extend(young)
        return dropped

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(list(self._groups))


Batch: TypeAlias = "concurrent.futures.Future[Rollouts]"
InFlightOption: TypeAlias = bool | Literal["requests"]


class Lease(NamedTuple):
    """What a batch is sampled with: the sampler, an update of it to wait for, and the step of the newest of the two."""

    sampler: Future[Any]  # a Sampler
    update: Future[int] | None
    since: int


@attrs.define(eq=False)
class Snapshots:
    """A snapshot at the steps that ``interval`` divides, at the first one, and after a checkpoint."""

    _policy: TrainerBackend
    _interval: int
    _taken: Lease | None = attrs.field(default=None, init=False)

    def advance(self, step: int, *, begins: bool) -> Lease:
        """Return what batches that begin now are sampled with: ``step`` is asked for, in the thread that trains.

        ``begins`` says whether any do.
        """
        if begins and (self._taken is None or (step % self._interval == 0 and self._taken.since < step)):
            self._taken = Lease(self._policy.sampler(), None, step)
        return cast("Lease", self._taken)  # None where no batch begins

    def start(self, sampler: Any, lease: Lease, due: int) -> dict[str, float]:  # noqa: ARG002  # as that of InFlight
        """Check the sampler of the batch of step ``due``; return what its metrics gain."""
        return {"sampler/lag": float(due - lease.since)}

    def finish(self, batch: Batch, lease: Lease, step: int) -> None:
        """Return what waits for the batch of ``step``, which is asked for, and completes its metrics; None: itself."""

    def state(self) -> dict[str, int]:
        """Return nothing: a run that goes on has no older snapshot, so the one that goes through takes a fresh one."""
        self._taken = None
        return {}

    def restore(self, state: Mapping[str, int]) -> None:  # noqa: ARG002  # as above
        """Restore the state that ``state`` was taken from."""
        self._taken = None


@attrs.define(eq=False)
class InFlight:
    """A live sampler, updated at the steps that ``interval`` divides; what was begun is sampled with it, too.

    Args:
        policy: it is a ``LiveSampling``.
        interval: >= 1.
        requests: whether it will do that requests end under the policy with which they began.
        recompute: as for ``LiveSampling.live_sampler``.
    """

    _policy: LiveSampling
    _interval: int
    _requests: bool
    _recompute: bool
    _lease: Lease | None = attrs.field(default=None, init=False)
    _versions: dict[int, int] = attrs.field(factory=dict, init=False)  # step of an update -> version since then

    def advance(self, step: int, *, begins: bool) -> Lease:  # noqa: ARG002  # as that of Snapshots
        """See ``Snapshots``."""
        if self._lease is None:
            self._lease = Lease(self._policy.live_sampler(recompute=self._recompute), None, step)
        elif step % self._interval == 0:
            live = self._lease.sampler
            self._lease = Lease(live, live.result().update(), step)
        return self._lease

    def start(self, sampler: Any, lease: Lease, due: int) -> dict[str, float]:  # noqa: ARG002  # as above
        """See ``Snapshots``."""
        if sampler.switches != "token" and not self._requests:
            raise UnsupportedError(
                f"async_rollouts(in_flight=True): {type(self._policy).__name__} finishes a request with the policy "
                "that began it; use in_flight='requests', so that later turns take the newer one"
            )
        return {}

    async def finish(self, batch: Batch, lease: Lease, step: int) -> Rollouts:
        """See ``Snapshots``."""
        groups = await asyncio.wrap_future(batch)
        self._versions[lease.since] = (await lease.sampler).version if lease.update is None else await lease.update
        groups.metrics |= self._lag(groups, step)
        return groups

    def state(self) -> dict[str, int]:
        """Return the versions since each update."""
        return {str(step): version for step, version in self._versions.items()}

    def restore(self, state: Mapping[str, int]) -> None:
        """See ``Snapshots``."""
        self._versions = {int(step): int(version) for step, version in state.items()}

    def _lag(self, groups: Rollouts, step: int) -> dict[str, float]:
        """Return how old the tokens are, in rounds, and the share of turns that several policies drew."""
        steps, versions = list(self._versions), list(self._versions.values())
        rounds = []
        for turn in (turn for group in groups for trajectory in group.trajectories for turn in trajectory.turns):
            drawn = turn.sample.token_versions
            rounds.append(np.array([steps[max(0, bisect.bisect_right(versions, v) - 1)] for v in drawn], np.int64))
        if not any(x.size for x in rounds):
            return {}
        lag = token_lag(versions=rounds, current=step)
        return {"sampler/lag": lag["mean"], "sampler/lag/max": lag["max"], "sampler/mixed": lag["mixed"]}


SamplerSource: TypeAlias = Snapshots | InFlight
Play: TypeAlias = Callable[[Sampler, object, int], Awaitable[Rollouts]]
Batches: TypeAlias = Callable[[int], object]  # step -> its tasks
Running: TypeAlias = dict[int, Batch]


def async_rollouts(
    policy: TrainerBackend,
    tasks: TaskSource | Batches,
    *,
    size: int | None = None,
    steps: int | None = None,
    start: int = 0,
    max_lag: int = 1,
    interval: int = 1,
    in_flight: InFlightOption = False,
    recompute: bool = False,
    play: Play | None = None,
    plan: Plan | None = None,
    **options: object,
) -> AsyncRollouts:
    """Return batches of groups, one per step, sampled up to ``max_lag`` steps ahead of the training.

    Asking for the batch of step s takes a snapshot of the policy as it is then and begins with the batch of step
    s + max_lag; it then waits for the batch of step s, which was begun max_lag steps ago. So a batch is at most
    max_lag rounds of training old: 0 is on-policy, 1 one step off. Which snapshot a batch is sampled from does not
    depend on timing, and neither does what comes out.

    With ``in_flight`` batches that are under way go on under the newer policy each time that one is asked for: their
    requests pause between two tokens (``LiveSampling``). When a batch begins, in which order, and which seeds it has is
    as before, and so is the bound: no token is older than the policy with which its batch began. A batch that is not
    complete when it is asked for is waited for, and what is left of it is drawn by the newest policy; nothing is given
    up. Which token is drawn by which version depends on timing.

    ``run.keep("batches", async_rollouts(...))`` makes a run resume exactly: what is under way at a checkpoint is waited
    for and saved with it. The snapshot is not saved: after a checkpoint the next batch takes a fresh one, in a run that
    goes through as in one that is resumed, so that an ``interval`` above 1 begins anew there. In flight, the batches
    that were under way come back as they are, with their versions: none is lost or played twice. Without ``keep`` the
    first batches after a restart are sampled anew, from the restored policy.

    Args:
        policy: ``policy.sampler()`` is called in the thread that asks for batches, so that it keeps its order with
            the training calls made there.
        tasks: a set of tasks, ``tasks.batch(step, size, seed=plan.seed)`` being those of a step; or a function of the
            step that gives tasks.
        size: tasks per step, >= 1, with a set of tasks and only there.
        steps: how many batches; None: without end.
        start: >= 0, the first step: ``run.step`` in a run.
        max_lag: >= 0.
        interval: >= 1. A fresh snapshot is taken (the live sampler updated) at the steps that it divides and at the
            first one, so that a batch is at most max_lag + interval - 1 rounds old.
        in_flight: True: what is under way goes on under newer policies, token by token. "requests" will do with those
            to which requests end as they began, such as Tinker's: then later turns and requests take the newer.
        recompute: in flight, compute keys and values anew at each update; see ``LiveSampling``.
        play: an async function of (sampler, the step's tasks, step) that plays a batch; None: ``rollout``.
        plan, options: as for ``rollout``.

    Returns:
        Something to iterate over, with ``for`` or ``async for``, and to close (a context manager). The rollouts run in
        their own thread, so they go on while your code computes or waits.

    Raises:
        ConfigError: an argument is not what it should be.
        UnsupportedError: ``in_flight`` with a policy that has no live sampler; or, at the first batch, True where the
            requests of that end as they began.
        BackendError: while iterating, as for ``rollout``; then no more batches come.

    Off-policy data wants a loss that looks at ``sampling_logprobs`` (ppo, cispo, importance_sampling) or weights from
    ``rlkit.corrections``. Every sample has its policy's ``version``, and ``token_versions``;
    ``metrics["sampler/lag"]`` is the lag in rounds, in flight the mean over tokens, besides "sampler/lag/max" and
    "sampler/mixed", the share of turns that several policies drew.

    Source: bounded staleness, AReaL, arXiv:2505.24298; one step off, arXiv:2410.18252; updates in flight, PipelineRL,
    arXiv:2509.19128.
    """
    _check.require(isinstance(policy, TrainerBackend), "policy", policy, "a backend, as rlkit.connect returns")
    plan = read_plan(plan, options, async_rollouts)
    batches, order = _read_tasks(tasks, size, plan.seed)
    _check.optional(_check.integer, "steps", steps, low=0)
    for name, value, low in (("start", start, 0), ("max_lag", max_lag, 0), ("interval", interval, 1)):
        _check.integer(name, value, low=low)
    _check.require(play is None or callable(play), "play", play, "an async function")
    source = _open_source(policy, interval, in_flight, recompute=recompute)
    end = None if steps is None else start + steps
    play = play or functools.partial(_play_simply, plan)
    return AsyncRollouts(source, batches, play, start=start, end=end, max_lag=max_lag, order=order)


def _read_tasks(tasks: TaskSource | Batches, size: int | None, seed: int) -> tuple[Batches, dict[str, object]]:
    """Return a function of the step that gives tasks, and what their order depends on besides the seed."""
    if isinstance(tasks, TaskSource):
        number = _check.integer("size", size, low=1, why="tasks per step")
        return lambda step: tasks.batch(step, number, seed=seed), {"size": number, "tasks": len(tasks)}
    if not callable(tasks) or isinstance(tasks, type):
        raise ConfigError("tasks", f"got {_check.describe(tasks)}", "a set of tasks, or a function of the step")
    if size is not None:
        raise ConfigError("size", f"is {size}", "None", "the function of the step sets the size")
    return tasks, {}


def _open_source(policy: TrainerBackend, interval: int, in_flight: InFlightOption, *, recompute: bool) -> SamplerSource:
    if in_flight not in (False, True, "requests") or (in_flight != "requests" and not isinstance(in_flight, bool)):
        raise ConfigError("in_flight", f"got {_check.describe(in_flight)}", "True, False or 'requests'")
    _check.flag("recompute", recompute)
    if recompute and not in_flight:
        raise ConfigError("recompute", "is True", "False without in_flight", "a snapshot's cache never becomes stale")
    if not in_flight:
        return Snapshots(policy, interval)
    if not isinstance(policy, LiveSampling):
        text = f"{type(policy).__name__} has no live_sampler; omit in_flight to sample from snapshots"
        raise UnsupportedError(f"async_rollouts(in_flight): {text}")
    return InFlight(policy, interval, in_flight == "requests", recompute)


def _play_simply(plan: Plan, sampler: Sampler, batch: object, step: int) -> Awaitable[Rollouts]:
    return rollout(sampler, batch, step=step, plan=plan)


@attrs.define(eq=False, repr=False, slots=False)
class AsyncRollouts(Resource):
    """Batches in the order of steps; see ``async_rollouts``."""

    _source: SamplerSource | None
    _batches: Batches
    _play: Play
    _next: int = attrs.field(alias="start", kw_only=True)
    _end: int | None = attrs.field(kw_only=True)
    _max_lag: int = attrs.field(kw_only=True)
    _order: dict[str, object] = attrs.field(kw_only=True)  # what the order of the tasks depends on, besides the seed
    _running: Running = attrs.field(factory=dict, init=False)
    _loop: asyncio.AbstractEventLoop = attrs.field(factory=asyncio.new_event_loop, init=False)

    def __attrs_post_init__(self) -> None:
        self._thread = threading.Thread(target=_serve, args=(self._loop,), name="rlkit-ahead", daemon=True)
        self._thread.start()
        self._finalizer = weakref.finalize(self, _stop, self._loop, self._running)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Rollouts:
        try:
            running = self._advance()
            if running is not None:
                return running.result()
        except BaseException:
            self.close()
            raise
        self.close()
        raise StopIteration

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Rollouts:
        try:
            running = self._advance()
            if running is not None:
                return await asyncio.shield(asyncio.wrap_future(running))
        except BaseException:
            await asyncio.to_thread(self.close)
            raise
        await asyncio.to_thread(self.close)
        raise StopAsyncIteration

    def state(self) -> dict[str, dict[str, object]]:
        """Return the batches that were begun and not yet asked for; they are waited for."""
        under_way = {str(step): _to_record(running.result()) for step, running in self._running.items()}
        versions = {} if self._source is None else self._source.state()
        noted: dict[str, dict[str, object]] = {"versions": {**versions}} if versions else {}
        return {"order": self._order, **noted, **under_way}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state that ``state`` was taken from; the next batch takes the policy as it is then.

        Raises:
            ConfigError: it is of another number of tasks, or of another size of batches, and so of another order.
        """
        order = dict(state.get("order", {}))
        if order != self._order:
            raise ConfigError("async_rollouts", f"has {self._order}", f"{order}, the order of the run's beginning")
        self._running.clear()
        if self._source is not None:
            self._source.restore(state.get("versions", {}))
        for step, record in state.items():
            if step in ("order", "versions"):
                continue
            groups = [storage.from_record(group) for group in record["groups"]]
            done: concurrent.futures.Future[Rollouts] = concurrent.futures.Future()
            done.set_result(Rollouts(groups, {name: float(value) for name, value in record["metrics"].items()}))
            self._running[int(step)] = done

    def close(self) -> None:
        """Cancel what is under way; every environment is closed before it returns."""
        self._end, self._source = self._next, None
        self._finalizer()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self.close)

    def _advance(self) -> concurrent.futures.Future[Rollouts] | None:
        """Begin what may be begun, and return the next step's batch."""
        step, source = self._next, self._source
        if source is None or (self._end is not None and step >= self._end):
            return None
        last = step + self._max_lag if self._end is None else min(step + self._max_lag, self._end - 1)
        begun = range(max([step - 1, *self._running]) + 1, last + 1)
        lease = source.advance(step, begins=bool(begun))
        for due in begun:
            work = _play_batch(self._play, source, lease, self._batches(due), due)
            self._running[due] = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._next += 1
        batch = self._running.pop(step)
        finishing = source.finish(batch, lease, step)
        return batch if finishing is None else asyncio.run_coroutine_threadsafe(finishing, self._loop)


async def _play_batch(play: Play, source: SamplerSource, lease: Lease, tasks: object, step: int) -> Rollouts:
    sampler = await lease.sampler
    metrics = source.start(sampler, lease, step)
    if lease.update is not None:
        await lease.update
    groups = await play(sampler, tasks, step)
    groups.metrics |= metrics
    return groups


def _to_record(batch: Rollouts) -> dict[str, object]:
    metrics = {name: str(value) for name, value in batch.metrics.items()}  # text, since JSON has no NaN
    return {"groups": [storage.to_record(group) for group in batch], "metrics": metrics}


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


def _stop(loop: asyncio.AbstractEventLoop, running: Running) -> None:
    running.clear()
    if not loop.is_closed():
        loop.call_soon_threadsafe(loop.stop)
