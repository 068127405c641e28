"""REC: group-relative REINFORCE, regularised by dropping tokens, by weighting them, or by a pull."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlkit import _check
from rlkit.errors import ConfigError
from rlkit.losses._settings import bounds
from rlkit.losses.base import Weights, loss, register

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["rec"]

_CLIP_MODES = ("none", "one-side", "two-side", "ring")
_WEIGHTS = ("none", "importance_sampling", "advantage")
_REGULARIZERS = ("none", "k2", "forward-kl")


@register("rec")
@loss(elementwise=True)
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
