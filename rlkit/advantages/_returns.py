"""Returns over the steps of trajectories, and rewards moved in time.

Trajectories step by step: helpers of every function over time.

Masked steps are taken out before a recursion runs and come back as zeros, so that they cannot leak and change no bit.
"""

from __future__ import annotations

import itertools
from functools import cached_property

import attrs
import numpy as np

from rlkit import _check, _rows
from rlkit._rows import Arrays, RowsLike, row_wise, settings, whiten
from rlkit.advantages._registry import register
from rlkit.errors import DataError

__all__ = ["Steps", "ahead", "discounted_returns", "potential_shaping", "rebn", "reverse_scan", "window_sum"]

_CHUNK = 1 << 16  # entries worked on together, so that they stay in the cache


def reverse_scan(x: np.ndarray, a: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Compute y[t] = x[t] + a[t] y[t + 1] over flat rows; ``a`` is 0 at the end of each row; overwrites both.

    By doubling: after each pass y[t] covers twice as many steps, and ``a`` the factor between. That takes about
    log2(longest row) passes, only sums and products, and gives a row the same bits independent of the other rows.

    >>> reverse_scan(np.array([0.0, 0.0, 1.0]), np.array([0.5, 0.5, 0.0]), np.array([0]))
    array([0.25, 0.5 , 1.  ])
    """
    for begin, end in _chunks(starts, x.size):
        part, factor = x[begin:end], a[begin:end]
        step = 1
        while factor.any():  # which ends, since each row ends with a 0
            part[:-step] += factor[:-step] * part[step:]
            factor[:-step] *= factor[step:]
            step *= 2
    return x


def window_sum(x: np.ndarray, gamma: float, n: int, left: np.ndarray) -> np.ndarray:
    """Return the sum over k < n of gamma^k x[t + k] within the row; ``left`` counts the entries from t to its end.

    Windows of 1, 2, 4, ... entries are put together by the binary digits of n, so nothing is ever subtracted.
    """
    block, size = x.copy(), 1
    total, covered = np.zeros_like(x), 0
    n = min(n, x.size)
    while n:
        if n & 1:
            total += gamma**covered * ahead(block, covered, left)
            covered += size
        n >>= 1
        if n:
            block += gamma**size * ahead(block, size, left)
            size *= 2
    return total


def ahead(x: np.ndarray, steps: int, left: np.ndarray) -> np.ndarray:
    """Return x[t + steps], or 0 beyond the end of the row."""
    if steps == 0:
        return x
    result = np.zeros_like(x)
    result[:-steps] = np.where(left[:-steps] > steps, x[steps:], 0.0)
    return result


def _chunks(starts: np.ndarray, size: int) -> list[tuple[int, int]]:
    """Yield consecutive whole rows, about ``_CHUNK`` entries at a time."""
    bounds = starts[np.searchsorted(starts, np.arange(0, size, _CHUNK), side="right") - 1]
    edges = np.unique(np.append(bounds, size)).tolist()
    return list(itertools.pairwise(edges))


@attrs.frozen(eq=False, slots=False)
class Steps:
    """The masked-in steps of trajectories, one after the other [n]; trajectories without any do not show up."""

    rows: _rows.Rows
    mask: np.ndarray | None  # bool [N]
    rewards: np.ndarray  # [n]
    filled: np.ndarray  # bool [B]: which trajectories have masked-in steps
    lengths: np.ndarray  # how many, of those that have some [b]
    bootstrap: np.ndarray  # the value after the last step [b]

    @classmethod
    def parse(
        cls,
        rewards: RowsLike,
        *,
        mask: RowsLike | None = None,
        bootstrap_value: RowsLike | float = 0.0,
        where: str = "rewards",
        empty: bool = False,
    ) -> Steps:
        """Check and parse a user's arguments; ``empty`` allows trajectories without steps."""
        rows = _rows.parse(where, rewards, empty=empty)
        flags = None if mask is None else rows.like("mask", mask, boolean=True)
        rows.check_finite(rows.flat, among=flags)
        counts = rows.lengths if flags is None else rows.sum(flags.astype(np.int64))
        filled = counts > 0
        bootstrap = _per_row("bootstrap_value", bootstrap_value, rows)[filled]
        return cls(rows, flags, rows.flat if flags is None else rows.flat[flags], filled, counts[filled], bootstrap)

    @cached_property
    def last(self) -> np.ndarray:
        """The index of each trajectory's last step."""
        return np.asarray(np.cumsum(self.lengths) - 1)

    @cached_property
    def starts(self) -> np.ndarray:
        """The index of each trajectory's first step."""
        return np.asarray(self.last + 1 - self.lengths)

    @cached_property
    def left(self) -> np.ndarray:
        """The number of steps from each one to the end of its trajectory, itself included."""
        return np.asarray(np.repeat(self.last + 1, self.lengths) - np.arange(self.rewards.size))

    def select(self, where: str, value: RowsLike) -> np.ndarray:
        """Return a further array, shaped like the rewards, at the masked-in steps."""
        flat = self.rows.like(where, value)
        self.rows.check_finite(flat, where=where, among=self.mask)
        return flat if self.mask is None else flat[self.mask]

    def per_trajectory(self, where: str, value: RowsLike | float) -> np.ndarray:
        """Return a number, or one per trajectory, for the trajectories that have masked-in steps [b]."""
        return np.asarray(_per_row(where, value, self.rows)[self.filled])

    def next(self, values: np.ndarray) -> np.ndarray:
        """Return values[t + 1], and the bootstrap value after the last step."""
        result = np.empty_like(values)
        result[:-1] = values[1:]
        result[self.last] = self.bootstrap
        return result

    def factors(self, factor: float | np.ndarray) -> np.ndarray:
        """Return ``factor`` for the recursion, 0 at the end of each trajectory."""
        result = np.full(self.rewards.size, factor) if isinstance(factor, float) else factor.copy()
        result[self.last] = 0.0
        return result

    def restore(self, selected: np.ndarray) -> Arrays:
        """Return [n] in the form of the rewards, 0 where masked out."""
        if self.mask is None:
            return self.rows.restore(selected)
        flat = np.zeros(self.rows.flat.size)
        flat[self.mask] = selected
        return self.rows.restore(flat)


def _per_row(where: str, value: RowsLike | float, rows: _rows.Rows) -> np.ndarray:
    """Return a number, or one per row."""
    count = rows.lengths.size
    if _rows.is_one(value):
        number = value.item() if isinstance(value, (np.ndarray, np.generic)) else value
        number = _check.real(where, number, low=-_rows.LARGEST, high=_rows.LARGEST, error=DataError)
        return np.full(count, number)
    array = _rows.vector(where, value, count, why="one per trajectory")
    _rows.require(where, array, np.abs(array) <= _rows.LARGEST, "a finite number")
    return array


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
        mask: shaped like ``rewards``; where it is 0 the result is 0 and the recursion skips the step, whatever its
            reward.

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
    return steps.restore(reverse_scan(x, steps.factors(gamma), steps.starts))


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
        Select first and normalise after: the trained samples are those that should have mean 0 and deviation 1.

    Raises:
        DataError: returns are empty, infinite or no numbers, or shapes differ.
        ConfigError: a setting is out of range.

    >>> rebn([[1.0, 2.0], [3.0]], eps=0.0)  # mean 2, deviation 1
    [array([-1.,  0.]), array([1.])]

    Source: GEM, arXiv:2510.01051. Peers: GEM and oat use the biased deviation, and NaN for a single return.
    """
    settings(ddof=ddof, eps=eps)
    rows = _rows.parse("returns", returns)
    counted = None if mask is None else rows.like("mask", mask, boolean=True)
    rows.check_finite(rows.flat, nan=True, among=counted)
    chosen = ~np.isnan(rows.flat) if counted is None else counted & ~np.isnan(rows.flat)
    result = np.zeros_like(rows.flat)
    result[chosen] = whiten(rows.flat[chosen], ddof, eps)
    return rows.restore(result)


@register("potential_shaping")
@row_wise
def potential_shaping(
    rewards: RowsLike, *, potentials: RowsLike, gamma: float = 1.0, mask: RowsLike | None = None
) -> Arrays:
    """Return rewards plus the discounted rise of a potential.

    r'_t = r_t + gamma phi_{t+1} - phi_t, with phi = 0 after the last step; the return from t changes by -phi_t

    Args:
        rewards: one trajectory [T], [B, T] or a list of [T_i]; finite.
        potentials: shaped like ``rewards``: phi of the state before each reward.
        gamma: in [0, 1], that of the returns.
        mask: shaped like ``rewards``; masked steps are 0 and passed over.

    Raises:
        DataError, ConfigError: as for ``discounted_returns``.

    >>> potential_shaping([0.0, 0.0, 1.0], potentials=[0.0, 0.5, 0.75])
    array([0.5 , 0.25, 0.25])

    Source: Ng, Harada and Russell (1999), theorem 1. Peers: none of the usual libraries has it.
    """
    gamma = _check.real("gamma", gamma, low=0.0, high=1.0)
    steps = Steps.parse(rewards, mask=mask)
    phi = steps.select("potentials", potentials)
    return steps.restore(steps.rewards + gamma * steps.next(phi) - phi)
