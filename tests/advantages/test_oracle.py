"""Each estimator against the plain loops of oracle.py, on random ragged batches with ties and unscored rewards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rlkit.advantages as adv
from tests.advantages import oracle
from tests.each import for_each
from tests.golden import assert_close

NAN = float("nan")


def batch(seed: int, *, binary: bool = False, positive: bool = False, low: int = 1) -> list[list[float]]:
    """Groups of different sizes; some constant, some with unscored rewards, some with ties."""
    rng = np.random.default_rng(seed)
    groups: list[list[float]] = []
    for _ in range(12):
        size = int(rng.integers(low, 9))
        rewards = rng.integers(0, 2, size).astype(float) if binary else rng.normal(size=size).round(1)
        rewards = np.abs(rewards) if positive else rewards
        if rng.random() < 0.2:
            rewards[:] = rewards[0]
        rewards[rng.random(size) < (0.2 if rng.random() < 0.5 else 0.0)] = NAN
        groups.append(rewards.tolist())
    return groups


def lengths_of(groups: list[list[float]], seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed + 1000)
    return [rng.integers(0, 6, len(group)).tolist() for group in groups]


PLAIN: list[tuple[str, dict[str, Any]]] = [
    ("grpo", {}),
    ("grpo", {"ddof": 0, "eps": 0.0}),
    ("grpo", {"scale": "batch"}),
    ("grpo", {"scale": "none"}),
    ("rloo", {}),
    ("loo_std", {}),
    ("loo_std", {"eps": 0.0}),
    ("gpg", {}),
    ("gpg", {"count": "groups", "f_norm": 2.0}),
    ("opmd", {}),
    ("opmd", {"baseline": "logavgexp", "tau": 0.7}),
    ("asymre", {}),
    ("asymre", {"shift": 0.3}),
    ("rec", {}),
    ("rec", {"normalize": True}),
    ("reinforce", {}),
    ("reinforce", {"normalize": True}),
    ("pass_at_k", {}),
    ("pass_at_k", {"scale": "none"}),
]


@for_each("seed", range(4))
@for_each(("name", "settings"), PLAIN, ids=[f"{n}-{'-'.join(map(str, s.values()))}" for n, s in PLAIN])
def test_group_estimators(name: str, settings: dict[str, Any], seed: int) -> None:
    """Group estimators equal the loops, for groups of any size and with unscored rewards."""
    groups = batch(seed)
    assert_close(adv.registry[name](groups, **settings), getattr(oracle, name)(groups, **settings), rtol=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_dr_grpo_is_grpo_without_division(seed: int) -> None:
    """dr_grpo centres and does nothing else."""
    assert_close(adv.dr_grpo(batch(seed)), oracle.grpo(batch(seed), "none"), rtol=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_maxrl(seed: int) -> None:
    """maxrl equals the loop for rewards >= 0."""
    groups = batch(seed, positive=True)
    assert_close(adv.maxrl(groups), oracle.maxrl(groups), rtol=1e-9)


@for_each("seed", range(4))
@for_each("name", ["opo", "reinforce_pp_baseline"])
def test_weighted_by_length(name: str, seed: int) -> None:
    """Estimators that take lengths count a sample once per token, and empty or unscored samples not at all."""
    groups = batch(seed)
    lengths = lengths_of(groups, seed)
    assert_close(adv.registry[name](groups, lengths=lengths), getattr(oracle, name)(groups, lengths), rtol=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_gdpo(seed: int) -> None:
    """gdpo normalises each component by itself, adds them up and normalises the batch; unscored parts add nothing."""
    groups = batch(seed)
    rng = np.random.default_rng(seed)
    other = [[NAN if rng.random() < 0.1 else float(rng.normal()) for _ in group] for group in groups]
    result = adv.gdpo([groups, other], weights=[1.0, 0.3])
    assert_close(result, oracle.gdpo([groups, other], [1.0, 0.3]), rtol=1e-9)


@for_each("k", [1, 2, 3])
@for_each("seed", range(3))
def test_pass_at_k_analytic(seed: int, k: int) -> None:
    """The closed form equals GRPO over all subsets, written out."""
    groups = batch(seed, binary=True, low=3)
    expected = oracle.pass_at_k_analytic(groups, k)
    assert_close(adv.pass_at_k(groups, method="analytic", k=k), expected, rtol=1e-9)


@for_each(("baseline", "k"), [("none", 1), ("none", 3), ("loo_minus_one", 2), ("loo_minus_one", 4)])
@for_each("seed", range(3))
def test_pkpo(seed: int, baseline: str, k: int) -> None:
    """pkpo equals the sum over all subsets, written out."""
    groups = batch(seed, low=k)
    assert_close(adv.pkpo(groups, k=k, baseline=baseline), oracle.pkpo(groups, k, baseline), rtol=1e-9)


def rows(seed: int) -> list[list[float]]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=int(rng.integers(1, 40))).tolist() for _ in range(7)]


def like(nested: list[list[float]], seed: int) -> list[list[float]]:
    rng = np.random.default_rng(seed + 77)
    return [rng.normal(size=len(row)).tolist() for row in nested]


@for_each("gamma", [0.0, 0.3, 0.99, 1.0])
@for_each("seed", range(3))
def test_returns(seed: int, gamma: float) -> None:
    """Discounted returns and everything built on them equal the backward loops."""
    r, v, boot = rows(seed), like(rows(seed), 1), like([[0.0] * 7], seed)[0]
    trio = list(zip(r, v, boot, strict=True))
    assert_close(
        adv.discounted_returns(r, gamma=gamma, bootstrap_value=boot), [oracle.returns(x, gamma, b) for x, _, b in trio]
    )
    for lam in (0.0, 0.5, 1.0):
        found = adv.gae(r, values=v, gamma=gamma, lam=lam, bootstrap_value=boot)
        wanted = [oracle.gae(x, y, gamma, lam, b) for x, y, b in trio]
        assert_close(found[0], [a for a, _ in wanted])
        assert_close(found[1], [g for _, g in wanted])
        assert_close(
            adv.lambda_returns(r, values=v, gamma=gamma, lam=lam, bootstrap_value=boot),
            [oracle.lambda_returns(x, y, gamma, lam, b) for x, y, b in trio],
        )
    for n in (1, 2, 3, 7, 100):
        assert_close(
            adv.n_step_returns(r, values=v, n=n, gamma=gamma, bootstrap_value=boot),
            [oracle.n_step_returns(x, y, n, gamma, b) for x, y, b in trio],
        )


@for_each("gamma", [0.0, 0.9, 1.0])
@for_each(("lam", "rho", "pg"), [(1.0, 1.0, 1.0), (0.5, 2.0, 1.5), (0.0, 0.5, 3.0)])
def test_vtrace(gamma: float, lam: float, rho: float, pg: float) -> None:
    """V-trace equals the backward loop."""
    r, v, w, boot = rows(5), like(rows(5), 1), like(rows(5), 2), like([[0.0] * 7], 5)[0]
    settings = {"gamma": gamma, "lam": lam, "clip_rho": rho, "clip_pg_rho": pg}
    found = adv.vtrace(r, values=v, log_ratios=w, bootstrap_value=boot, **settings)
    wanted = [oracle.vtrace(x, y, z, gamma, lam, rho, pg, b) for x, y, z, b in zip(r, v, w, boot, strict=True)]
    assert_close(found[0], [a for a, _ in wanted])
    assert_close(found[1], [t for _, t in wanted])


def test_lam_per_trajectory() -> None:
    """gae takes one lam for each trajectory, as length_adaptive_lambda gives them."""
    r, v = rows(1), like(rows(1), 1)
    lams = adv.length_adaptive_lambda([len(row) for row in r], alpha=0.3)
    found, _ = adv.gae(r, values=v, lam=lams, gamma=0.9)
    assert_close(found, [oracle.gae(x, y, 0.9, lam, 0.0)[0] for x, y, lam in zip(r, v, lams.tolist(), strict=True)])


def test_token_functions() -> None:
    """Token functions equal their formulas."""
    q, t = ([[-abs(x) for x in row] for row in like(rows(2), seed)] for seed in (3, 4))
    flat = np.concatenate(q) - np.concatenate(t)
    k3 = np.concatenate(adv.kl_penalty(sampling_logprobs=q, reference_logprobs=t, coef=0.3, estimator="k3"))
    rounding = {"rtol": 1e-9, "atol": 4e-15}  # of terms near 1 that cancel one another
    np.testing.assert_allclose(k3, -0.3 * (np.exp(-flat) - 1 + flat), **rounding)
    bounded = np.concatenate(adv.kl_penalty(sampling_logprobs=q, reference_logprobs=t, coef=0.3, estimator="clamped"))
    np.testing.assert_allclose(bounded, k3, rtol=1e-12, atol=0)  # nothing is as far as its bounds
    far = adv.kl_penalty(
        sampling_logprobs=[-1.0, -40.0], reference_logprobs=[-40.0, -1.0], coef=1.0, estimator="clamped"
    )
    assert far.tolist() == [-10.0, -10.0]
    absolute = adv.kl_penalty(sampling_logprobs=q, reference_logprobs=t, coef=0.3, estimator="abs", center=True)
    np.testing.assert_allclose(np.concatenate(absolute), -0.3 * (np.abs(flat) - np.abs(flat).mean()), atol=1e-12)
    distilled = adv.on_policy_distillation(teacher_logprobs=t, sampling_logprobs=q, coef=2.0, clip=1.0, gamma=0.5)
    clipped = [np.clip(2.0 * (np.array(b) - np.array(a)), -1, 1).tolist() for a, b in zip(q, t, strict=True)]
    assert_close(distilled, [oracle.returns(row, 0.5) for row in clipped])
    mixture = np.log(0.2 * np.exp(np.concatenate(t)) + 0.8 * np.exp(np.concatenate(q)))
    terms = 0.2 * (np.concatenate(t) - mixture) + 0.8 * (np.concatenate(q) - mixture)
    found = np.concatenate(adv.jsd(teacher_logprobs=t, sampling_logprobs=q, beta=0.2, coef=1.5))
    np.testing.assert_allclose(found, -1.5 * terms, **rounding)
    found = np.concatenate(adv.jsd_gradient(teacher_logprobs=t, sampling_logprobs=q, beta=0.2, coef=1.5))
    np.testing.assert_allclose(found, -1.5 * 0.8 * (np.concatenate(q) - mixture), **rounding)
