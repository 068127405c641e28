"""Rewards that compare: a group's episodes are scored together, once all of them have ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from rlkit.envs import Task
from rlkit.envs.calling import call, scores
from rlkit.trajectory import Trajectory

__all__ = ["scored"]


async def scored(task: Task, members: Mapping[int, Trajectory], chat: Any, *, timeout: float) -> dict[int, Trajectory]:
    """The trajectories, with what ``task.score`` gives for their last actions added to the reward of their last turns.

    Raises:
        EnvError: the scores are not one finite number per trajectory.
        EnvTimeout: they did not come within ``timeout`` seconds.
        Exception: whatever the function raised.
    """
    last = [trajectory.turns[-1] for trajectory in members.values()]
    actions = [await call(chat.action, turn.tokens, turn.stop_reason, where="chat") for turn in last]
    rewards = await scores(task, actions, timeout=timeout)
    return {
        member: attrs.evolve(
            trajectory, turns=(*trajectory.turns[:-1], attrs.evolve(turn, reward=turn.reward + reward))
        )
        for (member, trajectory), turn, reward in zip(members.items(), last, rewards, strict=True)
    }
