"""Each reward against the mean and the deviation of the others."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlkit._forms import row_wise
from rlkit.advantages import _groups
from rlkit.advantages._groups import Groups
from rlkit.advantages._registry import register

__all__ = ["loo_std"]


@register("loo_std")
@row_wise
def loo_std(rewards: Any, *, eps: float = 1e-6, singleton: str = "zero") -> Any:
    """Each reward minus the mean of the others, divided by the standard deviation of the others.

    A_i = (R_i - mean of the others) / (s + eps), s the others' unbiased deviation; undivided where s is 0 or, in a
    group of two, undefined

    Args:
        rewards: as for ``grpo``.
        eps: >= 0.
        singleton: as for ``grpo``.

    Raises:
        DataError, ConfigError: as for ``grpo``.

    >>> loo_std([4.0, 1.0, 3.0], eps=0.0).round(6)  # the others: mean 2, 3.5, 2.5; deviation sqrt 2, sqrt 0.5, sqrt 4.5
    array([ 1.414214, -3.535534,  0.235702])
    >>> loo_std([1.0, 0.0])
    array([ 1., -1.])

    Source: arXiv:2402.14740 for the baseline. Peers: NeMo divides like this too; since the divisor depends on the
    sample, the gradient is biased.
    """
    _groups.settings(eps=eps, singleton=singleton)
    groups = Groups.parse(rewards)
    return groups.finish(groups.by_size(lambda x: _against_others(x, eps)), singleton)


def _against_others(x: np.ndarray, eps: float) -> np.ndarray:
    """For groups [b, n] of one size.

    The others of a reward are those below and those above it, whose squares are summed apart: taking one square away
    from the sum of all would leave the rounding error of the largest.
    """
    n = x.shape[1]
    if n < 3:
        return np.asarray(x - x[:, ::-1])
    order = np.argsort(x, axis=1)
    ranked = np.take_along_axis(x, order, axis=1)
    span = ranked[:, -1:] - ranked[:, :1]
    unit = np.where(span > 0, span, 1.0)
    up, down = (ranked - ranked[:, :1]) / unit, (ranked[:, -1:] - ranked) / unit
    below, above = np.arange(n), np.arange(n)[::-1]  # how many there are on either side
    sum_below, squares_below = _before(up), _before(up * up)
    sum_above, squares_above = _before(down[:, ::-1])[:, ::-1], _before((down * down)[:, ::-1])[:, ::-1]
    mean_below, mean_above = sum_below / np.maximum(below, 1), span / unit - sum_above / np.maximum(above, 1)
    mean = (below * mean_below + above * mean_above) / (n - 1)
    squares = squares_below - sum_below * mean_below + squares_above - sum_above * sum_above / np.maximum(above, 1)
    squares += (mean_above - mean_below) ** 2 * below * above / (n - 1)
    deviation = np.sqrt(squares / (n - 2))
    lowest = np.where(below > 0, ranked[:, :1], ranked[:, 1:2])
    highest = np.where(above > 0, ranked[:, -1:], ranked[:, -2:-1])
    centred = up - mean
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        divisor = deviation + eps / unit
        result = np.where((lowest == highest) | (divisor == 0), centred * unit, centred / divisor)
    advantages = np.empty_like(x)
    np.put_along_axis(advantages, order, result, axis=1)
    return advantages


def _before(x: np.ndarray) -> np.ndarray:
    """The sum of what stands before each entry [b, n]."""
    sums = np.zeros_like(x)
    np.cumsum(x[:, :-1], axis=1, out=sums[:, 1:])
    return sums
