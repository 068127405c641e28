"""Policy losses with another trust region than PPO's clip, per token and over the whole batch.

lp, q, r, A, w and sg as in ``_policy``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlkit import _check
from rlkit._rows import check_bounds
from rlkit.losses._policy import surrogate
from rlkit.losses.prepare import Weights, define, mask_weightless

_TINY = 1e-30  # a probability below all that float32 can tell from 1


@define("sapo", elementwise=True)
def sapo(
    logprobs: Tensor,
    sampling_logprobs: Tensor,
    advantages: Tensor,
    weights: Weights = 1.0,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    detached: bool = False,
) -> Tensor:
    """-sum w (4 / tau) sigmoid(tau (r - 1)) A: a gate that closes smoothly as the ratio leaves 1, on both sides.

    The gradient's weight is 4 p (1 - p) r with p the sigmoid: 1 on-policy. tau = tau_pos where A > 0, else tau_neg.
    ``detached``: -sum w sg[(4 / tau) p] A lp instead, whose gradient's weight is 4 p / tau: 2 / tau on-policy, and
    it grows with the ratio.

    Args:
        logprobs, sampling_logprobs, advantages: [n].
        weights: () or [n], multiplies each token's term.
        tau_pos, tau_neg: > 0; larger closes faster.
        detached: whether the gate is a constant weight.

    Raises:
        ConfigError: a temperature is not above 0, or ``detached`` is not a bool.

    >>> import torch
    >>> sapo(torch.zeros(2), torch.zeros(2), torch.tensor([1.0, 2.0]), tau_neg=9.0)  # 4 * 0.5 * (1 + 2)
    tensor(-6.)

    Source: arXiv:2511.20347. Peers: Trinity-RFT detaches the gate.
    """
    _check.real("tau_pos", tau_pos, above=0.0)
    _check.real("tau_neg", tau_neg, above=0.0)
    _check.flag("detached", detached)
    offset = (logprobs - sampling_logprobs).exp() - 1.0
    positive, negative = ((tau * offset).sigmoid() * (4.0 / tau) for tau in (tau_pos, tau_neg))
    gate = positive.where(advantages > 0, negative)
    if detached:
        return -(weights * gate.detach() * advantages * logprobs).sum()
    return -(weights * gate * advantages).sum()


@define("dppo_tv", elementwise=True)
def dppo_tv(
    logprobs: Tensor,
    sampling_logprobs: Tensor,
    advantages: Tensor,
    weights: Weights = 1.0,
    *,
    divergence_low: float = 0.2,
    divergence_high: float = 0.2,
    ratio_cap: float = 20.0,
    squared_coef: float = 0.0,
) -> Tensor:
    """-sum w sg[min(r, cap)] A lp, without the tokens whose probability has moved too far in A's direction.

    Dropped are A > 0 with p - p_q > divergence_high, and A <= 0 with p_q - p > divergence_low: the total variation
    between the sampled token and all others, where PPO looks at the ratio, which is large for rare tokens. With
    squared_coef, w squared_coef (lp - q)^2 is added for every token, the dropped ones too, and pulls them back.

    Args:
        logprobs, sampling_logprobs, advantages: [n].
        weights: () or [n], multiplies each token's term.
        divergence_low, divergence_high: >= 0, differences of probabilities (not ratios).
        ratio_cap: > 0, bound on the importance weight.
        squared_coef: >= 0, of the squared log-ratio; 0 leaves it out.

    Raises:
        ConfigError: a divergence or ``squared_coef`` is negative, or ``ratio_cap`` is not above 0.

    >>> import torch
    >>> lp, q = torch.tensor([0.5, 0.02]).log(), torch.tensor([0.2, 0.01]).log()  # moved by 0.3 and by 0.01
    >>> dppo_tv(lp, q, torch.ones(2)).item()  # 2 ln 50
    7.8240...
    >>> dppo_tv(lp, q, torch.zeros(2), squared_coef=1.0).item()  # ln(2.5)^2 + ln(2)^2
    1.3200...

    Source: arXiv:2602.04879; the squared log-ratio: Kimi K2.5, arXiv:2602.02276. Peers: prime-rl's default loss is
    both, with squared_coef 1e-3; verl's documented cap of 20 is never reached, its clip_ratio_c of 3 cuts before.
    """
    _check_divergences(divergence_low, divergence_high, ratio_cap)
    _check.real("squared_coef", squared_coef, low=0.0)
    # A constant: what is dropped is decided by where the policy is, and is not itself differentiated.
    moved = logprobs.detach().exp() - sampling_logprobs.exp()
    too_far = ((advantages > 0) & (moved > divergence_high)) | ((advantages <= 0) & (moved < -divergence_low))
    total = _weigh_by_ratio(logprobs, sampling_logprobs, advantages, weights, ratio_cap, too_far)
    if squared_coef:  # or a token that the sampler finds impossible would make 0 times infinity
        total = total + squared_coef * (weights * (logprobs - sampling_logprobs) ** 2).sum()
    return total


@define("dppo_kl", elementwise=True)
def dppo_kl(
    logprobs: Tensor,
    sampling_logprobs: Tensor,
    advantages: Tensor,
    weights: Weights = 1.0,
    *,
    divergence_low: float = 0.05,
    divergence_high: float = 0.05,
    ratio_cap: float = 20.0,
) -> Tensor:
    """-sum w sg[min(r, cap)] A lp, without the tokens beyond a binary KL divergence in A's direction.

    The divergence is that of (p_q, 1 - p_q) from (p, 1 - p). Dropped are A > 0 with p > p_q beyond divergence_high,
    and A <= 0 with p < p_q beyond divergence_low.

    Args:
        logprobs, sampling_logprobs, advantages: [n].
        weights: () or [n], multiplies each token's term.
        divergence_low, divergence_high: >= 0, in nats.
        ratio_cap: > 0, bound on the importance weight.

    Raises:
        ConfigError: a divergence is negative, or ``ratio_cap`` is not above 0.

    >>> import torch
    >>> lp, q = torch.tensor([0.5, 0.02]).log(), torch.tensor([0.2, 0.01]).log()  # KL 0.19 and 0.003
    >>> dppo_kl(lp, q, torch.ones(2)).item()  # 2 ln 50
    7.8240...

    Source: arXiv:2602.04879. Peers: prime-rl takes the gradient through the ratio, which is the same within the cap.
    """
    _check_divergences(divergence_low, divergence_high, ratio_cap)
    new, old = logprobs.detach(), sampling_logprobs
    # 1 - p by expm1, since near p = 1 a subtraction would leave nothing but rounding.
    new_rest, old_rest = (-new.expm1()).clamp(min=_TINY), (-old.expm1()).clamp(min=_TINY)
    divergence = old.exp() * (old - new) + old_rest * (old_rest.log() - new_rest.log())
    too_high = (advantages > 0) & (new > old) & (divergence > divergence_high)
    too_low = (advantages <= 0) & (new < old) & (divergence > divergence_low)
    return _weigh_by_ratio(logprobs, sampling_logprobs, advantages, weights, ratio_cap, too_high | too_low)


def _weigh_by_ratio(lp: Tensor, q: Tensor, advantages: Tensor, weights: Weights, cap: float, dropped: Tensor) -> Tensor:
    ratio = (lp - q).exp().detach().clamp(max=cap).masked_fill(dropped, 0.0)
    return -(weights * ratio * advantages * lp).sum()


def _check_divergences(low: float, high: float, cap: float) -> None:
    _check.real("divergence_low", low, low=0.0, why="a divergence, not a bound on the ratio")
    _check.real("divergence_high", high, low=0.0, why="a divergence, not a bound on the ratio")
    _check.real("ratio_cap", cap, above=0.0)


@define("rec", elementwise=True)
def rec(
    logprobs: Tensor,
    sampling_logprobs: Tensor,
    advantages: Tensor,
    weights: Weights = 1.0,
    *,
    clip_mode: str = "none",
    weight: str = "none",
    clip_low_threshold: float = 0.8,
    clip_high_threshold: float = 1.2,
    ring_low_threshold: float = 0.4,
    ring_high_threshold: float = 3.0,
    temperature: float = 1.0,
    regularizer: str = "none",
    regularizer_coef: float = 0.0,
) -> Tensor:
    """-sum w m v A lp, m dropping tokens by their ratio and v weighting them, both constants, plus a regulariser.

    Args:
        logprobs, sampling_logprobs, advantages: [n].
        weights: () or [n], multiplies both terms of each token.
        clip_mode: which tokens stay. "none": all. "two-side": low <= r <= high. "one-side": A >= 0 and r <= high, or
            A <= 0 and r >= low. "ring": as two-side, and A >= 0 with r <= ring low, or A <= 0 with r >= ring high.
        weight: v = 1 ("none"), r ("importance_sampling"), or exp(A / temperature) ("advantage").
        clip_low_threshold, clip_high_threshold: bounds on r, 0 <= low <= 1 <= high.
        ring_low_threshold, ring_high_threshold: 0 <= ring low <= low, high <= ring high; used by "ring" alone.
        temperature: > 0, used by the weight "advantage" alone.
        regularizer: adds regularizer_coef times "k2": (lp - q)^2, "forward-kl": -lp, for each token, dropped or not.
        regularizer_coef: >= 0.

    Raises:
        ConfigError: an unknown mode, bounds that cross, or a number out of range.

    >>> import torch
    >>> r = torch.tensor([1.0, 1.5, 0.5])
    >>> rec(r.log(), torch.zeros(3), torch.ones(3), clip_mode="one-side").item()  # ln 1 + ln 0.5, times -1
    0.6931...

    Source: arXiv:2509.24203, as in Trinity-RFT's rec, whose bounds are 1 +- epsilon, whose k2 also lacks the half, and
    which has an experimental sequence form besides (that of ``gspo``).
    """
    _check.choice("clip_mode", clip_mode, ("none", "one-side", "two-side", "ring"))
    _check.choice("weight", weight, ("none", "importance_sampling", "advantage"))
    _check.choice("regularizer", regularizer, ("none", "k2", "forward-kl"))
    _check.real("temperature", temperature, above=0.0)
    _check.real("regularizer_coef", regularizer_coef, low=0.0)
    check_bounds(clip_low_threshold, clip_high_threshold)
    ring = clip_mode == "ring"
    _check.real("ring_low_threshold", ring_low_threshold, low=0.0, high=clip_low_threshold if ring else None)
    _check.real("ring_high_threshold", ring_high_threshold, low=clip_high_threshold if ring else 0.0)
    distance = logprobs - sampling_logprobs
    ratio = distance.exp().detach()
    value = advantages
    if weight == "importance_sampling":
        value = value * ratio
    elif weight == "advantage":
        value = value * (advantages / temperature).exp()
    if clip_mode != "none":
        good, bad = advantages >= 0, advantages <= 0
        not_high, not_low = ratio <= clip_high_threshold, ratio >= clip_low_threshold
        inside = (good & not_high) | (bad & not_low) if clip_mode == "one-side" else not_high & not_low
        if ring:
            inside |= (good & (ratio <= ring_low_threshold)) | (bad & (ratio >= ring_high_threshold))
        value = value.masked_fill(~inside, 0.0)
    terms = -value * logprobs
    if regularizer == "k2":
        terms = terms + regularizer_coef * distance * distance
    elif regularizer == "forward-kl":
        terms = terms - regularizer_coef * logprobs
    return (weights * terms).sum()


@define("clip_cov", level="batch")
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
    left out. N, c and the draw count tokens of weight 0, too.

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
    _check.real("cov_low", cov_low, high=_check.real("cov_high", cov_high))
    check_bounds(clip_low_threshold, clip_high_threshold)
    lp, q, a, w = _concatenate(logprobs, sampling_logprobs, advantages, weights)
    far = (lp.detach() - q).exp()  # weights have no say in who is drawn
    inside = far * a <= far.clamp(clip_low_threshold, clip_high_threshold) * a
    covariance = _compute_covariance(lp, a)
    candidates = ((covariance > cov_low) & (covariance < cov_high) & inside).nonzero().flatten()
    drawn = torch.randperm(candidates.numel(), generator=torch.Generator().manual_seed(seed))
    dropped = candidates[drawn[: _count_tokens(fraction, lp)].to(candidates.device)]
    ratio = mask_weightless(w, lp - q).exp()
    bounded = surrogate(ratio, a, clip_low_threshold, clip_high_threshold)
    return -(w * bounded.index_fill(0, dropped, 0.0)).sum()


@define("kl_cov", level="batch")
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
    N with the largest c. N and c count tokens of weight 0, too. It does not clip.

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
    lp, q, a, w = _concatenate(logprobs, sampling_logprobs, advantages, weights)
    distance = mask_weightless(w, lp - q)
    largest = _compute_covariance(lp, a).topk(_count_tokens(fraction, lp)).indices
    pulled = torch.zeros_like(distance).index_fill(0, largest, coef)
    return -(w * (distance.exp() * a - pulled * distance.abs())).sum()


def _concatenate(
    logprobs: Sequence[Tensor], sampling_logprobs: Sequence[Tensor], advantages: Sequence[Tensor], weights: object
) -> tuple[Tensor, Tensor, Tensor, Weights]:
    """Return each argument as one tensor [N]; weights may also be one number."""

    def join(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([part.expand(like.shape) for part, like in zip(parts, logprobs, strict=True)])

    weights = join(weights) if isinstance(weights, (list, tuple)) else weights
    return join(logprobs), join(sampling_logprobs), join(advantages), weights


def _compute_covariance(logprobs: Tensor, advantages: Tensor) -> Tensor:
    return (advantages - advantages.mean()) * (logprobs - logprobs.mean()).detach()


def _count_tokens(fraction: float, tokens: Tensor) -> int:
    return max(1, int(fraction * tokens.numel())) if fraction > 0 else 0
