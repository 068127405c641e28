"""Advantages over time: returns of steps and tokens, with and without a value function.

A trajectory is a row of rewards, one per step or token. A mask takes steps out before anything is computed, and their
results are 0: what is masked can neither leak into the others nor change a bit of them.
"""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from rlkit import _check
from rlkit._rows import (
    Arrays,
    Places,
    Rows,
    RowsLike,
    check_settings,
    fill_missing,
    is_one,
    list_labels,
    read_labels,
    whiten,
)
from rlkit.advantages.group import apply_singleton, read_rewards, register
from rlkit.errors import ConfigError, DataError

_CHUNK = 1 << 16  # steps computed together: few enough to stay in the cache


@attrs.frozen(eq=False)
class Steps:
    """The steps of trajectories that count, one after the other."""

    rows: Rows
    keep: Places  # which entries of the rows count, of [N]
    rewards: np.ndarray  # of those [n]
    filled: np.ndarray  # which trajectories have any [B]
    lengths: np.ndarray  # how many, of these [b]
    last: np.ndarray  # where in [n] they end [b]

    @classmethod
    def parse(
        cls, rewards: RowsLike, mask: RowsLike | None = None, *, where: str = "rewards", empty: bool = False
    ) -> Steps:
        """Read rewards, which have to be finite where the mask is 1; ``empty`` allows trajectories without steps."""
        rows = Rows.read(where, rewards, empty=empty)
        keep: Places = slice(None)
        lengths = rows.lengths
        if mask is not None:
            keep = rows.read_like("mask", mask, boolean=True)
            lengths = rows.sum(keep.astype(np.int64))
        rows.check_finite(where, rows.flat, among=keep)
        filled = lengths > 0
        return cls(rows, keep, rows.flat[keep], filled, lengths[filled], np.cumsum(lengths)[filled] - 1)

    def read(self, where: str, value: RowsLike) -> np.ndarray:
        """Read another array, shaped like the rewards [n]."""
        flat = self.rows.read_like(where, value)
        self.rows.check_finite(where, flat, among=self.keep)
        return flat[self.keep]

    def read_each(self, where: str, value: RowsLike | float) -> np.ndarray:
        """Read a number, or one for each trajectory [b]."""
        return np.asarray(self.rows.read_each(where, value)[self.filled])

    def read_lambda(self, lam: RowsLike | float) -> np.ndarray:
        """Read lambda: a number, or one for each trajectory, as a number [] or one for each step [n]."""
        each = self.rows.read_each("lam", lam)
        _check.require(((each >= 0) & (each <= 1)).all(), "lam", lam, "numbers in [0, 1]")
        return np.asarray(each[0]) if is_one(lam) else np.repeat(each[self.filled], self.lengths)

    def next(self, values: np.ndarray, end: float | np.ndarray) -> np.ndarray:
        """Return values[t + 1], and ``end`` [b] after the last step of a trajectory."""
        following = np.roll(values, -1)
        following[self.last] = end
        return following

    def accumulate(self, x: np.ndarray, factor: float | np.ndarray, end: float | np.ndarray = 0.0) -> np.ndarray:
        """Return y[t] = x[t] + factor[t] y[t + 1], with y = ``end`` [b] after the last step; overwrites x."""
        factors = np.full(x.shape, factor, np.float64)
        x[self.last] += factors[self.last] * end
        factors[self.last] = 0.0
        return reverse_scan(x, factors)

    def restore(self, values: np.ndarray) -> Arrays:
        """Return [n] in the form of the rewards, 0 where masked out."""
        if isinstance(self.keep, slice):
            return self.rows.restore(values)
        flat = np.zeros(self.rows.flat.size)
        flat[self.keep] = values
        return self.rows.restore(flat)


