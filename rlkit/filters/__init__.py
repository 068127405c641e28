"""Filters: which groups and which samples train, as masks with counts.

A filter looks at one thing and returns a ``Selection``; selections are joined by ``&``. Nothing is removed here: the
caller uses ``selection.keep``, ``selection.indices`` or ``selection.refilled()``, and logs ``selection.dropped``.
"""

from __future__ import annotations

from rlkit.filters.groups import difficulty_band, dynamic_sampling, zero_variance
from rlkit.filters.samples import duplicates, failed, overlong, stale, truncated, unscored
from rlkit.filters.selection import Selection

__all__ = [
    "Selection",
    "difficulty_band",
    "duplicates",
    "dynamic_sampling",
    "failed",
    "overlong",
    "stale",
    "truncated",
    "unscored",
    "zero_variance",
]

for _name in __all__:
    globals()[_name].__module__ = __name__  # where users import it from
Selection.refilled.__module__ = __name__  # doctest looks for a class and its methods in one module
