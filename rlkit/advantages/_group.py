"""Advantages relative to the other samples of the same prompt, and the estimators that differ in the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlkit import _check, _rows
from rlkit._rows import Arrays, Groups, RowsLike, lengths_like, row_wise, settings, whiten
from rlkit.advantages._registry import register
from rlkit.errors import ConfigError, DataError

__all__ = ["asymre", "dr_grpo", "gdpo", "gpg", "grpo", "loo_std", "maxrl", "opmd", "opo", "rec", "reinforce", "rloo"]


@register("grpo")
@row_wise
def grpo(
    rewards: RowsLike, *, scale: str = "group", ddof: int = 1, eps: float = 1e-6, singleton: str = "zero"
) -> Arrays:
    """Return rewards centred within their group and divided by a standard deviation (GRPO).

    A_i = (R_i - mean of the group) / (s + eps)

    Args:
        rewards: one group [G], groups of one size [B, G], or a list of groups [G_i]; finite, or NaN for a sample
            that could not be scored: it counts neither in mean nor deviation, and its advantage is 0.
        scale: the s above: "group", the group's standard deviation; "batch", that of all scored rewards; "none",
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
    _rows.settings(ddof=ddof, eps=eps, singleton=singleton)
    groups = Groups.parse(rewards)
    if scale == "group":
        advantages = groups.whitened(ddof, eps)
    elif scale == "none":
        advantages = groups.deviations
    else:
        advantages = _rows.whiten(groups.rewards[groups.scored], ddof, eps, centred=groups.deviations)
    return groups.finish(advantages, singleton)


@register("dr_grpo")
@row_wise
def dr_grpo(rewards: RowsLike, *, singleton: str = "zero") -> Arrays:
    """Return rewards minus the mean of their group, undivided (Dr. GRPO).

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
    """Return each reward minus the mean of the others in its group (REINFORCE leave-one-out).

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
    _rows.settings(singleton=singleton)
    groups = Groups.parse(rewards)
    factor = groups.sizes / np.maximum(groups.sizes - 1, 1)
    return groups.finish(groups.deviations * groups.rows.spread(factor), singleton)


@register("loo_std")
@row_wise
def loo_std(rewards: RowsLike, *, eps: float = 1e-6, singleton: str = "zero") -> Arrays:
    """Return each reward minus the mean of the others, divided by the standard deviation of the others.

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
    _rows.settings(eps=eps, singleton=singleton)
    groups = Groups.parse(rewards)
    return groups.finish(groups.by_size(lambda x: _against_others(x, eps)), singleton)


def _against_others(x: np.ndarray, eps: float) -> np.ndarray:
    """Compute ``loo_std`` for groups [b, n] of one size.

    The others of a reward are those below and those above it, whose squares are summed apart: subtracting one square
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
    """Return the sum of the entries before each entry [b, n]."""
    sums = np.zeros_like(x)
    np.cumsum(x[:, :-1], axis=1, out=sums[:, 1:])
    return sums


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
    settings(ddof=ddof, eps=eps)
    groups = Groups.parse(rewards)
    if not normalize:
        return groups.rows.restore(groups.rewards)
    advantages = np.zeros(groups.rewards.size)
    advantages[groups.scored] = whiten(groups.rewards[groups.scored], ddof, eps)
    return groups.rows.restore(advantages)


@register("opo")
@row_wise
def opo(rewards: RowsLike, *, lengths: RowsLike, singleton: str = "zero") -> Arrays:
    """Return rewards minus the mean of their group weighted by length (optimal reward baseline).

    A_i = R_i - sum of n_j R_j / sum of n_j

    Args:
        rewards: as for ``grpo``.
        lengths: shaped like ``rewards``: tokens of each sample, >= 0; unscored samples do not count.
        singleton: as for ``grpo``.

    Raises:
        DataError: as for ``grpo``, or lengths are not integers >= 0 or shaped differently.
        ConfigError: singleton is unknown.

    >>> opo([1.0, 0.0], lengths=[1, 3])  # baseline 1 / 4
    array([ 0.75, -0.25])

    Source: arXiv:2505.23585. Peers: verl gives a group of one its raw reward.
    """
    settings(singleton=singleton)
    groups = Groups.parse(rewards)
    counts = np.where(groups.scored, lengths_like(groups, lengths), 0.0)
    total = groups.rows.sum(counts)
    # Relative to the plain mean, so that constant groups stay exactly 0.
    with np.errstate(invalid="ignore"):
        shift = groups.rows.sum(counts * groups.deviations) / total  # NaN without tokens
    advantages = groups.deviations - groups.rows.spread(shift)
    return groups.finish(np.where(groups.rows.spread(total > 0), advantages, 0.0), singleton)


