"""Estimators that use a value function."""

from __future__ import annotations

import numpy as np

from rlkit import _check, _rows
from rlkit._rows import Arrays, RowsLike, row_wise, two_row_wise
from rlkit.advantages._registry import register
from rlkit.advantages._returns import Steps, ahead, reverse_scan, window_sum
from rlkit.errors import DataError

__all__ = ["gae", "lambda_returns", "length_adaptive_lambda", "n_step_returns", "vtrace"]


@register("gae")
@two_row_wise
def gae(
    rewards: RowsLike,
    *,
    values: RowsLike,
    bootstrap_value: RowsLike | float = 0.0,
    mask: RowsLike | None = None,
    gamma: float = 1.0,
    lam: RowsLike | float = 0.95,
) -> tuple[Arrays, Arrays]:
    """Return generalised advantage estimates and the returns that the values should predict.

    d_t = r_t + gamma V_{t+1} - V_t, A_t = d_t + gamma lam A_{t+1}, returns = A + V; after the last step V is
    bootstrap_value and A is 0

    Args:
        rewards: one trajectory [T], [B, T] or a list of [T_i]; finite.
        values: shaped like ``rewards``: V before each reward.
        bootstrap_value: V after the last reward: one number, or one per trajectory [B]; 0 where an episode ended.
        mask: shaped like ``rewards``; masked steps are 0 in both results and passed over, so that the next value is
            that of the next step that counts.
        gamma: in [0, 1].
        lam: in [0, 1]: one number, or one per trajectory [B] (``length_adaptive_lambda``).

    Returns:
        (advantages, returns), float64 in the form of ``rewards``, not normalised.

    Raises:
        DataError: shapes differ, or a number that counts is not finite.
        ConfigError: gamma or lam is out of range.

    >>> gae([0.0, 0.0, 1.0], values=[0.5, 0.5, 0.5], lam=1.0)
    (array([0.5, 0.5, 0.5]), array([1., 1., 1.]))

    Source: arXiv:1506.02438, equation 16. Peers: verl, NeMo and AReaL pass over masked steps as here; OpenRLHF
    zeroes their values, SkyRL, Trinity and slime ignore the mask; most whiten right away.
    """
    gamma = _check.real("gamma", gamma, low=0.0, high=1.0)
    steps = Steps.parse(rewards, mask=mask, bootstrap_value=bootstrap_value)
    v = steps.select("values", values)
    errors = steps.rewards + gamma * steps.next(v) - v
    advantages = reverse_scan(errors, steps.factors(gamma * _lam(steps, lam)), steps.starts)
    return steps.restore(advantages), steps.restore(advantages + v)


@register("length_adaptive_lambda")
def length_adaptive_lambda(lengths: RowsLike, *, alpha: float = 0.05) -> np.ndarray:
    """Return the lambda of GAE for each trajectory, nearer to 1 for longer ones (VAPO).

    lam = max(0, 1 - 1 / (alpha n))

    Args:
        lengths: [B], > 0.
        alpha: > 0.

    Returns:
        float64 [B], for ``gae(lam=...)``.

    Raises:
        DataError: lengths are not finite numbers > 0.
        ConfigError: alpha is out of range.

    >>> length_adaptive_lambda([200, 1000])
    array([0.9 , 0.98])

    Source: arXiv:2504.05118, section 4.2, which uses it for the policy and 1 for the value. Peers: NeMo.
    """
    alpha = _check.real("alpha", alpha, above=0.0)
    n = _rows.vector("lengths", lengths)
    if n.size == 0:
        raise DataError("lengths", "is empty", "finite numbers > 0")
    _rows.require("lengths", n, (n > 0) & (n <= _rows.LARGEST), "finite numbers > 0")
    with np.errstate(over="ignore", divide="ignore"):
        return np.asarray(np.maximum(0.0, 1.0 - 1.0 / (alpha * n)))


@register("lambda_returns")
@row_wise
def lambda_returns(
    rewards: RowsLike,
    *,
    values: RowsLike,
    bootstrap_value: RowsLike | float = 0.0,
    mask: RowsLike | None = None,
    gamma: float = 1.0,
    lam: RowsLike | float = 0.95,
) -> Arrays:
    """Return lambda-returns, which average the n-step returns of all n.

    G_t = r_t + gamma ((1 - lam) V_{t+1} + lam G_{t+1}); after the last step V = G = bootstrap_value

    Args:
        rewards, values, bootstrap_value, mask, gamma, lam: as for ``gae``.

    Returns:
        float64 in the form of ``rewards``; equal to the returns of ``gae``.

    Raises:
        DataError, ConfigError: as for ``gae``.

    >>> lambda_returns([0.0, 1.0], values=[0.5, 0.5], lam=0.5)  # 0.5 * 0.5 + 0.5 * 1
    array([0.75, 1.  ])

    Source: Sutton and Barto, 2nd edition, equation 12.20. Peers: rlax's lambda_returns takes values[t + 1] as v_t.
    """
    gamma = _check.real("gamma", gamma, low=0.0, high=1.0)
    steps = Steps.parse(rewards, mask=mask, bootstrap_value=bootstrap_value)
    mix = _lam(steps, lam)
    following = steps.next(steps.select("values", values))
    x = steps.rewards + gamma * (1.0 - mix) * following
    x[steps.last] += gamma * mix[steps.last] * steps.bootstrap
    return steps.restore(reverse_scan(x, steps.factors(gamma * mix), steps.starts))


