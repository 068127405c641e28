"""Filters that select the groups and samples to train on, as masks with counts.

A filter checks one property and returns a ``Selection``; selections are joined by ``&``. Filters remove nothing: the
caller uses ``selection.keep``, ``selection.indices`` or ``selection.refilled()``, and logs ``selection.dropped``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import attrs
import numpy as np

from rlkit import _check
from rlkit._rows import Rows, RowsLike, is_count, warn_alone
from rlkit.errors import ConfigError, DataError

__all__ = [
    "Selection",
    "difficulty_band",
    "duplicates",
    "dynamic_sampling",
    "failed",
    "overlong",
    "stale",
    "truncated",
    "unscored",
    "zero_variance",
]

_MASK = "a 1-D array of True and False"


def _read_mask(keep: object) -> np.ndarray:
    array = _check.as_array("keep", keep, _MASK)
    array = array.astype(bool) if array.shape == (0,) else array  # an empty list has no dtype
    if array.ndim != 1 or array.dtype.kind != "b":
        raise DataError("keep", f"got {_check.describe(array)}", _MASK, "indices are not a mask")
    return _check.frozen(array)


def _read_counts(dropped: object) -> Mapping[str, int]:
    if not isinstance(dropped, Mapping) or not all(isinstance(name, str) for name in dropped):
        raise DataError("dropped", f"got {_check.describe(dropped)}", "a mapping of filter names to counts")
    return MappingProxyType(
        {name: _check.integer(f"dropped[{name!r}]", n, low=0, error=DataError) for name, n in dropped.items()}
    )


@attrs.frozen(eq=False)
class Selection:
    """The result of a filter.

    Attributes:
        keep: bool [N], one entry per group or per trajectory; read-only.
        dropped: name of the filter -> how many it would drop by itself.

    Raises:
        DataError: keep is not a 1-D array of booleans, or dropped is not a mapping of names to counts.

    >>> from rlkit.filters import overlong, unscored
    >>> selection = unscored([1.0, float("nan")]) & overlong([5, 9], max_length=4)
    >>> selection.keep, dict(selection.dropped), selection.kept
    (array([False, False]), {'unscored': 1, 'overlong': 2}, 0)
    """

    keep: np.ndarray = attrs.field(converter=_read_mask)
    dropped: Mapping[str, int] = attrs.field(converter=_read_counts)

    @property
    def kept(self) -> int:
        """The number that is kept."""
        return int(self.keep.sum())

    @property
    def indices(self) -> np.ndarray:
        """The indices of what is kept, int64."""
        return np.flatnonzero(self.keep)

    def refilled(self, count: int | None = None) -> np.ndarray:
        """Return indices of what is kept, repeated from the start up to ``count``; as many as before by default.

        If none is kept, the result is an empty array, which the caller has to skip.

        >>> from rlkit.filters import zero_variance
        >>> zero_variance([[1, 0], [1, 1], [0, 1], [0, 0]]).refilled()
        array([0, 2, 0, 2])
        """
        count = self.keep.size if count is None else _check.integer("count", count, low=0)
        indices = self.indices
        return np.resize(indices, count) if indices.size else indices

    def __and__(self, other: Selection) -> Selection:
        if not isinstance(other, Selection):  # the operator of something else may know
            return NotImplemented
        if other.keep.size != self.keep.size:
            what = f"have {self.keep.size} and {other.keep.size} entries"
            raise DataError("selections", what, "the same number", "both must select from the same groups or samples")
        names = {**self.dropped, **other.dropped}
        dropped = {name: self.dropped.get(name, 0) + other.dropped.get(name, 0) for name in names}
        return Selection(self.keep & other.keep, dropped)


def select(name: str, keep: np.ndarray) -> Selection:
    """Return the selection of the filter ``name``."""
    return Selection(keep, {name: int((~keep).sum())})


def zero_variance(rewards: RowsLike, *, threshold: float = 0.0) -> Selection:
    """Drop groups whose rewards do not differ, since they teach a relative estimator nothing.

    Args:
        rewards: one group [G], [B, G] or a list of [G_i]; finite, or NaN for unscored, which do not count.
        threshold: >= 0; groups are kept whose unbiased standard deviation is larger. At 0 the test is max > min, which
            rounding cannot satisfy.

    Returns:
        A selection of groups [B]. ``refilled()`` repeats kept groups until the batch has its size again.

    Raises:
        DataError: rewards are empty, infinite or no numbers.
        ConfigError: threshold is out of range.

    >>> zero_variance([[1.0, 0.0], [0.1, 0.1, 0.1]]).keep
    array([ True, False])

    Source: DAPO, arXiv:2503.14476, section 3.2; refilling: Polaris (2025). Peers: slime's threshold is 1e-6.
    """
    threshold = _check.real("threshold", threshold, low=0.0)
    rows = Rows.parse("rewards", rewards, nan=True)
    warn_alone(rows)
    keep = rows.reduce(np.fmax, rows.flat) > rows.reduce(np.fmin, rows.flat)
    if threshold > 0:
        keep &= rows.deviation(rows.flat, 1) > threshold
    return select("zero_variance", keep)


def dynamic_sampling(
    rewards: RowsLike, *, correct: float = 1.0, needed: int | None = None, keep_when_insufficient: bool = False
) -> Selection:
    """Keep groups of which some but not all samples are right.

    Args:
        rewards: one group [G], [B, G] or a list of [G_i]; finite, or NaN for unscored, which do not count.
        correct: a reward of at least this is right.
        needed: how many groups the batch needs: the first so many are kept; None keeps all.
        keep_when_insufficient: whether, if there are fewer than ``needed``, the first of the other groups fill up.

    Returns:
        A selection of groups [B]; ``needed - selection.kept`` groups are still to be sampled.

    Raises:
        DataError: rewards are empty, infinite or no numbers.
        ConfigError: a setting is out of range, or keep_when_insufficient is given without needed.

    >>> dynamic_sampling([[1, 1], [1, 0], [0, 0], [0, 1]], needed=1).keep
    array([False,  True, False, False])

    Source: DAPO, arXiv:2503.14476, section 3.2. Peers: verl's filter_groups.
    """
    correct = _check.real("correct", correct)
    fill = _check.flag("keep_when_insufficient", keep_when_insufficient)
    needed = _check.optional(_check.integer, "needed", needed, low=1)
    if fill and needed is None:
        raise ConfigError("needed", "is None", "a number with keep_when_insufficient=True")
    rows = Rows.parse("rewards", rewards, nan=True)
    warn_alone(rows)
    keep = (rows.reduce(np.fmax, rows.flat) >= correct) & (rows.reduce(np.fmin, rows.flat) < correct)
    if needed is not None:
        mixed = int(keep.sum())
        keep &= np.cumsum(keep) <= needed
        if fill:
            keep |= np.cumsum(~keep) <= needed - mixed
    return select("dynamic_sampling", keep)


def difficulty_band(rewards: RowsLike, *, low: float = 0.1, high: float = 0.95) -> Selection:
    """Keep groups whose mean reward lies in [low, high].

    Args:
        rewards: one group [G], [B, G] or a list of [G_i]; finite, or NaN for unscored, which do not count; a group
            without a scored reward is dropped.
        low, high: bounds that do not cross.

    Raises:
        DataError: rewards are empty, infinite or no numbers.
        ConfigError: the bounds are not finite, or cross.

    >>> difficulty_band([[1, 1], [1, 0], [0, 0]]).keep
    array([False,  True, False])

    Source: no paper. Peers: prime-rl's and rllm's easy and hard thresholds.
    """
    high = _check.real("high", high)
    low = _check.real("low", low, high=high)
    rows = Rows.parse("rewards", rewards, nan=True)
    lowest = rows.reduce(np.fmin, rows.flat)  # the mean of equal numbers may round: that of zeros cannot
    mean = lowest + rows.mean(rows.flat - rows.repeat(lowest))
    return select("difficulty_band", (mean >= low) & (mean <= high))


def truncated(stop_reasons: Sequence[str]) -> Selection:
    """Drop samples that were cut at the limit of tokens.

    Args:
        stop_reasons: [N] of "stop" or "length", as ``Sample.stop_reason``.

    Raises:
        DataError: an entry is neither.

    >>> truncated(["stop", "length"]).keep
    array([ True, False])

    Source: DAPO, arXiv:2503.14476, section 3.4 (over-long filtering). Peers: TRL's mask_truncated_completions.
    """
    _check.entries("stop_reasons", stop_reasons, why="one entry per sample")
    for i, reason in enumerate(stop_reasons):
        _check.choice(f"stop_reasons[{i}]", reason, ("stop", "length"), error=DataError)
    return select("truncated", np.array([reason != "length" for reason in stop_reasons], bool))


def overlong(lengths: RowsLike, *, max_length: int) -> Selection:
    """Drop samples of more than ``max_length`` tokens.

    Args:
        lengths: [N] numbers >= 0.
        max_length: >= 0.

    Raises:
        DataError: lengths are negative, not finite or no numbers.
        ConfigError: max_length is out of range.

    >>> overlong([3, 9], max_length=4).keep
    array([ True, False])
    """
    max_length = _check.integer("max_length", max_length, low=0)
    rows = Rows.vector("lengths", lengths)
    rows.require("lengths", rows.flat, rows.flat >= 0, "a number >= 0")
    return select("overlong", rows.flat <= max_length)


def duplicates(sequences: Sequence[object]) -> Selection:
    """Keep the first of equal token sequences.

    Args:
        sequences: [N] of 1-D token ids. Within a group, equal samples weigh a rare answer too much.

    Raises:
        DataError: an entry is not a sequence of token ids.

    >>> duplicates([[5, 6], [5], [5, 6]]).keep
    array([ True,  True, False])
    """
    _check.entries("sequences", sequences, why="one entry per sample")
    keys = [_check.token_ids(f"sequences[{i}]", tokens).tobytes() for i, tokens in enumerate(sequences)]
    first: dict[bytes, int] = {}
    return select("duplicates", np.array([first.setdefault(key, i) == i for i, key in enumerate(keys)], bool))


def failed(failures: Sequence[object]) -> Selection:
    """Drop rollouts that failed for reasons that are not the policy's, such as a sandbox that died.

    Args:
        failures: [N]: None or False where the rollout succeeded, True or the exception where it failed.

    Raises:
        DataError: an entry is something else.

    >>> failed([None, TimeoutError("sandbox"), False]).keep
    array([ True, False,  True])
    """
    _check.entries("failures", failures, why="one entry per sample")
    for i, failure in enumerate(failures):
        if failure is not None and not isinstance(failure, (bool, np.bool_, BaseException)):
            raise DataError(f"failures[{i}]", f"is {_check.describe(failure)}", "None, True, False or an exception")
    return select("failed", np.array([not (isinstance(f, BaseException) or f) for f in failures], bool))


def stale(versions: RowsLike, *, current: int, max_lag: int) -> Selection:
    """Drop samples whose policy is more than ``max_lag`` optimizer steps old.

    Args:
        versions: [N] integers, as ``Sample.version``.
        current: >= 0, the trainer's version now.
        max_lag: >= 0.

    Raises:
        DataError: versions are negative or no integers, or newer than current.
        ConfigError: a setting is out of range.

    >>> stale([3, 5, 6], current=6, max_lag=1).keep
    array([False,  True,  True])

    Source: bounded staleness, AReaL, arXiv:2505.24298.
    """
    current = _check.integer("current", current, low=0)
    max_lag = _check.integer("max_lag", max_lag, low=0)
    rows = Rows.vector("versions", versions)
    rows.require("versions", rows.flat, is_count(rows.flat), "an integer >= 0")
    rows.require("versions", rows.flat, rows.flat <= current, f"at most current={current}")
    return select("stale", current - rows.flat <= max_lag)


def unscored(rewards: RowsLike) -> Selection:
    """Drop samples whose reward is NaN.

    Args:
        rewards: [N]; finite, or NaN for unscored.

    Raises:
        DataError: rewards are infinite or no numbers.

    >>> unscored([0.0, float("nan")]).keep
    array([ True, False])
    """
    return select("unscored", ~np.isnan(Rows.vector("rewards", rewards, nan=True).flat))
