"""Calls into environments that can neither hang the caller, nor end the program, nor disturb each other.

The event loop that asynchronous environments live in: one, in its own thread, for as long as the program runs.

So an environment that blocks where it should await delays no sampler and no training, and what environments share
(connections, locks) stays good from one rollout to the next, whatever loop each of those is called from.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import functools
import inspect
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar, cast

import attrs

from rlkit import _check
from rlkit._threads import DaemonExecutor, Threads
from rlkit.envs._checked import first_observation, reward, shown, step_result
from rlkit.envs.protocol import Action, Observation, StepResult, Task
from rlkit.errors import EnvError, EnvTimeout, UnsupportedError
from rlkit.futures import wait_done

if TYPE_CHECKING:
    from rlkit.gateway import Session

__all__ = ["Guarded", "Running", "abandoned", "call", "drives_itself", "scores", "wait"]


class Running:
    """A call that has begun. ``outcome`` is settled when it has really ended, even if the caller gave up."""

    def __init__(
        self,
        where: str,
        fn: Callable[..., object],
        args: tuple[object, ...],
        home: Home | Lodging,
        *,
        convert: Callable[[object], object] | None = None,
    ) -> None:
        self.where = where
        self._convert = convert  # applied where the call ran, since a large answer takes time to check
        self.outcome: concurrent.futures.Future[object] = concurrent.futures.Future()
        self._home = home
        self._cancel: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._given_up = False
        if inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None)):  # noqa: B004
            self._await(cast("Callable[[], Awaitable[object]]", functools.partial(fn, *args)))
        else:
            run = home.run if isinstance(home, Lodging) else contextvars.copy_context().run
            threads.start(lambda: self._run(run, fn, args))

    def _run(self, run: Callable[..., object], fn: Callable[..., object], args: tuple[object, ...]) -> None:
        try:
            value = run(fn, *args)
            if inspect.isawaitable(value):
                run(self._await, lambda: value)
                return
            value = value if self._convert is None else self._convert(value)
        except BaseException as error:  # noqa: BLE001  # sys.exit in an environment ends its episode alone
            self.outcome.set_exception(self._tamed(error))
        else:
            self.outcome.set_result(value)

    def _await(self, make: Callable[[], Awaitable[object]]) -> None:
        async def awaited() -> None:
            try:
                value = await make()
                value = value if self._convert is None else self._convert(value)
            except BaseException as error:  # noqa: BLE001  # one that left the coroutine would end the event loop
                self.outcome.set_exception(self._tamed(error))
            else:
                self.outcome.set_result(value)

        def ended() -> None:
            if not self.outcome.done():
                self.outcome.set_exception(EnvError(f"{self.where}: cancelled before it started"))

        with self._lock:
            if self._given_up:
                ended()
            else:
                self._cancel = self._home.begin(awaited, ended)

    def _tamed(self, error: BaseException) -> Exception:
        """Return exceptions as they are; what would end a program, a task or a loop, as an EnvError."""
        if isinstance(error, Exception) and not isinstance(error, (StopIteration, StopAsyncIteration)):
            return error
        tamed = EnvError(f"{self.where}: raised {type(error).__name__}{error.args}; expected an answer")
        tamed.__cause__ = error
        return tamed

    def give_up(self) -> None:
        """Stop waiting: cancel a coroutine; a thread can only be left alone."""
        with self._lock:
            self._given_up = True
            cancel = self._cancel
        if cancel is not None:
            cancel()
        _given_up.add(self.outcome)
        self.outcome.add_done_callback(_given_up.discard)  # at once, if it has ended meanwhile

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


_given_up: set[concurrent.futures.Future[object]] = set()


def abandoned() -> int:
    """Return how many calls into environments were given up and still run; each holds a thread unless ``async``."""
    return len(_given_up)


_STUCK = 5.0  # seconds without an answer after which new environments get another loop

threads = Threads("rlkit-env")


class Home:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(DaemonExecutor(threads))
        self._lock = threading.Lock()
        self._knocks = 0
        self._since = 0.0
        threads.start(self._loop.run_forever)

    def begin(
        self, make: Callable[[], Coroutine[object, object, None]], ended: Callable[[], None]
    ) -> Callable[[], None]:
        """Run the coroutine that ``make`` gives, which must not raise; return what cancels it.

        ``ended`` is called at the end, also of a coroutine that was cancelled before its first line.
        """
        context = contextvars.copy_context()
        task: asyncio.Task[None] | None = None
        cancelled = answered = False

        def answer() -> None:
            nonlocal answered
            if not answered:
                answered = True
                self._answer()

        async def run() -> None:
            answer()
            await make()

        def end(_: object = None) -> None:
            answer()
            ended()

        def start() -> None:
            nonlocal task
            if cancelled:
                end()
            else:
                task = self._loop.create_task(run(), context=context)
                task.add_done_callback(end)

        def stop() -> None:
            if task is not None:
                task.cancel()

        def cancel() -> None:
            nonlocal cancelled
            cancelled = True
            self._loop.call_soon_threadsafe(stop)

        self._knock()
        self._loop.call_soon_threadsafe(start)
        return cancel

    def soon(self, fn: Callable[[], None]) -> None:
        """Call ``fn`` in the loop's thread."""
        self._loop.call_soon_threadsafe(fn)

    def stuck(self) -> bool:
        """Return whether what runs in it has kept it from doing anything else for too long."""
        with self._lock:
            return self._knocks > 0 and time.monotonic() - self._since > _STUCK

    def _knock(self) -> None:
        with self._lock:
            if self._knocks == 0:
                self._since = time.monotonic()
            self._knocks += 1

    def _answer(self) -> None:
        with self._lock:
            self._knocks -= 1
            self._since = time.monotonic()


