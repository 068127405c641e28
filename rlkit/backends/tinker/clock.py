"""One thread that calls functions later, for deadlines of requests of which many are in flight."""

from __future__ import annotations

import concurrent.futures
import heapq
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

__all__ = ["after", "fail", "settle"]

_changed = threading.Condition()
_waiting: list[tuple[float, int, Callable[[], object]]] = []
_numbers = itertools.count()
_thread: threading.Thread | None = None


def after(seconds: float, function: Callable[[], object]) -> None:
    """Calls ``function`` in ``seconds``, in a thread of its own; it must return at once and not raise."""
    global _thread  # noqa: PLW0603  # one clock for the process
    with _changed:
        heapq.heappush(_waiting, (time.monotonic() + seconds, next(_numbers), function))
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_run, name="rlkit-tinker-clock", daemon=True)
            _thread.start()
        _changed.notify()


def settle(future: concurrent.futures.Future[Any], value: Any) -> bool:
    """Gives ``future`` its result; False if it is done, its time being over."""
    try:
        future.set_result(value)
    except concurrent.futures.InvalidStateError:
        return False
    return True


def fail(future: concurrent.futures.Future[Any], error: BaseException) -> bool:
    """Gives ``future`` an exception; False if it is done."""
    try:
        future.set_exception(error)
    except concurrent.futures.InvalidStateError:
        return False
    return True


def _run() -> None:
    while True:
        with _changed:
            while not _waiting:
                _changed.wait()
            left = _waiting[0][0] - time.monotonic()
            if left > 0:
                _changed.wait(left)
                continue
            function = heapq.heappop(_waiting)[2]
        function()
        del function
