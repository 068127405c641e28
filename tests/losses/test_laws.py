"""Losses exactly on their bounds, KL estimators and coefficients that follow a measurement, worked by hand."""

from __future__ import annotations

import json
import math

import attrs
import numpy as np
import pytest
import torch

from rlkit import ConfigError, UnknownNameError
from rlkit.losses import AdaptiveEntropy, kl, with_kl
from tests.each import for_each
from tests.losses.calls import call

ONE = {"clip_low_threshold": 1.0, "clip_high_threshold": 1.0}
NEAR = {"divergence_low": 0.0, "divergence_high": 0.0}
UNCUT = {"clip_low_threshold": 0.6, "clip_high_threshold": 1.4}  # two bounds that are not each other's inverse
LOW, HIGH = torch.tensor([-0.5, 0.5], dtype=torch.float64).exp().tolist()
INSIDE = [("sppo", ONE), ("cispo", {**ONE, "unified_mask": True}), ("dppo_tv", NEAR), ("dppo_kl", NEAR)]
INSIDE += [("rec", {**ONE, "clip_mode": mode}) for mode in ("one-side", "two-side")] + [("opsm", {"delta": 0.0})]
RING = [  # beyond the clip bounds a ring keeps tokens of one sign, from its own bound on
    ({"ring_low_threshold": LOW}, -0.5, [1.0, 2.0, -1.0], [-1.0, -2.0, 0.0]),
    ({"ring_low_threshold": LOW - 1e-6}, -0.5, [1.0, 2.0, -1.0], [0.0, 0.0, 0.0]),
    ({"ring_high_threshold": HIGH}, 0.5, [-1.0, -2.0, 1.0], [1.0, 2.0, 0.0]),
    ({"ring_high_threshold": HIGH + 1e-6}, 0.5, [-1.0, -2.0, 1.0], [0.0, 0.0, 0.0]),
]


@for_each(
    ("name", "options", "log_ratios", "advantages", "expected"),
    [
        *[(name, options, np.zeros(3), [1.0, -2.0, 0.0], [-1.0, 2.0, 0.0]) for name, options in INSIDE],
        *[("rec", {"clip_mode": "ring", **bound}, np.full(3, log), a, expected) for bound, log, a, expected in RING],
        ("sppo", UNCUT, np.log([0.55, 0.65, 1.35, 1.45]), np.ones(4), [0.0, -1.0, -1.0, 0.0]),
        ("topr", {"threshold": 0.5}, np.log([0.5, 0.5]), [0.5, 0.75], [-0.25, -0.75]),
        ("gmpo", UNCUT, np.log([1.96, 1.0]), [0.0, -1.0], [0.0, math.sqrt(1.4) / 2]),  # the first is clipped from above
    ],
)
def test_bounds_are_inside(name, options, log_ratios, advantages, expected):
    """A token that stands exactly on a bound is still trained; an advantage on a threshold counts as the other sign."""
    lp = np.full(len(log_ratios), -4.0)
    inputs = {"sampling_logprobs": [lp - log_ratios], "advantages": [np.array(advantages)]}
    np.testing.assert_allclose(call(name, [lp], inputs, options)[1][0], expected)


def test_the_bound_of_a_divergence_is_inside():
    """dppo_kl keeps a token whose binary divergence is the bound itself, not one just beyond it, on both sides."""
    q, p = np.log([0.5, 0.5]), np.log([0.75, 0.25])
    old, new = torch.tensor(q), torch.tensor(p)  # by the same operations, so that the bound is met to the last digit
    exact = (old.exp() * (old - new) - old.expm1() * ((-old.expm1()).log() - (-new.expm1()).log())).tolist()
    for i, (advantage, side) in enumerate(((1.0, "divergence_high"), (-1.0, "divergence_low"))):
        inputs = {"sampling_logprobs": [q[i : i + 1]], "advantages": [np.array([advantage])]}
        for key in ("divergence_low", "divergence_high"):
            for bound, kept in ((exact[i], True), (exact[i] * 1.001, True), (exact[i] * 0.999, key != side)):
                options = {"divergence_low": 9.0, "divergence_high": 9.0, key: float(bound)}
                found = call("dppo_kl", [p[i : i + 1]], inputs, options)[1][0]
                assert bool(found.any()) == kept, (i, key, bound)


