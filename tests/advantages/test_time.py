"""Estimators over time: masks, far policies and long rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import rlkit.advantages as adv
from rlkit.advantages import returns
from tests.each import for_each

NAN, INF = float("nan"), float("inf")


SETTINGS: dict[str, dict[str, Any]] = {  # every function over time that takes a mask; "v" stands for values
    "discounted_returns": {"gamma": 0.5, "bootstrap_value": 0.3}, "lambda_returns": {"values": "v", "gamma": 0.9},
    "gae": {"values": "v", "gamma": 0.9, "bootstrap_value": 0.3}, "potential_shaping": {"potentials": "v"},
    "n_step_returns": {"values": "v", "n": 2, "bootstrap_value": 0.3}, "reinforce_pp": {"kl": "v", "kl_coef": 0.1},
    "vtrace": {"values": "v", "log_ratios": "v", "lam": 0.7}, "remax": {"baseline": 0.4}, "rebn": {},
    "on_policy_distillation": {"teacher_logprobs": "v", "gamma": 0.5}, "jsd": {"teacher_logprobs": "v"},
    "jsd_gradient": {"teacher_logprobs": "v"}, "kl_penalty": {"reference_logprobs": "v", "center": True},
    "entropy_bonus": {},
}  # fmt: skip


def call(name: str, rewards: Any, values: Any, mask: Any = None) -> list[list[np.ndarray]]:
    """Return the results of a function; logprobs are the same numbers, less 20."""
    settings = {key: values if value == "v" else value for key, value in SETTINGS[name].items()}
    first = {"rebn": "returns"}.get(name, "rewards")
    if name in ("entropy_bonus", "kl_penalty") or "teacher_logprobs" in settings:
        first = "sampling_logprobs"
    arguments = {first: rewards, **settings}
    for key in [key for key in arguments if key.endswith("logprobs")]:
        arguments[key] = [[x - 20.0 for x in row] for row in arguments[key]]
    result = getattr(adv, name)(**arguments, mask=mask)
    return [list(part) for part in (result if isinstance(result, tuple) else (result,))]


@for_each("name", SETTINGS)
@for_each("junk", [0.0, 7.0, NAN, INF])
def test_inserted_masked_tokens_change_nothing(name: str, junk: float) -> None:
    """Masked tokens may be anywhere and hold anything, also NaN: the others keep their bits, they get 0."""
    for seed in range(12):
        rng = np.random.default_rng(seed)
        rewards, values, wide_rewards, wide_values, masks = [], [], [], [], []
        for length in rng.integers(1, 12, size=1 + seed % 4):
            mask = rng.permutation(np.arange(length + rng.integers(6)) < length)
            pair = rng.uniform(-10, 10, (2, length)).round(seed % 3)
            wide = np.full((2, mask.size), junk)
            wide[:, mask] = pair
            for rows, row in ((rewards, pair[0]), (values, pair[1]), (wide_rewards, wide[0]), (wide_values, wide[1])):
                rows.append(row.tolist())
            masks.append(mask.astype(int).tolist())
        keep = np.concatenate(masks) == 1
        after = call(name, wide_rewards, wide_values, masks)
        for x, y in zip(call(name, rewards, values), after, strict=True):
            y = np.concatenate(y, axis=None)
            np.testing.assert_array_equal(y[keep], np.concatenate(x, axis=None))
            assert (y[~keep] == 0.0).all()
    for masked in (1, 0):  # of the second trajectory; the first has no token that counts
        for result in call(name, [[junk, junk], [1.0]], [[junk, 1.0], [2.0]], [[0, 0], [masked]]):
            assert not any(np.concatenate(result, axis=None)[: 2 if masked else 3])


def test_trajectories_do_not_see_each_other() -> None:
    """A trajectory gets the same bits alone and in a batch."""
    rng = np.random.default_rng(0)
    rewards, values = ([rng.normal(size=n).tolist() for n in (5, 1, 12, 3)] for _ in range(2))
    ends = rng.normal(size=4).tolist()
    together = adv.gae(rewards, values=values, gamma=0.5, bootstrap_value=ends)[0]
    for row, r, v, end in zip(together, rewards, values, ends, strict=True):
        np.testing.assert_array_equal(row, adv.gae(r, values=v, gamma=0.5, bootstrap_value=end)[0])


def test_far_policies() -> None:
    """k3 stays finite and V-trace clips however far the policies are; empty sequences are allowed among tokens."""
    penalty = adv.kl_penalty(sampling_logprobs=[[-5000.0], []], reference_logprobs=[[0.0], []], estimator="k3")
    assert (np.isfinite(penalty[0]).all(), penalty[1].size) == (True, 0)
    for distance, counted in ((-200.0, 200.0), (-300.0, 300.0), (-400.0, 300.0)):  # log-ratios count as at most 300
        far = adv.kl_penalty(sampling_logprobs=[distance], reference_logprobs=[0.0], coef=1.0, estimator="k3")
        np.testing.assert_allclose(far, [-(math.exp(counted) - 1.0 + distance)], rtol=1e-12)
    far = adv.kl_penalty(sampling_logprobs=[-1e75], reference_logprobs=[0.0], coef=1.0, estimator="k2")
    np.testing.assert_allclose(far, [-0.5e150], rtol=1e-12)
    found = adv.vtrace([1.0], values=[0.0], log_ratios=[1e4], clip_rho=2.0, clip_pg_rho=3.0)
    assert [x.tolist() for x in found] == [[3.0], [2.0]]


@for_each("seed", range(20))
def test_jsd_gradient_is_the_gradient_of_the_divergence(seed: int) -> None:
    """Over a small vocabulary E[A grad log p] is minus the gradient of the divergence, by differences."""
    rng = np.random.default_rng(seed)
    size, beta, h = 2 + seed % 5, rng.uniform(0.05, 0.95), 1e-5
    logits, t = rng.uniform(-12, 0, size), rng.dirichlet(np.ones(size))

    def divergence(x: np.ndarray) -> float:
        s = np.exp(x - np.logaddexp.reduce(x))
        m = beta * t + (1 - beta) * s
        return float(beta * (t * np.log(t / m)).sum() + (1 - beta) * (s * np.log(s / m)).sum())

    logp = logits - np.logaddexp.reduce(logits)
    a, p = adv.jsd_gradient(teacher_logprobs=np.log(t), sampling_logprobs=logp, beta=beta), np.exp(logp)
    numeric = [(divergence(logits + h * e) - divergence(logits - h * e)) / (2 * h) for e in np.eye(size)]
    assert p * a - p * (p * a).sum() == pytest.approx(-np.array(numeric), abs=1e-6)  # sum of p A (one-hot - p)


@for_each("length", [1, 2, 3, 1000, 70_001])
def test_scan_of_long_rows(length: int) -> None:
    """The doubling scan equals the loop for rows of any length, also across its chunks."""
    rng = np.random.default_rng(length)
    lengths = [length, 5, 1, 66_000, 7] if length > 1 else [1]
    x, a = rng.normal(size=sum(lengths)), rng.uniform(0.9, 1.0, sum(lengths))
    a[np.cumsum(lengths) - 1] = 0.0
    y = x.copy()
    for t in range(x.size - 2, -1, -1):
        y[t] += a[t] * y[t + 1]
    np.testing.assert_allclose(returns.reverse_scan(x.copy(), a.copy()), y, rtol=1e-9, atol=1e-9)


def test_one_long_row_beside_short_ones() -> None:
    """Memory and time follow the number of tokens, not the longest row times the rows."""
    result = adv.discounted_returns([np.ones(300_000), *[np.ones(2)] * 2_000])
    assert (result[0][0], result[-1].tolist()) == (300_000, [2.0, 1.0])
