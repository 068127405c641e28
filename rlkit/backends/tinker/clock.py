"""One thread that calls functions later, for deadlines of requests of which many are in flight."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable

__all__ = ["Timer", "after"]

_SPARE = 64  # cancelled timers that are not worth clearing away

_changed = threading.Condition()
_waiting: list[tuple[float, int, Timer]] = []
_numbers = itertools.count()
_thread: threading.Thread | None = None
_cancelled = 0


class Timer:
    """A scheduled call."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[[], object]) -> None:
        self.function: Callable[[], object] | None = function

    def cancel(self) -> None:
        """Cancel the timer and drop its function. May be called at any time, also twice."""
        global _cancelled, _waiting  # noqa: PLW0603  # one clock for the process
        with _changed:
            if self.function is None:
                return
            self.function = None
            _cancelled += 1
            if _cancelled > _SPARE and 2 * _cancelled > len(_waiting):
                _waiting = [entry for entry in _waiting if entry[2].function is not None]
                heapq.heapify(_waiting)
                _cancelled = 0


def after(seconds: float, function: Callable[[], object]) -> Timer:
    """Call ``function`` in ``seconds``, in a thread of its own; it must return at once and not raise."""
    global _thread  # noqa: PLW0603  # as above
    timer = Timer(function)
    with _changed:
        heapq.heappush(_waiting, (time.monotonic() + seconds, next(_numbers), timer))
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_run, name="rlkit-tinker-clock", daemon=True)
            _thread.start()
        _changed.notify()
    return timer


def _run() -> None:
    global _cancelled  # noqa: PLW0603  # as above
    while True:
        with _changed:
            while not _waiting:
                _changed.wait()
            left = _waiting[0][0] - time.monotonic()
            if left > 0:
                _changed.wait(left)
                continue
            timer = heapq.heappop(_waiting)[2]
            function, timer.function = timer.function, None
            if function is None:
                _cancelled -= 1
        if function is not None:
            function()
        del function, timer