def test_draw_of_clip_cov():
    """max(1, floor(fraction N)) of the candidates are left out, drawn by the seed alone and over the whole batch."""
    lp, a = ([x[:15], x[15:]] for x in (np.linspace(-3, -1, 40), np.linspace(-1, 3, 40)))

    def left_out(fraction, seed):
        options = {"fraction": fraction, "seed": seed, "cov_low": -1e9, "cov_high": 1e9}
        gradients = call("clip_cov", lp, {"sampling_logprobs": lp, "advantages": a}, options)[1]
        return frozenset(np.flatnonzero(np.concatenate(gradients) == 0).tolist())

    assert [len(left_out(f, 0)) for f in (0.0, 1e-6, 0.06, 0.5, 1.0)] == [0, 1, 2, 20, 40]
    draws = [left_out(0.2, seed) for seed in (*range(60), 7)]
    assert draws[7] == draws[-1]
    assert len(set(draws)) > 50
    assert len(frozenset().union(*draws)) == 40


def test_candidates_of_clip_cov():
    """Only tokens with a covariance strictly between the bounds, and which PPO has not clipped, are left out."""
    lp, a = np.array([-2.0, -0.5, -0.5]), np.array([-1.0, 3.0, 1.0])  # covariances 2, 1, 0
    cases = [(2.0, 9.0, 0.0, []), (1.0, 9.0, 0.0, [0]), (-0.5, 1.0, 0.0, [2]), (0.0, 2.0, 0.0, [1])]
    cases += [(0.5, 9.0, 0.1, [0, 1]), (0.5, 9.0, 1.0, [0])]  # at last the second token's ratio is e, beyond the bound
    for low, high, moved, left in cases:
        inputs = {"sampling_logprobs": [lp - np.array([0.0, moved, 0.0])], "advantages": [a]}
        value, (found,), _ = call("clip_cov", [lp], inputs, {"fraction": 1.0, "cov_low": low, "cov_high": high})
        ratios = np.exp([0.0, moved, 0.0])
        assert value == pytest.approx(-sum(min(ratios[i], 1.2) * a[i] for i in range(3) if i not in left))
        assert np.flatnonzero(found == 0).tolist() == sorted({*left, *([1] if moved == 1.0 else [])})


def test_tokens_of_kl_cov():
    """max(1, floor(fraction N)) tokens, those with the largest covariance, are pulled; with fraction 0 none is."""
    lp, a = np.linspace(-3, -1, 10), np.linspace(-1, 3, 10) ** 3
    c = (a - a.mean()) * (lp - lp.mean())
    inputs = {"sampling_logprobs": [lp - 0.1], "advantages": [a]}
    plain = call("importance_sampling", [lp], inputs)[1][0]
    for fraction, count in ((0.0, 0), (1e-6, 1), (0.19, 1), (0.2, 2), (0.55, 5), (1.0, 10)):
        pulled = call("kl_cov", [lp], inputs, {"fraction": fraction, "coef": 2.0})[1][0] - plain
        assert set(np.flatnonzero(np.abs(pulled) > 1e-9)) == set(np.argsort(-c)[:count])
        np.testing.assert_allclose(pulled[np.abs(pulled) > 1e-9], 2.0)


T = torch.ones(1)


def test_k3_keeps_its_digits():
    """Close to the reference k3 is d^2 / 2 in float32 too, where e^-d - 1 + d would be rounded away."""
    assert kl.k3(-T, -T - 2.0**-10).item() == pytest.approx(2.0**-21, rel=1e-2)


def test_bounds_of_clamped():
    """Both bounds are settings, above 0."""
    assert kl.clamped(-3 * T, -T, value_bound=2.0).item() == 2.0
    assert kl.clamped(-3 * T, -T, value_bound=0.5).item() == 0.5
    assert kl.clamped(-3 * T, -T, log_ratio_bound=0.5).item() == pytest.approx(np.exp(0.5) - 1.5)
    for name in ("log_ratio_bound", "value_bound"):
        with pytest.raises(ConfigError, match=name):
            kl.clamped(-3 * T, -T, **{name: 0.0})


def test_estimators_of_users():
    """An estimator may be a function; an unknown name is an error."""
    half = with_kl("reinforce", 1.0, lambda logprobs, reference_logprobs: 0.5 * (logprobs - reference_logprobs))
    assert half(-T, 0 * T, -3 * T).item() == 1.0
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
