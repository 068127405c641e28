"""A token of weight 0 reaches nothing, however far its logprobs are apart."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlkit.losses import kl, loss, prepare, traceable, with_kl
from tests.losses.calls import COMPOSED, VARIANTS, call, example, gradient
from tests.properties import examples

WHOLE = {  # what tokens have in common counts those of weight 0 as well
    "gspo", "gspo_token", "luspo", "gmpo", "vespo", "opsm", "clip_cov", "kl_cov", "kto", "dpo", "orpo", "cpo", "simpo",
    "gspo+straight_through", "simpo+k2", "kl_cov+abs", "kl_cov+entropy",
}  # fmt: skip
LOSSES = [(name, name, config) for name, config in VARIANTS]
LOSSES += [(name, composed, {}) for name, composed in COMPOSED.items()]
LOSSES += [(f"ppo+{name}", with_kl("ppo", 0.3, name), {}) for name in kl.registry]
far = st.floats(-1e4, 0.0, width=32)


@loss(elementwise=True)
def own(logprobs, behaviour, advantages, weights=1.0):
    """A loss of a user's, whose input has a name that rlkit does not know."""
    return -(weights * (logprobs - behaviour).exp() * advantages).sum()


def silenced(driver, inputs, values):
    """Give each datum one more token, of weight 0, at which the logprobs are ``values``."""
    more = [np.concatenate([x, np.full_like(x[:1], values[0])]) for x in driver]
    wide = {}
    for name, arrays in inputs.items():
        added = {"weights": 0.0, "advantages": -1.0}.get(name, values[1] if name.endswith("logprobs") else None)
        wide[name] = [
            x if np.ndim(x) == 0 else np.concatenate([x, x[:1] if added is None else np.full_like(x[:1], added)])
            for x in arrays
        ]
    return more, wide


@examples(12)
@given(values=st.tuples(far, far), seed=st.integers(0, 99))
def test_a_token_of_weight_0_reaches_nothing(values, seed):
    """Value and gradient are finite; of an elementwise loss they are those without the token."""
    failed = []
    for title, function, config in [*LOSSES, ("own", own, {})]:
        driver, inputs = example(function if title != "own" else "importance_sampling", np.random.default_rng(seed))
        if title == "own":
            inputs["behaviour"] = inputs.pop("sampling_logprobs")
        if title.split("+")[0] in ("gspo", "gspo_token", "luspo", "gmpo") or title in ("dpo", "kto", "cpo"):
            values = (values[0], values[0])  # else the ratio of the whole sequence overflows, for all its tokens
        more, wide = silenced(driver, inputs, values)
        found = gradient(prepare(function, config), more, wide)
        if not np.isfinite(found.value) or not all(torch.isfinite(x).all() for x in found.driver):
            failed.append(f"{title} {config}: not finite")
        if title in WHOLE:
            continue
        expected = gradient(prepare(function, config), driver, inputs)
        same = np.isclose(found.value, expected.value, rtol=1e-5, atol=1e-6)
        same &= all(
            torch.equal(x[:-1], y) and not x[-1].any() for x, y in zip(found.driver, expected.driver, strict=True)
        )
        if not same:
            failed.append(f"{title} {config}: {found.value} against {expected.value} without the token")
    assert not failed, "\n".join(failed)


def test_ways_of_calling_agree():
    """Directly, and as what a service is sent: a ratio of e^119 at a token of weight 0, PPO's -1 at the other."""
    given = {"sampling_logprobs": np.array([-120.0, -3.0]), "advantages": np.array([-1.0, 1.0])}
    given["weights"] = np.array([0.0, 1.0])
    lp = np.array([-1.0, -3.0])
    value, (found,), _ = call("ppo", [lp], {name: [x] for name, x in given.items()}, dtype=torch.float32)
    assert (value, found.tolist()) == (-1.0, [0.0, -1.0])
    leaf = torch.tensor([0.0, *lp], dtype=torch.float32, requires_grad=True)
    arrays = [torch.tensor([0.0, *given[name]], dtype=torch.float32) for name in given]
    for function in ("ppo", own):
        sent = traceable(prepare(function), inputs=given if function == "ppo" else ["behaviour", *list(given)[1:]])
        value, _ = sent(leaf, torch.tensor([0.0, 1.0, 1.0]), *arrays)
        assert (value.item(), torch.autograd.grad(value, leaf)[0].tolist()) == (-1.0, [0.0, 0.0, -1.0])


