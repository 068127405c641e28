"""A token of weight 0 reaches nothing, however far its logprobs are apart."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlkit.losses import kl, loss, prepare, with_kl
from tests.each import for_each
from tests.losses.calls import ALL, NAMES, VARIANTS, call, example, gradient

WHOLE = {  # what tokens have in common counts those of weight 0 as well
    "gspo", "gspo_token", "luspo", "gmpo", "vespo", "opsm", "clip_cov", "kl_cov", "kto", "dpo", "orpo", "cpo", "simpo",
}  # fmt: skip


@loss(elementwise=True)
def own(logprobs, behaviour, advantages, weights=1.0):
    """A user's loss, with an input whose name rlkit does not know."""
    return -(weights * (logprobs - behaviour).exp() * advantages).sum()


FUNCTIONS = {**ALL, **{f"ppo+{name}": with_kl("ppo", 0.3, name) for name in kl.registry}, "own": own}


def append_weightless(driver, inputs, values):
    """Give each datum one more token, of weight 0, at which the logprobs are ``values``."""
    added = {"weights": 0.0, "advantages": -1.0} | {name: values[1] for name in inputs if name.endswith("logprobs")}
    wide = {
        name: [np.append(x, np.full_like(x[:1], added.get(name, x[:1])), 0) if np.ndim(x) else x for x in arrays]
        for name, arrays in inputs.items()
    }
    return [np.append(x, np.full_like(x[:1], values[0]), 0) for x in driver], wide


@for_each(("title", "config"), [*VARIANTS, *[(title, {}) for title in FUNCTIONS if title not in NAMES]])
@for_each("values", [(-1e4, 0.0), (0.0, -1e4), (-1e4, -1e4), (-200.0, -1.5)])
def test_a_token_of_weight_0_reaches_nothing(title, config, values):
    """Value and gradient are finite; of an elementwise loss they are those without the token."""
    prepared, name = prepare(FUNCTIONS[title], config), title.split("+")[0]
    driver, inputs = example(FUNCTIONS[title], np.random.default_rng(int(-values[0])))
    if name in ("gspo", "gspo_token", "luspo", "gmpo", "dpo", "kto", "cpo"):
        values = (values[0], values[0])  # else the ratio of the whole sequence overflows, for all its tokens
    found = gradient(prepared, *append_weightless(driver, inputs, values))  # raises where it is not finite
    if name not in WHOLE:
        expected = gradient(prepared, driver, inputs)
        assert np.isclose(found.value, expected.value, rtol=1e-5, atol=1e-6)
        for x, y in zip(found.driver, expected.driver, strict=True):
            assert torch.equal(x[:-1], y)
            assert not x[-1].any()


def test_a_call_of_a_loss_leaves_out_what_weighs_nothing():
    """A ratio of e^119 at a token of weight 0, PPO's -1 at the other."""
    given = {"sampling_logprobs": [-120.0, -3.0], "advantages": [-1.0, 1.0], "weights": [0.0, 1.0]}
    found = call("ppo", [[-1.0, -3.0]], {name: [x] for name, x in given.items()}, dtype=torch.float32)
    assert (found[0], found[1][0].tolist()) == (-1.0, [0.0, -1.0])


@for_each("weights", [0.0, np.zeros(3)])
def test_a_datum_of_weight_0(weights):
    """Nothing of it is left, its gradient is 0, and a mistake in the loss is still found."""

    @loss(elementwise=True)
    def wrong(logprobs, behaviour, advantages, weights=1.0):
        raise ZeroDivisionError

    inputs = {"behaviour": [np.full(3, -200.0)], "advantages": [np.ones(3)], "weights": [weights]}
    found = gradient(own, [np.full(3, -1.0)], inputs)
    assert (found.value, found.driver[0].tolist()) == (0.0, [0.0, 0.0, 0.0])
    with pytest.raises(ZeroDivisionError):
        gradient(wrong, [np.full(3, -1.0)], inputs)


def test_a_coefficient_of_0_switches_its_term_off():
    """A KL of coefficient 0, and the policy's share of a mixture at mu = 1, may overflow."""
    near, far = [np.array([-1.0])], [np.array([-200.0])]
    mixed = gradient("mix", near, {"sampling_logprobs": far, "advantages": near, "expert": [0.0], "mu": [1.0]})
    assert (mixed.value, mixed.driver[0].tolist()) == (0.0, [0.0])
    low = gradient(with_kl("reinforce", 0.0), far, {"advantages": near, "reference_logprobs": near})  # k3 of e^199
    assert (low.value, low.driver[0].tolist()) == (-200.0, [1.0])
