"""Estimators of KL(policy || reference) per token, and coefficients that follow a measurement.

The estimators take the logprobs of the sampled token alone; d = lp - ref. They differ in bias, in variance, and above
all in their gradient, which matters for a loss: under sampling from the policy the expected gradient of k2 is that of
the KL divergence, k1's is 0, and k3's is that of the reversed KL(reference || policy). ``straight_through`` has k3's
value and k2's gradient; ``ratio_corrected`` has the right gradient for samples of another policy too. ``registry``
holds them by name, for ``rlkit.losses.with_kl(..., estimator=)``.

A coefficient is a number, or an object here whose ``update`` returns the number to use next. Its fields are its whole
state for a checkpoint: ``attrs.asdict(c)``, and ``type(c)(**fields)`` to resume.
"""

from __future__ import annotations

import attrs
from torch import Tensor

from rlkit import _check
from rlkit._check import checked
from rlkit.losses.prepare import guard_shapes
from rlkit.registry import Registry

__all__ = [
    "AdaptiveCoefficient",
    "AdaptiveEntropy",
    "absolute",
    "adaptive_coefficient",
    "adaptive_entropy",
    "clamped",
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
@guard_shapes
def k1(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """d: unbiased, of either sign. Its expected gradient is 0, so that it does nothing as a loss on-policy.

    Args:
        logprobs, reference_logprobs: [n].

    >>> import torch
    >>> k1(torch.tensor([-1.0]), torch.tensor([-3.0]))
    tensor([2.])

    Source: http://joschu.net/blog/kl-approx.html. Use it in rewards (``rlkit.advantages.kl_penalty``).
    """
    return logprobs - reference_logprobs


@register("abs")
@guard_shapes
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
@guard_shapes
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
@guard_shapes
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
    return (-distance).expm1() + distance  # expm1, since near 0 the terms cancel to d^2 / 2


@register("clamped")
@guard_shapes
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
@guard_shapes
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
@guard_shapes
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


@attrs.define
class AdaptiveCoefficient:
    """A coefficient of a KL term that rises where the measured KL is above its target, and falls where it is below.

    coef <- coef (1 + clip(kl / target - 1, -0.2, 0.2) min(n / horizon, 1))

    Args:
        coef: >= 0, the coefficient; the only field that ``update`` changes.
        target: > 0, the KL to hold, in the units that ``update`` is given.
        horizon: > 0; with a KL far off, the coefficient changes by a fifth for each ``horizon`` samples.

    >>> coefficient = AdaptiveCoefficient(coef=0.5, target=0.125, horizon=1000)
    >>> coefficient.update(1.0, 500)  # 0.5 * (1 + 0.2 / 2)
    0.55
    >>> attrs.asdict(coefficient)
    {'coef': 0.55, 'target': 0.125, 'horizon': 1000.0}

    Source: arXiv:1909.08593 section 2.2. Peers: verl's AdaptiveKLController is the same, but turns negative where a
    batch is larger than five horizons.
    """

    coef: float = checked(attrs.NOTHING, _check.real, low=0.0)
    target: float = checked(attrs.NOTHING, _check.real, above=0.0)
    horizon: float = checked(attrs.NOTHING, _check.real, above=0.0)

    def update(self, kl: float, n: int = 1) -> float:
        """Return the coefficient after measuring ``kl`` on ``n`` >= 0 samples."""
        kl, n = _check.real("kl", kl), _check.integer("n", n, low=0)
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.coef = self.coef * (1.0 + error * min(n / self.horizon, 1.0))
        return self.coef


@attrs.define
class AdaptiveEntropy:
    """A coefficient of an entropy bonus that rises by steps while entropy is low, and is 0 while it is not.

    coef <- clip(coef + delta where entropy <= target, else coef - delta, low, high); the bonus gets coef where
    entropy <= target, else 0

    Args:
        target: >= 0, in nats per token.
        delta: >= 0, the step.
        coef: in [low, high]; the only field that ``update`` changes.
        low, high: 0 <= low <= high.

    >>> bonus = AdaptiveEntropy(target=0.2)
    >>> [round(bonus.update(entropy), 3) for entropy in (0.1, 0.1, 0.9, 0.1)]
    [0.005, 0.01, 0.0, 0.01]
    >>> attrs.asdict(bonus)["coef"]
    0.01

    Source: arXiv:2505.22312. Peers: TRL's ``use_adaptive_entropy`` is the same.
    """

    target: float = checked(0.2, _check.real, low=0.0)
    delta: float = checked(0.005, _check.real, low=0.0)
    coef: float = checked(0.0, _check.real)
    low: float = checked(0.0, _check.real, low=0.0)
    high: float = checked(1.0, _check.real)

    def __attrs_post_init__(self) -> None:
        _check.real("AdaptiveEntropy.low", self.low, high=self.high)
        _check.real("AdaptiveEntropy.coef", self.coef, low=self.low, high=self.high)

    def update(self, entropy: float) -> float:
        """Return the coefficient to use next, after measuring ``entropy`` (the mean per token)."""
        entropy = _check.real("entropy", entropy)
        step = self.delta if entropy <= self.target else -self.delta
        self.coef = min(max(self.coef + step, self.low), self.high)
        return self.coef if entropy <= self.target else 0.0


adaptive_coefficient, adaptive_entropy = AdaptiveCoefficient, AdaptiveEntropy
