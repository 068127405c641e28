"""Every loss against loops over Python floats: value, and gradient by central differences."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlkit.losses import kl, prepare
from tests.each import for_each
from tests.losses import oracle
from tests.losses.calls import BATCHES, COMPOSED, NAMES, PAIRS, VARIANTS, call, example, identity

H = 1e-6


def plain(value):
    return value.tolist() if isinstance(value, np.ndarray) else value


def grouped(name, driver, inputs):
    """What the oracle is called with: one (driver, inputs) for each call."""
    rows = [plain(x) for x in driver]
    if name in BATCHES:
        return [(rows, {k: [plain(v) for v in values] for k, values in inputs.items()})]
    if name in PAIRS:
        return [
            (rows[i : i + 2], {k: [plain(v) for v in values[i : i + 2]] for k, values in inputs.items()})
            for i in range(0, len(rows), 2)
        ]
    return [(rows[i], {k: plain(values[i]) for k, values in inputs.items()}) for i in range(len(rows))]


def moved(rows, path, step):
    copy = [moved(row, (), 0) if isinstance(row, list) else row for row in rows]
    if path:
        place = copy
        for index in path[:-1]:
            place = place[index]
        place[path[-1]] += step
    return copy


def paths(rows):
    return [(i, *rest) for i, row in enumerate(rows) for rest in (paths(row) if isinstance(row, list) else [()])]


def by_differences(function, x, d, s):
    """Central differences of ``function`` at ``x``, in the order of ``paths``."""
    return [
        (function(moved(x, path, H), x, d, s) - function(moved(x, path, -H), x, d, s)) / (2 * H) for path in paths(x)
    ]


def check(name, function, loss, settings, driver, inputs):
    """Value and gradient of ``loss`` are those of ``function``."""
    value, gradients, _ = call(loss, driver, inputs, settings)
    s = prepare(loss, settings).settings
    calls = grouped(name, driver, inputs)
    assert value == pytest.approx(sum(function(x, x, d, s) for x, d in calls), rel=1e-9, abs=1e-9)
    expected = [g for x, d in calls for g in by_differences(function, x, d, s)]
    actual = np.concatenate([np.ravel(g) for g in gradients])
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6 * max(1.0, np.abs(actual).max()))


@for_each("weighted", [False, True], ids=["plain", "weighted"])
@for_each("variant", VARIANTS, ids=identity)
def test_losses(variant, weighted):
    """Losses with and without weights, at numbers where bounds are met on both sides."""
    name, settings = variant
    optional = ("weights", "target_tokens") if weighted else ("mu",)
    for seed in range(3):
        rng = np.random.default_rng(seed)
        driver, inputs = example(name, rng, sizes=(5, 3, 1, 6), optional=optional)
        if name == "clip_cov" and "fraction" not in settings:
            settings = {"cov_low": 100.0, "cov_high": 100.0}
        assert hasattr(oracle, name), f"write the loss {name!r} once more, in numpy and float64: tests/losses/oracle.py"
        check(name, getattr(oracle, name), name, settings, driver, inputs)


def test_every_loss_is_here():
    """No registered loss is without an oracle."""
    assert set(NAMES) == {name for name, _ in VARIANTS}


DEFAULTS = {name: prepare(name).settings for name in NAMES}
BASES = {
    "ppo+k3": ("ppo", "k3", 0.3, 0.0),
    "gspo+straight_through": ("gspo", "straight_through", 0.3, 0.0),
    "cross_entropy+ratio_corrected": ("cross_entropy", "ratio_corrected", 0.3, 0.0),
    "dro+clamped": ("dro", "clamped", None, 0.0),
    "simpo+k2": ("simpo", "k2", 0.3, 0.0),
    "kl_cov+abs": ("kl_cov", "abs", 0.3, 0.0),
    "ppo+entropy": ("ppo", None, 0.0, 0.2),
    "reinforce+k1+entropy": ("reinforce", "k1", 0.3, None),
    "kl_cov+entropy": ("kl_cov", None, 0.0, 0.2),
}


@for_each("title", COMPOSED)
def test_composed(title):
    """A loss with a KL or an entropy term is the sum of both, token by token, the weights in both."""
    name, estimator, coef, entropy = BASES[title]
    function = oracle.added(name, DEFAULTS[name], estimator, coef, entropy)
    for optional in ((), ("weights",), ("weights", "sampling_logprobs")):
        driver, inputs = example(COMPOSED[title], np.random.default_rng(5), optional=optional)
        check(name, function, COMPOSED[title], {}, driver, inputs)


@pytest.mark.parametrize("title", [title for title in COMPOSED if "+entropy" in title])
def test_gradient_of_the_entropy(title):
    """The gradient with respect to the entropies is minus coefficient times weight."""
    driver, inputs = example(COMPOSED[title], np.random.default_rng(1))
    gradients = call(COMPOSED[title], driver, inputs)[2]
    coef = 0.25 if "entropy_coef" in inputs else 0.2
    for gradient, w in zip(gradients, inputs["weights"], strict=True):
        np.testing.assert_allclose(gradient, -coef * w, rtol=1e-12)


@for_each("with_sampling", [False, True])
@for_each("name", oracle.ESTIMATORS)
def test_estimators(name, with_sampling):
    """KL estimators: value and gradient at each token."""
    rng = np.random.default_rng(3)
    lp, ref, q = rng.normal(-1, 0.7, 8), rng.normal(-1, 0.7, 8), rng.normal(-1, 0.7, 8)
    lp[0], ref[1] = -4.5, -9.0  # far apart both ways: beyond the bounds of `clamped`
    arrays = [torch.tensor(a, dtype=torch.float64) for a in (lp, ref, q)]
    arrays[0].requires_grad_()
    more = {"sampling_logprobs": arrays[2]} if with_sampling and name == "ratio_corrected" else {}
    value = kl.registry[name](arrays[0], arrays[1], **more)
    function = oracle.ESTIMATORS[name]
    at = [(r, s if more else None) for r, s in zip(ref, q, strict=True)]
    expected = [function(x, x, *rest) for x, rest in zip(lp, at, strict=True)]
    np.testing.assert_allclose(value.detach().numpy(), expected, rtol=1e-10)
    gradient = torch.autograd.grad(value.sum(), arrays[0])[0].numpy()
    steps = [(function(x + H, x, *r) - function(x - H, x, *r)) / (2 * H) for x, r in zip(lp, at, strict=True)]
    np.testing.assert_allclose(gradient, steps, rtol=1e-6, atol=1e-7)
