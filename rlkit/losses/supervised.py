"""Losses that need no advantage."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rlkit.losses.base import loss, register

__all__ = ["cross_entropy"]


@register("cross_entropy")
@loss(elementwise=True)
def cross_entropy(logprobs: Tensor, weights: Any = 1.0) -> Tensor:
    """-sum w lp: supervised fine-tuning; with advantages as ``weights`` it is REINFORCE.

    Args:
        logprobs: [n].
        weights: () or [n], any sign.

    >>> import torch
    >>> cross_entropy(torch.tensor([0.5, 0.25]).log()).item()  # ln 2 + ln 4
    2.0794...
    """
    return -(weights * logprobs).sum()
