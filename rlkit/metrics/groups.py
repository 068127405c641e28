"""What a batch of rewards can teach, and how good the policy is at k tries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np

from rlkit import _check, _rows
from rlkit._calls import answered
from rlkit._forms import ArrayLike, RowsLike
from rlkit._groups import Groups
from rlkit.errors import ConfigError, DataError

__all__ = ["group_informativeness", "pass_at_k"]


@answered
def group_informativeness(rewards: RowsLike, *, low: float = 0.0, high: float = 1.0) -> dict[str, float]:
    """Return the fractions of groups that teach nothing: constant, all right, all wrong.

    Args:
        rewards: one group [G], [B, G] or a list of [G_i]; finite, or NaN for unscored, which do not count; groups
            without a scored reward do not count either.
        low: a reward <= low is wrong.
        high: a reward >= high is right; low < high.

    Returns:
        {"zero": all scored rewards equal, "too_easy": all right, "too_hard": all wrong}.

    Raises:
        DataError: rewards are empty, infinite or no numbers, or none is scored.
        ConfigError: the bounds are out of range or cross.

    >>> group_informativeness([[1, 1, 1], [0, 0, 0], [0, 1, 0], [0, 0, 0]])
    {'zero': 0.75, 'too_easy': 0.25, 'too_hard': 0.5}

    Source: DAPO, arXiv:2503.14476, section 3.2, which groups to leave out. Peers: prime-rl logs solve_none, solve_all.
    """
    low, high = _check.real("low", low), _check.real("high", high)
    if low >= high:
        raise ConfigError("low", f"is {low}", f"less than high={high}")
    groups = Groups.parse(rewards)
    some = groups.sizes > 0
    if not some.any():
        raise DataError("rewards", "has no scored reward", "at least one")
    parts = {"zero": groups.constant, "too_easy": groups.lowest >= high, "too_hard": groups.highest <= low}
    return {name: float(part[some].mean()) for name, part in parts.items()}


@overload
def pass_at_k(n: int, c: int, k: int) -> float: ...


@overload
def pass_at_k(n: Sequence[int] | ArrayLike, c: Sequence[int] | ArrayLike, k: int) -> np.ndarray: ...


@answered
def pass_at_k(n: object, c: object, k: int) -> float | np.ndarray:
    """Return the probability that at least one of k samples is right, estimated from n samples of which c are.

    1 - C(n - c, k) / C(n, k)

    Args:
        n: samples, an integer >= k, or an array of them (one per problem).
        c: how many of them are right, in [0, n]; shaped like n.
        k: >= 1.

    Returns:
        A float, or float64 shaped like n and c. The mean over problems is the benchmark's number.

    Raises:
        DataError: n or c are no integers or out of range.
        ConfigError: k is out of range.

    >>> pass_at_k(4, 1, 2)  # 3 of the 6 pairs hold the right one
    0.5
    >>> pass_at_k([4, 4], [0, 3], 2)
    array([0., 1.])

    Source: Codex, arXiv:2107.03374, equation 1. Peers: 1 - (1 - c / n)^k, seen in places, is biased.
    """
    k = _check.integer("k", k, low=1)
    if _rows.is_one(n) and _rows.is_one(c):
        n = _check.integer("n", n, low=k, why="at least k samples", error=DataError)
        c = _check.integer("c", c, low=0, high=n, error=DataError)
        return 1.0 - float(np.prod([(n - c - i) / (n - i) for i in range(k)])) if n - c >= k else 1.0
    sizes = _rows.vector("n", n)
    right = _rows.vector("c", c, sizes.size, why="shaped like n")
    for name, array, low_bound, high_bound in (("n", sizes, k, np.inf), ("c", right, 0, sizes)):
        bad = np.flatnonzero(~((array >= low_bound) & (array <= high_bound) & (array == np.floor(array))))
        if bad.size:
            raise DataError(f"{name}[{bad[0]}]", f"is {array[bad[0]]}", "integers, 0 <= c <= n, k <= n")
    left = np.maximum(sizes - right, 0.0)
    miss = np.ones(sizes.size)
    for i in range(k):
        miss *= np.maximum(left - i, 0.0) / (sizes - i)
    return np.asarray(1.0 - miss)
