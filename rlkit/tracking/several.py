"""Several trackers at once, none of which can hold up or end a run."""

from __future__ import annotations

import copy
import operator
import time
from collections.abc import Iterable, Mapping, Sequence

from rlkit import _check
from rlkit._resource import Resource
from rlkit.errors import ConfigError
from rlkit.tracking import pertoken, values
from rlkit.tracking.delivery import Delivery, QueuedDelivery
from rlkit.tracking.protocol import Tracker
from rlkit.trajectory import Group
from rlkit.trajectory.types import checked_groups

__all__ = ["Several"]


class Several(Resource):
    """Hands everything on to several trackers; a tracker itself, and a context manager.

    Once it is made, none of its methods raises, and none waits: a tracker that is not ``inline`` gets its calls in a
    thread of its own, over a queue of limited length. What a tracker fails at, what has no room in its queue, and what
    cannot be logged at all is left out and counted (``metrics``); the first time, a warning is logged.

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
                raise ConfigError(f"trackers[{i}]", f"got {_check.shown(tracker)}", "log, log_trajectories and close")
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
        """What was lost so far: "tracking/<tracker>/failed", "/dropped" (no room), "/refused" (could not be logged)."""
        losses: dict[str, float] = {}
        for delivery in self._deliveries:
            losses |= {f"tracking/{delivery.name}/{what}": float(n) for what, n in sorted(delivery.counts.items())}
        return losses

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Hands the numbers on, as they are now."""
        try:
            numbers, step = values.checked(metrics, step)
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
        """Hands the groups on."""
        per_token = {"advantages": advantages, "trainer_logprobs": trainer_logprobs}
        extras = {name: copy.deepcopy(value) for name, value in per_token.items() if value is not None}
        try:
            listed = checked_groups(groups)
            pertoken.records(listed, step, **extras)
        except Exception as error:  # noqa: BLE001
            self._refuse(error)
            return
        for delivery in self._deliveries:
            delivery.do(lambda tracker: tracker.log_trajectories(list(listed), step, **extras))

    def rewind(self, step: int) -> None:
        """Tells those trackers that can that the run goes on from ``step``."""
        for delivery in self._deliveries:
            if callable(getattr(delivery.receiver, "rewind", None)):
                delivery.do(operator.methodcaller("rewind", step))

    def close(self) -> None:
        """Close all trackers, side by side; after ``timeout`` seconds what still waits is given up, and counted."""
        ends = time.monotonic() + self._timeout
        for delivery in self._deliveries:
            delivery.end()
        for delivery in self._deliveries:
            delivery.wait(ends)

    def _refuse(self, error: Exception) -> None:
        for delivery in self._deliveries:
            delivery.count("refused", f"was given what cannot be logged: {error}")


def _good(metrics: object) -> dict[str, float]:
    """Those of the metrics that can be logged."""
    numbers: dict[str, float] = {}
    for name, value in metrics.items() if isinstance(metrics, Mapping) else ():
        try:
            numbers |= values.checked({name: value}, 0)[0]
        except Exception:  # noqa: BLE001, S112  # it was counted with the others
            continue
    return numbers
