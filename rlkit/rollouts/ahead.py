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
from rlkit.rollouts.api import Rollouts, planned, rollout
from rlkit.rollouts.plan import Plan
from rlkit.rollouts.policies import Batch, InFlight, InFlightOption, Lent, Policies, Snapshots

__all__ = ["AsyncRollouts", "async_rollouts"]

Play: TypeAlias = Callable[[Sampler, object, int], Awaitable[Rollouts]]
Running: TypeAlias = dict[int, Batch]


def async_rollouts(
    policy: TrainerBackend,
    tasks: TaskSource | Callable[[int], Any],
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
        policy: ``policy.sampler()`` is called in the thread that asks for batches, so that it stands in order with
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
        a thread of their own, so they go on while your code computes or waits.

    Raises:
        ConfigError: an argument is not what it should be.
        UnsupportedError: ``in_flight`` with a policy that has no live sampler; or, at the first batch, True where the
            requests of that end as they began.
        BackendError: while iterating, as for ``rollout``; then no more batches come.

    Off-policy data wants a loss that looks at ``sampling_logprobs`` (ppo, cispo, importance_sampling) or weights from
    ``rlkit.corrections``. Every sample has its policy's ``version``, and ``token_versions``;
    ``metrics["sampler/lag"]`` is the lag in rounds, in flight the mean over tokens, beside "sampler/lag/max" and
    "sampler/mixed", the share of turns that several policies drew.

    Source: bounded staleness, AReaL, arXiv:2505.24298; one step off, arXiv:2410.18252; updates in flight, PipelineRL,
    arXiv:2509.19128.
    """
    _check.require(isinstance(policy, TrainerBackend), "policy", policy, "a backend, as rlkit.connect gives")
    plan = planned(plan, options, async_rollouts)
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
    if in_flight not in (False, True, "requests") or (in_flight != "requests" and not isinstance(in_flight, bool)):
        raise ConfigError("in_flight", f"got {_check.shown(in_flight)}", "True, False or 'requests'")
    _check.flag("recompute", recompute)
    if recompute and not in_flight:
        raise ConfigError("recompute", "is True", "False without in_flight", "a snapshot's keys and values never age")
    policies: Policies = Snapshots(policy, interval)
    if in_flight:
        policies = InFlight(policy, interval, requests=in_flight == "requests", recompute=recompute)

    def simply(sampler: Sampler, batch: object, step: int) -> Awaitable[Rollouts]:
        return rollout(sampler, batch, step=step, plan=plan)

    end = None if steps is None else start + steps
    play = play or simply
    return AsyncRollouts(policies, batches, play, start=start, end=end, max_lag=max_lag, order=order)


class AsyncRollouts(Resource):
    """Batches in the order of steps; see ``async_rollouts``."""

    def __init__(
        self,
        policies: Policies,
        batches: Callable[[int], Any],
        play: Play,
        *,
        start: int,
        end: int | None,
        max_lag: int,
        order: dict[str, object],
    ) -> None:
        self._policies: Policies | None = policies
        self._order = order  # what the order of the tasks depends on, beside the seed
        self._batches = batches
        self._play = play
        self._next = start
        self._end = end
        self._max_lag = max_lag
        self._running: Running = {}
        self._loop = asyncio.new_event_loop()
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
        under_way = {str(step): _record(running.result()) for step, running in self._running.items()}
        versions = {} if self._policies is None else self._policies.state()
        noted: dict[str, dict[str, object]] = {"versions": {**versions}} if versions else {}
        return {"order": self._order, **noted, **under_way}

    def restore(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Become what ``state`` was taken from; the next batch takes the policy as it is then.

        Raises:
            ConfigError: it is of another number of tasks, or of another size of batches, and so of another order.
        """
        order = dict(state.get("order", self._order))
        if order != self._order:
            raise ConfigError("async_rollouts", f"has {self._order}", f"{order}, as the run began with")
        self._running.clear()
        if self._policies is not None:
            self._policies.restore(state.get("versions", {}))
        for step, record in state.items():
            if step in ("order", "versions"):
                continue
            groups = [storage.from_record(group) for group in record["groups"]]
            done: concurrent.futures.Future[Rollouts] = concurrent.futures.Future()
            done.set_result(Rollouts(groups, {name: float(value) for name, value in record["metrics"].items()}))
            self._running[int(step)] = done

    def close(self) -> None:
        """Give up what is under way; every environment is closed before it returns."""
        self._end, self._policies = self._next, None
        self._finalizer()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self.close)

    def _advance(self) -> concurrent.futures.Future[Rollouts] | None:
        """Begin what may be begun, and return the next step's batch."""
        step, policies = self._next, self._policies
        if policies is None or (self._end is not None and step >= self._end):
            return None
        last = step + self._max_lag if self._end is None else min(step + self._max_lag, self._end - 1)
        begun = range(max([step - 1, *self._running]) + 1, last + 1)
        policies.advance(step, begins=bool(begun))
        for due in begun:
            work = _played(self._play, policies.lend(due), self._batches(due), due)
            self._running[due] = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._next += 1
        batch = self._running.pop(step)
        handed = policies.hand(batch, step)
        return batch if handed is None else asyncio.run_coroutine_threadsafe(handed, self._loop)


async def _played(play: Play, lent: Lent, tasks: object, step: int) -> Rollouts:
    sampler, metrics = await lent()
    groups = await play(sampler, tasks, step)
    groups.metrics |= metrics
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
