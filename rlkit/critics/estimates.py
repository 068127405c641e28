"""From trajectories and a critic to the datums that train policy and critic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlkit import _check
from rlkit.advantages import gae, rebn
from rlkit.critics.protocol import Critic
from rlkit.errors import DataError
from rlkit.trajectory import Trajectory, datums
from rlkit.types import Datum

__all__ = ["gae_datums", "token_rewards"]


def gae_datums(
    critic: Critic,
    trajectories: Sequence[Trajectory],
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    rewards: Sequence[Any] | None = None,
    weights: Any = None,
    normalize: bool = True,
    split: str = "raise",
) -> list[Datum]:
    """The datums of these trajectories with generalised advantage estimates per token, for PPO with a critic.

    Each has ``advantages`` and ``sampling_logprobs`` for the policy's loss, and ``returns`` and ``old_values`` for the
    critic's, which are 0 at what is not the policy's own: prompts, tool replies, templates.

    Args:
        critic: asked once for the values of all of them.
        trajectories: those that are unscored or have no token give no datum.
        gamma, lam: of ``rlkit.advantages.gae``, per token.
        rewards: one [token_count] per trajectory, such as ``token_rewards`` with a KL penalty added; None:
            ``token_rewards``.
        weights: one number per trajectory, what ``token_weights`` gives for their ``token_count``; None: 1.
        normalize: advantages with mean 0 and deviation 1 over all tokens (``rebn``); the returns are as they are.
        split: as for ``rlkit.trajectory.datums``.

    Raises:
        DataError: lengths differ, or as for ``datums`` and ``gae``.
        ConfigError: a setting is out of range.

    >>> import rlkit
    >>> from rlkit.trajectory import Trajectory, Turn
    >>> value = rlkit.critic("toy", tokenizer=rlkit.connect("toy").tokenizer)  # 0 everywhere at first
    >>> played = Trajectory([Turn(rlkit.Sample([5, 6], [7, 8], [-0.5, -0.5]), reward=1.0)])
    >>> (datum,) = gae_datums(value, [played], gamma=0.5, lam=1.0, normalize=False)
    >>> datum.inputs["advantages"], datum.inputs["returns"]
    (array([0. , 0. , 0.5, 1. ], dtype=float32), array([0. , 0. , 0.5, 1. ], dtype=float32))

    Source: arXiv:1506.02438 and arXiv:1707.06347.
    """
    count = len(trajectories)
    if rewards is None:
        given = [token_rewards(t) for t in trajectories]
    else:
        given = [_check.as_array(f"rewards[{i}]", r, "numbers").astype(float) for i, r in enumerate(rewards)]
    scale = np.ones(count) if weights is None else _check.as_array("weights", weights, f"({count},)")
    if len(given) != count or scale.shape != (count,):
        what = f"has {len(given)} and weights has shape {scale.shape}"
        raise DataError(_check.problem("rewards", what, f"{count} of each", "one per trajectory"))
    for i, (reward, t) in enumerate(zip(given, trajectories, strict=True)):
        if reward.shape != (t.token_count,):
            what = f"has shape {reward.shape}"
            raise DataError(_check.problem(f"rewards[{i}]", what, f"({t.token_count},)", "one per action token"))
    used = [
        i for i, (t, r) in enumerate(zip(trajectories, given, strict=True)) if t.token_count and np.isfinite(r).all()
    ]
    if not used:
        return []
    parts = [datums(trajectories[i], split=split) for i in used]
    found = iter(critic.values([datum for part in parts for datum in part]).result())
    values = [np.concatenate([next(found)[datum.mask] for datum in part]).astype(float) for part in parts]
    advantages, returns = gae([given[i] for i in used], values=values, gamma=gamma, lam=lam)
    advantages = rebn(advantages) if normalize else advantages
    data: list[Datum] = []
    for i, a, r, v in zip(used, advantages, returns, values, strict=True):
        t = trajectories[i]
        inputs: dict[str, Any] = {"returns": t.per_turn(r), "old_values": t.per_turn(v)}
        if weights is not None:
            inputs["weights"] = float(scale[i])
        data += datums(t, t.per_turn(a), split=split, **inputs)
    return data


def token_rewards(trajectory: Trajectory) -> np.ndarray:
    """float64 [token_count]: each turn's reward at its last token, NaN where it is unscored.

    A nonterminal reward is added to the last token of all. Where the episode's reward is not the sum of what it got
    (another reduction, or a nonterminal override), it stands there alone. The reward of a turn without tokens goes to
    the token before it.

    >>> from rlkit import Sample
    >>> from rlkit.trajectory import Trajectory, Turn
    >>> first, second = Sample([5], [7, 8], [-0.5, -0.5]), Sample([5, 7, 8, 1], [9], [-1.0])
    >>> turns = [Turn(first, reward=0.25), Turn(second, reward=1.0)]
    >>> token_rewards(Trajectory(turns)), token_rewards(Trajectory(turns, reduction="max"))
    (array([0.  , 0.25, 1.  ]), array([0., 0., 1.]))
    """
    rewards = np.zeros(trajectory.token_count)
    if not rewards.size:
        return rewards
    cut = not trajectory.terminated
    if trajectory.reduction != "sum" or (cut and trajectory.nonterminal_override is not None):
        rewards[-1] = trajectory.reward
        return rewards
    ends = np.cumsum([turn.tokens.size for turn in trajectory.turns]) - 1
    np.add.at(rewards, np.maximum(ends, 0), trajectory.rewards)
    if cut and trajectory.nonterminal_reward is not None:
        rewards[-1] += trajectory.nonterminal_reward
    return rewards
