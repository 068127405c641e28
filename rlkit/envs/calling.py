"""Calls into environments that can neither hang the caller, nor end the program, nor stand in each other's way."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar, cast

from rlkit import _check
from rlkit.envs import _home
from rlkit.envs._checked import first_observation, reward, shown, step_result
from rlkit.envs._running import Running, abandoned
from rlkit.envs.protocol import Action, Observation, StepResult, Task
from rlkit.errors import EnvError, EnvTimeout, UnsupportedError
from rlkit.futures import settled

if TYPE_CHECKING:
    from rlkit.gateway import Session

_T = TypeVar("_T")

__all__ = ["Guarded", "abandoned", "call", "drives_itself", "scores", "wait"]


async def scores(task: Task, actions: Sequence[Action], *, timeout: float | None = None) -> list[float | None]:
    """Score a group by ``task.score``: a reward for each of the last actions of its episodes; None is none.

    Raises:
        EnvError: they are not as many as the actions, or one is neither a finite number nor None.
        EnvTimeout: not in time.
    """
    where = f"environment {task.name!r}: score"
    if task.score is None or not actions:
        return [0.0] * len(actions)
    answer = await call(task.score, list(actions), timeout=timeout, where=where)
    rewards = cast("Sequence[object]", answer)  # or an array
    if isinstance(answer, (str, bytes, Mapping)) or not hasattr(answer, "__len__") or len(rewards) != len(actions):
        raise EnvError(where, f"got {shown(answer)}", f"{len(actions)} rewards, one per episode")
    return [None if x is None else reward(x, where=f"{where}[{i}]") for i, x in enumerate(rewards)]


def drives_itself(env: object) -> bool:
    """Whether an environment, or its class, is a harness: it has ``play`` and no ``step``."""
    return callable(getattr(env, "play", None)) and not callable(getattr(env, "step", None))


async def call(
    fn: Callable[..., Awaitable[_T] | _T], *args: object, timeout: float | None = None, where: str = "environment"
) -> _T:
    """Return what ``fn(*args)`` gives, whether it is ``async`` or not.

    A plain function runs in a daemon thread, which a call that hangs neither takes from others nor keeps the program
    from ending. What is awaitable runs in the event loop of the environments, in a thread of its own.

    Args:
        fn, args: the call.
        timeout: seconds, >= 0; None waits as long as it takes. Then a coroutine is cancelled; a thread goes on, and
            what it gives is dropped.
        where: for messages.

    Raises:
        EnvTimeout: no answer in time.
        EnvError: it raised what would end the program or the event loop: SystemExit, KeyboardInterrupt,
            StopIteration, a cancellation of its own.
        Exception: any other, as it was raised.

    >>> asyncio.run(call(divmod, 7, 2, timeout=10))
    (3, 1)
    """
    _check.optional(_check.real, "timeout", timeout, low=0.0, why="seconds")
    return cast("_T", await Running(where, fn, args, _home.current()).result(timeout))


class Guarded:
    """An environment whose answers are checked and whose faults stay its own.

    All its coroutines run in one task, so that what ``reset`` enters (an MCP session, a task group) ``close`` can
    leave; all its plain calls share one context.

    ``await Guarded.opened(task)`` makes the environment; ``reset``, ``step`` and ``close`` are its methods, awaited.
    Every error that rlkit raises begins with the environment's name; an exception of the environment passes through.

    Attributes:
        name: the task's.
        env: what ``task.make`` gave.
        seconds: spent waiting for its answers.
        plays: whether it is a harness, which drives itself.
    """

    def __init__(
        self, env: object, name: str, *, max_chars: int = 1_000_000, lodging: _home.Lodging | None = None
    ) -> None:
        self.env = env
        self.name = name
        self.seconds = 0.0
        self._max_chars = max_chars
        self._lodging = _home.Lodging(_home.current()) if lodging is None else lodging
        self._lodging.lost = self._lost
        self._last: Running | None = None
        self._lock = threading.Lock()
        self._closing: Running | None = None
        self._ended = "is closed"
        self.plays = drives_itself(env)
        for method in () if self.plays else ("reset", "step"):
            if not callable(getattr(env, method, None)):
                what = f"made {shown(env)}, which has no method {method!r}"
                raise EnvError(self._where("make"), what, "an environment")

    @classmethod
    async def opened(
        cls,
        task: Task,
        *,
        timeout: float | None = None,
        max_chars: int = 1_000_000,
        scored: bool = False,
        grace: float = 0.0,
    ) -> Guarded:
        """Open a fresh environment for one episode of ``task``.

        Args:
            task: makes it.
            timeout: seconds. An environment that is made too late is closed when it is there.
            grace: seconds that this waits for such an environment, when the time is over or the waiting is cancelled.
            max_chars: the longest observation, in characters.
            scored: the caller will see to ``task.score``, with ``scores``. Otherwise a task that has one is refused,
                since its episodes would be worth nothing, and nobody would know why.

        Raises:
            UnsupportedError: as said.
            EnvError, EnvTimeout: no environment, or not in time.
        """
        if task.score is not None and not scored:
            raise UnsupportedError(f"environment {task.name!r}: is scored by groups, which nobody here sees to")
        lodging = _home.Lodging(_home.current())
        running = Running(f"environment {task.name!r}: make", task.make, (), lodging)
        try:
            env = await running.result(timeout)
        except BaseException:
            closed = _closed_late(running.outcome, lodging)
            if grace:
                await asyncio.wait([asyncio.wrap_future(closed)], timeout=grace)
            raise
        return cls(env, task.name, max_chars=max_chars, lodging=lodging)

    @property
    def tools(self) -> tuple[dict[str, object], ...]:
        """The function schemas that the environment offers; read after ``reset``."""
        tools = getattr(self.env, "tools", None) or ()
        if not isinstance(tools, (list, tuple)) or not all(isinstance(tool, dict) for tool in tools):
            raise EnvError(self._where("tools"), f"got {shown(tools)}", "a list of schemas")
        return tuple(tools)

    async def reset(self, seed: int, *, timeout: float | None = None) -> Observation:
        """Return the first observation: text, messages, or int64 [T]."""
        return await self._call("reset", first_observation, seed, timeout=timeout)

    async def step(self, action: Action, *, timeout: float | None = None) -> StepResult:
        """Return what the action led to: checked, with a finite float as its reward."""
        return await self._call("step", step_result, action, timeout=timeout)

    async def play(self, session: Session, seed: int) -> StepResult:
        """Return how the episode of a harness ended; checked. The caller sees to its end in time, by cancelling."""
        return await self._call("play", step_result, session, seed, timeout=None)

    async def close(self, *, timeout: float | None = 5.0) -> Exception | None:
        """Close the environment, once; return what went wrong with that, if anything did.

        A call that was given up and still runs gets half of ``timeout`` to end, then the environment is closed
        under it. If the waiting is cancelled, the closing goes on all the same.
        """
        closing = self._begin_closing(None if timeout is None else timeout / 2)
        if not await settled(closing.outcome, timeout):
            return EnvTimeout(f"{closing.where}: not closed within {timeout:g} s")
        error = closing.outcome.exception()
        return error if error is None or isinstance(error, Exception) else EnvError(str(error))

    def _begin_closing(self, grace: float | None) -> Running:
        with self._lock:  # the loop's thread may do so, too
            if self._closing is None:
                self._closing = Running(self._where("close"), self._close, (grace,), _home.current())
            return self._closing

    def _lost(self) -> None:
        """Leave what the environment holds open and has failed between two calls, or the loop would spin."""
        if self._closing is None:
            self._ended = "was closed, since a connection or a task that it had opened failed between two calls"
        self._begin_closing(0.0)

    async def _close(self, grace: float | None) -> None:
        ended = self._last is None or await settled(self._last.outcome, grace)
        close = getattr(self.env, "close", None)
        lodging = self._lodging if ended else self._lodging.beside()  # a call that hangs keeps the task
        try:
            if close is not None:
                running = Running(self._where("close"), close, (), lodging)
                await settled(running.outcome)
                running.outcome.result()
        finally:
            lodging.end()
            self._lodging.end()

    async def _call(self, method: str, form: Callable[..., _T], *args: object, timeout: float | None) -> _T:
        where = self._where(method)
        if self._closing is not None:
            raise EnvError(f"{where}: the environment {self._ended}")
        convert = functools.partial(form, where=where, max_chars=self._max_chars)
        began = time.monotonic()
        self._last = Running(where, getattr(self.env, method), args, self._lodging, convert=convert)
        try:
            return cast("_T", await self._last.result(timeout))
        finally:
            self.seconds += time.monotonic() - began

    def _where(self, method: str) -> str:
        return f"environment {self.name!r}: {method}"


def _closed_late(made: concurrent.futures.Future[object], lodging: _home.Lodging) -> concurrent.futures.Future[None]:
    """Close an environment that is there when nobody waits for it any more; settled when that is done."""
    closed: concurrent.futures.Future[None] = concurrent.futures.Future()

    def ended(_: object = None) -> None:
        lodging.end()
        closed.set_result(None)

    def close(_: object) -> None:
        method = None if made.exception() is not None else getattr(made.result(), "close", None)
        if callable(method):
            Running("close", method, (), lodging).outcome.add_done_callback(ended)
        else:
            ended()

    made.add_done_callback(close)
    return closed


def wait(fn: Callable[..., Awaitable[_T]], *args: object, timeout: float, where: str) -> _T:
    """Return what ``call`` gives, outside of an event loop, or in one that may stand still meanwhile."""
    running = Running(where, fn, args, _home.current())
    try:
        return cast("_T", running.outcome.result(timeout))
    except concurrent.futures.TimeoutError as error:
        if running.outcome.done():  # it was the call that raised it
            raise
        running.give_up()
        raise EnvTimeout(f"{where}: no answer within {timeout:g} s") from error
