"""Advantages of samples relative to the other samples of the same prompt.

An estimator is a pure function from rewards to advantages: ``grpo([[1.0, 0.0], [0.0, 0.0, 1.0]])``. It gets all groups
of a batch at once, as one group [G], groups of equal size [B, G], or a list of groups [G_i], and returns one float64
per reward, 0 for a reward of NaN: such a sample could not be scored. The result has the same form; it is a list, or a
matrix where all groups of a list have one size. Settings go by keyword. An estimator knows no tokens:
``rlkit.credit.assign`` calls it with a list of arrays, one per group (and with ``lengths`` in the same form, if it has
a parameter of that name), and gives the advantage of a sample to its tokens. ``gdpo``, ``step_wise_grpo`` and
``hierarchical_grpo`` take or return more.

Most estimators below take three steps:

1. ``read_rewards`` checks the shared settings and reads the rewards. ``rows.flat`` [N] then holds all samples, group
   after group, NaN where a sample could not be scored.
2. Compute with numbers per group [B] and per sample [N]; ``rows.repeat`` gives each sample the number of its group. A
   row of ``Rows`` is a group. Its statistics skip NaN; centred rewards and deviations are exactly 0 for equal rewards,
   where a rounded mean would leave small errors, and a deviation near 0 would make them large.
3. ``finish`` gives unscored samples 0, applies the rule for groups with one sample, and returns the form given.

``@register("name")``, written above ``@per_group``, adds an estimator, so that ``assign`` and recipes find it by name.
A function that looks at one group becomes an estimator with ``@per_group``, and needs it: of a list of groups of equal
size numpy would compute one mean over all.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from rlkit import _check
from rlkit._rows import (
    LARGEST,
    Arrays,
    Labels,
    Rows,
    RowsLike,
    check_settings,
    fill_missing,
    is_one,
    read_labels,
    warn_alone,
    whiten,
)
from rlkit.errors import ConfigError, DataError
from rlkit.registry import Registry

registry = Registry("estimator", entry_point_group="rlkit.advantages")
register = registry.register


def read_rewards(rewards: RowsLike, **settings: Any) -> Rows:
    """Check the settings that estimators share, and read the rewards of groups."""
    check_settings(**settings)
    return Rows.parse("rewards", rewards, nan=True)


def finish(rows: Rows, advantages: np.ndarray, singleton: str = "zero") -> Arrays:
    """Return advantages [N] in the form of the rewards, 0 where NaN, with the rule for groups of one applied."""
    return rows.restore(apply_singleton(rows, advantages, singleton))


def apply_singleton(rows: Rows, advantages: np.ndarray, singleton: str) -> np.ndarray:
    """Return advantages [N] with the rule for groups of one applied; what is NaN, since it does not count, is 0."""
    alone = rows.count(rows.flat) == 1
    if alone.any():
        if singleton == "zero":
            warn_alone(rows)
        if singleton == "error":
            why = 'singleton="error"; with "zero" its advantage is 0, with "raw" its reward'
            raise DataError(rows.name_row(int(np.argmax(alone))), "has one scored reward", "at least two", why)
        advantages = np.where(rows.repeat(alone), rows.flat if singleton == "raw" else 0.0, advantages)
    return fill_missing(advantages)


@register("grpo")
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
    rows = read_rewards(rewards, ddof=ddof, eps=eps, singleton=singleton)
    advantages = rows.standardize(rows.flat, ddof, eps) if scale == "group" else rows.centre(rows.flat)
    if scale == "batch":
        batch = Rows("rewards", rows.flat, np.array([rows.flat.size]), "row")
        advantages = advantages / _compute_divisor(batch, ddof, eps)
    return finish(rows, advantages, singleton)


def _compute_divisor(rows: Rows, ddof: int, eps: float) -> np.ndarray:
    """Return the deviation + eps of each row [B], 1 where all are equal: their advantages are 0 as they are."""
    deviations = rows.deviation(rows.flat, ddof)
    return np.where(deviations > 0, deviations + eps, 1.0)


@register("dr_grpo")
def dr_grpo(rewards: RowsLike, *, singleton: str = "zero") -> Arrays:
    """Return rewards minus the mean of their group, undivided (Dr. GRPO).

    A_i = R_i - mean of the group

    Args:
        rewards, singleton: as for ``grpo``.

    Raises:
        DataError, ConfigError: as for ``grpo``.

    >>> dr_grpo([1.0, 0.0, 0.0, 1.0])
    array([ 0.5, -0.5, -0.5,  0.5])

    Source: arXiv:2503.20783. Peers: TRL's scale_rewards="none", verl's norm_adv_by_std_in_grpo=False; the paper's
    constant length is ``token_weights(mode="seq-mean-token-sum-norm")`` here.
    """
    return grpo(rewards, scale="none", singleton=singleton)


@register("rloo")
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
    rows = read_rewards(rewards, singleton=singleton)
    n = rows.count(rows.flat)
    return finish(rows, rows.centre(rows.flat) * rows.repeat(n / np.maximum(n - 1, 1)), singleton)


@register("loo_std")
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
    rows = read_rewards(rewards, eps=eps, singleton=singleton)
    return finish(rows, _apply_by_size(rows, lambda x: _compare_with_others(x, eps)), singleton)


def _apply_by_size(rows: Rows, function: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Apply ``function`` to the scored rewards [b, n], in rising order, of the groups of each size n.

    Returns:
        What it returns for each reward [N], 0 where unscored.
    """
    result = np.zeros(rows.flat.size)
    sizes, places = rows.count(rows.flat), np.flatnonzero(~np.isnan(rows.flat))
    starts = np.cumsum(sizes) - sizes
    for size in np.unique(sizes).tolist():
        index = places[starts[sizes == size][:, None] + np.arange(size)]
        index = index[np.arange(len(index))[:, None], rows.flat[index].argsort(axis=1)]
        result[index] = function(rows.flat[index])
    return result


