"""Trackers of a run's metrics and trajectories: files, the terminal, and services, none of which can block a run."""

from __future__ import annotations

import contextlib
import copy
import logging
import operator
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

from rlkit import _check
from rlkit._runtime import Resource
from rlkit._secrets import mask, redact
from rlkit.errors import ConfigError
from rlkit.registry import Registry
from rlkit.tracking.diagnostics import mismatch_metrics, train_metrics
from rlkit.tracking.jsonl import Jsonl, PerToken, check_metrics, check_per_token, read_metrics
from rlkit.trajectory import Group, checked_groups

__all__ = [
    "Jsonl",
    "MultiTracker",
    "Tracker",
    "check_metrics",
    "for_run",
    "mask",
    "mismatch_metrics",
    "read_metrics",
    "registry",
    "train_metrics",
]

registry = Registry("tracker", entry_point_group="rlkit.trackers")
"""Name -> class. Text entries are imported at their first use."""

registry["jsonl"] = Jsonl
registry["console"] = "rlkit.tracking.console:Console"
registry["wandb"] = "rlkit.tracking.services:Wandb"
registry["tensorboard"] = "rlkit.tracking.services:TensorBoard"
registry["trackio"] = "rlkit.tracking.services:Trackio"
registry["mlflow"] = "rlkit.tracking.services:Mlflow"


