"""Several rewards per sample, each normalised by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlkit import _check, _groups, _rows
from rlkit._calls import estimator
from rlkit._forms import RowsLike
from rlkit._groups import Groups
from rlkit.advantages._registry import register
from rlkit.errors import DataError

__all__ = ["gdpo"]


@register("gdpo")
@estimator
def gdpo(
    rewards: Sequence[RowsLike],
    *,
    weights: Sequence[float] | None = None,
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: str = "zero",
) -> Any:
    """Return the weighted sum of each component's GRPO advantages, normalised over the batch.

    B_i = sum over components c of w_c GRPO(R_c)_i, and A_i = (B_i - mean of the batch) / (its deviation + eps)

    Args:
        rewards: one entry per component, each as for ``grpo`` and all of one shape. A sample that one component
            could not score (NaN) gets nothing from that one; a sample that none could score gets 0.
        weights: one number per component, 1 by default.
        ddof, eps: of both normalisations.
        singleton: as for ``grpo``, within each component.

    Returns:
        float64 in the form of one component; exactly 0 in groups that are constant in every component.

    Raises:
        DataError: as for ``grpo``; shapes differ between components; weights are not as many.
        ConfigError: as for ``grpo``.

    >>> gdpo([[1.0, 0.0], [0.0, 10.0]], weights=[2.0, 1.0], eps=0.0).round(6)  # the second counts half, not 10 times
    array([ 0.707107, -0.707107])

    Source: arXiv:2601.05242. Peers: verl whitens over tokens, TRL and NeMo over sequences as here.
    """
    _groups.settings(ddof=ddof, eps=eps, singleton=singleton)
    components = _components(rewards)
    first = components[0]
    factors = np.ones(len(components)) if weights is None else _weights(weights, len(components))
    total, size = np.zeros(first.rewards.size), 0.0
    for component, factor in zip(components, factors.tolist(), strict=True):
        part = factor * component.apply_singleton(component.whitened(ddof, eps), singleton)
        total, size = total + part, size + np.abs(part).max()
    total[np.abs(total) <= 1e-14 * size] = 0.0  # components that cancel leave rounding errors, not advantages
    scored = np.logical_or.reduce([component.scored for component in components])
    idle = np.logical_and.reduce([component.constant for component in components])
    advantages = np.zeros(total.size)
    advantages[scored] = _groups.whiten(total[scored], ddof, eps)
    return first.rows.restore(np.where(first.rows.spread(idle), 0.0, advantages))


def _components(rewards: Sequence[RowsLike]) -> list[Groups]:
    expected = "a list with the rewards of each component"
    _check.require(not _rows.is_one(rewards) and len(rewards) != 0, "rewards", rewards, expected, error=DataError)
    components = [Groups.parse(component, f"rewards[{c}]") for c, component in enumerate(rewards)]
    first = components[0].rows
    for c, component in enumerate(components):
        if not np.array_equal(component.rows.lengths, first.lengths) or component.rows.form != first.form:
            what = f"has groups of {component.rows.lengths.tolist()[:8]}"
            raise DataError(f"rewards[{c}]", what, f"{first.lengths.tolist()[:8]}", "as in rewards[0]")
    return components


def _weights(weights: Sequence[float] | None, count: int) -> np.ndarray:
    array = _rows.vector("weights", weights, count, why="one per component")
    bad = np.flatnonzero(~(np.abs(array) <= _rows.LARGEST))
    if bad.size:
        raise DataError(f"weights[{bad[0]}]", f"is {array[bad[0]]}", "a finite number")
    return array
