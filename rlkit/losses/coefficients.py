"""Coefficients of KL and entropy terms that follow what they measure: small objects with ``update``.

Their fields are all that a checkpoint needs: ``attrs.asdict(c)``, and ``type(c)(**fields)`` to go on.
"""

from __future__ import annotations

import attrs

from rlkit import _check
from rlkit._calls import answered
from rlkit.errors import ConfigError

__all__ = [
    "AdaptiveCoefficient",
    "AdaptiveEntropy",
    "FixedCoefficient",
    "adaptive_coefficient",
    "adaptive_entropy",
    "fixed",
]


@answered
@attrs.define
class FixedCoefficient:
    """A coefficient that stays what it is, with the ``update`` of ``AdaptiveCoefficient``.

    Args:
        coef: finite.

    >>> FixedCoefficient(0.01).update(0.3, 64)
    0.01
    """

    coef: float

    def __attrs_post_init__(self) -> None:
        self.coef = _check.real("coef", self.coef)

    def update(self, kl: float, n: int = 1) -> float:
        """Return the coefficient, whatever ``kl`` and ``n`` are."""
        _observed(kl, n)
        return self.coef


@answered
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

    coef: float
    target: float
    horizon: float

    def __attrs_post_init__(self) -> None:
        self.coef = _check.real("coef", self.coef, low=0.0)
        self.target = _check.real("target", self.target, above=0.0)
        self.horizon = _check.real("horizon", self.horizon, above=0.0)

    def update(self, kl: float, n: int = 1) -> float:
        """Return the coefficient after measuring ``kl`` on ``n`` >= 0 samples."""
        kl, n = _observed(kl, n)
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.coef = self.coef * (1.0 + error * min(n / self.horizon, 1.0))
        return self.coef


@answered
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

    target: float = 0.2
    delta: float = 0.005
    coef: float = 0.0
    low: float = 0.0
    high: float = 1.0

    def __attrs_post_init__(self) -> None:
        self.target = _check.real("target", self.target, low=0.0)
        self.delta = _check.real("delta", self.delta, low=0.0)
        self.low, self.high = _check.real("low", self.low, low=0.0), _check.real("high", self.high)
        if self.low > self.high:
            raise ConfigError(f"low {self.low} is above high {self.high}")
        self.coef = _check.real("coef", self.coef, low=self.low, high=self.high)

    def update(self, entropy: float) -> float:
        """Return the coefficient to use next, after measuring ``entropy`` (the mean per token)."""
        entropy = _check.real("entropy", entropy)
        step = self.delta if entropy <= self.target else -self.delta
        self.coef = min(max(self.coef + step, self.low), self.high)
        return self.coef if entropy <= self.target else 0.0


def fixed(coef: float) -> FixedCoefficient:
    """Return a coefficient that ``update`` leaves alone (see ``FixedCoefficient``).

    >>> fixed(0.01).update(0.3)
    0.01
    """
    return FixedCoefficient(coef)


def adaptive_coefficient(*, coef: float, target: float, horizon: float) -> AdaptiveCoefficient:
    """Return a coefficient that holds KL at a target (see ``AdaptiveCoefficient``).

    >>> adaptive_coefficient(coef=0.2, target=0.05, horizon=1000).update(0.05)
    0.2
    """
    return AdaptiveCoefficient(coef, target, horizon)


def adaptive_entropy(*, target: float = 0.2, delta: float = 0.005) -> AdaptiveEntropy:
    """Return a coefficient that keeps entropy up (see ``AdaptiveEntropy``).

    >>> adaptive_entropy(target=0.5).update(0.4)
    0.005
    """
    return AdaptiveEntropy(target, delta)


def _observed(kl: float, n: int) -> tuple[float, int]:
    return _check.real("kl", kl), _check.integer("n", n, low=0)
