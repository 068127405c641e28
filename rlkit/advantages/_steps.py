"""Trajectories step by step: what every function over time shares.

Masked steps are taken out before a recursion runs and come back as zeros, so that they cannot leak and change no bit.
"""

from __future__ import annotations

from functools import cached_property

import attrs
import numpy as np

from rlkit import _check, _rows
from rlkit._forms import Arrays, RowsLike
from rlkit.errors import DataError


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
        """Check and take apart what a user gave; ``empty`` allows trajectories without steps."""
        rows = _rows.parse(where, rewards, empty=empty)
        flags = None if mask is None else rows.like("mask", mask, boolean=True)
        rows.check_finite(rows.flat, among=flags)
        counts = rows.lengths if flags is None else rows.sum(flags.astype(np.int64))
        filled = counts > 0
        bootstrap = _per_row("bootstrap_value", bootstrap_value, rows)[filled]
        return cls(rows, flags, rows.flat if flags is None else rows.flat[flags], filled, counts[filled], bootstrap)

    @cached_property
    def last(self) -> np.ndarray:
        """Where each trajectory's last step is."""
        return np.asarray(np.cumsum(self.lengths) - 1)

    @cached_property
    def starts(self) -> np.ndarray:
        """Where each trajectory's first step is."""
        return np.asarray(self.last + 1 - self.lengths)

    @cached_property
    def left(self) -> np.ndarray:
        """How many steps there are from each one to the end of its trajectory, itself included."""
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
        """values[t + 1], and the bootstrap value after the last step."""
        result = np.empty_like(values)
        result[:-1] = values[1:]
        result[self.last] = self.bootstrap
        return result

    def factors(self, factor: float | np.ndarray) -> np.ndarray:
        """``factor`` for the recursion: 0 at the end of each trajectory."""
        result = np.full(self.rewards.size, factor) if isinstance(factor, float) else factor.copy()
        result[self.last] = 0.0
        return result

    def restore(self, selected: np.ndarray) -> Arrays:
        """[n] in the form in which the rewards came, 0 where masked out."""
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
    bad = np.flatnonzero(~(np.abs(array) <= _rows.LARGEST))
    if bad.size:
        raise DataError(f"{where}[{bad[0]}]", f"is {array[bad[0]]}", "a finite number")
    return array
