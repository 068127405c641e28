"""Policy losses with one ratio for the whole sequence, and those over the whole batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlkit import _check
from rlkit.errors import ConfigError
from rlkit.losses.base import Weights, bounds, builtin, counted, surrogate

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from rlkit._packages import torch

__all__ = ["clip_cov", "gmpo", "gspo", "gspo_token", "kl_cov", "luspo", "vespo"]


@builtin("gspo")
def gspo(
    logprobs: Tensor,
    sampling_logprobs: Tensor,
    advantages: Tensor,
    weights: Weights = 1.0,
    *,
    clip_low_threshold: float = 0.9997,
    clip_high_threshold: float = 1.0004,
) -> Tensor:
    """-sum w min(s A, clip(s, low, high) A), s = exp(mean(lp - q)): PPO with the geometric mean of the ratios.

    Args:
        logprobs, sampling_logprobs, advantages: [n].
        weights: () or [n], multiplies each token's term.
        clip_low_threshold, clip_high_threshold: bounds on s, 0 <= low <= 1 <= high; s strays less than a token's ratio.

    Raises:
        ConfigError: 1 is not between the bounds.

    >>> import torch
    >>> lp = torch.tensor([2.0, 0.5]).log()  # the ratios 2 and 1/2 make s = 1
    >>> gspo(lp, torch.zeros(2), torch.ones(2))
    tensor(-2.)

    Source: arXiv:2507.18071 eq. 5. The paper divides by n, here ``weights`` does. Peers often reuse PPO's 1 +- 0.2.
    """
    bounds(clip_low_threshold, clip_high_threshold)
    # The mean is over all tokens, those of weight 0 too; these are left out before exp, which may overflow.
    ratio = counted(weights, (logprobs - sampling_logprobs).mean().expand_as(logprobs)).exp()
    return _clipped(ratio, advantages, weights, clip_low_threshold, clip_high_threshold)


@builtin("luspo")
def luspo(
    logprobs: Tensor,
    sampling_logprobs: Tensor,
    advantages: Tensor,
    weights: Weights = 1.0,
    *,
    clip_low_threshold: float = 0.9997,
    clip_high_threshold: float = 1.0004,
) -> Tensor:
    """Return the same sum as ``gspo``: LUSPO is GSPO with each sequence weighted by its length.

    -sum w min(s A, clip(s, low, high) A), s = exp(mean(lp - q)). The difference between the two is
    ``rlkit.advantages.token_weights``: "seq-mean-token-sum" for LUSPO, "seq-mean-token-mean" for GSPO.

    Args:
        logprobs, sampling_logprobs, advantages: [n].
        weights: () or [n], multiplies each token's term.
        clip_low_threshold, clip_high_threshold: bounds on s, 0 <= low <= 1 <= high.

    Raises:
        ConfigError: 1 is not between the bounds.

    >>> import torch
    >>> luspo(torch.tensor([2.0, 0.5]).log(), torch.zeros(2), torch.ones(2))
    tensor(-2.)

    Source: arXiv:2602.05261. Peers: TRL's loss type luspo.
    """
    return gspo(
        logprobs,
        sampling_logprobs,
        advantages,
        weights,
        clip_low_threshold=clip_low_threshold,
        clip_high_threshold=clip_high_threshold,
    )


@builtin("gspo_token")
def gspo_token(
    logprobs: Tensor,
    sampling_logprobs: Tensor,
    advantages: Tensor,
    weights: Weights = 1.0,
    *,
    clip_low_threshold: float = 0.9997,
    clip_high_threshold: float = 1.0004,
) -> Tensor:
    """-sum w min(s_t A, clip(s_t, low, high) A), s_t = sg[s] exp(lp - sg[lp]): ``gspo`` for advantages per token.

    Its value is that of ``gspo``, and so is its gradient where the advantages of a datum are one number; else each
    token's advantage moves that token alone.

    Args:
        logprobs, sampling_logprobs, advantages: [n].
        weights: () or [n], multiplies each token's term.
        clip_low_threshold, clip_high_threshold: bounds on s, 0 <= low <= 1 <= high.

    Raises:
        ConfigError: 1 is not between the bounds.

    >>> import torch
    >>> gspo_token(torch.tensor([2.0, 0.5]).log(), torch.zeros(2), torch.tensor([1.0, 3.0]))
    tensor(-4.)

    Source: arXiv:2507.18071 eq. 13-14. verl's and Tinker's gspo are this form; verl clamps log s_t at 10.
    """
    bounds(clip_low_threshold, clip_high_threshold)
    common = (logprobs - sampling_logprobs).mean().detach().expand_as(logprobs)
    ratio = counted(weights, common).exp() * (logprobs - logprobs.detach()).exp()  # times 1, which has lp's gradient
    return _clipped(ratio, advantages, weights, clip_low_threshold, clip_high_threshold)


@builtin("gmpo")
def gmpo(
    logprobs: Tensor,
    sampling_logprobs: Tensor,
    advantages: Tensor,
    weights: Weights = 1.0,
    *,
    clip_low_threshold: float = 0.6703200460356393,
    clip_high_threshold: float = 1.4918246976412703,
) -> Tensor:
    """-(sum w A) exp(mean c): the geometric mean of the ratios, each clipped in log space on the side that A names.

    c = min(lp - q, log high) where A >= 0, max(lp - q, log low) where A < 0; a clipped token has no gradient.

    Args:
        logprobs, sampling_logprobs, advantages: [n].
        weights: () or [n], multiplies each token's advantage.
        clip_low_threshold, clip_high_threshold: bounds on the ratio itself, 0 < low <= 1 <= high; the defaults are
            exp(-0.4) and exp(0.4).

    Raises:
        ConfigError: 1 is not between the bounds, or the lower one is 0.

    >>> import torch
    >>> lp = torch.tensor([4.0, 1.0]).log()
    >>> gmpo(lp, torch.zeros(2), torch.ones(2), clip_high_threshold=9.0)  # 2 * sqrt(4 * 1)
    tensor(-4.)

    Source: arXiv:2507.20673. Peers: verl's geo_mean counts a token with A = 0 as having ratio 1.
    """
    bounds(clip_low_threshold, clip_high_threshold, above_zero=True)
    distance = logprobs - sampling_logprobs
    above = distance.clamp(max=math.log(clip_high_threshold))
    below = distance.clamp(min=math.log(clip_low_threshold))
    mean = above.where(advantages >= 0, below).mean().expand_as(logprobs)
    return -(weights * advantages * counted(weights, mean).exp()).sum()


@builtin("vespo")
def vespo(
    logprobs: Tensor,
    sampling_logprobs: Tensor,
    advantages: Tensor,
    weights: Weights = 1.0,
    *,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
) -> Tensor:
    """-sum w sg[phi] A lp, phi = exp(lambda + k log W - lambda W), W the product of the datum's ratios.

    phi is 1 on-policy and falls to 0 on both sides, so that a stale sequence loses its say smoothly. k and lambda are
    the _pos ones where A >= 0, the _neg ones elsewhere.

    Args:
        logprobs, sampling_logprobs, advantages: [n].
        weights: () or [n], multiplies each token's term.
        k_pos, k_neg: >= 0.
        lambda_pos, lambda_neg: > 0; phi peaks at W = k / lambda.

    Raises:
        ConfigError: a setting is out of range.

    >>> import torch
    >>> lp, q = torch.tensor([-1.0]), torch.tensor([-1.0 + 0.6931472])  # W = 1/2
    >>> vespo(lp, q, torch.ones(1)).item()  # exp(3 - 2 ln 2 - 1.5) = e^1.5 / 4
    1.1204...

    Source: arXiv:2602.10693. Peers: TRL's loss type vespo, which clamps log W to
    [-18.4, 20] and each of its terms to +-20.
    """
    _check.real("k_pos", k_pos, low=0.0)
    _check.real("k_neg", k_neg, low=0.0)
    _check.real("lambda_pos", lambda_pos, above=0.0)
    _check.real("lambda_neg", lambda_neg, above=0.0)
    log_ratio = (logprobs - sampling_logprobs).sum().detach()
    ratio = log_ratio.exp()  # it may be infinite: then phi is exp(-infinity), 0 as in the limit
    positive = (lambda_pos + k_pos * log_ratio - lambda_pos * ratio).exp()
    negative = (lambda_neg + k_neg * log_ratio - lambda_neg * ratio).exp()
    return -(weights * positive.where(advantages >= 0, negative) * advantages * logprobs).sum()


def _clipped(ratio: Tensor, advantages: Tensor, weights: Weights, low: float, high: float) -> Tensor:
    return -(weights * surrogate(ratio, advantages, low, high)).sum()


@builtin("clip_cov", level="batch")
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
    far = (lp.detach() - q).exp()  # weights have no say in who is drawn
    inside = far * a <= far.clamp(clip_low_threshold, clip_high_threshold) * a
    covariance = _covariance(lp, a)
    candidates = ((covariance > cov_low) & (covariance < cov_high) & inside).nonzero().flatten()
    drawn = torch.randperm(candidates.numel(), generator=torch.Generator().manual_seed(seed))
    dropped = candidates[drawn[: _count(fraction, lp)].to(candidates.device)]
    ratio = counted(w, lp - q).exp()
    bounded = surrogate(ratio, a, clip_low_threshold, clip_high_threshold)
    return -(w * bounded.index_fill(0, dropped, 0.0)).sum()


@builtin("kl_cov", level="batch")
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
    N with the largest c. It does not clip.

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
    distance = counted(w, lp - q)
    largest = _covariance(lp, a).topk(_count(fraction, lp)).indices
    pulled = torch.zeros_like(distance).index_fill(0, largest, coef)
    return -(w * (distance.exp() * a - pulled * distance.abs())).sum()


def _flat(
    logprobs: Sequence[Tensor], sampling_logprobs: Sequence[Tensor], advantages: Sequence[Tensor], weights: object
) -> tuple[Tensor, Tensor, Tensor, Weights]:
    """Return each argument as one tensor [N]; weights may also be one number."""

    def joined(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([part.expand(like.shape) for part, like in zip(parts, logprobs, strict=True)])

    flat_weights = joined(weights) if isinstance(weights, (list, tuple)) else weights
    return torch.cat(list(logprobs)), joined(sampling_logprobs), joined(advantages), flat_weights


def _covariance(logprobs: Tensor, advantages: Tensor) -> Tensor:
    fixed = logprobs.detach()
    return (advantages - advantages.mean()) * (fixed - fixed.mean())


def _count(fraction: float, tokens: Tensor) -> int:
    return max(1, int(fraction * tokens.numel())) if fraction > 0 else 0
