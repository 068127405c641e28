"""Statistics of groups of rewards: what every group estimator shares, and the rules that none may break.

Unscored rewards (NaN) count nowhere, a constant group deviates by exactly 0, and nothing is ever divided by 0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import attrs
import numpy as np

from rlkit import _check, _rows
from rlkit._forms import Arrays, RowsLike
from rlkit.errors import DataError

SINGLETON = ("zero", "raw", "error")


@attrs.frozen(eq=False, slots=False)
class Groups:
    """Rewards by group. Flat arrays [N] have one entry per reward, arrays [B] one per group."""

    rows: _rows.Rows
    scored: np.ndarray  # bool [N]
    rewards: np.ndarray  # [N], 0 where unscored
    sizes: np.ndarray  # [B], scored rewards
    lowest: np.ndarray  # [B], NaN where nothing is scored

    @classmethod
    def parse(cls, rewards: RowsLike, where: str = "rewards") -> Groups:
        """Check and take apart what a user gave."""
        rows = _rows.parse(where, rewards)
        rows.check_finite(rows.flat, nan=True)
        return cls.of(rows)

    @classmethod
    def of(cls, rows: _rows.Rows) -> Groups:
        """Return the groups of checked rows, NaN where unscored."""
        scored = ~np.isnan(rows.flat)
        if scored.all():
            flat, sizes = rows.flat, rows.lengths
        else:
            flat, sizes = np.where(scored, rows.flat, 0.0), rows.sum(scored.astype(np.int64))
        return cls(rows, scored, flat, sizes, rows.reduce(np.fmin, rows.flat))

    @cached_property
    def highest(self) -> np.ndarray:
        """The largest reward of each group [B], NaN where nothing is scored."""
        return self.rows.reduce(np.fmax, self.rows.flat)

    @cached_property
    def constant(self) -> np.ndarray:
        """Whether all scored rewards of a group are the same number [B]."""
        return np.asarray(self._sum_above == 0)  # different numbers differ by more than 0, however near they are

    @cached_property
    def _above(self) -> np.ndarray:
        """Rewards above their group's lowest [N], 0 where unscored: exact zeros in constant groups."""
        above = self.rewards - self.rows.spread(self.lowest)
        return above if self.scored.all() else np.where(self.scored, above, 0.0)

    @cached_property
    def _sum_above(self) -> np.ndarray:
        return self.rows.sum(self._above)

    @cached_property
    def _mean_above(self) -> np.ndarray:
        return np.asarray(self._sum_above / np.maximum(self.sizes, 1))

    @cached_property
    def mean(self) -> np.ndarray:
        """The mean of each group's scored rewards [B], NaN where there are none."""
        return np.asarray(self.lowest + self._mean_above)

    @cached_property
    def deviations(self) -> np.ndarray:
        """Rewards minus their group's mean [N]; exactly 0 in constant groups and where unscored."""
        deviations = self._above - self.rows.spread(self._mean_above)
        return deviations if self.scored.all() else np.where(self.scored, deviations, 0.0)

    def _relative(self, ddof: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the largest deviation [B], and in units of it the deviations [N] and their standard deviation [B].

        In these units squares can neither overflow nor vanish.
        """
        unit = self.rows.reduce(np.maximum, np.abs(self.deviations))
        unit[self.constant] = 1.0
        relative = self.deviations / self.rows.spread(unit)
        squares = self.rows.sum(relative * relative)
        return unit, relative, np.sqrt(squares / np.maximum(self.sizes - ddof, 1))

    def deviation(self, ddof: int) -> np.ndarray:
        """Return the standard deviation of each group [B], 0 where constant."""
        unit, _, spread = self._relative(ddof)
        return np.asarray(unit * spread)

    def whitened(self, ddof: int, eps: float) -> np.ndarray:
        """Deviations / (standard deviation of the group + eps) [N]."""
        unit, relative, spread = self._relative(ddof)
        with np.errstate(over="ignore"):
            denominator = spread + eps / unit
        denominator[self.constant] = 1.0
        return np.asarray(relative / self.rows.spread(denominator))

    def by_size(self, function: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Apply ``function`` to the scored rewards [b, n] of the groups of each size n: flat [N], 0 where unscored."""
        result = np.zeros(self.rewards.size)
        positions = np.flatnonzero(self.scored)
        starts = np.cumsum(self.sizes) - self.sizes
        for size in np.unique(self.sizes).tolist():
            index = positions[starts[self.sizes == size][:, None] + np.arange(size)]
            result[index] = function(self.rewards[index])
        return result

    def apply_singleton(self, advantages: np.ndarray, singleton: str) -> np.ndarray:
        """Advantages [N] with the rule for groups of one scored reward applied, and 0 where unscored."""
        advantages = self.where_scored(advantages)
        alone = self.sizes == 1
        if not alone.any():
            return advantages
        if singleton == "error":
            why = 'singleton="error"; "zero" gives it the advantage 0, "raw" its reward'
            raise DataError(self.rows.row_name(int(np.argmax(alone))), "has one scored reward", "at least two", why)
        return np.where(self.rows.spread(alone), self.rewards if singleton == "raw" else 0.0, advantages)

    def where_scored(self, advantages: np.ndarray) -> np.ndarray:
        """Advantages [N], 0 where unscored."""
        return advantages if self.scored.all() else np.where(self.scored, advantages, 0.0)

    def finish(self, advantages: np.ndarray, singleton: str = "zero") -> Arrays:
        """Advantages [N] in the form in which the rewards came."""
        return self.rows.restore(self.apply_singleton(advantages, singleton))


def whiten(
    values: np.ndarray, ddof: int, eps: float, *, counts: np.ndarray | None = None, centred: np.ndarray | None = None
) -> np.ndarray:
    """(values - mean) / (standard deviation + eps) over all of ``values`` [N]; exactly 0 where they are constant.

    ``counts`` [N] says how often each value stands in the population, once by default. Given ``centred`` [M], it is
    that which is divided.
    """
    times = np.ones(values.size) if counts is None else counts
    used = slice(None) if counts is None else counts > 0
    lowest, highest = values[used].min(initial=np.inf), values[used].max(initial=-np.inf)
    if lowest >= highest:  # or there is none
        return np.zeros_like(values if centred is None else centred)
    deviations = values - lowest
    unit = deviations @ times / times.sum()  # how far the lowest lies below the mean, and no other N times farther
    if unit == 0.0:  # the smallest of all floats, halved
        return np.zeros_like(values if centred is None else centred)
    deviations -= unit
    with np.errstate(over="ignore"):  # of those that do not count, and of eps / unit
        deviations /= unit
        relative = deviations[used]
        spread = np.sqrt(relative * relative @ times[used] / (times.sum() - ddof))
        return np.asarray((deviations if centred is None else centred / unit) / (spread + eps / unit))


def settings(*, ddof: int = 1, eps: float = 0.0, singleton: str = "zero") -> None:
    """Check the settings that many estimators share."""
    _check.integer("ddof", ddof, low=0, high=1, why="1 is the unbiased deviation, 0 the biased one")
    _check.real("eps", eps, low=0.0)
    _check.choice("singleton", singleton, SINGLETON)


def lengths_like(groups: Groups, lengths: RowsLike) -> np.ndarray:
    """Tokens of each sample [N], checked to be integers >= 0 in the layout of the rewards."""
    flat = groups.rows.like("lengths", lengths)
    with np.errstate(invalid="ignore"):
        good = (flat >= 0) & (flat == np.floor(flat)) & (flat < 2**53)
    if not good.all():
        index = int(np.argmin(good))
        raise DataError(groups.rows.name(index, "lengths"), f"is {flat[index]}", "an integer >= 0")
    return flat
