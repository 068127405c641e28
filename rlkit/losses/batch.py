"""Policy losses that look at all tokens of the batch at once: every argument is a list, one tensor per datum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlkit import _check
from rlkit.errors import ConfigError
from rlkit.losses._settings import bounds
from rlkit.losses.base import Weights, loss, register

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from rlkit._lazy import torch

__all__ = ["clip_cov", "kl_cov"]


@register("clip_cov")
@loss(level="batch")
def clip_cov(
    logprobs: Sequence[Tensor],
    sampling_logprobs: Sequence[Tensor],
    advantages: Sequence[Tensor],
    weights: Weights = 1.0,
    *,
    fraction: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    clip_low_threshold: float = 0.8,
    clip_high_threshold: float = 1.2,
    seed: int = 0,
) -> Tensor:
    """-sum w m min(r A, clip(r, low, high) A): PPO without a few of the tokens that make entropy collapse.

    m is 0 for max(1, floor(fraction N)) of the batch's N tokens, drawn at random among those with cov_low < c <
    cov_high that PPO has not clipped; c = (A - mean A) (lp - mean lp), over the batch. Without candidates none is
    left out.

    Args:
        logprobs, sampling_logprobs, advantages: one [n] per datum.
        weights: one () or [n] per datum, multiplies each token's term.
        fraction: in [0, 1]; 0 leaves none out.
        cov_low, cov_high: cov_low <= cov_high.
        clip_low_threshold, clip_high_threshold: bounds on r, 0 <= low <= 1 <= high.
        seed: of the draw; give another at each step. The draw depends on the order of the datums, not on how they
            are split up.

    Raises:
        ConfigError: 1 is not between the bounds, or a number is out of range.

    >>> import torch
    >>> lp, a = [torch.tensor([-2.0, -0.5])], [torch.tensor([-1.0, 3.0])]  # c is 1.5 for both
    >>> clip_cov(lp, lp, a, fraction=0.0), clip_cov(lp, lp, a, fraction=1.0)
    (tensor(-2.), tensor(-0.))

    Source: arXiv:2505.22617. Peers: verl does it within each micro-batch.
    """
    _check.real("fraction", fraction, low=0.0, high=1.0)
    _check.integer("seed", seed, low=0)
    if _check.real("cov_low", cov_low) > _check.real("cov_high", cov_high):
        raise ConfigError(f"cov_low {cov_low} is above cov_high {cov_high}")
    bounds(clip_low_threshold, clip_high_threshold)
    lp, q, a, w = _flat(logprobs, sampling_logprobs, advantages, weights)
    ratio = (lp - q).exp()
    free, clipped = ratio * a, ratio.clamp(clip_low_threshold, clip_high_threshold) * a
    covariance = _covariance(lp, a)
    candidates = ((covariance > cov_low) & (covariance < cov_high) & (free <= clipped)).nonzero().flatten()
    drawn = torch.randperm(candidates.numel(), generator=torch.Generator().manual_seed(seed))
    dropped = candidates[drawn[: _count(fraction, lp)].to(candidates.device)]
    return -(w * free.minimum(clipped).index_fill(0, dropped, 0.0)).sum()


@register("kl_cov")
@loss(level="batch")
def kl_cov(
    logprobs: Sequence[Tensor],
    sampling_logprobs: Sequence[Tensor],
    advantages: Sequence[Tensor],
    weights: Weights = 1.0,
    *,
    fraction: float = 2e-4,
    coef: float = 1.0,
) -> Tensor:
    """-sum w (r A - coef |lp - q| 1[c among the largest]): a pull on the tokens that make entropy collapse.

    c = (A - mean A) (lp - mean lp) over the batch; the pull is on the max(1, floor(fraction N)) tokens of the batch's
    N with the largest c. There is no clip.

    Args:
        logprobs, sampling_logprobs, advantages: one [n] per datum.
        weights: one () or [n] per datum, multiplies both terms of each token.
        fraction: in [0, 1]; 0 is importance sampling.
        coef: >= 0, strength of the pull.

    Raises:
        ConfigError: a setting is out of range.

    >>> import torch
    >>> lp, q = torch.tensor([-2.0, -1.5, -0.5]), torch.tensor([-2.0, -1.5, -0.5 - 0.6931472])  # c is 2, 0, 2.5
    >>> kl_cov([lp], [q], [torch.tensor([-3.0, 0.0, 3.0])], fraction=0.4).item()  # 3 - 2 * 3 + ln 2
    -2.3068...

    Source: arXiv:2505.22617. Peers: verl does it within each micro-batch.
    """
    _check.real("fraction", fraction, low=0.0, high=1.0)
    _check.real("coef", coef, low=0.0)
    lp, q, a, w = _flat(logprobs, sampling_logprobs, advantages, weights)
    distance = lp - q
    largest = _covariance(lp, a).topk(_count(fraction, lp)).indices
    pulled = torch.zeros_like(distance).index_fill(0, largest, coef)
    return -(w * (distance.exp() * a - pulled * distance.abs())).sum()


def _flat(
    logprobs: Sequence[Tensor], sampling_logprobs: Sequence[Tensor], advantages: Sequence[Tensor], weights: object
) -> tuple[Tensor, Tensor, Tensor, Weights]:
    """Each argument as one tensor [N]; weights may also be one number."""

    def joined(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([part.expand(like.shape) for part, like in zip(parts, logprobs, strict=True)])

    flat_weights = joined(weights) if isinstance(weights, (list, tuple)) else weights
    return torch.cat(list(logprobs)), joined(sampling_logprobs), joined(advantages), flat_weights


def _covariance(logprobs: Tensor, advantages: Tensor) -> Tensor:
    fixed = logprobs.detach()
    return (advantages - advantages.mean()) * (fixed - fixed.mean())


def _count(fraction: float, tokens: Tensor) -> int:
    return max(1, int(fraction * tokens.numel())) if fraction > 0 else 0
