"""Threads that a call which never returns can be left in: they are daemons, and there is always another one."""

from __future__ import annotations

import concurrent.futures
import itertools
import queue
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")

_IDLE = 10.0  # seconds until a thread without work ends
_numbers = itertools.count()


class Threads:
    """A pool that grows with the work: who starts work never waits for other work to end.

    The standard pool has a largest size, so that calls that hang would fill it, and its threads are joined when the
    program ends, so that one hanging call would keep the program alive.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[Callable[[], object]]] = []

    def start(self, work: Callable[[], object]) -> None:
        """Run ``work``, which must not raise, in a thread of its own."""
        with self._lock:
            inbox = self._idle.pop() if self._idle else None  # the last to become idle, so that the others can end
        if inbox is None:
            inbox = queue.SimpleQueue()
            threading.Thread(target=self._serve, args=(inbox,), name=f"rlkit-env-{next(_numbers)}", daemon=True).start()
        inbox.put(work)

    def _serve(self, inbox: queue.SimpleQueue[Callable[[], object]]) -> None:
        inbox.get()()
        while True:
            with self._lock:
                self._idle.append(inbox)
            try:
                work = inbox.get(timeout=_IDLE)
            except queue.Empty:
                with self._lock:
                    if inbox in self._idle:
                        self._idle.remove(inbox)
                        return
                work = inbox.get()  # taken off the list just now: its work is on the way
            work()
            del work  # what it refers to is not kept while waiting


class DaemonExecutor(concurrent.futures.ThreadPoolExecutor):
    """The same threads as an executor, for ``asyncio.to_thread`` inside of environments."""

    def __init__(self, threads: Threads) -> None:
        super().__init__(max_workers=1)  # of which none is ever started
        self._daemons = threads

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> concurrent.futures.Future[_T]:
        """Start ``fn(*args, **kwargs)``."""
        future: concurrent.futures.Future[_T] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()

        def work() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001  # whoever reads the future is told
                future.set_exception(error)

        self._daemons.start(work)
        return future
