"""Per-token policy losses that keep to a trust region by other means than PPO's clip."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlkit import _check
from rlkit.losses._settings import bounds
from rlkit.losses.base import Weights, loss, register

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["dppo_kl", "dppo_tv", "sapo", "sppo"]

_TINY = 1e-30  # a probability below all that float32 can tell from 1


@register("sapo")
@loss(elementwise=True)
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
        ConfigError: a temperature is not above 0, or ``detached`` is no bool.

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


@register("sppo")
@loss(elementwise=True)
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


@register("dppo_tv")
@loss(elementwise=True)
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
    moved = logprobs.detach().exp() - sampling_logprobs.exp()
    too_far = ((advantages > 0) & (moved > divergence_high)) | ((advantages <= 0) & (moved < -divergence_low))
    total = _gated(logprobs, sampling_logprobs, advantages, weights, ratio_cap, too_far)
    if squared_coef:  # or a token that the sampler finds impossible would make 0 times infinity
        total = total + squared_coef * (weights * (logprobs - sampling_logprobs) ** 2).sum()
    return total


@register("dppo_kl")
@loss(elementwise=True)
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
