"""Rollouts: from environments to trajectories, many episodes at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlkit._runtime import lazy_names
from rlkit.rollouts._ahead import AsyncRollouts, Replay, async_rollouts
from rlkit.rollouts._plan import Plan
from rlkit.rollouts.api import Rollouts, Stream, rollout, rollout_sync, stream

if TYPE_CHECKING:
    from rlkit.rollouts._ray import Ray

__all__ = [
    "AsyncRollouts",
    "Plan",
    "Ray",
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

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, {"Ray": "rlkit.rollouts._ray"}, renamed=True)
