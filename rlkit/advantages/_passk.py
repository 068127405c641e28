"""Advantages for the best of k samples instead of the average one."""

from __future__ import annotations

import math

import numpy as np

from rlkit import _check, _rows
from rlkit._rows import Arrays, Groups, RowsLike, row_wise
from rlkit.advantages._registry import register
from rlkit.errors import ConfigError, DataError

__all__ = ["pass_at_k", "pkpo"]


@register("pass_at_k")
@row_wise
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
    _rows.settings(ddof=ddof, eps=eps, singleton=singleton)
    if (k is None) == (method == "analytic"):
        raise ConfigError("k", f"got {_check.shown(k)}", 'an integer with method="analytic" only')
    groups = Groups.parse(rewards)
    if k is not None:
        k = _size(groups, k)
        return groups.finish(_analytic(groups, k), singleton)
    lead = groups.by_size(_best_minus_second)
    if scale == "group":
        divisor = groups.deviation(ddof) + eps
        lead /= groups.rows.spread(np.where(groups.constant | (divisor == 0), 1.0, divisor))
    return groups.finish(lead, singleton)


@register("pkpo")
@row_wise
def pkpo(rewards: RowsLike, *, k: int, baseline: str = "loo_minus_one", singleton: str = "zero") -> Arrays:
    """Return each sample's share in the best of k (Pass-at-k policy optimization, for real rewards).

    s_i = sum over subsets I of size k that hold i of max(R over I) / C(N, k), and with the baseline "loo_minus_one"
    of max(R over I) - max(R over I without i)

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
    _rows.settings(singleton=singleton)
    groups = Groups.parse(rewards)
    k = _size(groups, k, 1 if baseline == "none" else 2)
    share = _share_of_best if baseline == "none" else _gain_of_best
    return groups.finish(groups.by_size(lambda x: share(x, k)), singleton)


def _size(groups: Groups, k: int, low: int = 1) -> int:
    k = _check.integer("k", k, low=low)
    small = np.flatnonzero(groups.rows.lengths < k)
    if small.size:
        row = int(small[0])
        raise DataError(groups.rows.row_name(row), f"has {groups.rows.lengths[row]} rewards", f"at least k={k}")
    return k


def _best_minus_second(x: np.ndarray) -> np.ndarray:
    """Compute "max_second" for groups [b, n] of one size."""
    result = np.zeros_like(x)
    if x.shape[1] > 1:
        best = x.argmax(axis=1)[:, None]
        top = np.partition(x, -2, axis=1)
        np.put_along_axis(result, best, top[:, -1:] - top[:, -2:-1], axis=1)
    return result


def _analytic(groups: Groups, k: int) -> np.ndarray:
    flat = groups.rows.flat
    bad = np.flatnonzero(groups.scored & (flat != 0) & (flat != 1))
    if bad.size:
        name, what = groups.rows.name(int(bad[0])), f"is {flat[bad[0]]}"
        raise DataError(name, what, '0 or 1 with method="analytic"', '"max_second" and pkpo take any')
    wrong = groups.sizes - groups.rows.sum(groups.rewards).astype(np.int64)
    kinds, kind = np.unique(np.stack([groups.sizes, wrong], axis=1), axis=0, return_inverse=True)
    values = np.array([_analytic_pair(n, w, k) for n, w in kinds.tolist()])[kind.ravel()]
    return np.where(groups.rewards == 1, groups.rows.spread(values[:, 0]), groups.rows.spread(values[:, 1]))


def _analytic_pair(n: int, wrong: int, k: int) -> tuple[float, float]:
    """Return the advantages of right and of wrong samples."""
    missed, all_subsets = math.comb(wrong, k), math.comb(n, k)
    if missed in (0, all_subsets):  # both are 0 where n < k
        return 0.0, 0.0
    miss = missed / all_subsets  # of integers, so correctly rounded however large they are
    deviation = math.sqrt((1.0 - miss) * miss)
    miss_with_one = math.comb(wrong - 1, k - 1) / math.comb(n - 1, k - 1)
    return miss / deviation, (miss - miss_with_one) / deviation


def _ranked_weights(n: int, k: int, steps: int) -> np.ndarray:
    """Return C(i, k - steps) / C(n, k) for the rank i = 0, ..., n - 1."""
    subsets = math.comb(n, k)
    return np.array([math.comb(i, k - steps) / subsets if k >= steps else 0.0 for i in range(n)])


def _share_of_best(x: np.ndarray, k: int) -> np.ndarray:
    """Compute the share without a baseline for groups [b, n] of one size.

    With ranks i from below, a sample is the best of C(i, k - 1) subsets, and one of rank j above it is the best of
    C(j - 1, k - 2) of those that hold both.
    """
    n = x.shape[1]
    if n < k:
        return np.zeros_like(x)
    order = np.argsort(x, axis=1)
    ranked = np.take_along_axis(x, order, axis=1)
    of_higher = np.roll(_ranked_weights(n, k, 2), 1)  # that of the lowest rank, which is above nothing, is not used
    weighted = ranked * of_higher
    from_here = np.cumsum(weighted[:, ::-1], axis=1)[:, ::-1]
    above = np.concatenate([from_here[:, 1:], np.zeros((x.shape[0], 1))], axis=1)
    result = np.empty_like(x)
    np.put_along_axis(result, order, ranked * _ranked_weights(n, k, 1) + above, axis=1)
    return result


def _gain_of_best(x: np.ndarray, k: int) -> np.ndarray:
    """Return for groups [b, n] of one size the sum over lower ranks j of (x_i - x_j) C(j, k - 2) / C(n, k).

    Only subsets whose best the sample is contribute, and without it their best is the next rank.
    """
    n = x.shape[1]
    if n < k:
        return np.zeros_like(x)
    order = np.argsort(x, axis=1)
    ranked = np.take_along_axis(x, order, axis=1)
    steps = np.diff(ranked, axis=1, prepend=ranked[:, :1])  # a sum of steps up, so that nothing is subtracted
    result = np.empty_like(x)
    reached = np.roll(np.cumsum(_ranked_weights(n, k, 2)), 1)  # the first step is 0 and meets no weight
    np.put_along_axis(result, order, np.cumsum(steps * reached, axis=1), axis=1)
    return result