def _compare_with_others(x: np.ndarray, eps: float) -> np.ndarray:
    """Compute ``loo_std`` for rising groups [b, n] of one size.

    The others of a reward are those below and those above it, whose squares are summed apart: subtracting one square
    from the sum of all would leave the rounding error of the largest.
    """
    n = x.shape[1]
    if n < 3:
        return np.asarray(x - x[:, ::-1])
    span = x[:, -1:] - x[:, :1]
    unit = np.where(span > 0, span, 1.0)
    up, down = (x - x[:, :1]) / unit, (x[:, -1:] - x) / unit
    below, above = np.arange(n), np.arange(n)[::-1]  # how many there are on either side
    sum_below, squares_below = _sum_before(up), _sum_before(up * up)
    sum_above, squares_above = _sum_before(down[:, ::-1])[:, ::-1], _sum_before((down * down)[:, ::-1])[:, ::-1]
    mean_below, mean_above = sum_below / np.maximum(below, 1), span / unit - sum_above / np.maximum(above, 1)
    mean = (below * mean_below + above * mean_above) / (n - 1)
    squares = squares_below - sum_below * mean_below + squares_above - sum_above * sum_above / np.maximum(above, 1)
    squares += (mean_above - mean_below) ** 2 * below * above / (n - 1)
    lowest = np.where(below > 0, x[:, :1], x[:, 1:2])
    highest = np.where(above > 0, x[:, -1:], x[:, -2:-1])
    centred = up - mean
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        divisor = np.sqrt(squares / (n - 2)) + eps / unit
        return np.asarray(np.where((lowest == highest) | (divisor == 0), centred * unit, centred / divisor))


def _sum_before(x: np.ndarray) -> np.ndarray:
    """Return the sum of the entries before each entry [b, n]."""
    sums = np.zeros_like(x)
    np.cumsum(x[:, :-1], axis=1, out=sums[:, 1:])
    return sums


