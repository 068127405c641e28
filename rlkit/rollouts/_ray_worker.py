"""What runs in a worker process of Ray: the environments of several episodes, each guarded as in this process."""

from __future__ import annotations

import asyncio
import functools
import io
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import TypeVar

import attrs

from rlkit import _check
from rlkit.envs import Action, Env, Harness, Observation, StepResult, Task
from rlkit.envs.calling import Guarded
from rlkit.errors import EnvError

__all__ = ["Arguments", "Make", "Worker"]

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
            raise problem

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
        finally:
            self._calls.pop(key, None)


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
    names = ", ".join(sorted({_check.shown(each.obj) for each in failures}))
    raise EnvError(where, f"holds what cannot be sent: {names}", "what can be pickled", "executor='ray'")


def _limit(memory: int) -> None:
    """Let this process have ``memory`` bytes more than it has; what asks for more gets a MemoryError.

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