def reverse_scan(x: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Compute y[t] = x[t] + factors[t] y[t + 1]; the factor is 0 where a trajectory ends; overwrites both.

    By doubling: after each pass y[t] covers twice as many steps, and the factor those between. The scan takes
    log2(longest) passes of sums and products. A trajectory gets the same bits alone and in a batch.

    >>> reverse_scan(np.array([0.0, 0.0, 1.0]), np.array([0.5, 0.5, 0.0]))
    array([0.25, 0.5 , 1.  ])
    """
    cuts = np.flatnonzero(factors == 0) + 1
    cuts = np.unique(cuts[np.searchsorted(cuts, np.arange(_CHUNK, x.size, _CHUNK))])
    for y, factor in zip(np.split(x, cuts), np.split(factors, cuts), strict=True):
        step = 1
        while factor.any():  # which ends, since the last one is 0
            y[:-step] += factor[:-step] * y[step:]
            factor[:-step] *= factor[step:]
            step *= 2
    return x


@register("discounted_returns")
def discounted_returns(
    rewards: RowsLike, *, gamma: float = 1.0, bootstrap_value: RowsLike | float = 0.0, mask: RowsLike | None = None
) -> Arrays:
    """Return the discounted sum of the rewards from each step on.

    G_t = r_t + gamma G_{t+1}, and after the last reward G = bootstrap_value

    Args:
        rewards: one trajectory [T], equally long ones [B, T], or a list of [T_i]; finite.
        gamma: in [0, 1].
        bootstrap_value: the value of the state after the last reward: one number, or one per trajectory [B].
        mask: shaped like ``rewards``; where it is 0 the result is 0 and the recursion skips the step, whatever its
            reward.

    Returns:
        float64 in the form of ``rewards``.

    Raises:
        DataError: rewards are empty or not finite where the mask is 1, or shapes differ.
        ConfigError: gamma is out of range.

    >>> discounted_returns([0.0, 0.0, 1.0], gamma=0.5)
    array([0.25, 0.5 , 1.  ])
    >>> discounted_returns([0.0, 9.0, 1.0], gamma=0.5, mask=[1, 0, 1])  # action, tool reply, action
    array([0.5, 0. , 1. ])

    Source: Sutton and Barto, 2nd edition, equation 3.9. Peers: with masks verl carries the return across, as here;
    SkyRL starts again at a masked token, Trinity ignores the mask.
    """
    gamma = _check.real("gamma", gamma, low=0.0, high=1.0)
    steps = Steps.parse(rewards, mask)
    return steps.restore(steps.accumulate(steps.rewards, gamma, steps.read_each("bootstrap_value", bootstrap_value)))


@register("rebn")
def rebn(returns: RowsLike, *, ddof: int = 1, eps: float = 1e-9, mask: RowsLike | None = None) -> Arrays:
    """Normalise returns over the whole batch (return batch normalisation).

    A = (G - mean of the batch) / (standard deviation of the batch + eps)

    Args:
        returns: one row, rows of one length, or a list of rows; finite, or NaN for unscored: 0 in the result.
        ddof: 1 divides squares by n - 1 (unbiased), 0 by n.
        eps: >= 0.
        mask: shaped like ``returns``; where it is 0 a return counts nowhere and the result is 0.

    Returns:
        float64 in the form of ``returns``; exactly 0.0 everywhere when all returns are equal, or there is only one.
        Select first and normalise after: the trained samples are those that should have mean 0 and deviation 1.

    Raises:
        DataError: returns are empty, infinite or no numbers, or shapes differ.
        ConfigError: a setting is out of range.

    >>> rebn([[1.0, 2.0], [3.0]], eps=0.0)  # mean 2, deviation 1
    [array([-1.,  0.]), array([1.])]

    Source: GEM, arXiv:2510.01051. Peers: GEM and oat use the biased deviation, and NaN for a single return.
    """
    check_settings(ddof=ddof, eps=eps)
    rows = Rows.read("returns", returns)
    counted = np.ones(rows.flat.size, bool) if mask is None else rows.read_like("mask", mask, boolean=True)
    rows.check_finite("returns", rows.flat, nan=True, among=counted)
    counted &= ~np.isnan(rows.flat)
    result = np.zeros(rows.flat.size)
    result[counted] = whiten(rows.flat[counted], ddof, eps)
    return rows.restore(result)


@register("potential_shaping")
def potential_shaping(
    rewards: RowsLike, *, potentials: RowsLike, gamma: float = 1.0, mask: RowsLike | None = None
) -> Arrays:
    """Return rewards plus the discounted rise of a potential.

    r'_t = r_t + gamma phi_{t+1} - phi_t, with phi = 0 after the last step; the return from t changes by -phi_t

    Args:
        rewards: one trajectory [T], [B, T] or a list of [T_i]; finite.
        potentials: shaped like ``rewards``: phi of the state before each reward.
        gamma: in [0, 1], that of the returns.
        mask: shaped like ``rewards``; masked steps are 0 and passed over.

    Raises:
        DataError, ConfigError: as for ``discounted_returns``.

    >>> potential_shaping([0.0, 0.0, 1.0], potentials=[0.0, 0.5, 0.75])
    array([0.5 , 0.25, 0.25])

    Source: Ng, Harada and Russell (1999), theorem 1. Peers: none of the usual libraries has it.
    """
    gamma = _check.real("gamma", gamma, low=0.0, high=1.0)
    steps = Steps.parse(rewards, mask)
    phi = steps.read("potentials", potentials)
    return steps.restore(steps.rewards + gamma * steps.next(phi, 0.0) - phi)


@register("gae")
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
    steps = Steps.parse(rewards, mask)
    v, end = steps.read("values", values), steps.read_each("bootstrap_value", bootstrap_value)
    errors = steps.rewards + gamma * steps.next(v, end) - v
    advantages = steps.accumulate(errors, gamma * steps.read_lambda(lam))
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
    rows = Rows.vector("lengths", lengths)
    if rows.flat.size == 0:
        raise DataError("lengths", "is empty", "finite numbers > 0")
    rows.require("lengths", rows.flat, rows.flat > 0, "a number > 0")
    with np.errstate(over="ignore", divide="ignore"):
        return np.asarray(np.maximum(0.0, 1.0 - 1.0 / (alpha * rows.flat)))


@register("lambda_returns")
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
    steps = Steps.parse(rewards, mask)
    mix, end = steps.read_lambda(lam), steps.read_each("bootstrap_value", bootstrap_value)
    x = steps.rewards + gamma * (1.0 - mix) * steps.next(steps.read("values", values), end)
    return steps.restore(steps.accumulate(x, gamma * mix, end))


@register("n_step_returns")
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
    steps = Steps.parse(rewards, mask)
    v, end = steps.read("values", values), steps.read_each("bootstrap_value", bootstrap_value)
    left = np.repeat(np.cumsum(steps.lengths), steps.lengths) - np.arange(v.size)  # steps to the end, itself included
    after = np.where(left > n, np.roll(v, -n), np.repeat(end, steps.lengths))
    return steps.restore(_sum_window(steps.rewards, gamma, n, left) + gamma ** np.minimum(n, left) * after)


def _sum_window(x: np.ndarray, gamma: float, n: int, left: np.ndarray) -> np.ndarray:
    """Return the sum over k < n of gamma^k x[t + k], where ``left`` entries of the trajectory are left.

    Windows of 1, 2, 4, ... entries are put together by the binary digits of n, so nothing is ever subtracted.
    """
    block, total, size, covered = x, np.zeros_like(x), 1, 0
    n = min(n, x.size)
    while n:
        if n & 1:
            total += gamma**covered * np.where(left > covered, np.roll(block, -covered), 0.0)
            covered += size
        block = block + gamma**size * np.where(left > size, np.roll(block, -size), 0.0)
        size, n = 2 * size, n >> 1
    return total


@register("vtrace")
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
    steps = Steps.parse(rewards, mask)
    v, end = steps.read("values", values), steps.read_each("bootstrap_value", bootstrap_value)
    with np.errstate(over="ignore"):  # an infinite ratio is clipped like any other
        ratios = np.exp(steps.read("log_ratios", log_ratios))
    mix = steps.read_lambda(lam)
    following = steps.next(v, end)
    errors = np.minimum(ratios, clip_rho) * (steps.rewards + gamma * following - v)
    targets = v + steps.accumulate(errors, gamma * mix * np.minimum(ratios, 1.0))
    mixed = (1.0 - mix) * following + mix * steps.next(targets, end)
    advantages = np.minimum(ratios, clip_pg_rho) * (steps.rewards + gamma * mixed - v)
    return steps.restore(advantages), steps.restore(targets)


@register("reinforce_pp")
def reinforce_pp(
    rewards: RowsLike,
    *,
    kl: RowsLike | None = None,
    kl_coef: float = 0.0,
    gamma: float = 1.0,
    mask: RowsLike | None = None,
    ddof: int = 1,
    eps: float = 1e-6,
) -> Arrays:
    """Return discounted returns of per-token rewards less a KL penalty, normalised over the tokens (REINFORCE++).

    G_t = r_t - kl_coef kl_t + gamma G_{t+1}, and A_t = (G_t - mean) / (standard deviation + eps) over all tokens

    Args:
        rewards: per token: one sequence [T], [B, T] or a list of [T_i]; usually 0 but at the last token.
        kl: shaped like ``rewards``: the KL estimate of each token, needed where kl_coef is not 0.
        kl_coef: >= 0.
        gamma: in [0, 1].
        mask: shaped like ``rewards``; masked tokens do not count and get 0, and the recursion skips them.
        ddof, eps: of the normalisation.

    Raises:
        DataError: as for ``discounted_returns``.
        ConfigError: a setting is out of range, or kl is missing.

    >>> reinforce_pp([[0.0, 1.0], [0.0, -1.0]], eps=0.0, ddof=0)
    array([[ 1.,  1.],
           [-1., -1.]])

    Source: arXiv:2501.03262. Peers: verl carries the return across masked tokens as here, SkyRL starts again there,
    Trinity ignores the mask; OpenRLHF and NeMo use the biased deviation.
    """
    gamma = _check.real("gamma", gamma, low=0.0, high=1.0)
    kl_coef = _check.real("kl_coef", kl_coef, low=0.0)
    check_settings(ddof=ddof, eps=eps)
    if kl is None and kl_coef != 0:
        raise ConfigError("kl", "is missing", f"one estimate per token with kl_coef={kl_coef}")
    steps = Steps.parse(rewards, mask)
    x = steps.rewards if kl is None else steps.rewards - kl_coef * steps.read("kl", kl)
    return steps.restore(whiten(steps.accumulate(x, gamma), ddof, eps))


@register("reinforce_pp_baseline")
def reinforce_pp_baseline(
    rewards: RowsLike, *, lengths: RowsLike, ddof: int = 1, eps: float = 1e-6, singleton: str = "zero"
) -> Arrays:
    """Return rewards centred within their group, then normalised over the batch's tokens (REINFORCE++ baseline).

    B_i = R_i - mean of the group, and A_i = (B_i - mean) / (standard deviation + eps), in which B_i counts n_i times

    Args:
        rewards: as for ``grpo``.
        lengths: shaped like ``rewards``: tokens of each sample, integers >= 0.
        ddof, eps: of the normalisation over tokens.
        singleton: as for ``grpo``, for B.

    Returns:
        float64 in the form of ``rewards``. Since the mean over tokens is subtracted, a constant group among others
        does not get 0; a batch of constant groups does.

    Raises:
        DataError: as for ``grpo``, or lengths are not integers >= 0 or shaped differently.
        ConfigError: a setting is out of range.

    >>> reinforce_pp_baseline([1.0, 0.0], lengths=[1, 3], ddof=0, eps=0.0).round(6)  # 0.5 once, -0.5 three times
    array([ 1.732051, -0.57735 ])

    Source: arXiv:2501.03262. Peers: verl and OpenRLHF weigh by tokens as here, rllm whitens over sequences.
    """
    rows = read_rewards(rewards, ddof=ddof, eps=eps, singleton=singleton)
    unscored = np.isnan(rows.flat)
    times = np.where(unscored, 0.0, rows.read_counts("lengths", lengths))
    centred = apply_singleton(rows, rows.centre(rows.flat), singleton)
    return rows.restore(fill_missing(whiten(np.where(unscored, np.nan, centred), ddof, eps, times)))


@register("remax")
def remax(rewards: RowsLike, *, baseline: RowsLike | float, gamma: float = 1.0, mask: RowsLike | None = None) -> Arrays:
    """Return the discounted return of each token less the reward of the greedy completion (ReMax).

    A_t = G_t - baseline, with G_t = r_t + gamma G_{t+1}

    Args:
        rewards: per token: one sequence [T], [B, T] or a list of [T_i].
        baseline: the reward of the greedy completion of the same prompt: one number, or one per sequence [B].
        gamma: in [0, 1].
        mask: shaped like ``rewards``; masked tokens get 0 and the recursion skips them.

    Raises:
        DataError: as for ``discounted_returns``; baselines are not as many, or not finite.
        ConfigError: gamma is out of range.

    >>> remax([[0.0, 1.0], [0.0, 0.5]], baseline=[0.25, 0.5])
    array([[0.75, 0.75],
           [0.  , 0.  ]])

    Source: arXiv:2310.10505. Peers: verl, Trinity.
    """
    gamma = _check.real("gamma", gamma, low=0.0, high=1.0)
    steps = Steps.parse(rewards, mask)
    baselines = np.repeat(steps.read_each("baseline", baseline), steps.lengths)
    return steps.restore(steps.accumulate(steps.rewards, gamma) - baselines)


@register("gigpo")
def gigpo(
    rewards: RowsLike,
    states: object,
    *,
    omega: float = 1.0,
    gamma: float = 1.0,
    scale: str = "group",
    ddof: int = 1,
    eps: float = 1e-6,
) -> Arrays:
    """Return an episode's advantage plus omega times each step's among the steps from the same state (GiGPO).

    A_t = N(episode's summed reward, among the episodes) + omega N(discounted return from t, among the steps of all
    episodes that start in the state of t), where N centres and, with scale="group", divides by (deviation + eps)

    Args:
        rewards: per step, all episodes of one task: a list of [T_i], or [B, T].
        states: shaped like ``rewards``: hashable keys of the state before each step, such as its text.
        omega: >= 0, the weight of the step's part.
        gamma: in [0, 1], for the step's part only.
        scale: "group" or "none".
        ddof, eps: of the division.

    Returns:
        float64 in the form of ``rewards``. A state that occurs once, and a single episode, contribute 0.

    Raises:
        DataError: rewards are not finite, or states are not hashable keys or not as many.
        ConfigError: a setting is out of range.

    >>> gigpo([[0.0, 1.0], [0.0]], [["start", "end"], ["start"]], scale="none")  # episodes +-0.5, "start" +-0.5
    [array([1. , 0.5]), array([-1.])]

    Source: arXiv:2505.10978. Peers: Trinity, ROLL; Trinity's default is scale="none".
    """
    omega = _check.real("omega", omega, low=0.0)
    gamma = _check.real("gamma", gamma, low=0.0, high=1.0)
    _check.choice("scale", scale, ("group", "none"))
    check_settings(ddof=ddof, eps=eps)
    steps = Steps.parse(rewards)
    codes = _read_states(steps.rows, states)

    def compare(rows: Rows) -> np.ndarray:
        return rows.standardize(rows.flat, ddof, eps) if scale == "group" else rows.centre(rows.flat)

    totals = steps.rows.sum(steps.rewards)
    order = np.argsort(codes, kind="stable")
    local = np.empty(codes.size)
    local[order] = compare(Rows("", steps.accumulate(steps.rewards, gamma)[order], np.bincount(codes), "list"))
    return steps.restore(steps.rows.repeat(compare(Rows("", totals, np.array([totals.size]), "row"))) + omega * local)


def _read_states(rows: Rows, states: object) -> np.ndarray:
    """Return the state before each step as a number [N]."""
    episodes: Any = [states] if rows.form == "row" else states
    _check.entries("states", episodes, rows.lengths.size, "one list of states per episode")
    for row, (episode, length) in enumerate(zip(episodes, rows.lengths.tolist(), strict=True)):
        read_labels(rows.name_row(row, "states"), episode, length, why="one state per step")
    return read_labels("states", [state for episode in episodes for state in list_labels(episode)], rows.flat.size)
