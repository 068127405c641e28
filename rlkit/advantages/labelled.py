"""Flat batches: rewards in any order, with labels that say which group each belongs to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rlkit import _check, _rows
from rlkit.advantages._registry import registry
from rlkit.errors import DataError

__all__ = ["by_group"]

_PER_SAMPLE = ("lengths",)  # settings that hold one number per reward, and are regrouped with them


def by_group(estimator: str | Callable[..., Any], rewards: Any, groups: Any, **settings: Any) -> Any:
    """The advantages of a group estimator for flat rewards with group labels.

    Args:
        estimator: a registered name, such as "grpo", or a function that takes a list of groups [G_i] and gives
            back advantages of the same form.
        rewards: [N], in any order.
        groups: [N] labels, hashable: strings, integers, ...; equal labels make a group.
        settings: keyword arguments of the estimator; ``lengths`` [N] is regrouped with the rewards.

    Returns:
        float64 [N], in the order of ``rewards``.

    Raises:
        DataError: rewards are no 1-D numbers, labels are not as many, or the estimator returns another form.
        UnknownNameError: no estimator has that name.

    >>> by_group("rloo", [1.0, 5.0, 0.0, 3.0], ["a", "b", "a", "b"])
    array([ 1.,  2., -1., -2.])
    """
    function = registry.resolve(estimator)
    flat = _rows.vector("rewards", rewards)
    if flat.size == 0:
        raise DataError(_check.problem("rewards", "is empty", "at least one reward"))
    codes, count = _rows.labels("groups", groups, flat.size)
    order = np.argsort(codes, kind="stable")
    lengths = np.bincount(codes, minlength=count)
    rows = _rows.Rows("rewards", flat[order], lengths, "list")
    _rows.Rows("rewards", flat, np.array([flat.size]), "one").check_finite(flat, nan=True)
    for name in _PER_SAMPLE:
        if name in settings:
            per_sample = _rows.vector(name, settings[name], flat.size, why="one per reward")
            settings[name] = rows.restore(per_sample[order])
    advantages = _rows.parse(f"{estimator!r}(...)", function(rows.restore(rows.flat), **settings))
    if advantages.flat.size != flat.size or not np.array_equal(advantages.lengths, lengths):
        what = f"returned rows of lengths {advantages.lengths.tolist()[:8]}"
        raise DataError(_check.problem(f"{estimator!r}", what, f"{lengths.tolist()[:8]}", "one advantage per reward"))
    result = np.empty(flat.size)
    result[order] = advantages.flat
    return result
