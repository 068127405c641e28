"""Group estimators that differ from GRPO in the baseline: none, weighted, tempered, shifted, or the divisor."""

from __future__ import annotations

import numpy as np

from rlkit import _check, _groups, _rows
from rlkit._forms import Arrays, RowsLike, row_wise
from rlkit._groups import Groups
from rlkit.advantages._registry import register

__all__ = ["asymre", "gpg", "maxrl", "opmd", "opo", "reinforce"]


@register("reinforce")
@row_wise
def reinforce(rewards: RowsLike, *, normalize: bool = False, ddof: int = 1, eps: float = 1e-6) -> Arrays:
    """Return the rewards themselves, without a baseline; on demand normalised over the whole batch.

    A_i = R_i, or (R_i - mean of the batch) / (standard deviation of the batch + eps)

    Args:
        rewards: as for ``grpo``; unscored ones (NaN) give 0.
        normalize: whether to normalise over all scored rewards; a batch of equal rewards then gives exactly 0.
        ddof, eps: of the normalisation.

    Raises:
        DataError, ConfigError: as for ``grpo``.

    >>> reinforce([1.0, 0.0, float("nan")])
    array([1., 0., 0.])
    >>> reinforce([[1.0, 2.0], [3.0]], normalize=True, eps=0.0)  # mean 2, deviation 1
    [array([-1.,  0.]), array([1.])]

    Source: Williams (1992). Peers: NeMo's raw-reward estimator and ROLL normalise on demand.
    """
    normalize = _check.flag("normalize", normalize)
    _groups.settings(ddof=ddof, eps=eps)
    groups = Groups.parse(rewards)
    if not normalize:
        return groups.rows.restore(groups.rewards)
    advantages = np.zeros(groups.rewards.size)
    advantages[groups.scored] = _groups.whiten(groups.rewards[groups.scored], ddof, eps)
    return groups.rows.restore(advantages)


@register("opo")
@row_wise
def opo(rewards: RowsLike, *, lengths: RowsLike, singleton: str = "zero") -> Arrays:
    """Rewards minus the mean of their group weighted by length (optimal reward baseline).

    A_i = R_i - sum of n_j R_j / sum of n_j

    Args:
        rewards: as for ``grpo``.
        lengths: shaped like ``rewards``: tokens of each sample, >= 0; unscored samples do not count.
        singleton: as for ``grpo``.

    Raises:
        DataError: as for ``grpo``, or lengths are no integers >= 0 or shaped differently.
        ConfigError: singleton is unknown.

    >>> opo([1.0, 0.0], lengths=[1, 3])  # baseline 1 / 4
    array([ 0.75, -0.25])

    Source: arXiv:2505.23585. Peers: verl gives a group of one its raw reward.
    """
    _groups.settings(singleton=singleton)
    groups = Groups.parse(rewards)
    counts = np.where(groups.scored, _groups.lengths_like(groups, lengths), 0.0)
    total = groups.rows.sum(counts)
    # Relative to the plain mean, so that constant groups stay exactly 0.
    with np.errstate(invalid="ignore"):
        shift = groups.rows.sum(counts * groups.deviations) / total  # NaN without tokens
    advantages = groups.deviations - groups.rows.spread(shift)
    return groups.finish(np.where(groups.rows.spread(total > 0), advantages, 0.0), singleton)


@register("gpg")
@row_wise
def gpg(rewards: RowsLike, *, count: str = "rewards", f_norm: float = 1.0, singleton: str = "zero") -> Arrays:
    """Centred rewards, made larger where few of the batch carry signal (group policy gradient).

    A_i = alpha (R_i - mean of the group) / f_norm, with alpha = all / those with signal

    Args:
        rewards: as for ``grpo``.
        count: what alpha counts over the batch: "rewards", scored against non-zero ones; "groups", groups against
            those whose rewards differ. alpha is 1 where nothing carries signal.
        f_norm: > 0.
        singleton: as for ``grpo``; "raw" is the reward, not scaled.

    Raises:
        DataError, ConfigError: as for ``grpo``.

    >>> gpg([1.0, 0.0, 0.0, 0.0])  # alpha 4 / 1, mean 0.25
    array([ 3., -1., -1., -1.])
    >>> gpg([[1.0, 0.0], [0.0, 0.0]], count="groups")  # alpha 2 / 1
    array([[ 1., -1.],
           [ 0.,  0.]])

    Source: arXiv:2504.02546, whose text counts groups. Peers: verl counts non-zero rewards, the default here.
    """
    _check.choice("count", count, ("rewards", "groups"))
    f_norm = _check.real("f_norm", f_norm, above=0.0)
    _groups.settings(singleton=singleton)
    groups = Groups.parse(rewards)
    if count == "rewards":
        total, signal = int(groups.sizes.sum()), int(np.count_nonzero(groups.rewards))
    else:
        total, signal = int((groups.sizes > 0).sum()), int((~groups.constant).sum())
    alpha = total / max(signal, 1)
    return groups.finish(groups.deviations * (alpha / f_norm), singleton)


