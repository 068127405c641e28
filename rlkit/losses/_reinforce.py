"""Losses whose gradient goes through the logprob itself: REINFORCE, and REC."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlkit import _check
from rlkit.errors import ConfigError
from rlkit.losses.base import Weights, bounds, builtin

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["opmd", "rec", "reinforce", "topr"]


@builtin("reinforce", elementwise=True)
def reinforce(logprobs: Tensor, advantages: Tensor, weights: Weights = 1.0) -> Tensor:
    """-sum w A lp: the policy gradient for data that the policy has just sampled.

    Args:
        logprobs, advantages: [n].
        weights: () or [n], multiplies each token's term.

    >>> import torch
    >>> reinforce(torch.tensor([-1.0, -2.0]), torch.tensor([0.5, -1.0]))  # 0.5 * 1 - 1 * 2
    tensor(-1.5000)

    Source: Williams 1992. Peers: verl calls it gpg (arXiv:2504.02546), whose own part is an advantage estimator.
    """
    return -(weights * advantages * logprobs).sum()


@builtin("opmd", elementwise=True)
def opmd(logprobs: Tensor, advantages: Tensor, weights: Weights = 1.0, *, tau: float = 1.0) -> Tensor:
    """-sum w A lp / (1 + tau): policy mirror descent, taken as a policy gradient with a smaller step.

    Args:
        logprobs, advantages: [n]; the advantages of ``rlkit.advantages.opmd``.
        weights: () or [n], multiplies each token's term.
        tau: >= 0, the strength of the pull towards the sampling policy.

    Raises:
        ConfigError: ``tau`` < 0 or not finite.

    >>> import torch
    >>> opmd(torch.tensor([-1.0, -2.0]), torch.ones(2), tau=2.0)  # 3 / (1 + 2)
    tensor(1.)

    Source: arXiv:2501.12599, in the simplified form of Trinity-RFT's opmd.
    """
    _check.real("tau", tau, low=0.0)
    return -(weights * advantages * logprobs).sum() / (1.0 + tau)


@builtin("topr", elementwise=True)
def topr(
    logprobs: Tensor, sampling_logprobs: Tensor, advantages: Tensor, weights: Weights = 1.0, *, threshold: float = 0.0
) -> Tensor:
    """-sum w sg[a] A lp with a = 1 where A > threshold, else clip(r, 0, 1): bad samples lose their say as they fade.

    Args:
        logprobs, sampling_logprobs, advantages: [n].
        weights: () or [n], multiplies each token's term.
        threshold: advantages up to it count as bad.

    Raises:
        ConfigError: ``threshold`` is not finite.

    >>> import torch
    >>> lp = torch.tensor([-1.0, -2.0])
    >>> q = torch.tensor([-3.0, -2.0 + 0.6931472])
    >>> topr(lp, q, torch.tensor([1.0, -2.0]))  # 1 * 1 * 1 - 0.5 * 2 * 2
    tensor(-1.)

    Source: arXiv:2503.14286, with ratios per token. Peers: ROLL decides by the sign of the raw reward, Trinity, as
    here, by that of the advantage.
    """
    threshold = _check.real("threshold", threshold)
    ratio = (logprobs - sampling_logprobs).exp().detach().clamp(max=1.0)
    return -(weights * ratio.masked_fill(advantages > threshold, 1.0) * advantages * logprobs).sum()


_CLIP_MODES = ("none", "one-side", "two-side", "ring")
_WEIGHTS = ("none", "importance_sampling", "advantage")
_REGULARIZERS = ("none", "k2", "forward-kl")


@builtin("rec", elementwise=True)
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
    _check.choice("clip_mode", clip_mode, _CLIP_MODES)
    _check.choice("weight", weight, _WEIGHTS)
    _check.choice("regularizer", regularizer, _REGULARIZERS)
    _check.real("temperature", temperature, above=0.0)
    _check.real("regularizer_coef", regularizer_coef, low=0.0)
    bounds(clip_low_threshold, clip_high_threshold)
    _check.real("ring_low_threshold", ring_low_threshold, low=0.0)
    _check.real("ring_high_threshold", ring_high_threshold, low=0.0)
    if clip_mode == "ring" and ring_low_threshold > clip_low_threshold:
        raise ConfigError(f"ring_low_threshold {ring_low_threshold} is above clip_low_threshold {clip_low_threshold}")
    if clip_mode == "ring" and ring_high_threshold < clip_high_threshold:
        raise ConfigError(
            f"ring_high_threshold {ring_high_threshold} is below clip_high_threshold {clip_high_threshold}"
        )
    distance = logprobs - sampling_logprobs
    ratio = distance.exp().detach()
    value = advantages
    if weight == "importance_sampling":
        value = value * ratio
    elif weight == "advantage":
        value = value * (advantages / temperature).exp()
    if clip_mode != "none":
        not_high, not_low = ratio <= clip_high_threshold, ratio >= clip_low_threshold
        if clip_mode == "one-side":
            inside = ((advantages >= 0) & not_high) | ((advantages <= 0) & not_low)
        else:
            inside = not_high & not_low
        if clip_mode == "ring":
            far_low = (advantages >= 0) & (ratio <= ring_low_threshold)
            far_high = (advantages <= 0) & (ratio >= ring_high_threshold)
            inside = inside | far_low | far_high
        value = value.masked_fill(~inside, 0.0)
    terms = -value * logprobs
    if regularizer == "k2":
        terms = terms + regularizer_coef * distance * distance
    elif regularizer == "forward-kl":
        terms = terms - regularizer_coef * logprobs
    return (weights * terms).sum()
