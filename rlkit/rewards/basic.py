"""From what environments give to one number per trajectory: reductions, bounds, mappings, normalisation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlkit import _check, _groups, _rows
from rlkit._calls import answered
from rlkit._forms import Arrays, RowsLike, row_wise
from rlkit.errors import ConfigError, DataError

__all__ = ["affine", "clamp", "mapping", "nonterminal_override", "nonterminal_reward", "reduction", "whitening"]

_REDUCTIONS: dict[str, np.ufunc] = {"sum": np.add, "mean": np.add, "max": np.maximum, "min": np.minimum}


@answered
def reduction(rewards: RowsLike, how: str = "sum") -> Any:
    """One number for each trajectory from the rewards of its steps.

    Args:
        rewards: per step: one trajectory [T], [B, T] or a list of [T_i]; finite, or NaN for unscored. In lists None is
            a step without a reward, and counts for nothing.
        how: "sum", "mean", "max", "min" or "last".

    Returns:
        float64 [B], or a float for one trajectory. A trajectory with an unscored step is unscored: NaN. So is one
        without a single reward.

    Raises:
        DataError: rewards are empty, infinite or no numbers.
        ConfigError: how is unknown.

    >>> reduction([[0.0, 1.0], [0.5]], "mean")
    array([0.5, 0.5])
    >>> reduction([None, 0.5, 1.0], "mean")
    0.75

    Source: none needed. Peers: OpenReward's reward_reduction.
    """
    _check.choice("how", how, (*_REDUCTIONS, "last"))
    rows = _parse(_given(rewards))
    if how == "last":
        reduced = np.where(np.isnan(rows.reduce(np.add, rows.flat)), np.nan, rows.flat[rows.ends - 1])
    else:
        reduced = rows.reduce(_REDUCTIONS[how], rows.flat)  # NaN spreads in all four
    if how == "mean":
        reduced = reduced / rows.lengths
    return float(reduced[0]) if rows.form == "one" else reduced


def _given(rewards: RowsLike) -> Any:
    """Without the Nones of trajectories; one of nothing else is unscored."""
    if not isinstance(rewards, (list, tuple)):
        return rewards
    if any(isinstance(row, (list, tuple, np.ndarray)) for row in rewards):
        return [_given(row) for row in rewards]
    if not any(reward is None for reward in rewards):
        return rewards
    return [reward for reward in rewards if reward is not None] or [float("nan")]


@row_wise
def clamp(rewards: RowsLike, *, low: float | None = None, high: float | None = None) -> Arrays:
    """Rewards moved into [low, high]; unscored ones stay NaN.

    Args:
        rewards: [N], [B, G] or a list of [G_i]; finite, or NaN for unscored.
        low, high: bounds that do not cross, or None for none.

    Raises:
        DataError: as for ``reduction``.
        ConfigError: no bound, a bound that is not finite, or bounds that cross.

    >>> clamp([-3.0, 0.5, 2.0], low=-1.0, high=1.0)
    array([-1. ,  0.5,  1. ])

    Source: none needed. Peers: every library has it.
    """
    if low is None and high is None:
        raise ConfigError("low", "is None, and so is high", "at least one bound")
    low = None if low is None else _check.real("low", low)
    high = None if high is None else _check.real("high", high)
    if low is not None and high is not None and low > high:
        raise ConfigError("low", f"is {low}, above high={high}", "bounds that do not cross")
    rows = _parse(rewards)
    return rows.restore(np.clip(rows.flat, low, high))


@answered
def nonterminal_reward(rewards: RowsLike, finished: Any, *, value: float = 0.0) -> Any:
    """Rewards of steps, with ``value`` after the others of a trajectory that did not come to an end of its own.

    Args:
        rewards: per step: one trajectory [T], [B, T] or a list of [T_i]; a trajectory may have none.
        finished: one per trajectory, or one for one: False where a limit of turns, tokens or time cut it.
        value: one more reward for such a trajectory, finite.

    Returns:
        A list of [T_i] or [T_i + 1], or an array for one trajectory: what ``reduction`` takes.

    Raises:
        DataError: as for ``reduction``, or there are not as many flags as trajectories.
        ConfigError: value is not finite.

    >>> reduction(nonterminal_reward([[0.3, 0.3], [1.0]], [False, True], value=-1.0))
    array([-0.4,  1. ])

    Source: none needed. Peers: OpenReward's nonterminal_reward, which joins the rewards before they are reduced.
    """
    value = _check.real("value", value, low=-_rows.LARGEST, high=_rows.LARGEST)
    rows = _rows.parse("rewards", rewards, empty=True)
    rows.check_finite(rows.flat, nan=True)
    one = rows.form == "one"
    flags = _rows.parse("finished", [finished] if one else finished, boolean=True)
    if flags.form != "one" or flags.flat.size != rows.lengths.size:
        raise DataError("finished", f"has {flags.flat.size} entries", f"{rows.lengths.size}", "one per trajectory")
    parts = np.split(rows.flat, rows.ends[:-1])
    joined = [part if end else np.append(part, value) for part, end in zip(parts, flags.flat, strict=True)]
    return joined[0] if one else joined


@row_wise
def nonterminal_override(rewards: RowsLike, finished: Any, *, value: float = 0.0) -> Arrays:
    """Rewards of trajectories, with ``value`` in the place of those that did not come to an end of their own.

    Args:
        rewards: one per trajectory: [N], [B, G] or a list of [G_i].
        finished: shaped like ``rewards``; False where the trajectory was cut by a limit of turns, tokens or time.
        value: what such a trajectory gets, whatever it had.

    Raises:
        DataError: as for ``reduction``, or shapes differ.
        ConfigError: value is not finite.

    >>> nonterminal_override([1.0, 0.3], [True, False])
    array([1., 0.])

    Source: none needed. ``nonterminal_reward`` adds to what such a trajectory got instead.
    """
    value = _check.real("value", value, low=-_rows.LARGEST, high=_rows.LARGEST)
    rows = _parse(rewards)
    return rows.restore(np.where(rows.like("finished", finished, boolean=True), rows.flat, value))


@row_wise
def affine(rewards: RowsLike, *, scale: float = 1.0, bias: float = 0.0) -> Arrays:
    """Rewards times scale, plus bias; unscored ones stay NaN.

    Args:
        rewards: [N], [B, G] or a list of [G_i]; finite, or NaN for unscored.
        scale, bias: finite.

    Raises:
        DataError: as for ``reduction``.
        ConfigError: scale or bias is not finite.

    >>> affine([0.0, 1.0], scale=2.0, bias=-1.0)
    array([-1.,  1.])

    Source: none needed. Peers: AReaL's reward_scaling and reward_bias add first and multiply then.
    """
    scale = _check.real("scale", scale, low=-_rows.LARGEST, high=_rows.LARGEST)
    bias = _check.real("bias", bias, low=-_rows.LARGEST, high=_rows.LARGEST)
    rows = _parse(rewards)
    return rows.restore(scale * rows.flat + bias)


@row_wise
def mapping(rewards: RowsLike, table: Mapping[float, float], *, default: float | None = None) -> Arrays:
    """Rewards looked up in a table; unscored ones stay NaN.

    Args:
        rewards: [N], [B, G] or a list of [G_i]; finite, or NaN for unscored.
        table: reward -> what stands for it; a value NaN marks rewards as unscored.
        default: what rewards that are not in the table get; None refuses them.

    Raises:
        DataError: as for ``reduction``; a reward is not in the table.
        ConfigError: the table is empty, or holds something else than numbers.

    >>> mapping([1.0, 0.0, 1.0], {1.0: 1.0, 0.0: -1.0})
    array([ 1., -1.,  1.])

    Source: none needed.
    """
    keys, values = _table(table)
    rows = _parse(rewards)
    index = np.minimum(np.searchsorted(keys, rows.flat), keys.size - 1)
    known = keys[index] == rows.flat
    missing = np.flatnonzero(~known & ~np.isnan(rows.flat))
    if default is None and missing.size:
        where, what = rows.name(int(missing[0])), f"is {rows.flat[missing[0]]}"
        raise DataError(where, what, f"one of {keys.tolist()[:8]}", "default= takes any other")
    other = np.nan if default is None else _check.real("default", default)
    return rows.restore(np.where(known, values[index], np.where(np.isnan(rows.flat), np.nan, other)))


@row_wise
def whitening(rewards: RowsLike, *, ddof: int = 1, eps: float = 1e-6) -> Arrays:
    """(R - mean) / (standard deviation + eps) over all scored rewards; unscored ones stay NaN.

    Args:
        rewards: [N], [B, G] or a list of [G_i]; finite, or NaN for unscored.
        ddof: 1 divides squares by n - 1 (unbiased), 0 by n.
        eps: >= 0.

    Returns:
        float64 in the form of ``rewards``; exactly 0 where all scored rewards are equal.

    Raises:
        DataError: as for ``reduction``.
        ConfigError: a setting is out of range.

    >>> whitening([1.0, 2.0, 3.0], eps=0.0)
    array([-1.,  0.,  1.])

    Source: none needed. Peers: the advantage estimators do this themselves; use one or the other.
    """
    _groups.settings(ddof=ddof, eps=eps)
    rows = _parse(rewards)
    result = rows.flat.copy()
    scored = ~np.isnan(result)
    result[scored] = _groups.whiten(result[scored], ddof, eps)
    return rows.restore(result)


def _parse(rewards: RowsLike) -> _rows.Rows:
    rows = _rows.parse("rewards", rewards)
    rows.check_finite(rows.flat, nan=True)
    return rows


def _table(table: object) -> tuple[np.ndarray, np.ndarray]:
    if not isinstance(table, Mapping) or not table:
        raise ConfigError("table", f"got {_check.shown(table)}", "a mapping that is not empty")
    pairs = sorted((_check.real("table key", key), _value(key, value)) for key, value in table.items())
    return np.array([key for key, _ in pairs]), np.array([value for _, value in pairs])


def _value(key: float, value: object) -> float:
    if isinstance(value, float) and np.isnan(value):
        return value
    return _check.real(f"table[{key!r}]", value)
