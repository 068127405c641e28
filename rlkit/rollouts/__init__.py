"""Rollouts: from environments to trajectories, many episodes at a time."""

from __future__ import annotations

from rlkit.rollouts._ahead import AsyncRollouts, Replay, async_rollouts
from rlkit.rollouts._plan import Plan
from rlkit.rollouts.api import Rollouts, Stream, rollout, rollout_sync, stream

__all__ = [
    "AsyncRollouts",
    "Plan",
    "Replay",
    "Rollouts",
    "Stream",
    "async_rollouts",
    "rollout",
    "rollout_sync",
    "stream",
]

for _public in (AsyncRollouts, Plan, Replay, Rollouts, Stream, async_rollouts, rollout, rollout_sync, stream):
    _public.__module__ = __name__  # where users import them from