@register("gpg")
@row_wise
def gpg(rewards: RowsLike, *, count: str = "rewards", f_norm: float = 1.0, singleton: str = "zero") -> Arrays:
    """Return centred rewards, scaled up where few in the batch carry signal (group policy gradient).

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
    settings(singleton=singleton)
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
    """Return rewards minus the mean of their group, or minus its tempered log-mean-exp (online policy mirror descent).

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
    settings(singleton=singleton)
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
    """Return rewards minus a baseline shifted away from the mean of their group (asymmetric REINFORCE).

    A_i = R_i - (mean of the group + shift)

    Args:
        rewards: as for ``grpo``.
        shift: the paper's delta V; below 0 good samples weigh more than bad ones.
        singleton: as for ``grpo``.

    Returns:
        float64 in the form of ``rewards``. A constant group of two or more gets -shift, not 0, as the formula
        intends.

    Raises:
        DataError, ConfigError: as for ``grpo``.

    >>> asymre([1.0, 0.0])
    array([ 0.6, -0.4])

    Source: arXiv:2506.20520. Peers: Trinity's AsymRE, with the same default.
    """
    shift = _check.real("shift", shift, low=-_rows.LARGEST, high=_rows.LARGEST)
    settings(singleton=singleton)
    groups = Groups.parse(rewards)
    return groups.finish(groups.deviations - shift, singleton)


