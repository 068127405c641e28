"""Laws of the estimators over time, and that masks let nothing through."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlkit.advantages as adv
from rlkit.advantages import returns
from tests.each import for_each
from tests.properties import examples

NAN, INF = float("nan"), float("inf")
laws = examples(50)
numbers = st.floats(-10, 10)
gammas = st.sampled_from([0.0, 0.5, 0.9, 1.0])


@st.composite
def trajectories(draw: st.DrawFn) -> tuple[list[list[float]], list[list[float]], list[float]]:
    """Rewards and values of some trajectories, and what follows them."""
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    row = lambda n: st.lists(numbers, min_size=n, max_size=n)  # noqa: E731
    rewards, values = [draw(row(n)) for n in lengths], [draw(row(n)) for n in lengths]
    return rewards, values, draw(row(len(lengths)))


def flat(result: Any) -> np.ndarray:
    return np.concatenate(result) if isinstance(result, list) else np.ravel(result)


@laws
@given(trajectories(), gammas)
def test_recursion(batch: Any, gamma: float) -> None:
    """G_t = r_t + gamma G_{t+1}, and the last one is followed by the bootstrap value."""
    rewards, _, boot = batch
    for r, g, b in zip(rewards, adv.discounted_returns(rewards, gamma=gamma, bootstrap_value=boot), boot, strict=True):
        np.testing.assert_allclose(g, np.array(r) + gamma * np.append(g[1:], b), atol=1e-9)


@laws
@given(trajectories(), gammas)
def test_gae_ends(batch: Any, gamma: float) -> None:
    """GAE with lam=1 is the return less the value, with lam=0 the one-step error; n-step returns agree with both."""
    rewards, values, boot = batch
    shared = {"values": values, "gamma": gamma, "bootstrap_value": boot}
    v = flat(values)
    returns = flat(adv.discounted_returns(rewards, gamma=gamma, bootstrap_value=boot))
    np.testing.assert_allclose(flat(adv.gae(rewards, lam=1.0, **shared)[0]), returns - v, atol=1e-9)
    one_step = flat(adv.n_step_returns(rewards, n=1, **shared))
    np.testing.assert_allclose(flat(adv.gae(rewards, lam=0.0, **shared)[0]), one_step - v, atol=1e-9)
    np.testing.assert_allclose(flat(adv.n_step_returns(rewards, n=12, **shared)), returns, atol=1e-9)
    for lam in (0.0, 0.3, 1.0):
        advantages, targets = adv.gae(rewards, lam=lam, **shared)
        np.testing.assert_allclose(flat(targets), flat(advantages) + v, atol=1e-12)
        np.testing.assert_allclose(flat(adv.lambda_returns(rewards, lam=lam, **shared)), flat(targets), atol=1e-9)


@laws
@given(trajectories(), gammas)
def test_vtrace_on_policy_is_gae(batch: Any, gamma: float) -> None:
    """With ratios of 1, V-trace targets are lambda returns; with lam=1 its advantages are those of GAE."""
    rewards, values, boot = batch
    shared = {"values": values, "gamma": gamma, "bootstrap_value": boot}
    zeros = [[0.0] * len(row) for row in rewards]
    for lam in (0.5, 1.0):
        _, targets = adv.vtrace(rewards, log_ratios=zeros, lam=lam, **shared)
        np.testing.assert_allclose(flat(targets), flat(adv.lambda_returns(rewards, lam=lam, **shared)), atol=1e-9)
    advantages, _ = adv.vtrace(rewards, log_ratios=zeros, **shared)
    np.testing.assert_allclose(flat(advantages), flat(adv.gae(rewards, lam=1.0, **shared)[0]), atol=1e-9)


@laws
@given(trajectories(), gammas)
def test_potential_shaping_telescopes(batch: Any, gamma: float) -> None:
    """Shaping changes the return from each step by the potential there, and by nothing else."""
    rewards, potentials, _ = batch
    shaped = adv.potential_shaping(rewards, potentials=potentials, gamma=gamma)
    after = flat(adv.discounted_returns(shaped, gamma=gamma))
    before = flat(adv.discounted_returns(rewards, gamma=gamma))
    np.testing.assert_allclose(after, before - flat(potentials), atol=1e-9)


@laws
@given(trajectories(), gammas)
def test_rows_do_not_see_each_other(batch: Any, gamma: float) -> None:
    """A trajectory gets the same bits alone and in a batch."""
    rewards, values, boot = batch
    together = adv.gae(rewards, values=values, gamma=gamma, bootstrap_value=boot)[0]
    for row, r, v, b in zip(together, rewards, values, boot, strict=True):
        np.testing.assert_array_equal(row, adv.gae(r, values=v, gamma=gamma, bootstrap_value=b)[0])


def below(numbers: Any) -> Any:
    """Numbers as logprobs."""
    return [below(x) if isinstance(x, list) else x - 20.0 for x in numbers]


def call(name: str, rewards: Any, values: Any, mask: Any = None) -> list[Any]:
    """Every function over time that takes a mask, as a list of results."""
    calls: dict[str, Callable[[], Any]] = {
        "discounted_returns": lambda: adv.discounted_returns(rewards, gamma=0.5, mask=mask, bootstrap_value=0.3),
        "gae": lambda: adv.gae(rewards, values=values, gamma=0.9, mask=mask, bootstrap_value=0.3),
        "lambda_returns": lambda: adv.lambda_returns(rewards, values=values, gamma=0.9, mask=mask),
        "n_step_returns": lambda: adv.n_step_returns(rewards, values=values, n=2, mask=mask, bootstrap_value=0.3),
        "vtrace": lambda: adv.vtrace(rewards, values=values, log_ratios=values, lam=0.7, mask=mask),
        "potential_shaping": lambda: adv.potential_shaping(rewards, potentials=values, mask=mask),
        "reinforce_pp": lambda: adv.reinforce_pp(rewards, kl=values, kl_coef=0.1, mask=mask),
        "remax": lambda: adv.remax(rewards, baseline=0.4, mask=mask),
        "rebn": lambda: adv.rebn(rewards, mask=mask),
        "on_policy_distillation": lambda: adv.on_policy_distillation(
            teacher_logprobs=below(values), sampling_logprobs=below(rewards), gamma=0.5, mask=mask
        ),
        "jsd": lambda: adv.jsd(teacher_logprobs=below(values), sampling_logprobs=below(rewards), mask=mask),
        "jsd_gradient": lambda: adv.jsd_gradient(
            teacher_logprobs=below(values), sampling_logprobs=below(rewards), mask=mask
        ),
        "kl_penalty": lambda: adv.kl_penalty(
            sampling_logprobs=below(rewards), reference_logprobs=below(values), center=True, mask=mask
        ),
        "entropy_bonus": lambda: adv.entropy_bonus(sampling_logprobs=below(rewards), mask=mask),
    }
    result = calls[name]()
    return list(result) if isinstance(result, tuple) else [result]


MASKED = [
    "discounted_returns",
    "gae",
    "lambda_returns",
    "n_step_returns",
    "vtrace",
    "potential_shaping",
    "reinforce_pp",
    "remax",
    "rebn",
    "on_policy_distillation",
    "jsd",
    "jsd_gradient",
    "kl_penalty",
    "entropy_bonus",
]


@pytest.mark.parametrize("name", MASKED)
@laws
@given(trajectories(), st.randoms(use_true_random=False), st.sampled_from([0.0, 7.0, NAN, INF]))
def test_inserted_masked_tokens_change_nothing(name: str, batch: Any, random: Any, junk: float) -> None:
    """Masked tokens may be put anywhere and hold anything, NaN too: the others keep their bits, they get 0."""
    rewards, values, _ = batch
    wide_r, wide_v, masks = [], [], []
    for r, v in zip(rewards, values, strict=True):
        mask = [1] * len(r)
        for _ in range(random.randint(0, 5)):
            mask.insert(random.randint(0, len(mask)), 0)
        places, rows = iter(range(len(r))), []
        for keep in mask:
            i = next(places) if keep else -1
            rows.append((r[i], v[i]) if keep else (junk, junk))
        wide_r.append([a for a, _ in rows])
        wide_v.append([b for _, b in rows])
        masks.append(mask)
    for before, after in zip(call(name, rewards, values), call(name, wide_r, wide_v, masks), strict=True):
        keep = flat([np.array(mask, bool) for mask in masks])
        np.testing.assert_array_equal(flat(list(after))[keep], flat(list(before)))
        assert (flat(list(after))[~keep] == 0.0).all()


@for_each("name", MASKED)
def test_all_masked(name: str) -> None:
    """A trajectory, or a whole batch, without a token that counts gives zeros."""
    for result in call(name, [[NAN, NAN], [1.0]], [[NAN, 1.0], [2.0]], [[0, 0], [1]]):
        np.testing.assert_array_equal(result[0], [0.0, 0.0])
    for result in call(name, [[NAN, NAN], [1.0]], [[NAN, 1.0], [2.0]], [[0, 0], [0]]):
        assert (flat(list(result)) == 0.0).all()


def test_vtrace_of_far_policies() -> None:
    """A ratio that no float64 holds is clipped like any other."""
    found = adv.vtrace([1.0], values=[0.0], log_ratios=[1e4], clip_rho=2.0, clip_pg_rho=3.0)
    assert [x.tolist() for x in found] == [[3.0], [2.0]]


def test_action_tool_action() -> None:
    """[action, tool, action] with gamma 0.5 and the reward at the end gives [0.5, -, 1]."""
    np.testing.assert_array_equal(adv.discounted_returns([0.0, 0.0, 1.0], gamma=0.5, mask=[1, 0, 1]), [0.5, 0.0, 1.0])


@laws
@given(st.lists(numbers, min_size=2, max_size=40), st.floats(-20, 20), st.floats(0.1, 10))
def test_rebn(returns: list[float], shift: float, scale: float) -> None:
    """ReBN has mean 0 and deviation 1, and does not change when returns are shifted or scaled."""
    r = np.array(returns)
    if r.max() - r.min() < 1e-2:
        return
    a = adv.rebn(r)
    assert abs(a.mean()) < 1e-9
    assert a.std(ddof=1) == pytest.approx(1.0, abs=1e-6)
    assert adv.rebn(r, ddof=0).std() == pytest.approx(1.0, abs=1e-6)
    np.testing.assert_allclose(adv.rebn(r * scale + shift), a, atol=1e-6)


def test_rebn_selects_first() -> None:
    """What does not count, masked or unscored, is in neither mean nor deviation; one return gives 0."""
    expected = adv.rebn([1.0, 3.0])
    np.testing.assert_array_equal(adv.rebn([1.0, NAN, 3.0])[[0, 2]], expected)
    np.testing.assert_array_equal(adv.rebn([1.0, 99.0, 3.0], mask=[1, 0, 1]), [expected[0], 0.0, expected[1]])
    np.testing.assert_array_equal(adv.rebn([5.0]), [0.0])
    np.testing.assert_array_equal(adv.rebn([[1.0], [3.0]]), expected[:, None])


def test_length_adaptive_lambda_is_a_lambda() -> None:
    """Short trajectories get 0, none a negative one."""
    lams = adv.length_adaptive_lambda(np.arange(1, 2000))
    assert (lams >= 0).all()
    assert (lams < 1).all()
    assert (np.diff(lams) >= 0).all()


def test_kl_penalty_of_far_policies() -> None:
    """k3 stays finite however far the policies are, and empty sequences are allowed among tokens."""
    penalty = adv.kl_penalty(sampling_logprobs=[[-5000.0], []], reference_logprobs=[[0.0], []], estimator="k3")
    assert np.isfinite(penalty[0]).all()
    assert penalty[1].size == 0
    for distance, counted in ((-200.0, 200.0), (-300.0, 300.0), (-400.0, 300.0)):  # log-ratios count as at most 300
        far = adv.kl_penalty(sampling_logprobs=[distance], reference_logprobs=[0.0], coef=1.0, estimator="k3")
        np.testing.assert_allclose(far, [-(math.exp(counted) - 1.0 + distance)], rtol=1e-12)
    far = adv.kl_penalty(sampling_logprobs=[-1e75], reference_logprobs=[0.0], coef=1.0, estimator="k2")
    np.testing.assert_allclose(far, [-0.5e150], rtol=1e-12)


def test_jsd_ends() -> None:
    """With beta 0 or 1 the mixture is one of the two, and the term 0."""
    for beta in (0.0, 1.0):
        np.testing.assert_array_equal(adv.jsd(teacher_logprobs=[-1.0], sampling_logprobs=[-9.0], beta=beta), [0.0])


@given(
    st.lists(st.floats(-12, -0.01), min_size=2, max_size=6),
    st.lists(st.floats(-12, -0.01), min_size=6, max_size=6),
    st.floats(0.05, 0.95),
)
def test_jsd_gradient(student: list[float], teacher: list[float], beta: float) -> None:
    """Exactly, over a small vocabulary: E[A grad log p] is minus the gradient of the divergence, by differences."""
    logits = np.array(student)
    t = np.exp(teacher[: logits.size] - np.logaddexp.reduce(teacher[: logits.size]))

    def divergence(x: np.ndarray) -> float:
        s = np.exp(x - np.logaddexp.reduce(x))
        m = beta * t + (1 - beta) * s
        return float(beta * (t * np.log(t / m)).sum() + (1 - beta) * (s * np.log(s / m)).sum())

    logp = logits - np.logaddexp.reduce(logits)
    a = adv.jsd_gradient(teacher_logprobs=np.log(t), sampling_logprobs=logp, beta=beta)
    p = np.exp(logp)
    expected = p * a - p * (p * a).sum()  # sum over tokens of p A (one-hot - p)
    h = 1e-5
    numeric = [(divergence(logits + h * e) - divergence(logits - h * e)) / (2 * h) for e in np.eye(logits.size)]
    assert expected == pytest.approx(-np.array(numeric), abs=1e-6)


@for_each("length", [1, 2, 3, 1000, 70_001])
def test_scan_of_long_rows(length: int) -> None:
    """The doubling scan equals the loop for rows of any length, also across its chunks."""
    rng = np.random.default_rng(length)
    lengths = [length, 5, 1, 66_000, 7] if length > 1 else [1]
    x = rng.normal(size=sum(lengths))
    ends = np.cumsum(lengths)
    a = rng.uniform(0.9, 1.0, x.size)
    a[ends - 1] = 0.0
    y, carry = np.empty(x.size), 0.0
    for t in range(x.size - 1, -1, -1):
        carry = x[t] + a[t] * carry
        y[t] = carry
    np.testing.assert_allclose(returns.reverse_scan(x.copy(), a.copy()), y, rtol=1e-9, atol=1e-9)
