"""Advantages relative to the other samples of the same prompt: the mean of the group is the baseline."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlkit import _check
from rlkit._forms import row_wise
from rlkit.advantages import _groups
from rlkit.advantages._groups import Groups
from rlkit.advantages._registry import register

__all__ = ["dr_grpo", "grpo", "rloo"]


@register("grpo")
@row_wise
def grpo(rewards: Any, *, scale: str = "group", ddof: int = 1, eps: float = 1e-6, singleton: str = "zero") -> Any:
    """Rewards centred within their group and divided by a standard deviation (GRPO).

    A_i = (R_i - mean of the group) / (s + eps)

    Args:
        rewards: one group [G], groups of one size [B, G], or a list of groups [G_i]; finite, or NaN for a sample
            that could not be scored: it counts neither in mean nor deviation, and its advantage is 0.
        scale: what s is: "group", the group's standard deviation; "batch", that of all scored rewards; "none",
            no division at all (Dr. GRPO).
        ddof: 1 divides squares by n - 1 (unbiased), 0 by n.
        eps: >= 0, added to the deviation.
        singleton: what a group of one scored reward gets: "zero", "raw" (its reward) or "error".

    Returns:
        float64 in the form of ``rewards``. A group whose scored rewards are all equal gets exactly 0.0.

    Raises:
        DataError: rewards are empty, infinite, no numbers, or (``singleton="error"``) alone in their group.
        ConfigError: a setting is out of range.

    >>> grpo([1.0, 0.0, 0.0, 0.0, 1.0], scale="none")
    array([ 0.6, -0.4, -0.4, -0.4,  0.6])
    >>> grpo([2.0, 4.0, 6.0], eps=0.0)  # mean 4, deviation 2
    array([-1.,  0.,  1.])
    >>> grpo([[0.9, 0.9], [0.1, 0.1, 0.1]])
    [array([0., 0.]), array([0., 0., 0.])]

    Source: DeepSeekMath, arXiv:2402.03300, section 4.1; scale="none" arXiv:2503.20783; scale="batch"
    arXiv:2508.08221. Peers: eps is 1e-4 in TRL, 1e-9 in OpenRLHF; verl gives a group of one its raw reward; rounding
    makes all of them return non-zero advantages for some constant groups.
    """
    _check.choice("scale", scale, ("group", "batch", "none"))
    _groups.settings(ddof=ddof, eps=eps, singleton=singleton)
    groups = Groups.parse(rewards)
    if scale == "group":
        advantages = groups.whitened(ddof, eps)
    elif scale == "none":
        advantages = groups.deviations
    else:
        advantages = _groups.whiten(groups.rewards[groups.scored], ddof, eps, centred=groups.deviations)
    return groups.finish(advantages, singleton)


@register("dr_grpo")
@row_wise
def dr_grpo(rewards: Any, *, singleton: str = "zero") -> Any:
    """Rewards minus the mean of their group, undivided (Dr. GRPO).

    A_i = R_i - mean of the group

    Args:
        rewards: as for ``grpo``.
        singleton: as for ``grpo``.

    Raises:
        DataError, ConfigError: as for ``grpo``.

    >>> dr_grpo([1.0, 0.0, 0.0, 1.0])
    array([ 0.5, -0.5, -0.5,  0.5])

    Source: arXiv:2503.20783. Peers: TRL's scale_rewards="none", verl's norm_adv_by_std_in_grpo=False; the paper's
    constant length is ``token_weights(mode="seq-mean-token-sum-norm")`` here.
    """
    return grpo(rewards, scale="none", singleton=singleton)


@register("rloo")
@row_wise
def rloo(rewards: Any, *, singleton: str = "zero") -> Any:
    """Each reward minus the mean of the others in its group (REINFORCE leave-one-out).

    A_i = R_i - mean of R_j over j != i = N / (N - 1) (R_i - mean of the group)

    Args:
        rewards: as for ``grpo``; N counts the scored ones.
        singleton: as for ``grpo``.

    Raises:
        DataError, ConfigError: as for ``grpo``.

    >>> rloo([1.0, 0.0, 0.5])  # the others' means are 0.25, 0.75, 0.5
    array([ 0.75, -0.75,  0.  ])

    Source: arXiv:2402.14740. Peers: for a group of one verl's loop and Trinity return the reward, verl's vectorised
    form and SkyRL return 0.
    """
    _groups.settings(singleton=singleton)
    groups = Groups.parse(rewards)
    factor = groups.sizes / np.maximum(groups.sizes - 1, 1)
    return groups.finish(groups.deviations * groups.rows.spread(factor), singleton)
