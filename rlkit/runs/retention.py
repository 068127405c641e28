"""Which checkpoints stay."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs

from rlkit import _check
from rlkit._calls import answered
from rlkit._warn import warn
from rlkit.errors import BackendError, ConfigError
from rlkit.runs import record as folders
from rlkit.runs.record import Record

__all__ = ["Retention", "prune"]


@answered
@attrs.frozen
class Retention:
    """Keeps the latest ``last`` checkpoints, every ``every``-th step's, and the ``best`` by a metric.

    Args:
        last: >= 1.
        every: >= 1, or None for none beside the last ones.
        best: how many of those with the best ``metric``, >= 0; NaN is never one.
        metric: its name, as given to ``Run.checkpoint(metrics=)``.
        lowest: whether the lowest is the best.

    >>> Retention(last=2, every=100, best=1, metric="eval/mean").last
    2
    """

    last: int = 2
    every: int | None = None
    best: int = 0
    metric: str | None = None
    lowest: bool = False

    def __attrs_post_init__(self) -> None:
        _check.integer("Retention.last", self.last, low=1, why="the latest is what a run goes on from")
        _check.optional(_check.integer, "Retention.every", self.every, low=1)
        _check.integer("Retention.best", self.best, low=0)
        _check.flag("Retention.lowest", self.lowest)
        _check.require(self.metric is None or isinstance(self.metric, str), "Retention.metric", self.metric, "a name")
        if self.best and not self.metric:
            raise ConfigError("Retention.best: which metric is it by? give metric=")

    def spent(self, records: Sequence[Record]) -> list[Record]:
        """Return those of ``records``, oldest first, that need not be kept."""
        staying = {record.path for record in records[-self.last :]}
        if self.every is not None:
            staying |= {record.path for record in records if record.step % self.every == 0}
        if self.best and self.metric is not None:
            values = [(record.metrics.get(self.metric, math.nan), record) for record in records]
            scored = [pair for pair in values if not math.isnan(pair[0])]
            scored.sort(key=lambda pair: (pair[0] if self.lowest else -pair[0], -pair[1].step))
            staying |= {record.path for _, record in scored[: self.best]}
        return [record for record in records if record.path not in staying]


def prune(folder: Path, retention: Retention, delete: Callable[[Sequence[str]], None]) -> None:
    """Remove what retention does not keep, by ``delete`` on a service; what cannot be removed ends no run."""
    try:
        there = folders.records(folder, verify=False)
        spent = retention.spent(there)
        for record in spent:
            delete(folders.remove(record))
        folders.tidy(folder, [record for record in there if record not in spent])
    except (OSError, BackendError) as error:
        warn(f"a checkpoint that is spent could not be removed: {error}", RuntimeWarning)
