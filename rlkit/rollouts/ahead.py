"""Sampling ahead of training: batches that are rolled out while earlier ones are trained on."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import weakref
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Self, TypeAlias

from rlkit import _check, storage
from rlkit._resource import Resource
from rlkit.backends.protocol import Sampler, TrainerBackend
from rlkit.envs import Task, TaskSource
from rlkit.errors import ConfigError
from rlkit.futures import Future
from rlkit.rollouts.api import Rollouts, planned, rollout
from rlkit.rollouts.plan import Plan

__all__ = ["AsyncRollouts", "async_rollouts"]

Play: TypeAlias = Callable[[Sampler, object, int], Awaitable[Rollouts]]
Running: TypeAlias = dict[int, "concurrent.futures.Future[Rollouts]"]


def async_rollouts(
    policy: TrainerBackend,
    tasks: TaskSource | Callable[[int], Any],
    *,
    size: int | None = None,
    steps: int | None = None,
    start: int = 0,
    max_lag: int = 1,
    interval: int = 1,
    play: Play | None = None,
    plan: Plan | None = None,
    **options: object,
) -> AsyncRollouts:
    """Return batches of groups, one per step, sampled up to ``max_lag`` steps ahead of the training.

    Asking for the batch of step s takes a snapshot of the policy as it is then and begins with the batch of step
    s + max_lag; it then waits for the batch of step s, which was begun max_lag steps ago. So a batch is at most
    max_lag rounds of training old: 0 is on-policy, 1 one step off. Which snapshot a batch is sampled from does not
    depend on timing, and neither does what comes out.

    ``run.keep("batches", async_rollouts(...))`` makes a run resume exactly: what is under way at a checkpoint is waited
    for and saved with it. Snapshots are not saved: with an ``interval`` above 1 it is exact from checkpoints of steps
    that the interval divides. Without ``keep`` the first batches after a restart are sampled anew, from the restored
    policy.

    Args:
        policy: ``policy.sampler()`` is called in the thread that asks for batches, so that it stands in order with
            the training calls made there.
        tasks: a set of tasks, ``tasks.batch(step, size, seed=plan.seed)`` being those of a step; or a function of the
            step that gives tasks.
        size: tasks per step, >= 1, with a set of tasks and only there.
        steps: how many batches; None: without end.
        start: >= 0, the first step: ``run.step`` in a run.
        max_lag: >= 0.
        interval: >= 1. A fresh snapshot is taken at the steps that it divides and at the first one, so that a batch is
            at most max_lag + interval - 1 rounds old.
        play: an async function of (sampler, the step's tasks, step) that plays a batch; None: ``rollout``.
        plan, options: as for ``rollout``.

    Returns:
        Something to iterate over, with ``for`` or ``async for``, and to close (a context manager). The rollouts run in
        a thread of their own, so they go on while your code computes or waits.

    Raises:
        ConfigError: an argument is not what it should be.
        BackendError: while iterating, as for ``rollout``; then no more batches come.

    Off-policy data wants a loss that looks at ``sampling_logprobs`` (ppo, cispo, importance_sampling) or weights from
    ``rlkit.corrections``. Every sample has its policy's ``version``; ``metrics["sampler/lag"]`` is the lag in steps.

    Source: bounded staleness, AReaL, arXiv:2505.24298; one step off, arXiv:2410.18252.
    """
    _check.require(isinstance(policy, TrainerBackend), "policy", policy, "a backend, as rlkit.connect gives")
    plan = planned(plan, options)
    order: dict[str, object] = {}
    if isinstance(tasks, TaskSource):
        number = _check.integer("size", size, low=1, why="tasks per step")
        source, seed = tasks, plan.seed

        def draw(step: int) -> list[Task]:
            return source.batch(step, number, seed=seed)

        batches: Callable[[int], Any] = draw
        order = {"size": number, "tasks": len(tasks)}
    elif callable(tasks) and not isinstance(tasks, type):
        if size is not None:
            raise ConfigError("size", f"is {size}", "None", "the function of the step decides")
        batches = tasks
    else:
        raise ConfigError("tasks", f"got {_check.shown(tasks)}", "a set of tasks, or a function of the step")
    _check.optional(_check.integer, "steps", steps, low=0)
    for name, value, low in (("start", start, 0), ("max_lag", max_lag, 0), ("interval", interval, 1)):
        _check.integer(name, value, low=low)
    _check.require(play is None or callable(play), "play", play, "an async function")

    def simply(sampler: Sampler, batch: object, step: int) -> Awaitable[Rollouts]:
        return rollout(sampler, batch, step=step, plan=plan)

    end = None if steps is None else start + steps
    play = play or simply
    return AsyncRollouts(policy, batches, play, start=start, end=end, max_lag=max_lag, interval=interval, order=order)


class AsyncRollouts(Resource):
    """Batches in the order of steps; see ``async_rollouts``."""

    def __init__(
        self,
        policy: TrainerBackend,
        batches: Callable[[int], Any],
        play: Play,
        *,
        start: int,
        end: int | None,
        max_lag: int,
        interval: int,
        order: dict[str, object],
    ) -> None:
        self._policy = policy
        self._order = order  # what the order of the tasks depends on, beside the seed
        self._batches = batches
        self._play = play
        self._next = start
        self._end = end
        self._max_lag = max_lag
        self._interval = interval
        self._snapshot: tuple[int, Future[Sampler]] | None = None
        self._running: Running = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_serve, args=(self._loop,), name="rlkit-ahead", daemon=True)
        self._thread.start()
        self._finalizer = weakref.finalize(self, _stop, self._loop, self._running)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Rollouts:
        running = self._advance()
        if running is None:
            self.close()
            raise StopIteration
        try:
            return running.result()
        except BaseException:
            self.close()
            raise

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Rollouts:
        running = self._advance()
        if running is None:
            await asyncio.to_thread(self.close)
            raise StopAsyncIteration
        try:
            return await asyncio.shield(asyncio.wrap_future(running))
        except BaseException:
            await asyncio.to_thread(self.close)
            raise

    def state(self) -> dict[str, dict[str, object]]:
        """Return the batches that were begun and not yet asked for; they are waited for."""
        under_way = {str(step): _record(running.result()) for step, running in self._running.items()}
        return {"order": self._order, **under_way}

    def restore(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Become what ``state`` was taken from; the snapshots are not kept, so the next batch takes a fresh one.

        Raises:
            ConfigError: it is of another number of tasks, or of another size of batches, and so of another order.
        """
        order = dict(state.get("order", self._order))
        if order != self._order:
            raise ConfigError("async_rollouts", f"has {self._order}", f"{order}, as the run began with")
        self._running.clear()
        for step, record in state.items():
            if step == "order":
                continue
            groups = [storage.from_record(group) for group in record["groups"]]
            done: concurrent.futures.Future[Rollouts] = concurrent.futures.Future()
            done.set_result(Rollouts(groups, {name: float(value) for name, value in record["metrics"].items()}))
            self._running[int(step)] = done

    def close(self) -> None:
        """Give up what is under way; every environment is closed before it returns."""
        self._end, self._snapshot = self._next, None
        self._finalizer()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self.close)

    def _advance(self) -> concurrent.futures.Future[Rollouts] | None:
        """Begin what may be begun, and return the next step's batch."""
        step = self._next
        if self._end is not None and step >= self._end:
            return None
        last = step + self._max_lag if self._end is None else min(step + self._max_lag, self._end - 1)
        for due in range(max([step - 1, *self._running]) + 1, last + 1):
            taken = -1 if self._snapshot is None else self._snapshot[0]
            if self._snapshot is None or (step % self._interval == 0 and taken < step):
                self._snapshot = (step, self._policy.sampler())
            since, snapshot = self._snapshot
            work = _played(self._play, snapshot, self._batches(due), due, due - since)
            self._running[due] = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._next += 1
        return self._running.pop(step)


async def _played(play: Play, snapshot: Future[Sampler], tasks: object, step: int, lag: int) -> Rollouts:
    groups = await play(await snapshot, tasks, step)
    groups.metrics["sampler/lag"] = float(lag)
    return groups


def _record(batch: Rollouts) -> dict[str, object]:
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
