"""Group advantages of a selection of the samples."""

from __future__ import annotations

import numpy as np

from rlkit import _check, _groups, _rows
from rlkit._forms import Arrays, RowsLike, row_wise
from rlkit._groups import Groups
from rlkit.advantages._registry import register
from rlkit.errors import ConfigError

__all__ = ["rec"]


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
    """Centred rewards of the samples that are kept, 0 for those dropped (group-relative REINFORCE, REC).

    A_i = R_i - mean of the kept, on demand divided by (their standard deviation + eps)

    Args:
        rewards: as for ``grpo``.
        normalize: whether to divide.
        ddof, eps: of the division; the paper's deviation is the biased one.
        drop: None keeps all; "balance" drops, where more samples lie below the mean than not, as many of those below
            as are in surplus, by chance.
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
    _groups.settings(ddof=ddof, eps=eps, singleton=singleton)
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
    """Which samples stay when the surplus of those below the mean goes [N]."""
    below = groups.scored & (groups.deviations < 0)
    number = groups.rows.sum(below.astype(np.int64))
    surplus = 2 * number - groups.sizes
    row = groups.rows.spread(np.arange(groups.sizes.size))
    order = np.lexsort((rng.random(below.size), ~below, row))  # by group, those below the mean first, then by chance
    rank = np.empty(below.size, np.int64)
    rank[order] = np.arange(below.size) - groups.rows.spread(groups.rows.starts)
    keep: np.ndarray = ~(below & (rank < groups.rows.spread(surplus)))
    return keep
