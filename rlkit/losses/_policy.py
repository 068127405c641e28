"""Policy losses. lp is the policy's logprob, q the sampler's (``sampling_logprobs``), r = exp(lp - q), A advantages.

Every loss is a sum over the tokens it is given; ``weights`` multiplies each of its terms. Clip settings are bounds
on the ratio itself: a paper's 1 +- 0.2 is ``clip_low_threshold=0.8, clip_high_threshold=1.2``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlkit import _check
from rlkit.losses.base import Weights, bounds, builtin, counted, surrogate

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["cispo", "decoupled_ppo", "dppo_kl", "dppo_tv", "dro", "importance_sampling", "opsm", "ppo", "sapo", "sppo"]


@builtin("importance_sampling", elementwise=True)
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


@builtin("ppo", elementwise=True)
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


@builtin("cispo", elementwise=True)
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


@builtin("dro", elementwise=True)
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


@builtin("decoupled_ppo", elementwise=True)
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
    return -(weights * behaviour * surrogate(ratio, advantages, clip_low_threshold, clip_high_threshold)).sum()


@builtin("opsm")
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
    _check.real("delta", delta, low=0.0, why="below 0 it would drop on-policy tokens")
    bounds(clip_low_threshold, clip_high_threshold)
    distance = logprobs - sampling_logprobs
    dropped = (advantages < 0) & (-distance.mean().detach() > delta)
    bounded = surrogate(
        counted(weights, distance).exp(), advantages, clip_low_threshold, clip_high_threshold, dual_clip
    )
    return -(weights * bounded.masked_fill(dropped, 0.0)).sum()


_TINY = 1e-30  # a probability below all that float32 can tell from 1


@builtin("sapo", elementwise=True)
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
    positive = (tau_pos * offset).sigmoid() * (4.0 / tau_pos)
    negative = (tau_neg * offset).sigmoid() * (4.0 / tau_neg)
    gate = positive.where(advantages > 0, negative)
    if detached:
        return -(weights * gate.detach() * advantages * logprobs).sum()
    return -(weights * gate * advantages).sum()


@builtin("sppo", elementwise=True)
def sppo(
    logprobs: Tensor,
    sampling_logprobs: Tensor,
    advantages: Tensor,
    weights: Weights = 1.0,
    *,
    clip_low_threshold: float = 1 / 1.3,
    clip_high_threshold: float = 1.3,
) -> Tensor:
    """-sum w A (lp - q) where low <= r <= high, 0 elsewhere: REINFORCE on the tokens that have moved little.

    Args:
        logprobs, sampling_logprobs, advantages: [n].
        weights: () or [n], multiplies each token's term.
        clip_low_threshold, clip_high_threshold: bounds on r, 0 <= low <= 1 <= high; a paper's epsilon is
            1 / (1 + epsilon) and 1 + epsilon.

    Raises:
        ConfigError: 1 is not between the bounds.

    >>> import torch
    >>> sppo(torch.tensor([1.25, 2.0]).log(), torch.zeros(2), torch.ones(2)).item()  # -ln 1.25
    -0.2231...

    Source: arXiv:2108.05828, as in Trinity-RFT's sppo; a leaner PPO, not self-play (arXiv:2405.00675).
    """
    bounds(clip_low_threshold, clip_high_threshold)
    distance = logprobs - sampling_logprobs
    ratio = distance.exp().detach()
    outside = (ratio < clip_low_threshold) | (ratio > clip_high_threshold)
    return -(weights * (advantages * distance).masked_fill(outside, 0.0)).sum()


@builtin("dppo_tv", elementwise=True)
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
    _divergences(divergence_low, divergence_high, ratio_cap)
    _check.real("squared_coef", squared_coef, low=0.0)
    # A constant: what is dropped is decided by where the policy is, and is not itself differentiated.
    moved = logprobs.detach().exp() - sampling_logprobs.exp()
    too_far = ((advantages > 0) & (moved > divergence_high)) | ((advantages <= 0) & (moved < -divergence_low))
    total = _gated(logprobs, sampling_logprobs, advantages, weights, ratio_cap, too_far)
    if squared_coef:  # or a token that the sampler finds impossible would make 0 times infinity
        total = total + squared_coef * (weights * (logprobs - sampling_logprobs) ** 2).sum()
    return total


@builtin("dppo_kl", elementwise=True)
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
    _divergences(divergence_low, divergence_high, ratio_cap)
    new, old = logprobs.detach(), sampling_logprobs
    # 1 - p by expm1, since near p = 1 a subtraction would leave nothing but rounding.
    new_rest, old_rest = (-new.expm1()).clamp(min=_TINY), (-old.expm1()).clamp(min=_TINY)
    divergence = old.exp() * (old - new) + old_rest * (old_rest.log() - new_rest.log())
    too_high = (advantages > 0) & (new > old) & (divergence > divergence_high)
    too_low = (advantages <= 0) & (new < old) & (divergence > divergence_low)
    return _gated(logprobs, sampling_logprobs, advantages, weights, ratio_cap, too_high | too_low)


def _gated(lp: Tensor, q: Tensor, advantages: Tensor, weights: Weights, cap: float, dropped: Tensor) -> Tensor:
    ratio = (lp - q).exp().detach().clamp(max=cap).masked_fill(dropped, 0.0)
    return -(weights * ratio * advantages * lp).sum()


def _divergences(low: float, high: float, cap: float) -> None:
    _check.real("divergence_low", low, low=0.0, why="a divergence, not a bound on the ratio")
    _check.real("divergence_high", high, low=0.0, why="a divergence, not a bound on the ratio")
    _check.real("ratio_cap", cap, above=0.0)
