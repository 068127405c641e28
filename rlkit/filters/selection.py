"""What a filter returns."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import attrs
import numpy as np

from rlkit import _check
from rlkit._calls import answered
from rlkit.errors import DataError

__all__ = ["Selection", "select"]

_MASK = "a 1-D array of True and False"


def _flags(keep: object) -> np.ndarray:
    array = _check.as_array("keep", keep, _MASK)
    array = array.astype(bool) if array.shape == (0,) else array  # an empty list has no dtype of its own
    if array.ndim != 1 or array.dtype.kind != "b":
        raise DataError("keep", f"got {_check.shown(array)}", _MASK, "indices are no mask")
    return _check.frozen(array)


def _counts(dropped: object) -> Mapping[str, int]:
    if not isinstance(dropped, Mapping):
        raise DataError("dropped", f"got {_check.shown(dropped)}", "filter names with counts")
    counts = {}
    for name, number in dropped.items():
        if not isinstance(name, str):
            raise DataError("dropped", f"has the key {_check.shown(name)}", "names of filters")
        counts[name] = _check.integer(f"dropped[{name!r}]", number, low=0, error=DataError)
    return MappingProxyType(counts)


@answered
@attrs.frozen(eq=False)
class Selection:
    """What a filter keeps.

    Attributes:
        keep: bool [N], one entry per group or per trajectory; read-only.
        dropped: name of the filter -> how many it would drop by itself.

    Raises:
        DataError: keep is no 1-D array of booleans, or dropped no mapping of names to counts.

    >>> from rlkit.filters import overlong, unscored
    >>> selection = unscored([1.0, float("nan")]) & overlong([5, 9], max_length=4)
    >>> selection.keep, dict(selection.dropped), selection.kept
    (array([False, False]), {'unscored': 1, 'overlong': 2}, 0)
    """

    keep: np.ndarray = attrs.field(converter=_flags)
    dropped: Mapping[str, int] = attrs.field(converter=_counts)

    @property
    def kept(self) -> int:
        """How many are kept."""
        return int(self.keep.sum())

    @property
    def indices(self) -> np.ndarray:
        """Which are kept, int64."""
        return np.flatnonzero(self.keep)

    def refilled(self, count: int | None = None) -> np.ndarray:
        """Return indices of what is kept, repeated from the start up to ``count``; as many as before by default.

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
            raise DataError("selections", what, "as many", "join groups with groups")
        dropped = dict(self.dropped)
        for name, number in other.dropped.items():
            dropped[name] = dropped.get(name, 0) + number
        return Selection(self.keep & other.keep, dropped)


@answered
def select(name: str, keep: np.ndarray) -> Selection:
    """Return the selection of the filter ``name``."""
    return Selection(keep, {name: int((~keep).sum())})