@register("maxrl")
@row_wise
def maxrl(rewards: RowsLike, *, singleton: str = "zero") -> Arrays:
    """Return centred rewards divided by the mean of their group (maximum-likelihood reinforcement learning).

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
    settings(singleton=singleton)
    groups = Groups.parse(rewards)
    size = np.maximum(np.abs(groups.lowest), np.abs(groups.highest))
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = groups.mean / size  # in units in which nothing overflows or vanishes; NaN where all rewards are 0
        advantages = groups.deviations / groups.rows.spread(size) / groups.rows.spread(mean)
    return groups.finish(np.where(groups.rows.spread(mean > 1e-12), advantages, 0.0), singleton)


@register("rec")
@row_wise
def rec(
    rewards: RowsLike,
    *,
    normalize: bool = False,
    ddof: int = 0,
    eps: float = 1e-6,
    drop: str | None = None,
    rng: np.random.Generator | None = None,
    singleton: str = "zero",
) -> Arrays:
    """Return centred rewards of the samples that are kept, 0 for those dropped (group-relative REINFORCE, REC).

    A_i = R_i - mean of the kept, on demand divided by (their standard deviation + eps)

    Args:
        rewards: as for ``grpo``.
        normalize: whether to divide.
        ddof, eps: of the division; the paper's deviation is the biased one.
        drop: None keeps all; "balance" drops, where more samples lie below the mean than not, a random choice of the
            surplus below.
        rng: a numpy Generator, for ``drop="balance"`` and only there.
        singleton: as for ``grpo``.

    Raises:
        DataError, ConfigError: as for ``grpo``; rng is missing or not asked for.

    >>> rec([1.0, 0.0, 0.5])
    array([ 0.5, -0.5,  0. ])
    >>> import numpy as np
    >>> sorted(rec([1.0, 0.0, 0.0, 0.0], drop="balance", rng=np.random.default_rng(0)).tolist())
    [-0.5, 0.0, 0.0, 0.5]

    Source: arXiv:2509.24203. Peers: Trinity's REC fails for a group of one.
    """
    normalize = _check.flag("normalize", normalize)
    settings(ddof=ddof, eps=eps, singleton=singleton)
    _check.optional(_check.choice, "drop", drop, ("balance",))
    if (rng is not None) != (drop is not None) or (rng is not None and not isinstance(rng, np.random.Generator)):
        raise ConfigError("rng", f"got {_check.shown(rng)}", 'a numpy Generator with drop="balance" only')
    groups = Groups.parse(rewards)
    balanced = groups
    if rng is not None:
        keep = _balanced(groups, rng)
        rows = groups.rows
        balanced = Groups.of(_rows.Rows("rewards", np.where(keep, rows.flat, np.nan), rows.lengths, rows.form))
    advantages = balanced.whitened(ddof, eps) if normalize else balanced.deviations
    return groups.finish(advantages, singleton)


def _balanced(groups: Groups, rng: np.random.Generator) -> np.ndarray:
    """Return which samples [N] stay when the surplus of those below the mean is dropped."""
    below = groups.scored & (groups.deviations < 0)
    number = groups.rows.sum(below.astype(np.int64))
    surplus = 2 * number - groups.sizes
    row = groups.rows.spread(np.arange(groups.sizes.size))
    order = np.lexsort((rng.random(below.size), ~below, row))  # by group, those below the mean first, then by chance
    rank = np.empty(below.size, np.int64)
    rank[order] = np.arange(below.size) - groups.rows.spread(groups.rows.starts)
    keep: np.ndarray = ~(below & (rank < groups.rows.spread(surplus)))
    return keep


@register("gdpo")
def gdpo(
    rewards: Sequence[RowsLike],
    *,
    weights: Sequence[float] | None = None,
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: str = "zero",
) -> Any:
    """Return the weighted sum of each component's GRPO advantages, normalised over the batch.

    B_i = sum over components c of w_c GRPO(R_c)_i, and A_i = (B_i - mean of the batch) / (its deviation + eps)

    Args:
        rewards: one entry per component, each as for ``grpo`` and all of one shape. A sample that one component
            could not score (NaN) gets nothing from that one; a sample that none could score gets 0.
        weights: one number per component, 1 by default.
        ddof, eps: of both normalisations.
        singleton: as for ``grpo``, within each component.

    Returns:
        float64 in the form of one component; exactly 0 in groups that are constant in every component.

    Raises:
        DataError: as for ``grpo``; shapes differ between components; weights are not as many.
        ConfigError: as for ``grpo``.

    >>> gdpo([[1.0, 0.0], [0.0, 10.0]], weights=[2.0, 1.0], eps=0.0).round(6)  # the second counts half, not 10 times
    array([ 0.707107, -0.707107])

    Source: arXiv:2601.05242. Peers: verl whitens over tokens, TRL and NeMo over sequences as here.
    """
    settings(ddof=ddof, eps=eps, singleton=singleton)
    components = _components(rewards)
    first = components[0]
    factors = np.ones(len(components)) if weights is None else _weights(weights, len(components))
    total, size = np.zeros(first.rewards.size), 0.0
    for component, factor in zip(components, factors.tolist(), strict=True):
        part = factor * component.apply_singleton(component.whitened(ddof, eps), singleton)
        total, size = total + part, size + np.abs(part).max()
    total[np.abs(total) <= 1e-14 * size] = 0.0  # components that cancel leave rounding errors, not advantages
    scored = np.logical_or.reduce([component.scored for component in components])
    idle = np.logical_and.reduce([component.constant for component in components])
    advantages = np.zeros(total.size)
    advantages[scored] = whiten(total[scored], ddof, eps)
    return first.rows.restore(np.where(first.rows.spread(idle), 0.0, advantages))


def _components(rewards: Sequence[RowsLike]) -> list[Groups]:
    expected = "a list with the rewards of each component"
    _check.require(not _rows.is_one(rewards) and len(rewards) != 0, "rewards", rewards, expected, error=DataError)
    components = [Groups.parse(component, f"rewards[{c}]") for c, component in enumerate(rewards)]
    first = components[0].rows
    for c, component in enumerate(components):
        if not np.array_equal(component.rows.lengths, first.lengths) or component.rows.form != first.form:
            what = f"has groups of {component.rows.lengths.tolist()[:8]}"
            raise DataError(f"rewards[{c}]", what, f"{first.lengths.tolist()[:8]}", "as in rewards[0]")
    return components


def _weights(weights: Sequence[float] | None, count: int) -> np.ndarray:
    array = _rows.vector("weights", weights, count, why="one per component")
    _rows.require("weights", array, np.abs(array) <= _rows.LARGEST, "a finite number")
    return array