@register("opmd")
@row_wise
def opmd(rewards: RowsLike, *, baseline: str = "mean", tau: float = 1.0, singleton: str = "zero") -> Arrays:
    """Rewards minus the mean of their group, or minus its tempered log-mean-exp (online policy mirror descent).

    A_i = R_i - mean of the group, or R_i - tau log(mean of exp(R / tau))

    Args:
        rewards: as for ``grpo``.
        baseline: "mean" or "logavgexp".
        tau: > 0, the temperature of "logavgexp"; large ones approach the mean, small ones the best reward.
        singleton: as for ``grpo``.

    Raises:
        DataError, ConfigError: as for ``grpo``.

    >>> opmd([1.0, 0.0])
    array([ 0.5, -0.5])
    >>> import math
    >>> opmd([math.log(3.0), 0.0], baseline="logavgexp").round(6)  # baseline log((3 + 1) / 2)
    array([ 0.405465, -0.693147])

    Source: Kimi k1.5, arXiv:2501.12599, section 2.3. Peers: Trinity's OPMD has both.
    """
    _check.choice("baseline", baseline, ("mean", "logavgexp"))
    tau = _check.real("tau", tau, above=0.0)
    _groups.settings(singleton=singleton)
    groups = Groups.parse(rewards)
    if baseline == "mean":
        return groups.finish(groups.deviations, singleton)
    below = groups.rewards - groups.rows.spread(groups.highest)
    with np.errstate(over="ignore", invalid="ignore"):
        powers = np.where(groups.scored, np.exp(below / tau), 0.0)
        averages = groups.rows.sum(powers) / groups.sizes  # NaN where nothing is scored
    return groups.finish(below - groups.rows.spread(tau * np.log(averages)), singleton)


@register("asymre")
@row_wise
def asymre(rewards: RowsLike, *, shift: float = -0.1, singleton: str = "zero") -> Arrays:
    """Rewards minus a baseline shifted away from the mean of their group (asymmetric REINFORCE).

    A_i = R_i - (mean of the group + shift)

    Args:
        rewards: as for ``grpo``.
        shift: the paper's delta V; below 0 good samples weigh more than bad ones.
        singleton: as for ``grpo``.

    Returns:
        float64 in the form of ``rewards``. A constant group of two or more gets -shift, not 0: that is what the
        formula is for.

    Raises:
        DataError, ConfigError: as for ``grpo``.

    >>> asymre([1.0, 0.0])
    array([ 0.6, -0.4])

    Source: arXiv:2506.20520. Peers: Trinity's AsymRE, with the same default.
    """
    shift = _check.real("shift", shift, low=-_rows.LARGEST, high=_rows.LARGEST)
    _groups.settings(singleton=singleton)
    groups = Groups.parse(rewards)
    return groups.finish(groups.deviations - shift, singleton)


@register("maxrl")
@row_wise
def maxrl(rewards: RowsLike, *, singleton: str = "zero") -> Arrays:
    """Centred rewards divided by the mean of their group (maximum-likelihood reinforcement learning).

    A_i = (R_i - mean of the group) / mean of the group, and 0 in groups whose mean is not positive

    Args:
        rewards: as for ``grpo``, meant for rewards >= 0. A mean within rounding of 0 counts as not positive.
        singleton: as for ``grpo``.

    Raises:
        DataError, ConfigError: as for ``grpo``.

    >>> maxrl([[1.0, 0.0, 0.0, 0.0], [-1.0, 0.0, 0.0, 0.0]])
    array([[ 3., -1., -1., -1.],
           [ 0.,  0.,  0.,  0.]])

    Source: arXiv:2602.02710. Peers: prime-rl has the same rule for means <= 0; SkyRL adds 1e-6 to the mean, which
    explodes for means near -1e-6.
    """
    _groups.settings(singleton=singleton)
    groups = Groups.parse(rewards)
    size = np.maximum(np.abs(groups.lowest), np.abs(groups.highest))
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = groups.mean / size  # in units in which nothing overflows or vanishes; NaN where all rewards are 0
        advantages = groups.deviations / groups.rows.spread(size) / groups.rows.spread(mean)
    return groups.finish(np.where(groups.rows.spread(mean > 1e-12), advantages, 0.0), singleton)