@register("n_step_returns")
@row_wise
def n_step_returns(
    rewards: RowsLike,
    *,
    values: RowsLike,
    n: int = 1,
    bootstrap_value: RowsLike | float = 0.0,
    mask: RowsLike | None = None,
    gamma: float = 1.0,
) -> Arrays:
    """Return the discounted rewards of n steps and the value after them.

    G_t = r_t + gamma r_{t+1} + ... + gamma^(n-1) r_{t+n-1} + gamma^n V_{t+n}; a window that reaches the end stops
    there, with bootstrap_value

    Args:
        rewards, values, bootstrap_value, mask, gamma: as for ``gae``.
        n: >= 1.

    Raises:
        DataError, ConfigError: as for ``gae``; n is out of range.

    >>> n_step_returns([1.0, 1.0, 1.0], values=[9.0, 9.0, 4.0], n=2, gamma=0.5)  # 1 + 0.5 + 0.25 * 4, 1 + 0.5, 1
    array([2.5, 1.5, 1. ])

    Source: Sutton and Barto, 2nd edition, equation 7.1. Peers: rlax's n_step_bootstrapped_returns.
    """
    gamma = _check.real("gamma", gamma, low=0.0, high=1.0)
    n = _check.integer("n", n, low=1)
    steps = Steps.parse(rewards, mask=mask, bootstrap_value=bootstrap_value)
    v = steps.select("values", values)
    returns = window_sum(steps.rewards, gamma, n, steps.left)
    inside = steps.left > n
    ends = np.repeat(steps.bootstrap, steps.lengths)
    after = np.where(inside, ahead(v, n, steps.left), ends)
    return steps.restore(returns + gamma ** np.minimum(n, steps.left) * after)


@register("vtrace")
@two_row_wise
def vtrace(
    rewards: RowsLike,
    *,
    values: RowsLike,
    log_ratios: RowsLike,
    bootstrap_value: RowsLike | float = 0.0,
    mask: RowsLike | None = None,
    gamma: float = 1.0,
    lam: RowsLike | float = 1.0,
    clip_rho: float = 1.0,
    clip_pg_rho: float = 1.0,
) -> tuple[Arrays, Arrays]:
    """Return advantages and value targets corrected for actions that another policy took (V-trace).

    v_t - V_t = rho_t (r_t + gamma V_{t+1} - V_t) + gamma c_t (v_{t+1} - V_{t+1})
    A_t = min(ratio, clip_pg_rho) (r_t + gamma ((1 - lam) V_{t+1} + lam v_{t+1}) - V_t)
    with rho = min(ratio, clip_rho), c = lam min(ratio, 1), ratio = exp(log_ratios)

    Args:
        rewards, values, bootstrap_value, mask, gamma, lam: as for ``gae``.
        log_ratios: shaped like ``rewards``: log pi - log mu of each action, mu being the policy that took it.
        clip_rho: > 0, changes the limit of the values.
        clip_pg_rho: > 0, of the advantages.

    Returns:
        (advantages, targets), float64 in the form of ``rewards``.

    Raises:
        DataError, ConfigError: as for ``gae``; a clip is out of range.

    >>> import math
    >>> vtrace([0.0, 1.0], values=[0.5, 0.5], log_ratios=[0.0, math.log(0.5)])  # targets 0.5 + 0.25, 0.5 + 0.5 * 0.5
    (array([0.25, 0.25]), array([0.75, 0.75]))

    Source: IMPALA, arXiv:1802.01561, equation 1. Peers: rlax's vtrace_td_error_and_advantage; torchrl has no lam in
    the advantages.
    """
    gamma = _check.real("gamma", gamma, low=0.0, high=1.0)
    clip_rho = _check.real("clip_rho", clip_rho, above=0.0)
    clip_pg_rho = _check.real("clip_pg_rho", clip_pg_rho, above=0.0)
    steps = Steps.parse(rewards, mask=mask, bootstrap_value=bootstrap_value)
    v = steps.select("values", values)
    with np.errstate(over="ignore"):  # an infinite ratio is clipped like any other
        ratios = np.exp(steps.select("log_ratios", log_ratios))
    mix = _lam(steps, lam)
    following = steps.next(v)
    errors = np.minimum(ratios, clip_rho) * (steps.rewards + gamma * following - v)
    above = reverse_scan(errors, steps.factors(gamma * mix * np.minimum(ratios, 1.0)), steps.starts)
    targets = v + above
    mixed = (1.0 - mix) * following + mix * steps.next(targets)
    advantages = np.minimum(ratios, clip_pg_rho) * (steps.rewards + gamma * mixed - v)
    return steps.restore(advantages), steps.restore(targets)


def _lam(steps: Steps, lam: RowsLike | float) -> np.ndarray:
    """Return lam at each step [n], from one number or one per trajectory."""
    per_trajectory = steps.per_trajectory("lam", lam)
    _check.require(not ((per_trajectory < 0) | (per_trajectory > 1)).any(), "lam", lam, "numbers in [0, 1]")
    return np.repeat(per_trajectory, steps.lengths)
