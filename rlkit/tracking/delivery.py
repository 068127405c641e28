"""Calls of one receiver, such as a tracker, whose failures are counted and end no run."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from rlkit._secrets import redact

__all__ = ["Delivery", "QueuedDelivery"]

_log = logging.getLogger("rlkit.tracking")


class _Closable(Protocol):
    def close(self) -> None: ...


T = TypeVar("T", bound=_Closable)


class Delivery(Generic[T]):
    """Makes the calls at once; ``close`` of the receiver is the last one. ``capacity`` calls may wait."""

    def __init__(self, receiver: T, name: str, capacity: int) -> None:
        self.receiver = receiver
        self.name = name
        self.capacity = capacity
        self.counts: Counter[str] = Counter()
        self.ended = False
        self._lock = threading.Lock()

    def do(self, call: Callable[[T], None]) -> None:
        """Make the call, or have it made; nothing after ``end``."""
        if not self.ended:
            self.run(call)

    def run(self, call: Callable[[T], None]) -> None:
        """Make the call; count what it raises."""
        try:
            call(self.receiver)
        except Exception as error:  # noqa: BLE001  # whatever it is, the run goes on
            self.count("failed", f"failed: {type(error).__name__}: {error}")

    def count(self, what: str, text: str, number: int = 1) -> None:
        """Add to a counter; warn the first time."""
        with self._lock:
            first = what not in self.counts
            self.counts[what] += number
        if first:
            _log.warning("tracker %s %s; the run goes on, and this is not said again", self.name, redact(text))

    def end(self) -> None:
        """Close the receiver after what waits. Idempotent."""
        if not self.ended:
            self.ended = True
            self.run(lambda receiver: receiver.close())

    def wait(self, deadline: float) -> None:
        """Wait until ``time.monotonic()`` is ``deadline`` for what was begun; give up and count what is left."""


class QueuedDelivery(Delivery[T]):
    """Makes the calls in a thread of its own, over a queue of limited length."""

    def __init__(self, receiver: T, name: str, capacity: int) -> None:
        super().__init__(receiver, name, capacity)
        self._waiting: queue.Queue[Callable[[T], None] | None] = queue.Queue(capacity + 1)  # and the end
        self._thread: threading.Thread | None = None
        self._given_up = threading.Event()

    @property
    def waiting(self) -> int:
        """How many calls wait."""
        return 0 if self.ended else self._waiting.qsize()

    def do(self, call: Callable[[T], None]) -> None:
        if self.ended:
            return
        self._start()
        if self._waiting.qsize() >= self.capacity:
            self.count("dropped", f"is slower than the run: {self.capacity} calls wait for it, and one was left out")
            return
        self._waiting.put_nowait(call)

    def end(self) -> None:
        if not self.ended:
            self.ended = True
            self._start()
            self._waiting.put_nowait(None)

    def wait(self, deadline: float) -> None:
        if self._thread is None or self._given_up.is_set():
            return
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._given_up.set()
            left = max(0, self._waiting.qsize() - 1)
            if left:
                self.count("dropped", f"was not done in time: {left} calls were given up", left)
            else:
                self.count("failed", "was not done in time")

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"rlkit-{self.name}", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while (call := self._waiting.get()) is not None and not self._given_up.is_set():
            self.run(call)
        if call is None and not self._given_up.is_set():
            self.run(lambda receiver: receiver.close())
