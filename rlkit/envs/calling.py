"""Calls into environments that can neither hang the caller, nor end the program, nor disturb each other.

The event loop that asynchronous environments live in: one, in its own thread, for as long as the program runs.

So an environment that blocks where it should await delays no sampler and no training, and what environments share
(connections, locks) stays good from one rollout to the next, whatever loop each of those is called from.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import functools
import inspect
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar, cast

from rlkit import _check
from rlkit._threads import DaemonExecutor, Threads
from rlkit.envs._checked import check_first_observation, check_step_result, describe_value, reward
from rlkit.envs.protocol import Action, Observation, StepResult, Task
from rlkit.errors import EnvError, EnvTimeout, UnsupportedError
from rlkit.futures import wait_done

if TYPE_CHECKING:
    from rlkit.gateway import Session

__all__ = ["Call", "CallLimit", "GuardedEnv", "call", "is_harness", "scores", "wait"]


_STUCK = 5.0  # seconds without an answer after which new environments get another loop

threads = Threads("rlkit-env")


class EnvLoop:
    """An event loop in a daemon thread."""

    _current: EnvLoop | None = None
    _choosing = threading.Lock()

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(DaemonExecutor(threads))
        self._lock = threading.Lock()
        self._waiting = 0
        self._since = 0.0  # when the first began to wait, or when the last had its turn
        threads.start(self._loop.run_forever)

    @classmethod
    def get(cls) -> EnvLoop:
        """Return the loop of new environments: another one where a coroutine blocks the last."""
        with cls._choosing:
            if cls._current is None or cls._current.is_stuck():
                cls._current = cls()
            return cls._current

    def is_stuck(self) -> bool:
        """Return whether what runs in it has kept it from doing anything else for too long."""
        with self._lock:
            return self._waiting > 0 and time.monotonic() - self._since > _STUCK

    def knock(self) -> None:
        """Say that something waits for its turn in this loop, until ``answer`` is called for it."""
        with self._lock:
            if self._waiting == 0:
                self._since = time.monotonic()
            self._waiting += 1

    def answer(self) -> None:
        """Say that something that waited has its turn."""
        with self._lock:
            self._waiting -= 1
            self._since = time.monotonic()

    def soon(self, fn: Callable[[], object]) -> None:
        """Call ``fn`` in the loop's thread."""
        self._loop.call_soon_threadsafe(fn)


class Call:
    """A call that has begun. ``outcome`` is settled when it has really ended, even if the caller gave up.

    Args:
        where: for messages.
        fn, args: the call. A plain function runs in a thread, a coroutine or other awaitable in ``actor``.
        actor: of the episode; None: a new one.
        convert: applied to the answer where the call ran, since a large one takes time to check.
    """

    def __init__(
        self,
        where: str,
        fn: Callable[..., object],
        args: tuple[object, ...] = (),
        actor: Actor | None = None,
        *,
        convert: Callable[[object], object] | None = None,
    ) -> None:
        self.where = where
        self.outcome: concurrent.futures.Future[object] = concurrent.futures.Future()
        self.cancelled = False  # touched in the loop's thread alone
        self._convert, new = convert, actor is None
        self._actor = actor = Actor() if actor is None else actor
        if new:
            self.outcome.add_done_callback(lambda _: actor.end())
        if inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None)):  # noqa: B004
            self._actor.submit(self, cast("Callable[[], Awaitable[object]]", functools.partial(fn, *args)))
        else:
            threads.start(lambda: self._run(fn, args))

    def _run(self, fn: Callable[..., object], args: tuple[object, ...]) -> None:
        try:
            value = self._actor.run_plain(fn, *args)
        except BaseException as error:  # noqa: BLE001  # sys.exit in an environment ends its episode alone
            self.fail(error)
        else:
            if inspect.isawaitable(value):
                self._actor.submit(self, lambda: value)
            else:
                self.succeed(value)

    def succeed(self, value: object) -> None:
        """Settle it with an answer."""
        try:
            value = value if self._convert is None else self._convert(value)
        except BaseException as error:  # noqa: BLE001
            self.fail(error)
        else:
            self.outcome.set_result(value)

    def fail(self, error: BaseException) -> None:
        """Settle it with an exception; what would end a program, a task or a loop becomes an EnvError."""
        if not isinstance(error, Exception) or isinstance(error, (StopIteration, StopAsyncIteration)):
            fault = EnvError(f"{self.where}: raised {type(error).__name__}{error.args}; expected an answer")
            fault.__cause__ = error
            error = fault
        self.outcome.set_exception(error)

    def give_up(self) -> None:
        """Stop waiting: cancel a coroutine; a thread can only be left alone."""
        self._actor.cancel(self)

    async def result(self, timeout: float | None) -> object:
        """Return what the call gave."""
        try:
            in_time = await wait_done(self.outcome, timeout)
        except BaseException:
            self.give_up()
            raise
        if not in_time:
            self.give_up()
            raise EnvTimeout(f"{self.where}: no answer within {timeout:g} s")
        return self.outcome.result()


