"""Several trackers at once, none of which can block or end a run."""

from __future__ import annotations

import copy
import logging
import operator
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from rlkit import _check
from rlkit._runtime import Resource
from rlkit._secrets import redact
from rlkit.errors import ConfigError
from rlkit.tracking import _training, protocol
from rlkit.tracking.protocol import Tracker
from rlkit.trajectory import Group
from rlkit.trajectory.types import checked_groups

__all__ = ["Delivery", "QueuedDelivery", "Several"]

_log = logging.getLogger("rlkit.tracking")


class _Closable(Protocol):
    def close(self) -> None: ...


T = TypeVar("T", bound=_Closable)


class Delivery(Generic[T]):
    """A delivery that makes calls at once; the last one is the receiver's ``close``. ``capacity`` calls may wait."""

    def __init__(self, receiver: T, name: str, capacity: int) -> None:
        self.receiver = receiver
        self.name = name
        self.capacity = capacity
        self.counts: Counter[str] = Counter()
        self.ended = False
        self._lock = threading.Lock()

    def do(self, call: Callable[[T], None]) -> None:
        """Make the call, or queue it; do nothing after ``end``."""
        if not self.ended:
            self.run(call)

    def run(self, call: Callable[[T], None]) -> None:
        """Make the call; count its exceptions."""
        try:
            call(self.receiver)
        except Exception as error:  # noqa: BLE001  # the run continues after any exception
            self.count("failed", f"failed: {type(error).__name__}: {error}")

    def count(self, what: str, text: str, number: int = 1) -> None:
        """Add to a counter; warn the first time."""
        with self._lock:
            first = what not in self.counts
            self.counts[what] += number
        if first:
            _log.warning("tracker %s %s; the run continues, and this warning is shown once", self.name, redact(text))

    def end(self) -> None:
        """Close the receiver after the waiting calls. Idempotent."""
        if not self.ended:
            self.ended = True
            self.run(lambda receiver: receiver.close())

    def wait(self, deadline: float) -> None:
        """Wait for started calls until ``time.monotonic()`` is ``deadline``; drop and count the rest."""


class QueuedDelivery(Delivery[T]):
    """A delivery in its own thread, over a queue of limited length."""

    def __init__(self, receiver: T, name: str, capacity: int) -> None:
        super().__init__(receiver, name, capacity)
        self._waiting: queue.Queue[Callable[[T], None] | None] = queue.Queue(capacity + 1)  # and the end
        self._thread: threading.Thread | None = None
        self._given_up = threading.Event()

    @property
    def waiting(self) -> int:
        """The number of waiting calls."""
        return 0 if self.ended else self._waiting.qsize()

    def do(self, call: Callable[[T], None]) -> None:
        if self.ended:
            return
        self._start()
        if self._waiting.qsize() >= self.capacity:
            self.count("dropped", f"is slower than the run: {self.capacity} calls wait for it, and one was dropped")
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
                self.count("dropped", f"did not finish in time: {left} calls were dropped", left)
            else:
                self.count("failed", "did not finish in time")

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"rlkit-{self.name}", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while (call := self._waiting.get()) is not None and not self._given_up.is_set():
            self.run(call)
        if call is None and not self._given_up.is_set():
            self.run(lambda receiver: receiver.close())


