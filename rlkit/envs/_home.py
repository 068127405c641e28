"""The event loop that asynchronous environments live in: one, in a thread of its own, for as long as the program runs.

So an environment that blocks where it should await delays no sampler and no training, and what environments share
(connections, locks) stays good from one rollout to the next, whatever loop each of those is called from.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine

from rlkit.envs._threads import DaemonExecutor, Threads

_STUCK = 5.0  # seconds without an answer after which new environments get another loop

threads = Threads()


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
        """Whether what runs in it has kept it from doing anything else for too long."""
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


class Work:
    """A coroutine that waits for its turn in a lodging; ``make`` gives it, and it must not raise."""

    def __init__(self, make: Callable[[], Coroutine[object, object, None]], ended: Callable[[], None]) -> None:
        self.make = make
        self.ended = ended
        self.cancelled = False


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
        self._plain = contextvars.copy_context()  # of calls in threads, which may run beside the task
        self._plain_lock = threading.Lock()

    def beside(self) -> Lodging:
        """Another one that knows what was set here, for closing while a call hangs in this one."""
        other = Lodging(self._home)
        other._context, other._plain = self._context.copy(), self._plain.copy()
        return other

    def run(self, fn: Callable[..., object], *args: object) -> object:
        """``fn(*args)`` in this thread, in the context that all plain calls of the episode share."""
        if not self._plain_lock.acquire(blocking=False):  # a call that was given up is still in it
            return self._plain.copy().run(fn, *args)
        try:
            return self._plain.run(fn, *args)
        finally:
            self._plain_lock.release()

    def begin(
        self, make: Callable[[], Coroutine[object, object, None]], ended: Callable[[], None]
    ) -> Callable[[], None]:
        """As of a home."""
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
        """Let the task end once it has nothing left to do."""

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