class Actor:
    """One task in which all coroutines of an episode run, in turn: what one of them enters another can leave.

    Attributes:
        on_lost: called in the loop when something that a coroutine left open has failed meanwhile, and is to be left.
    """

    def __init__(self) -> None:
        self.on_lost: Callable[[], None] | None = None
        self._loop = EnvLoop.get()
        self._used = self._over = False
        self._context = contextvars.copy_context()
        self._plain = contextvars.copy_context()  # of calls in threads, which may run at the same time as the task
        self._plain_lock = threading.Lock()
        # this and what follows is touched in the loop's thread alone; with each call, whether the loop is to answer
        self._calls: deque[tuple[Call, Callable[[], Awaitable[object]], bool]] = deque()
        self._now: Call | None = None
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()

    def sibling(self) -> Actor:
        """Return another one that knows what was set here, for closing while a call hangs in this one."""
        other = Actor()
        other._context, other._plain = self._context.copy(), self._plain.copy()
        return other

    def run_plain(self, fn: Callable[..., object], *args: object) -> object:
        """Call ``fn(*args)`` in this thread, in the context that all plain calls of the episode share."""
        if not self._plain_lock.acquire(blocking=False):  # a call that was given up is still in it
            return self._plain.copy().run(fn, *args)
        try:
            return self._plain.run(fn, *args)
        finally:
            self._plain_lock.release()

    def submit(self, call: Call, make: Callable[[], Awaitable[object]]) -> None:
        """Await what ``make`` gives, after the calls before it, and settle ``call``."""

        def put() -> None:
            busy = self._now is not None or bool(self._calls)
            if busy:
                self._loop.answer()  # it waits for another call, not for the loop
            self._calls.append((call, make, not busy))
            self._wake.set()
            if self._task is None or self._task.done():
                self._task = asyncio.get_running_loop().create_task(self._serve(), context=self._context)

        self._used = True
        self._loop.knock()
        self._loop.soon(put)

    def cancel(self, call: Call) -> None:
        """Cancel a call that runs; one that waits is not begun."""

        def stop() -> None:
            call.cancelled = True
            if self._now is call and self._task is not None:
                self._task.cancel()

        self._loop.soon(stop)

    def end(self) -> None:
        """End the task once it has nothing left to do; also one that a call which still hangs in a thread begins."""
        self._over = True
        if self._used:
            self._loop.soon(self._wake.set)

    async def _serve(self) -> None:
        while self._calls or not self._over:
            if not self._calls:
                await self._idle()
                continue
            call, make, knocked = self._calls.popleft()
            self._now = call
            if knocked:  # not before: what begins may block
                self._loop.answer()
            try:
                awaitable = make()
                if call.cancelled:
                    if inspect.iscoroutine(awaitable):
                        awaitable.close()
                    raise EnvError(f"{call.where}: cancelled before it started")
                value = await awaitable
            except BaseException as error:  # noqa: BLE001  # one that left the coroutine would end the task
                self._leave(call)
                call.fail(error)
            else:
                self._leave(call)
                call.succeed(value)

    def _leave(self, call: Call) -> None:
        self._now = None
        if call.cancelled:  # else it was somebody else, such as a connection's scope, who relies on it
            self._forget_cancelling()

    async def _idle(self) -> None:
        self._wake.clear()
        try:
            await self._wake.wait()
        except asyncio.CancelledError:
            self._forget_cancelling()
            lost, self.on_lost = self.on_lost, None
            if lost is not None:
                lost()

    def _forget_cancelling(self) -> None:
        while self._task is not None and self._task.cancelling():
            self._task.uncancel()


_T = TypeVar("_T")


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
        raise EnvError(where, f"got {describe_value(answer)}", f"{len(actions)} rewards, one per episode")
    return [None if x is None else reward(x, where=f"{where}[{i}]") for i, x in enumerate(rewards)]


