"""Advantages relative to the other samples of the same prompt: the mean of the group is the baseline."""

from __future__ import annotations

import numpy as np

from rlkit import _check, _groups
from rlkit._forms import Arrays, RowsLike, row_wise
from rlkit._groups import Groups
from rlkit.advantages._registry import register

__all__ = ["dr_grpo", "grpo", "loo_std", "rloo"]


@register("grpo")
@row_wise
def grpo(
    rewards: RowsLike, *, scale: str = "group", ddof: int = 1, eps: float = 1e-6, singleton: str = "zero"
) -> Arrays:
    """Rewards centred within their group and divided by a standard deviation (GRPO).

    A_i = (R_i - mean of the group) / (s + eps)

    Args:
        rewards: one group [G], groups of one size [B, G], or a list of groups [G_i]; finite, or NaN for a sample
            that could not be scored: it counts neither in mean nor deviation, and its advantage is 0.
        scale: what s is: "group", the group's standard deviation; "batch", that of all scored rewards; "none",
            no division at all (Dr. GRPO).
        ddof: 1 divides squares by n - 1 (unbiased), 0 by n.
        eps: >= 0, added to the deviation.
        singleton: what a group of one scored reward gets: "zero", "raw" (its reward) or "error".

    Returns:
        float64 in the form of ``rewards``. A group whose scored rewards are all equal gets exactly 0.0.

    Raises:
        DataError: rewards are empty, infinite, no numbers, or (``singleton="error"``) alone in their group.
        ConfigError: a setting is out of range.

    >>> grpo([1.0, 0.0, 0.0, 0.0, 1.0], scale="none")
    array([ 0.6, -0.4, -0.4, -0.4,  0.6])
    >>> grpo([2.0, 4.0, 6.0], eps=0.0)  # mean 4, deviation 2
    array([-1.,  0.,  1.])
    >>> grpo([[0.9, 0.9], [0.1, 0.1, 0.1]])
    [array([0., 0.]), array([0., 0., 0.])]

    Source: DeepSeekMath, arXiv:2402.03300, section 4.1; scale="none" arXiv:2503.20783; scale="batch"
    arXiv:2508.08221. Peers: eps is 1e-4 in TRL, 1e-9 in OpenRLHF; verl gives a group of one its raw reward; rounding
    makes all of them return non-zero advantages for some constant groups.
    """
    _check.choice("scale", scale, ("group", "batch", "none"))
    _groups.settings(ddof=ddof, eps=eps, singleton=singleton)
    groups = Groups.parse(rewards)
    if scale == "group":
        advantages = groups.whitened(ddof, eps)
    elif scale == "none":
        advantages = groups.deviations
    else:
        advantages = _groups.whiten(groups.rewards[groups.scored], ddof, eps, centred=groups.deviations)
    return groups.finish(advantages, singleton)


@register("dr_grpo")
@row_wise
def dr_grpo(rewards: RowsLike, *, singleton: str = "zero") -> Arrays:
    """Rewards minus the mean of their group, undivided (Dr. GRPO).

    A_i = R_i - mean of the group

    Args:
        rewards: as for ``grpo``.
        singleton: as for ``grpo``.

    Raises:
        DataError, ConfigError: as for ``grpo``.

    >>> dr_grpo([1.0, 0.0, 0.0, 1.0])
    array([ 0.5, -0.5, -0.5,  0.5])

    Source: arXiv:2503.20783. Peers: TRL's scale_rewards="none", verl's norm_adv_by_std_in_grpo=False; the paper's
    constant length is ``token_weights(mode="seq-mean-token-sum-norm")`` here.
    """
    return grpo(rewards, scale="none", singleton=singleton)


@register("rloo")
@row_wise
def rloo(rewards: RowsLike, *, singleton: str = "zero") -> Arrays:
    """Each reward minus the mean of the others in its group (REINFORCE leave-one-out).

    A_i = R_i - mean of R_j over j != i = N / (N - 1) (R_i - mean of the group)

    Args:
        rewards: as for ``grpo``; N counts the scored ones.
        singleton: as for ``grpo``.

    Raises:
        DataError, ConfigError: as for ``grpo``.

    >>> rloo([1.0, 0.0, 0.5])  # the others' means are 0.25, 0.75, 0.5
    array([ 0.75, -0.75,  0.  ])

    Source: arXiv:2402.14740. Peers: for a group of one verl's loop and Trinity return the reward, verl's vectorised
    form and SkyRL return 0.
    """
    _groups.settings(singleton=singleton)
    groups = Groups.parse(rewards)
    factor = groups.sizes / np.maximum(groups.sizes - 1, 1)
    return groups.finish(groups.deviations * groups.rows.spread(factor), singleton)


@register("loo_std")
@row_wise
def loo_std(rewards: RowsLike, *, eps: float = 1e-6, singleton: str = "zero") -> Arrays:
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
    """Return the sum of what stands before each entry [b, n]."""
    sums = np.zeros_like(x)
    np.cumsum(x[:, :-1], axis=1, out=sums[:, 1:])
    return sums
