"""Policy losses with one ratio for the whole sequence.

lp, q, A, w and sg as in ``_policy``; s is the ratio of the sequence.
"""

from __future__ import annotations

import math

from torch import Tensor

from rlkit import _check
from rlkit._rows import check_bounds
from rlkit.losses._policy import surrogate
from rlkit.losses.prepare import Weights, define, mask_weightless, register


@define("gspo")
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

    The mean is over all tokens of the datum, those of weight 0, too. ``luspo`` is the same function: LUSPO weighs each
    sequence by its length, which is ``rlkit.advantages.token_weights`` with "seq-mean-token-sum" instead of
    "seq-mean-token-mean".

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

    Source: arXiv:2507.18071 eq. 5; LUSPO arXiv:2602.05261. The paper divides by n, here ``weights`` does. Peers often
    reuse PPO's 1 +- 0.2.
    """
    check_bounds(clip_low_threshold, clip_high_threshold)
    # Tokens of weight 0 are left out only now, before exp, which may overflow.
    ratio = mask_weightless(weights, (logprobs - sampling_logprobs).mean().expand_as(logprobs)).exp()
    return -(weights * surrogate(ratio, advantages, clip_low_threshold, clip_high_threshold)).sum()


luspo = register("luspo")(gspo)


@define("gspo_token")
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
    check_bounds(clip_low_threshold, clip_high_threshold)
    common = (logprobs - sampling_logprobs).mean().detach().expand_as(logprobs)
    one = (logprobs - logprobs.detach()).exp()  # which has the gradient of lp
    ratio = mask_weightless(weights, common).exp() * one
    return -(weights * surrogate(ratio, advantages, clip_low_threshold, clip_high_threshold)).sum()


@define("gmpo")
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
    The mean is over all tokens of the datum, those of weight 0, too.

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
    check_bounds(clip_low_threshold, clip_high_threshold)
    _check.real("clip_low_threshold", clip_low_threshold, above=0.0, why="its logarithm is taken")
    distance = logprobs - sampling_logprobs
    low, high = math.log(clip_low_threshold), math.log(clip_high_threshold)
    mean = distance.clamp(max=high).where(advantages >= 0, distance.clamp(min=low)).mean().expand_as(logprobs)
    return -(weights * advantages * mask_weightless(weights, mean).exp()).sum()


@define("vespo")
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
