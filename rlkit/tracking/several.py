"""Several trackers at once, none of which can hold up or end a run."""

from __future__ import annotations

import copy
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

from rlkit import _check
from rlkit.errors import ConfigError
from rlkit.tracking import pertoken, values
from rlkit.tracking.protocol import Tracker
from rlkit.tracking.secrets import redact
from rlkit.trajectory import Group
from rlkit.trajectory.types import checked_groups

__all__ = ["Several"]

_log = logging.getLogger(__name__)
_Call = Callable[[Any], None]


class Several:
    """Hands everything on to several trackers; a tracker itself, and a context manager.

    Once it is made, none of its methods raises, and none waits: a tracker that is not ``inline`` gets its calls in a
    thread of its own, over a queue of limited length. What a tracker fails at, what has no room in its queue, and what
    can not be logged at all is left out and counted (``metrics``); the first time, a warning is logged.

    Args:
        trackers: at least one.
        capacity: calls that may wait for a tracker, >= 1.
        timeout: seconds that ``close`` waits for all of them together, >= 0; what waits longer is given up.

    Raises:
        ConfigError: an argument is not what it should be.

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
                what = f"got {_check.shown(tracker)}"
                raise ConfigError(_check.problem(f"trackers[{i}]", what, "log, log_trajectories and close"))
        if not trackers:
            raise ConfigError(_check.problem("trackers", "is empty", "at least one"))
        _check.integer("capacity", capacity, low=1)
        self._timeout = _check.real("timeout", timeout, low=0.0, why="seconds")
        self._lanes: list[_Lane] = []
        for tracker in trackers:
            name = type(tracker).__name__
            name += f"-{sum(lane.name.partition('-')[0] == name for lane in self._lanes) + 1}" * any(
                lane.name.partition("-")[0] == name for lane in self._lanes
            )
            direct = bool(getattr(tracker, "inline", False))
            self._lanes.append((_Lane if direct else _Threaded)(tracker, name, capacity))

    @property
    def metrics(self) -> dict[str, float]:
        """What was lost so far: "tracking/<tracker>/failed", "/dropped" (no room), "/refused" (could not be logged)."""
        found: dict[str, float] = {}
        for lane in self._lanes:
            found |= {f"tracking/{lane.name}/{what}": float(n) for what, n in sorted(lane.counts.items())}
        return found

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Hands the numbers on, as they are now."""
        try:
            numbers, step = values.checked(metrics, step)
        except Exception as error:  # noqa: BLE001  # one bad number does not end a run
            self._refuse(error)
            numbers = _good(metrics)
            if not numbers or isinstance(step, bool) or not isinstance(step, int) or step < 0:
                return
        for lane in self._lanes:
            lane.do(lambda tracker: tracker.log(dict(numbers), step))

    def log_trajectories(
        self,
        groups: Iterable[Group],
        step: int,
        *,
        advantages: Sequence[Any] | None = None,
        trainer_logprobs: Sequence[Any] | None = None,
    ) -> None:
        """Hands the groups on."""
        given = {"advantages": advantages, "trainer_logprobs": trainer_logprobs}
        extras = {name: copy.deepcopy(value) for name, value in given.items() if value is not None}
        try:
            listed = checked_groups(groups)
            pertoken.records(listed, step, **extras)
        except Exception as error:  # noqa: BLE001
            self._refuse(error)
            return
        for lane in self._lanes:
            lane.do(lambda tracker: tracker.log_trajectories(list(listed), step, **extras))

    def rewind(self, step: int) -> None:
        """Tells those trackers that can that the run goes on from ``step``."""
        for lane in self._lanes:
            if callable(getattr(lane.tracker, "rewind", None)):
                lane.do(lambda tracker: tracker.rewind(step))

    def close(self) -> None:
        """Closes all trackers, side by side; after ``timeout`` seconds what still waits is given up, and counted."""
        ends = time.monotonic() + self._timeout
        for lane in self._lanes:
            lane.end()
        for lane in self._lanes:
            lane.wait(ends)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _refuse(self, error: Exception) -> None:
        for lane in self._lanes:
            lane.count("refused", f"was given what can not be logged: {error}")


class _Lane:
    """A tracker whose calls are made at once."""

    def __init__(self, tracker: Tracker, name: str, capacity: int) -> None:
        self.tracker = tracker
        self.name = name
        self.capacity = capacity
        self.counts: Counter[str] = Counter()
        self.ended = False
        self._lock = threading.Lock()

    def do(self, call: _Call) -> None:
        if not self.ended:
            self.run(call)

    def run(self, call: _Call) -> None:
        try:
            call(self.tracker)
        except Exception as error:  # noqa: BLE001  # whatever it is, the run goes on
            self.count("failed", f"failed: {type(error).__name__}: {error}")

    def count(self, what: str, text: str, number: int = 1) -> None:
        """Counts; says so the first time."""
        with self._lock:
            first = what not in self.counts
            self.counts[what] += number
        if first:
            _log.warning("tracker %s %s; the run goes on, and this is not said again", self.name, redact(text))

    def end(self) -> None:
        if not self.ended:
            self.ended = True
            self.run(lambda tracker: tracker.close())

    def wait(self, ends: float) -> None:
        """Nothing is under way."""


class _Threaded(_Lane):
    """A tracker whose calls are made in a thread of its own."""

    def __init__(self, tracker: Tracker, name: str, capacity: int) -> None:
        super().__init__(tracker, name, capacity)
        self._waiting: queue.Queue[_Call | None] = queue.Queue(capacity + 1)  # and the end
        self._thread: threading.Thread | None = None
        self._gone = threading.Event()

    def do(self, call: _Call) -> None:
        if self.ended:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"rlkit-{self.name}", daemon=True)
            self._thread.start()
        if self._waiting.qsize() >= self.capacity:
            self.count("dropped", f"is slower than the run: {self.capacity} calls wait for it, and one was left out")
            return
        self._waiting.put_nowait(call)

    def _work(self) -> None:
        while True:
            call = self._waiting.get()
            if self._gone.is_set():
                return
            self.run(call or (lambda tracker: tracker.close()))
            if call is None:
                return

    def end(self) -> None:
        if self.ended:
            return
        self.ended = True
        if self._thread is None:  # nothing was logged, so nothing is open
            self._thread = threading.Thread(target=self._work, name=f"rlkit-{self.name}", daemon=True)
            self._thread.start()
        self._waiting.put_nowait(None)

    def wait(self, ends: float) -> None:
        if self._thread is None or self._gone.is_set():
            return
        self._thread.join(max(0.0, ends - time.monotonic()))
        if self._thread.is_alive():
            self._gone.set()
            left = max(0, self._waiting.qsize() - 1)
            if left:
                self.count("dropped", f"was not done in time: {left} calls were given up", left)
            else:
                self.count("failed", "was not done in time")


def _good(metrics: Any) -> dict[str, float]:
    """Those of the metrics that can be logged."""
    found: dict[str, float] = {}
    for name, value in metrics.items() if isinstance(metrics, Mapping) else ():
        try:
            found |= values.checked({name: value}, 0)[0]
        except Exception:  # noqa: BLE001, S112  # it was counted with the others
            continue
    return found
