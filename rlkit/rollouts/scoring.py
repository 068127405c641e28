"""What an ended episode is worth: rewards that compare the episodes of a group, and episodes without any."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import attrs

from rlkit.envs import Task
from rlkit.envs.calling import call, scores
from rlkit.trajectory import Failure, Trajectory, Turn

__all__ = ["rewarded", "scored"]


def rewarded(trajectory: Trajectory, member: int) -> Trajectory | Failure:
    """Return the trajectory, or the failure that it is where no reward was given in all of it.

    Nothing says what such an episode was worth; 0 would be made up.
    """
    cut = trajectory.nonterminal_override is not None and not trajectory.terminated
    if trajectory.all_rewards.size or cut:
        return trajectory
    text = f"environment {trajectory.env!r}: gave no reward in the whole episode (None is none); expected one"
    return Failure(trajectory.env, "no_reward", text, "step", len(trajectory.turns), member)


async def scored(task: Task, members: Mapping[int, Trajectory], chat: Any, *, timeout: float) -> dict[int, Trajectory]:
    """Return the trajectories, with what ``task.score`` gives for their last actions added to their last rewards.

    Raises:
        EnvError: the scores are not one finite number per trajectory.
        EnvTimeout: they did not come within ``timeout`` seconds.
        Exception: whatever the function raised.
    """
    last = [trajectory.turns[-1] for trajectory in members.values()]
    reads = [functools.partial(chat.action, prompt=turn.prompt) for turn in last]
    actions = [await call(read, t.tokens, t.stop_reason, where="chat") for read, t in zip(reads, last, strict=True)]
    rewards = await scores(task, actions, timeout=timeout)
    return {
        member: attrs.evolve(trajectory, turns=(*trajectory.turns[:-1], _with(turn, reward)))
        for (member, trajectory), turn, reward in zip(members.items(), last, rewards, strict=True)
    }


def _with(turn: Turn, reward: float | None) -> Turn:
    """Return the turn with a reward added to its last one, or as its only one; None is no reward."""
    if reward is None:
        return turn
    if turn.rewards is None:
        return attrs.evolve(turn, reward=turn.reward + reward)
    last = turn.rewards[-1] if turn.rewards else 0.0
    return attrs.evolve(turn, reward=0.0, rewards=(*turn.rewards[:-1], last + reward))