@register("reinforce")
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
    rows = read_rewards(rewards, ddof=ddof, eps=eps)
    advantages = whiten(rows.flat, ddof, eps) if normalize else rows.flat
    return rows.restore(fill_missing(advantages))


@register("opo")
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
    rows = read_rewards(rewards, singleton=singleton)
    return finish(rows, rows.centre(rows.flat, times=rows.read_counts("lengths", lengths)), singleton)


@register("gpg")
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
    rows = read_rewards(rewards, singleton=singleton)
    centred = rows.centre(rows.flat)
    scored, signal = ~np.isnan(rows.flat), np.abs(rows.flat) > 0
    if count == "groups":
        scored, signal = (rows.reduce(np.logical_or, each) for each in (scored, np.abs(centred) > 0))
    alpha = int(scored.sum()) / max(int(signal.sum()), 1)
    return finish(rows, centred * (alpha / f_norm), singleton)


@register("opmd")
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
    rows = read_rewards(rewards, singleton=singleton)
    if baseline == "mean":
        return finish(rows, rows.centre(rows.flat), singleton)
    below = rows.flat - rows.repeat(rows.reduce(np.fmax, rows.flat))  # of the group's best, so that exp cannot overflow
    with np.errstate(over="ignore", divide="ignore"):  # log(0) where nothing is scored
        return finish(rows, below - rows.repeat(tau * np.log(rows.mean(np.exp(below / tau)))), singleton)


@register("asymre")
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
    shift = _check.real("shift", shift, low=-LARGEST, high=LARGEST)
    rows = read_rewards(rewards, singleton=singleton)
    return finish(rows, rows.centre(rows.flat) - shift, singleton)


@register("maxrl")
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
    rows = read_rewards(rewards, singleton=singleton)
    largest = rows.reduce(np.fmax, np.abs(rows.flat))
    x = rows.flat / rows.repeat(np.where(largest > 0, largest, 1.0))  # in units in which nothing overflows or vanishes
    mean = rows.repeat(rows.mean(x))
    good = mean > 1e-12
    return finish(rows, np.where(good, rows.centre(x) / np.where(good, mean, 1.0), 0.0), singleton)


@register("rec")
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
    _check.optional(_check.choice, "drop", drop, ("balance",))
    if (rng is not None) != (drop is not None) or (rng is not None and not isinstance(rng, np.random.Generator)):
        raise ConfigError("rng", f"got {_check.describe(rng)}", 'a numpy Generator with drop="balance" only')
    rows = read_rewards(rewards, ddof=ddof, eps=eps, singleton=singleton)
    kept = rows.flat if rng is None else _drop_surplus(rows, rng)
    advantages = rows.standardize(kept, ddof, eps) if normalize else rows.centre(kept)
    return finish(rows, advantages, singleton)


def _drop_surplus(rows: Rows, rng: np.random.Generator) -> np.ndarray:
    """Return rewards [N] with NaN for a random choice of those by which more lie below the mean than not."""
    below = rows.centre(rows.flat) < 0
    surplus = 2 * rows.sum(below.astype(np.int64)) - rows.count(rows.flat)
    row = rows.repeat(np.arange(rows.lengths.size))
    order = np.lexsort((rng.random(below.size), ~below, row))  # by group, those below the mean first, then by chance
    rank = np.empty(below.size, np.int64)
    rank[order] = np.arange(below.size) - rows.repeat(rows.starts)
    return np.where(below & (rank < rows.repeat(surplus)), np.nan, rows.flat)