@attrs.define(eq=False)
class Work:
    """A coroutine that waits for its turn in a lodging; ``make`` gives it, and it must not raise."""

    make: Callable[[], Coroutine[object, object, None]]
    ended: Callable[[], None]
    cancelled: bool = False


class Lodging:
    """One task of a home, in which all coroutines of an episode run, one after the other.

    What a coroutine enters and leaves open (a cancel scope, and so a session of most SDKs; an asynchronous generator; a
    context variable that is to be reset) can only be left from the task that entered it.

    Attributes:
        lost: called in the home's loop, once, if the task is cancelled while no coroutine runs in it: what one of them
            left open has failed meanwhile, and is to be left now.
    """

    def __init__(self, home: Home) -> None:
        self.lost: Callable[[], None] | None = None
        self._home = home
        self._work: deque[Work] = deque()  # this and what follows is touched in the loop's thread alone
        self._running: Work | None = None
        self._task: asyncio.Task[None] | None = None
        self._wake: asyncio.Event
        self._over = False
        self._context = contextvars.copy_context()
        self._plain = contextvars.copy_context()  # of calls in threads, which may run at the same time as the task
        self._plain_lock = threading.Lock()

    def beside(self) -> Lodging:
        """Return another lodging that knows what was set here, for closing while a call hangs in this one."""
        other = Lodging(self._home)
        other._context, other._plain = self._context.copy(), self._plain.copy()
        return other

    def run(self, fn: Callable[..., object], *args: object) -> object:
        """Call ``fn(*args)`` in this thread, in the context that all plain calls of the episode share."""
        if not self._plain_lock.acquire(blocking=False):  # a call that was given up is still in it
            return self._plain.copy().run(fn, *args)
        try:
            return self._plain.run(fn, *args)
        finally:
            self._plain_lock.release()

    def begin(
        self, make: Callable[[], Coroutine[object, object, None]], ended: Callable[[], None]
    ) -> Callable[[], None]:
        """Begin a call as a home does."""
        work = Work(make, ended)

        async def start() -> None:
            self._work.append(work)
            if self._task is None or self._task.done():
                self._wake = asyncio.Event()
                self._task = asyncio.get_running_loop().create_task(self._serve(), context=self._context)
            self._wake.set()

        def stop() -> None:
            work.cancelled = True
            if self._running is work and self._task is not None:
                self._task.cancel()

        self._home.begin(start, lambda: None)
        return lambda: self._home.soon(stop)

    def end(self) -> None:
        """End the task once it has nothing left to do."""

        def stop() -> None:
            self._over = True
            if self._task is not None:
                self._wake.set()

        self._home.soon(stop)

    async def _serve(self) -> None:
        while self._work or not self._over:
            if not self._work:
                await self._idle()
                continue
            work = self._running = self._work.popleft()
            if not work.cancelled:
                await work.make()
            self._running = None
            if work.cancelled:
                self._forget_cancelling()
            work.ended()

    async def _idle(self) -> None:
        self._wake.clear()
        try:
            await self._wake.wait()
        except asyncio.CancelledError:
            self._forget_cancelling()
            lost, self.lost = self.lost, None
            if lost is not None:
                lost()

    def _forget_cancelling(self) -> None:
        while self._task is not None and self._task.cancelling():
            self._task.uncancel()


