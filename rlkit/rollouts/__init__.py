"""Rollouts: from environments to trajectories, many episodes at a time."""

from __future__ import annotations

from rlkit.rollouts.api import Rollouts, Stream, rollout, rollout_sync, stream
from rlkit.rollouts.plan import Plan

__all__ = ["Plan", "Rollouts", "Stream", "rollout", "rollout_sync", "stream"]