@register("gdpo")
def gdpo(
    rewards: Sequence[RowsLike],
    *,
    weights: Sequence[float] | None = None,
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: str = "zero",
) -> Arrays:
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
    check_settings(ddof=ddof, eps=eps, singleton=singleton)
    if is_one(rewards) or len(rewards) == 0:
        raise DataError("rewards", f"got {_check.describe(rewards)}", "a list with the rewards of each component")
    parts = [Rows.parse(f"rewards[{c}]", component, nan=True) for c, component in enumerate(rewards)]
    first = parts[0]
    for part in parts:
        first.read_like(part.where, part.restore(part.flat))
    factors = np.ones(len(parts))
    if weights is not None:
        factors = Rows.vector("weights", weights, len(parts), why="one per component").flat
    summed, size, varied = np.zeros(first.flat.size), 0.0, np.zeros(first.lengths.size, bool)
    for part, factor in zip(parts, factors, strict=True):
        advantages = part.standardize(part.flat, ddof, eps)
        weighted = factor * apply_singleton(part, advantages, singleton)
        summed, size = summed + weighted, size + np.abs(weighted).max()
        varied |= part.reduce(np.fmax, np.abs(advantages)) > 0
    summed[np.abs(summed) <= 1e-14 * size] = 0.0  # components that cancel leave rounding errors, not advantages
    unscored = np.logical_and.reduce([np.isnan(part.flat) for part in parts])
    advantages = whiten(np.where(unscored, np.nan, summed), ddof, eps)
    return first.restore(np.where(unscored | ~first.repeat(varied), 0.0, advantages))


@register("pass_at_k")
def pass_at_k(
    rewards: RowsLike,
    *,
    method: str = "max_second",
    k: int | None = None,
    scale: str = "group",
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: str = "zero",
) -> Arrays:
    """Return advantages that raise the chance of at least one right sample among k.

    "max_second": the best sample gets (best - second best) / (s + eps), all others 0; k is the group's size.
    "analytic": for rewards 0 or 1 and any k, GRPO over all subsets of size k in closed form. With N samples of which
    W are wrong, p = 1 - C(W, k) / C(N, k) is the mean of the subsets' best and sqrt(p (1 - p)) its deviation;
    right samples get (1 - p) / deviation, wrong ones (1 - p - C(W - 1, k - 1) / C(N - 1, k - 1)) / deviation.

    Args:
        rewards: as for ``grpo``; 0 or 1 for "analytic".
        method: "max_second" or "analytic".
        k: 1 to the size of the smallest group, for "analytic" and only there.
        scale: of "max_second": "group", s is the group's standard deviation; "none", no division.
        ddof, eps: of that division.
        singleton: as for ``grpo``.

    Returns:
        float64 in the form of ``rewards``; 0 where all or no subset is right, where best and second best are equal,
        and in groups with fewer than k scored rewards.

    Raises:
        DataError: as for ``grpo``; a group is smaller than k; rewards are not 0 or 1 ("analytic").
        ConfigError: as for ``grpo``; k is missing, not asked for or out of range.

    >>> pass_at_k([0.2, 1.0, 0.5], scale="none")
    array([0. , 0.5, 0. ])
    >>> pass_at_k([1.0, 0.0, 0.0, 0.0], method="analytic", k=2).round(4)  # p = 1/2
    array([ 1.    , -0.3333, -0.3333, -0.3333])

    Source: "max_second" arXiv:2503.19595, "analytic" arXiv:2508.10751. Peers: verl's grpo_passk is the first, and
    fails for a group of one.
    """
    _check.choice("method", method, ("max_second", "analytic"))
    _check.choice("scale", scale, ("group", "none"))
    if (k is None) == (method == "analytic"):
        raise ConfigError("k", f"got {_check.describe(k)}", 'an integer with method="analytic" only')
    rows = read_rewards(rewards, ddof=ddof, eps=eps, singleton=singleton)
    if k is not None:
        size = _check_k(rows, k)
        good = np.isnan(rows.flat) | np.isin(rows.flat, (0.0, 1.0))
        rows.require("rewards", rows.flat, good, '0 or 1 with method="analytic"', '"max_second" and pkpo take any')
        return finish(rows, _apply_by_size(rows, lambda x: _compare_subsets(x, size)), singleton)
    lead = _apply_by_size(rows, _best_minus_second)
    if scale == "group":
        lead = lead / rows.repeat(_compute_divisor(rows, ddof, eps))
    return finish(rows, lead, singleton)


