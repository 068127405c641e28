"""Divergences from a teacher on K given tokens per position, with exact gradients.

The datum's int64 input ``target_tokens`` [n, K] says which tokens, -1 for none; the model gives their logprobs as
``target_logprobs`` [n, K], and ``teacher_logprobs`` [n, K] are the teacher's for the same tokens. Nothing is
renormalised and there is no bucket for the rest: where the K tokens are the whole vocabulary, these are the
divergences themselves.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rlkit import _check
from rlkit.losses.base import Weights, loss, register

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["topk_forward_kl", "topk_jsd", "topk_reverse_kl"]


@register("topk_forward_kl")
@loss(elementwise=True)
def topk_forward_kl(
    target_logprobs: Tensor, teacher_logprobs: Tensor, weights: Weights = 1.0, target_tokens: Tensor | None = None
) -> Tensor:
    """KL(teacher || model) = sum w sum_k t_k (log t_k - log s_k), t the teacher's probabilities, s the model's.

    Args:
        target_logprobs, teacher_logprobs: [n, K].
        weights: () or [n], multiplies each position's term.
        target_tokens: int [n, K] or None; entries of -1 contribute nothing.

    >>> import torch
    >>> s, t = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    >>> topk_forward_kl(s, t).item()  # ln(1/2) / 4 + 3 ln(3/2) / 4
    0.1308...

    Source: arXiv:1503.02531. Peers: TRL's GKD with beta = 0, over the whole vocabulary.
    """
    student, teacher = _known(target_logprobs, teacher_logprobs, target_tokens)
    return (weights * (teacher.exp() * (teacher - student)).sum(-1)).sum()


@register("topk_reverse_kl")
@loss(elementwise=True)
def topk_reverse_kl(
    target_logprobs: Tensor, teacher_logprobs: Tensor, weights: Weights = 1.0, target_tokens: Tensor | None = None
) -> Tensor:
    """KL(model || teacher) = sum w sum_k s_k (log s_k - log t_k), s the model's probabilities, t the teacher's.

    Args:
        target_logprobs, teacher_logprobs: [n, K].
        weights: () or [n], multiplies each position's term.
        target_tokens: int [n, K] or None; entries of -1 contribute nothing.

    >>> import torch
    >>> s, t = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    >>> topk_reverse_kl(s, t).item()  # ln 2 / 2 + ln(2/3) / 2
    0.1438...

    Source: arXiv:2306.08543. Peers: TRL's GKD with beta = 1, over the whole vocabulary.
    """
    student, teacher = _known(target_logprobs, teacher_logprobs, target_tokens)
    return (weights * (student.exp() * (student - teacher)).sum(-1)).sum()


@register("topk_jsd")
@loss(elementwise=True)
def topk_jsd(
    target_logprobs: Tensor,
    teacher_logprobs: Tensor,
    weights: Weights = 1.0,
    target_tokens: Tensor | None = None,
    *,
    beta: float = 0.5,
) -> Tensor:
    """Jensen-Shannon: sum w (beta KL(t || m) + (1 - beta) KL(s || m)), m = beta t + (1 - beta) s.

    Args:
        target_logprobs, teacher_logprobs: [n, K], the logarithms of s (the model's) and t (the teacher's).
        weights: () or [n], multiplies each position's term.
        target_tokens: int [n, K] or None; entries of -1 contribute nothing.
        beta: in (0, 1), the teacher's share of m.

    Raises:
        ConfigError: ``beta`` is not strictly between 0 and 1.

    >>> import torch
    >>> s, t = torch.tensor([[1.0, 1e-9]]).log(), torch.tensor([[1e-9, 1.0]]).log()
    >>> topk_jsd(s, t).item()  # nothing in common: ln 2
    0.6931...

    Source: arXiv:2306.13649. Peers: TRL's GKD calls the two Kullback-Leibler divergences beta = 0 and 1.
    """
    _check.real("beta", beta, above=0.0, below=1.0, why="for the ends take topk_forward_kl or topk_reverse_kl")
    student, teacher = _known(target_logprobs, teacher_logprobs, target_tokens)
    mixture = (teacher + math.log(beta)).logaddexp(student + math.log(1.0 - beta))
    by_teacher = teacher.exp() * (teacher - mixture)
    by_student = student.exp() * (student - mixture)
    return (weights * (beta * by_teacher + (1.0 - beta) * by_student).sum(-1)).sum()


def _known(target_logprobs: Tensor, teacher_logprobs: Tensor, target_tokens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Both, with entries that stand for no token equal and constant: their divergence and its gradient are 0."""
    if target_tokens is None:
        return target_logprobs, teacher_logprobs
    none = target_tokens < 0
    return target_logprobs.masked_fill(none, 0.0), teacher_logprobs.masked_fill(none, 0.0)
