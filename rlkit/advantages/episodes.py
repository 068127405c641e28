"""Credit over the steps of episodes, and over the roles that play in them."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlkit import _check, _groups, _rows
from rlkit._calls import estimator
from rlkit._forms import Arrays, Labels, RowsLike, row_wise
from rlkit._groups import Groups
from rlkit.advantages import _scan
from rlkit.advantages._registry import register
from rlkit.advantages._steps import Steps
from rlkit.advantages.group import grpo
from rlkit.advantages.labelled import by_group
from rlkit.errors import DataError

__all__ = ["gigpo", "hierarchical_grpo", "step_wise_grpo"]


@register("step_wise_grpo")
@estimator
def step_wise_grpo(
    rewards: RowsLike,
    steps: RowsLike,
    *,
    step_norm: bool = False,
    scale: str = "group",
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: str = "zero",
) -> Any:
    """Return the GRPO advantage of each trajectory's last reward, given to each of its steps.

    Args:
        rewards: the reward of each trajectory's last step, as for ``grpo``.
        steps: shaped like ``rewards``: how many steps each trajectory has, integers >= 1.
        step_norm: whether to divide by the number of steps.
        scale, ddof, eps, singleton: as for ``grpo``.

    Returns:
        For one group a list of float64 arrays, one per trajectory, as long as it has steps; for several groups a
        list of such lists.

    Raises:
        DataError: as for ``grpo``; steps are no integers >= 1 or shaped differently.
        ConfigError: as for ``grpo``.

    >>> step_wise_grpo([1.0, 3.0], [1, 2], eps=0.0, step_norm=True)[1].round(6)  # 0.707107 over two steps
    array([0.353553, 0.353553])

    Source: none of its own; the estimator of multi-step rollouts in Trinity, rllm and ROLL.
    """
    step_norm = _check.flag("step_norm", step_norm)
    _groups.settings(ddof=ddof, eps=eps, singleton=singleton)
    groups = Groups.parse(rewards)
    counts = groups.rows.like("steps", steps)
    bad = np.flatnonzero(~((counts >= 1) & (counts == np.floor(counts)) & (counts < 2**31)))
    if bad.size:
        raise DataError(groups.rows.name(int(bad[0]), "steps"), f"is {counts[bad[0]]}", "an integer >= 1")
    scored = grpo(rewards, scale=scale, ddof=ddof, eps=eps, singleton=singleton)
    advantages = groups.rows.like("rewards", scored)
    if step_norm:
        advantages = advantages / counts
    lengths = counts.astype(np.int64)
    trajectories = _rows.Rows("rewards", np.repeat(advantages, lengths), lengths, "list")
    arrays = trajectories.restore(trajectories.flat)
    if groups.rows.form == "one":
        return arrays
    return [arrays[a:b] for a, b in zip(groups.rows.starts.tolist(), groups.rows.ends.tolist(), strict=True)]


@register("gigpo")
@row_wise
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
        float64 in the form of ``rewards``. A state met once, and a single episode, contribute 0.

    Raises:
        DataError: rewards are not finite, or states are no hashable keys or not as many.
        ConfigError: a setting is out of range.

    >>> gigpo([[0.0, 1.0], [0.0]], [["start", "end"], ["start"]], scale="none")  # episodes +-0.5, "start" +-0.5
    [array([1. , 0.5]), array([-1.])]

    Source: arXiv:2505.10978. Peers: Trinity, ROLL; Trinity's default is scale="none".
    """
    omega = _check.real("omega", omega, low=0.0)
    gamma = _check.real("gamma", gamma, low=0.0, high=1.0)
    _check.choice("scale", scale, ("group", "none"))
    steps = Steps.parse(rewards)
    keys = _states(steps.rows, states)
    episodes = grpo(steps.rows.sum(steps.rewards), scale=scale, ddof=ddof, eps=eps)
    returns = _scan.reverse_scan(steps.rewards.copy(), steps.factors(gamma), steps.starts)
    local = by_group(grpo, returns, keys, scale=scale, ddof=ddof, eps=eps)
    return steps.restore(np.repeat(episodes, steps.lengths) + omega * local)


@register("hierarchical_grpo")
@estimator
def hierarchical_grpo(rewards: RowsLike, roles: Labels, groups: Labels, *, singleton: str = "zero") -> Any:
    """Rewards minus the mean of those with the same role in the same group, for episodes that several roles play.

    Args:
        rewards: flat [N], as for ``by_group``.
        roles: [N] labels, such as "proposer" and "solver".
        groups: [N] labels, such as the prompt's.
        singleton: as for ``grpo``.

    Returns:
        float64 [N].

    Raises:
        DataError, ConfigError: as for ``by_group``.

    >>> hierarchical_grpo([1.0, 0.0, 5.0, 3.0], ["a", "a", "b", "b"], ["q", "q", "q", "q"])
    array([ 0.5, -0.5,  1. , -1. ])

    Source: none of its own; prime-rl's estimator for episodes of several agents.
    """
    flat = _rows.vector("rewards", rewards)
    role_codes, _ = _rows.labels("roles", roles, flat.size)
    group_codes, count = _rows.labels("groups", groups, flat.size)
    return by_group(grpo, flat, role_codes * count + group_codes, scale="none", singleton=singleton)


def _states(rows: _rows.Rows, states: Any) -> list[Any]:
    expected = "one hashable state per step"
    if isinstance(states, (str, bytes)) or not hasattr(states, "__len__"):
        raise DataError("states", f"got {_check.shown(states)}", expected)
    listed = [states] if rows.form == "one" else list(states)
    if len(listed) != rows.lengths.size:
        raise DataError("states", f"has {len(listed)} episodes", f"{rows.lengths.size}", f"shaped like {rows.where}")
    keys: list[Any] = []
    for row, (episode, length) in enumerate(zip(listed, rows.lengths.tolist(), strict=True)):
        _rows.labels(rows.row_name(row, "states"), episode, length, why="one state per step")
        keys += np.asarray(episode).tolist() if hasattr(episode, "__array__") else list(episode)
    return keys
