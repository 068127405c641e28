"""Advantages per token from logprobs: distillation, and what is added to rewards for KL and entropy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rlkit import _check, _ratios, _rows
from rlkit._calls import estimator
from rlkit._forms import RowsLike
from rlkit.advantages import _scan
from rlkit.advantages._registry import register
from rlkit.advantages._steps import Steps

__all__ = ["entropy_bonus", "jsd", "jsd_gradient", "kl_penalty", "on_policy_distillation"]

_LARGEST_LOG_RATIO = 300.0  # beyond it exp() leaves what can be added up; such a token is broken anyway
_LARGEST_DISTANCE = 1e75  # beyond it coef d^2 could overflow


@register("on_policy_distillation")
@estimator
def on_policy_distillation(
    *,
    teacher_logprobs: RowsLike,
    sampling_logprobs: RowsLike,
    coef: float = 1.0,
    clip: float | None = None,
    gamma: float = 0.0,
    mask: RowsLike | None = None,
) -> Any:
    """How much likelier the teacher finds each sampled token: the sampled reverse KL as an advantage.

    a_t = clip(coef (teacher - sampling), -clip, clip), and A_t = a_t + gamma A_{t+1}

    Args:
        teacher_logprobs, sampling_logprobs: of the sampled tokens: [n], [B, n] or a list of [n_i]; finite and at
            most 0, but for rounding up to 0.1.
        coef: in [0, 1e150].
        clip: > 0, or None for no clipping.
        gamma: in [0, 1]; 0 looks at each token alone.
        mask: shaped alike; masked tokens get 0 and are passed over.

    Returns:
        float64 in the form of the logprobs.

    Raises:
        DataError: shapes differ, or an entry that counts is no logprob.
        ConfigError: a setting is out of range.

    >>> on_policy_distillation(teacher_logprobs=[-1.0, -4.0], sampling_logprobs=[-2.0, -1.0], clip=2.0, gamma=0.5)
    array([ 0., -2.])

    Source: Thinking Machines Lab, "On-policy distillation" (2025); arXiv:2306.13649. Peers: tinker-cookbook the same;
    Trinity clips to [-5, 5]; slime subtracts it from another advantage.
    """
    coef = _check.real("coef", coef, low=0.0, high=_rows.LARGEST)
    gamma = _check.real("gamma", gamma, low=0.0, high=1.0)
    steps, teacher, sampling = _pair("teacher_logprobs", teacher_logprobs, sampling_logprobs, mask)
    a = coef * (teacher - sampling)
    if clip is not None:
        clip = _check.real("clip", clip, above=0.0)
        a = np.clip(a, -clip, clip)
    return steps.restore(_scan.reverse_scan(a, steps.factors(gamma), steps.starts))


@register("jsd")
@estimator
def jsd(
    *,
    teacher_logprobs: RowsLike,
    sampling_logprobs: RowsLike,
    beta: float = 0.5,
    coef: float = 1.0,
    mask: RowsLike | None = None,
) -> Any:
    """Return the sampled Jensen-Shannon term of each token, negated.

    A_t = -coef (beta (teacher - M) + (1 - beta) (sampling - M)), M = log(beta e^teacher + (1 - beta) e^sampling)

    Args:
        teacher_logprobs, sampling_logprobs: as for ``on_policy_distillation``.
        beta: in [0, 1], the teacher's share.
        coef: in [0, 1e150].
        mask: as for ``on_policy_distillation``.

    Raises:
        DataError, ConfigError: as for ``on_policy_distillation``.

    >>> import math
    >>> a = jsd(teacher_logprobs=[math.log(0.5)], sampling_logprobs=[math.log(0.125)])
    >>> a.round(6)  # M = log 0.3125; the mean of log 1.6 and log 0.4, negated
    array([0.223144])

    Source: generalised JSD, arXiv:2306.13649, equation 3. Peers: Trinity's JSD advantage. It is the value of the
    divergence's terms, the same for a token that the teacher finds likelier and for one that it finds as much less
    likely: its policy gradient is not that of the divergence, which ``jsd_gradient`` has.
    """
    beta = _check.real("beta", beta, low=0.0, high=1.0)
    coef = _check.real("coef", coef, low=0.0, high=_rows.LARGEST)
    steps, teacher, sampling = _pair("teacher_logprobs", teacher_logprobs, sampling_logprobs, mask)
    if beta in {0.0, 1.0}:
        return steps.restore(np.zeros(teacher.size))
    mixture = np.logaddexp(math.log(beta) + teacher, math.log1p(-beta) + sampling)
    return steps.restore(-coef * (beta * (teacher - mixture) + (1.0 - beta) * (sampling - mixture)))


@register("jsd_gradient")
@estimator
def jsd_gradient(
    *,
    teacher_logprobs: RowsLike,
    sampling_logprobs: RowsLike,
    beta: float = 0.5,
    coef: float = 1.0,
    mask: RowsLike | None = None,
) -> Any:
    """Advantages whose policy gradient is that of the Jensen-Shannon divergence from a teacher, token by token.

    A_t = -coef (1 - beta) (sampling - M), M = log(beta e^teacher + (1 - beta) e^sampling)

    D = beta KL(t || m) + (1 - beta) KL(s || m) with m = beta t + (1 - beta) s has the derivative
    (1 - beta) log(s / m) with respect to s, since what m contributes cancels.

    Args:
        teacher_logprobs, sampling_logprobs: as for ``on_policy_distillation``.
        beta: in (0, 1), the teacher's share; towards 0 the gradient becomes beta times that of KL(s || t).
        coef: in [0, 1e150].
        mask: as for ``on_policy_distillation``.

    Raises:
        DataError, ConfigError: as for ``on_policy_distillation``.

    >>> import numpy as np
    >>> a = jsd_gradient(teacher_logprobs=np.log([0.5, 0.125]), sampling_logprobs=np.log([0.125, 0.5]))
    >>> a.round(3)  # half of log 2.5, half of log 0.625
    array([ 0.458, -0.235])

    Source: generalised JSD, arXiv:2306.13649, equation 3, differentiated. Peers: Trinity's is ``jsd``. Over the whole
    distribution rather than the sampled token the loss topk_jsd has it.
    """
    beta = _check.real("beta", beta, above=0.0, below=1.0)
    coef = _check.real("coef", coef, low=0.0, high=_rows.LARGEST)
    steps, teacher, sampling = _pair("teacher_logprobs", teacher_logprobs, sampling_logprobs, mask)
    mixture = np.logaddexp(math.log(beta) + teacher, math.log1p(-beta) + sampling)
    return steps.restore(-coef * (1.0 - beta) * (sampling - mixture))


@register("kl_penalty")
@estimator
def kl_penalty(
    *,
    sampling_logprobs: RowsLike,
    reference_logprobs: RowsLike,
    coef: float = 0.01,
    estimator: str = "k1",
    center: bool = False,
    mask: RowsLike | None = None,
) -> Any:
    """Return a penalty for leaving a reference policy, to be added to per-token rewards or advantages.

    -coef kl_t with d = sampling - reference and kl = d ("k1"), d^2 / 2 ("k2"), e^-d - 1 + d ("k3"), |d| ("abs"), or k3
    of d clipped to +-20, at most 10 ("clamped")

    Args:
        sampling_logprobs, reference_logprobs: of the sampled tokens: [n], [B, n] or a list of [n_i]; finite and at
            most 0, but for rounding up to 0.1.
        coef: in [0, 1e150].
        estimator: as above.
        center: whether to subtract the mean over the batch's tokens, so that the penalty moves no sum.
        mask: shaped alike; masked tokens get 0 and count nowhere.

    Raises:
        DataError, ConfigError: as for ``on_policy_distillation``.

    >>> kl_penalty(sampling_logprobs=[-1.0, -2.0], reference_logprobs=[-2.0, -2.0], coef=0.5)
    array([-0.5, -0. ])
    >>> kl_penalty(sampling_logprobs=[-1.0, -2.0], reference_logprobs=[-2.0, -2.0], coef=0.5, center=True)
    array([-0.25,  0.25])

    Source: arXiv:1909.08593 (KL in the reward); Schulman, "Approximating KL divergence" (2020). Peers:
    tinker-cookbook centres over the batch; "clamped" is low_var_kl in verl and Trinity.
    """
    coef = _check.real("coef", coef, low=0.0, high=_rows.LARGEST)
    _check.choice("estimator", estimator, ("k1", "k2", "k3", "abs", "clamped"))
    center = _check.flag("center", center)
    steps, reference, sampling = _pair("reference_logprobs", reference_logprobs, sampling_logprobs, mask)
    d = sampling - reference
    if estimator == "k1":
        kl = d
    elif estimator == "k2":
        kl = 0.5 * np.square(np.clip(d, -_LARGEST_DISTANCE, _LARGEST_DISTANCE))
    elif estimator == "k3":
        kl = np.expm1(np.minimum(-d, _LARGEST_LOG_RATIO)) + d
    elif estimator == "clamped":
        near = np.clip(d, -20.0, 20.0)
        kl = np.minimum(np.expm1(-near) + near, 10.0)
    else:
        kl = np.abs(d)
    penalty = -coef * kl
    if center and penalty.size:
        penalty = penalty - penalty.mean()
    return steps.restore(penalty)


@register("entropy_bonus")
@estimator
def entropy_bonus(*, sampling_logprobs: RowsLike, coef: float = 0.01, mask: RowsLike | None = None) -> Any:
    """Return a bonus that keeps the policy's entropy up, to be added to per-token advantages.

    -coef log q: on-policy, its policy gradient is coef times the gradient of the entropy of each token

    Args:
        sampling_logprobs: of the sampled tokens: [n], [B, n] or a list of [n_i]; finite and at
            most 0, but for rounding up to 0.1.
        coef: in [0, 1e150].
        mask: shaped alike; masked tokens get 0.

    Raises:
        DataError, ConfigError: as for ``on_policy_distillation``.

    >>> entropy_bonus(sampling_logprobs=[-1.0, -3.0], coef=0.5)
    array([0.5, 1.5])

    Source: E[-log q grad log q] = grad H. Peers: Trinity on Tinker uses -q (1 + log q), which is something else.
    """
    coef = _check.real("coef", coef, low=0.0, high=_rows.LARGEST)
    steps = _tokens(sampling_logprobs, mask)
    return steps.restore(-coef * steps.rewards)


def _pair(
    name: str, other: RowsLike, sampling: RowsLike, mask: RowsLike | None
) -> tuple[Steps, np.ndarray, np.ndarray]:
    """Return the tokens that count, and both policies' logprobs of them [n]."""
    steps = _tokens(sampling, mask)
    flat = steps.rows.like(name, other)
    _ratios.check(steps.rows, flat, name, steps.mask)
    return steps, flat if steps.mask is None else flat[steps.mask], steps.rewards


def _tokens(sampling: RowsLike, mask: RowsLike | None) -> Steps:
    """Return the sampled tokens that count, and their logprobs."""
    steps = Steps.parse(sampling, mask=mask, where="sampling_logprobs", empty=True)
    _ratios.check(steps.rows, steps.rows.flat, "sampling_logprobs", steps.mask)
    return steps