@register("pkpo")
def pkpo(rewards: RowsLike, *, k: int, baseline: str = "loo_minus_one", singleton: str = "zero") -> Arrays:
    """Return each sample's share in the best of k (Pass-at-k policy optimization, for real rewards).

    s_i = sum over subsets I of size k that hold i of (max(R over I) - b_i) / C(N, k)

    where b_i is max(R over I without i) with the baseline "loo_minus_one", and 0 without one.

    Args:
        rewards: as for ``grpo``; N counts the scored ones.
        k: 1 (2 with the baseline) to the size of the smallest group.
        baseline: "loo_minus_one" or "none".
        singleton: as for ``grpo``.

    Returns:
        float64 in the form of ``rewards``. Without a baseline a constant group does not get 0. Groups with fewer
        than k scored rewards get 0.

    Raises:
        DataError: as for ``grpo``; a group is smaller than k.
        ConfigError: as for ``grpo``; k is out of range.

    >>> pkpo([1.0, 0.0, 0.0], k=2, baseline="none").round(4)  # 2 of 3 pairs with the first are worth 1, 1 with others
    array([0.6667, 0.3333, 0.3333])
    >>> pkpo([1.0, 0.0, 0.0], k=2).round(4)
    array([0.6667, 0.    , 0.    ])

    Source: arXiv:2505.15201, sections 3 and 4. Peers: none of the usual libraries has it.
    """
    _check.choice("baseline", baseline, ("loo_minus_one", "none"))
    rows = read_rewards(rewards, singleton=singleton)
    k = _check_k(rows, k, 1 if baseline == "none" else 2)
    return finish(rows, _apply_by_size(rows, lambda x: _share_best(x, k, relative=baseline != "none")), singleton)


def _check_k(rows: Rows, k: int, low: int = 1) -> int:
    k = _check.integer("k", k, low=low)
    small = np.flatnonzero(rows.lengths < k)
    if small.size:
        raise DataError(rows.name_row(int(small[0])), f"has {rows.lengths[small[0]]} rewards", f"at least k={k}")
    return k


def _best_minus_second(x: np.ndarray) -> np.ndarray:
    """Compute "max_second" for rising groups [b, n] of one size."""
    result = np.zeros_like(x)
    if x.shape[1] > 1:
        result[:, -1] = x[:, -1] - x[:, -2]
    return result


def _compare_subsets(x: np.ndarray, k: int) -> np.ndarray:
    """Compute "analytic" for groups [b, n] of one size."""
    wrong = (x == 0).sum(axis=1).tolist()
    known = {w: _compare_right_and_wrong(x.shape[1], w, k) for w in set(wrong)}
    pairs = np.array([known[w] for w in wrong])
    return np.where(x == 1, pairs[:, :1], pairs[:, 1:])


def _compare_right_and_wrong(n: int, wrong: int, k: int) -> tuple[float, float]:
    """Return the advantages of right and of wrong samples."""
    missed, subsets = math.comb(wrong, k), math.comb(n, k)
    if missed in (0, subsets):  # both are 0 where n < k
        return 0.0, 0.0
    miss = missed / subsets  # of integers, so correctly rounded however large they are
    spread = math.sqrt((1.0 - miss) * miss)
    miss_with_one = math.comb(wrong - 1, k - 1) / math.comb(n - 1, k - 1)
    return miss / spread, (miss - miss_with_one) / spread


