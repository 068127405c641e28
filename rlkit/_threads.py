"""Threads in which a call may be abandoned: a pool, and the same as an executor."""

from __future__ import annotations

import concurrent.futures
import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")

_IDLE = 10.0  # seconds until a thread without work ends
_numbers = itertools.count()


class Threads:
    """A pool that grows with the work: who starts work never waits for other work to end, up to ``most`` at a time.

    The standard pool has a largest size, so that calls that hang would fill it, and its threads are joined when the
    program or an event loop ends, so that one hanging call would keep it alive.

    Args:
        name: the prefix of the threads' names.
        most: threads at a time; work beyond them waits. None: no limit.
    """

    def __init__(self, name: str, most: int | None = None) -> None:
        self._name, self._most = name, most
        self._lock = threading.Lock()
        self._count = 0
        self._ended = False
        self._idle: list[queue.SimpleQueue[Callable[[], object] | None]] = []
        self._waiting: deque[Callable[[], object]] = deque()

    def start(self, work: Callable[[], object]) -> None:
        """Run ``work``, which must not raise, in its own thread."""
        with self._lock:
            inbox = self._idle.pop() if self._idle else None  # the last to become idle, so that the others can end
            if inbox is None and self._most is not None and self._count >= self._most:
                self._waiting.append(work)
                return
            self._count += inbox is None
        if inbox is None:
            inbox = queue.SimpleQueue()
            name = f"{self._name}-{next(_numbers)}"
            threading.Thread(target=self._serve, args=(inbox,), name=name, daemon=True).start()
        inbox.put(work)

    def end(self) -> None:
        """End each thread once it has no work left."""
        with self._lock:
            self._ended = True
            idle, self._idle = self._idle, []
        for inbox in idle:
            inbox.put(None)

    def _serve(self, inbox: queue.SimpleQueue[Callable[[], object] | None]) -> None:
        work = inbox.get()
        while work is not None:
            work()
            del work  # what it refers to is not kept while waiting
            work = self._next(inbox)

    def _next(self, inbox: queue.SimpleQueue[Callable[[], object] | None]) -> Callable[[], object] | None:
        """Return the next work of a thread; None: the thread ends, since all do or it has waited long enough."""
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            if self._ended:
                return None
            self._idle.append(inbox)
        try:
            return inbox.get(timeout=_IDLE)
        except queue.Empty:
            with self._lock:
                if inbox in self._idle:
                    self._idle.remove(inbox)
                    self._count -= 1
                    return None
            return inbox.get()  # taken off the list just now: its work is on the way


class DaemonExecutor(concurrent.futures.ThreadPoolExecutor):
    """The same threads as an executor, for ``asyncio.to_thread``: an event loop that ends does not wait for them."""

    def __init__(self, threads: Threads) -> None:
        super().__init__(max_workers=1)  # of which none is ever started
        self._daemons = threads

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> concurrent.futures.Future[_T]:
        """Start ``fn(*args, **kwargs)``; it is not called if the future is cancelled before."""
        future: concurrent.futures.Future[_T] = concurrent.futures.Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001  # whoever reads the future is told
                future.set_exception(error)

        self._daemons.start(work)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002
        """End the threads without waiting for them."""
        self._daemons.end()
