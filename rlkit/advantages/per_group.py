"""Estimators of your own, written for one group."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, cast

import numpy as np

from rlkit import _check, _rows
from rlkit._calls import answered
from rlkit._forms import Arrays, RowsLike, RowWise, row_wise
from rlkit.errors import DataError

__all__ = ["per_group"]

P = ParamSpec("P")


@answered
def per_group(function: Callable[Concatenate[np.ndarray, P], object]) -> RowWise[P]:
    """Decorate a function of one group, so that it takes several groups, as all estimators of rlkit do.

    Args:
        function: of the rewards of one group, float64 [G], NaN where unscored, and of settings; it gives G advantages.
            A setting named ``lengths``, tokens per sample, reaches it as float64 [G], too.

    Returns:
        A function of one group [G], of equal ones [B, G], or of a list of groups, which gives advantages of that form.

    Raises:
        DataError: when it is called: rewards are no numbers, or ``function`` gave something else than G numbers.

    >>> @per_group
    ... def above_half(rewards, *, bonus=1.0): return bonus * (rewards > rewards.max() / 2)
    >>> above_half([[1.0, 0.0], [8.0, 2.0, 5.0]], bonus=2.0)
    [array([2., 0.]), array([2., 0., 2.])]
    """
    name = getattr(function, "__name__", "estimator")

    @functools.wraps(function)
    def estimator(rewards: RowsLike, *args: P.args, **kwargs: P.kwargs) -> Arrays:
        rows = _rows.parse("rewards", rewards)
        cuts, lengths = rows.ends[:-1], None
        if "lengths" in kwargs:
            lengths = np.split(rows.like("lengths", cast("RowsLike", kwargs["lengths"])), cuts)
        parts = []
        for i, group in enumerate(np.split(rows.flat, cuts)):
            where = f"{name}({rows.row_name(i)})"
            if lengths is not None:
                kwargs["lengths"] = lengths[i]
            estimate = _check.as_array(where, function(group, *args, **kwargs), "one advantage per reward")
            if estimate.shape != group.shape:
                what = f"gave an array of shape {estimate.shape}"
                raise DataError(where, what, f"{group.shape}", "one advantage per reward")
            parts.append(estimate.astype(np.float64))
        return rows.restore(np.concatenate(parts))

    return row_wise(cast("Callable[Concatenate[RowsLike, P], Arrays]", estimator))
