"""The event loop that asynchronous environments live in: one, in a thread of its own, for as long as the program runs.

So an environment that blocks where it should await delays no sampler and no training, and what environments share
(connections, locks) stays good from one rollout to the next, whatever loop each of those is called from.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

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

    def begin(self, make: Callable[[], Coroutine[Any, Any, None]], ended: Callable[[], None]) -> Callable[[], None]:
        """Runs the coroutine that ``make`` gives, which must not raise; returns what cancels it.

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


_lock = threading.Lock()
_current: Home | None = None


def current() -> Home:
    """The home of new environments."""
    global _current  # noqa: PLW0603  # one per process is the point
    with _lock:
        if _current is None or _current.stuck():
            _current = Home()
        return _current