def is_harness(env: object) -> bool:
    """Return whether an environment, or its class, is a harness: it has ``play`` and no ``step``."""
    return callable(getattr(env, "play", None)) and not callable(getattr(env, "step", None))


async def call(
    fn: Callable[..., Awaitable[_T] | _T], *args: object, timeout: float | None = None, where: str = "environment"
) -> _T:
    """Return what ``fn(*args)`` gives, whether it is ``async`` or not.

    A plain function runs in a daemon thread, which a call that hangs neither takes from others nor keeps the program
    from ending. What is awaitable runs in the event loop of the environments, in its own thread.

    Args:
        fn, args: the call.
        timeout: seconds, >= 0; None waits as long as it takes. Then a coroutine is cancelled; a thread goes on, and
            what it gives is dropped.
        where: for messages.

    Raises:
        EnvTimeout: no answer in time.
        EnvError: it raised what would end the program or the event loop: SystemExit, KeyboardInterrupt,
            StopIteration, its own cancellation.
        Exception: any other, as it was raised.

    >>> asyncio.run(call(divmod, 7, 2, timeout=10))
    (3, 1)
    """
    _check.optional(_check.real, "timeout", timeout, low=0.0, why="seconds")
    return cast("_T", await Call(where, fn, args).result(timeout))


class CallLimit:
    """A limit on calls that compute, which calls that only wait do not count against for long.

    Threads that compute take turns at the interpreter, so the more there are the longer everything else waits, the
    event loop included. A call that takes longer than ``patience`` is taken to be waiting for something, and its place
    is given to the next.

    Args:
        count: calls at once.
        patience: seconds.
    """

    def __init__(self, count: int, patience: float) -> None:
        self._places = asyncio.Semaphore(count)
        self._patience = patience

    @contextlib.asynccontextmanager
    async def enter(self) -> AsyncIterator[None]:
        """Wait for a place."""
        await self._places.acquire()
        mine = True

        def give_back() -> None:
            nonlocal mine
            if mine:
                mine = False
                self._places.release()

        timer = asyncio.get_running_loop().call_later(self._patience, give_back)
        try:
            yield
        finally:
            timer.cancel()
            give_back()


