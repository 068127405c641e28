"""KL estimators at their numerical edges, and coefficients that follow a measurement."""

from __future__ import annotations

import json

import attrs
import numpy as np
import pytest
import torch

from rlkit import ConfigError, UnknownNameError
from rlkit.losses import AdaptiveEntropy, kl, with_kl
from tests.each import for_each

ONE = torch.ones(1)


def test_k3_keeps_its_digits():
    """Close to the reference k3 is d^2 / 2 in float32 too, where e^-d - 1 + d would be rounded away."""
    assert kl.k3(-ONE, -ONE - 2.0**-10).item() == pytest.approx(2.0**-21, rel=1e-2)


def test_bounds_of_clamped():
    """Both bounds are settings, above 0."""
    assert kl.clamped(-3 * ONE, -ONE, value_bound=2.0).item() == 2.0
    assert kl.clamped(-3 * ONE, -ONE, value_bound=0.5).item() == 0.5
    assert kl.clamped(-3 * ONE, -ONE, log_ratio_bound=0.5).item() == pytest.approx(np.exp(0.5) - 1.5)
    for name in ("log_ratio_bound", "value_bound"):
        with pytest.raises(ConfigError, match=name):
            kl.clamped(-3 * ONE, -ONE, **{name: 0.0})


def test_estimators_of_users():
    """An estimator may be a function; an unknown name is an error."""
    half = with_kl("reinforce", 1.0, lambda logprobs, reference_logprobs: 0.5 * (logprobs - reference_logprobs))
    assert half(-ONE, 0 * ONE, -3 * ONE).item() == 1.0
    with pytest.raises(UnknownNameError, match="KL estimator named 'k4'"):
        with_kl("ppo", 0.1, "k4")


def test_adaptive_coefficient_by_hand():
    """It changes by a fifth per horizon at most, and in proportion between; ``n`` is 1 by default."""
    for n, value, expected in ((10, 2.2, 1.1), (5, 100.0, 1.1), (1000, 0.0, 0.8), (0, 100.0, 1.0)):
        assert kl.adaptive_coefficient(1.0, target=2.0, horizon=10).update(value, n) == pytest.approx(expected)
    assert kl.adaptive_coefficient(1.0, target=2.0, horizon=10).update(9.0) == pytest.approx(1.02)
    assert kl.adaptive_coefficient(coef=0.0, target=0.5, horizon=0.5).update(1.0) == 0.0


def test_adaptive_entropy_by_hand():
    """Up by delta while entropy is at or below its target, down above it, where the bonus is off."""
    bonus = AdaptiveEntropy(target=0.5, delta=0.25, high=0.6)
    assert [bonus.update(e) for e in (0.5, 0.1, 0.1)] == [0.25, 0.5, 0.6]
    assert bonus.update(0.6) == 0.0
    assert bonus.coef == pytest.approx(0.35)
    assert [bonus.update(0.6), bonus.update(0.6), bonus.coef] == [0.0, 0.0, 0.0]
    assert AdaptiveEntropy(low=0.1, coef=0.1).update(9.0) == 0.0
    assert AdaptiveEntropy(low=0.1, high=0.1, coef=0.1).update(0.0) == 0.1
    assert attrs.asdict(AdaptiveEntropy()) == {"target": 0.2, "delta": 0.005, "coef": 0.0, "low": 0.0, "high": 1.0}


@for_each("one", [kl.adaptive_coefficient(0.1, 0.05, 200), AdaptiveEntropy(0.05)])
def test_state_goes_through_json(one):
    """A copy made from the saved fields goes on exactly as the original does; numpy numbers do no harm."""
    for x in np.random.default_rng(0).uniform(0, 0.1, 5).astype(np.float32):
        one.update(x)
    other = type(one)(**json.loads(json.dumps(attrs.asdict(one))))
    assert [one.update(x) for x in (0.02, 0.07)] == [other.update(x) for x in (0.02, 0.07)]


BAD = [
    (lambda: kl.adaptive_coefficient(-1.0, 0.1, 1), "coef"), (lambda: kl.adaptive_coefficient(1.0, 0.0, 1), "target"),
    (lambda: kl.adaptive_coefficient(1.0, 0.1, 0), "horizon"),
    (lambda: kl.adaptive_coefficient(1.0, 0.1, 1).update(float("inf")), "kl"),
    (lambda: kl.adaptive_coefficient(1.0, 0.1, 1).update(0.1, -1), "n"),
    *[(lambda k=k: AdaptiveEntropy(**{k: -1.0}), k) for k in ("target", "delta", "low")],
    (lambda: AdaptiveEntropy(low=0.5, high=0.4, coef=0.5), "low"), (lambda: AdaptiveEntropy(coef=2.0), "coef"),
    (lambda: AdaptiveEntropy().update(float("nan")), "entropy"),
]  # fmt: skip


@for_each(("make", "name"), BAD)
def test_bad_numbers(make, name):
    with pytest.raises(ConfigError, match=rf"^(Adaptive\w+\.)?{name}\b"):
        make()