class Several(Resource):
    """A tracker that passes all calls on to several trackers, and a context manager.

    After construction its methods neither raise nor wait: a tracker that is not ``inline`` gets its calls in its own
    thread, over a queue of limited length. Failed calls, calls that do not fit into the queue, and values that cannot
    be logged are left out and counted (``metrics``); the first time, a warning is logged.

    Args:
        trackers: at least one.
        capacity: calls that may wait for a tracker, >= 1.
        timeout: seconds that ``close`` waits for all of them together, >= 0; later calls are dropped.

    Raises:
        ConfigError: an argument is not valid.

    >>> class Broken:
    ...     inline = True
    ...     def log(self, metrics, step): raise OSError("no space left")
    ...     def log_trajectories(self, groups, step): ...
    ...     def close(self): ...
    >>> several = Several([Broken()])
    >>> several.log({"train/loss": 0.5}, step=0)
    >>> several.metrics
    {'tracking/Broken/failed': 1.0}
    """

    inline = True

    def __init__(self, trackers: Iterable[Tracker], *, capacity: int = 256, timeout: float = 10.0) -> None:
        trackers = list(trackers) if isinstance(trackers, Iterable) else [trackers]
        for i, tracker in enumerate(trackers):
            if isinstance(tracker, type) or not isinstance(tracker, Tracker):
                raise ConfigError(
                    f"trackers[{i}]", f"got {_check.describe(tracker)}", "log, log_trajectories and close"
                )
        if not trackers:
            raise ConfigError("trackers", "is empty", "at least one")
        _check.integer("capacity", capacity, low=1)
        self._timeout = _check.real("timeout", timeout, low=0.0, why="seconds")
        self._deliveries: list[Delivery[Tracker]] = []
        for tracker in trackers:
            name = type(tracker).__name__
            name += f"-{sum(delivery.name.partition('-')[0] == name for delivery in self._deliveries) + 1}" * any(
                delivery.name.partition("-")[0] == name for delivery in self._deliveries
            )
            direct = bool(getattr(tracker, "inline", False))
            self._deliveries.append((Delivery if direct else QueuedDelivery)(tracker, name, capacity))

    @property
    def metrics(self) -> dict[str, float]:
        """The losses so far: "tracking/<tracker>/failed", "/dropped" (no room), "/refused" (could not be logged)."""
        losses: dict[str, float] = {}
        for delivery in self._deliveries:
            losses |= {f"tracking/{delivery.name}/{what}": float(n) for what, n in sorted(delivery.counts.items())}
        return losses

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Pass on the numbers as they are now."""
        try:
            numbers, step = protocol.checked(metrics, step)
        except Exception as error:  # noqa: BLE001  # one bad number does not end a run
            self._refuse(error)
            numbers = _good(metrics)
            if not numbers or isinstance(step, bool) or not isinstance(step, int) or step < 0:
                return
        for delivery in self._deliveries:
            delivery.do(lambda tracker: tracker.log(dict(numbers), step))

    def log_trajectories(
        self,
        groups: Iterable[Group],
        step: int,
        *,
        advantages: Sequence[object] | None = None,
        trainer_logprobs: Sequence[object] | None = None,
    ) -> None:
        """Pass on the groups."""
        per_token = {"advantages": advantages, "trainer_logprobs": trainer_logprobs}
        extras = {name: copy.deepcopy(value) for name, value in per_token.items() if value is not None}
        try:
            listed = checked_groups(groups)
            _training.records(listed, step, **extras)
        except Exception as error:  # noqa: BLE001
            self._refuse(error)
            return
        for delivery in self._deliveries:
            delivery.do(lambda tracker: tracker.log_trajectories(list(listed), step, **extras))

    def rewind(self, step: int) -> None:
        """Rewind the trackers that support it: the run resumes from ``step``."""
        for delivery in self._deliveries:
            if callable(getattr(delivery.receiver, "rewind", None)):
                delivery.do(operator.methodcaller("rewind", step))

    def close(self, timeout: float | None = None) -> None:
        """Close all trackers, side by side; after ``timeout`` seconds waiting calls are dropped and counted.

        Args:
            timeout: >= 0; None: as given to the constructor.
        """
        ends = time.monotonic() + (self._timeout if timeout is None else timeout)
        for delivery in self._deliveries:
            delivery.end()
        for delivery in self._deliveries:
            delivery.wait(ends)

    def _refuse(self, error: Exception) -> None:
        for delivery in self._deliveries:
            delivery.count("refused", f"got a value that cannot be logged: {error}")


def _good(metrics: object) -> dict[str, float]:
    """Return the metrics that can be logged."""
    numbers: dict[str, float] = {}
    for name, value in metrics.items() if isinstance(metrics, Mapping) else ():
        try:
            numbers |= protocol.checked({name: value}, 0)[0]
        except Exception:  # noqa: BLE001, S112  # it was counted with the others
            continue
    return numbers