@runtime_checkable
class Tracker(Protocol):
    """Anything that takes a run's numbers and trajectories.

    An attribute ``inline = True`` says that its calls are quick and may be made from the training loop;
    ``MultiTracker`` makes the calls of all others in a separate thread. A tracker may have two more methods:
    ``sync()`` returns its position as plain data, which a run stores in each checkpoint, and ``rewind(step,
    position)`` drops what was logged after the checkpoint from which a run resumes at ``step``; the position is None
    for a tracker without ``sync``, or without a checkpoint.
    """

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Take the numbers of a step; may be called several times for one step, with other names."""

    def log_trajectories(
        self, groups: Iterable[Group], step: int, *, advantages: PerToken = None, trainer_logprobs: PerToken = None
    ) -> None:
        """Take the groups of a step.

        Args:
            groups: the groups of a rollout.
            step: the step that they trained, or that they were evaluated at.
            advantages: one entry per trajectory, in the order of the groups: a number, or one per token of the
                policy's, [token_count].
            trainer_logprobs: one entry per trajectory: [token_count], as ``ForwardBackwardOutput.selected`` has them.
        """

    def close(self) -> None:
        """Flush and close. Idempotent."""


def for_run(name: str, folder: str | Path) -> Tracker:
    """Return the tracker of that name, with its defaults for a run that is kept in ``folder``.

    It is the result of the class's ``for_run(folder)``, or without that method, of the class called with the folder.

    Raises:
        UnknownNameError: no tracker has that name; the message suggests and lists the names.
        ConfigError: its package is not installed.

    >>> import tempfile
    >>> for_run("jsonl", tempfile.mkdtemp())
    Jsonl('...')
    """
    kind = registry[name]
    tracker: Tracker = getattr(kind, "for_run", kind)(Path(folder))
    return tracker


_Call: TypeAlias = Callable[[Any], object]
_CLOSE: _Call = operator.methodcaller("close")
_log = logging.getLogger(__name__)


class BackgroundCalls:
    """Calls of a receiver, in a thread unless ``inline``; they do not raise, and those that fail are counted.

    Args:
        receiver: its ``close`` is the last call.
        name: of the thread, and in warnings.
        capacity: calls that may wait; more are dropped and counted.
    """

    def __init__(self, receiver: Any, name: str, capacity: int, *, inline: bool = False) -> None:
        self.receiver = receiver
        self.name = name
        self.counts: Counter[str] = Counter()
        self._capacity = capacity
        self._inline = inline
        self._waiting: queue.Queue[_Call] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._ended = False
        self._given_up = False
        self._lock = threading.Lock()

    @property
    def waiting(self) -> int:
        """The number of waiting calls."""
        return 0 if self._ended else self._waiting.qsize()

    def submit(self, call: _Call) -> None:
        """Make the call, or queue it; do nothing after ``end``."""
        if self._ended:
            return
        if self._waiting.qsize() >= self._capacity:
            self.count("dropped", f"is slower than the run: {self._capacity} calls wait for it, and one was dropped")
        else:
            self._put(call)

    def count(self, what: str, text: str, number: int = 1) -> None:
        """Add to a counter; warn the first time."""
        with self._lock:
            first = what not in self.counts
            self.counts[what] += number
        if first:
            _log.warning("tracker %s %s; the run continues, and this warning is shown once", self.name, redact(text))

    def end(self) -> None:
        """Close the receiver after the waiting calls. Idempotent."""
        if not self._ended:
            self._ended = True
            self._put(_CLOSE)

    def wait(self, deadline: float) -> None:
        """Wait for started calls until ``time.monotonic()`` is ``deadline``; drop and count the rest."""
        if self._thread is None or self._given_up:
            return
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._given_up = True
            left = max(0, self._waiting.qsize() - 1)  # without the end
            if left:
                self.count("dropped", f"did not finish in time: {left} calls were dropped", left)
            else:
                self.count("failed", "did not finish in time")

    def _put(self, call: _Call) -> None:
        if self._inline:
            self._run(call)
            return
        self._waiting.put(call)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"rlkit-{self.name}", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        call = None
        while call is not _CLOSE:
            call = self._waiting.get()
            if self._given_up:
                return
            self._run(call)

    def _run(self, call: _Call) -> None:
        try:
            call(self.receiver)
        except Exception as error:  # noqa: BLE001  # the run continues after any exception
            self.count("failed", f"failed: {type(error).__name__}: {error}")


class MultiTracker(Resource):
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
    >>> tracker = MultiTracker([Broken()])
    >>> tracker.log({"train/loss": 0.5}, step=0)
    >>> tracker.metrics
    {'tracking/Broken/failed': 1.0}
    """

    inline = True

    def __init__(self, trackers: Iterable[Tracker], *, capacity: int = 256, timeout: float = 10.0) -> None:
        trackers = list(trackers) if isinstance(trackers, Iterable) else [trackers]
        if not trackers:
            raise ConfigError("trackers", "is empty", "at least one")
        _check.integer("capacity", capacity, low=1)
        self._timeout = _check.real("timeout", timeout, low=0.0, why="seconds")
        self._calls: list[BackgroundCalls] = []
        of_class: Counter[str] = Counter()
        for i, tracker in enumerate(trackers):
            good = isinstance(tracker, Tracker) and not isinstance(tracker, type)
            _check.require(good, f"trackers[{i}]", tracker, "log, log_trajectories and close")
            name = type(tracker).__name__
            of_class[name] += 1
            name += f"-{of_class[name]}" * (of_class[name] > 1)
            inline = bool(getattr(tracker, "inline", False))
            self._calls.append(BackgroundCalls(tracker, name, capacity, inline=inline))

    @property
    def metrics(self) -> dict[str, float]:
        """The losses so far: "tracking/<tracker>/failed", "/dropped" (no room), "/refused" (could not be logged)."""
        return {f"tracking/{x.name}/{what}": float(n) for x in self._calls for what, n in sorted(x.counts.items())}

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Pass on the numbers as they are now."""
        floats: dict[str, float] = {}
        try:
            floats, step = check_metrics(metrics, step)
        except Exception as error:  # noqa: BLE001  # one bad number does not end a run
            self._refuse(error)
            for name, value in metrics.items() if isinstance(metrics, Mapping) else ():
                with contextlib.suppress(Exception):
                    floats |= check_metrics({name: value}, step)[0]
            if not floats:
                return
        self._submit(lambda tracker: tracker.log(dict(floats), step))

    def log_trajectories(
        self, groups: Iterable[Group], step: int, *, advantages: PerToken = None, trainer_logprobs: PerToken = None
    ) -> None:
        """Pass on the groups, and the values per token as they are now."""
        given = {"advantages": advantages, "trainer_logprobs": trainer_logprobs}
        try:
            listed = checked_groups(groups)
            extras = {name: copy.deepcopy(value) for name, value in given.items() if value is not None}
            check_per_token(listed, **extras)
        except Exception as error:  # noqa: BLE001
            self._refuse(error)
            return
        self._submit(lambda tracker: tracker.log_trajectories(list(listed), step, **extras))

    def close(self, timeout: float | None = None) -> None:
        """Close all trackers at the same time; after ``timeout`` seconds waiting calls are dropped and counted.

        Args:
            timeout: >= 0; None: as given to the constructor.
        """
        deadline = time.monotonic() + (self._timeout if timeout is None else timeout)
        for calls in self._calls:
            calls.end()
        for calls in self._calls:
            calls.wait(deadline)

    def _submit(self, call: _Call) -> None:
        for calls in self._calls:
            calls.submit(call)

    def _refuse(self, error: Exception) -> None:
        for calls in self._calls:
            calls.count("refused", f"got a value that cannot be logged: {error}")


for _name in set(__all__) - {"registry"}:
    globals()[_name].__module__ = __name__  # where users import them from
