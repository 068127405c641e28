"""Sampling ahead of training: batches that are rolled out while earlier ones are trained on."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import weakref
from collections.abc import Callable
from typing import Any, Self

from rlkit import _check
from rlkit.backends.protocol import Sampler, TrainerBackend
from rlkit.envs import TaskSource
from rlkit.errors import ConfigError
from rlkit.futures import Future
from rlkit.rollouts.api import Rollouts, planned, rollout
from rlkit.rollouts.plan import Plan

__all__ = ["AsyncRollouts", "async_rollouts"]


def async_rollouts(
    policy: TrainerBackend,
    tasks: TaskSource | Callable[[int], Any],
    *,
    size: int | None = None,
    steps: int | None = None,
    start: int = 0,
    max_lag: int = 1,
    plan: Plan | None = None,
    **options: Any,
) -> AsyncRollouts:
    """Batches of groups, one per step, sampled up to ``max_lag`` steps ahead of the training.

    Asking for the batch of step s takes a snapshot of the policy as it is then and begins with the batch of step
    s + max_lag; it then waits for the batch of step s, which was begun max_lag steps ago. So a batch is at most
    max_lag rounds of training old: 0 is on-policy, 1 one step off. Which snapshot a batch is sampled from does not
    depend on timing, and neither does what comes out.

    Args:
        policy: ``policy.sampler()`` is called in the thread that asks for batches, so that it stands in order with
            the training calls made there.
        tasks: a set of tasks, ``tasks.batch(step, size, seed=plan.seed)`` being those of a step; or a function of the
            step that gives tasks.
        size: tasks per step, >= 1, with a set of tasks and only there.
        steps: how many batches; None: without end.
        start: >= 0, the first step. After a restart the first batches come from the policy at the start, not from
            the older ones that they would have come from.
        max_lag: >= 0.
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
    if not isinstance(policy, TrainerBackend):
        raise ConfigError(_check.problem("policy", f"got {_check.shown(policy)}", "a backend, as rlkit.connect gives"))
    plan = planned(plan, options)
    if isinstance(tasks, TaskSource):
        number = _check.integer("size", size, low=1, why="tasks per step")
        source, seed = tasks, plan.seed

        def of(step: int) -> Any:
            return source.batch(step, number, seed=seed)

        batches: Callable[[int], Any] = of
    elif callable(tasks) and not isinstance(tasks, type):
        if size is not None:
            raise ConfigError(_check.problem("size", f"is {size}", "None", "the function of the step decides"))
        batches = tasks
    else:
        expected = "a set of tasks, or a function of the step"
        raise ConfigError(_check.problem("tasks", f"got {_check.shown(tasks)}", expected))
    if steps is not None:
        _check.integer("steps", steps, low=1)
    _check.integer("start", start, low=0)
    _check.integer("max_lag", max_lag, low=0)
    end = None if steps is None else start + steps
    return AsyncRollouts(policy, batches, plan, start, end, max_lag)


class AsyncRollouts:
    """Batches in the order of steps; see ``async_rollouts``."""

    def __init__(
        self,
        policy: TrainerBackend,
        batches: Callable[[int], Any],
        plan: Plan,
        start: int,
        end: int | None,
        max_lag: int,
    ) -> None:
        self._policy = policy
        self._batches = batches
        self._plan = plan
        self._next = self._begun = start
        self._end = end
        self._max_lag = max_lag
        self._running: dict[int, concurrent.futures.Future[Rollouts]] = {}
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

    def close(self) -> None:
        """Gives up what is under way; every environment is closed before it returns."""
        self._end = self._next
        self._finalizer()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self.close)

    def _advance(self) -> concurrent.futures.Future[Rollouts] | None:
        """Begins with what may be begun, and gives the next step's batch."""
        if self._end is not None and self._next >= self._end:
            return None
        step = self._next
        while self._begun <= step + self._max_lag and (self._end is None or self._begun < self._end):
            batch, snapshot = self._batches(self._begun), self._policy.sampler()
            work = _played(snapshot, batch, self._begun, self._begun - step, self._plan)
            self._running[self._begun] = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._begun += 1
        self._next += 1
        return self._running.pop(step)


async def _played(snapshot: Future[Sampler], tasks: Any, step: int, lag: int, plan: Plan) -> Rollouts:
    with await snapshot as sampler:
        groups = await rollout(sampler, tasks, step=step, plan=plan)
    groups.metrics["sampler/lag"] = float(lag)
    return groups


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


def _stop(loop: asyncio.AbstractEventLoop, running: dict[int, Any]) -> None:
    running.clear()
    if not loop.is_closed():
        loop.call_soon_threadsafe(loop.stop)
