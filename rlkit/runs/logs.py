"""A run's trackers: made from their names, synced before a checkpoint, and set back when the run goes on from one."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlkit import _check
from rlkit.backends.protocol import Tokenizer
from rlkit.errors import CheckpointError, ConfigError, DataError
from rlkit.runs.record import Record
from rlkit.tracking import Tracker
from rlkit.trajectory import Group

__all__ = ["Logs"]


class Logs:
    """The trackers of a run.

    Args:
        trackers: names and objects; names become objects with their defaults for a run in ``folder``.
        record: the checkpoint that it goes on from; what was logged after it is dropped.

    Raises:
        ConfigError: they are no sequence of these.
    """

    def __init__(self, trackers: Sequence[str | Tracker], folder: Path, record: Record | None) -> None:
        from rlkit import tracking

        if isinstance(trackers, str) or not isinstance(trackers, Sequence):
            raise ConfigError("Run(trackers)", f"got {_check.shown(trackers)}", "a sequence of names and trackers")
        self.trackers: list[Any] = [tracking.for_run(x, folder) if isinstance(x, str) else x for x in trackers]
        self.rewind(record)
        self._several = tracking.Several(self.trackers) if self.trackers else None

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Hand numbers on."""
        if not isinstance(metrics, Mapping):
            raise DataError("log(metrics)", f"got {_check.shown(metrics)}", "a mapping from names to numbers")
        if self._several is not None:
            self._several.log(metrics, step)

    def log_trajectories(self, groups: Iterable[Group], step: int, **options: Any) -> None:
        """Hand groups on."""
        if self._several is not None:
            self._several.log_trajectories(groups, step, **options)

    def speak(self, tokenizer: Tokenizer) -> None:
        """Give the policy's tokenizer to those that decode."""
        for tracker in self.trackers:
            if hasattr(tracker, "speak"):
                tracker.speak(tokenizer)

    def positions(self) -> dict[str, object]:
        """Return where the logs of those that can say so end now, on disk: what a checkpoint holds of them.

        Raises:
            CheckpointError: they could not be synced, so a checkpoint would promise more than there is.
        """
        positions = {}
        for name, tracker in self._named():
            if callable(getattr(tracker, "sync", None)):
                try:
                    positions[name] = tracker.sync()
                except OSError as error:
                    raise CheckpointError(f"the logs of {tracker!r} could not be synced: {error}") from error
        return positions

    def rewind(self, record: Record | None) -> None:
        """Have them drop what was logged after ``record`` and is done again; None: all that is there."""
        step = 0 if record is None else record.step
        logged = {} if record is None else record.logged
        for name, tracker in self._named():
            call = getattr(tracker, "rewind", None)
            if callable(call):
                known = name in logged and "at" in inspect.signature(call).parameters
                call(step, at=logged[name]) if known else call(step)

    def close(self) -> None:
        """Close them all."""
        if self._several is not None:
            self._several.close()

    def _named(self) -> Iterator[tuple[str, Any]]:
        """Yield each under its class's name, numbered from the second of a class on."""
        seen: dict[str, int] = {}
        for tracker in self.trackers:
            name = type(tracker).__name__
            seen[name] = seen.get(name, 0) + 1
            yield (name if seen[name] == 1 else f"{name}-{seen[name]}"), tracker