def _share_best(x: np.ndarray, k: int, *, relative: bool) -> np.ndarray:
    """Compute ``pkpo`` for rising groups [b, n] of one size, whose ranks i count from 0, the lowest."""
    n = x.shape[1]
    if n < k:
        return np.zeros_like(x)
    with_both = np.array([math.comb(i, k - 2) / math.comb(n, k) if k > 1 else 0.0 for i in range(n)])
    if relative:
        # The sum over lower ranks j of (x_i - x_j) C(j, k - 2) / C(n, k): only subsets whose best the sample is count,
        # and without it their best is the next rank. As a sum of steps up, so that nothing is subtracted.
        steps = np.diff(x, axis=1, prepend=x[:, :1])  # the first is 0, and its weight does not matter
        return np.cumsum(steps * np.roll(np.cumsum(with_both), 1), axis=1)
    # It is the best of C(i, k - 1) subsets, and in C(j - 1, k - 2) of those whose best has the higher rank j.
    best = np.array([math.comb(i, k - 1) / math.comb(n, k) for i in range(n)])
    from_here = np.cumsum((x * np.roll(with_both, 1))[:, ::-1], axis=1)[:, ::-1]
    return np.asarray(x * best + np.pad(from_here[:, 1:], ((0, 0), (0, 1))))


@register("step_wise_grpo")
def step_wise_grpo(
    rewards: RowsLike,
    steps: RowsLike,
    *,
    step_norm: bool = False,
    scale: str = "group",
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: str = "zero",
) -> Any:
    """Return the GRPO advantage of each trajectory's last reward, given to each of its steps.

    Args:
        rewards: the reward of each trajectory's last step, as for ``grpo``.
        steps: shaped like ``rewards``: how many steps each trajectory has, integers >= 1.
        step_norm: whether to divide by the number of steps.
        scale, ddof, eps, singleton: as for ``grpo``.

    Returns:
        For one group a list of float64 arrays, one per trajectory, as long as it has steps; for several groups a
        list of such lists.

    Raises:
        DataError: as for ``grpo``; steps are not integers >= 1 or shaped differently.
        ConfigError: as for ``grpo``.

    >>> step_wise_grpo([1.0, 3.0], [1, 2], eps=0.0, step_norm=True)[1].round(6)  # 0.707107 over two steps
    array([0.353553, 0.353553])

    Source: none; the estimator of multi-step rollouts in Trinity, rllm and ROLL.
    """
    step_norm = _check.flag("step_norm", step_norm)
    rows = Rows.parse("rewards", rewards, nan=True)
    n = rows.read_counts("steps", steps, low=1, high=2**31)
    advantages = rows.read_like("rewards", grpo(rewards, scale=scale, ddof=ddof, eps=eps, singleton=singleton))
    if step_norm:
        advantages = advantages / n
    arrays = [np.full(int(length), a) for length, a in zip(n.tolist(), advantages.tolist(), strict=True)]
    if rows.form == "row":
        return arrays
    return [arrays[a:b] for a, b in zip(rows.starts.tolist(), rows.ends.tolist(), strict=True)]


@register("hierarchical_grpo")
def hierarchical_grpo(rewards: RowsLike, roles: Labels, groups: Labels, *, singleton: str = "zero") -> np.ndarray:
    """Return rewards minus the mean of their role in their group, for episodes that several roles play.

    Args:
        rewards: flat [N], as for ``by_group``.
        roles: [N] labels, such as "proposer" and "solver".
        groups: [N] labels, such as the prompt's.
        singleton: as for ``grpo``.

    Returns:
        float64 [N].

    Raises:
        DataError, ConfigError: as for ``by_group``.

    >>> hierarchical_grpo([1.0, 0.0, 5.0, 3.0], ["a", "a", "b", "b"], ["q", "q", "q", "q"])
    array([ 0.5, -0.5,  1. , -1. ])

    Source: none; prime-rl's estimator for episodes of several agents.
    """
    x = Rows.vector("rewards", rewards, nan=True).flat
    role, group = read_labels("roles", roles, x.size), read_labels("groups", groups, x.size)
    return by_group(grpo, x, role * (group.max(initial=0) + 1) + group, scale="none", singleton=singleton)


