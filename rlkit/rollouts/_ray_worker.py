"""What runs in a worker process of Ray: the environments of several episodes, each guarded as in this process."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import TypeVar

import attrs

from rlkit.envs import Action, Env, Harness, Observation, StepResult, Task
from rlkit.envs.calling import Guarded
from rlkit.errors import UnsupportedError

__all__ = ["Arguments", "Make", "Worker"]

T = TypeVar("T")
Make = Callable[..., Env | Harness]
Arguments = tuple[tuple[object, ...], Mapping[str, object]]


class Worker:
    """Opens, steps and closes environments by number; every method is ``async``, so that none waits for another.

    Args:
        close_timeout: seconds that closing an environment may take.
    """

    def __init__(self, close_timeout: float) -> None:
        self._close_timeout = close_timeout
        self._envs: dict[int, Guarded] = {}
        self._calls: dict[int, asyncio.Task[object]] = {}
        self._fetched: dict[Awaitable[Make], Make] = {}  # what makes environments may hold a data set

    async def open(self, key: int, name: str, sent: tuple[Awaitable[Make], Awaitable[Arguments]]) -> None:
        """Make environment ``key``.

        Args:
            key: of later calls.
            name: the task's.
            sent: references to what makes it, and to the arguments.

        Raises:
            UnsupportedError: it is a harness.
            Exception: as ``make`` raised it.
        """
        await self._cancellable(key, self._open(key, name, *sent))

    async def reset(self, key: int, seed: int) -> tuple[Observation, tuple[dict[str, object], ...]]:
        """Return the first observation, and the tools that the environment offers."""
        env = self._envs[key]
        observation = await self._cancellable(key, env.reset(seed))
        return observation, env.tools

    async def step(self, key: int, action: Action) -> StepResult:
        """Return what the action led to."""
        result = await self._cancellable(key, self._envs[key].step(action))
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
            raise problem

    async def _open(self, key: int, name: str, make: Awaitable[Make], arguments: Awaitable[Arguments]) -> None:
        if make not in self._fetched:
            self._fetched[make] = await make
        args, keywords = await arguments
        task = Task(functools.partial(self._fetched[make], *args, **keywords), name)
        env = await Guarded.opened(task, grace=self._close_timeout / 2)
        if env.plays:
            await env.close(timeout=self._close_timeout)
            what = "drives itself, by an endpoint of the process that samples"
            raise UnsupportedError(f"environment {name!r}", what, 'executor="threads"')
        self._envs[key] = env

    async def _cancellable(self, key: int, work: Coroutine[object, object, T]) -> T:
        call = asyncio.ensure_future(work)
        self._calls[key] = call
        try:
            return await call
        finally:
            self._calls.pop(key, None)
