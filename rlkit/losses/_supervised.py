"""Losses toward given targets: tokens, a teacher's distribution, values.

The top-k losses are divergences from a teacher on K given tokens per position, with exact gradients: the datum's int64
input ``target_tokens`` [n, K] says the tokens, -1 for none; the model gives their logprobs as ``target_logprobs``
[n, K], and ``teacher_logprobs`` [n, K] are the teacher's for the same tokens. Nothing is renormalised and there is no
bucket for the rest: where the K tokens are the whole vocabulary, these are the divergences themselves.
"""

from __future__ import annotations

import math

from torch import Tensor

from rlkit import _check
from rlkit.losses._policy import check_clip, surrogate
from rlkit.losses.prepare import Range, Weights, define, mask_weightless


@define("cross_entropy", elementwise=True)
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


@define("sft_is", elementwise=True)
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


@define("sft_phi", elementwise=True)
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
    return -(weights * _compute_phi(logprobs) * logprobs).sum()


@define("mix", elementwise=True, ranges={"expert": Range(high=1.0, whole=True), "mu": Range(high=1.0)})
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
        sampling_logprobs: [n]; send zeros for the expert's datums, where they are not used.
        advantages: () or [n]; likewise.
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
    check_clip(clip_low_threshold, clip_high_threshold, dual_clip)
    _check.flag("phi", phi)
    learnt = logprobs * _compute_phi(logprobs) if phi else logprobs
    from_expert = expert != 0
    # The expert's tokens have no sampling logprob; with their own in its place the ratio is 1 and nothing overflows.
    distance = logprobs - logprobs.detach().where(from_expert, sampling_logprobs)
    ratio = mask_weightless(1.0 - mu, distance).exp()  # mu may be 1, a weight of 0
    own = surrogate(ratio, advantages, clip_low_threshold, clip_high_threshold, dual_clip)
    return -(weights * (mu * learnt).where(from_expert, (1.0 - mu) * own)).sum()


def _compute_phi(logprobs: Tensor) -> Tensor:
    probability = logprobs.detach().exp()
    return probability * (1.0 - probability)


@define("topk_forward_kl", elementwise=True)
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
    student, teacher = _mask_none(target_logprobs, teacher_logprobs, target_tokens)
    return (weights * (teacher.exp() * (teacher - student)).sum(-1)).sum()


@define("topk_reverse_kl", elementwise=True)
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
    student, teacher = _mask_none(target_logprobs, teacher_logprobs, target_tokens)
    return (weights * (student.exp() * (student - teacher)).sum(-1)).sum()


@define("topk_jsd", elementwise=True)
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
    _check.real("beta", beta, above=0.0, below=1.0, why="for 0 and 1 use topk_forward_kl or topk_reverse_kl")
    student, teacher = _mask_none(target_logprobs, teacher_logprobs, target_tokens)
    mixture = (teacher + math.log(beta)).logaddexp(student + math.log(1.0 - beta))
    by_teacher = teacher.exp() * (teacher - mixture)
    by_student = student.exp() * (student - mixture)
    return (weights * (beta * by_teacher + (1.0 - beta) * by_student).sum(-1)).sum()


def _mask_none(
    target_logprobs: Tensor, teacher_logprobs: Tensor, target_tokens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return both with the entries of -1 equal and constant: their divergence and its gradient are 0."""
    if target_tokens is None:
        return target_logprobs, teacher_logprobs
    none = target_tokens < 0
    return target_logprobs.masked_fill(none, 0.0), teacher_logprobs.masked_fill(none, 0.0)


@define("value_clipped", elementwise=True)
def value_clipped(
    values: Tensor, old_values: Tensor, returns: Tensor, weights: Weights = 1.0, *, clip: float = 0.2
) -> Tensor:
    """Clipped squares, sum w max((V - R)^2, (V_clip - R)^2) / 2, V_clip = V_old + clip(V - V_old, -clip, clip).

    A value that has moved towards its return by more than ``clip`` has no gradient.

    Args:
        values, old_values, returns: [n]; old_values from before the first step on this data.
        weights: () or [n], multiplies each token's term.
        clip: >= 0, in units of the value.

    Raises:
        ConfigError: ``clip`` is negative or not finite.

    >>> import torch
    >>> value_clipped(torch.tensor([1.0, 0.0]), torch.zeros(2), torch.tensor([2.0, 1.0]), clip=0.5)  # (1.5^2 + 1) / 2
    tensor(1.6250)

    Source: the PPO of OpenAI Baselines (arXiv:1707.06347 does not have it). Peers: verl and TRL the same, defaults 0.5
    and 0.2.
    """
    _check.real("clip", clip, low=0.0)
    near = old_values + (values - old_values).clamp(-clip, clip)
    return (weights * 0.5 * (values - returns).square().maximum((near - returns).square())).sum()


@define("value_huber", elementwise=True)
def value_huber(values: Tensor, returns: Tensor, weights: Weights = 1.0, *, delta: float = 10.0) -> Tensor:
    """Squares with a bounded gradient: sum w h(V - R), h(e) = e^2 / 2 where |e| <= delta, else delta (|e| - delta / 2).

    Args:
        values, returns: [n].
        weights: () or [n], multiplies each token's term.
        delta: > 0, the largest gradient of a token.

    Raises:
        ConfigError: ``delta`` is not above 0.

    >>> import torch
    >>> value_huber(torch.tensor([1.0, 4.0]), torch.zeros(2), delta=2.0)  # 1 / 2 + 2 * (4 - 1)
    tensor(6.5000)

    Source: Huber 1964. Peers: AReaL's critic loss, delta 10.
    """
    _check.real("delta", delta, above=0.0)
    error = values - returns
    size = error.abs()
    inside = size.clamp(max=delta)  # both branches of h at once: |e| below delta, delta above
    return (weights * inside * (size - 0.5 * inside)).sum()
