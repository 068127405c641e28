"""Every loss against loops over Python floats: value, and gradient by central differences."""

from __future__ import annotations

import numpy as np
import pytest

from rlkit.losses import prepare
from tests.each import for_each
from tests.losses import oracle
from tests.losses.calls import BATCHES, COMPOSED, PAIRS, TERMS, VARIANTS, call, example, identity

H = 1e-6
SPREAD = {"advantages", "weights", "returns"}


def check(name, function, loss, settings, driver, inputs):
    """Compare value and gradient of ``loss`` with those of ``function``; return its gradient of the entropies."""
    value, gradients, entropies = call(loss, driver, inputs, settings)
    s = prepare(loss, settings).settings
    n = len(driver) if name in BATCHES else 2 if name in PAIRS else 1

    def listed(rows):
        return rows[0].tolist() if n == 1 else [row.tolist() for row in rows]

    spread = {  # one number for all tokens is one for each
        key: [np.broadcast_to(v, len(x) if key in SPREAD else np.shape(v)) for x, v in zip(driver, values, strict=True)]
        for key, values in inputs.items()
    }
    total, expected = 0.0, []
    for i in range(0, len(driver), n):
        rows = [x.copy() for x in driver[i : i + n]]
        at, d = listed(rows), {key: listed(values[i : i + n]) for key, values in spread.items()}
        total += function(at, at, d, s)
        for row in rows:
            for place in np.ndindex(row.shape):
                before, sides = row[place], []
                for step in (H, -H):
                    row[place] = before + step
                    sides.append(function(listed(rows), at, d, s))
                row[place] = before
                expected.append((sides[0] - sides[1]) / (2 * H))
    assert value == pytest.approx(total, rel=1e-9, abs=1e-9)
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
        driver, inputs = example(name, np.random.default_rng(seed), optional=optional)
        if way == "weighted":
            inputs["weights"][0][1] = 0.0
        elif way != "plain":
            inputs |= {key: [float(x.mean()) for x in inputs[key]] for key in inputs.keys() & SPREAD}
        if name == "clip_cov" and "fraction" not in settings:
            settings = {"cov_low": 100.0, "cov_high": 100.0}
        assert hasattr(oracle, name), f"write the loss {name!r} once more, in numpy and float64: tests/losses/oracle.py"
        check(name, getattr(oracle, name), name, settings, driver, inputs)


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
