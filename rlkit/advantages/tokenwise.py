"""Estimators whose advantages are normalised over tokens, or differ from token to token."""

from __future__ import annotations

import numpy as np

from rlkit import _check, _groups
from rlkit._forms import Arrays, RowsLike, row_wise
from rlkit._groups import Groups
from rlkit.advantages import _scan
from rlkit.advantages._registry import register
from rlkit.advantages._steps import Steps
from rlkit.errors import ConfigError

__all__ = ["reinforce_pp", "reinforce_pp_baseline", "remax"]


@register("reinforce_pp")
@row_wise
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
    """Discounted returns of per-token rewards less a KL penalty, normalised over the batch's tokens (REINFORCE++).

    G_t = r_t - kl_coef kl_t + gamma G_{t+1}, and A_t = (G_t - mean) / (standard deviation + eps) over all tokens

    Args:
        rewards: per token: one sequence [T], [B, T] or a list of [T_i]; usually 0 but at the last token.
        kl: shaped like ``rewards``: the KL estimate of each token, needed where kl_coef is not 0.
        kl_coef: >= 0.
        gamma: in [0, 1].
        mask: shaped like ``rewards``; masked tokens count nowhere, get 0, and the recursion passes over them.
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
    _groups.settings(ddof=ddof, eps=eps)
    steps = Steps.parse(rewards, mask=mask)
    x = steps.rewards.copy()
    if kl is not None:
        x -= kl_coef * steps.select("kl", kl)
    elif kl_coef != 0:
        raise ConfigError("kl", "is missing", f"one estimate per token with kl_coef={kl_coef}")
    returns = _scan.reverse_scan(x, steps.factors(gamma), steps.starts)
    return steps.restore(_groups.whiten(returns, ddof, eps))


@register("reinforce_pp_baseline")
@row_wise
def reinforce_pp_baseline(
    rewards: RowsLike, *, lengths: RowsLike, ddof: int = 1, eps: float = 1e-6, singleton: str = "zero"
) -> Arrays:
    """Rewards centred within their group, then normalised over the batch's tokens (REINFORCE++ baseline).

    B_i = R_i - mean of the group, and A_i = (B_i - mean) / (standard deviation + eps), in which B_i counts n_i times

    Args:
        rewards: as for ``grpo``.
        lengths: shaped like ``rewards``: tokens of each sample, integers >= 0.
        ddof, eps: of the normalisation over tokens.
        singleton: as for ``grpo``, for B.

    Returns:
        float64 in the form of ``rewards``. Since the mean over tokens is subtracted, a constant group beside others
        does not get 0; a batch of constant groups does.

    Raises:
        DataError: as for ``grpo``, or lengths are no integers >= 0 or shaped differently.
        ConfigError: a setting is out of range.

    >>> reinforce_pp_baseline([1.0, 0.0], lengths=[1, 3], ddof=0, eps=0.0).round(6)  # 0.5 once, -0.5 three times
    array([ 1.732051, -0.57735 ])

    Source: arXiv:2501.03262. Peers: verl and OpenRLHF weigh by tokens as here, rllm whitens over sequences.
    """
    _groups.settings(ddof=ddof, eps=eps, singleton=singleton)
    groups = Groups.parse(rewards)
    counts = np.where(groups.scored, _groups.lengths_like(groups, lengths), 0.0)
    centred = groups.apply_singleton(groups.deviations, singleton)
    return groups.rows.restore(groups.where_scored(_groups.whiten(centred, ddof, eps, counts=counts)))


@register("remax")
@row_wise
def remax(rewards: RowsLike, *, baseline: RowsLike, gamma: float = 1.0, mask: RowsLike | None = None) -> Arrays:
    """Return the discounted return of each token less the reward of the greedy completion (ReMax).

    A_t = G_t - baseline, with G_t = r_t + gamma G_{t+1}

    Args:
        rewards: per token: one sequence [T], [B, T] or a list of [T_i].
        baseline: the reward of the greedy completion of the same prompt: one number, or one per sequence [B].
        gamma: in [0, 1].
        mask: shaped like ``rewards``; masked tokens get 0 and the recursion passes over them.

    Raises:
        DataError: as for ``discounted_returns``; baselines are not as many, or not finite.
        ConfigError: gamma is out of range.

    >>> remax([[0.0, 1.0], [0.0, 0.5]], baseline=[0.25, 0.5])
    array([[0.75, 0.75],
           [0.  , 0.  ]])

    Source: arXiv:2310.10505. Peers: verl, Trinity.
    """
    gamma = _check.real("gamma", gamma, low=0.0, high=1.0)
    steps = Steps.parse(rewards, mask=mask)
    baselines = np.repeat(steps.per_trajectory("baseline", baseline), steps.lengths)
    returns = _scan.reverse_scan(steps.rewards.copy(), steps.factors(gamma), steps.starts)
    return steps.restore(returns - baselines)
