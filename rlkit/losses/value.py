"""Losses of a critic: ``values`` [n] is what it gives for the tokens of the policy, ``returns`` [n] the targets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlkit import _check
from rlkit.losses.base import Weights, loss, register

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["value_clipped", "value_huber"]


@register("value_clipped")
@loss(elementwise=True)
def value_clipped(
    values: Tensor, old_values: Tensor, returns: Tensor, weights: Weights = 1.0, *, clip: float = 0.2
) -> Tensor:
    """Clipped squares, sum w max((V - R)^2, (V_clip - R)^2) / 2, V_clip = V_old + clip(V - V_old, -clip, clip).

    A value that has moved towards its return by more than ``clip`` has no gradient.

    Args:
        values, old_values, returns: [n]; old_values from before the first step on this data.
        weights: () or [n], multiplies each token's term.
        clip: >= 0, in units of the value.

    Raises:
        ConfigError: ``clip`` is negative or not finite.

    >>> import torch
    >>> value_clipped(torch.tensor([1.0, 0.0]), torch.zeros(2), torch.tensor([2.0, 1.0]), clip=0.5)  # (1.5^2 + 1) / 2
    tensor(1.6250)

    Source: the PPO of OpenAI Baselines (arXiv:1707.06347 does not have it). Peers: verl and TRL the same, defaults 0.5
    and 0.2.
    """
    _check.real("clip", clip, low=0.0)
    near = old_values + (values - old_values).clamp(-clip, clip)
    return (weights * 0.5 * (values - returns).square().maximum((near - returns).square())).sum()


@register("value_huber")
@loss(elementwise=True)
def value_huber(values: Tensor, returns: Tensor, weights: Weights = 1.0, *, delta: float = 10.0) -> Tensor:
    """Squares with a bounded gradient: sum w h(V - R), h(e) = e^2 / 2 where |e| <= delta, else delta (|e| - delta / 2).

    Args:
        values, returns: [n].
        weights: () or [n], multiplies each token's term.
        delta: > 0, the largest gradient of a token.

    Raises:
        ConfigError: ``delta`` is not above 0.

    >>> import torch
    >>> value_huber(torch.tensor([1.0, 4.0]), torch.zeros(2), delta=2.0)  # 1 / 2 + 2 * (4 - 1)
    tensor(6.5000)

    Source: Huber 1964. Peers: AReaL's critic loss, delta 10.
    """
    _check.real("delta", delta, above=0.0)
    error = values - returns
    size = error.abs()
    inside = size.clamp(max=delta)
    return (weights * inside * (size - 0.5 * inside)).sum()
