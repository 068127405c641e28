"""Every loss against loops over Python floats: value, and gradient by central differences."""

from __future__ import annotations

import numpy as np
import pytest

from rlkit.losses import prepare
from tests.each import for_each
from tests.losses import oracle
from tests.losses.calls import BATCHES, COMPOSED, NAMES, PAIRS, TERMS, VARIANTS, call, example, identity

H = 1e-6


def listed(values):
    return [value.tolist() if isinstance(value, np.ndarray) else value for value in values]


def grouped(name, driver, inputs):
    """Return (driver, inputs) of each call of the oracle, where one number for all tokens is one for each."""
    n = len(driver) if name in BATCHES else 2 if name in PAIRS else 1
    spread = {
        key: [np.full(len(x), v) if np.ndim(v) == 0 else v for x, v in zip(driver, inputs[key], strict=True)]
        for key in inputs.keys() & {"advantages", "weights", "returns"}
    }
    calls = [
        (listed(driver[i : i + n]), {key: listed(x[i : i + n]) for key, x in (inputs | spread).items()})
        for i in range(0, len(driver), n)
    ]
    return calls if n > 1 else [(x[0], {key: value[0] for key, value in d.items()}) for x, d in calls]


def moved(rows, path, step):
    if not path:
        return rows + step
    return [moved(row, path[1:], step) if i == path[0] else row for i, row in enumerate(rows)]


def paths(rows):
    return [(i, *rest) for i, row in enumerate(rows) for rest in (paths(row) if isinstance(row, list) else [()])]


def by_differences(function, x, d, s):
    """Central differences of ``function`` at ``x``, in the order of ``paths``."""
    return [
        (function(moved(x, path, H), x, d, s) - function(moved(x, path, -H), x, d, s)) / (2 * H) for path in paths(x)
    ]


def check(name, function, loss, settings, driver, inputs):
    """Compare value and gradient of ``loss`` with those of ``function``; return its gradient of the entropies."""
    value, gradients, entropies = call(loss, driver, inputs, settings)
    s = prepare(loss, settings).settings
    calls = grouped(name, driver, inputs)
    assert value == pytest.approx(sum(function(x, x, d, s) for x, d in calls), rel=1e-9, abs=1e-9)
    expected = [g for x, d in calls for g in by_differences(function, x, d, s)]
    actual = np.concatenate([np.ravel(g) for g in gradients])
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6 * max(1.0, np.abs(actual).max()))
    return entropies


@for_each("way", ["plain", "weighted", "one number for all tokens"])
@for_each("variant", VARIANTS, ids=identity)
def test_losses(variant, way):
    """Losses without weights, with weights (one of them 0), and with numbers, beyond the bounds on both sides."""
    name, settings = variant
    optional = ("mu",) if way == "plain" else ("weights", "target_tokens")
    for seed in range(3):
        driver, inputs = example(name, np.random.default_rng(seed), sizes=(5, 3, 1, 6), optional=optional)
        if way == "weighted":
            inputs["weights"][0][1] = 0.0
        elif way != "plain":
            spread = inputs.keys() & {"advantages", "weights", "returns"}
            inputs |= {key: [float(x.mean()) for x in inputs[key]] for key in spread}
        if name == "clip_cov" and "fraction" not in settings:
            settings = {"cov_low": 100.0, "cov_high": 100.0}
        assert hasattr(oracle, name), f"write the loss {name!r} once more, in numpy and float64: tests/losses/oracle.py"
        check(name, getattr(oracle, name), name, settings, driver, inputs)


def test_every_loss_is_here():
    """No registered loss is without an oracle."""
    assert set(NAMES) == {name for name, _ in VARIANTS}


@for_each("title", COMPOSED)
def test_composed_losses(title):
    """A loss with a KL or an entropy term is the sum of both, token by token, the weights in both."""
    name, estimator, coef, entropy = TERMS[title]
    function = oracle.added(name, prepare(name).settings, estimator, coef, entropy)
    for optional in ((), ("weights",), ("weights", "sampling_logprobs")):
        driver, inputs = example(COMPOSED[title], np.random.default_rng(5), optional=optional)
        found = check(name, function, COMPOSED[title], {}, driver, inputs)
        for i, gradient in enumerate(found):
            coef = 0.25 if entropy == "entropy_coef" else 0.2
            np.testing.assert_allclose(gradient, -coef * inputs.get("weights", np.ones(4))[i], rtol=1e-12)
