"""Each estimator against reference values, and against the plain loops of oracle.py on random ragged batches."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import rlkit.advantages as adv
from tests.advantages import oracle
from tests.each import for_each
from tests.golden import COPY, SHARED, Case, assert_close, cases, each_case

pytestmark = pytest.mark.filterwarnings("ignore:rewards. every group has one member")
NAN = float("nan")
PAIRS = {"gae": ("advantages", "returns"), "vtrace": ("advantages", "targets")}
FAMILIES = ("advantages_group", "advantages_time", "advantages_tokens", "token_weights")


@each_case([case for family in FAMILIES for case in cases(family)])
def test_reference_values(case: Case) -> None:
    """An estimator gives what the independent reference and the peers named in ``source`` give."""
    function = case.find("rlkit.advantages")
    if case.function == "running_baseline":
        baseline = function(**case.settings)
        result = [baseline.update(*batch) for batch in zip(case.inputs["rewards"], case.inputs["roles"], strict=True)]
    else:
        result = function(**case.inputs, **case.settings)
    if case.function in PAIRS:
        result = dict(zip(PAIRS[case.function], result, strict=True))
    assert_close(result, case.expected["value"])


@pytest.mark.skipif(not SHARED.is_dir(), reason="the originals are not beside this repository")
def test_copy_is_the_original() -> None:
    """The copy under tests/golden holds the same values as the originals."""
    names = sorted(path.name for path in SHARED.glob("*.json"))
    assert names == sorted(path.name for path in COPY.glob("*.json"))
    for name in names:
        assert json.loads((COPY / name).read_text()) == json.loads((SHARED / name).read_text())


def batch(seed: int, *, kind: str = "any", low: int = 1) -> list[list[float]]:
    """Return groups of different sizes: some are constant, some have ties or unscored rewards, one has no other."""
    rng = np.random.default_rng(seed)
    groups: list[list[float]] = []
    for _ in range(12):
        size = int(rng.integers(low, 9))
        rewards = rng.integers(0, 2, size).astype(float) if kind == "binary" else rng.normal(size=size).round(1)
        rewards = np.abs(rewards) if kind == "positive" else rewards
        if rng.random() < 0.2:
            rewards[:] = rewards[0]
        rewards[rng.random(size) < (0.2 if rng.random() < 0.5 else 0.0)] = NAN
        groups.append(rewards.tolist())
    return [*groups, [NAN] * 4]


CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [  # estimator, settings, how the batch is drawn
    *[("grpo", settings, {}) for settings in ({}, {"ddof": 0, "eps": 0.0}, {"scale": "batch"}, {"scale": "none"})],
    *[(name, {}, {}) for name in ("dr_grpo", "rloo", "loo_std", "gpg", "opmd", "asymre", "rec", "reinforce")],
    *[("rec", {"normalize": True}, {}), ("reinforce", {"normalize": True}, {}), ("loo_std", {"eps": 0.0}, {})],
    *[("gpg", {"count": "groups", "f_norm": 2.0}, {}), ("opmd", {"baseline": "logavgexp", "tau": 0.7}, {})],
    *[("asymre", {"shift": 0.3}, {}), ("pass_at_k", {}, {}), ("pass_at_k", {"scale": "none"}, {})],
    *[(name, {"lengths": ...}, {}) for name in ("opo", "reinforce_pp_baseline")],
    ("maxrl", {}, {"kind": "positive"}),
    *[("pass_at_k", {"method": "analytic", "k": k}, {"kind": "binary", "low": 3}) for k in (1, 2, 3)],
    *[("pkpo", {"k": k, "baseline": "loo_minus_one" if k % 2 == 0 else "none"}, {"low": k}) for k in (1, 2, 3, 4)],
]


@for_each("seed", range(4))
@for_each(("name", "settings", "drawn"), CASES)
def test_group_estimators(name: str, settings: dict[str, Any], drawn: dict[str, Any], seed: int) -> None:
    """Group estimators equal the loops for groups of any size, with ties, constants and unscored rewards."""
    groups = batch(seed, **drawn)
    if "lengths" in settings:
        rng = np.random.default_rng(seed + 1000)
        settings = {"lengths": [rng.integers(0, 6, len(group)).tolist() for group in groups]}
    assert_close(adv.registry[name](groups, **settings), getattr(oracle, name)(groups, **settings), rtol=1e-9)


@for_each("seed", range(4))
def test_gdpo(seed: int) -> None:
    """gdpo normalises each component by itself, adds them up and normalises the batch; unscored parts add nothing."""
    groups, rng = batch(seed), np.random.default_rng(seed)
    other = [[NAN if rng.random() < 0.1 else float(rng.normal()) for _ in group] for group in groups]
    result = adv.gdpo([groups, other], weights=[1.0, 0.3])
    assert_close(result, oracle.gdpo([groups, other], [1.0, 0.3]), rtol=1e-9)


def rows(seed: int) -> list[list[float]]:
    """Return seven rows of the same lengths for every seed."""
    lengths, rng = np.random.default_rng(0).integers(1, 40, size=7), np.random.default_rng(seed + 1)
    return [rng.normal(size=n).tolist() for n in lengths]


@for_each("gamma", [0.0, 0.3, 0.99, 1.0])
def test_returns(gamma: float) -> None:
    """Discounted returns and what is built on them equal the backward loops; each trajectory may have its lambda."""
    r, v, boot = rows(0), rows(1), [row[0] for row in rows(2)]
    given = {"gamma": gamma, "bootstrap_value": boot}
    found = adv.discounted_returns(r, **given)
    assert_close(found, [oracle.returns(x, gamma, b) for x, b in zip(r, boot, strict=True)])
    for lam in (0.0, 0.5, 1.0, adv.length_adaptive_lambda([len(row) for row in r], alpha=0.3)):
        lams = np.broadcast_to(lam, 7).tolist()
        wanted = [oracle.gae(x, y, gamma, each, b) for x, y, each, b in zip(r, v, lams, boot, strict=True)]
        advantages, targets = (list(part) for part in zip(*wanted, strict=True))
        assert_close(adv.gae(r, values=v, lam=lam, **given), [advantages, targets])
        assert_close(adv.lambda_returns(r, values=v, lam=lam, **given), targets)
    for n in (1, 2, 3, 7, 100):
        found = adv.n_step_returns(r, values=v, n=n, **given)
        assert_close(found, [oracle.n_step_returns(x, y, n, gamma, b) for x, y, b in zip(r, v, boot, strict=True)])


@for_each("gamma", [0.0, 0.9, 1.0])
@for_each(("lam", "rho", "pg"), [(1.0, 1.0, 1.0), (0.5, 2.0, 1.5), (0.0, 0.5, 3.0)])
def test_vtrace(gamma: float, lam: float, rho: float, pg: float) -> None:
    r, v, w, boot = rows(0), rows(1), rows(2), [row[0] for row in rows(3)]
    settings = {"gamma": gamma, "lam": lam, "clip_rho": rho, "clip_pg_rho": pg}
    found = adv.vtrace(r, values=v, log_ratios=w, bootstrap_value=boot, **settings)
    wanted = [oracle.vtrace(x, y, z, gamma, lam, rho, pg, b) for x, y, z, b in zip(r, v, w, boot, strict=True)]
    assert_close(found, [list(part) for part in zip(*wanted, strict=True)])


def test_token_functions() -> None:
    """Token functions equal their formulas."""
    q, t = ([[-abs(x) for x in row] for row in rows(seed)] for seed in (3, 4))
    flat = np.concatenate(q) - np.concatenate(t)
    k3 = np.concatenate(adv.kl_penalty(sampling_logprobs=q, reference_logprobs=t, coef=0.3, estimator="k3"))
    rounding = {"rtol": 1e-9, "atol": 4e-15}  # of terms near 1 that cancel one another
    np.testing.assert_allclose(k3, -0.3 * (np.exp(-flat) - 1 + flat), **rounding)
    bounded = np.concatenate(adv.kl_penalty(sampling_logprobs=q, reference_logprobs=t, coef=0.3, estimator="clamped"))
    np.testing.assert_allclose(bounded, k3, rtol=1e-12, atol=0)  # nothing is as far as its bounds
    far: dict[str, Any] = {"sampling_logprobs": [-1.0, -40.0], "reference_logprobs": [-40.0, -1.0], "coef": 1.0}
    assert adv.kl_penalty(**far, estimator="clamped").tolist() == [-10.0, -10.0]
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
    for end in (0.0, 1.0):  # where the mixture is one of the two
        np.testing.assert_array_equal(np.concatenate(adv.jsd(teacher_logprobs=t, sampling_logprobs=q, beta=end)), 0.0)