@pytest.mark.parametrize("weights", [0.0, np.zeros(3)])
def test_a_datum_of_weight_0(weights):
    """Nothing of it is left, its gradient is 0, and a mistake in the loss is still found."""
    inputs = {"behaviour": [np.full(3, -200.0)], "advantages": [np.ones(3)], "weights": [weights]}
    found = gradient(own, [np.full(3, -1.0)], inputs)
    assert (found.value, found.driver[0].tolist()) == (0.0, [0.0, 0.0, 0.0])

    @loss(elementwise=True)
    def wrong(logprobs, behaviour, advantages, weights=1.0):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        gradient(wrong, [np.full(3, -1.0)], inputs)


def test_a_coefficient_of_0_switches_its_term_off():
    """A KL of coefficient 0, and the policy's share of a mixture at mu = 1, may overflow."""
    far_off = {"sampling_logprobs": [np.array([-200.0])], "advantages": [np.array([-1.0])]}
    lp = [np.array([-1.0])]
    mixed = gradient("mix", lp, {**far_off, "expert": [0.0], "mu": [1.0]})
    assert (mixed.value, mixed.driver[0].tolist()) == (0.0, [0.0])
    inputs = {"advantages": [np.array([2.0])], "reference_logprobs": [np.array([-1.0])]}
    low = gradient(with_kl("reinforce", 0.0), [np.array([-200.0])], inputs)  # k3 of e^199
    assert (low.value, low.driver[0].tolist()) == (400.0, [-2.0])


def test_what_tokens_have_in_common_counts_those_of_weight_0():
    """Worked by hand: means over the tokens of a datum, covariances and counts over those of a batch."""
    two, weights = np.log(4.0), [np.array([1.0, 0.0])]
    inputs = {"sampling_logprobs": [np.array([-3.0, -2.0])], "advantages": [np.ones(2)], "weights": weights}
    driver = [np.array([-3.0 + two, -2.0])]  # ratios 4 and 1, whose geometric mean is 2
    free = {"clip_low_threshold": 0.1, "clip_high_threshold": 9.0}
    for name in ("gspo", "luspo", "gspo_token", "gmpo"):
        assert call(name, driver, inputs, free)[0] == pytest.approx(-2.0), name
    inputs["advantages"] = [-np.ones(2)]
    drifted = [np.array([-3.0, -2.0 - 1.0])]  # by 1 at the token of weight 0: 0.5 on average
    for delta, expected in ((0.4, 0.0), (0.6, 1.0)):
        assert call("opsm", drifted, inputs, {"delta": delta})[0] == pytest.approx(expected)
    # lp - mean lp is -1, 0, 1 and A - mean A is -2, 0, 2; without the last token both would be smaller.
    lp, a = [np.array([-3.0, -2.0, -1.0])], [np.array([-1.0, 1.0, 3.0])]
    batch = {"sampling_logprobs": lp, "advantages": a, "weights": [np.array([1.0, 1.0, 0.0])]}
    left_out = {"fraction": 1.0, "cov_low": 1.5, "cov_high": 2.5}  # c is 2, 0, 2
    assert call("clip_cov", lp, batch, left_out)[0] == pytest.approx(-1.0)
    pulled = call("kl_cov", lp, batch | {"sampling_logprobs": [lp[0] - 0.5]}, {"fraction": 0.7, "coef": 2.0})[0]
    assert pulled == pytest.approx(-(math.exp(0.5) * (-1 + 1) - 2 * 0.5))  # two of three: the first and the last
