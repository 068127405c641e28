"""Estimators of KL(policy || reference) per token, from the logprobs of the sampled token alone; d = lp - ref.

They differ in bias, in variance, and above all in their gradient, which is what a loss sees: under sampling from the
policy the expected gradient of k2 is that of the KL divergence, k1's is 0, and k3's is that of the reversed
KL(reference || policy). ``straight_through`` has k3's value and k2's gradient; ``ratio_corrected`` has the right
gradient for samples of another policy too.

``registry`` holds them by name, for ``rlkit.losses.with_kl(..., estimator=)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlkit import _check
from rlkit.losses.coefficients import AdaptiveCoefficient, FixedCoefficient, adaptive_coefficient, fixed
from rlkit.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "AdaptiveCoefficient",
    "FixedCoefficient",
    "absolute",
    "adaptive_coefficient",
    "clamped",
    "fixed",
    "k1",
    "k2",
    "k3",
    "ratio_corrected",
    "register",
    "registry",
    "straight_through",
]

registry = Registry("KL estimator", entry_point_group="rlkit.kl")
register = registry.register


@register("k1")
def k1(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """d: unbiased, of either sign. Its expected gradient is 0, so that it does nothing as a loss on-policy.

    Args:
        logprobs, reference_logprobs: [n].

    >>> import torch
    >>> k1(torch.tensor([-1.0]), torch.tensor([-3.0]))
    tensor([2.])

    Source: http://joschu.net/blog/kl-approx.html. It belongs into rewards (``rlkit.advantages.kl_penalty``).
    """
    return logprobs - reference_logprobs


@register("abs")
def absolute(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """|d|: biased, never negative, a gradient of constant size.

    Args:
        logprobs, reference_logprobs: [n].

    >>> import torch
    >>> absolute(torch.tensor([-3.0]), torch.tensor([-1.0]))
    tensor([2.])

    Source: verl's kl_penalty "abs".
    """
    return (logprobs - reference_logprobs).abs()


@register("k2")
def k2(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """d^2 / 2: biased in value; on-policy its gradient is, in expectation, that of the KL divergence.

    Args:
        logprobs, reference_logprobs: [n].

    >>> import torch
    >>> k2(torch.tensor([-1.0]), torch.tensor([-3.0]))
    tensor([2.])

    Source: http://joschu.net/blog/kl-approx.html; on its gradient arXiv:2510.01555.
    """
    return 0.5 * (logprobs - reference_logprobs).square()


@register("k3")
def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """e^-d - 1 + d: unbiased, never negative, low variance; on-policy its gradient is KL(reference || policy)'s.

    Args:
        logprobs, reference_logprobs: [n].

    >>> import torch
    >>> k3(torch.tensor([0.5]).log(), torch.tensor([1.0]).log()).item()  # 2 - 1 - ln 2
    0.3068...

    Source: http://joschu.net/blog/kl-approx.html; GRPO, arXiv:2402.03300 eq. 4. Peers: verl and others clamp it at
    10, see ``clamped``.
    """
    distance = logprobs - reference_logprobs
    return (-distance).expm1() + distance


@register("clamped")
def clamped(
    logprobs: Tensor, reference_logprobs: Tensor, *, log_ratio_bound: float = 20.0, value_bound: float = 10.0
) -> Tensor:
    """clip(e^-d - 1 + d, -v, v) with d clipped to +-b: k3 as verl has it. There is no gradient where KL is largest.

    Args:
        logprobs, reference_logprobs: [n].
        log_ratio_bound: b > 0.
        value_bound: v > 0.

    Raises:
        ConfigError: a bound is not above 0.

    >>> import torch
    >>> clamped(torch.tensor([-30.0]), torch.tensor([-1.0]))
    tensor([10.])

    Source: verl's kl_penalty "low_var_kl"; SkyRL, ROLL and OpenRLHF likewise.
    """
    _check.real("log_ratio_bound", log_ratio_bound, above=0.0)
    _check.real("value_bound", value_bound, above=0.0)
    distance = (logprobs - reference_logprobs).clamp(-log_ratio_bound, log_ratio_bound)
    return ((-distance).expm1() + distance).clamp(-value_bound, value_bound)


@register("straight_through")
def straight_through(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Return the value of k3 with the gradient of k2: sg[k3] + k2 - sg[k2].

    Args:
        logprobs, reference_logprobs: [n].

    >>> import torch
    >>> lp = torch.tensor([0.5]).log().requires_grad_()
    >>> kl = straight_through(lp, torch.zeros(1))
    >>> torch.autograd.grad(kl.sum(), lp)[0].item()  # d itself; the value is 1 - ln 2
    -0.6931...

    Source: verl's kl_penalty "k3+".
    """
    gradient = k2(logprobs, reference_logprobs)
    return k3(logprobs, reference_logprobs).detach() + gradient - gradient.detach()


@register("ratio_corrected")
def ratio_corrected(logprobs: Tensor, reference_logprobs: Tensor, sampling_logprobs: Tensor | None = None) -> Tensor:
    """e^(lp - q) (e^-d - 1 + d), the gradient through the ratio too: unbiased in value and gradient off-policy.

    Args:
        logprobs, reference_logprobs: [n].
        sampling_logprobs: [n], q, of the policy that sampled; None: this one, a ratio of 1 that has a gradient.

    >>> import torch
    >>> ratio_corrected(torch.tensor([0.5]).log(), torch.zeros(1), torch.tensor([0.25]).log()).item()  # 2 (1 - ln 2)
    0.6137...

    Source: arXiv:2512.02556. Peers: TRL's ``use_bias_correction_kl``, slime; Trinity-RFT caps the ratio at 2.
    """
    anchor = logprobs.detach() if sampling_logprobs is None else sampling_logprobs
    return (logprobs - anchor).exp() * k3(logprobs, reference_logprobs)
