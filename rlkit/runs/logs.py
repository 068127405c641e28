"""A run's trackers: made from their names, synced before a checkpoint, and set back when the run goes on from one."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlkit import _check
from rlkit.errors import CheckpointError, ConfigError
from rlkit.runs.record import Record

__all__ = ["made", "positions", "rewind"]


def made(trackers: Sequence[Any], folder: Path) -> list[Any]:
    """Objects for names, those with defaults for a run in ``folder``."""
    from rlkit import tracking

    if isinstance(trackers, str) or not isinstance(trackers, Sequence):
        what = f"got {_check.shown(trackers)}"
        raise ConfigError(_check.problem("Run(trackers)", what, "a sequence of names and trackers"))
    return [tracking.for_run(x, folder) if isinstance(x, str) else x for x in trackers]


def positions(trackers: Sequence[Any]) -> dict[str, Any]:
    """Where the logs of those that can say so end now, on disk: what a checkpoint holds of them.

    Raises:
        CheckpointError: they could not be synced, so a checkpoint would promise more than there is.
    """
    found = {}
    for name, tracker in _named(trackers):
        if callable(getattr(tracker, "sync", None)):
            try:
                found[name] = tracker.sync()
            except OSError as error:
                raise CheckpointError(f"the logs of {tracker!r} could not be synced: {error}") from error
    return found


def rewind(trackers: Sequence[Any], record: Record | None) -> None:
    """Has them drop what was logged after ``record`` and is done again; None: all that is there."""
    step = 0 if record is None else record.step
    logged = {} if record is None else record.logged
    for name, tracker in _named(trackers):
        call = getattr(tracker, "rewind", None)
        if callable(call):
            known = name in logged and "at" in inspect.signature(call).parameters
            call(step, at=logged[name]) if known else call(step)


def _named(trackers: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Each under its class's name, numbered from the second of a class on."""
    seen: dict[str, int] = {}
    for tracker in trackers:
        name = type(tracker).__name__
        seen[name] = seen.get(name, 0) + 1
        yield (name if seen[name] == 1 else f"{name}-{seen[name]}"), tracker
