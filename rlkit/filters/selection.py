"""What a filter returns."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import attrs
import numpy as np

from rlkit import _check
from rlkit.errors import DataError

__all__ = ["Selection", "select"]


def _read_only(counts: Mapping[str, int]) -> Mapping[str, int]:
    return MappingProxyType(dict(counts))


@attrs.frozen(eq=False)
class Selection:
    """What a filter keeps.

    Attributes:
        keep: bool [N], one entry per group or per trajectory.
        dropped: name of the filter -> how many it would drop by itself.

    >>> from rlkit.filters import overlong, unscored
    >>> selection = unscored([1.0, float("nan")]) & overlong([5, 9], max_length=4)
    >>> selection.keep, dict(selection.dropped), selection.kept
    (array([False, False]), {'unscored': 1, 'overlong': 2}, 0)
    """

    keep: np.ndarray
    dropped: Mapping[str, int] = attrs.field(converter=_read_only)

    @property
    def kept(self) -> int:
        """How many are kept."""
        return int(self.keep.sum())

    @property
    def indices(self) -> np.ndarray:
        """Which are kept, int64."""
        return np.flatnonzero(self.keep)

    def refilled(self, count: int | None = None) -> np.ndarray:
        """Indices of what is kept, repeated from the start until there are ``count``; as many as before by default.

        Nothing kept stays nothing: an empty array, which the caller has to skip.

        >>> from rlkit.filters import zero_variance
        >>> zero_variance([[1, 0], [1, 1], [0, 1], [0, 0]]).refilled()
        array([0, 2, 0, 2])
        """
        count = self.keep.size if count is None else _check.integer("count", count, low=0)
        indices = self.indices
        return np.resize(indices, count) if indices.size else indices

    def __and__(self, other: Selection) -> Selection:
        if not isinstance(other, Selection):  # the operator of something else may know
            return NotImplemented
        if other.keep.size != self.keep.size:
            what = f"have {self.keep.size} and {other.keep.size} entries"
            raise DataError(_check.problem("selections", what, "as many", "join groups with groups"))
        dropped = dict(self.dropped)
        for name, number in other.dropped.items():
            dropped[name] = dropped.get(name, 0) + number
        return Selection(self.keep & other.keep, dropped)


def select(name: str, keep: np.ndarray) -> Selection:
    """What the filter ``name`` keeps."""
    return Selection(keep, {name: int((~keep).sum())})
