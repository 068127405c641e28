"""Losses that learn from given tokens, and the mixture of that with a policy loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlkit import _check
from rlkit.losses._settings import bounds, surrogate
from rlkit.losses.base import Weights, loss, register

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["cross_entropy", "mix", "sft_is", "sft_phi"]


@register("cross_entropy")
@loss(elementwise=True)
def cross_entropy(logprobs: Tensor, weights: Weights = 1.0) -> Tensor:
    """-sum w lp: supervised fine-tuning; with advantages as ``weights`` it is REINFORCE.

    Args:
        logprobs: [n].
        weights: () or [n], any sign.

    >>> import torch
    >>> cross_entropy(torch.tensor([0.5, 0.25]).log()).item()  # ln 2 + ln 4
    2.0794...
    """
    return -(weights * logprobs).sum()


@register("sft_is")
@loss(elementwise=True)
def sft_is(logprobs: Tensor, weights: Weights = 1.0) -> Tensor:
    """-sum w sg[p] lp: supervised fine-tuning that weighs each token by its probability p.

    Its gradient is that of -sum p: tokens that the policy finds impossible are left alone.

    Args:
        logprobs: [n].
        weights: () or [n], multiplies each token's term.

    >>> import torch
    >>> sft_is(torch.tensor([0.5, 0.25]).log()).item()  # ln 2 / 2 + ln 4 / 4
    0.6931...

    Source: arXiv:2508.11408 (CHORD), arXiv:2508.05629 (DFT). Peers: Trinity-RFT's sft_is.
    """
    return -(weights * logprobs.detach().exp() * logprobs).sum()


@register("sft_phi")
@loss(elementwise=True)
def sft_phi(logprobs: Tensor, weights: Weights = 1.0) -> Tensor:
    """-sum w sg[p (1 - p)] lp: supervised fine-tuning on the tokens that the policy is unsure of.

    Args:
        logprobs: [n].
        weights: () or [n], multiplies each token's term.

    >>> import torch
    >>> sft_phi(torch.tensor([0.5, 1.0]).log()).item()  # ln 2 / 4
    0.1732...

    Source: arXiv:2508.11408 (CHORD-phi). Peers: Trinity-RFT's sft_phi, which can also cap the probability.
    """
    return -(weights * _phi(logprobs) * logprobs).sum()


@register("mix")
@loss(elementwise=True)
def mix(
    logprobs: Tensor,
    sampling_logprobs: Tensor,
    advantages: Tensor,
    expert: Tensor,
    weights: Weights = 1.0,
    mu: Weights = 0.1,
    *,
    clip_low_threshold: float = 0.8,
    clip_high_threshold: float = 1.2,
    dual_clip: float | None = None,
    phi: bool = False,
) -> Tensor:
    """(1 - mu) PPO on the policy's own datums, mu times cross entropy on the expert's: learning from both at once.

    -sum w ((1 - mu) (1 - e) min(r A, clip(r, low, high) A) + mu e lp), e = ``expert``; with ``phi`` the last lp is
    weighted by sg[p (1 - p)].

    Args:
        logprobs: [n].
        sampling_logprobs, advantages: () or [n]; send zeros for the expert's datums, where they are not used.
        expert: () or [n], 1 where the tokens are an expert's and 0 where they are the policy's own.
        weights: () or [n], multiplies both terms.
        mu: () in [0, 1]; an input of each datum and not a setting, so that a schedule
            (``rlkit.schedules.chord_schedule``) can change it from step to step.
        clip_low_threshold, clip_high_threshold: bounds on r, 0 <= low <= 1 <= high.
        dual_clip: as for ``ppo``.
        phi: whether to weigh the expert's tokens as ``sft_phi`` does.

    Raises:
        ConfigError: 1 is not between the bounds, ``dual_clip`` <= 1, or ``phi`` is no bool.

    >>> import torch
    >>> lp, zero = torch.tensor([-2.0, -4.0]), torch.zeros(2)
    >>> mix(lp, lp, torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]), mu=0.25)  # -0.75 * 1 + 0.25 * 4
    tensor(0.2500)

    Source: arXiv:2508.11408 (CHORD). Peers: Trinity-RFT's mix (mu 0.1) and mix_chord, whose two terms are means over
    their own datums: here ``weights`` says so.
    """
    bounds(clip_low_threshold, clip_high_threshold)
    _check.flag("phi", phi)
    learnt = logprobs * _phi(logprobs) if phi else logprobs
    from_expert = expert != 0
    ratio = (logprobs - logprobs.detach().where(from_expert, sampling_logprobs)).exp()
    own = surrogate(ratio, advantages, clip_low_threshold, clip_high_threshold, dual_clip)
    return -(weights * (mu * learnt).where(from_expert, (1.0 - mu) * own)).sum()


def _phi(logprobs: Tensor) -> Tensor:
    probability = logprobs.detach().exp()
    return probability * (1.0 - probability)
