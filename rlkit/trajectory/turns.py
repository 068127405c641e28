"""What each token of a trajectory was rewarded with, and what each turn was told."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from rlkit.trajectory.types import Trajectory

__all__ = ["token_rewards", "turn_states"]


def token_rewards(trajectory: Trajectory) -> np.ndarray:
    """Return float64 [token_count]: each turn's reward at its last token, NaN where it is unscored.

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


def turn_states(trajectory: Trajectory) -> list[Hashable]:
    """Return what each turn was told since the one before: turns with equal states are comparable."""
    said: list[list[str]] = [[]]
    for message in trajectory.messages:
        if message.get("role") == "assistant":
            said.append([])
        else:
            said[-1].append(str(message.get("content")))
    if len(said) == len(trajectory.turns) + 1:  # each of the policy's messages is a turn, and there is one branch
        return [tuple(texts) for texts in said[:-1]]
    return [turn.prompt.tobytes() for turn in trajectory.turns]
