"""Returns: what a step is followed by, and their normalisation over a batch."""

from __future__ import annotations

import numpy as np

from rlkit import _check, _groups, _rows
from rlkit._forms import Arrays, RowsLike, row_wise
from rlkit.advantages import _scan
from rlkit.advantages._registry import register
from rlkit.advantages._steps import Steps

__all__ = ["discounted_returns", "rebn"]


@register("discounted_returns")
@row_wise
def discounted_returns(
    rewards: RowsLike, *, gamma: float = 1.0, bootstrap_value: RowsLike | float = 0.0, mask: RowsLike | None = None
) -> Arrays:
    """Return the discounted sum of the rewards from each step on.

    G_t = r_t + gamma G_{t+1}, and after the last reward G = bootstrap_value

    Args:
        rewards: one trajectory [T], equally long ones [B, T], or a list of [T_i]; finite.
        gamma: in [0, 1].
        bootstrap_value: the value of the state after the last reward: one number, or one per trajectory [B].
        mask: shaped like ``rewards``; where it is 0 the result is 0 and the recursion passes over the step as if it
            were not there, whatever its reward.

    Returns:
        float64 in the form of ``rewards``.

    Raises:
        DataError: rewards are empty or not finite where the mask is 1, or shapes differ.
        ConfigError: gamma is out of range.

    >>> discounted_returns([0.0, 0.0, 1.0], gamma=0.5)
    array([0.25, 0.5 , 1.  ])
    >>> discounted_returns([0.0, 9.0, 1.0], gamma=0.5, mask=[1, 0, 1])  # action, tool reply, action
    array([0.5, 0. , 1. ])

    Source: Sutton and Barto, 2nd edition, equation 3.9. Peers: with masks verl carries the return across, as here;
    SkyRL starts again at a masked token, Trinity ignores the mask.
    """
    gamma = _check.real("gamma", gamma, low=0.0, high=1.0)
    steps = Steps.parse(rewards, mask=mask, bootstrap_value=bootstrap_value)
    x = steps.rewards.copy()
    x[steps.last] += gamma * steps.bootstrap
    return steps.restore(_scan.reverse_scan(x, steps.factors(gamma), steps.starts))


@register("rebn")
@row_wise
def rebn(returns: RowsLike, *, ddof: int = 1, eps: float = 1e-9, mask: RowsLike | None = None) -> Arrays:
    """Normalise returns over the whole batch (return batch normalisation).

    A = (G - mean of the batch) / (standard deviation of the batch + eps)

    Args:
        returns: one row, rows of one length, or a list of rows; finite, or NaN for unscored: 0 in the result.
        ddof: 1 divides squares by n - 1 (unbiased), 0 by n.
        eps: >= 0.
        mask: shaped like ``returns``; where it is 0 a return counts nowhere and the result is 0.

    Returns:
        float64 in the form of ``returns``; exactly 0.0 everywhere when all returns are equal, or there is only one.
        Select first and normalise after: it is what is trained on that should have mean 0 and deviation 1.

    Raises:
        DataError: returns are empty, infinite or no numbers, or shapes differ.
        ConfigError: a setting is out of range.

    >>> rebn([[1.0, 2.0], [3.0]], eps=0.0)  # mean 2, deviation 1
    [array([-1.,  0.]), array([1.])]

    Source: GEM, arXiv:2510.01051. Peers: GEM and oat use the biased deviation, and NaN for a single return.
    """
    _groups.settings(ddof=ddof, eps=eps)
    rows = _rows.parse("returns", returns)
    counted = None if mask is None else rows.like("mask", mask, boolean=True)
    rows.check_finite(rows.flat, nan=True, among=counted)
    chosen = ~np.isnan(rows.flat) if counted is None else counted & ~np.isnan(rows.flat)
    result = np.zeros_like(rows.flat)
    result[chosen] = _groups.whiten(rows.flat[chosen], ddof, eps)
    return rows.restore(result)
