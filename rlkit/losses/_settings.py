"""Checks and small steps that several losses share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlkit import _check
from rlkit._ratios import check_bounds

if TYPE_CHECKING:
    from torch import Tensor

    from rlkit.losses.base import Weights

__all__ = ["bounds", "one_weight", "surrogate"]


def bounds(low: float, high: float, *, above_zero: bool = False) -> None:
    """Raise ConfigError unless 0 <= low <= 1 <= high (0 < low with ``above_zero``)."""
    check_bounds(low, high)
    if above_zero:
        _check.real("clip_low_threshold", low, above=0.0, why="its logarithm is taken")


def one_weight(weights: Weights | tuple[Weights, ...] | list[Weights]) -> Weights:
    """Return one weight for a whole sequence or pair: a number, or the mean over tokens; of a pair the chosen's."""
    first = weights[0] if isinstance(weights, (tuple, list)) else weights
    return first if isinstance(first, (int, float)) else first.mean()


def surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float, dual_clip: float | None) -> Tensor:
    """min(r A, clip(r, low, high) A), and with ``dual_clip`` c not below c A where A < 0."""
    clipped = (ratio * advantages).minimum(ratio.clamp(low, high) * advantages)
    if dual_clip is None:
        return clipped
    _check.real("dual_clip", dual_clip, above=1.0, why="a bound on the ratio where the advantage is negative")
    return clipped.maximum(dual_clip * advantages).where(advantages < 0, clipped)
