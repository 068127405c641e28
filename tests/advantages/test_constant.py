"""Ties: a constant group gets exactly zero, whatever its numbers, size and type; and other numerical edges."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import rlkit.advantages as adv
from tests.each import for_each

ESTIMATORS: dict[str, Callable[[Any], Any]] = {
    **{name: adv.registry[name] for name in ("grpo", "dr_grpo", "rloo", "gpg", "opmd", "maxrl")},
    **{name: partial(adv.registry[name], eps=0.0) for name in ("loo_std", "pass_at_k", "rebn")},
    **{name: partial(adv.registry[name], normalize=True, eps=0.0) for name in ("reinforce", "rec")},
    "grpo, biased, eps 0": partial(adv.grpo, ddof=0, eps=0.0),
    "grpo, batch": partial(adv.grpo, scale="batch", eps=0.0),
    "opmd, logavgexp": partial(adv.opmd, baseline="logavgexp", tau=0.1),
    "opo": lambda r: adv.opo(r, lengths=np.arange(len(r)) + 1),
    "gdpo": lambda r: adv.gdpo([r, r], eps=0.0),
    "reinforce_pp": partial(adv.reinforce_pp, gamma=0.0, eps=0.0),
    "reinforce_pp_baseline": lambda r: adv.reinforce_pp_baseline(r, lengths=np.arange(len(r)) + 1, eps=0.0),
    "step_wise_grpo": lambda r: np.concatenate(adv.step_wise_grpo(r, np.ones(len(r)), eps=0.0)),
    "hierarchical_grpo": lambda r: adv.hierarchical_grpo(r, np.zeros(len(r)), np.zeros(len(r))),
    "by_group": lambda r: adv.by_group("grpo", r, np.zeros(len(r)), eps=0.0),
    "running_normalization": lambda r: adv.running_normalization(eps=0.0).update(r),
}
CONSTANTS = (0.1, 0.9, 1.1, -3.3, 1 / 3, 1e-3, 7.0, 6e4)


@for_each("dtype", [np.float16, np.float32, np.float64])
@for_each("name", ESTIMATORS, by=str)
def test_exact_zero(name: str, dtype: type) -> None:
    """Zero at sizes 1 to 256, for numbers that binary fractions cannot hold, in all three types."""
    some = (*range(1, 20), 31, 32, 33, 64, 100, 127, 128, 200, 255, 256)
    for constant in CONSTANTS:
        for size in range(1, 257) if (constant, dtype) == (0.1, np.float32) else some:
            result = ESTIMATORS[name](np.full(size, constant, dtype))
            assert result.dtype == np.float64
            assert (result == 0.0).all(), (size, constant)


def test_constant_beside_mixed() -> None:
    """A constant group stays exactly zero beside others, in every form of batch, also where the batch is normalised."""
    mixed = [0.3, 0.7, 0.11]
    for rewards in ([[0.1] * 3, mixed], [[0.1] * 7, mixed], np.array([[0.1] * 3, mixed], np.float32)):
        for scale in ("group", "batch", "none"):
            assert (adv.grpo(rewards, scale=scale)[0] == 0.0).all()
        for estimator in (adv.loo_std, adv.gpg, adv.pass_at_k, lambda r: adv.gdpo([r, r])):
            assert (estimator(rewards)[0] == 0.0).all()


SAME = {"count": 3, "mean": 0.1 + 1e-15, "squares": 1e-30, "lowest": 0.1, "highest": 0.1}
EXACT: list[tuple[Callable[[], Any], list[Any]]] = [
    # The documented exceptions: asymre keeps its shift, pkpo without a baseline its value, reinforce has no baseline.
    (lambda: adv.asymre([0.5, 0.5]), [0.1, 0.1]),
    (lambda: adv.pkpo([0.5, 0.5], k=2, baseline="none"), [0.5, 0.5]),
    (lambda: adv.reinforce([0.5, 0.5]), [0.5, 0.5]),
    (lambda: adv.pkpo(np.full(9, 0.1), k=3), [0.0] * 9),
    # Unscored rewards, and samples without tokens, do not make a group vary; nor do they have a share in it.
    (lambda: adv.grpo([0.1, np.nan, 0.1, 0.1]), [0.0] * 4),
    (lambda: adv.grpo([np.nan, np.nan], scale="batch"), [0.0] * 2),
    *[(lambda c=c: adv.gpg([[0.0, 0.0], [np.nan, np.nan]], count=c), [[0.0] * 2] * 2) for c in ("rewards", "groups")],
    (lambda: adv.loo_std([0.1, np.nan, 0.1, 0.1]), [0.0] * 4),
    (lambda: adv.rebn([1.0, np.nan, 3.0])[[0, 2]] - adv.rebn([1.0, 3.0]), [0.0] * 2),
    (lambda: adv.reinforce_pp_baseline([[1.0, 0.5, 0.0]] * 2, lengths=[[0, 3, 0], [0, 2, 0]]), [[0.0] * 3] * 2),
    (lambda: adv.opo([[1.0, 0.0]] * 2, lengths=[[0, 0], [1, 1]]), [[0.0, 0.0], [0.5, -0.5]]),
    (lambda: adv.opo([1.0, 0.0], lengths=[1, 0]), [0.0, -1.0]),
    (lambda: adv.length_adaptive_lambda([1, 20, 40]), [0.0, 0.0, 0.5]),
    # Deviations too small for float64 divide by 1, or give zeros, never a division by 0.
    (lambda: adv.pass_at_k([0.0, 0.0, 0.0, 5e-324], ddof=0, eps=0.0), [0.0, 0.0, 0.0, 5e-324]),
    (lambda: adv.running_normalization(eps=0.0).update([0.0, 1e-200]), [0.0, 0.0]),
    # Rewards that were always the same have no deviation, also where a saved mean is off in its last digits.
    *[(lambda x=x: adv.RunningNormalization(eps=x, **SAME).update([0.1, 0.1]), [0.0, 0.0]) for x in (0.0, 1e-6)],
    # A mean that may be rounding, below 1e-12 of the largest reward, is not positive.
    (lambda: adv.maxrl([1.0, -1.0 + 1.5e-12]), [0.0, 0.0]),
    *[(lambda r=r: adv.maxrl(r), [0.0] * len(r)) for r in ([0.1, 0.2, -0.3], [1e9, -1e9, 1e-9], [0.0, -0.0])],
]


@for_each(("estimate", "expected"), EXACT, ids=[f"{i}: {expected}" for i, (_, expected) in enumerate(EXACT)])
def test_exact_results(estimate: Callable[[], Any], expected: list[Any]) -> None:
    np.testing.assert_array_equal(estimate(), expected)


def test_almost_constant_is_not_constant() -> None:
    """The smallest difference that the type can hold is a difference."""
    rewards = np.array([1.0, np.nextafter(1.0, 2.0), 1.0])
    assert adv.grpo(rewards, eps=0.0)[1] == pytest.approx(2 / np.sqrt(3))
    assert adv.grpo([0.0, 5e-324, 0.0], eps=0.0)[1] == pytest.approx(np.sqrt(2), abs=0.5)
    assert adv.maxrl([1.0, -1.0 + 3e-12])[0] == pytest.approx(1.0 / 1.5e-12, rel=1e-3)


@for_each("size", [1, 2, 3, 8, 100])
@for_each("magnitude", [1e-300, 1e-160, 1.0, 1e100, 1e150])
def test_always_finite(size: int, magnitude: float) -> None:
    """No size and no magnitude gives NaN or infinity."""
    rewards = np.random.default_rng(size).normal(size=size).clip(-1, 1) * magnitude
    for name, estimator in ESTIMATORS.items():
        assert np.isfinite(estimator(rewards)).all(), name


def test_small_components_that_cancel_give_zero() -> None:
    """Two light components of opposite sign, scaled differently, leave no rounding error to be whitened."""
    for rewards in np.random.default_rng(0).random((40, 3, 5)):
        assert not np.any(adv.gdpo([rewards, -3.0 * rewards], weights=[0.05, 0.05], eps=0.0))


def test_far_and_small_numbers() -> None:
    """What does not count sets no scale, and deviations are relative, so that neither end overflows."""
    found = adv.reinforce_pp_baseline([[1e150], [1e-20], [0.0]], lengths=[[0], [1], [1]], eps=0.0, singleton="raw")
    np.testing.assert_allclose(np.ravel(found)[1:], [0.5**0.5, -(0.5**0.5)], rtol=1e-12)
    found = adv.opmd([1e150, 0.0], baseline="logavgexp", tau=1e-200)  # however cold, the baseline is the best reward
    np.testing.assert_allclose(found, [0.0, -1e150], atol=1e-199)
    small, plain = (adv.loo_std(np.array([1.0, 2.0, 4.0, 4.0]) * scale, eps=0.0) for scale in (1e-200, 1.0))
    np.testing.assert_allclose(small, plain, rtol=1e-9)
    np.testing.assert_allclose(adv.loo_std([0.0, 1e-200, 1.0], eps=0.0)[2], 1.0)  # the others' deviation vanishes
    group = [1e9, 0.1, 0.2, 0.4]  # an outlier: the deviation of the others is exact
    expected = (group[0] - np.mean(group[1:])) / np.std(group[1:], ddof=1)
    assert adv.loo_std(group, eps=0.0)[0] == pytest.approx(expected, rel=1e-12)
