"""KL estimators in expectation, and coefficients that follow what they measure."""

from __future__ import annotations

import json

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlkit import ConfigError, UnknownNameError
from rlkit.losses import AdaptiveEntropy, adaptive_entropy, kl, with_kl
from tests.each import for_each
from tests.properties import examples

V = 5


def logits(seed):
    return torch.tensor(np.random.default_rng(seed).normal(0, 1, V))


def expectation(name, theta, reference, sampler, **more):
    """E of an estimator under ``sampler`` by enumeration, and its gradient as a loss sees it: through the tokens."""
    lp = torch.log_softmax(theta, 0)
    value = (sampler.exp() * kl.registry[name](lp, reference, **more)).sum()
    return value.item(), torch.autograd.grad(value, theta)[0].numpy()


def divergence(theta, p, q):
    value = (p.exp() * (p - q)).sum()
    return value.item(), torch.autograd.grad(value, theta)[0].numpy()


@pytest.mark.parametrize("seed", range(4))
def test_expectations(seed):
    """What the estimators and their gradients are on average over the tokens of a vocabulary of five."""
    theta, reference = logits(seed).requires_grad_(), torch.log_softmax(logits(100 + seed), 0)
    lp = torch.log_softmax(theta, 0)
    sampler = lp.detach()
    true_value, true_gradient = divergence(theta, lp, reference)
    reverse_gradient = divergence(theta, reference, torch.log_softmax(theta, 0))[1]
    found = {name: expectation(name, theta, reference, sampler) for name in kl.registry}
    for name in ("k1", "k3", "straight_through", "ratio_corrected"):
        assert found[name][0] == pytest.approx(true_value)
    assert abs(found["k2"][0] - true_value) > 1e-3
    assert abs(found["abs"][0] - true_value) > 1e-3
    for name in ("k2", "straight_through", "ratio_corrected"):
        np.testing.assert_allclose(found[name][1], true_gradient, atol=1e-12)
    np.testing.assert_allclose(found["k1"][1], 0, atol=1e-12)
    for name in ("k3", "clamped"):
        np.testing.assert_allclose(found[name][1], reverse_gradient, atol=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_ratio_corrected_off_policy(seed):
    """Under another sampling policy only the corrected estimator keeps value and gradient."""
    theta, reference = logits(seed).requires_grad_(), torch.log_softmax(logits(100 + seed), 0)
    sampler = torch.log_softmax(logits(200 + seed), 0)
    true_value, true_gradient = divergence(theta, torch.log_softmax(theta, 0), reference)
    value, gradient = expectation("ratio_corrected", theta, reference, sampler, sampling_logprobs=sampler)
    assert value == pytest.approx(true_value)
    np.testing.assert_allclose(gradient, true_gradient, atol=1e-12)
    assert np.abs(expectation("k2", theta, reference, sampler)[1] - true_gradient).max() > 1e-3


@examples(60)
@given(lp=st.floats(-20, 0), ref=st.floats(-20, 0))
def test_signs(lp, ref):
    """k2, k3 and |d| are not negative and 0 where both agree; k1 changes its sign when they are exchanged."""
    a, b = torch.tensor([lp], dtype=torch.float64), torch.tensor([ref], dtype=torch.float64)
    for name in ("k2", "k3", "abs", "clamped", "straight_through", "ratio_corrected"):
        assert kl.registry[name](a, b).item() >= 0
        assert kl.registry[name](a, a).item() == 0
    assert kl.k1(a, b).item() == -kl.k1(b, a).item()
    assert kl.k1(a, b).abs().item() == kl.absolute(a, b).item()
    assert kl.clamped(a, b).item() <= 10
    assert kl.straight_through(a, b).item() == pytest.approx(kl.k3(a, b).item())


def test_k3_keeps_its_digits():
    """Close to the reference k3 is d^2 / 2 in float32 too, where e^-d - 1 + d would be rounded away."""
    a, b = torch.tensor([-1.0]), torch.tensor([-1.0 - 2.0**-10])
    assert kl.k3(a, b).item() == pytest.approx(2.0**-21, rel=1e-2)


def test_bounds_of_clamped():
    """Both bounds are arguments."""
    a, b = torch.tensor([-3.0]), torch.tensor([-1.0])
    assert kl.clamped(a, b, value_bound=2.0).item() == 2.0
    assert kl.clamped(a, b, value_bound=0.5).item() == 0.5
    assert kl.clamped(a, b, log_ratio_bound=0.5).item() == pytest.approx(np.exp(0.5) - 1.5)
    for name in ("log_ratio_bound", "value_bound"):
        with pytest.raises(ConfigError, match=name):
            kl.clamped(a, b, **{name: 0.0})


def test_registry():
    """Estimators are listed with one line each, and users add their own."""
    assert [name for name, _ in kl.registry.table()] == sorted(kl.registry)
    assert all(line for _, line in kl.registry.table())

    @kl.register("test_half")
    def half(logprobs, reference_logprobs):
        """Half of k1."""
        return 0.5 * (logprobs - reference_logprobs)

    try:
        loss = with_kl("reinforce", 1.0, "test_half")
        one = torch.ones(1)
        assert loss(-one, 0 * one, -3 * one).item() == 1.0
    finally:
        del kl.registry["test_half"]
    with pytest.raises(UnknownNameError, match="KL estimator named 'k4'"):
        with_kl("ppo", 0.1, "k4")


def test_adaptive_coefficient_finds_its_target():
    """Where KL falls as the coefficient rises, the coefficient settles where KL is its target."""
    coefficient = kl.adaptive_coefficient(coef=1.0, target=0.1, horizon=100)
    for _ in range(400):
        coefficient.update(0.02 / coefficient.coef, 50)
    assert coefficient.coef == pytest.approx(0.2, rel=1e-3)


def test_adaptive_coefficient_by_hand():
    """A fifth up or down per horizon at most, proportional between."""

    def after(value, n):
        return kl.adaptive_coefficient(coef=1.0, target=2.0, horizon=10).update(value, n)

    assert after(2.0, 10) == 1.0
    assert after(2.2, 10) == pytest.approx(1.1)
    assert after(100.0, 5) == pytest.approx(1.1)
    assert after(0.0, 5) == pytest.approx(0.9)
    assert after(0.0, 1000) == pytest.approx(0.8)
    assert after(100.0, 0) == 1.0
    assert kl.adaptive_coefficient(coef=1.0, target=2.0, horizon=10).update(9.0) == pytest.approx(1.02)  # n = 1
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


def test_defaults():
    """The numbers of a fresh adaptive entropy."""
    assert adaptive_entropy is AdaptiveEntropy
    assert attrs.asdict(AdaptiveEntropy()) == {"target": 0.2, "delta": 0.005, "coef": 0.0, "low": 0.0, "high": 1.0}


@pytest.mark.parametrize("fresh", [lambda: kl.adaptive_coefficient(0.1, 0.05, 200), lambda: AdaptiveEntropy(0.05)])
def test_state_goes_through_json(fresh):
    """A copy made from the saved fields goes on exactly as the original does; numpy numbers do no harm."""
    one, rng = fresh(), np.random.default_rng(0)
    for x in rng.uniform(0, 0.1, 5).astype(np.float32):
        one.update(x)
    other = type(one)(**json.loads(json.dumps(attrs.asdict(one))))
    assert other == one
    later = rng.uniform(0, 0.1, 5)
    assert [one.update(x) for x in later] == [other.update(x) for x in later]


@for_each(
    ("make", "name"),
    [
        (lambda: kl.adaptive_coefficient(coef=-1.0, target=0.1, horizon=1), "coef"),
        (lambda: kl.adaptive_coefficient(coef=1.0, target=0.0, horizon=1), "target"),
        (lambda: kl.adaptive_coefficient(coef=1.0, target=0.1, horizon=0), "horizon"),
        (lambda: kl.adaptive_coefficient(coef=1.0, target=0.1, horizon=1).update(float("inf")), "kl"),
        (lambda: kl.adaptive_coefficient(coef=1.0, target=0.1, horizon=1).update(0.1, -1), "n"),
        (lambda: AdaptiveEntropy(target=-1.0), "target"),
        (lambda: AdaptiveEntropy(delta=-1.0), "delta"),
        (lambda: AdaptiveEntropy(low=-1.0), "low"),
        (lambda: AdaptiveEntropy(low=0.5, high=0.4, coef=0.5), "low"),
        (lambda: AdaptiveEntropy(coef=2.0), "coef"),
        (lambda: AdaptiveEntropy().update(float("nan")), "entropy"),
    ],
)
def test_bad_numbers(make, name):
    """Numbers out of range are refused by name."""
    with pytest.raises(ConfigError, match=rf"^(Adaptive\w+\.)?{name}\b"):
        make()
