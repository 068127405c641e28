"""Every reference value of the losses and of the KL estimators."""

from __future__ import annotations

import numpy as np
import torch

from rlkit import losses
from rlkit.losses import kl, prepare
from tests.golden import Case, assert_close, cases, each_case, load
from tests.losses.calls import call, gradient

FAMILIES = ("losses_policy", "losses_supervised", "losses_preference", "losses_value")
CASES = [case for family in FAMILIES for case in cases(family) if case.values[0].module is None]


@each_case(CASES)
def test_reference_values(case: Case) -> None:
    """Value and gradient in float64 are those of the independent reference and of the peers named in `source`.

    A backend that calls ``prepare(...).gradient`` in float32 gets the same numbers.
    """
    loss, settings = losses.registry.get(case.function), case.settings
    if case.function == "with_kl":
        loss, settings = losses.with_kl(**settings), {}
    inputs = dict(case.inputs)
    driver = inputs.pop(next(name for name in ("logprobs", "target_logprobs", "values") if name in inputs))
    value, gradients, _ = call(loss, driver, inputs, settings)
    assert_close(value, case.expected["value"])
    assert_close([g.tolist() for g in gradients], case.expected["gradient"])
    inputs = {name: [np.asarray(v, float) for v in values] for name, values in inputs.items()}
    if "teacher_logprobs" in inputs:
        inputs["target_tokens"] = [np.ones(np.shape(x), int) for x in driver]
    result = gradient(prepare(loss, settings), driver, inputs)
    size = max(1.0, *(np.abs(np.ravel(g)).max() for g in case.expected["gradient"]))
    assert_close(result.value, case.expected["value"], rtol=2e-5, atol=2e-5 * size)
    assert_close([g.tolist() for g in result.driver], case.expected["gradient"], rtol=2e-4, atol=2e-5 * size)


@each_case([case for case in cases("kl") if case.values[0].function in kl.registry])
def test_estimators(case: Case) -> None:
    """A KL estimator has the reference's value at each token, and the gradient of their sum."""
    for i, lp in enumerate(case.inputs["logprobs"]):
        leaf = torch.tensor(lp, dtype=torch.float64, requires_grad=True)
        others = {k: torch.tensor(v[i], dtype=torch.float64) for k, v in case.inputs.items() if k != "logprobs"}
        value = kl.registry[case.function](leaf, **others, **case.settings)
        assert_close(value.tolist(), case.expected["value"][i])
        assert_close(torch.autograd.grad(value.sum(), leaf)[0].tolist(), case.expected["gradient"][i])


@each_case(cases("kl", "adaptive_coefficient"))
def test_adaptive_coefficient(case: Case) -> None:
    coefficient = kl.adaptive_coefficient(**case.settings)
    result = [coefficient.update(*pair) for pair in zip(case.inputs["kl"], case.inputs["n"], strict=True)]
    assert_close(result, case.expected["value"])


def test_every_estimator_has_reference_values() -> None:
    assert {case.function for case in load("kl")} - {"adaptive_coefficient"} == set(kl.registry)
