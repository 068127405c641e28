"""Policy losses of one ratio per token, and those without a ratio.

lp is the policy's logprob, q the sampler's (``sampling_logprobs``), r = exp(lp - q), A the advantages, sg[x] x without
its gradient. Every loss is a sum over the tokens it is given; ``weights`` (w) multiplies each of its terms. Clip
settings are bounds on the ratio itself: a paper's 1 +- 0.2 is ``clip_low_threshold=0.8, clip_high_threshold=1.2``.
"""

from __future__ import annotations

from torch import Tensor

from rlkit import _check
from rlkit._rows import check_bounds
from rlkit.losses.prepare import Weights, define, mask_weightless


@define("reinforce", elementwise=True)
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


@define("importance_sampling", elementwise=True)
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
    return -(weights * (logprobs - sampling_logprobs).exp() * advantages).sum()


@define("ppo", elementwise=True)
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
    check_clip(clip_low_threshold, clip_high_threshold, dual_clip)
    ratio = (logprobs - sampling_logprobs).exp()
    return -(weights * surrogate(ratio, advantages, clip_low_threshold, clip_high_threshold, dual_clip)).sum()


def surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float, dual_clip: float | None = None) -> Tensor:
    """min(r A, clip(r, low, high) A), and with ``dual_clip`` c not below c A where A < 0."""
    clipped = (ratio * advantages).minimum(ratio.clamp(low, high) * advantages)
    if dual_clip is None:
        return clipped
    return clipped.maximum(dual_clip * advantages).where(advantages < 0, clipped)


def check_clip(low: float, high: float, dual_clip: float | None) -> None:
    """Raise ConfigError unless 0 <= low <= 1 <= high, and ``dual_clip`` is None or above 1."""
    check_bounds(low, high)
    why = "a bound on the ratio where the advantage is negative"
    _check.optional(_check.real, "dual_clip", dual_clip, above=1.0, why=why)


@define("decoupled_ppo", elementwise=True)
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
    check_bounds(clip_low_threshold, clip_high_threshold)
    _check.optional(_check.real, "behaviour_cap", behaviour_cap, above=0.0)
    behaviour = (old_logprobs - sampling_logprobs).exp()
    if behaviour_cap is not None:
        behaviour = behaviour.clamp(max=behaviour_cap)
    ratio = (logprobs - old_logprobs).exp()
    return -(weights * behaviour * surrogate(ratio, advantages, clip_low_threshold, clip_high_threshold)).sum()


@define("cispo", elementwise=True)
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
    check_bounds(clip_low_threshold, clip_high_threshold)
    _check.flag("unified_mask", unified_mask)
    ratio = (logprobs - sampling_logprobs).exp().detach()
    weight = ratio.clamp(clip_low_threshold, clip_high_threshold)
    if unified_mask:
        too_high = (advantages > 0) & (ratio > clip_high_threshold)
        too_low = (advantages < 0) & (ratio < clip_low_threshold)
        weight = weight.masked_fill(too_high | too_low, 0.0)
    return -(weights * weight * advantages * logprobs).sum()


@define("dro", elementwise=True)
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


@define("opsm")
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

    The mean is over all tokens of the datum, those of weight 0, too.

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
    check_clip(clip_low_threshold, clip_high_threshold, dual_clip)
    distance = logprobs - sampling_logprobs
    dropped = (advantages < 0) & (-distance.mean().detach() > delta)
    ratio = mask_weightless(weights, distance).exp()
    bounded = surrogate(ratio, advantages, clip_low_threshold, clip_high_threshold, dual_clip)
    return -(weights * bounded.masked_fill(dropped, 0.0)).sum()


@define("sppo", elementwise=True)
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
    check_bounds(clip_low_threshold, clip_high_threshold)
    distance = logprobs - sampling_logprobs
    ratio = distance.exp().detach()
    outside = (ratio < clip_low_threshold) | (ratio > clip_high_threshold)
    return -(weights * (advantages * distance).masked_fill(outside, 0.0)).sum()


@define("topr", elementwise=True)
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


@define("opmd", elementwise=True)
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
