"""Losses whose gradient goes through the logprob itself, times a weight that is a constant."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlkit import _check
from rlkit.losses.base import Weights, loss, register

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["opmd", "reinforce", "topr"]


@register("reinforce")
@loss(elementwise=True)
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


@register("opmd")
@loss(elementwise=True)
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


@register("topr")
@loss(elementwise=True)
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