def by_group(
    estimator: str | Callable[..., object], rewards: RowsLike, groups: Labels, **settings: object
) -> np.ndarray:
    """Return the advantages of a group estimator for flat rewards with group labels.

    Args:
        estimator: a registered name, such as "grpo", or a function that takes a list of groups [G_i] and returns
            advantages of the same form.
        rewards: [N], in any order.
        groups: [N] labels, hashable: strings, integers, ...; equal labels make a group. An array of integers is
            quickest.
        settings: keyword arguments of the estimator; ``lengths`` [N] is regrouped with the rewards.

    Returns:
        float64 [N], in the order of ``rewards``.

    Raises:
        DataError: rewards are not 1-D numbers, labels are not as many, or the estimator returns another form.
        UnknownNameError: no estimator has that name.
        TypeError: the estimator has no such setting.

    >>> by_group("rloo", [1.0, 5.0, 0.0, 3.0], ["a", "b", "a", "b"])
    array([ 1.,  2., -1., -2.])
    """
    function = registry.resolve(estimator)
    x = Rows.vector("rewards", rewards, nan=True).flat
    codes = read_labels("groups", groups, x.size)
    order = np.argsort(codes, kind="stable")
    rows = Rows("rewards", x[order], np.bincount(codes), "list")
    if "lengths" in settings:
        lengths = Rows.vector("lengths", cast("RowsLike", settings["lengths"]), x.size, why="one per reward").flat
        settings["lengths"] = rows.restore(lengths[order])
    where, result = f"{estimator!r}(...)", np.empty(x.size)
    result[order] = rows.read_like(where, function(rows.restore(rows.flat), **settings))
    rows.require(where, result[order], np.isfinite(result[order]), "a finite advantage")
    return result


def per_group(function: Callable[..., object]) -> Callable[..., Arrays]:
    """Decorate a function of one group, so that it takes several groups, like all estimators of rlkit.

    Args:
        function: of the rewards of one group, float64 [G], and of settings; it gives G advantages. An unscored reward
            is NaN: skip it, as ``np.nanmean`` does; its advantage becomes 0. A setting named ``lengths``, tokens per
            sample, reaches it as float64 [G], too.

    Returns:
        A function of one group [G], of equal ones [B, G], or of a list of groups, which gives advantages of that form.

    Raises:
        DataError: when it is called: rewards are not numbers, or ``function`` did not return G finite numbers.

    >>> import numpy as np
    >>> @per_group
    ... def above_half(rewards, *, bonus=1.0): return bonus * (rewards > np.nanmax(rewards) / 2)
    >>> above_half([[1.0, 0.0], [8.0, 2.0, 5.0]], bonus=2.0)
    [array([2., 0.]), array([2., 0., 2.])]
    """
    name = getattr(function, "__name__", "estimator")

    @functools.wraps(function)
    def estimator(rewards: RowsLike, *args: object, **settings: Any) -> Arrays:
        rows = Rows.read("rewards", rewards)
        cuts, parts = rows.ends[:-1], []
        lengths = np.split(rows.read_like("lengths", settings["lengths"]), cuts) if "lengths" in settings else None
        for i, group in enumerate(np.split(rows.flat, cuts)):
            if lengths is not None:
                settings["lengths"] = lengths[i]
            where = f"{name}({rows.name_row(i)})"
            advantages = _check.as_array(where, function(group, *args, **settings), "one advantage per reward")
            if advantages.shape != group.shape:
                found = f"returned an array of shape {advantages.shape}"
                raise DataError(where, found, f"{group.shape}", "one advantage per reward")
            parts.append(np.where(np.isnan(group), 0.0, advantages))
        result = np.concatenate(parts)
        rows.require(f"{name}(rewards)", result, np.isfinite(result), "a finite advantage")
        return rows.restore(result)

    return estimator
