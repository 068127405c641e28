"""A run's trackers: made from their names, synced before a checkpoint, and rewound when the run resumes from one."""

from __future__ import annotations

import logging
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlkit import _check
from rlkit.errors import CheckpointError, ConfigError, DataError
from rlkit.runs.record import Record
from rlkit.tracking import Tracker
from rlkit.trajectory import Group

__all__ = ["Logs", "Silence"]

_STEPS = 3
_log = logging.getLogger("rlkit.runs")


class Silence:
    """A watch on the signal: it warns once, after three steps in a row without reward differences in any group.

    Args:
        max_tokens: returns the limit of the answers, where it is known.
    """

    def __init__(self, max_tokens: Callable[[], int | None]) -> None:
        self._max_tokens = max_tokens
        self._steps: dict[int, dict[str, float]] = {}  # the last ones in a row that have a signal or none
        self._warned = False

    def look(self, metrics: Mapping[str, float], step: int) -> None:
        """Check the metrics of a step, logged in one call or several."""
        names = ("train/with_signal", "rollout/with_signal", "rollout/cut")
        found = {name: float(metrics[name]) for name in names if isinstance(metrics.get(name), numbers.Real)}
        if self._warned or not found:
            return
        self._steps = {at: seen for at, seen in self._steps.items() if step - _STEPS < at <= step}
        self._steps[step] = self._steps.get(step, {}) | found
        # advantages know more than rewards: a baseline may make a constant reward a signal
        signals = [seen.get("train/with_signal", seen.get("rollout/with_signal")) for seen in self._steps.values()]
        if signals == [0.0] * _STEPS:
            self._warned = True
            _log.warning(self._text())  # not a Warning, since -W error would end the run

    def _text(self) -> str:
        text = f"no group had different rewards in the last {_STEPS} steps: the policy learned nothing"
        cut = [seen["rollout/cut"] for seen in self._steps.values() if "rollout/cut" in seen]
        if not any(cut):
            return f"{text}; inspect the answers with rlkit report"
        limit = self._max_tokens()
        at = "max_tokens" if limit is None else f"max_tokens={limit}"
        return f"{text}; {100 * sum(cut) / len(cut):.0f} % of answers were cut at {at}"


class Logs:
    """The trackers of a run.

    Args:
        trackers: names and objects; names become objects with their defaults for a run in ``folder``.
        record: the checkpoint that it resumes from; later log entries are dropped.

    Raises:
        ConfigError: they are not a sequence of these.
    """

    def __init__(self, trackers: Sequence[str | Tracker], folder: Path, record: Record | None) -> None:
        from rlkit import tracking

        if isinstance(trackers, str) or not isinstance(trackers, Sequence):
            raise ConfigError("Run(trackers)", f"got {_check.describe(trackers)}", "a sequence of names and trackers")
        self.trackers: list[Tracker] = [tracking.for_run(x, folder) if isinstance(x, str) else x for x in trackers]
        self.rewind(record)
        self._several = tracking.MultiTracker(self.trackers) if self.trackers else None

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Pass numbers to the trackers."""
        if not isinstance(metrics, Mapping):
            raise DataError("log(metrics)", f"got {_check.describe(metrics)}", "a mapping from names to numbers")
        if self._several is not None:
            self._several.log(metrics, step)

    def log_trajectories(self, groups: Iterable[Group], step: int, **options: Any) -> None:
        """Pass groups to the trackers."""
        if self._several is not None:
            self._several.log_trajectories(groups, step, **options)

    def positions(self) -> dict[str, object]:
        """Return the current ends of the logs on disk, for a checkpoint, from trackers that support it.

        Raises:
            CheckpointError: they could not be synced, so a checkpoint would refer to missing lines.
        """
        positions = {}
        for name, tracker in self._named():
            sync = getattr(tracker, "sync", None)
            if callable(sync):
                try:
                    positions[name] = sync()
                except OSError as error:
                    raise CheckpointError(f"the logs of {tracker!r} could not be synced: {error}") from error
        return positions

    def rewind(self, record: Record | None) -> None:
        """Make the trackers drop entries after ``record``, whose steps are repeated; None: all entries."""
        step = 0 if record is None else record.step
        logged = {} if record is None else record.logged
        for name, tracker in self._named():
            call = getattr(tracker, "rewind", None)
            if callable(call):
                call(step, logged.get(name))

    def close(self, timeout: float | None = None) -> None:
        """Close them all, within ``timeout`` seconds; None: the default of ``MultiTracker``."""
        if self._several is not None:
            self._several.close(timeout)

    def _named(self) -> Iterator[tuple[str, Tracker]]:
        """Yield each under its class's name, numbered from the second of a class on."""
        seen: dict[str, int] = {}
        for tracker in self.trackers:
            name = type(tracker).__name__
            seen[name] = seen.get(name, 0) + 1
            yield (name if seen[name] == 1 else f"{name}-{seen[name]}"), tracker
