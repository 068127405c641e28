"""Policy losses. lp is the policy's logprob, q the sampler's (``sampling_logprobs``), r = exp(lp - q), A advantages.

Every loss is a sum over the tokens it is given; ``weights`` multiplies each of its terms. Clip settings are bounds
on the ratio itself: a paper's 1 +- 0.2 is ``clip_low_threshold=0.8, clip_high_threshold=1.2``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlkit import _check
from rlkit.losses._settings import bounds, surrogate
from rlkit.losses.base import Weights, loss, register

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["cispo", "dro", "importance_sampling", "ppo"]


@register("importance_sampling")
@loss(elementwise=True)
def importance_sampling(
    logprobs: Tensor, sampling_logprobs: Tensor, advantages: Tensor, weights: Weights = 1.0
) -> Tensor:
    """-sum w r A: the off-policy policy gradient, without a bound on the ratio.

    Args:
        logprobs, sampling_logprobs, advantages: [n].
        weights: () or [n], multiplies each token's term.

    >>> import torch
    >>> importance_sampling(torch.tensor([0.0]).log_softmax(0), torch.tensor([0.0]), torch.tensor([2.0]))
    tensor(-2.)

    Source: Kakade and Langford 2002; Tinker's hosted loss of that name. Peers clamp the log-ratio at +-20; this does
    not.
    """
    ratio = (logprobs - sampling_logprobs).exp()
    return -(weights * ratio * advantages).sum()


@register("ppo")
@loss(elementwise=True)
def ppo(
    logprobs: Tensor,
    sampling_logprobs: Tensor,
    advantages: Tensor,
    weights: Weights = 1.0,
    *,
    clip_low_threshold: float = 0.8,
    clip_high_threshold: float = 1.2,
    dual_clip: float | None = None,
) -> Tensor:
    """-sum w min(r A, clip(r, low, high) A): no gradient where the ratio has moved past its bound the good way.

    Args:
        logprobs, sampling_logprobs, advantages: [n].
        weights: () or [n], multiplies each token's term.
        clip_low_threshold, clip_high_threshold: bounds on r, 0 <= low <= 1 <= high. DAPO's clip-higher is 0.8, 1.28.
        dual_clip: c > 1: where A < 0 a token's loss is at most -c A, and has no gradient beyond; None is off.

    Raises:
        ConfigError: 1 is not between the bounds, or ``dual_clip`` <= 1.

    >>> import torch
    >>> r = torch.tensor([1.0, 1.5, 0.5])
    >>> ppo(r.log(), torch.zeros(3), torch.ones(3))  # 1 + 1.2 + 0.5
    tensor(-2.7000)

    Source: arXiv:1707.06347; clip-higher arXiv:2503.14476; dual clip arXiv:1912.09729. verl has a dual clip of 3
    always on, TRL calls it ``delta``.
    """
    bounds(clip_low_threshold, clip_high_threshold)
    ratio = (logprobs - sampling_logprobs).exp()
    return -(weights * surrogate(ratio, advantages, clip_low_threshold, clip_high_threshold, dual_clip)).sum()


@register("cispo")
@loss(elementwise=True)
def cispo(
    logprobs: Tensor,
    sampling_logprobs: Tensor,
    advantages: Tensor,
    weights: Weights = 1.0,
    *,
    clip_low_threshold: float = 0.0,
    clip_high_threshold: float = 4.0,
    unified_mask: bool = False,
) -> Tensor:
    """-sum w sg[clip(r, low, high)] A lp: every token keeps a gradient, its importance weight is bounded.

    Args:
        logprobs, sampling_logprobs, advantages: [n].
        weights: () or [n], multiplies each token's term.
        clip_low_threshold, clip_high_threshold: bounds on r, 0 <= low <= 1 <= high; absolute, not 1 +- epsilon.
        unified_mask: drop the tokens that PPO would not train (A > 0 and r > high, or A < 0 and r < low).

    Raises:
        ConfigError: 1 is not between the bounds.

    >>> import torch
    >>> lp = torch.tensor([0.5, 0.125]).log()
    >>> cispo(lp, torch.tensor([0.5, 0.25]).log(), torch.ones(2)).item()  # ln 2 + ln(8) / 2
    1.7328...

    Source: arXiv:2506.13585 eq. 4 (mask: eq. 7), arXiv:2510.13786. verl, SkyRL and Trinity give 1 +- epsilon, TRL and
    Tinker absolute bounds.
    """
    bounds(clip_low_threshold, clip_high_threshold)
    _check.flag("unified_mask", unified_mask)
    ratio = (logprobs - sampling_logprobs).exp().detach()
    weight = ratio.clamp(clip_low_threshold, clip_high_threshold)
    if unified_mask:
        too_high = (advantages > 0) & (ratio > clip_high_threshold)
        too_low = (advantages < 0) & (ratio < clip_low_threshold)
        weight = weight.masked_fill(too_high | too_low, 0.0)
    return -(weights * weight * advantages * logprobs).sum()


@register("dro")
@loss(elementwise=True)
def dro(
    logprobs: Tensor, sampling_logprobs: Tensor, advantages: Tensor, weights: Weights = 1.0, *, beta: float = 0.05
) -> Tensor:
    """-sum w (A lp - beta/2 (lp - q)^2): a quadratic pull towards the sampling policy instead of a clip.

    Args:
        logprobs, sampling_logprobs, advantages: [n].
        weights: () or [n], multiplies both terms of each token; the loss is not homogeneous in A.
        beta: >= 0, the strength of the pull.

    >>> import torch
    >>> dro(torch.tensor([-1.0]), torch.tensor([-3.0]), torch.tensor([1.0]), beta=0.5)  # 1 + 0.25 * 2^2
    tensor(2.)

    Source: arXiv:2405.19107 eq. 8 per token, arXiv:2501.12599; Tinker's hosted loss of that name.
    """
    _check.real("beta", beta, low=0.0)
    distance = logprobs - sampling_logprobs
    return -(weights * (advantages * logprobs - beta / 2 * distance * distance)).sum()
