"""PPO for data that an older policy sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlkit import _check
from rlkit.losses._settings import bounds, surrogate
from rlkit.losses.base import Weights, loss, register

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["decoupled_ppo", "opsm"]


@register("decoupled_ppo")
@loss(elementwise=True)
def decoupled_ppo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    sampling_logprobs: Tensor,
    advantages: Tensor,
    weights: Weights = 1.0,
    *,
    clip_low_threshold: float = 0.8,
    clip_high_threshold: float = 1.2,
    behaviour_cap: float | None = None,
) -> Tensor:
    """-sum w b min(r A, clip(r, low, high) A): r = exp(lp - old) is bounded, b = exp(old - q) corrects the sampling.

    Args:
        logprobs, sampling_logprobs, advantages: [n].
        old_logprobs: [n], of the proximal policy: the trainer's own before the first step on this data.
        weights: () or [n], multiplies each token's term.
        clip_low_threshold, clip_high_threshold: bounds on r, 0 <= low <= 1 <= high.
        behaviour_cap: b is at most this, > 0; None is off.

    Raises:
        ConfigError: 1 is not between the bounds, or ``behaviour_cap`` <= 0.

    >>> import torch
    >>> lp, old, q = torch.tensor([1.5]).log(), torch.zeros(1), torch.tensor([0.5]).log()
    >>> decoupled_ppo(lp, old, q, torch.ones(1))  # 2 * 1.2
    tensor(-2.4000)

    Source: arXiv:2110.00641, arXiv:2505.24298. Peers: AReaL drops the tokens beyond its cap, here b stops there.
    """
    bounds(clip_low_threshold, clip_high_threshold)
    behaviour = (old_logprobs - sampling_logprobs).exp()
    if behaviour_cap is not None:
        behaviour = behaviour.clamp(max=_check.real("behaviour_cap", behaviour_cap, above=0.0))
    ratio = (logprobs - old_logprobs).exp()
    clipped = ratio.clamp(clip_low_threshold, clip_high_threshold)
    return -(weights * behaviour * (ratio * advantages).minimum(clipped * advantages)).sum()


@register("opsm")
@loss()
def opsm(
    logprobs: Tensor,
    sampling_logprobs: Tensor,
    advantages: Tensor,
    weights: Weights = 1.0,
    *,
    delta: float = 0.1,
    clip_low_threshold: float = 0.8,
    clip_high_threshold: float = 1.2,
    dual_clip: float | None = None,
) -> Tensor:
    """-sum w m min(r A, clip(r, low, high) A), m = 1 where A >= 0 or mean(q - lp) <= delta: PPO, less stale failures.

    Args:
        logprobs, sampling_logprobs, advantages: [n].
        weights: () or [n], multiplies each token's term.
        delta: >= 0; how far the sequence may have drifted, in nats per token, before its negative tokens are left out.
        clip_low_threshold, clip_high_threshold: bounds on r, 0 <= low <= 1 <= high.
        dual_clip: as for ``ppo``.

    Raises:
        ConfigError: 1 is not between the bounds, ``dual_clip`` <= 1, or ``delta`` is negative or not finite.

    >>> import torch
    >>> lp, q = torch.tensor([-1.0, -1.5]), torch.tensor([-1.0, -1.0])  # drift 0.25
    >>> opsm(lp, q, torch.tensor([1.0, -1.0]), delta=0.1), opsm(lp, q, torch.tensor([1.0, -1.0]), delta=0.3)
    (tensor(-1.), tensor(-0.2000))

    Source: arXiv:2512.02556 (off-policy sequence masking). Peers: TRL's ``off_policy_mask_threshold``.
    """
    _check.real("delta", delta, low=0.0, why="below 0 it would drop tokens on-policy")
    bounds(clip_low_threshold, clip_high_threshold)
    distance = logprobs - sampling_logprobs
    dropped = (advantages < 0) & (-distance.mean().detach() > delta)
    bounded = surrogate(distance.exp(), advantages, clip_low_threshold, clip_high_threshold, dual_clip)
    return -(weights * bounded.masked_fill(dropped, 0.0)).sum()
