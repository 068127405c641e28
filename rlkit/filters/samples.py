"""Which samples train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlkit import _check, _rows
from rlkit._calls import answered
from rlkit._forms import RowsLike
from rlkit.errors import DataError
from rlkit.filters.selection import Selection, select

__all__ = ["duplicates", "failed", "overlong", "stale", "truncated", "unscored"]


@answered
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
    for i, reason in enumerate(_items("stop_reasons", stop_reasons)):
        _check.choice(f"stop_reasons[{i}]", reason, ("stop", "length"), error=DataError)
    return select("truncated", np.array([reason != "length" for reason in stop_reasons], bool))


@answered
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
    return select("overlong", _counts("lengths", lengths) <= max_length)


@answered
def duplicates(sequences: Sequence[object]) -> Selection:
    """Keep the first of equal token sequences.

    Args:
        sequences: [N] of 1-D token ids. Within a group, equal samples weigh a rare answer too much.

    Raises:
        DataError: an entry holds no token ids.

    >>> duplicates([[5, 6], [5], [5, 6]]).keep
    array([ True,  True, False])
    """
    seen: set[bytes] = set()
    keep = []
    for i, tokens in enumerate(_items("sequences", sequences)):
        key = _check.token_ids(f"sequences[{i}]", tokens).tobytes()
        keep.append(key not in seen)
        seen.add(key)
    return select("duplicates", np.array(keep, bool))


@answered
def failed(failures: Sequence[object]) -> Selection:
    """Drop rollouts that failed for reasons that are not the policy's, such as a sandbox that died.

    Args:
        failures: [N]: None or False where all went well, True or the exception where not.

    Raises:
        DataError: an entry is something else.

    >>> failed([None, TimeoutError("sandbox"), False]).keep
    array([ True, False,  True])
    """
    keep = []
    for i, failure in enumerate(_items("failures", failures)):
        if failure is not None and not isinstance(failure, (bool, np.bool_, BaseException)):
            raise DataError(f"failures[{i}]", f"is {_check.shown(failure)}", "None, True, False or an exception")
        keep.append(failure is None or failure is False or (isinstance(failure, np.bool_) and not failure))
    return select("failed", np.array(keep, bool))


@answered
def stale(versions: RowsLike, *, current: int, max_lag: int) -> Selection:
    """Drop samples whose policy is more than ``max_lag`` optimizer steps old.

    Args:
        versions: [N] integers, as ``Sample.version``.
        current: >= 0, the trainer's version now.
        max_lag: >= 0.

    Raises:
        DataError: versions are negative or no numbers, or newer than current.
        ConfigError: a setting is out of range.

    >>> stale([3, 5, 6], current=6, max_lag=1).keep
    array([False,  True,  True])

    Source: bounded staleness, AReaL, arXiv:2505.24298.
    """
    current = _check.integer("current", current, low=0)
    max_lag = _check.integer("max_lag", max_lag, low=0)
    lag = current - _counts("versions", versions)
    newer = np.flatnonzero(lag < 0)
    if newer.size:
        i = int(newer[0])
        raise DataError(f"versions[{i}]", f"is {current - lag[i]:.0f}", f"at most current={current}")
    return select("stale", lag <= max_lag)


@answered
def unscored(rewards: RowsLike) -> Selection:
    """Drop samples whose reward is NaN.

    Args:
        rewards: [N]; finite, or NaN for unscored.

    Raises:
        DataError: rewards are infinite or no numbers.

    >>> unscored([0.0, float("nan")]).keep
    array([ True, False])
    """
    rows = _rows.parse("rewards", _rows.vector("rewards", rewards))
    rows.check_finite(rows.flat, nan=True)
    return select("unscored", ~np.isnan(rows.flat))


def _items(where: str, value: Any) -> Sequence[object]:
    if isinstance(value, (str, bytes)) or not hasattr(value, "__len__") or not hasattr(value, "__getitem__"):
        raise DataError(where, f"got {_check.shown(value)}", "a sequence with one entry per sample")
    items: Sequence[object] = value
    return items


def _counts(where: str, value: object) -> np.ndarray:
    array = _rows.vector(where, value)
    bad = np.flatnonzero(~((array >= 0) & (array <= _rows.LARGEST)))
    if bad.size:
        raise DataError(f"{where}[{bad[0]}]", f"is {array[bad[0]]}", "a number >= 0")
    return array