_lock = threading.Lock()
_current: Home | None = None


def current() -> Home:
    """Return the home of new environments."""
    global _current  # noqa: PLW0603  # one per process is the point
    with _lock:
        if _current is None or _current.stuck():
            _current = Home()
        return _current


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
        raise EnvError(where, f"got {shown(answer)}", f"{len(actions)} rewards, one per episode")
    return [None if x is None else reward(x, where=f"{where}[{i}]") for i, x in enumerate(rewards)]


def drives_itself(env: object) -> bool:
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
    return cast("_T", await Running(where, fn, args, current()).result(timeout))


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

    def __init__(self, env: object, name: str, *, max_chars: int = 1_000_000, lodging: Lodging | None = None) -> None:
        self.env = env
        self.name = name
        self.seconds = 0.0
        self._max_chars = max_chars
        self._lodging = Lodging(current()) if lodging is None else lodging
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
                since its episodes would be worth nothing, and the reason would not be visible.

        Raises:
            UnsupportedError: as said.
            EnvError, EnvTimeout: no environment, or not in time.
        """
        if task.score is not None and not scored:
            raise UnsupportedError(f"environment {task.name!r}: uses group scoring, which this caller does not support")
        lodging = Lodging(current())
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
        """Return the function schemas that the environment offers; read after ``reset``."""
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
        if not await wait_done(closing.outcome, timeout):
            return EnvTimeout(f"{closing.where}: not closed within {timeout:g} s")
        error = closing.outcome.exception()
        return error if error is None or isinstance(error, Exception) else EnvError(str(error))

    def _begin_closing(self, grace: float | None) -> Running:
        with self._lock:  # the loop's thread may do so, too
            if self._closing is None:
                self._closing = Running(self._where("close"), self._close, (grace,), current())
            return self._closing

    def _lost(self) -> None:
        """Leave what the environment holds open and has failed between two calls, or the loop would spin."""
        if self._closing is None:
            self._ended = "was closed, because a connection or a task that it had opened failed between two calls"
        self._begin_closing(0.0)

    async def _close(self, grace: float | None) -> None:
        ended = self._last is None or await wait_done(self._last.outcome, grace)
        close = getattr(self.env, "close", None)
        lodging = self._lodging if ended else self._lodging.beside()  # a call that hangs keeps the task
        try:
            if close is not None:
                running = Running(self._where("close"), close, (), lodging)
                await wait_done(running.outcome)
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


def _closed_late(made: concurrent.futures.Future[object], lodging: Lodging) -> concurrent.futures.Future[None]:
    """Close an environment that was made after its caller gave up; settled when that is done."""
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
    """Return what ``call`` gives, outside of an event loop, or in one that may block meanwhile."""
    running = Running(where, fn, args, current())
    try:
        return cast("_T", running.outcome.result(timeout))
    except concurrent.futures.TimeoutError as error:
        if running.outcome.done():  # it was the call that raised it
            raise
        running.give_up()
        raise EnvTimeout(f"{where}: no answer within {timeout:g} s") from error
