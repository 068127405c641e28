"""Rewards moved in time without changing which policy is best."""

from __future__ import annotations

from rlkit import _check
from rlkit._forms import Arrays, RowsLike, row_wise
from rlkit.advantages._registry import register
from rlkit.advantages._steps import Steps

__all__ = ["potential_shaping"]


@register("potential_shaping")
@row_wise
def potential_shaping(
    rewards: RowsLike, *, potentials: RowsLike, gamma: float = 1.0, mask: RowsLike | None = None
) -> Arrays:
    """Rewards plus the discounted rise of a potential.

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