class GuardedEnv:
    """An environment whose answers are checked and whose faults stay its own.

    All its coroutines run in one task, so that what ``reset`` enters (an MCP session, a task group) ``close`` can
    leave; all its plain calls share one context.

    ``await GuardedEnv.open(task)`` makes the environment; ``reset``, ``step`` and ``close`` are its methods, awaited.
    Every error that rlkit raises begins with the environment's name; an exception of the environment passes through.

    Attributes:
        name: the task's.
        env: what ``task.make`` gave.
        seconds: spent waiting for its answers.
        is_harness: whether it drives itself.
    """

    def __init__(self, env: object, name: str, *, max_chars: int = 1_000_000, actor: Actor | None = None) -> None:
        self.env = env
        self.name = name
        self.seconds = 0.0
        self._max_chars = max_chars
        self._actor = Actor() if actor is None else actor
        self._actor.on_lost = self._lost
        self._last: Call | None = None
        self._lock = threading.Lock()
        self._closing: Call | None = None
        self._ended = "is closed"
        self.is_harness = is_harness(env)
        for method in () if self.is_harness else ("reset", "step"):
            if not callable(getattr(env, method, None)):
                what = f"made {describe_value(env)}, which has no method {method!r}"
                raise EnvError(self._where("make"), what, "an environment")

    @classmethod
    async def open(
        cls,
        task: Task,
        *,
        timeout: float | None = None,
        max_chars: int = 1_000_000,
        scored: bool = False,
        grace: float = 0.0,
    ) -> GuardedEnv:
        """Open a fresh environment for one episode of ``task``.

        Args:
            task: makes it.
            timeout: seconds. An environment that is made too late is closed when it is there.
            grace: seconds that this waits for such an environment, when the time is over or the waiting is cancelled.
            max_chars: the longest observation, in characters; messages are counted as JSON.
            scored: the caller will see to ``task.score``, with ``scores``. Otherwise a task that has one is refused,
                since its episodes would be worth nothing, and the reason would not be visible.

        Raises:
            UnsupportedError: as said.
            EnvError, EnvTimeout: no environment, or not in time.
        """
        if task.score is not None and not scored:
            raise UnsupportedError(f"environment {task.name!r}: uses group scoring, which this caller does not support")
        actor = Actor()
        making = Call(f"environment {task.name!r}: make", task.make, (), actor)
        try:
            env = await making.result(timeout)
        except BaseException:
            closed = _close_late(making.outcome, actor)
            if grace:
                await wait_done(closed, grace)
            raise
        return cls(env, task.name, max_chars=max_chars, actor=actor)

    @property
    def tools(self) -> tuple[dict[str, object], ...]:
        """Return the function schemas that the environment offers; read after ``reset``."""
        tools = getattr(self.env, "tools", None) or ()
        if not isinstance(tools, (list, tuple)) or not all(isinstance(tool, dict) for tool in tools):
            raise EnvError(self._where("tools"), f"got {describe_value(tools)}", "a list of schemas")
        return tuple(tools)

    async def reset(self, seed: int, *, timeout: float | None = None) -> Observation:
        """Return the first observation: text, messages, or int64 [T]."""
        return await self._call("reset", check_first_observation, seed, timeout=timeout)

    async def step(self, action: Action, *, timeout: float | None = None) -> StepResult:
        """Return what the action led to: checked, with a finite float as its reward."""
        return await self._call("step", check_step_result, action, timeout=timeout)

    async def play(self, session: Session, seed: int) -> StepResult:
        """Return how the episode of a harness ended; checked. The caller sees to its end in time, by cancelling."""
        return await self._call("play", check_step_result, session, seed, timeout=None)

    async def close(self, *, timeout: float | None = 5.0) -> Exception | None:
        """Close the environment, once; return what went wrong with that, if anything did.

        A call that was given up and still runs gets half of ``timeout`` to end, then the environment is closed
        under it. If the waiting is cancelled, the closing goes on all the same.
        """
        closing = self._begin_closing(None if timeout is None else timeout / 2)
        if not await wait_done(closing.outcome, timeout):
            return EnvTimeout(f"{closing.where}: not closed within {timeout:g} s")
        error = closing.outcome.exception()
        return error if error is None or isinstance(error, Exception) else EnvError(str(error))

    def _begin_closing(self, grace: float | None) -> Call:
        with self._lock:  # the loop's thread may do so, too
            if self._closing is None:
                self._closing = Call(self._where("close"), self._close, (grace,))
            return self._closing

    def _lost(self) -> None:
        """Leave what the environment holds open and has failed between two calls, or the loop would spin."""
        if self._closing is None:
            self._ended = "was closed, because a connection or a task that it had opened failed between two calls"
        self._begin_closing(0.0)

    async def _close(self, grace: float | None) -> None:
        ended = self._last is None or await wait_done(self._last.outcome, grace)
        close = getattr(self.env, "close", None)
        actor = self._actor if ended else self._actor.sibling()  # a call that hangs keeps the task
        try:
            if close is not None:
                await Call(self._where("close"), close, (), actor).result(None)
        finally:
            actor.end()
            self._actor.end()

    async def _call(self, method: str, form: Callable[..., _T], *args: object, timeout: float | None) -> _T:
        where = self._where(method)
        if self._closing is not None:
            raise EnvError(f"{where}: the environment {self._ended}")
        convert = functools.partial(form, where=where, max_chars=self._max_chars)
        began = time.monotonic()
        self._last = Call(where, getattr(self.env, method), args, self._actor, convert=convert)
        try:
            return cast("_T", await self._last.result(timeout))
        finally:
            self.seconds += time.monotonic() - began

    def _where(self, method: str) -> str:
        return f"environment {self.name!r}: {method}"


def _close_late(made: concurrent.futures.Future[object], actor: Actor) -> concurrent.futures.Future[None]:
    """Close an environment that is made after its caller gave up; return a future that is done when it is closed."""
    closed: concurrent.futures.Future[None] = concurrent.futures.Future()

    def finish(_: object = None) -> None:
        actor.end()
        closed.set_result(None)

    def close(_: object) -> None:
        method = None if made.exception() is not None else getattr(made.result(), "close", None)
        if callable(method):
            Call("close", method, (), actor).outcome.add_done_callback(finish)
        else:
            finish()

    made.add_done_callback(close)
    return closed


def wait(fn: Callable[..., Awaitable[_T]], *args: object, timeout: float, where: str) -> _T:
    """Return what ``call`` gives, outside of an event loop, or in one that may block meanwhile."""
    running = Call(where, fn, args)
    if not concurrent.futures.wait([running.outcome], timeout).done:
        running.give_up()
        raise EnvTimeout(f"{where}: no answer within {timeout:g} s")
    return cast("_T", running.outcome.result())
